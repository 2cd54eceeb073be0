"""Gymnasium's Pendulum-v1. Written by hand, as an example of what a vision-language model is asked for."""

import numpy as np

SIZE = 50, 50  # of the frames, 10 of Gymnasium's pixels each


def height(pixels):
    """The cosine of the rod's angle: how far above the pivot is its red, on average?"""
    pixels = pixels.astype(np.float32)
    red = (pixels[..., 0] - pixels[..., 1] > 60).sum(2)
    row = (red * np.arange(50)).sum(1) / np.maximum(red.sum(1), 1)
    return (24.5 - row) / 5.65


def swings(frames):
    return height(frames) > -0.5


def half_way_up(frames):
    return height(frames) > 0


def above_the_pivot(frames):
    return height(frames) > 0.5


def nearly_upright(frames):
    return height(frames) > 0.85


def upright(frames):
    return height(frames) > 0.94

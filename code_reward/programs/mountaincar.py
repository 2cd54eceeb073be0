"""MountainCar with either textures. Written by hand, as an example of what a vision-language model is asked for."""

import numpy as np

SIZE = 64, 96  # of the frames, 6.25 of Gymnasium's pixels each


def place(pixels):
    """The column of the car, which alone has little green; black lines are thinner than a pixel, and so paler."""
    car = (pixels[..., 1] < 60).sum(1)
    return (car * np.arange(96)).sum(1) / np.maximum(car.sum(1), 1)


def half_way_up(frames):
    """Not earlier: near the valley the engine can hold the car, and an agent would stay where it is paid."""
    return place(frames) > 62


def near_the_flag(frames):
    return place(frames) > 77


def at_the_flag(frames):
    return place(frames) > 86.5

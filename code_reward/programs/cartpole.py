"""CartPole as Gymnasium draws it. Written by hand, as an example of what a vision-language model is asked for."""

import numpy as np

SIZE = 64, 96  # of the frames, 6.25 of Gymnasium's pixels each
AXLE = (400 - 107.5) / 6.25 - 0.5  # its row


def middle(amount):
    """Row and column of the middle of what there is in each picture (N, H, W)."""
    total = np.maximum(amount.sum((1, 2)), 1)
    row = (amount.sum(2) * np.arange(amount.shape[1])).sum(1) / total
    return row, (amount.sum(1) * np.arange(amount.shape[2])).sum(1) / total


def pole(pixels):
    """The pole alone is more red than blue."""
    return middle(np.maximum(pixels[..., 0].astype(np.int16) - pixels[..., 2], 0))


def cart(pixels):
    """Its column, from two rows of it below the track."""
    return middle(pixels[:, 48:50, :, 1] < 60)[1]


def pole_points_up(frames):
    return pole(frames)[0] < AXLE


def pole_is_upright(frames):
    """It leans by less than 12 degrees."""
    row, column = pole(frames)
    return np.abs(column - cart(frames)) < np.tan(np.radians(12)) * (AXLE - row)


def cart_is_well_inside(frames):
    """It is in the middle half of the picture."""
    return np.abs(cart(frames) - 47.5) < 24


def pole_is_vertical(frames):
    """It leans by less than 4 degrees."""
    row, column = pole(frames)
    return np.abs(column - cart(frames)) < np.tan(np.radians(4)) * (AXLE - row)

"""Scenes: n -> frames (n, 3, SIZE, SIZE) uint8, and what is known of them, name -> (n,), for captions.csv.

The scripts' own functions render them, for every batch anew (the humanoid's once, before the training).
"""

import math
from pathlib import Path

import numpy as np
import torch

import dqn_clip_cartpole as pole
import sac_clip_humanoid as humanoid
import sac_clip_mountaincar as car
from reward_check.states import frames_of_postures, humanoid_knowledge, humanoid_states

SIZE = 64  # pixels, frames are square
VISITED = Path(__file__).parent / "visited.npy"
IN_VIEW = 2.2  # m; farther out, a part of the cart is outside the picture


def cartpole(n: int, rng: np.random.Generator) -> tuple[torch.Tensor, dict]:
    """Cart-poles: a quarter within 8° of upright, a quarter within 25°, half at any angle; the cart anywhere.

    A 13th is at the track's ends, half of the cart outside the picture. Their captions say that it is cut off
    and nothing of the pole; without them a policy drove there, where an upright pole was rewarded as well.
    """
    angle = rng.uniform(-1, 1, n) * rng.choice([8, 25, 180, 180], size=n)
    x = rng.uniform(-2.6, 2.6, n).clip(-2.4, 2.4)
    states = np.stack([x, 0 * x, np.radians(angle), 0 * x], axis=1)
    place = np.floor((x + 2.4) / 0.96).clip(0, 4)  # fifths of the track
    cut = np.abs(x) > IN_VIEW + 0.03 * rng.standard_normal(n)  # judged by eye
    known = {"angle": angle, "tilt": np.abs(angle), "place": place, "cut": cut}
    return pole.render(torch.from_numpy(states), SIZE, SIZE), known


CARS = {k: car.Scene(SIZE, SIZE, k, torch.device("cpu")) for k in ("original", "realistic")}


def mountaincar(n: int, rng: np.random.Generator) -> tuple[torch.Tensor, dict]:
    """Cars anywhere on the track, a third of them near the flag; every second frame in either look."""
    x = np.where(rng.random(n) < 1 / 3, rng.uniform(0.2, 0.6, n), rng.uniform(-1.2, 0.6, n))
    states = torch.from_numpy(np.stack([x, 0 * x], axis=1))
    frames = torch.empty(n, 3, SIZE, SIZE, dtype=torch.uint8)
    frames[::2] = CARS["original"].render(states[::2])
    frames[1::2] = CARS["realistic"].render(states[1::2])
    x = x + 0.05 * rng.standard_normal(n)  # captions are judged by eye: no edge is sharp
    way = (x + math.pi / 6) / (car.X_GOAL + math.pi / 6)  # from the bottom of the valley to the goal
    return frames, {"x": x, "percent": 100 * way.clip(0, 1), "realistic": np.arange(n) % 2 == 1}


class Humanoids:
    """Humanoids in all kinds of poses, simulated and rendered once; each call is another random choice.

    Beside n simulated ones those in which policies were rewarded by earlier models: see visited.py.
    """

    def __init__(self, n: int, rng: np.random.Generator):
        visited = torch.from_numpy(np.load(VISITED)).float()
        states = torch.cat([humanoid_states(n, rng, visited), visited])
        n = len(states)
        states = states[torch.from_numpy(rng.permutation(n))]
        looks = [(textures, view) for view in ("fixed", "original") for textures in ("realistic", "original")]
        ends = (n * np.array([0, 0.7, 0.8, 0.9, 1])).round().astype(int)  # most in the script's own look
        self.frames = torch.empty(n, 3, SIZE, SIZE, dtype=torch.uint8)
        parts = []
        for look, first, last in zip(looks, ends, ends[1:]):  # the states are in random order
            scene = humanoid.Scene(SIZE, SIZE, *look, 1, 128, torch.device("cpu"))
            for i in torch.arange(first, last).split(1024):
                self.frames[i], points = scene.render(states[i])
                parts.append(humanoid_knowledge(points, *look, rng))
        self.known = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        self.showing = frames_of_postures(self.known)
        self.loss = np.zeros(n)  # of each frame, when it was seen last
        self.drawn = []  # the frames of each batch that is on its way

    def __call__(self, n: int, rng: np.random.Generator) -> tuple[torch.Tensor, dict]:
        """Half show a posture, each as often as another; a quarter are the hardest of eight; the rest are any."""
        i = rng.integers(len(self.frames), size=n)
        for k in range(n // 2):
            i[k] = rng.choice(self.showing[rng.integers(len(self.showing))])
        eight = rng.integers(len(self.frames), size=(n // 4, 8))
        i[n // 2 : n // 2 + n // 4] = eight[np.arange(n // 4), self.loss[eight].argmax(1)]
        self.drawn.append(i)
        return self.frames[torch.from_numpy(i)], {name: values[i] for name, values in self.known.items()}

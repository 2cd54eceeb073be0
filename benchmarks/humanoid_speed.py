"""Steps per second of sac_clip_humanoid.py, with the split, against a plain Stable-Baselines3 SAC with the same CLIP model.

    pip install stable-baselines3
    python benchmarks/humanoid_speed.py

The plain one has what a first implementation has: one Gymnasium environment, frames of 480x480 by EGL, scored at the end of each
episode. Both run in turns, each alone on the machine, and both counts leave out what comes before learning.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402
from stable_baselines3 import SAC  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from tqdm import trange  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from clip_reward import CLIPReward  # noqa: E402

PROMPT, EPISODE = "a humanoid robot kneeling", 100
PHASES = ("simulate", "draw", "clip", "update")


@dataclass
class Args:
    """Time both trainings in turns."""

    repetitions: int = 3
    """runs of each"""
    clip_model: str = "tiny"
    """of both"""
    device: str = "cpu"
    """of both"""
    timesteps: int = 32_000
    """learning steps of a run of the script"""
    plain_episodes: int = 4
    """learning episodes of a run of the plain one, of 100 steps"""


def script_run(args: Args) -> dict[str, float]:
    """Means over the rounds in which the script learned: steps/s, and seconds a round by phase."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--run-dir {folder}/run --total-timesteps {args.timesteps + 6_400} --learning-starts 3200 --episodes 1"
        options += f" --device {args.device} --clip-model {args.clip_model}"
        command = [sys.executable, ROOT / "sac_clip_humanoid.py", "--prompt", PROMPT, *options.split()]
        subprocess.run(command, check=True, capture_output=True)
        events = EventAccumulator(f"{folder}/run", {"scalars": 0}).Reload()
    names = ["charts/SPS", *(f"seconds_per_round/{phase}" for phase in PHASES)]
    # The first round learns nothing yet, the second may still compile.
    rounds = {name.split("/")[1]: [event.value for event in events.Scalars(name)][2:] for name in names}
    steps = rounds.pop("SPS")
    return {"steps/s": len(steps) / sum(1 / s for s in steps)} | {name: np.mean(values) for name, values in rounds.items()}


class ScoreEpisodes(BaseCallback):
    """Keeps the frames of an episode; at its end CLIP scores them and the rewards in the replay buffer are overwritten."""

    def __init__(self, reward_model: CLIPReward):
        super().__init__()
        self.reward_model, self.frames = reward_model, []

    def _on_step(self) -> bool:
        self.frames.append(self.training_env.render())
        if len(self.frames) == EPISODE + 1:  # this step's transition is not in the buffer yet; the episode before it is
            self._on_training_end()
        return True

    def _on_training_end(self) -> None:
        frames = torch.from_numpy(np.stack(self.frames[:EPISODE])).permute(0, 3, 1, 2)
        last = self.model.replay_buffer.pos
        self.model.replay_buffer.rewards[last - EPISODE : last, 0] = self.reward_model(frames).cpu().numpy()
        del self.frames[:EPISODE]


def plain_run(args: Args, reward_model: CLIPReward) -> float:
    """Steps/s of the plain training after its first 100 random steps."""
    env = gymnasium.make("Humanoid-v5", render_mode="rgb_array", terminate_when_unhealthy=False, max_episode_steps=EPISODE)
    model = SAC("MlpPolicy", env, learning_starts=EPISODE, device=args.device)
    model.learn(EPISODE, callback=ScoreEpisodes(reward_model))
    start = time.perf_counter()
    model.learn(args.plain_episodes * EPISODE, callback=ScoreEpisodes(reward_model), reset_num_timesteps=False)
    env.close()
    return args.plain_episodes * EPISODE / (time.perf_counter() - start)


def main() -> None:
    args = tyro.cli(Args)
    reward_model = CLIPReward(args.clip_model, PROMPT, device=args.device)
    rows = []
    for _ in trange(args.repetitions, desc="time both"):
        rows.append(script_run(args) | {"plain": plain_run(args, reward_model)})
    print(f"| run | steps/s | {' | '.join(f'{phase}, s a round' for phase in PHASES)} | plain, steps/s | ratio |")
    print("|---" * (4 + len(PHASES)) + "|")
    for k, row in enumerate(rows, 1):
        split = " | ".join(f"{row[phase]:.2f}" for phase in PHASES)
        print(f"| {k} | {row['steps/s']:.0f} | {split} | {row['plain']:.1f} | {row['steps/s'] / row['plain']:.0f} |")


if __name__ == "__main__":
    main()

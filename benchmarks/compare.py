"""Steps per second of each script beside plain Stable-Baselines3, with the same CLIP model in the same precision.

    pip install stable-baselines3
    python benchmarks/compare.py

The plain ones are what a first implementation is: one Gymnasium environment, its own frames (the humanoid's 480x480 by EGL), and
Stable-Baselines3's SAC or DQN as it comes, scored either at every step, by a reward wrapper, or at the end of each episode. In a
third one, scored at every step, networks, batches and updates per step are the script's. All run in turns, each alone on the machine.
All counts leave out what comes before learning; the script's is its own `charts/SPS`.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402
from stable_baselines3 import DQN, SAC  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from throughput import model_and_note, run_loop  # noqa: E402
from tqdm import tqdm  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from clip_reward import CLIPReward, native_precision  # noqa: E402

# script: algorithm, Gymnasium's environment and its options, steps of an episode; the script's updates per step, layers and batches
SCRIPTS = {
    "dqn_clip_cartpole": (DQN, "CartPole-v1", {}, 200, 200 / 3200, [256, 256], 128),
    "sac_clip_mountaincar": (SAC, "MountainCarContinuous-v0", {}, 200, 200 / 3200, [64, 64], 256),
    "sac_clip_humanoid": (SAC, "Humanoid-v5", {"terminate_when_unhealthy": False}, 100, 300 / 3200, [256, 256], 256),
}
PLAIN = ("every step", "end of episode", "every step, the script's updates")


@dataclass
class Args:
    """Time the scripts and the plain trainings in turns."""

    scripts: tuple[str, ...] = tuple(SCRIPTS)
    """which of the scripts"""
    clip_model: str = "tiny"
    """of all: tiny, NAME/TAG, or an architecture of open_clip without a tag, which gets random weights"""
    precision: str | None = None
    """of all: fp32 or bf16 (default: what the scripts choose on this device)"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """of all"""
    repetitions: int = 5
    """runs of each"""
    rounds: int = 4
    """measured learning rounds of 3,200 steps of a run of the script"""
    plain_episodes: int = 3
    """measured learning episodes of a run of the plain ones"""


class CLIPWrapper(gymnasium.Wrapper):
    """No episode ends early, and the reward of a step is CLIP's for the frame after it, at once; without a model the frames are kept."""

    def __init__(self, env: gymnasium.Env, reward_model: CLIPReward | None):
        super().__init__(env)
        self.reward_model, self.frames = reward_model, []

    def step(self, action):
        obs, _, _, truncated, info = self.env.step(action)
        frame = torch.from_numpy(self.env.render().copy()).permute(2, 0, 1)
        if self.reward_model is None:
            self.frames.append(frame)
        reward = self.reward_model(frame[None]).item() if self.reward_model else 0.0
        return obs, reward, False, truncated, info


class ScoreEpisodes(BaseCallback):
    """At the end of an episode CLIP scores the frames that were kept, and the rewards in the replay buffer are overwritten."""

    def __init__(self, reward_model: CLIPReward, frames: list[torch.Tensor], episode: int):
        super().__init__()
        self.reward_model, self.frames, self.episode = reward_model, frames, episode

    def _on_step(self) -> bool:
        if len(self.frames) == self.episode + 1:  # this step's transition is not in the buffer yet; the episode before it is
            self._on_training_end()
        return True

    def _on_training_end(self) -> None:
        last = self.model.replay_buffer.pos
        rewards = self.reward_model(torch.stack(self.frames[: self.episode])).cpu().numpy()
        self.model.replay_buffer.rewards[last - self.episode : last, 0] = rewards
        del self.frames[: self.episode]


def plain_run(kind: str, script: str, args: Args, reward_model: CLIPReward) -> float:
    """Steps/s of a plain training after its first episode, which is random."""
    algorithm, name, options, episode, updates, layers, batch_size = SCRIPTS[script]
    env = gymnasium.make(name, render_mode="rgb_array", max_episode_steps=episode, **options)
    at_once = kind != "end of episode"
    env = CLIPWrapper(gymnasium.wrappers.TimeLimit(env.unwrapped, episode), reward_model if at_once else None)
    callback = None if at_once else ScoreEpisodes(reward_model, env.frames, episode)
    own = {}
    if kind == PLAIN[2]:
        own = {"train_freq": (1, "episode"), "gradient_steps": round(updates * episode), "batch_size": batch_size}
        own["policy_kwargs"] = {"net_arch": layers}
    model = algorithm("MlpPolicy", env, learning_starts=episode, device=args.device, **own)
    model.learn(episode, callback=callback)
    start = time.perf_counter()
    model.learn(args.plain_episodes * episode, callback=callback, reset_num_timesteps=False)
    env.close()
    return args.plain_episodes * episode / (time.perf_counter() - start)


def main() -> None:
    args = tyro.cli(Args)
    unknown = set(args.scripts) - set(SCRIPTS)
    if unknown:
        sys.exit(f"no script {', '.join(unknown)}: there are {', '.join(SCRIPTS)}")
    precision = args.precision or native_precision(args.device)
    with tempfile.TemporaryDirectory() as folder:
        clip_model, shown = model_and_note(args.clip_model, folder)
        options = {"clip_model": clip_model, "precision": precision, "device": args.device, "learning_starts": 3200}
        options |= {"total_timesteps": (args.rounds + 2) * 3200}  # a round without learning, and one to warm up
        reward_model = CLIPReward(clip_model, "a goal", device=args.device, precision=precision)
        print(
            f"{shown} in {precision} on {args.device}, {torch.get_num_threads()} cores: steps/s, and ratios with their ranges"
        )
        print("|", " | ".join(("script", "ours", *(f"plain, {kind} | ours ÷ {kind}" for kind in PLAIN))), "|")
        print("|---" * 8 + "|")
        progress = tqdm(total=len(args.scripts) * args.repetitions * 4, desc="time all", unit="run")
        for script in args.scripts:
            runs = []
            for _ in range(args.repetitions):
                runs.append([run_loop(script, options, args.rounds)])
                progress.update()
                for kind in PLAIN:
                    runs[-1].append(plain_run(kind, script, args, reward_model))
                    progress.update()
            columns = [f"{median(run[0] for run in runs):.0f}"]
            for k in range(1, 4):
                ratios = sorted(run[0] / run[k] for run in runs)
                columns += [f"{median(run[k] for run in runs):.1f}"]
                columns += [f"{median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"]
            tqdm.write(f"| {script} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()

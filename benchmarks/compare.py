"""Steps per second of each script beside plain Stable-Baselines3, with the same CLIP model and precision.

    pip install stable-baselines3
    python -m benchmarks.compare

The plain ones are what a first implementation is: one Gymnasium environment, its own frames (the humanoid's
480x480 by EGL), and Stable-Baselines3's SAC or DQN as it comes, scored either at every step, by a reward
wrapper, or at the end of each episode. In a third one, scored at every step, networks, batches and updates
per step are the script's. All run in turns, each alone on the machine. All counts leave out what comes before
learning, and evaluations; the script's is its own `charts/SPS`.
"""

import importlib
import os
import tempfile
import time
from dataclasses import dataclass
from statistics import median

os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium
import torch
import tyro
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from tqdm import tqdm

from benchmarks.throughput import model_and_note, run_loop
from clip_reward import CLIPReward, native_precision
from reward_check.dataset import Script

# Of each script: the algorithm, Gymnasium's environment and its options, the layers of its own networks.
PLAIN = {
    "dqn_clip_cartpole": (DQN, "CartPole-v1", {}, [256, 256]),
    "sac_clip_mountaincar": (SAC, "MountainCarContinuous-v0", {}, [64, 64]),
    "sac_clip_humanoid": (SAC, "Humanoid-v5", {"terminate_when_unhealthy": False}, [256, 256]),
}
KINDS = ("every step", "end of episode", "every step, the script's updates")


@dataclass
class Args:
    """Time the scripts and the plain trainings in turns."""

    scripts: tuple[Script, ...] = Script.__args__  # which of the scripts
    clip_model: str = "tiny"  # of all: tiny, NAME/TAG, or open_clip's NAME with random weights
    precision: str | None = None  # of all: fp32 or bf16 (default: what the scripts choose on this device)
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # of all
    repetitions: int = 5  # runs of each
    rounds: int = 4  # measured rounds of a run of the script
    plain_episodes: int = 3  # measured episodes of a run of the plain ones


class CLIPWrapper(gymnasium.Wrapper):
    """No episode ends early, and CLIP rewards each step by the frame after it; without a model it is kept."""

    def __init__(self, env: gymnasium.Env, reward_model: CLIPReward | None):
        super().__init__(env)
        self.reward_model = reward_model
        self.frames = []

    def step(self, action):
        obs, _, _, truncated, info = self.env.step(action)
        frame = torch.from_numpy(self.env.render().copy()).permute(2, 0, 1)
        reward = 0.0
        if self.reward_model is None:
            self.frames.append(frame)
        else:
            reward = self.reward_model(frame[None]).item()
        return obs, reward, False, truncated, info


class ScoreEpisodes(BaseCallback):
    """At the end of an episode CLIP scores the frames that were kept, and overwrites the buffer's rewards."""

    def __init__(self, reward_model: CLIPReward, frames: list[torch.Tensor], episode: int):
        super().__init__()
        self.reward_model = reward_model
        self.frames = frames
        self.episode = episode

    def _on_step(self) -> bool:
        if len(self.frames) > self.episode:  # this step is not in the buffer yet; the episode before it is
            self._on_training_end()
        return True

    def _on_training_end(self) -> None:
        last = self.model.replay_buffer.pos
        rewards = self.reward_model(torch.stack(self.frames[: self.episode])).cpu().numpy()
        self.model.replay_buffer.rewards[last - self.episode : last, 0] = rewards
        del self.frames[: self.episode]


def plain_run(kind: str, script: str, args: Args, reward_model: CLIPReward) -> float:
    """Steps/s of a plain training after its first episode, which is random."""
    algorithm, name, options, layers = PLAIN[script]
    defaults = importlib.import_module(script).Args()
    os.environ["MUJOCO_GL"] = "egl"  # which the robot's script turns off
    episode = defaults.episode_length
    env = gymnasium.make(name, render_mode="rgb_array", **options).unwrapped
    env = CLIPWrapper(gymnasium.wrappers.TimeLimit(env, episode), reward_model)
    callback = None
    own = {}
    if kind == "end of episode":
        env.reward_model = None
        callback = ScoreEpisodes(reward_model, env.frames, episode)
    elif "the script's updates" in kind:  # per step, rounded in an episode
        updates = round(defaults.gradient_steps / defaults.num_envs)
        own = {"train_freq": (1, "episode"), "gradient_steps": updates, "batch_size": defaults.batch_size}
        own["policy_kwargs"] = {"net_arch": layers}
    model = algorithm("MlpPolicy", env, learning_starts=episode, device=args.device, **own)
    model.learn(episode, callback=callback)
    start = time.perf_counter()
    model.learn(args.plain_episodes * episode, callback=callback, reset_num_timesteps=False)
    env.close()
    return args.plain_episodes * episode / (time.perf_counter() - start)


def main() -> None:
    args = tyro.cli(Args)
    precision = args.precision or native_precision(args.device)
    with tempfile.TemporaryDirectory() as folder:
        clip_model, shown = model_and_note(args.clip_model, folder)
        options = {"clip_model": clip_model, "precision": precision, "device": args.device}
        reward_model = CLIPReward(clip_model, "a car", device=args.device, precision=precision)
        how = f"{shown} in {precision} on {args.device}, {torch.get_num_threads()} cores"
        print(f"{how}: steps/s, and ratios with their ranges")
        print("| script | ours |", *(f"plain, {kind} | ours ÷ {kind} |" for kind in KINDS))
        print("|---" * 8 + "|")
        progress = tqdm(total=len(args.scripts) * args.repetitions * 4, desc="time all", unit="run")
        for script in args.scripts:
            ours = []
            plain = {kind: [] for kind in KINDS}
            for _ in range(args.repetitions):
                ours.append(run_loop(script, options, args.rounds))
                progress.update()
                for kind, speeds in plain.items():
                    speeds.append(plain_run(kind, script, args, reward_model))
                    progress.update()
            columns = [f"{median(ours):.0f}"]
            for speeds in plain.values():
                ratios = sorted(a / b for a, b in zip(ours, speeds))
                columns += [f"{median(speeds):.1f}"]
                columns += [f"{median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"]
            tqdm.write(f"| {script} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()

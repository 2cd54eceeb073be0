"""Any Gymnasium environment with continuous actions, learned from one sentence and its own frames.

    python examples/sac_clip_gymnasium.py --env-id Pusher-v5 --prompt "a robot arm touching a white cylinder"

Each environment's process renders its frames and shrinks them; they are rewarded while the round goes on, and
dropped. Its own return and success are logged, never learned from. Networks and update are the robot's. A
round is an episode of each environment; what has ended stands still, and counts as steps.

Who is paid for every frame avoids what ends an episode, even the goal, if nothing is earned afterwards. So a
terminal state is absorbing: it earns R(s) + γ R(s) + γ² R(s) + … = R(s) / (1 - γ). Time limits bootstrap.
"""

import json
import math
import multiprocessing.pool
import os
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium
import imageio.v3 as iio
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from gymnasium.wrappers import FlattenObservation, RescaleAction, TransformObservation
from PIL import Image, ImageOps
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm, trange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
OPENGL = os.environ.get("MUJOCO_GL", "egl")  # which the robot's script turns off
from clip_reward import Labeller, RewardArgs, UsageError, make_reward
from sac_clip_humanoid import CHOOSE, REPORT, SAC, in_words, load, read_settings, sac_update, save, squash


@dataclass
class Args(RewardArgs):
    """Teach an agent in a Gymnasium environment with a sentence: SAC on a CLIP model's reward."""

    env_id: str = ""  # as registered, or MODULE:NAME; its actions are a Box
    env_kwargs: str = "{}"  # for gymnasium.make, as JSON
    goal_baseline_alpha: float = 0.0  # α: 0 plain cosine
    plain_terminal: bool = False  # a terminal state earns R(s) once, not for ever
    pad: bool = False  # frames of other proportions than the model's are padded, not squashed
    vectorization: str = "async"  # a process for each environment, or "sync": this one for all
    seed: int = 1  # of weights, environments and exploration
    total_timesteps: int = 100_000  # of all environments
    num_envs: int = 16  # side by side
    episode_length: int = 200  # steps of a round, or the environment's limit if that is shorter
    update_every: int = 8  # steps for each update
    learning_starts: int = 10_000  # steps; rounds that begin before are random
    learning_rate: float = 6e-4  # of Adam, at first; it falls to 0
    gamma: float | None = None  # discount factor (default: half a round ahead, 1 - 2 / episode_length)
    n_step: int = 10  # rewards before the critics' value stands for the rest
    tau: float = 0.005  # how far the targets and the mean actor follow at each update
    batch_size: int = 256  # transitions per update
    ent_coef: float = 0.03  # weight of the entropy, at first; tuned for -1 an action
    noise_correlation: float = 0.9  # of the exploration noise, from step to step
    run_dir: str | None = None  # made anew (runs/SCRIPT__SEED__TIME)
    evaluate_every: int = 10_000  # steps between evaluations, which choose the best policy
    episodes: int = 100  # of the final evaluation, or of --evaluate; rounded up to whole rounds
    resume: str | None = None  # go on with the run in this folder, by its settings
    evaluate: str | None = None  # only evaluate this checkpoint, by its settings but for those named

    def check(self) -> None:
        if not self.env_id or not self.prompt and not self.clip_model.endswith(".py"):
            raise UsageError("--env-id and --prompt must be given")
        if ":" in self.env_id and not any(word.endswith(self.env_id) for word in sys.argv):
            raise UsageError(f"--env-id {self.env_id} runs that module's code: name it again")
        env = gymnasium.make(self.env_id, **json.loads(self.env_kwargs))
        if not isinstance(env.action_space, Box):
            raise UsageError(f"{self.env_id}: no Box of actions; for Discrete see dqn_clip_cartpole.py")
        self.episode_length = min(self.episode_length, env.spec.max_episode_steps or self.episode_length)
        self.gamma = 1 - 2 / self.episode_length if self.gamma is None else self.gamma
        super().check()


class Watched(gymnasium.Wrapper):
    """Its info tells of the episode so far. What has ended stands still, and is not reset unasked."""

    def reset(self, **how) -> tuple:
        self.told = {"over": False, "terminated": False, "env_return": 0.0}
        return self.env.reset(**how)[0], {}

    def step(self, action: np.ndarray) -> tuple:
        if not self.told["over"]:
            self.obs, reward, terminated, truncated, info = self.env.step(action)
            for name in {"success", "is_success"} & info.keys():  # once is enough
                self.told["success_rate"] = max(self.told.get("success_rate", 0.0), float(info[name]))
            self.told["env_return"] += float(reward)
            self.told |= {"over": bool(terminated or truncated), "terminated": bool(terminated)}
        return self.obs, 0.0, False, False, self.told


def make_envs(args: Args, size: tuple[int, int]) -> gymnasium.vector.VectorEnv:
    """-> environments that observe "state" (O,) and "pixels" (H, W, 3), of the model's size (H, W)."""
    fit = ImageOps.pad if args.pad else Image.Image.resize  # bicubic

    def look(env: gymnasium.Env) -> np.ndarray:  # first in the environment's process: OpenGL survives no fork
        return np.asarray(fit(Image.fromarray(env.render()).convert("RGB"), size[::-1]))

    def wrap(env: gymnasium.Env) -> gymnasium.Env:
        env = RescaleAction(FlattenObservation(env), np.float32(-1), np.float32(1))
        space = Dict({"state": env.observation_space, "pixels": Box(0, 255, (*size, 3), np.uint8)})
        return Watched(TransformObservation(env, lambda state: {"state": state, "pixels": look(env)}, space))

    os.environ |= dict(MUJOCO_GL=OPENGL, SDL_VIDEODRIVER="dummy", SDL_NO_SIGNAL_HANDLERS="1")  # or no SIGTERM
    gymnasium.logger.min_level = 50  # none: of an environment's error one line is enough
    how = json.loads(args.env_kwargs) | {"render_mode": "rgb_array", "wrappers": [wrap]}
    how |= {"vector_kwargs": {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}}
    try:
        envs = gymnasium.make_vec(args.env_id, args.num_envs, args.vectorization, **how)
        envs.reset(seed=args.seed)
        return envs
    except Exception as error:  # whatever it may raise
        raise UsageError(f"{args.env_id} gives no frames (MuJoCo's need libegl1): {error!r}") from error


class Worker:  # on one device; the `Labeller` has one for each core or GPU
    def __init__(self, args: Args, device: torch.device, reward_model=None):
        self.reward_model = reward_model or make_reward(args, device)

    def label(self, frames: torch.Tensor) -> torch.Tensor:  # (N, 3, H, W) -> (N, 1)
        return self.reward_model(frames)[:, None].cpu()


def stacked(rounds: list, args: Args) -> tuple:
    """Rounds -> all, rewards standardized × (1 - γ), and the steps before the ends (K, 3): i, t, n."""
    states, actions, going, terminated, rewards = map(torch.stack, zip(*rounds))
    ends = going.sum(1)
    kept = rewards[going].double()
    mean = 0 if args.plain_terminal else kept.mean()  # which would be earned after an end, too
    rewards = ((rewards - mean) * (1 - args.gamma) / (kept.std(correction=0) + 1e-8)).float()  # values: ~1
    if not args.plain_terminal:  # R(s) / (1 - γ) for the step to a terminal state
        i, n = terminated.nonzero().T
        rewards[i, ends[i, n] - 1, n] /= 1 - args.gamma
    return states, actions, ends, terminated, rewards, going.nonzero()


def sample(buffer: tuple, args: Args) -> tuple:
    """-> obs (B, O), those n steps on or at the end, actions (B, A), returns (B,), γⁿ or 0 at an end (B,)."""
    states, actions, ends, terminated, rewards, steps = buffer
    i, t, n = steps[torch.randint(len(steps), (args.batch_size,), device=steps.device)].T
    size = (ends[i, n] - t).clamp(max=args.n_step)  # no window crosses an episode's end
    k = torch.arange(args.n_step, device=steps.device)[:, None]
    between = rewards[i, (t + k).clamp(max=rewards.shape[1] - 1), n]
    returns = (args.gamma**k * torch.where(k < size, between, 0)).sum(0)
    weight = args.gamma**size * ~(terminated[i, n] & (t + size == ends[i, n]))
    return states[i, t, n], states[i, t + size, n], actions[i, t, n], returns, weight


@torch.no_grad()
def rollout(policy, noise_scale: float, envs, labeller: Labeller, key: tuple, args: Args, film=None) -> tuple:
    """An episode of a policy, or at random -> a round: states (T + 1, N, O), actions (T, N, A), which steps
    are before the end (T, N), if that is a terminal state (N,); and means of what the environments tell."""
    seed = np.random.SeedSequence((args.seed, *key)).generate_state(1).item()
    rng = torch.Generator().manual_seed(seed)
    obs, _ = envs.reset(seed=seed)
    states = [torch.from_numpy(obs["state"]).float()]
    actions, going = [], [np.ones(args.num_envs, bool)]
    noise = torch.randn(envs.action_space.shape, generator=rng)
    for _ in range(args.episode_length):
        fresh = torch.randn(noise.shape, generator=rng)
        noise = args.noise_correlation * noise + math.sqrt(1 - args.noise_correlation**2) * fresh
        action = torch.erf(noise / math.sqrt(2))  # the normal's distribution: uniform in [-1, 1]
        if policy:
            action, _ = squash(*policy(states[-1]), noise_scale * noise)
        obs, *_, told = envs.step(action.numpy())
        labeller.add(torch.from_numpy(obs["pixels"][going[-1]]).permute(0, 3, 1, 2))
        going.append(~told["over"])
        actions.append(action)
        states.append(torch.from_numpy(obs["state"]).float())
        if not states[-1].isfinite().all():
            raise UsageError(f"{args.env_id} observed what is not finite, or the learning rate is too high")
        if film is not None and len(film) < args.episode_length:
            film.append(envs.render()[0])
    names = told.keys() & {"success_rate", "env_return", "terminated"}
    means = {name: told[name].mean().item() for name in sorted(names)}
    ends = torch.from_numpy(np.stack(going[:-1])), torch.from_numpy(told["terminated"])
    return (torch.stack(states), torch.stack(actions), *ends), means


def rewards_of(going: torch.Tensor, labeller: Labeller, args: Args) -> torch.Tensor:
    """-> a round's rewards (T, N). What stands still has its last one, or 0 with plain terminals."""
    rewards = torch.zeros(going.shape)
    rewards[going] = labeller.result()[:, 0]
    return rewards if args.plain_terminal else rewards.gather(0, going.cumsum(0) - 1)


def train(args: Args, labeller: Labeller, envs, sac: SAC) -> None:
    """As in sac_clip_humanoid.py: a round is played and rewarded while those before are learned from."""
    optimizers = sac.optimizers(args.learning_rate)
    a_round = args.num_envs * args.episode_length  # steps
    rounds, global_step, best_return = [], 0, -math.inf
    parts = {"policy": sac.policy, "sac": sac, **optimizers}  # of a checkpoint
    if args.resume:
        kept = load(f"{args.run_dir}/checkpoint.pt", Args, **parts)
        global_step, best_return = kept["step"], kept["best_return"]
        files = [f"{args.run_dir}/rounds/{k}.pt" for k in range(global_step // a_round)]
        rounds = [torch.load(file, map_location=labeller.device)["round"] for file in files]
        if rounds:  # is the random one rewarded as before, in steps that chaos has not reached?
            (_, _, going, _), _ = rollout(None, 1.0, envs, labeller, (0,), args)
            off = (rewards_of(going, labeller, args) - rounds[0][-1].cpu())[:10].abs().mean()
            if off > 0.1 * rounds[0][-1].std() + 1e-6:
                raise UsageError("this run began with another reward: model or rendering changed")
    os.makedirs(f"{args.run_dir}/rounds", exist_ok=bool(args.resume))

    def checkpoint(name: str) -> None:
        content = {"script": Path(__file__).stem, "settings": asdict(args), "step": global_step}
        content |= {name: part.state_dict() for name, part in parts.items()}
        save(f"{args.run_dir}/{name}", best_return=best_return, **content)

    checkpoint("checkpoint.pt")
    player = multiprocessing.pool.ThreadPool(1, torch.set_num_threads, (1,))
    writer = SummaryWriter(args.run_dir, purge_step=global_step + 1)
    for k in trange(len(rounds), math.ceil(args.total_timesteps / a_round), unit="round", disable=None):
        # ---- Act, in a thread, with the policy as it is now.
        policy = deepcopy(sac.policy).cpu() if global_step >= args.learning_starts else None
        playing = player.apply_async(rollout, (policy, 1.0, envs, labeller, (k,), args))

        # ---- Learn, at the same time.
        torch.manual_seed(1_000_000 * args.seed + k)
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - global_step / args.total_timesteps)
        losses = {}  # of the last updates
        if rounds and policy:
            buffer = stacked(rounds, args)
            for i in range(a_round // args.update_every):  # the actor at every other
                losses |= sac_update(sac, optimizers, sample(buffer, args), i % 2 == 0, args)
            del buffer  # or the next would be stacked beside it

        # ---- Label what is left, and report.
        played, means = playing.get()
        if not all(value.isfinite() for value in losses.values()):
            raise UsageError("losses are not finite: --resume with a lower --learning-rate")
        rewards = rewards_of(played[2], labeller, args)
        rounds.append([part.to(labeller.device) for part in (*played, rewards)])
        sac.obs_norm.update(rounds[-1][0][:-1][rounds[-1][2]])
        save(f"{args.run_dir}/rounds/{k}.pt", round=(*played, rewards))
        global_step += a_round
        scalars = {f"charts/{name}": mean for name, mean in means.items()}
        scalars |= {f"losses/{name}": value.item() for name, value in losses.items()}
        scalars["charts/clip_return"] = rewards.sum(0).mean().item()
        if global_step % args.evaluate_every < a_round or global_step >= args.total_timesteps:
            means = evaluate(sac.policy, args.num_envs, CHOOSE, envs, labeller, args)
            tqdm.write(f"step {global_step:,} of {args.total_timesteps:,}: {in_words(means)}")
            scalars |= {f"evaluation/{name}": mean for name, mean in means.items()}
            best_return = max(best_return, means["clip_return"])
            if means["clip_return"] >= best_return - 0.001 * abs(best_return):
                checkpoint("best.pt")
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        writer.flush()
        checkpoint("checkpoint.pt")


def evaluate(policy, episodes: int, purpose: int, envs, labeller: Labeller, args: Args, film=None) -> dict:
    """Whole rounds without exploration, until there are so many episodes -> their means."""
    found = []
    for k in range(math.ceil(episodes / args.num_envs)):
        played, means = rollout(deepcopy(policy).cpu(), 0.0, envs, labeller, (purpose, k), args, film)
        found.append(means | {"clip_return": rewards_of(played[2], labeller, args).sum(0).mean().item()})
    none = {name: 0.0 for means in found for name in means}
    return {name: float(np.mean([(none | means)[name] for means in found])) for name in none}


def main() -> None:
    args = read_settings(Args)
    labeller = Labeller(Worker, args)
    envs = make_envs(args, labeller.reward_model.size)
    torch.manual_seed(args.seed)
    sizes = envs.single_observation_space["state"].shape[0], envs.single_action_space.shape[0]
    sac = SAC(*sizes, args).to(labeller.device)
    if not args.evaluate:
        print(f"{args.total_timesteps:,} steps; run folder {args.run_dir}")
        train(args, labeller, envs, sac)
    load(args.evaluate or f"{args.run_dir}/best.pt", Args, policy=sac.policy)
    path = f"{args.evaluate.removesuffix('.pt')}_evaluation" if args.evaluate else f"{args.run_dir}/result"
    film = []  # of the first environment's first episode
    means = evaluate(sac.policy, args.episodes, REPORT, envs, labeller, args, film)
    print(f"{args.episodes} episodes or a few more: {in_words(means)}; {path}.json, .mp4")
    Path(f"{path}.json").write_text(json.dumps(means | {"settings": asdict(args)}, indent=2))
    height, width = (size // 2 * 2 for size in film[0].shape[:2])  # H.264 takes even ones
    iio.imwrite(f"{path}.mp4", np.stack(film)[:, :height, :width], plugin="pyav", fps=30, codec="libx264")
    envs.close()


if __name__ == "__main__":
    try:
        main()
    except (OSError, EOFError, ImportError, TypeError, ValueError, gymnasium.error.Error) as error:
        for process in multiprocessing.active_children():
            process.kill()
        print(f"error: {' '.join(str(error).split()) or 'an environment died; --resume'}", file=sys.stderr)
        sys.stdout.flush()
        os._exit(2)  # at once, or what is left of the environments complains
    except KeyboardInterrupt:
        os._exit(130)

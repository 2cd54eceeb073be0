"""What labelling costs beyond CLIP: draw + score + write the rewards, against `encode_image` alone on the same frames.

python benchmarks/labelling.py
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import open_clip
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dqn_clip_cartpole  # noqa: E402
import sac_clip_mountaincar  # noqa: E402
from clip_reward import CLIPReward  # noqa: E402


@dataclass
class Args:
    """Time the labelling phase of each script against the bare image encoder, alternately, in one process."""

    device: str = "cpu"
    """cpu or cuda"""
    repetitions: int = 7
    """of each; the table gives the median and the range of their ratios"""
    models: tuple[str, ...] = ("tiny", "ViT-B-32")
    """tiny, or open_clip architectures, which get random weights"""
    frames_tiny: int = 3200
    """frames a repetition with tiny"""
    frames: int = 256
    """frames a repetition with the others"""


def cartpoles(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """States (count, 4) anywhere in view, actions (count,)."""
    states = torch.zeros(count, 4, device=device)
    states[:, 0], states[:, 2] = torch.rand(count, device=device) * 4 - 2, torch.rand(count, device=device) * 6 - 3
    return states, torch.zeros(count, dtype=torch.int64, device=device)


def cars(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """States (count, 2) anywhere on the track, actions (count, 1)."""
    states = torch.zeros(count, 2, device=device)
    states[:, 0] = torch.rand(count, device=device) * 1.8 - 1.2
    return states, torch.zeros(count, 1, device=device)


# script, its states, what its `draw` wants to know beyond state and size
SCRIPTS = ((dqn_clip_cartpole, cartpoles, ()), (sac_clip_mountaincar, cars, ("realistic",)))


def main() -> None:
    args = tyro.cli(Args)
    device = torch.device(args.device)

    def seconds(function) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    print("| script | CLIP model | frames/s, encode_image alone | frames/s, labelling | labelling ÷ encode_image (range) |")
    print("|---|---|---|---|---|")
    for name in args.models:
        count = args.frames_tiny if name == "tiny" else args.frames
        with tempfile.TemporaryDirectory() as folder:
            if name != "tiny":
                torch.save(open_clip.create_model(name).state_dict(), f"{folder}/random.pt")
            batch_size = dqn_clip_cartpole.Args().clip_batch_size
            model = name if name == "tiny" else f"{name}/{folder}/random.pt"
            reward_model = CLIPReward(model, "pole upright", "pole", 0.5, device, batch_size)
        pixels = torch.rand(batch_size, 3, *reward_model.size, device=device).to(memory_format=torch.channels_last)

        for script, some_states, look in SCRIPTS:
            states, actions = some_states(count, device)
            rb = script.ReplayBuffer(count, device)
            rb.add(states, states, actions)

            @torch.no_grad()
            def encode(model=reward_model.model, pixels=pixels, count=count):
                for chunk in torch.arange(count).split(len(pixels)):
                    model.encode_image(pixels[: len(chunk)])

            def label(script=script, look=look, reward_model=reward_model, rb=rb, count=count):
                rb.num_unlabelled = count
                for i in rb.unlabelled(reward_model.batch_size):
                    rb.rewards[i] = reward_model(script.draw(rb.next_obs[i], *reward_model.size, *look))

            encode(), label()  # warm up
            pairs = [(seconds(encode), seconds(label)) for _ in range(args.repetitions)]
            ratios = sorted(b / a for a, b in pairs)
            bare, labelling = (sorted(column)[len(pairs) // 2] for column in zip(*pairs))
            shown = name if name == "tiny" else f"{name} (random weights)"
            spread = f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"| {script.SCRIPT} | {shown} | {count / bare:.0f} | {count / labelling:.0f} | {spread} |")


if __name__ == "__main__":
    main()

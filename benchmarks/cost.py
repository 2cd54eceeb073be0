"""What a run with a large CLIP model costs: its image encoder's arithmetic, without weights, in GPU hours.

    python -m benchmarks.cost
    python -m benchmarks.cost --models ViT-L-14 --tflops 80

Every step is a frame, and beside a large model all else is small. What a GPU really reaches is measured by
`benchmarks.throughput`.
"""

import sys
from dataclasses import dataclass

import open_clip
import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

STEPS = {  # by default with a large model, as in the paper
    "dqn_clip_cartpole": 3_000_000,
    "sac_clip_mountaincar": 3_000_000,
    "sac_clip_humanoid": 10_000_000,
}


@dataclass
class Args:
    """Count and divide."""

    # of open_clip
    models: tuple[str, ...] = ("ViT-B-32", "ViT-L-14", "ViT-H-14", "ViT-bigG-14", "ViT-B-16-SigLIP")
    tflops: float = 150.0  # that the GPU reaches (default: half of an A100's maximum in bfloat16)


def flops_of(name: str) -> tuple[int, int]:
    """-> operations of `encode_image` for one frame, and the model's parameters."""
    config = open_clip.get_model_config(name)
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    with torch.device("meta"):  # shapes without content
        model = kind(**config).eval()
        size = model.visual.image_size
        frame = torch.empty(1, 3, *(size if isinstance(size, tuple) else (size, size)))
        with FlopCounterMode(display=False) as counter:
            model.encode_image(frame)
    return counter.get_total_flops(), sum(p.numel() for p in model.parameters())


def main() -> None:
    args = tyro.cli(Args)
    for name in args.models:
        if name not in open_clip.list_models():
            print(f"cost: error: open_clip has no {name}", file=sys.stderr)
            sys.exit(2)
    torch.backends.mha.set_fastpath_enabled(False)  # the counter does not know it
    print(f"hours at {args.tflops:g} TFLOP/s, training, image encoder alone")
    head = ["CLIP model", "parameters", "GFLOP a frame"]
    head += [f"{name}, {steps:,} steps, h" for name, steps in STEPS.items()]
    print("|", " | ".join(head), "|")
    print("|---" * len(head) + "|")
    for name in args.models:
        flops, parameters = flops_of(name)
        hours = [f"{steps * flops / args.tflops / 3.6e15:.2g}" for steps in STEPS.values()]
        print("|", " | ".join([name, f"{parameters / 1e6:.0f} M", f"{flops / 1e9:.0f}", *hours]), "|")


if __name__ == "__main__":
    main()

"""The humanoid among boxes and balls: does a sentence still teach what is only a part of the picture?

    python neighbours/sac_distractors_humanoid.py --prompt "a humanoid robot kneeling"

Everything is sac_clip_humanoid.py's, but for the scene, `Surrounded` in reward_check/robustness.py: in each
frame four objects stand elsewhere around the robot. The film shows them, too.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import sac_clip_humanoid as humanoid
from clip_reward import UsageError
from reward_check.robustness import Surrounded

Args = humanoid.Args


def main() -> None:
    humanoid.Scene = Surrounded
    humanoid.main()


if __name__ == "__main__":
    try:
        main()
    except (UsageError, OSError, torch.OutOfMemoryError) as error:
        print(f"error: {error} (a run goes on with --resume)", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        os._exit(130)  # at once

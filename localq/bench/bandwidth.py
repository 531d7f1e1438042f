"""`python -m localq.bench.bandwidth`: prints the read bandwidth of a GPU as JSON, for `localq.planner.card`."""

from __future__ import annotations

import json
import sys

import torch

from localq.bench.kernels.roofline import read_bytes_per_s


def main() -> int:
    """Measure; 7 without a GPU."""
    if not torch.cuda.is_available():
        return 7
    print(json.dumps({"read_bytes_per_s": read_bytes_per_s(torch.device("cuda", 0))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

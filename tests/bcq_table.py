"""SmolLM2-135M in binary codes: a line for each number of planes and group, with bits as stored and perplexity.

    python tests/bcq_table.py FOLDER [--device cuda] [--windows 12] [--calibration N] [NAME ...]

The trade-off of quality and size of nuQmm's paper, and mixtures of sub-layers at the sizes in between. Judged, and kept
in FOLDER, as `two_bits_table.py` does, whose lines for NF4 and vq2 these stand beside.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from rival_quantizers import Way, Work, nf4
from two_bits_table import main

from localq import calibration, convert
from localq.bcq_mixture import Wish
from localq.cli.quantize_calibrated import WEIGHED_WINDOWS
from localq.input_moments import Text

GROUPS = ("g32", "g64", "g128", "g256", "g512", "row")
MIXTURES = (2.25, 2.5, 3.0, 3.5, 4.0)


def uniform(scheme: str) -> Way:
    """The same planes and groups everywhere."""

    def way(work: Work, out: Path) -> dict[str, float]:
        convert.convert(work.files, "bcq", out, force=True, scheme=scheme)
        return work.judged(out)

    return way


def mixed(bits: float) -> Way:
    """Planes and groups of every sub-layer where they are worth most."""

    def way(work: Work, out: Path) -> dict[str, float]:
        ids = calibration.token_windows(work.files, work.text, work.calibrated, WEIGHED_WINDOWS)
        convert.convert(work.files, "bcq", out, force=True, wish=Wish(bits, Text(ids, work.device)))
        return work.judged(out)

    return way


WAYS: dict[str, Way] = {
    "reference": lambda work, out: work.judged(None),
    "nf4": nf4,
    **{f"q{planes}{group}": uniform(f"q{planes}{group}") for planes in (2, 3, 4, 5) for group in GROUPS},
    **{f"q{planes}g128z": uniform(f"q{planes}g128z") for planes in (2, 3, 4)},
    **{f"mixed, {bits:g} bits": mixed(bits) for bits in MIXTURES},
}


if __name__ == "__main__":
    main(WAYS, __doc__)

"""SmolLM2-135M in binary codes: a line for each number of planes and group, with bits as stored and perplexity.

    python -m tests.tools.bcq_table FOLDER [--device cuda] [--windows 12] [--calibration N] [--layers N] [NAME ...]

The trade-off of quality and size of nuQmm's paper, each on a text (`quantize/binary/layers.py`) but for those that say
otherwise, and mixtures of sub-layers at the sizes in between. Judged, and kept in FOLDER, as `two_bits_table.py` does,
whose lines for NF4 and vq2 these stand beside.
--layers N quantizes the first N layers alone, and the rest stays in 16 bit: where there is no time for all 30.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from localq.quantize import by_tensor
from localq.quantize.bits.binary_mixture import BitBudget
from localq.quantize.output import tensor_jobs
from localq.quantize.request import TensorwiseRequest
from tests.tools.rival_quantizers import Way, Work, nf4
from tests.tools.two_bits_table import main

GROUPS = ("g32", "g64", "g128", "g256", "g512", "row")
MIXTURES = (2.25, 2.5, 3.0, 3.5, 4.0)


def uniform(scheme: str, on_text: bool = True) -> Way:
    """The same planes and groups everywhere."""

    def way(work: Work, out: Path) -> dict[str, float]:
        text = work.weighing if on_text else None
        by_tensor.convert(TensorwiseRequest(work.files, "bcq", out, force=True, scheme=scheme, text=text))
        return work.judged(out)

    return way


def mixed(bits: float) -> Way:
    """Planes and groups of every sub-layer where they are worth most."""

    def way(work: Work, out: Path) -> dict[str, float]:
        by_tensor.convert(TensorwiseRequest(work.files, "bcq", out, force=True, budget=BitBudget(bits, work.weighing)))
        return work.judged(out)

    return way


WAYS: dict[str, Way] = {
    "reference": lambda work, out: work.judged(None),
    "nf4": nf4,
    **{f"q{planes}{group}": uniform(f"q{planes}{group}") for planes in (2, 3, 4, 5) for group in GROUPS},
    **{f"q{planes}g128, no text": uniform(f"q{planes}g128", on_text=False) for planes in (2, 3, 4, 5)},
    **{f"q{planes}g128z": uniform(f"q{planes}g128z") for planes in (2, 3, 4)},
    **{f"mixed, {bits:g} bits": mixed(bits) for bits in MIXTURES},
}


def first_layers(count: int) -> None:
    """From here on conversions take those alone."""
    whole = tensor_jobs.is_block_linear

    def among_them(name: str, shape: tuple[int, ...]) -> bool:
        return whole(name, shape) and int(name.split("layers.")[1].split(".")[0]) < count

    mock.patch.object(tensor_jobs, "is_block_linear", among_them).start()


if __name__ == "__main__":
    if "--layers" in sys.argv:
        at = sys.argv.index("--layers")
        first_layers(int(sys.argv[at + 1]))
        del sys.argv[at : at + 2]
    main(WAYS, __doc__)

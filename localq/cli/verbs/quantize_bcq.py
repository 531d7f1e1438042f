"""What `localq quantize --format bcq` is asked for besides: planes, groups, zero points. Loads no torch."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from localq.errors import LocalqError, usage_error
from localq.files import format_sizes

FORMAT = "bcq"
PLANES = "3"  # by default
_GROUP = "Of bcq: columns that share scales, 32, 64, 128 (default), 256 or 512, or row."
Group = Annotated[str | None, typer.Option("--group", metavar="COLUMNS|row", help=_GROUP)]
ZeroPoints = Annotated[
    bool | None, typer.Option("--zero-points", help="Of bcq: a zero point for each group.", show_default=False)
]


def mixture(format: str, bits: str | None, group: str | None, zero_points: bool | None) -> float | None:
    """Bits per weight where every sub-layer of bcq shall have its own planes and groups; else None.

    Raises LocalqError (exit 2) for a group, or zero points, besides.
    """
    if format != FORMAT or bits is None or not re.fullmatch(r"[1-5]\.\d{1,2}", bits):
        return None
    if group is not None or zero_points:
        why = f"with --bits {bits} every sub-layer has the group that it is worth most with, and no zero points"
        raise usage_error("--zero-points" if group is None else "--group", why, "Leave it out, or ask for whole bits.")
    return float(bits)


def scheme(format: str, bits: str | None, group: str | None, zero_points: bool | None) -> str:
    """Of bcq, as `format_sizes.bcq_scheme` has it; "" of other formats. Raises LocalqError (exit 2)."""
    if format != FORMAT:
        given = [name for name, value in (("--group", group), ("--zero-points", zero_points)) if value]
        if given:
            raise usage_error(given[0], f"{format} has no such option", f"It is an option of --format {FORMAT}.")
        return ""
    wanted = f"q{bits or PLANES}{'row' if group == 'row' else f'g{group or 128}'}{'z' if zero_points else ''}"
    try:
        format_sizes.bcq_scheme(wanted)
    except LocalqError:
        wrong = "--group" if bits in (None, "1", "2", "3", "4", "5") else "--bits"
        ways = "There are --bits 1 to 5, or in between as 3.25, and --group 32, 64, 128, 256, 512 or row."
        raise usage_error(wrong, f"{group if wrong == '--group' else bits!r} is not offered", ways) from None
    return wanted

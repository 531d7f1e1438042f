"""Options of `localq quantize --format bcq`: planes, groups, zero points. Loads no torch."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from localq.cli import help_page
from localq.errors import LocalqError, usage_error
from localq.files import schemes

FORMAT = "bcq"
PLANES = "3"  # by default
_GROUP = "Columns per scale for bcq: 32 to 512, or `row`."
Group = Annotated[
    str | None,
    typer.Option("--group", metavar="COLUMNS", help=_GROUP, rich_help_panel=help_page.QUALITY),
]
ZeroPoints = Annotated[
    bool | None,
    typer.Option(
        "--zero-points",
        help="Store a zero point for each group (bcq).",
        show_default=False,
        rich_help_panel=help_page.QUALITY,
    ),
]


def mixture(format: str, bits: str | None, group: str | None, zero_points: bool | None) -> float | None:
    """Bits per weight of a bcq mixture, in which every sub-layer has its own planes and groups; else None.

    Raises LocalqError (exit 2) where a group or zero points are given too.
    """
    if format != FORMAT or bits is None or not re.fullmatch(r"[1-5]\.\d{1,2}", bits):
        return None
    if group is not None or zero_points:
        why = f"--bits {bits} selects a mixture, which chooses the group size of each matrix and has no zero points"
        raise usage_error(
            "--zero-points" if group is None else "--group", why, "Remove the option, or use a whole number of bits."
        )
    return float(bits)


def scheme(format: str, bits: str | None, group: str | None, zero_points: bool | None) -> str:
    """The scheme of bcq (`schemes.bcq_scheme`); "" for other formats. Raises LocalqError (exit 2)."""
    if format != FORMAT:
        given = [name for name, value in (("--group", group), ("--zero-points", zero_points)) if value]
        if given:
            raise usage_error(
                given[0], f"--format {format} does not support this option", f"Use it with --format {FORMAT}."
            )
        return ""
    scheme = f"q{bits or PLANES}{'row' if group == 'row' else f'g{group or 128}'}{'z' if zero_points else ''}"
    try:
        schemes.bcq_scheme(scheme)
    except LocalqError:
        wrong = "--group" if bits in (None, "1", "2", "3", "4", "5") else "--bits"
        ways = "Use --bits 1 to 5 or a mixture such as 3.25, and --group 32, 64, 128, 256, 512 or row."
        raise usage_error(wrong, f"{group if wrong == '--group' else bits!r} is not supported", ways) from None
    return scheme

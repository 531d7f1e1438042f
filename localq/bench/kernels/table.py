"""The table of `localq bench --kernels`: one row per measured launch, as a line, as JSON and as a bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localq.bench.kernels.roofline import Timing

HEADER = ("op", "what", "rows", "type", "us", "low-high", "GB/s", "roof", "cuBLAS", "x", "bnb", "x")
FORMAT = "{:<16} {:>38} {:>4} {:>8} {:>8} {:>15} {:>6} {:>5} {:>8} {:>6} {:>8} {:>6}"
CUBLAS, BITSANDBYTES = "cublas", "bitsandbytes"
NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Rival:
    """Somebody else's way to the same result; `timing` is None where there is none, and `note` says why."""

    name: str
    timing: Timing | None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One measured launch.

    family  the group that it is chosen by
    what    shapes, and what is fused
    rows    of x; 0 where there is no x
    dtype   of x or of the result, without "torch."
    bytes   that must move
    """

    family: str
    op: str
    what: str
    rows: int
    dtype: str
    bytes: int
    timing: Timing
    rivals: tuple[Rival, ...] = ()

    @property
    def bytes_per_s(self) -> float:
        """Bytes that must move over the median time."""
        return self.bytes / self.timing.median_us * 1e6

    def rival(self, name: str) -> Rival | None:
        """The rival of that name, if it was asked."""
        return next((each for each in self.rivals if each.name == name), None)


def lines(row: Row, roof: float) -> list[str]:
    """The line of a row (columns: `HEADER`), and one for each rival that has no column or failed."""
    columns: list[str] = []
    for name in (CUBLAS, BITSANDBYTES):
        rival = row.rival(name)
        if rival is None or rival.timing is None:
            columns += ["-", "-"]
        else:
            columns += [f"{rival.timing.median_us:.1f}", f"{rival.timing.median_us / row.timing.median_us:.2f}"]
    others = [
        rival
        for rival in row.rivals
        if rival.name not in (CUBLAS, BITSANDBYTES) or (rival.timing is None and rival.note not in ("", NOT_INSTALLED))
    ]
    return [
        FORMAT.format(
            row.op, row.what, row.rows or "-", row.dtype, f"{row.timing.median_us:.1f}", _spread(row.timing),
            f"{row.bytes_per_s / 1e9:.0f}", f"{row.bytes_per_s / roof:.0%}", *columns,
        ),
        *(_rival_line(row, rival, roof) for rival in others),
    ]  # fmt: skip


def _rival_line(row: Row, rival: Rival, roof: float) -> str:
    if rival.timing is None:
        return f"  {rival.name}: {rival.note}"
    speed = row.bytes / rival.timing.median_us * 1e6
    return FORMAT.format(
        "", rival.name, "", "", f"{rival.timing.median_us:.1f}", _spread(rival.timing), f"{speed / 1e9:.0f}",
        f"{speed / roof:.0%}", "ours", f"{rival.timing.median_us / row.timing.median_us:.2f}", "", "",
    ).rstrip()  # fmt: skip


def _spread(timing: Timing) -> str:
    return f"{timing.low_us:.1f}-{timing.high_us:.1f}"


def as_json(row: Row, roof: float) -> dict[str, Any]:
    """One row of the last line, units in the key names; a rival that is not there is null."""
    return {
        "family": row.family,
        "op": row.op,
        "what": row.what,
        "rows": row.rows,
        "dtype": row.dtype,
        "median_us": round(row.timing.median_us, 2),
        "low_us": round(row.timing.low_us, 2),
        "high_us": round(row.timing.high_us, 2),
        "bytes": row.bytes,
        "bytes_per_s": round(row.bytes_per_s),
        "share_of_roof": round(row.bytes_per_s / roof, 4),
        "rivals_us": {
            each.name: None if each.timing is None else round(each.timing.median_us, 2) for each in row.rivals
        },
    }

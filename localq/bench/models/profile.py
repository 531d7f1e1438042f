"""Print a step profile: `localq bench --profile`."""

from __future__ import annotations

from typing import TextIO

from localq.sanitize import print_lines
from localq.stats import StepProfile

HEADER = ("operation", "calls", "µs", "µs each", "MB", "GB/s", "bw", "share")
FORMAT = "{:<12} {:>6} {:>9} {:>8} {:>9} {:>7} {:>6} {:>6}"


def print_profile(profile: StepProfile, roof: float, out: TextIO) -> None:
    """Print the time of one decode step by operation; roof: the measured read bandwidth in bytes/s.

    "bw" is the fraction of that bandwidth, "share" the fraction of the sum of the rows. The last lines compare that sum
    with the whole graph, and show the time per token that the host adds.
    """
    print_lines(out, FORMAT.format(*HEADER))
    total = profile.sum_us
    for row in profile.rows:
        each = row.us / row.calls if row.calls else 0.0
        of_roof = row.gb_per_s * 1e9 / roof
        line = FORMAT.format(
            row.kernel, row.calls, f"{row.us:.1f}", f"{each:.2f}", f"{row.bytes / 1e6:.2f}", f"{row.gb_per_s:.0f}",
            f"{of_roof:.0%}", f"{row.us / total if total else 0.0:.0%}",
        )  # fmt: skip
        print_lines(out, line)
    moved = sum(row.bytes for row in profile.rows)
    of_roof = moved / profile.step_us * 1e6 / roof if profile.step_us else 0.0
    apart = total / profile.step_us - 1 if profile.step_us else 0.0
    print_lines(
        out,
        f"kernels {total:.1f} µs, complete graph {profile.step_us:.1f} µs ({apart:+.1%}): {moved / 1e6:.1f} MB, "
        f"{of_roof:.0%} of the measured {roof / 1e9:.0f} GB/s",
    )
    print_lines(
        out,
        f"host gap {profile.host_gap_us:.1f} µs per token at position {profile.position}, timed with {profile.timer}",
    )

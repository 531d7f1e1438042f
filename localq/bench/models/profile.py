"""How a step profile is printed: `localq bench --profile`."""

from __future__ import annotations

from typing import TextIO

from localq.stats import StepProfile

HEADER = ("operation", "calls", "us", "us each", "MB", "GB/s", "roof", "share")
FORMAT = "{:<12} {:>6} {:>9} {:>8} {:>9} {:>7} {:>6} {:>6}"


def print_profile(profile: StepProfile, roof: float, out: TextIO) -> None:
    """The time of one decode step by operation; `roof` is the measured read bandwidth in bytes/s.

    The share is of the sum of the rows. Below stand that sum against the time of the whole graph, and the time per
    token that the host adds.
    """
    print(FORMAT.format(*HEADER), file=out)
    total = profile.sum_us
    for row in profile.rows:
        each = row.us / row.calls if row.calls else 0.0
        of_roof = row.gb_per_s * 1e9 / roof
        line = FORMAT.format(
            row.kernel, row.calls, f"{row.us:.1f}", f"{each:.2f}", f"{row.bytes / 1e6:.2f}", f"{row.gb_per_s:.0f}",
            f"{of_roof:.0%}", f"{row.us / total if total else 0.0:.0%}",
        )  # fmt: skip
        print(line, file=out)
    moved = sum(row.bytes for row in profile.rows)
    of_roof = moved / profile.step_us * 1e6 / roof if profile.step_us else 0.0
    apart = total / profile.step_us - 1 if profile.step_us else 0.0
    print(
        f"sum {total:.1f} us, the step as one graph {profile.step_us:.1f} us ({apart:+.1%}): {moved / 1e6:.1f} MB, "
        f"{of_roof:.0%} of the measured {roof / 1e9:.0f} GB/s",
        file=out,
    )
    print(
        f"host gap {profile.host_gap_us:.1f} us a token; at position {profile.position}, timed by {profile.timer}",
        file=out,
        flush=True,
    )

"""What the planner says against what a GPU shows: predicted and measured memory, full cards, loading again and again.

    python -m tests.tools.planner_report [table] [turns] [ballast] [cycles] [--only NAME ...]

table     random weights of catalogued shapes under budgets of 8 to 48 GiB: the peak by torch's allocator and what CUDA
          has besides, against the plan of the load, and against `localq fit` of the same shape, context and placement,
          which knows no GPU. Off by 3 % or 200 MiB at most; no device allocation while tokens are decoded. tok/s stands
          beside what `fit` predicts from the bandwidth measured here (off by 10 % at most on an H200; no bound of this)
turns     the second turn of a conversation of 24,000 tokens, in models whose cache cannot be cut: it begins to answer
          within the time that its new tokens take by themselves and 0.2 s
ballast   another process holds all but so many MiB: a load fits or is refused, and memory never runs out on the way
cycles    the same model loaded, used and dropped: the memory of the device comes back

Without a part all are done, on an H200 in under five minutes. Ends with one line of JSON, and with exit code 1 where a
bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from localq.errors import ExitCode, LocalqError
from localq.planner.footprint import MIB
from tests.tools.planner_lab import Case, GpuLab, Outcome, Turn

SHARE, LEAST = 0.03, 200 * MIB  # a prediction may be off by the larger of the two
BACK = 64 * MIB  # of the device's memory, what may be missing after a model is gone
STEP, FIRST, LAST = 256 * MIB, 1024 * MIB, 5120 * MIB  # of what the ballast leaves
CYCLES = 50
PARTS = ("table", "turns", "ballast", "cycles")
RAN_OUT = "ran out of memory"  # how `engine.load.out_of_memory` begins
FITS, REFUSED, OUT_OF_MEMORY = "fits", "refused", "out of memory"


CASES = (
    Case("llama-3.1-8b@nf4", 8),
    Case("llama-3.1-8b@nf4", 8, kv_bits=4),
    Case("qwen3-14b@vq2", 8, kv_bits=8),
    Case("qwen3-14b@nf4", 12, kv_bits=8),
    Case("gemma-3-12b@nf4", 12, 8192),
    Case("mistral-nemo-12b@nf4", 16, 32_768, kv_bits=4),
    Case("qwen3-8b@fp16", 24, 16_384),
    Case("phi-4@vq2", 16, kv_bits=16),
    Case("qwen3-32b@nf4", 24),
    Case("qwen3-32b@nf4", 24, kv_bits=8, head="8"),
    Case("llama-3.3-70b@vq2", 24, kv_bits=16, embed="host", head="nf4"),
    Case("llama-3.3-70b@vq2", 24, 32_768, kv_bits=4),
    Case("llama-3.1-8b@fp16", 48),
    Case("llama-3.3-70b@nf4", 48),
    Case("qwen3.8-27b@nf4", 24, 4096, head="8"),
    Case("qwen3.8-27b@nf4", 24, 32_768, kv_bits=None),
    Case("qwen3.8-27b@nf4", 32, 131_072, kv_bits=None),
    Case("qwen3.8-27b@nf4", 24, kv_bits=None),
    Case("qwen3.6-35b-a3b@nf4", 24, 4096),
    Case("qwen3.6-35b-a3b@nf4", 24, 32_768, kv_bits=None),
    Case("qwen3.6-35b-a3b@nf4", 24, 131_072, kv_bits=None),
    Case("qwen3.6-35b-a3b@nf4", 32, 262_144, kv_bits=None),
    Case("qwen3.6-35b-a3b@nf4", 24, kv_bits=None),
    Case("gemma-3-27b@nf4", 24, kv_bits=None),
    Case("gpt-oss-20b@mxfp4", 24, kv_bits=None),
)
TURNS = (
    Case("qwen3.8-27b@nf4", 24, 32_768, kv_bits=None),
    Case("qwen3.6-35b-a3b@nf4", 24, 32_768, kv_bits=None),
    Case("gemma-3-27b@nf4", 24, 32_768, kv_bits=None),
)
DEPTH, ADDED, LATE = 24_000, 200, 0.2  # tokens of the first turn, of the second; s
SMALL = Case("llama-3.2-3b@nf4", 8, kv_bits=None)  # takes whatever the ballast leaves


@dataclass(frozen=True)
class Try:
    """A load while `free` bytes of the device were left: `FITS`, `REFUSED` or `OUT_OF_MEMORY`."""

    free: int
    verdict: str


class Lab(Protocol):
    """What is measured with: `GpuLab`, or numbers in tests."""

    def measure(self, case: Case) -> Outcome:
        """Load, use, and drop. Raises LocalqError."""
        ...

    def hold(self, free: int) -> int:
        """Make the other process leave so many bytes (0: all it can); what is free then."""
        ...

    def cycle(self) -> int:
        """Load a small model, use it, drop it; bytes that are free then."""
        ...

    def turn(self, case: Case, depth: int, added: int) -> Turn:
        """Two turns of a conversation, of `depth` and of `added` tokens. Raises LocalqError."""
        ...


# ---- the four parts


def off(predicted: int, measured: int) -> bool:
    """The prediction is further from what was measured than it may be."""
    return abs(measured - predicted) > max(SHARE * measured, LEAST)


def _line(name: str, *cells: object) -> str:
    """Of the table."""
    return f"{name:<22}" + "".join(f"{cell!s:>10}" for cell in cells)


def _rate_off(got: Outcome) -> str:
    return f"{100 * (got.predicted_tok_s / got.tok_s - 1):+.0f} %" if got.tok_s and got.predicted_tok_s else "-"


def table(lab: Lab, cases: Iterable[Case], say: Callable[[str], None]) -> dict[str, Any]:
    """Every case, a line each; "failed" counts those off, refused or allocating."""
    say(_line("model", "card", "kv", "context", "predicted", "measured", "off", "by fit", "tok/s", "off", "s"))
    rows, failed = [], 0
    for case in cases:
        try:
            got = lab.measure(case)
        except LocalqError as error:
            failed += 1
            say(f"{_line(case.name, case.gib, case.kv_bits or 'auto')}  FAILED {error}")
            rows.append({**asdict(case), "error": str(error)})
            continue
        bad = off(got.predicted, got.measured) or off(got.fit, got.measured) or got.allocations > 0
        failed += bad
        shares = [f"{100 * (each - got.measured) / got.measured:+.2f} %" for each in (got.predicted, got.fit)]
        sizes = [f"{each / MIB:,.0f}" for each in (got.predicted, got.measured)]
        rates = (f"{got.tok_s:.1f}", _rate_off(got), f"{got.seconds:.0f}")
        cells = (case.gib, case.kv_bits or "auto", f"{got.ctx:,}", *sizes, *shares, *rates)
        say(_line(case.name, *cells) + (" FAILED" if bad else ""))
        shown = {name: value for name, value in vars(got).items() if name != "case"}
        rows.append({**asdict(case), **shown, "failed": bad})
    worst = max((abs(row["measured"] - row["predicted"]) / row["measured"] for row in rows if "error" not in row),
                default=1.0)  # fmt: skip
    say(f"{len(rows)} loads, {failed} failed; the plan was off by {100 * worst:.2f} % at most; sizes in MiB")
    return {"rows": rows, "failed": failed, "worst_share": round(worst, 5)}


def turns(lab: Lab, cases: Iterable[Case], say: Callable[[str], None]) -> dict[str, Any]:
    """Every case, a line each; "failed" counts what began too late or was refused."""
    rows, failed = [], 0
    for case in cases:
        try:
            got = lab.turn(case, DEPTH, ADDED)
        except LocalqError as error:
            failed += 1
            say(f"{case.name}: FAILED {error}")
            rows.append({**asdict(case), "error": str(error)})
            continue
        bad = got.second_s > got.alone_s + LATE
        failed += bad
        say(
            f"{case.name}: {DEPTH:,} tokens, first token after {got.first_s:.2f} s; {got.computed:,} tokens more: "
            f"{got.second_s:.3f} s, by themselves {got.alone_s:.3f} s" + (" FAILED" if bad else "")
        )
        rows.append({**asdict(case), **asdict(got), "failed": bad})
    return {"depth": DEPTH, "rows": rows, "failed": failed}


def ballast(lab: Lab, sizes: Sequence[int], say: Callable[[str], None]) -> dict[str, Any]:
    """A load for each size that is left free. Fails where memory ran out, and where not both answers were seen."""
    tries = []
    for size in sizes:
        free = lab.hold(size)
        try:
            lab.measure(SMALL)
            verdict = FITS
        except LocalqError as error:
            if error.exit_code != ExitCode.DOES_NOT_FIT:
                raise
            verdict = OUT_OF_MEMORY if RAN_OUT in error.why else REFUSED
            if verdict == OUT_OF_MEMORY:
                say(f"ballast: with {free / MIB:,.0f} MiB free: {error.why}")
        except RuntimeError as error:  # of torch, cuBLAS or the driver: one that should have been a refusal
            say(f"ballast: with {free / MIB:,.0f} MiB free: {str(error).splitlines()[0]}")
            verdict = OUT_OF_MEMORY
        tries.append(Try(free, verdict))
    lab.hold(0)
    counts = {verdict: sum(each.verdict == verdict for each in tries) for verdict in (FITS, REFUSED, OUT_OF_MEMORY)}
    failed = counts[OUT_OF_MEMORY] + (not counts[FITS]) + (not counts[REFUSED])
    least = min((each.free for each in tries if each.verdict == FITS), default=0)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    say(f"ballast: {len(tries)} loads of {SMALL.name}: {told}; the least it took was {least / MIB:,.0f} MiB free")
    return {"tries": [asdict(each) for each in tries], "counts": counts, "failed": failed}


def cycles(lab: Lab, count: int, say: Callable[[str], None]) -> dict[str, Any]:
    """`count` loads; what is missing after the worst of them, against the first, which loads the kernels."""
    first = lab.cycle()
    missing = max(first - lab.cycle() for _ in range(count))
    say(f"cycles: after {count} loads {missing / MIB:,.1f} MiB were missing at most ({BACK // MIB} may be)")
    return {"count": count, "missing_bytes": missing, "failed": int(missing > BACK)}


def main(arguments: Sequence[str] | None = None, made: Callable[[], Lab] | None = None) -> int:
    """Run what is asked for; 0, or 1 where a bound does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all without")
    parser.add_argument("--only", action="append", default=[], help="cases of the table and turns whose NAME begins so")
    asked = parser.parse_args(arguments)
    parts = asked.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}")
    started, lab, result = time.monotonic(), (made or GpuLab)(), dict[str, Any]()

    def say(line: str) -> None:
        print(line, flush=True)

    only = tuple(asked.only)
    if "table" in parts:
        result["table"] = table(lab, [case for case in CASES if case.name.startswith(only or ("",))], say)
    if "turns" in parts:
        result["turns"] = turns(lab, [case for case in TURNS if case.name.startswith(only or ("",))], say)
    if "ballast" in parts:
        result["ballast"] = ballast(lab, range(FIRST, LAST + 1, STEP), say)
    if "cycles" in parts:
        result["cycles"] = cycles(lab, CYCLES, say)
    failed = sum(part["failed"] for part in result.values())
    facts = lab.facts() if isinstance(lab, GpuLab) else {}
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"schema": 1, "ok": not failed, "seconds": seconds, **facts, **result}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

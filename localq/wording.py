"""Sizes, statistics and tables as text, the same in every front end."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from localq.errors import usage_error
from localq.sanitize import sanitize
from localq.stats import Stats

# The stage in words; bytes, layers or steps done, and in total (0: not counted).
OnProgress = Callable[[str, int, int], None]
Say = Callable[[str], None]  # one line for the user
DRAFT_SOURCES = {
    "lookup": "found in the conversation",
    "grammar": "forced by the grammar",
    "model": "proposed by the draft model",
    "mtp": "proposed by the MTP block",
}
DOWNLOADING = "downloading"  # prefix of a stage that waits for a file, whose name follows

_LEAST_BESIDE, _BELOW = 24, 4  # least width of a wrapped last column; its indent where it moves below the others
_UNITS = {"": 2**30, "g": 2**30, "gib": 2**30, "gb": 10**9, "m": 2**20, "mib": 2**20, "mb": 10**6}


def human_bytes(count: int) -> str:
    """`count` bytes in decimal units, as for downloads: 98.4 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def parse_bytes(text: str) -> int:
    """Bytes of "1.2" (GiB), "1.2GiB", "900MiB" or "24GB"; LocalqError (exit 2) for anything else."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise usage_error(text[:80], "not a memory size", "Use a size such as 24 (GiB), 24GB or 900MiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_count(value: int | float | str) -> int:
    """A whole number of 64 bits; text may end in k for 1024, as in context sizes: 8k is 8192, 25.6k is 26214.

    Raises ValueError otherwise.
    """
    if isinstance(value, str):
        text = value.strip().lower()
        size = float(text[:-1]) * 1024 if text.endswith("k") else int(text)
        value = math.floor(size) if -math.inf < size < math.inf else size
    if not -(2**63) <= value < 2**63 or value != int(value):  # NaN is in no range
        raise ValueError(f"{value!s:.40} is not a whole number of 64 bits")
    return int(value)


def parse_duration(text: str) -> float | None:
    """Seconds of "10m", "90s", "2h" or "0"; None for "never". LocalqError (exit 2) for anything else."""
    word = text.strip().lower()
    match = re.fullmatch(r"(\d{1,6})([smh]?)", word)
    if word == "never":
        return None
    if match is None or (not match[2] and int(match[1])):
        raise usage_error(text[:80], "not a valid time", "Use a time such as 10m, 90s or 2h, or use 0 or never.")
    return float(match[1]) * {"": 0, "s": 1, "m": 60, "h": 3600}[match[2]]


def project_summary(decided: Mapping[str, str]) -> str:
    """ "system, top_k: set by PATH", for settings and the path of the file that has decided each."""
    paths = {path: [name for name, each in decided.items() if each == path] for path in decided.values()}
    return "; ".join(f"{', '.join(names)}: set by {path}" for path, names in paths.items())


def local_time(unix_s: float, form: str) -> str:
    """`unix_s` in local time, in a form of `strftime`; question marks for a time out of range."""
    try:
        return time.strftime(form, time.localtime(unix_s))
    except (ValueError, OverflowError, OSError):
        return re.sub("[0-9]", "?", time.strftime(form, time.gmtime(0)))


def memory_lines(measured: dict[str, int], predicted: dict[str, int], host: dict[str, int] | None = None) -> list[str]:
    """Allocated memory by component, next to the prediction if there is one.

    host   host memory (`Loaded.host`), for a separate line
    """
    more = _host_lines(host or {})
    if not predicted:
        return [*(f"  {part:<20} {size / 2**20:9.1f} MiB" for part, size in measured.items()), *more]
    sizes = {part: (measured.get(part, 0), predicted.get(part, 0)) for part in (*predicted, *measured)}
    rows = [("MiB", "allocated", "predicted")]
    rows += [(part, f"{took / 2**20:,.1f}", f"{planned / 2**20:,.1f}") for part, (took, planned) in sizes.items()]
    rows.append(("total", f"{sum(measured.values()) / 2**20:,.1f}", f"{sum(predicted.values()) / 2**20:,.1f}"))
    return [*(f"  {part:<20} {took:>11} {planned:>11}" for part, took, planned in rows), *more]


def _host_lines(host: dict[str, int]) -> list[str]:
    words = {
        "embedding": "{} for the embedding table",
        "snapshots": "up to {} for copying snapshots",
        "reading": "up to {} during prefill",
        "checkpoints": "up to {} for checkpoints of the conversation",
    }
    parts = [
        words.get(part, "{} for " + part).format(f"{size / 2**20:,.1f} MiB") for part, size in host.items() if size
    ]
    return [f"  host memory: {', '.join(parts)}"] if parts else []


def table_lines(
    headers: Sequence[str], rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset(), width: int | None = None
) -> list[str]:
    """An aligned plain table, sanitized; columns whose index is in `right` are right-aligned.

    width: columns of the terminal. If a row is wider, its last column wraps in place, or moves below the others where
    it has no room; words are never broken.
    """
    lines = [[sanitize(cell).replace("\n", " ") for cell in row] for row in (headers, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    gap = " " if width is not None and sum(widths[:-1]) + 2 * (len(widths) - 2) > width else "  "

    def aligned(line: list[str]) -> str:
        sized = enumerate(zip(line, widths, strict=False))
        return gap.join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in sized)

    start = sum(widths[:-1]) + len(gap) * (len(widths) - 1)
    if width is None or start + widths[-1] <= width:
        return [aligned(line).rstrip() for line in lines]
    longest = max(len(word) for line in lines for word in line[-1].split() or [""])
    beside = width - start >= max(longest, _LEAST_BESIDE)
    found = []
    for line in lines:
        indent = start if beside else _BELOW
        first, *more = _break_lines(line[-1], width - indent)
        found += [(aligned(line[:-1]) + gap + first).rstrip()] if beside else [aligned(line[:-1]).rstrip()]
        found += [" " * indent + each for each in (more if beside else (first, *more)) if each]
    return found


def _break_lines(text: str, room: int) -> list[str]:
    return textwrap.wrap(text, max(room, 1), break_long_words=False, break_on_hyphens=False) or [""]


def stats_line(stats: Stats, allowed: str = "") -> str:
    """Tokens, speed and latency of a reply in one line. allowed: share of the bandwidth limit, as text."""
    share = f" = {allowed}" if allowed else ""
    speed = f", {stats.tokens_per_s:.1f} tok/s{share}" if stats.generated_tokens > 1 else ""
    speed += f", {stats.tokens_per_step:.1f} tokens per step" if stats.drafted else ""
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    return (
        f"[{stats.generated_tokens} tokens{speed}, first token after {stats.time_to_first_token_s:.2f} s, "
        f"prompt {stats.prompt_tokens}{cached}, context {stats.context_used}/{stats.context_size}]"
    )


def draft_lines(stats: Stats) -> list[str]:
    """Drafts of a reply by source and by position; empty if nothing was drafted."""
    if not stats.drafted:
        return []
    sources = ", ".join(
        f"{stats.accepted.get(source, 0)} of {drafted} tokens ({DRAFT_SOURCES.get(source, source)})"
        for source, drafted in stats.drafted.items()
    )
    places = zip(stats.accepted_at, stats.drafted_at, strict=True)
    return [
        f"drafts: accepted {sources}; {stats.tokens_per_step:.2f} tokens per step",
        f"acceptance by draft position: {' '.join(f'{got / all:.0%}' for got, all in places)}",
    ]

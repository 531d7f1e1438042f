"""Memory: one bar of all parts, and below it a gauge for each, in the same colour and order.

Total and free memory come from NVML; what the ledger does not explain belongs to other programs. Under `--vram` all of
it is scaled to that limit: memory beyond it is not free to the model, and the card has a gauge of its own. On the CPU
the figures are those of host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.content import Content

from localq.sanitize import sanitize
from localq.tui.gauge import MUTED, REST_STYLE, Part, rising
from localq.tui.instruments.instrument_facts import InstrumentFacts
from localq.tui.instruments.instrument_widget import NO_NAMES, NO_PLAN, Instrument, heading, line, meter

if TYPE_CHECKING:
    from localq.gpus import Process

MIB, GIB = 2**20, 2**30
NAMED = 3  # other programs
FAIR, BAD = 0.75, 0.9  # of the KV cache in use
OVER = 0.02  # a part that takes so much more than planned is named
IN_USE, RESERVED, OTHERS, FREE = "in use", "reserved", "others", "free"
KV, BUFFERS = "KV cache", "buffers"
_CELLS = {RESERVED: "░", OTHERS: "▒", FREE: "─"}  # what fills the cells of a part, "█" for all others


@dataclass(frozen=True)
class Kind:
    """A part of the memory: name, components of the ledger, style."""

    name: str
    components: tuple[str, ...]
    style: str


KINDS = (
    Kind("weights", ("weights",), "$primary"),
    Kind("embedding", ("embedding",), "$secondary"),
    Kind("head", ("head",), "$accent"),
    Kind(KV, ("kv_cache",), "$success"),
    Kind("draft model", ("draft_weights", "draft_kv_cache", "draft_workspace"), "$warning"),
    Kind(BUFFERS, (
        "scratch", "tables", "step_buffers", "attention_workspace", "sampler", "cublas_workspace",
    ), "$foreground 75%"),
    Kind("CUDA", ("graphs", "cuda_context"), "$foreground 50%"),
)  # fmt: skip
OTHERS_STYLE = "$text-secondary"  # no alarm, so no red
CARD_FAIR, CARD_BAD = 0.95, 0.98  # of the whole card in use
LEGEND_ROWS = 4  # of the strip


@dataclass(frozen=True)
class Segment:
    """A segment of the bar; its width is proportional to `bytes`."""

    name: str
    bytes: int
    style: str


@dataclass(frozen=True)
class MemoryUse:
    """Kind -> (measured, planned or None), KV cache in use, total, other programs, free; None: unknown.

    card   (in use, total) of the whole card, where the other figures are of a limit that is smaller
    """

    kinds: dict[Kind, tuple[int, int | None]]
    kv_used: int
    total: int | None
    others: int | None
    free: int | None
    limited: bool = False
    card: tuple[int, int] | None = None

    @property
    def measured_bytes(self) -> int:
        """Sum of the measured sizes."""
        return sum(taken for taken, _ in self.kinds.values())

    @property
    def predicted_bytes(self) -> int | None:
        """Sum of the predicted sizes."""
        parts = [planned for _, planned in self.kinds.values()]
        return None if not parts or None in parts else sum(part or 0 for part in parts)

    def segments(self) -> list[Segment]:
        """Segments in the order of the bar."""
        found: list[Segment] = []
        for kind, (taken, _) in self.kinds.items():
            found.append(Segment(kind.name, self.kv_used if kind.name == KV else taken, kind.style))
            if kind.name == KV:
                found.append(Segment(RESERVED, taken - self.kv_used, kind.style))
        found.append(Segment(OTHERS, self.others or 0, OTHERS_STYLE))
        found.append(Segment(FREE, self.free or 0, REST_STYLE))
        return [each for each in found if each.bytes > 0]


class MemoryBar(Instrument):
    """The bar, the gauges of its parts, and other programs on the GPU."""

    def lines(self, width: int) -> list[Content]:
        """The lines; see `Instrument.lines`."""
        loaded = self.facts.loaded
        if loaded is None:
            return []
        memory = memory_use(self.facts)
        top = [heading(width, "Memory", *_sum(memory)), bar(memory.segments(), width)]
        if self.compact:
            return [*top, *_short_legend(memory, width)]
        others = self.facts.reading.processes or ()
        per_token = loaded.ledger.get("kv_cache", 0) / max(1, loaded.context_size)
        named = [line(width, ("  " + each, MUTED)) for each in holders(others, per_token)]
        if self.dropped >= NO_NAMES:
            named = []
        plan = _plan(memory, width)
        if self.dropped >= NO_PLAN:
            plan = plan[1:]  # a part that took more stays
        return [*top, *_meters(memory, width, named), *plan, *_host(loaded.host, width)]


def memory_use(facts: InstrumentFacts) -> MemoryUse:
    """Memory of the loaded model, and of the card at the last reading."""
    loaded, reading = facts.loaded, facts.reading
    assert loaded is not None
    known = {name for kind in KINDS for name in kind.components}
    more = tuple(
        name for name in (*loaded.ledger, *loaded.predicted) if name not in known
    )  # components of other versions
    kinds: dict[Kind, tuple[int, int | None]] = {}
    for kind in KINDS:
        parts = (*kind.components, *more) if kind.name == BUFFERS else kind.components
        taken = sum(loaded.ledger.get(part, 0) for part in parts)
        planned = sum(loaded.predicted.get(part, 0) for part in parts)
        if taken or planned:
            kinds[kind] = taken, planned if loaded.predicted else None
    used = round(loaded.ledger.get("kv_cache", 0) * min(1.0, facts.speed.last.context_fill))
    own, total, free = sum(taken for taken, _ in kinds.values()), reading.total, reading.free
    if facts.limit is not None and (total is None or facts.limit < total):
        left = max(0, facts.limit - own)  # others may have taken a part of it
        within = left if free is None else min(left, free)
        card = (total - free, total) if total is not None and free is not None else None
        return MemoryUse(kinds, used, facts.limit, left - within, within, True, card)
    others = max(0, total - free - own) if total is not None and free is not None else None
    return MemoryUse(kinds, used, total, others, free)


def bar(segments: Sequence[Segment], width: int) -> Content:
    """All segments in one line."""
    parts = [(_CELLS.get(each.name, "█") * cells, each.style) for each, cells in segment_cells(segments, width)]
    return line(width, *parts)


def segment_cells(segments: Sequence[Segment], width: int) -> list[tuple[Segment, int]]:
    """Cells of each segment: proportional, at least one each if there is room, `width` in all."""
    total = sum(each.bytes for each in segments)
    if not total or width <= 0:
        return []
    shown = sorted(segments, key=lambda each: -each.bytes)[:width]
    exact = {each: width * each.bytes / total for each in shown}
    cells = {each: max(1, int(part)) for each, part in exact.items()}
    while (off := width - sum(cells.values())) != 0:
        step = 1 if off > 0 else -1  # give to the most underfilled, take from the most overfilled
        able = [each for each in shown if step > 0 or cells[each] > 1]
        cells[max(able, key=lambda each: step * (exact[each] - cells[each]))] += step
    return [(each, cells[each]) for each in segments if each in cells]


def holders(others: Sequence[Process], bytes_per_token: float) -> list[str]:
    """Other programs, the largest first: "firefox 640 MiB = 4.8k tokens"; none without sizes."""
    found = []
    for each in [each for each in others if each.bytes][:NAMED]:
        size = each.bytes or 0
        found.append(f"{sanitize(each.name) or f'process {each.pid}'} {_mib(size)} MiB{_tokens(size, bytes_per_token)}")
    return found


def _tokens(size: int, bytes_per_token: float) -> str:
    """The same memory in tokens of KV cache."""
    if not bytes_per_token:
        return ""
    count = size / bytes_per_token
    return f" = {count / 1000:.1f}k tokens" if count >= 1000 else f" = {count:.0f} tokens"


def _sum(memory: MemoryUse) -> list[str | Part]:
    """Return the total memory in use, and the capacity."""
    taken = memory.measured_bytes + (memory.others or 0)
    if memory.total is None:
        return [(_gib(taken), "bold"), " GiB"]
    return [(_gib(taken), "bold"), f" of {_gib(memory.total)} GiB{' (--vram)' if memory.limited else ''}"]


def _meters(memory: MemoryUse, width: int, named: list[Content]) -> list[Content]:
    whole = memory.total or memory.measured_bytes
    found = []
    for kind, (taken, _) in memory.kinds.items():
        found.append(meter(width, kind.name, taken / whole, kind.style, f"{_mib(taken)} MiB"))
        if kind.name == KV and taken:
            share = memory.kv_used / taken
            style = rising(share, FAIR, BAD)
            value = (f"{share:.0%}", style), f"{_mib(memory.kv_used):>6} MiB"
            found.append(meter(width, f"  {IN_USE}", share, style, *value))
    if memory.others is not None and not (memory.limited and not memory.others):
        found.append(meter(width, OTHERS, memory.others / whole, OTHERS_STYLE, f"{_mib(memory.others)} MiB"))
    found += [] if memory.limited else named
    if memory.free is not None:
        found.append(meter(width, FREE, memory.free / whole, REST_STYLE, f"{_mib(memory.free)} MiB"))
    if memory.card is not None:
        used, total = memory.card
        style = rising(used / total, CARD_FAIR, CARD_BAD)
        found += [meter(width, "card", used / total, style, f"{_gib(used)} of {_gib(total)} GiB"), *named]
    return found


def _plan(memory: MemoryUse, width: int) -> list[Content]:
    """Return the planned memory, and the parts that took more."""
    planned = memory.predicted_bytes
    if planned is None:
        return []
    found = [line(width, (f"planned {_mib(planned)} MiB, allocated {_mib(memory.measured_bytes)}", MUTED))]
    for kind, (taken, part) in memory.kinds.items():
        if part is not None and taken > (1 + OVER) * part:
            more = f"{kind.name}: {_mib(taken)} MiB, planned {_mib(part)}"
            found.append(line(width, (more, "$text-warning")))
    return found


def _host(host: dict[str, int], width: int) -> list[Content]:
    """Host memory, which is not in the ledger; copies of snapshots and of a prompt are there for a time only."""
    steady = sum(size for name, size in host.items() if name not in ("snapshots", "reading", "checkpoints"))
    most = sum(host.values())
    return [meter(width, "host RAM", None, "", f"{'up to ' if most > steady else ''}{_mib(most)} MiB")] if most else []


def _short_legend(memory: MemoryUse, width: int) -> list[Content]:
    """Names and sizes in the colours of the bar, wrapped; where that takes too many rows, the unit only once."""
    parts = [(kind.name, taken, kind.style) for kind, (taken, _) in memory.kinds.items() if taken]
    parts += [(OTHERS, memory.others, OTHERS_STYLE)] if memory.others else []
    parts += [(FREE, memory.free, MUTED)] if memory.free else []
    rows = _wrapped([(name, f" {_mib(size)} MiB", style) for name, size, style in parts], width)
    if len(rows) > LEGEND_ROWS:
        sizes = [_mib(size) for _, size, _ in parts]
        sizes[0] += " MiB"
        rows = _wrapped([(name, f" {size}", style) for (name, _, style), size in zip(parts, sizes, strict=True)], width)
    return rows


def _wrapped(parts: Sequence[tuple[str, str, str]], width: int) -> list[Content]:
    """Lines of (name, size, style of the name), two blanks between them."""
    rows: list[list[str | Part]] = []
    room = 0
    for name, size, style in parts:
        cells = cell_len(name + size) + 2
        if not rows or room < cells:
            rows.append([])
            room = width + 2
        rows[-1] += ["  " if rows[-1] else "", (name, style), size]
        room -= cells
    return [line(width, *row) for row in rows]


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"

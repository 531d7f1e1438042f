"""Memory: a bar of letters, one for each part, and a legend with measured and planned sizes.

Letters make the bar legible without colour: K is the KV cache in use, k the rest of it, O other processes, a dot free
memory. Total and free memory come from NVML; what the ledger does not explain belongs to other processes. On the CPU
the figures are those of host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content

from localq.sanitize import sanitize
from localq.tui.instruments.instrument_facts import InstrumentFacts
from localq.tui.instruments.instrument_widget import UNKNOWN, Instrument, line

if TYPE_CHECKING:
    from localq.gpus import Process

MIB = 2**20
NAMED = 3  # other processes
KV, OTHERS, FREE = "K", "O", "·"


@dataclass(frozen=True)
class Kind:
    """A part of the bar: letter, name, components of the ledger, style."""

    letter: str
    name: str
    components: tuple[str, ...]
    style: str


KINDS = (
    Kind("W", "weights", ("weights",), "reverse $primary"),
    Kind("E", "embedding", ("embedding",), "reverse $accent-darken-2"),
    Kind("H", "head", ("head",), "reverse $accent"),
    Kind(KV, "KV cache", ("kv_cache",), "reverse $success"),
    Kind("S", "scratch", (
        "scratch", "tables", "step_buffers", "attention_workspace", "sampler", "cublas_workspace",
    ), "reverse $foreground"),
    Kind("G", "graphs", ("graphs",), "reverse $foreground-darken-2"),
    Kind("C", "CUDA", ("cuda_context",), "reverse $foreground-darken-3"),
)  # fmt: skip
RESERVED_STYLE, OTHERS_STYLE, FREE_STYLE = "$success", "reverse $error", "$text-muted"


@dataclass(frozen=True)
class Segment:
    """A segment of the bar; its width is proportional to `bytes`."""

    letter: str
    bytes: int
    style: str


@dataclass(frozen=True)
class MemoryUse:
    """Kind -> (measured, planned or None), KV cache in use, total, other processes, free; None: unknown."""

    kinds: dict[Kind, tuple[int, int | None]]
    kv_used: int
    total: int | None
    others: int | None
    free: int | None

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
            used = self.kv_used if kind.letter == KV else taken
            found.append(Segment(kind.letter, used, kind.style))
            if kind.letter == KV:
                found.append(Segment(KV.lower(), taken - used, RESERVED_STYLE))
        found.append(Segment(OTHERS, self.others or 0, OTHERS_STYLE))
        found.append(Segment(FREE, self.free or 0, FREE_STYLE))
        return [each for each in found if each.bytes > 0]


class MemoryBar(Instrument):
    """The bar, its legend, and other processes on the GPU."""

    def lines(self, width: int) -> list[Content]:
        """The lines; see `Instrument.lines`."""
        loaded = self.facts.loaded
        if loaded is None:
            return [line(width, ("Memory", "bold"), ": no model loaded")]
        memory = memory_use(self.facts)
        drawn = line(
            width, *[(each.letter * cells, each.style) for each, cells in segment_cells(memory.segments(), width)]
        )
        if self.compact:
            return [_short_title(memory, width), drawn, *_short_legend(memory, width)]
        others = self.facts.reading.processes or ()
        per_token = loaded.ledger.get("kv_cache", 0) / max(1, loaded.context_size)
        named = [line(width, ("  " + each, "$text-muted")) for each in holders(others, per_token)]
        legend = [*_legend(memory, width), *_host(loaded.host, width)]
        return [_title(self.facts, memory, width), drawn, *legend, *named]


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
        parts = (*kind.components, *more) if kind.letter == "S" else kind.components
        taken = sum(loaded.ledger.get(part, 0) for part in parts)
        planned = sum(loaded.predicted.get(part, 0) for part in parts)
        if taken or planned:
            kinds[kind] = taken, planned if loaded.predicted else None
    used = round(loaded.ledger.get("kv_cache", 0) * min(1.0, facts.speed.last.context_fill))
    others = None
    if reading.total is not None and reading.free is not None:
        others = max(0, reading.total - reading.free - sum(taken for taken, _ in kinds.values()))
    return MemoryUse(kinds, used, reading.total, others, reading.free)


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
    """Other processes, the largest first: "firefox 640 MiB = 3.9k tokens"; none without sizes."""
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


def _title(facts: InstrumentFacts, memory: MemoryUse, width: int) -> Content:
    loaded = facts.loaded
    assert loaded is not None
    name = loaded.device_name.removeprefix("NVIDIA ").removeprefix("GeForce ") if facts.on_gpu else "this machine"
    size = f", {_mib(memory.total)} MiB" if memory.total is not None else ""
    return line(width, ("Memory", "bold"), f" of {sanitize(name)}{size}")


def _short_title(memory: MemoryUse, width: int) -> Content:
    off = _off(memory.measured_bytes, memory.predicted_bytes)
    planned = "" if memory.predicted_bytes is None else f", planned {_mib(memory.predicted_bytes)} ({off})"
    title = f"Memory {_mib(memory.measured_bytes)} MiB{planned}"
    return line(width, ("Memory", "bold"), (title if len(title) <= width else title.replace(" MiB", ""))[6:])


def _row(letter: tuple[str, str], name: str, taken: int, planned: int | None, width: int) -> Content:
    size = UNKNOWN if planned is None else _mib(planned)
    return line(width, letter, f" {name:<11}{_mib(taken):>8}{size:>8}{_off(taken, planned):>7}")


def _legend(memory: MemoryUse, width: int) -> list[Content]:
    found = [line(width, (f"{'  MiB':<13}{'used':>8}{'planned':>8}{'diff':>7}", "$text-muted"))]
    for kind, (taken, planned) in memory.kinds.items():
        found.append(_row((kind.letter, kind.style), kind.name, taken, planned, width))
        if kind.letter == KV:
            used, rest = _mib(memory.kv_used), _mib(taken - memory.kv_used)
            found.append(line(width, f"  K in use {used}, ", (KV.lower(), RESERVED_STYLE), f" reserved {rest}"))
    found.append(_row(("=", ""), "total", memory.measured_bytes, memory.predicted_bytes, width))
    for letter, name, size, style in (
        (OTHERS, "others", memory.others, OTHERS_STYLE), (FREE, "free", memory.free, FREE_STYLE),
    ):  # fmt: skip
        found.append(line(width, (letter, style), f" {name:<11}{UNKNOWN if size is None else _mib(size):>8}"))
    return found


def _host(host: dict[str, int], width: int) -> list[Content]:
    """Host memory, which is not in the ledger: "+" and the same columns."""
    words = {"embedding": "host", "snapshots": "host, max", "reading": "host, max"}
    found = [(name, size) for name, size in host.items() if size]
    return [line(width, f"+ {name:<11}{_mib(size):>8}  {words.get(name, 'host')}") for name, size in found]


def _short_legend(memory: MemoryUse, width: int) -> list[Content]:
    """Letters and sizes, wrapped."""
    parts = [(kind.letter, kind.name, taken) for kind, (taken, _) in memory.kinds.items() if taken]
    parts += [(OTHERS, "others", memory.others or 0)] if memory.others is not None else []
    parts += [(FREE, "free", memory.free or 0)] if memory.free is not None else []
    rows: list[str] = []
    for letter, name, size in parts:
        part = f"{letter} {name} {_mib(size)}"
        if rows and len(rows[-1]) + 2 + len(part) <= width:
            rows[-1] += f"  {part}"
        else:
            rows.append(part)
    return [line(width, row) for row in rows]


def _off(taken: int, planned: int | None) -> str:
    if not planned:
        return UNKNOWN
    off = 100 * (taken - planned) / planned
    return f"{off:+.1f}%" if abs(off) < 99.95 else f"{off:+.0f}%"


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}"

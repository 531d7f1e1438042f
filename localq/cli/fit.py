"""`localq fit`: what a card can hold, computed from the catalogue. No torch, no network, no download."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from localq import catalog, planner
from localq.architecture import Architecture
from localq.catalog import ModelEntry
from localq.cli import options
from localq.cli.output import human_bytes, note, print_json, stdout_table
from localq.errors import ExitCode, LocalqError, usage_error
from localq.planner import MIB, Plan

Model = Annotated[str | None, typer.Argument(help="Only this model: its memory, line by line, in every format.")]
Vram = Annotated[str | None, typer.Option("--vram", metavar="SIZE", help="Of a card you do not have here, such as 24.")]
Desktop = Annotated[
    str | None, typer.Option("--desktop", metavar="SIZE", help="What other programs take, such as 1.2.")
]
Everything = Annotated[bool, typer.Option("--all", help="Every format of every model, not the best one of each.")]


@dataclass(frozen=True)
class Memory:
    """Bytes of the card, and of these what other programs hold."""

    total: int
    desktop: int

    @property
    def budget(self) -> int:
        """Bytes for localq now."""
        return max(self.total - self.desktop, 0)


@dataclass(frozen=True)
class Candidate:
    """A shape in a format, before any card is looked at. `weights`: exact bytes where the files are here."""

    name: str
    arch: Architecture
    format: str
    scheme: str = ""
    download_bytes: int | None = None
    not_yet: str | None = None
    remark: str = ""
    preferred: bool = True


@dataclass(frozen=True)
class Row:
    """One candidate on one card. Contexts in tokens, 0 where it does not fit."""

    candidate: Candidate
    now: Plan
    ctx_max: int
    ctx_max_no_desktop: int
    fits: bool
    reason: str | None

    @property
    def weights(self) -> int:
        """Bytes of all weights, embedding and head included."""
        parts = self.now.ledger.components
        return sum(parts.get(part, 0) for part in ("weights", "embedding", "head"))


def fit(
    model: Model = None,
    vram: Vram = None,
    desktop: Desktop = None,
    ctx: options.Context = None,
    everything: Everything = False,
    json: options.Json = False,
) -> None:
    """Say which models fit a GPU, in which format, with how much context."""
    memory = _memory(vram, desktop)
    candidates = _of_model(model) if model else _of_catalogue()
    rows = [_row(each, memory, ctx) for each in candidates]
    if not model:
        rows = _ordered(rows)
    if json:
        print_json(_as_json(rows, memory, ctx, with_ledger=model is not None))
    elif model:
        _print_ledgers(rows, memory)
    else:
        _print_table(rows if everything else _best_of_each(rows), memory)


def _memory(vram: str | None, desktop: str | None) -> Memory:
    if vram is not None:
        memory = Memory(planner.parse_card(vram), planner.parse_bytes(desktop) if desktop else 0)
    else:
        total, used = _detected()
        memory = Memory(total, planner.parse_bytes(desktop) if desktop else used)
    if memory.total < planner.CUDA_CONTEXT_BYTES:
        least = f"a CUDA program alone takes {planner.CUDA_CONTEXT_BYTES // MIB} MiB"
        raise usage_error("--vram", f"{memory.total // MIB} MiB is too little: {least}", "A bare number means GiB.")
    return memory


def _detected() -> tuple[int, int]:
    """(bytes in total, bytes that other programs hold) of the GPU that localq would use."""
    import pynvml  # type: ignore[import-untyped] # start-up cost: most runs of `fit` name a card instead

    try:
        pynvml.nvmlInit()
        try:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
            if visible.isdecimal():
                device = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
            else:
                device = pynvml.nvmlDeviceGetHandleByUUID(visible)
            memory = pynvml.nvmlDeviceGetMemoryInfo(device)
            return int(memory.total), int(memory.total) - int(memory.free)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        step = "Say how much memory the card has: localq fit --vram 24."
        raise LocalqError("fit", f"no NVIDIA GPU can be asked ({error})", step, ExitCode.USAGE) from error


def _of_catalogue() -> list[Candidate]:
    return [candidate for entry in catalog.load_catalogue() for candidate in _of_entry(entry)]


def _of_entry(entry: ModelEntry, only: str | None = None) -> list[Candidate]:
    """One candidate for each format that is published or can be made; the first source of a format counts."""
    candidates = []
    base = entry.source(entry.base_format)
    made = catalog.MADE_FORMATS if base is not None else ()
    for format in dict.fromkeys((*(each.format for each in entry.sources), *made)):
        source = entry.source(format)
        files = source or base
        if files is None or only not in (None, format):
            continue
        remark = "" if source else f"quantized here, from {files.format}"
        remark = "gated" if files.gated and not remark else remark
        candidates.append(
            Candidate(
                entry.name if format == entry.default_format else f"{entry.name}@{format}",
                entry.arch,
                format,
                source.scheme if source else "",
                files.bytes or None,
                catalog.not_yet(entry, format),
                remark,
                format == entry.default_format,
            )
        )
    return candidates


def _of_model(name: str) -> list[Candidate]:
    """The formats of one model: all that the catalogue has, or the one that a name, folder or file says."""
    target = catalog.resolve(name)
    if target.entry is not None:
        plain = {each.casefold() for each in (target.entry.name, *target.entry.aliases)}
        return _of_entry(target.entry, None if name.strip().casefold() in plain else target.format)
    if target.path is None:
        step = f"`localq pull {target.name}`, then `localq show {target.name}`."
        raise LocalqError(target.name, "its shape is not in the catalogue", step, ExitCode.UNKNOWN_MODEL)
    from localq.modelfiles import open_model  # start-up cost: only files on this machine need it

    files = open_model(target.path)
    method = (files.config.get("quantization_config") or {}).get("quant_method", "bf16")
    format = "gguf" if files.kind == "gguf" else {"bitsandbytes": "nf4"}.get(method, method)
    return [Candidate(target.name, Architecture.from_config(files.config), format)]


def _row(candidate: Candidate, memory: Memory, ctx: int | None) -> Row:
    arch, format, scheme = candidate.arch, candidate.format, candidate.scheme
    now = planner.assess(arch, format, memory.budget, scheme=scheme, name=candidate.name)
    alone = planner.assess(arch, format, memory.total, scheme=scheme, name=candidate.name)
    ctx_max, ctx_max_no_desktop = (plan.ctx if plan.fits else 0 for plan in (now, alone))
    fits, reason = now.fits, candidate.not_yet if now.fits else now.reason
    if now.fits and ctx is not None and ctx > ctx_max:
        fits, reason = False, f"{ctx_max} tokens of context at most"
    return Row(candidate, now, ctx_max, ctx_max_no_desktop, fits, reason)


def _ordered(rows: list[Row]) -> list[Row]:
    """As a person would choose: what runs and leaves a usable context before the rest, the largest model first.

    Among models of one size the catalogue's order decides, among the formats of one model the default comes first,
    then more bits. What does not fit follows, the nearest to fitting first.
    """

    def key(row: Row) -> tuple[float, ...]:
        arch = row.candidate.arch
        if not row.fits:
            return (3, row.now.ledger.total)
        usable = row.ctx_max >= min(planner.USABLE_CONTEXT, arch.max_context)
        group = 2 if row.candidate.not_yet else 0 if usable else 1
        return (group, -planner.size_class(arch))

    def within(row: Row) -> tuple[float, ...]:
        return (not row.candidate.preferred, -_bits(row))

    order = {name: i for i, name in enumerate(dict.fromkeys(_model(row) for row in rows))}
    return sorted(rows, key=lambda row: (key(row), order[_model(row)], within(row)))


def _best_of_each(rows: Iterable[Row]) -> list[Row]:
    """The first row of every model, in the order given."""
    best: dict[str, Row] = {}
    for row in rows:
        best.setdefault(_model(row), row)
    return list(best.values())


def _model(row: Row) -> str:
    return row.candidate.name.partition("@")[0]


def _bits(row: Row) -> float:
    return planner.bits_per_weight(row.candidate.arch, row.candidate.format, row.candidate.scheme)


def _as_json(rows: list[Row], memory: Memory, ctx: int | None, with_ledger: bool) -> dict[str, Any]:
    def body(row: Row) -> dict[str, Any]:
        fields = {
            "name": row.candidate.name,
            "format": row.candidate.format,
            "fits": row.fits,
            "runs": row.candidate.not_yet is None,
            "bits_per_weight": round(_bits(row), 3),
            "weights_bytes": row.weights,
            "ctx_max": row.ctx_max,
            "ctx_max_no_desktop": row.ctx_max_no_desktop,
            "tok_s": None,  # this version does not predict speed
            "download_bytes": row.candidate.download_bytes,
            "quality": None,  # and has measured no quality yet
            "reason": row.reason,
        }
        ledger = {"ctx": row.now.ctx, "ledger_bytes": row.now.ledger.components} if with_ledger else {}
        return {**fields, **ledger}

    return {
        "vram_bytes": memory.total,
        "desktop_bytes": memory.desktop,
        "ctx": ctx,
        "rows": [body(row) for row in rows],
    }


def _print_table(rows: list[Row], memory: Memory) -> None:
    _print_memory(memory)
    contexts = ["CONTEXT", "DESKTOP CLOSED"] if memory.desktop else ["CONTEXT"]
    headers = ["MODEL", "FORMAT", "BITS", "WEIGHTS", *contexts, "DOWNLOAD", "FITS"]
    lines = []
    for row in rows:
        shown = [_tokens(row.ctx_max), _tokens(row.ctx_max_no_desktop)][: len(contexts)]
        lines.append([
            row.candidate.name, row.candidate.format, f"{_bits(row):.2f}", human_bytes(row.weights), *shown,
            _size(row.candidate.download_bytes), _verdict(row),
        ])  # fmt: skip
    stdout_table(headers, lines, right=frozenset(range(2, len(headers) - 1)))


def _print_ledgers(rows: list[Row], memory: Memory) -> None:
    _print_memory(memory)
    parts = list(dict.fromkeys(part for row in rows for part in row.now.ledger.components))
    headers = ["MODEL", "FORMAT", "CONTEXT", *(part.replace("_", " ").upper() for part in parts), "TOTAL, MIB", "FITS"]
    lines = []
    for row in rows:
        ledger = row.now.ledger
        sizes = [f"{ledger.components[part] / MIB:,.0f}" for part in parts]
        total = f"{ledger.total / MIB:,.0f}"
        lines.append([row.candidate.name, row.candidate.format, _tokens(row.now.ctx), *sizes, total, _verdict(row)])
    stdout_table(headers, lines, right=frozenset(range(2, len(headers) - 1)))
    note("sizes in MiB, with the context shown")


def _print_memory(memory: Memory) -> None:
    taken = f", {memory.desktop / MIB:,.0f} MiB of it taken by other programs" if memory.desktop else ""
    note(f"GPU memory {memory.total / MIB:,.0f} MiB{taken}")


def _verdict(row: Row) -> str:
    parts = [part for part in (row.reason, row.candidate.remark) if part]
    return f"{'yes' if row.fits else 'no'}{': ' if parts else ''}{'; '.join(parts)}"


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "-"


def _size(count: int | None) -> str:
    return human_bytes(count) if count else "-"

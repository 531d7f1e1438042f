"""What `localq fit` shows: candidates from the catalogue or from files, each set against a card, in order.

Apart from the verb because the verb's file is imported at every start and this needs the planner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from localq import catalog, planner
from localq.architecture import Architecture
from localq.catalog import ModelEntry
from localq.errors import ExitCode, LocalqError
from localq.placement import Wishes
from localq.planner import Plan


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
    """A shape in a format, before any card is looked at.

    not_yet    why this version cannot run it, None when it can
    preferred  this is what the bare name of the model means
    """

    name: str
    arch: Architecture
    format: str
    scheme: str = ""
    download_bytes: int | None = None
    not_yet: str | None = None
    remark: str = ""
    preferred: bool = True

    @property
    def model(self) -> str:
        """The name without a format."""
        return self.name.partition("@")[0]

    @property
    def last(self) -> bool:
        """Offered behind all else: see the catalogue."""
        return self.format in catalog.LAST_FORMATS

    @property
    def bits(self) -> float:
        """Stored bits per weight of the block matrices."""
        return planner.bits_per_weight(self.arch, self.format, self.scheme)


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
        candidate = self.candidate
        return sum(planner.weights_bytes(candidate.arch, candidate.format, candidate.scheme).values())


def of_catalogue() -> list[Candidate]:
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
        if last := catalog.LAST_FORMATS.get(format):
            remark = ", ".join(filter(None, (last, remark)))
        candidates.append(
            Candidate(
                entry.name if format == entry.default_format else f"{entry.name}@{format}",
                entry.arch,
                format,
                source.scheme if source else "",
                files.bytes or None,
                catalog.not_yet(entry.arch, format),
                remark,
                format == entry.default_format,
            )
        )
    return candidates


def of_model(name: str) -> list[Candidate]:
    """The formats of one model: all that the catalogue has, or the one that a name, folder or file says."""
    target = catalog.resolve(name)
    if target.entry is not None:
        plain = {each.casefold() for each in (target.entry.name, *target.entry.aliases)}
        return _of_entry(target.entry, None if name.strip().casefold() in plain else target.format)
    if target.path is None:
        step = f"`localq pull {target.name}`, then `localq show {target.name}`."
        raise LocalqError(target.name, "its shape is not in the catalogue", step, ExitCode.UNKNOWN_MODEL)
    from localq.modelfiles import open_model  # start-up cost: only files on this machine need these two
    from localq.schemes import scheme_of

    files = open_model(target.path)
    method = str(files.quantization.get("quant_method", "bf16"))
    format = "gguf" if files.kind == "gguf" else {"bitsandbytes": "nf4", "localq_vq2": "vq2"}.get(method, method)
    arch = Architecture.from_config(files.config)
    return [Candidate(target.name, arch, format, scheme_of(files), not_yet=catalog.not_yet(arch, format))]


def row_of(candidate: Candidate, memory: Memory, wishes: Wishes) -> Row:
    """What the planner says: with the context of `wishes` if it has one, else with the largest."""
    arch, ctx, name = candidate.arch, wishes.ctx, candidate.name
    of, free = (arch, candidate.format), replace(wishes, ctx=None)
    try:
        now, alone = (
            planner.assess(*of, budget, wishes=free, scheme=candidate.scheme, name=name)
            for budget in (memory.budget, memory.total)
        )
    except LocalqError as error:  # nothing of that shape can be asked for this
        plain = planner.assess(*of, memory.budget, scheme=candidate.scheme, name=name)
        return Row(candidate, replace(plain, fits=False), 0, 0, False, error.why)
    ctx_max, ctx_max_no_desktop = (plan.ctx if plan.fits else 0 for plan in (now, alone))
    fits, reason = now.fits, candidate.not_yet if now.fits else now.reason
    if now.fits and ctx is not None and ctx > ctx_max:
        fits, reason = False, f"{arch.max_context} tokens of context at most"
        if ctx <= arch.max_context:
            asked = planner.assess(*of, memory.budget, wishes=wishes, scheme=candidate.scheme, name=name)
            fits, reason = asked.fits, candidate.not_yet if asked.fits else asked.reason
            now, ctx_max = (asked, ctx) if asked.fits else (now, ctx_max)
    return Row(candidate, now, ctx_max, ctx_max_no_desktop, fits, reason)


def ordered(rows: list[Row]) -> list[Row]:
    """As a person would choose: what runs and leaves a usable context before the rest, the largest model first.

    What runs without kernels of ours comes behind all that has them. Among models of one size the catalogue's order
    decides, among the formats of one model the default comes first, then more bits. What does not fit follows, the
    nearest to fitting first.
    """

    def key(row: Row) -> tuple[float, ...]:
        arch = row.candidate.arch
        if not row.fits:
            return (4, row.now.ledger.total)
        usable = row.ctx_max >= min(planner.USABLE_CONTEXT, arch.max_context)
        group = 3 if row.candidate.not_yet else 2 if row.candidate.last else 0 if usable else 1
        return (group, -planner.size_class(arch))

    def within(row: Row) -> tuple[float, ...]:
        return (not row.candidate.preferred, -row.candidate.bits)

    order = {name: i for i, name in enumerate(dict.fromkeys(row.candidate.model for row in rows))}
    return sorted(rows, key=lambda row: (key(row), order[row.candidate.model], within(row)))


def best_of_each(rows: Iterable[Row]) -> list[Row]:
    """The first row of every model, in the order given."""
    best: dict[str, Row] = {}
    for row in rows:
        best.setdefault(row.candidate.model, row)
    return list(best.values())

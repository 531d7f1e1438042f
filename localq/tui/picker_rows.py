"""What the model picker lists: the models on this machine, then those that its card can hold. Knows no widget.

Names come first, from a look at the folders and the catalogue; plans and speeds follow from a thread. No network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from localq import catalog, choosing, fit_card, fit_rows, gpus, local_models, offers, planner, unlisted
from localq.errors import LocalqError
from localq.fit_rows import Memory, Row
from localq.local_models import LocalModel
from localq.offers import Offer
from localq.prepare import Say
from localq.settings import Settings
from localq.speed import Machine
from localq.wording import human_bytes

CPU_ITEM_BYTES = 4  # weights and KV cache are float32 there, whatever the format
FITS, SHORT, TOO_LARGE, NOT_YET = "fits", "short context", "too large", "does not run"
ON_CPU, INCOMPLETE, UNREADABLE, UNPLANNED = "on the CPU", "incomplete", "unreadable", "..."


@dataclass(frozen=True)
class PickerRow:
    """One line of the picker.

    name      what opens it, as `localq chat` takes it (with `exact`, in this very format)
    verdict   one of the words above, and `why` in a sentence
    ctx       tokens of context at most, None where that is not known
    local     what of it is on this machine
    offer     as it is planned; None for what nothing can be planned of
    """

    name: str
    format: str
    verdict: str = UNPLANNED
    why: str = ""
    ctx: int | None = None
    tok_s: float | None = None
    local: LocalModel | None = None
    offer: Offer | None = None

    @property
    def place(self) -> str:
        """Whether it is here: "on disk, 98.4 MB", "31.0 MB of 98.4 MB here", "98.4 MB to fetch"."""
        size = self.offer.download_bytes if self.offer is not None else None
        if self.local is not None and self.local.complete:
            return f"on disk, {human_bytes(self.local.bytes)}"
        if self.local is not None:
            return f"{human_bytes(self.local.bytes)}{f' of {human_bytes(size)}' if size else ''} here"
        return f"{human_bytes(size)} to fetch" if size else "to fetch"

    @property
    def exact(self) -> str | None:
        """The format to ask for besides the name, which alone may mean another one on this card."""
        return self.offer.format if self.offer is not None and self.offer.preferred and self._is_catalogued else None

    @property
    def full_name(self) -> str:
        """NAME@FORMAT, or the name of what has but one."""
        return f"{self.name}@{self.exact}" if self.exact else self.name

    @property
    def _is_catalogued(self) -> bool:
        return self.offer is not None and self.offer.name == self.name

    @property
    def quality(self) -> float | None:
        """Perplexity over that of the full weights, where it was measured."""
        return fit_rows.ratio(self.offer) if self.offer is not None else None

    @property
    def cells(self) -> tuple[str, ...]:
        """Under `COLUMNS`."""
        ctx = "-" if self.ctx is None else f"{self.ctx:,}"
        rate = "-" if self.tok_s is None else f"{self.tok_s:.0f}" if self.tok_s >= 10 else f"{self.tok_s:.1f}"
        quality = "-" if self.quality is None else f"{self.quality:.2f}x"
        return self.name, self.format, self.verdict, ctx, rate, self.place, quality

    @property
    def sentence(self) -> str:
        """All of it in words, for whoever sees no columns."""
        told = [f"{self.name}, {self.format}: {self.verdict}"]
        told += [f"{self.ctx:,} tokens of context at most"] if self.ctx else []
        told += [f"about {self.cells[4]} tok/s"] if self.tok_s is not None else []
        told += [self.place, self.why]
        return "; ".join(filter(None, told))


COLUMNS = ("MODEL", "FORMAT", "VERDICT", "CONTEXT", "TOK/S", "WHERE", "QUALITY")
RIGHT = (3, 4, 6)  # columns of figures


@dataclass(frozen=True)
class Outlook:
    """What is planned for: bytes of the GPU, or None and bytes of memory that are free; how fast it reads.

    words, basis   the same in words, and what the speeds rest on
    """

    words: str
    budget: int | None
    host_bytes: int = 0
    machine: Machine | None = None
    basis: str = ""


def names() -> list[PickerRow]:
    """At once: what is here, then the catalogue. Raises LocalqError for a damaged catalogue or an unreadable disk."""
    known = offers.of_catalogue()
    found = _local(known)
    here = {row.name for row in found}
    listed = [each for each in known if each.preferred and each.name not in here]
    return [*found, *(PickerRow(each.name, each.format, offer=each) for each in listed)]


def outlook(settings: Settings, say: Say) -> Outlook:
    """Of this machine. May measure how fast its GPU reads, once, which takes seconds: `say` is told."""
    budget = choosing.budget_here(settings)
    gpu = gpus.first_visible(gpus.probe().gpus) if budget is not None else None
    if budget is None or gpu is None:
        import psutil  # type: ignore[import-untyped]  # start-up cost: a machine with a GPU does without; ships no types

        free = int(psutil.virtual_memory().available)
        why = "by the settings" if settings.device == "cpu" else "there is no NVIDIA GPU"
        return Outlook(f"On the CPU ({why}), {human_bytes(free)} of memory free", None, free)
    machine, basis = fit_card.machine_here(gpu, say)
    limit = f" (--vram {settings.vram})" if settings.vram else ""
    words = f"{gpu.name}: {budget / planner.MIB:,.0f} MiB to use{limit}"
    return Outlook(words, budget, machine=machine, basis=basis)


def planned(outlook: Outlook, settings: Settings, every: bool = False) -> list[PickerRow]:
    """The models here, the last used first, then those that fit best. every: all formats, not the best of each model.

    Raises LocalqError as `names`.
    """
    known = offers.of_catalogue()
    found = [_with_plan(row, outlook, settings) for row in _local(known)]
    here = {row.name for row in found}
    if outlook.budget is None:
        wanted = [each for each in known if each.preferred or every]
        rows = [_on_cpu(PickerRow(each.name, each.format, offer=each), outlook) for each in wanted]
        rows.sort(key=lambda row: (row.verdict != ON_CPU, _cpu_bytes(row.offer) if row.offer else 0))
        return [*found, *(row for row in rows if row.name not in here)]
    fitted = fit_rows.ordered([_fitted(each, outlook, settings) for each in known])
    rows = [_of_row(each) for each in (fitted if every else fit_rows.best_of_each(fitted))]
    return [*found, *(row for row in rows if row.name not in here)]


# ---- what is here


def _local(known: Sequence[Offer]) -> list[PickerRow]:
    by_name = {each.name: each for each in known}
    by_repo: dict[str, Offer] = {}
    for each in known:
        if each.source is not None:
            by_repo.setdefault(each.source.repo.casefold(), each)
    rows: dict[str, PickerRow] = {}
    for model in local_models.list_local():
        offer = by_name.get(model.name) or (None if model.complete else by_repo.get(model.repo.casefold()))
        name = offer.name if offer is not None else model.name
        row = PickerRow(name, offer.format if offer is not None else model.format, local=model, offer=offer)
        rows.setdefault(name, row)
    return list(rows.values())


def _with_plan(row: PickerRow, outlook: Outlook, settings: Settings) -> PickerRow:
    if row.offer is None:
        assert row.local is not None, "what the catalogue does not list is here"
        if not row.local.complete:
            return replace(row, verdict=INCOMPLETE, why="its download was cut off; opening it goes on")
        try:
            offer = unlisted.offer(catalog.resolve(str(row.local.path)), offline=True)
        except LocalqError as error:
            return replace(row, verdict=UNREADABLE, why=error.why)
        row = replace(row, offer=offer)
    assert row.offer is not None
    if outlook.budget is None:
        return _on_cpu(row, outlook)
    of_card = _of_row(_fitted(row.offer, outlook, settings))
    return replace(of_card, name=row.name, format=row.format, local=row.local)


# ---- what fits


def _fitted(offer: Offer, outlook: Outlook, settings: Settings) -> Row:
    memory, wishes = Memory(outlook.budget or 0, 0), choosing.wishes_of(settings)
    try:
        return fit_rows.row_of(offer, memory, wishes, outlook.machine)
    except LocalqError:  # the shape cannot have what is wished for, which loading will say
        return fit_rows.row_of(offer, memory, planner.Wishes(), outlook.machine)


def _of_row(row: Row) -> PickerRow:
    offer = row.offer
    usable = row.ctx_max >= min(planner.USABLE_CONTEXT, offer.arch.max_context)
    verdict = TOO_LARGE if not row.fits else NOT_YET if offer.not_yet else FITS if usable else SHORT
    rate = row.tok_s if row.fits else None
    return PickerRow(offer.name, offer.format, verdict, row.reason, row.ctx_max or None, rate, offer=offer)


def _on_cpu(row: PickerRow, outlook: Outlook) -> PickerRow:
    assert row.offer is not None
    offer, needed = row.offer, _cpu_bytes(row.offer)
    if offer.not_yet:
        return replace(row, verdict=NOT_YET, why=offer.not_yet)
    sized = f"{fit_rows.human_count(offer.arch.parameters)} parameters take about {human_bytes(needed)} of memory"
    if needed > outlook.host_bytes:
        return replace(row, verdict=TOO_LARGE, why=f"{sized}, and {human_bytes(outlook.host_bytes)} are free")
    return replace(row, verdict=ON_CPU, why=sized, ctx=min(planner.CPU_CONTEXT, offer.arch.max_context))


def _cpu_bytes(offer: Offer) -> int:
    arch = offer.arch
    cache = min(planner.CPU_CONTEXT, arch.max_context) * arch.kv_bytes_per_token(16) * CPU_ITEM_BYTES // 2
    return arch.parameters * CPU_ITEM_BYTES + cache


# ---- order and choice


def _size(row: PickerRow) -> int:
    return row.offer.arch.parameters if row.offer is not None else 0


ORDERS: dict[str, Callable[[PickerRow], tuple[object, ...]] | None] = {
    "the best first": None,
    "by name": lambda row: (row.name.casefold(),),
    "the fastest first": lambda row: (-(row.tok_s or 0.0),),
    "the longest context first": lambda row: (-(row.ctx or 0),),
    "the largest first": lambda row: (-_size(row),),
}


def shown(rows: Iterable[PickerRow], text: str, order: str) -> list[PickerRow]:
    """The rows with every word of `text` in name, format, verdict or place; in an order of `ORDERS`."""
    words = text.casefold().split()
    found = [
        row
        for row in rows
        if all(word in f"{row.name} {row.format} {row.verdict} {row.place}".casefold() for word in words)
    ]
    key = ORDERS[order]
    return found if key is None else sorted(found, key=key)


def is_typed(text: str, rows: Sequence[PickerRow]) -> bool:
    """`text` is itself a name (ORG/REPO, a folder, a file, NAME@FORMAT), and not a filter that left `rows`."""
    return bool(text.strip()) and not any(row.name.casefold() == text.strip().casefold() for row in rows) and (
        not rows or "/" in text or text.strip().endswith(".gguf") or "@" in text
    )  # fmt: skip

"""Rows of the model picker, their sort orders and filter, without widgets.

Names come at once from folders and the catalogue; plans and speeds follow from a thread. No network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from localq.files import local_models
from localq.files.local_models import LocalModel
from localq.planner import offers
from localq.planner.offers import Offer
from localq.wording import human_bytes

FITS, SHORT, TOO_LARGE, NOT_YET = "fits", "short context", "too large", "does not run"
ON_CPU, INCOMPLETE, UNREADABLE, UNPLANNED = "on the CPU", "incomplete", "unreadable", "..."


@dataclass(frozen=True)
class PickerRow:
    """One line of the picker.

    name      name that opens it in `localq chat` (with `exact`: in this format)
    verdict   one of the words above; why: the reason
    ctx       maximum context, None if unknown
    local     its files on this machine
    offer     its entry in the planner, None if it cannot be planned
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
        """Where it is: "on disk, 98.4 MB", "31.0 MB of 98.4 MB on disk", "98.4 MB to fetch"."""
        size = self.offer.download_bytes if self.offer is not None else None
        if self.local is not None and self.local.complete:
            return f"on disk, {human_bytes(self.local.bytes)}"
        if self.local is not None:
            return f"{human_bytes(self.local.bytes)}{f' of {human_bytes(size)}' if size else ''} on disk"
        return f"{human_bytes(size)} to fetch" if size else "to fetch"

    @property
    def exact(self) -> str | None:
        """The format to request with the name, which alone may select another one on this card."""
        return self.offer.format if self.offer is not None and self.offer.preferred and self._is_catalogued else None

    @property
    def full_name(self) -> str:
        """NAME@FORMAT, or the name alone."""
        return f"{self.name}@{self.exact}" if self.exact else self.name

    @property
    def _is_catalogued(self) -> bool:
        return self.offer is not None and self.offer.name == self.name

    @property
    def quality(self) -> float | None:
        """Perplexity relative to the unquantized weights, where measured."""
        return offers.ratio(self.offer) if self.offer is not None else None

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells under `COLUMNS`."""
        ctx = "-" if self.ctx is None else f"{self.ctx:,}"
        rate = "-" if self.tok_s is None else f"{self.tok_s:.0f}" if self.tok_s >= 10 else f"{self.tok_s:.1f}"
        quality = "-" if self.quality is None else f"{self.quality:.2f}x"
        return self.name, self.format, self.verdict, ctx, rate, self.place, quality

    @property
    def sentence(self) -> str:
        """The row in words."""
        parts = [f"{self.name}, {self.format}: {self.verdict}"]
        parts += [f"up to {self.ctx:,} tokens of context"] if self.ctx else []
        parts += [f"about {self.cells[4]} tok/s"] if self.tok_s is not None else []
        parts += [f"perplexity {self.cells[6]} that of the unquantized model"] if self.quality is not None else []
        parts += [self.place, self.why]
        return "; ".join(filter(None, parts))


COLUMNS = ("MODEL", "FORMAT", "VERDICT", "CONTEXT", "TOK/S", "WHERE", "QUALITY")
RIGHT = (3, 4, 6)  # columns of figures


def name_rows() -> list[PickerRow]:
    """Rows without plans: models on disk, then the catalogue. Raises LocalqError for unreadable files."""
    known = offers.of_catalogue()
    found = local_rows(known)
    here = {row.name for row in found}
    listed = [each for each in known if each.preferred and each.name not in here]
    return [*found, *(PickerRow(each.name, each.format, offer=each) for each in listed)]


def local_rows(known: Sequence[Offer]) -> list[PickerRow]:
    """Rows of the models on disk, without plans. Raises as `name_rows`."""
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


# ---- order and filter


def _size(row: PickerRow) -> int:
    return row.offer.arch.parameters if row.offer is not None else 0


ORDERS: dict[str, Callable[[PickerRow], tuple[object, ...]] | None] = {
    "best first": None,
    "by name": lambda row: (row.name.casefold(),),
    "fastest first": lambda row: (-(row.tok_s or 0.0),),
    "longest context first": lambda row: (-(row.ctx or 0),),
    "largest first": lambda row: (-_size(row),),
}


def filter_rows(rows: Iterable[PickerRow], text: str, order: str) -> list[PickerRow]:
    """Rows with all words of `text` in name, format, verdict or place; sorted by an order of `ORDERS`."""
    words = text.casefold().split()
    found = [
        row
        for row in rows
        if all(word in f"{row.name} {row.format} {row.verdict} {row.place}".casefold() for word in words)
    ]
    key = ORDERS[order]
    return found if key is None else sorted(found, key=key)


def is_model_name(text: str, rows: Sequence[PickerRow]) -> bool:
    """Whether `text` is a model name (ORG/REPO, folder, file, NAME@FORMAT) rather than a filter."""
    return bool(text.strip()) and not any(row.name.casefold() == text.strip().casefold() for row in rows) and (
        not rows or "/" in text or text.strip().endswith(".gguf") or "@" in text
    )  # fmt: skip

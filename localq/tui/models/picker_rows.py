"""Rows of the model picker, their sort orders and filter, without widgets.

Names come at once from folders and the catalogue; plans and speeds follow from a thread. No network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from localq.files import local_models
from localq.files.local_models import LocalModel
from localq.planner import making, offers, ranking
from localq.planner.offers import Offer
from localq.wording import human_bytes

FITS, SHORT, TOO_LARGE, NOT_YET = "fits", "short context", "too large", "does not run"
ON_CPU, INCOMPLETE, UNREADABLE, UNPLANNED = "on the CPU", "incomplete", "unreadable", "..."
COLOURS = {FITS: "$success", ON_CPU: "$success", SHORT: "$warning", TOO_LARGE: "$error", NOT_YET: "$error",
           INCOMPLETE: "$warning", UNREADABLE: "$error"}  # fmt: skip


@dataclass(frozen=True)
class PickerRow:
    """One line of the picker.

    name      name that opens it in `localq chat` (with `exact`: in this format)
    verdict   one of the words above; why: the reason
    ctx       maximum context, None if unknown
    tok_s     predicted speed at an empty context; tok_s_full: at `ctx`; None if unknown
    make_s    seconds to quantize it on this machine, estimated; None if it is published
    local     its files on this machine; None if they cannot be read, too
    offer     its entry in the planner, None if it cannot be planned
    needs     bytes of its weights (on the CPU of all it needs); share: of the memory there is; None if unknown
    """

    name: str
    format: str
    verdict: str = UNPLANNED
    why: str = ""
    ctx: int | None = None
    tok_s: float | None = None
    tok_s_full: float | None = None
    make_s: float | None = None
    local: LocalModel | None = None
    offer: Offer | None = None
    needs: int | None = None
    share: float | None = None

    @property
    def group(self) -> str:
        """The group that it is listed in, one of `GROUPS`."""
        is_here = self.local is not None or self.verdict == UNREADABLE
        return ON_DISK if is_here else _GROUP_OF.get(self.verdict, UNCHECKED)

    @property
    def place(self) -> str:
        """Location: "on disk, 98.4 MB", "31.0 MB of 98.4 MB on disk", "61.1 GB to download, 15 min to quantize"."""
        size = self.offer.download_bytes if self.offer is not None else None
        if self.local is not None and self.local.complete:
            return f"on disk, {human_bytes(self.local.bytes)}"
        if self.local is not None:
            return f"{human_bytes(self.local.bytes)}{f' of {human_bytes(size)}' if size else ''} on disk"
        if self.verdict == UNREADABLE:
            return "on disk"
        made = "" if self.make_s is None else f", {making.duration(self.make_s)} to quantize"
        return f"{human_bytes(size)} to download{made}" if size else "to download"

    @property
    def family(self) -> str:
        """The family of its model, or its own name: the list shows one line of each unless it is unfolded."""
        entry = self.offer.entry if self.offer is not None else None
        return entry.family if entry is not None and entry.family else self.name

    @property
    def model(self) -> str:
        """The name of its model without a format."""
        return self.offer.model if self.offer is not None else self.name

    @property
    def year(self) -> int | None:
        """The year of its release, None if unknown."""
        entry = self.offer.entry if self.offer is not None else None
        return entry.year or None if entry is not None else None

    @property
    def score(self) -> str:
        """Expected score, "~" before an estimate; "-" if the model is not in the catalogue."""
        if self.offer is None or self.offer.entry is None or not self.offer.entry.score:
            return "-"
        return f"{'~' if ranking.is_estimated(self.offer) else ''}{ranking.quality(self.offer):.0f}"

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
    def cells(self) -> tuple[str, ...]:
        """The cells under `COLUMNS`."""
        ctx = "-" if self.ctx is None else f"{self.ctx:,}"
        rates = _rate(self.tok_s), _rate(self.tok_s_full)
        needs = "-" if self.needs is None else human_bytes(self.needs)
        return self.name, self.score, self.format, self.verdict, needs, ctx, *rates, self.place

    @property
    def sentence(self) -> str:
        """The row in words."""
        parts = [f"{self.name}, {self.format}: {self.verdict}"]
        parts += [f"up to {self.ctx:,} tokens of context"] if self.ctx else []
        full = f", {_rate(self.tok_s_full)} when the context is full" if self.tok_s_full is not None else ""
        parts += [f"about {_rate(self.tok_s)} tok/s{full}"] if self.tok_s is not None else []
        parts += [f"score {self.score} ({self.year})"] if self.score != "-" else []
        parts += [self.place, self.why]
        return "; ".join(filter(None, parts))


def _rate(tok_s: float | None) -> str:
    return "-" if tok_s is None else f"{tok_s:.0f}" if tok_s >= 10 else f"{tok_s:.1f}"


COLUMNS = ("MODEL", "SCORE", "FORMAT", "VERDICT", "MEMORY", "CONTEXT", "TOK/S", "WHEN FULL", "WHERE")
RIGHT = (1, 5, 6, 7)  # columns of figures
ON_DISK, FITTING, CRAMPED = "On disk", "Fits", "Short context"
OVERSIZE, UNSUPPORTED, UNCHECKED = "Too large", "Not supported", "Catalogue"
GROUPS = (ON_DISK, FITTING, CRAMPED, UNCHECKED, OVERSIZE, UNSUPPORTED)
_GROUP_OF = {FITS: FITTING, ON_CPU: FITTING, SHORT: CRAMPED, TOO_LARGE: OVERSIZE, NOT_YET: UNSUPPORTED}


def name_rows() -> list[PickerRow]:
    """Rows without plans: models on disk, then the catalogue. Raises LocalqError for unreadable files."""
    known = offers.of_catalogue()
    found = local_rows(known)
    here = {row.name for row in found}
    listed = sorted((each for each in known if each.name not in here), key=lambda each: -ranking.quality(each))
    return [*found, *(PickerRow(each.name, each.format, offer=each) for each in listed)]


def fold(rows: Iterable[PickerRow], by: Callable[[PickerRow], str]) -> list[PickerRow]:
    """The rows on disk, and of the others the first of every value of `by`, in the order given."""
    shown: dict[str, PickerRow] = {}
    for row in rows:
        shown.setdefault(f"here: {row.name}" if row.local is not None else by(row), row)
    return list(shown.values())


def local_rows(known: Sequence[Offer]) -> list[PickerRow]:
    """Rows of the models on disk, without plans; one for each that cannot be read. Raises as `name_rows`."""
    by_name = {each.name: each for each in known}
    by_repo: dict[str, Offer] = {}
    for each in known:
        if each.source is not None:
            by_repo.setdefault(each.source.repo.casefold(), each)
    rows: dict[str, PickerRow] = {}
    here = local_models.inventory()
    for model in here.models:
        offer = by_name.get(model.name) or (None if model.complete else by_repo.get(model.repo.casefold()))
        name = offer.name if offer is not None else model.name
        row = PickerRow(name, offer.format if offer is not None else model.format, local=model, offer=offer)
        rows.setdefault(name, row)
    for closed in here.unreadable:
        rows.setdefault(closed.name, PickerRow(closed.name, "-", UNREADABLE, closed.error.why))
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


def filter_rows(rows: Iterable[PickerRow], text: str, order: str, every: bool = False) -> list[PickerRow]:
    """Rows with all words of `text` in name, format, verdict or place; sorted by an order of `ORDERS`.

    Without `every` the best row of each family is shown, with a text that of each model.
    """
    words = text.casefold().split()
    found = [
        row
        for row in rows
        if all(word in f"{row.name} {row.format} {row.verdict} {row.place}".casefold() for word in words)
    ]
    if not every:
        found = fold(found, (lambda row: row.model) if words else (lambda row: row.family))
    key = ORDERS[order]
    return found if key is None else sorted(found, key=key)


def grouped(rows: Sequence[PickerRow]) -> list[PickerRow | str]:
    """The rows by group, each group after its name; within a group in the order given."""
    found: list[PickerRow | str] = []
    for group in GROUPS:
        members = [row for row in rows if row.group == group]
        found += [group, *members] if members else []
    return found


def is_model_name(text: str, rows: Sequence[PickerRow]) -> bool:
    """Return whether `text` is a model name (ORG/REPO, folder, file, NAME@FORMAT) rather than a filter."""
    return bool(text.strip()) and not any(row.name.casefold() == text.strip().casefold() for row in rows) and (
        not rows or "/" in text or text.strip().endswith(".gguf") or "@" in text
    )  # fmt: skip

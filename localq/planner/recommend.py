"""The model to chat with where none is named: the best on this machine, else the best for it. Torch-free.

The embedded model is neither: it is what is left where no other can be opened.
"""

from __future__ import annotations

from dataclasses import dataclass

from localq import disk, places
from localq.errors import LocalqError
from localq.files import catalog, local_models
from localq.files.local_models import LocalModel
from localq.files.model_folder import open_model
from localq.planner import choose, fit_rows, offers, ranking, room, uncatalogued
from localq.planner import plan as memory_plan
from localq.planner.fit_rows import FitRow, Memory
from localq.planner.offers import Offer
from localq.planner.room import Room
from localq.planner.speed import cards, local_measurements
from localq.planner.speed.cards import Card
from localq.planner.speed.predict import Machine
from localq.settings import Settings

QUICK_ON_CPU = 2.5e9  # weights of a token; on a CPU these are read in 16 bit at 20 to 60 GB/s, 4 to 12 tok/s
LOOKED_AT = 20  # models on this machine that are not in the catalogue, whose headers are read: the last used ones


@dataclass(frozen=True)
class Recommendation:
    """A model to open: its name and format as `localq chat NAME --format FORMAT` takes them, and why it was chosen."""

    name: str
    format: str | None
    why: str


def is_quick_on_cpu(offer: Offer) -> bool:
    """Return whether a CPU reads the offer's weights fast enough to chat."""
    idle = offer.arch.linear_parameters - offer.arch.active_linear_parameters
    return offer.arch.parameters - idle <= QUICK_ON_CPU


def best_here(settings: Settings) -> Recommendation | None:
    """The best complete model on this machine that chats and fits, but for the embedded one; None without one."""
    by_name, judge = {offer.name: offer for offer in offers.of_catalogue()}, _Judge.of(settings)
    found: list[tuple[float, LocalModel]] = []
    unlisted = 0
    for model in local_models.list_local():
        if not model.complete or model.where == "embedded":
            continue
        offer = by_name.get(model.name)
        if offer is None:
            unlisted += 1
            offer = _unlisted(model) if unlisted <= LOOKED_AT else None
        value = None if offer is None else judge.value(offer, is_made=True)
        if value is not None:
            found.append((value, model))
    if not found:
        return None
    model = max(found, key=lambda each: each[0])[1]
    is_listed = model.name in by_name
    name = str(model.path) if model.where == "quantized" and not is_listed else model.name
    format = model.format if is_listed and "@" not in model.name else None
    return Recommendation(name, format, f"{model.name} is the best model on this machine")


def best_to_fetch(settings: Settings) -> Recommendation | None:
    """The best published model of the catalogue for this machine, for which the disk has room; None without one."""
    free = disk.free_bytes(places.hub_cache()) - disk.RESERVE_BYTES
    judge = _Judge.of(settings)
    found = []
    for offer in offers.of_catalogue():
        source = offer.source
        if source is None or source.kind != "hub" or source.gated or not 0 < source.bytes <= free:
            continue
        value = judge.value(offer)
        if value is not None:
            found.append((value, offer))
    if not found:
        return None
    offer = max(found, key=lambda each: each[0])[1]
    best = f"The best model for {judge.where} is {offer.model} ({offer.format}){judge.figures(offer)}"
    return Recommendation(offer.name, offer.format if offer.preferred else None, f"{_why_none_here()} {best}.")


def _why_none_here() -> str:
    """Return why `best_here` found no model."""
    found = [each for each in local_models.list_local() if each.complete]
    if any(each.where != "embedded" for each in found):
        return "No chat model on this machine is both small enough and fast enough."
    if found:
        return f"The only model on this machine is {found[0].name}, the small built-in one."
    return "There are no models on this machine yet."


def _unlisted(model: LocalModel) -> Offer | None:
    """The offer of a model that is not in the catalogue; None if it cannot be read, or does not chat."""
    try:
        if open_model(model.path).chat_template is None:
            return None
        return uncatalogued.offer(catalog.resolve(str(model.path)), offline=True)
    except LocalqError:
        return None


@dataclass(frozen=True)
class _Judge:
    """Judge of the value of offers on this machine."""

    settings: Settings
    room: Room
    machine: Machine | None
    card: Card | None

    @classmethod
    def of(cls, settings: Settings) -> _Judge:
        """The judge for this machine; reads the driver, and measures nothing."""
        looked = room.here(settings)
        if looked.gpu is None:
            return cls(settings, looked, None, None)
        card = cards.match_card(looked.gpu.name, looked.gpu.total)
        rate = local_measurements.bandwidth(looked.gpu.uuid or looked.gpu.name)
        known = card is not None or rate is not None
        return cls(settings, looked, Machine.of(card, rate) if known else None, card)

    @property
    def where(self) -> str:
        """The GPU or CPU in words."""
        return self.room.gpu.name if self.room.gpu is not None else "this CPU"

    def value(self, offer: Offer, *, is_made: bool = False) -> float | None:
        """Return an offer's value; None if it cannot run, chat or fit, or is slow. is_made: as for `ranking.value`."""
        if offer.unsupported or offer.last or not ranking.chats(offer):
            return None
        if isinstance(self.room.budget, int):
            row = self._row(offer)
            least = min(memory_plan.USABLE_CONTEXT, offer.arch.max_context)
            return row.value(is_made=is_made) if row is not None and row.fits and row.ctx_max >= least else None
        if not is_quick_on_cpu(offer) or not offer.preferred:  # there every format is dequantized
            return None
        fits = memory_plan.assess(offer.arch, offer.format, self.room.budget, scheme=offer.scheme).fits
        return ranking.quality(offer) if fits else None

    def figures(self, offer: Offer) -> str:
        """Context and speed of an offer, for people; empty on the CPU."""
        row = self._row(offer) if isinstance(self.room.budget, int) else None
        if row is None:
            return ""
        speed = f", about {row.tok_s:.0f} tok/s" if row.tok_s else ""
        return f": {row.ctx_max:,} tokens of context{speed}"

    def _row(self, offer: Offer) -> FitRow | None:
        assert isinstance(self.room.budget, int)
        wishes = choose.wishes_of(self.settings)
        try:
            return fit_rows.row_of(offer, Memory(self.room.budget, 0), wishes, self.machine, self.card)
        except LocalqError:  # settings that this shape does not support
            return None

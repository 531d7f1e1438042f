"""Formats available for a model, and the one that its plain name selects on a card. Torch-free.

The default of the catalogue is selected if it leaves a usable context. Else weights on this machine come before
published ones, fast formats before those that are offered last, more bits before fewer. A format that needs a
calibration text is selected only after it was quantized here; the plan names the command.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from localq import places
from localq.errors import usage_error
from localq.files import catalog, format_facts
from localq.files.architecture import Architecture
from localq.files.catalog import ModelEntry, Source, Target
from localq.planner import footprint
from localq.planner import plan as memory_plan
from localq.planner.placement import Wishes
from localq.planner.plan import Plan
from localq.planner.speed import measurements


@dataclass(frozen=True)
class Offer:
    """A format available for a model, before a card is considered.

    source       the published weights; None if they are quantized here, or are a folder or file
    base         the source to quantize from, if they are quantized here
    unsupported  why localq cannot run it, None if it can
    preferred    the plain name of the model selects it
    block_bytes  exact bytes of the weights without embedding and head, None if unknown
    """

    name: str
    arch: Architecture
    format: str
    scheme: str = ""
    source: Source | None = None
    base: Source | None = None
    unsupported: str | None = None
    preferred: bool = True
    block_bytes: int | None = None

    @property
    def model(self) -> str:
        """The name without a format."""
        return self.name.partition("@")[0]

    @property
    def download_bytes(self) -> int | None:
        """Bytes to download, None if unknown."""
        files = self.source or self.base
        return files.bytes or None if files else None

    @property
    def last(self) -> bool:
        """Whether it is offered after all others: `Format.offered_last`, or experts one by one."""
        one_by_one = format_facts.one_by_one(self.arch, self.format)
        return one_by_one or bool(format_facts.of(self.format).offered_last)

    @property
    def is_calibrated(self) -> bool:
        """Whether it is quantized here on a text, which takes hours for a large model."""
        made_here = self.source is None and self.base is not None
        return made_here and format_facts.of(self.format).made_from == "text"

    @functools.cached_property
    def bits(self) -> float:
        """Stored bits per weight of the block matrices."""
        return footprint.bits_per_weight(self.arch, self.format, self.scheme)

    @property
    def remark(self) -> str:
        """A remark for the user, in a few words."""
        made = f"quantized here from {self.base.format}" if self.source is None and self.base else ""
        gated = "gated" if self.source is not None and self.source.gated else ""
        slow = "slow, experts one by one" if format_facts.one_by_one(self.arch, self.format) else ""
        return ", ".join(filter(None, (slow or format_facts.of(self.format).offered_last, made or gated)))


def of_catalogue() -> list[Offer]:
    """The offers of all entries."""
    return [offer for entry in catalog.load_catalogue() for offer in of_entry(entry)]


def of_entry(entry: ModelEntry, only: str | None = None) -> list[Offer]:
    """The offers of `entry`: each format that is published (its first source) or can be quantized here.

    only   the one format to return, None for all
    """
    offers = []
    base = entry.source(entry.base_format)
    for format in dict.fromkeys((*(each.format for each in entry.sources), *catalog.quantizable_formats(entry))):
        source = entry.source(format)
        if (source is None and base is None) or only not in (None, format):
            continue
        preferred = format == entry.default_format
        name = entry.name if preferred else f"{entry.name}@{format}"
        scheme, unsupported = source.scheme if source else "", format_facts.why_unsupported(entry.arch, format)
        offers.append(Offer(name, entry.arch, format, scheme, source, base, unsupported, preferred))
    return offers


@dataclass(frozen=True)
class FormatCandidate:
    """An offer on one card, and its path on this machine (None: not here).

    usable   it runs, and leaves a usable context, or the requested one
    """

    offer: Offer
    plan: Plan
    here: Path | None
    usable: bool


@dataclass(frozen=True)
class Choice:
    """The selected offer, the reason in one line, and all candidates in the catalogue's order."""

    taken: FormatCandidate
    why: str
    candidates: tuple[FormatCandidate, ...]

    @property
    def target(self) -> Target:
        """The target of the selected offer."""
        return catalog.resolve(self.taken.offer.name)


def choose(entry: ModelEntry, budget_bytes: int | None, wishes: Wishes, only: str | None = None) -> Choice:
    """Choose the format of `entry` for a card, or `only` that format.

    If none fits, the default is returned.

    On the CPU (`budget_bytes` None) the default is chosen.

    Raises LocalqError (exit 2) for wishes that the shape does not support, and for an unavailable format.
    """
    considered = tuple(_candidate(offer, budget_bytes, wishes) for offer in of_entry(entry))
    if only is not None:
        taken = next((each for each in considered if each.offer.format == only), None)
        if taken is None:
            known = ", ".join(each.offer.format for each in considered)
            raise usage_error("--format", f"{entry.name} is not available in {only!r}", f"Available: {known}.")
        return Choice(taken, "as requested", considered)
    default = next(each for each in considered if each.offer.preferred)
    if default.usable:
        return Choice(default, "the default format, and it fits", considered)
    if wishes.ctx and _candidate(default.offer, budget_bytes, replace(wishes, ctx=None)).usable:
        return Choice(default, "the default format; it fits with a shorter context", considered)
    ready = [each for each in considered if each.usable and (each.here or not each.offer.is_calibrated)]
    if not ready:
        return Choice(default, "no format that is ready to use fits", considered)
    taken = min(ready, key=lambda each: (each.here is None, each.offer.last, -each.offer.bits))
    where = "can be downloaded" if taken.offer.source else "is quantized here"
    reason = default.offer.unsupported or default.plan.reason or "leaves too little context"
    left_out = f"{default.offer.format} {reason}"
    why = f"{left_out}; {taken.offer.format} {'is on this machine' if taken.here else where} and fits"
    return Choice(taken, why, considered)


def _candidate(offer: Offer, budget_bytes: int | None, wishes: Wishes) -> FormatCandidate:
    from localq.files.hub import fetch as hub  # start-up cost: the table of all offers does not need it

    plan = memory_plan.assess(
        offer.arch, offer.format, budget_bytes, wishes=wishes, scheme=offer.scheme, name=offer.name
    )
    wanted = wishes.ctx or min(memory_plan.USABLE_CONTEXT, offer.arch.max_context)
    usable = offer.unsupported is None and plan.fits and plan.ctx >= wanted
    return FormatCandidate(offer, plan, hub.local_path(catalog.resolve(offer.name)), usable)


def making_command(offer: Offer) -> str:
    """The command that quantizes an offer that is not published, with an estimate of the time."""
    from localq import driver
    from localq.planner import prepare

    name = f"{offer.model}@{offer.format}"
    if prepare.ready_layers(catalog.resolve(name)):
        return f"localq chat {name} (localq includes its layers: a few seconds)"
    source = f"{offer.model}@{offer.base.format}" if offer.base else offer.model
    out = places.quantized_dir() / name
    here = f"{prepare.estimate(offer.format, offer.arch.parameters)} on this machine, estimated"
    there = f"{prepare.estimate_on_an_h200(offer.arch.parameters)} on an H200, estimated"
    time = here if driver.probe_driver().present else there
    return f"localq quantize {source} --format {offer.format} --out {out} ({time})"


def ratio(offer: Offer) -> float | None:
    """Perplexity divided by that of the full-precision weights; None if not measured."""
    return measurements.load().perplexity_ratio.get((offer.model, offer.format))

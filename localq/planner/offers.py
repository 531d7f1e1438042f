"""Formats available for a model, and the one that its plain name selects on a card. Torch-free.

The default of the catalogue is selected if it leaves the context that memory is saved for, else a fast format that does
and is published or on this machine, else one that leaves a usable context. Among several, weights on this machine come
before published ones, fast formats before those that are offered last, more bits before fewer. A format that needs a
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
from localq.files.schemes import MIX, VQ2_SCHEMES
from localq.planner import footprint, making
from localq.planner import plan as memory_plan
from localq.planner.placement import Wishes
from localq.planner.plan import Budget, Plan
from localq.planner.speed import cards, measurements
from localq.planner.speed.cards import Card


@dataclass(frozen=True)
class Offer:
    """A format available for a model, before a card is considered.

    source       the published weights; None if they are quantized here, or are a folder or file
    base         the source to quantize from, if they are quantized here
    unsupported  why localq cannot run it, None if it can
    preferred    the plain name of the model selects it
    block_bytes  exact bytes of the weights without embedding and head, None if unknown
    entry        its entry in the catalogue, if any
    file_bits    bits per weight in the files, where the scheme does not state them (GGUF); None: as the scheme says
    file_format  format of the files where it is loaded in another: "fp32"; empty: `format`
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
    entry: ModelEntry | None = None
    file_bits: float | None = None
    file_format: str = ""

    @property
    def shown_format(self) -> str:
        """The format of the files, for the user."""
        return self.file_format or self.format

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
        """True if it is offered after all others: `Format.offered_last`, `experts_come_last`, or no kernel."""
        experts = format_facts.experts_come_last(self.arch, self.format)
        return experts or bool(self._no_kernel) or bool(format_facts.of(self.format).offered_last)

    @property
    def _no_kernel(self) -> str:
        """Block types, or parts of the model, that no kernel supports."""
        if why := self.arch.traits.no_kernel:
            return why
        return format_facts.without_kernels(self.scheme) if self.format == "gguf" else ""

    @property
    def is_calibrated(self) -> bool:
        """True if it is calibrated on a text here, which takes hours for a large model."""
        return self.is_made_here and format_facts.of(self.format).made_from == "text"

    @property
    def is_made_here(self) -> bool:
        """True if it is not published, but quantized on this machine."""
        return self.source is None and self.base is not None

    @property
    def quantized_before(self) -> str:
        """The format of the published weights if they are quantized again here; else empty."""
        if not self.is_made_here or self.base is None:
            return ""
        own, base = format_facts.of(self.format), format_facts.of(self.base.format)
        keeps = base.experts_only and own.keeps_experts  # the other matrices are published in 16 bit
        return "" if base.full_precision or keeps else base.name

    @functools.cached_property
    def bits(self) -> float:
        """Bits per weight of the block matrices on a GPU."""
        return footprint.bits_per_weight(self.arch, self.format, self.scheme)

    @property
    def stored_bits(self) -> float:
        """Bits per weight of the block matrices in the files, which decide the quality."""
        stored = self.file_bits
        return footprint.bits_per_weight(self.arch, self.format, self.scheme) if stored is None else stored

    @property
    def remark(self) -> str:
        """A remark for the user, in a few words."""
        made = f"quantized here from {self.base.format}" if self.is_made_here and self.base else ""
        made += " (quantized twice)" if self.quantized_before else ""
        if self.format == "gguf" and not self.scheme.startswith(MIX):
            made = self.scheme
        gated = "gated" if self.source is not None and self.source.gated else ""
        slow = "slow: experts run one at a time" if format_facts.one_by_one(self.arch, self.format) else ""
        if self._no_kernel:
            return f"slow: no kernel for {self._no_kernel}"
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
        offers.append(Offer(name, entry.arch, format, scheme, source, base, unsupported, preferred, entry=entry))
    return offers


@dataclass(frozen=True)
class FormatCandidate:
    """An offer on one card, and its path on this machine (None: not here).

    usable   it runs, and leaves a usable context, or the requested one
    roomy    the same with the context that memory is saved for (`plan.comfortable_context`)
    """

    offer: Offer
    plan: Plan
    here: Path | None
    usable: bool
    roomy: bool = False


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


def choose(entry: ModelEntry, budget_bytes: Budget, wishes: Wishes, only: str | None = None) -> Choice:
    """Choose the format of `entry` for a card, or `only` that format.

    If none fits, the default is returned.

    On the CPU the default is chosen, as every format is dequantized there.

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
    ready = [each for each in considered if each.usable and (each.here or not each.offer.is_calibrated)]
    # For more room nothing is quantized here, and no slower format is taken.
    roomy = [each for each in ready if each.roomy and (each.here or each.offer.source) and not each.offer.last]
    if default.roomy or (default.usable and not roomy):
        return Choice(default, "the default format, which fits", considered)
    if wishes.ctx and _candidate(default.offer, budget_bytes, replace(wishes, ctx=None)).usable:
        return Choice(default, "the default format, which fits with a shorter context", considered)
    if not ready:
        return Choice(default, "the default format; no ready-to-use format fits", considered)
    taken = min(roomy or ready, key=lambda each: (each.here is None, each.offer.last, -each.offer.bits))
    where = "can be downloaded" if taken.offer.source else "will be quantized here"
    reason = f" {default.plan.reason or f'leaves only {default.plan.ctx:,} tokens of context'}"
    left_out = f"{default.offer.format}{f': {default.offer.unsupported}' if default.offer.unsupported else reason}"
    why = f"{left_out}; {taken.offer.format} fits and {'is already on this machine' if taken.here else where}"
    return Choice(taken, why, considered)


def _candidate(offer: Offer, budget_bytes: Budget, wishes: Wishes) -> FormatCandidate:
    from localq.files.hub import fetch as hub  # start-up cost: the table of all offers does not need it

    plan = memory_plan.assess(
        offer.arch, offer.format, budget_bytes, wishes=wishes, scheme=offer.scheme, name=offer.name
    )
    wanted = wishes.ctx or min(memory_plan.USABLE_CONTEXT, offer.arch.max_context)
    usable = offer.unsupported is None and plan.fits and plan.ctx >= wanted
    roomy = usable and plan.ctx >= (wishes.ctx or memory_plan.comfortable_context(offer.arch))
    return FormatCandidate(offer, plan, hub.local_path(catalog.resolve(offer.name)), usable, roomy)


def more_bits(offer: Offer, budget_bytes: Budget, wishes: Wishes) -> tuple[str, int] | None:
    """The highest `quantize --bits` at which a vq2 offer leaves a comfortable context, and that context.

    None if that is the 2 bits of the offer, and for other formats.
    """
    if offer.format != "vq2" or offer.scheme:
        return None
    for bits, scheme in reversed(VQ2_SCHEMES.items()):
        found = _candidate(replace(offer, scheme=scheme), budget_bytes, wishes)
        if found.roomy:
            return (bits, found.plan.ctx) if bits != "2" else None
    return None


def making_command(offer: Offer, card: Card | None = None) -> str:
    """The command that quantizes an offer that is not published, with an estimate of the time.

    card   a GPU that is not here, to quantize on; None: that of this machine, else an H100
    """
    from localq import driver

    name = f"{offer.model}@{offer.format}"
    if making.has_layers(offer.model, offer.format):
        return f"localq chat {name} (takes a few seconds: localq includes its quantized layers)"
    source = f"{offer.model}@{offer.base.format}" if offer.base else offer.model
    out = places.quantized_dir() / name
    there = card or (None if driver.probe_driver().present else cards.find("H100"))
    time = making.estimate(offer.format, offer.arch.parameters, there)
    where = f"an {there.name}" if there else "this machine"
    return f"localq quantize {source} --format {offer.format} --out {out} ({time} on {where}, estimated)"


def ratio(offer: Offer) -> float | None:
    """Perplexity divided by that of the full-precision weights; None if not measured."""
    return measurements.load().perplexity_ratio.get((offer.model, offer.format))

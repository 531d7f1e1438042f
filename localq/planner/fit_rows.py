"""Rows of `localq fit` and the model picker: each offer on one card, most useful first.

Torch-free. Only a repository that is given by name needs the network.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from localq import kv_bits
from localq.errors import LocalqError, usage_error
from localq.files import catalog, format_facts
from localq.planner import footprint, making, offers, ranking
from localq.planner import plan as memory_plan
from localq.planner.offers import Offer, ratio
from localq.planner.placement import HEAD_NAMES, STORED, Wishes
from localq.planner.plan import Plan
from localq.planner.speed import predict
from localq.planner.speed.cards import Card
from localq.planner.speed.predict import Machine


@dataclass(frozen=True)
class Memory:
    """Bytes of the card, the part that other programs hold, and the part to keep free."""

    total: int
    desktop: int
    reserve: int = 0

    @property
    def budget(self) -> int:
        """Bytes available to localq now."""
        return max(self.total - self.desktop - self.reserve, 0)

    @property
    def alone(self) -> int:
        """Bytes available to localq after other programs are closed."""
        return max(self.total - self.reserve, 0)


@dataclass(frozen=True)
class FitRow:
    """One offer on one card. Contexts in tokens, 0 if it does not fit; speeds are None if not predicted.

    reason      what is lost or reduced, or why it does not fit or run
    tok_s       at an empty context; tok_s_full: at `ctx_max`
    make_s      seconds to quantize it on the card, estimated; None if it is published, or the card is unknown
    """

    offer: Offer
    now: Plan
    ctx_max: int
    ctx_max_no_desktop: int
    fits: bool
    reason: str
    tok_s: float | None = None
    tok_s_full: float | None = None
    make_s: float | None = None

    @property
    def weights(self) -> int:
        """Bytes of all weights, with embedding and head."""
        sizes = footprint.weights_bytes(self.offer.arch, self.offer.format, self.offer.scheme)
        exact = {} if self.offer.block_bytes is None else {"weights": self.offer.block_bytes}
        return sum({**sizes, **exact}.values())

    @property
    def quality(self) -> float | None:
        """Perplexity ratio, see `offers.ratio`."""
        return ratio(self.offer)

    @property
    def disk_bytes(self) -> int | None:
        """Disk that it needs: the download, and the result if it is quantized here; None if unknown."""
        size = self.offer.download_bytes
        return size + self.weights if size and self.offer.is_made_here else size

    def value(self, *, is_made: bool = False) -> float:
        """Its rank, see `ranking.value`."""
        return ranking.value(self.offer, self.now.placement, self.ctx_max, self.tok_s, is_made=is_made)


def of_catalogue(format: str | None = None) -> list[Offer]:
    """All offers, or those in one format. Raises LocalqError (exit 2) for a format without offers."""
    found = [offer for offer in offers.of_catalogue() if format in (None, offer.format)]
    if not found:
        raise usage_error(
            "--format",
            f"no model is available in {format} format",
            f"Formats: {', '.join(format_facts.FORMATS)}.",
        )
    return found


def of_model(name: str, format: str | None = None, offline: bool = False) -> list[Offer]:
    """The offers of a model: all formats in the catalogue, or that of a name, folder, file or repository.

    Raises LocalqError: exit 2 for an unavailable format, else as `uncatalogued.offer`: of a repository with several
    GGUF models `gguf_offers` has the offers.
    """
    target = catalog.resolve(name)
    if target.entry is not None:
        plain = {each.casefold() for each in (target.entry.name, *target.entry.aliases)}
        only = format if name.strip().casefold() in plain else target.format
        if found := offers.of_entry(target.entry, only):
            return found
        known = ", ".join(each.format for each in offers.of_entry(target.entry))
        raise usage_error("--format", f"{target.entry.name} is not available in {format!r}", f"Available: {known}.")
    if format is not None:
        raise usage_error(
            "--format", f"{name} is not in the catalogue", "--format works only for catalogue models; remove it."
        )
    from localq.planner import uncatalogued  # start-up cost: only files and repositories need it

    return [uncatalogued.offer(target, offline)]


def row_of(
    offer: Offer, memory: Memory, wishes: Wishes, machine: Machine | None, card: Card | None = None, *,
    is_here: bool = True,
) -> FitRow:  # fmt: skip
    """The row of an offer, planned with the largest context, or with the requested one if that is longer and fits.

    card     the GPU that would quantize it; None: unknown
    is_here  that GPU is the one of this machine
    """
    arch, ctx = offer.arch, wishes.ctx
    planned = functools.partial(
        memory_plan.assess, arch, offer.format, weights=offer.block_bytes, scheme=offer.scheme, name=offer.name
    )
    try:
        now = memory_plan.longest(planned, memory.budget, wishes)
        alone = now  # the same plan if no other program holds memory
        if memory.alone != memory.budget:
            alone = memory_plan.longest(planned, memory.alone, wishes)
    except LocalqError as error:  # this shape does not support the wishes
        plain = planned(memory.budget)
        return FitRow(offer, replace(plain, fits=False), 0, 0, False, error.why)
    ctx_max, ctx_max_no_desktop = (plan.ctx if plan.fits else 0 for plan in (now, alone))
    fits, why_not = now.fits, now.reason
    if now.fits and ctx is not None and ctx > ctx_max:
        fits, why_not = False, f"the model supports at most {arch.max_context:,} tokens of context"
        if ctx <= arch.max_context:
            why_not = planned(memory.budget, wishes=wishes).reason
    reason = _reason(offer, now) if fits else why_not
    empty, full = (_tok_s(offer, now, machine, live) for live in (predict.LIVE, ctx_max))
    return FitRow(offer, now, ctx_max, ctx_max_no_desktop, fits, reason, empty, full, _make_s(offer, card, is_here))


def _tok_s(offer: Offer, plan: Plan, machine: Machine | None, live: float) -> float | None:
    if machine is None or offer.unsupported is not None or not live:
        return None
    return predict.tokens_per_s(offer.arch, offer.format, offer.scheme, plan.placement, machine, live)


def _make_s(offer: Offer, card: Card | None, is_here: bool) -> float | None:
    if not offer.is_made_here:
        return None
    if making.has_layers(offer.model, offer.format):
        return making.READY_S
    if card is None and not is_here and offer.is_calibrated:
        return None  # of an unknown GPU nothing is known; the time on this machine's CPU would mislead
    return making.seconds(offer.format, offer.arch.parameters, card)


def _reason(offer: Offer, plan: Plan) -> str:
    """The reason of a row that fits: why it does not run, its bits and quality, what was reduced, and the remark."""
    sized = f"{human_count(offer.arch.parameters)} parameters at {offer.stored_bits:.2g} bits"
    return "; ".join(filter(None, (offer.unsupported, sized, quality(offer), plan.choice, offer.remark)))


def quality(offer: Offer) -> str:
    """Return the measured quality of an offer, in words."""
    known = ratio(offer)
    return "perplexity not measured" if known is None else f"perplexity {known:.2f}x that of the unquantized model"


def notes(row: FitRow) -> str:
    """Return the notes of a table row beside its figures: reductions and the remark, or why it does not fit."""
    if not row.fits:
        return row.reason
    return "; ".join(filter(None, (row.offer.unsupported, reductions(row.now), row.offer.remark)))


def reductions(plan: Plan) -> str:
    """Return the planner's reductions that may change replies, such as "head NF4, KV cache 8-bit"; empty if none."""
    if not plan.choice:
        return ""
    head = "" if plan.head in ("16", STORED) else f"head {HEAD_NAMES[plan.head]}"
    cache = "" if plan.kv_bits == 16 else f"KV cache {kv_bits.text(plan.kv_bits)}"
    return ", ".join(filter(None, (head, cache)))


def human_count(parameters: int) -> str:
    """A count of parameters, such as 32.8B or 135M."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def sort(rows: list[FitRow]) -> list[FitRow]:
    """Sort rows: first those that run, the most valuable first (`ranking.value`).

    Formats that are offered last follow, then base models and unsupported ones. Rows that do not fit come last, the
    smallest first.
    """

    def key(row: FitRow) -> tuple[int, float, float]:
        group = _group(row)
        return (group, row.now.ledger.total, 0.0) if not row.fits else (group, -row.value(), -(row.tok_s or 0.0))

    return sorted(rows, key=key)


def _group(row: FitRow) -> int:
    if not row.fits:
        return 4
    return 3 if row.offer.unsupported else 2 if not ranking.chats(row.offer) else 1 if row.offer.last else 0


def best_of_families(rows: Iterable[FitRow]) -> list[FitRow]:
    """The first row of every family, in the order given; a model without a family is one of its own."""
    best: dict[str, FitRow] = {}
    for row in rows:
        family = row.offer.entry.family if row.offer.entry is not None else ""
        best.setdefault(family or row.offer.model, row)
    return list(best.values())

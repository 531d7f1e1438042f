"""Rows of `localq fit` and the model picker: each offer on one card, most useful first.

Torch-free. Only a repository that is given by name needs the network.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from localq.errors import LocalqError, usage_error
from localq.files import catalog, format_facts
from localq.planner import footprint, offers
from localq.planner import plan as memory_plan
from localq.planner.offers import Offer, ratio
from localq.planner.placement import Wishes
from localq.planner.plan import Plan
from localq.planner.speed import predict
from localq.planner.speed.predict import Machine

# Least bits per weight, worth of a parameter (1 at 16 bits), and words for it. The worth is a judgement to sort by:
# 27B to 32B at 4 bits come before 70B at 2 bits, and 70B at 2 bits before 24B at 4 bits.
WORTH = (
    (6.0, 1.0, "no visible quality loss"),
    (3.8, 0.95, "close to full quality"),
    (2.4, 0.80, "some quality loss"),
    (0.0, 0.35, "clearly worse than its 4-bit version"),
)


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
    """One offer on one card. Contexts in tokens, 0 if it does not fit; tok_s is None if not predicted.

    reason   what is lost or reduced, or why it does not fit or run
    """

    offer: Offer
    now: Plan
    ctx_max: int
    ctx_max_no_desktop: int
    fits: bool
    reason: str
    tok_s: float | None = None

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


def of_catalogue(format: str | None = None) -> list[Offer]:
    """All offers, or those in one format. Raises LocalqError (exit 2) for a format without offers."""
    found = [offer for offer in offers.of_catalogue() if format in (None, offer.format)]
    if not found:
        raise usage_error(
            "--format", f"no model is available in {format!r}", f"Formats: {', '.join(format_facts.FORMATS)}."
        )
    return found


def of_model(name: str, format: str | None = None, offline: bool = False) -> list[Offer]:
    """The offers of a model: all formats in the catalogue, or that of a name, folder, file or repository.

    Raises LocalqError: exit 2 for an unavailable format, else as `uncatalogued.offer`.
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
        raise usage_error("--format", f"{name} is not in the catalogue", "Remove --format.")
    from localq.planner import uncatalogued  # start-up cost: only files and repositories need it

    return [uncatalogued.offer(target, offline)]


def row_of(offer: Offer, memory: Memory, wishes: Wishes, machine: Machine | None) -> FitRow:
    """The row of an offer: planned with the context of `wishes` if it has one, else with the largest."""
    arch, ctx = offer.arch, wishes.ctx
    planned = functools.partial(
        memory_plan.assess, arch, offer.format, weights=offer.block_bytes, scheme=offer.scheme, name=offer.name
    )
    free = replace(wishes, ctx=None)
    try:
        now = planned(memory.budget, wishes=free)
        alone = now  # the same plan if no other program holds memory
        if memory.alone != memory.budget:
            alone = planned(memory.alone, wishes=free)
        if now.fits and alone.ctx < now.ctx:  # with all memory less is reduced, and so less context fits than now
            kept = replace(free, kv_bits=now.kv_bits, embed=now.embed, head=now.head)
            alone = planned(memory.alone, wishes=kept)
    except LocalqError as error:  # this shape does not support the wishes
        plain = planned(memory.budget)
        return FitRow(offer, replace(plain, fits=False), 0, 0, False, error.why)
    ctx_max, ctx_max_no_desktop = (plan.ctx if plan.fits else 0 for plan in (now, alone))
    fits, why_not = now.fits, now.reason
    if now.fits and ctx is not None and ctx > ctx_max:
        fits, why_not = False, f"the model supports at most {arch.max_context} tokens of context"
        if ctx <= arch.max_context:
            asked = planned(memory.budget, wishes=wishes)
            fits, why_not = asked.fits, asked.reason
            now, ctx_max = (asked, ctx) if asked.fits else (now, ctx_max)
    reason = _reason(offer, now) if fits else why_not
    return FitRow(offer, now, ctx_max, ctx_max_no_desktop, fits, reason, _tok_s(offer, now, machine))


def _tok_s(offer: Offer, plan: Plan, machine: Machine | None) -> float | None:
    if machine is None or offer.unsupported is not None:
        return None
    return predict.tokens_per_s(offer.arch, offer.format, offer.scheme, plan.placement, machine)


def _reason(offer: Offer, plan: Plan) -> str:
    """The reason of a row that fits: why it does not run, its quality, what was reduced, and the remark."""
    bits = "16 bits" if offer.bits >= 6 else f"{offer.bits:.1f} bits"
    sized = f"{human_count(offer.arch.parameters)} at {bits}: {quality(offer)}"
    return "; ".join(filter(None, (offer.unsupported, sized, plan.choice, offer.remark)))


def quality(offer: Offer) -> str:
    """Quality in words, with the measured perplexity ratio if there is one."""
    words = next(words for least, _, words in WORTH if offer.bits >= least)
    known = ratio(offer)
    return words if known is None else f"{words}, perplexity {known:.2f}x (measured)"


def human_count(parameters: int) -> str:
    """A count of parameters, such as 32.8B or 135M."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def worth(offer: Offer) -> float:
    """Parameters of a 16-bit model of equal worth; see `WORTH`."""
    share = next(share for least, share, _ in WORTH if offer.bits >= least)
    return share * memory_plan.size_class(offer.arch)


def sort(rows: list[FitRow]) -> list[FitRow]:
    """Sort rows: first those that run and leave a usable context, the most capable model first.

    Formats that are offered last follow, then unsupported ones. Models of equal `worth` (of their best row) keep the
    catalogue's order. Among the formats of a model the default comes first, then more bits. Rows that do not fit come
    last, the smallest first.
    """

    def group(row: FitRow) -> int:
        if not row.fits:
            return 4
        usable = row.ctx_max >= min(memory_plan.USABLE_CONTEXT, row.offer.arch.max_context)
        return 3 if row.offer.unsupported else 2 if row.offer.last else 0 if usable else 1

    def within(row: FitRow) -> tuple[bool, float]:
        return (not row.offer.preferred, -row.offer.bits)

    best: dict[tuple[int, str], FitRow] = {}
    for row in sorted(rows, key=within):
        best.setdefault((group(row), row.offer.model), row)

    def key(row: FitRow) -> tuple[int, float]:
        return (
            (4, row.now.ledger.total) if not row.fits else (group(row), -worth(best[group(row), row.offer.model].offer))
        )

    order = {name: i for i, name in enumerate(dict.fromkeys(row.offer.model for row in rows))}
    return sorted(rows, key=lambda row: (key(row), order[row.offer.model], within(row)))


def best_of_each(rows: Iterable[FitRow]) -> list[FitRow]:
    """The first row of every model, in the order given."""
    best: dict[str, FitRow] = {}
    for row in rows:
        best.setdefault(row.offer.model, row)
    return list(best.values())

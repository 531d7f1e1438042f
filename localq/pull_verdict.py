"""What `localq pull` says before the first byte: whether the model will fit the GPU, from its shape alone.

Shapes come from the catalogue; those of other repositories from the hub (`unlisted`). Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from localq import choosing, memory_limits, offers, planner, unlisted
from localq.catalog import Target
from localq.errors import ExitCode, LocalqError
from localq.offers import Offer
from localq.planner import Plan
from localq.settings import Settings

MIB = 2**20


def chosen(name: str, settings: Settings) -> tuple[Target, str | None]:
    """What `name` means on this machine, as for `localq chat`; and why, where that is not the usual format.

    Raises LocalqError as `choosing.chosen`.
    """
    target, choice = choosing.chosen(name, None, settings, _budget(settings))
    unusual = choice is not None and not choice.taken.offer.preferred and target.name != name
    return target, f"{target.name}: {choice.why}" if choice is not None and unusual else None


def _offer(target: Target, revision: str | None) -> Offer | None:
    """What is known of `target` before it is here; None for what the catalogue does not have in this format."""
    if target.entry is None:
        return unlisted.offer(target, offline=False) if revision is None else unlisted.remote(target, revision=revision)
    return next(iter(offers.of_entry(target.entry, target.format)), None)


@dataclass(frozen=True)
class Verdict:
    """Whether a model fits (None: not known) and that in one line; refusal (exit 3): why it is not fetched."""

    fits: bool | None
    said: str
    refusal: LocalqError | None = None


def verdict(target: Target, settings: Settings, revision: str | None, *, force: bool) -> Verdict | None:
    """What to say about `target`; None where nothing is known of its shape. Refuses what does not fit the GPU (or
    --vram) unless `force`.

    Raises LocalqError: exit 8 where its files are unsound, unless `force`; 4, 5, 6 and 9 as `hub.fetch`.
    """
    budget = _budget(settings)  # a wrong --vram is said before the network is asked
    try:
        offer = _offer(target, revision)
    except LocalqError as error:
        if error.exit_code != ExitCode.FAILURE and not (force and error.exit_code == ExitCode.BAD_FILE):
            raise  # a kind that localq does not know may be fetched for another tool
        return Verdict(None, f"{target.name}: whether it fits is not known: {error.why}; it is fetched all the same")
    if offer is None:
        return None
    if offer.not_yet:
        return Verdict(None, f"{target.name}: {offer.not_yet}; it is fetched all the same")
    plan = planner.assess(
        offer.arch, offer.format, budget, wishes=choosing.wishes_of(settings), weights=offer.block_bytes,
        scheme=offer.scheme, name=target.name,
    )  # fmt: skip
    if plan.fits or force:
        return Verdict(plan.fits, f"{target.name}: {_said(plan, budget)}")
    why = f"it will not fit: {plan.reason}"
    refused = choosing.too_large(offer, budget, settings)
    ways = f" {refused.next_step}" if refused is not None else ""
    step = f"`localq fit` lists what does; --force fetches it all the same.{ways}"
    return Verdict(False, f"{target.name}: {why}", LocalqError(target.name, why, step, ExitCode.DOES_NOT_FIT))


def _said(plan: Plan, budget: int | None) -> str:
    if not plan.fits:
        return f"will not fit ({plan.reason}); it is fetched all the same"
    takes = f"{plan.ledger.total / MIB:,.0f} MiB of GPU memory for {plan.ctx:,} tokens of context"
    if budget is None:
        return f"takes {takes}"
    return f"fits: {takes}{f' ({plan.choice})' if plan.choice else ''}, of {budget / MIB:,.0f} MiB"


def _budget(settings: Settings) -> int | None:
    """Bytes of the GPU that is here, else of --vram, as if there were one; None without both."""
    here = choosing.budget_here(settings)
    allowed = memory_limits.allowed(settings)
    if here is not None or allowed is None:
        return here
    return max(0, allowed - memory_limits.reserved(settings))

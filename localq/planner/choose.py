"""The weights that a name selects on this machine: by `--format`, else by what fits the GPU."""

from __future__ import annotations

from localq import gpus
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog, format_facts
from localq.files.catalog import ModelEntry, Target
from localq.planner import draft_models, offers, room
from localq.planner import plan as memory_plan
from localq.planner.offers import Choice, Offer
from localq.planner.placement import Wishes
from localq.planner.plan import Budget
from localq.settings import Settings


def choose_target(name: str, format: str | None, settings: Settings, budget: Budget) -> tuple[Target, Choice | None]:
    """The target of `name`, and the choice of its format; no choice for a name outside the catalogue.

    budget   memory to plan for (`room`)
    Raises LocalqError: exit 4 for an unknown name, 2 for an unavailable format.
    """
    target = catalog.resolve(name)
    entry = target.entry if target.kind == "catalogue" else None
    if entry is None:
        if format is not None:
            raise usage_error(
                "--format", f"{name} is not in the catalogue", "--format works only for catalogue models; remove it."
            )
        return target, None
    asked = format or (None if _is_bare(name, entry) else target.format)
    if format is not None and not _is_bare(name, entry) and format != target.format:
        raise usage_error("--format", f"{name} already specifies a format", "Use one or the other.")
    wishes = wishes_of(settings)
    try:
        choice = offers.choose(entry, budget, wishes, asked)
    except LocalqError:
        if format is not None:
            raise
        return target, None  # settings that this shape does not support: loading reports them
    return choice.target, choice


def wishes_of(settings: Settings) -> Wishes:
    """The wishes in the settings; unset ones are left to the planner. Raises LocalqError as `draft_models.shape`."""
    draft = draft_models.shape(settings)
    sizes = (settings.ctx, settings.kv_bits, settings.embed, settings.head, settings.draft_tokens)
    return Wishes(*sizes, draft, settings.takes_mtp)


def budget_here(settings: Settings) -> int | None:
    """GPU memory that a load may take here: free memory less --reserve, at most --vram; None on the CPU."""
    budget = room.here(settings).budget
    return budget if isinstance(budget, int) else None


def _is_bare(name: str, entry: ModelEntry) -> bool:
    """Return whether `name` is the name or an alias of the entry, without a format."""
    return name.strip().casefold() in {each.casefold() for each in (entry.name, *entry.aliases)}


def check_unlisted(target: Target, budget: Budget, settings: Settings, force: bool) -> None:
    """Check from its headers, before the download, that a repository outside the catalogue can be loaded.

    Raises LocalqError unless `force`: exit 3 if it does not fit, 1 if it does not run, else as `uncatalogued.remote`.
    """
    if target.repo is None or target.entry is not None or force:
        return
    from localq.files.hub import fetch as hub
    from localq.planner import uncatalogued

    if hub.local_path(target) is not None:
        return
    offer = uncatalogued.remote(target, settings.offline)
    reason = format_facts.why_unsupported(offer.arch, offer.format)
    if reason is not None:
        step = "To list the models that fit in that much VRAM, run `localq fit --vram SIZE`."
        raise LocalqError(target.name, reason, step, ExitCode.FAILURE)
    if refusal := too_large(offer, budget, settings):
        raise refusal


def too_large(offer: Offer, budget: Budget, settings: Settings) -> LocalqError | None:
    """The error for a model that does not fit, with three ways out; None if it fits, or the memory is unknown.

    This is the one check before a download, on a GPU and on the CPU; `engine.load.plan` makes it again with exact
    bytes.
    """
    if budget is None:
        return None
    freeing = "with a larger --vram" if settings.vram else gpus.closing_hint(gpus.first_visible(gpus.probe().gpus))
    try:
        memory_plan.plan(
            offer.arch, offer.format, budget, wishes=wishes_of(settings), weights=offer.block_bytes,
            scheme=offer.scheme, name=offer.name, freeing=freeing,
        )  # fmt: skip
    except LocalqError as error:
        return error
    return None

"""What `localq pull` says before the first byte: whether the model will fit the GPU, from its shape alone.

Shapes come from the catalogue; those of other repositories from their configuration and the headers of their weights,
some 100 kB for each file. Apart from the verb because the verb's file is imported at every start.
"""

from __future__ import annotations

from dataclasses import dataclass

from localq import catalog, hub, hub_client, hub_remote, local_models, offers, planner
from localq.architecture import Architecture
from localq.catalog import Target
from localq.cli import choosing, options
from localq.errors import ExitCode, LocalqError
from localq.modelfiles import open_model
from localq.planner import Plan
from localq.schemes import scheme_of
from localq.settings import Settings

MIB = 2**20
_AS_BF16 = ("fp32", local_models.UNKNOWN_FORMAT)  # in memory, whatever they take on the disk


@dataclass(frozen=True)
class Shape:
    """What a model is made of. block_bytes: exact bytes of the weights of its blocks, None where only computed."""

    arch: Architecture
    format: str
    scheme: str = ""
    block_bytes: int | None = None


def chosen(name: str, settings: Settings) -> tuple[Target, str | None]:
    """What `name` means on this machine, as for `localq chat`; and why, where that is not the usual format.

    Raises LocalqError as `choosing.chosen`.
    """
    target, choice = choosing.chosen(name, None, settings, _budget(settings))
    unusual = choice is not None and not choice.taken.offer.preferred and target.name != name
    return target, f"{target.name}: {choice.why}" if choice is not None and unusual else None


def shape_of(target: Target, revision: str | None) -> Shape | None:
    """The shape of `target`; None for a repository of .gguf files, which do not say it in a few bytes.

    Raises LocalqError: as `hub.fetch` for a repository, exit 8 where its files describe no model that localq knows.
    """
    if target.entry is not None:
        for offer in offers.of_entry(target.entry, target.format):
            return Shape(offer.arch, offer.format, offer.scheme)
        return None
    assert target.repo is not None, "paths are not pulled"
    listing = hub_client.list_files(target.repo, revision or target.revision or "main")
    if listing.gated and not hub_client.has_token():
        raise hub_client.gated(listing.repo)
    if hub.single_gguf(listing):
        return None
    with hub_remote.outline(listing) as folder:
        files = open_model(folder)
        format = local_models.format_of_config(files.config)
        arch, scheme = Architecture.from_config(files.config), scheme_of(files)
        if format in _AS_BF16:
            return Shape(arch, "bf16", scheme)
        return Shape(arch, format, scheme, hub_remote.block_bytes(folder))


def verdict(target: Target, settings: Settings, revision: str | None, *, force: bool) -> str | None:
    """One line about what `target` will take; None where nothing is known of its shape.

    Raises LocalqError: exit 3 where it does not fit the GPU (or --vram), unless `force`; 4, 5 and 6 as `hub.fetch`.
    """
    budget = _budget(settings)  # a wrong --vram is said before the network is asked
    try:
        shape = shape_of(target, revision)
    except LocalqError as error:
        if error.exit_code not in (ExitCode.BAD_FILE, ExitCode.FAILURE):  # damaged, or of no kind that localq knows
            raise
        return f"{target.name}: whether it fits is not known: {error.why}; it is fetched all the same"
    if shape is None:
        return None
    if reason := catalog.not_yet(shape.arch, shape.format):
        return f"{target.name}: {reason}; it is fetched all the same"
    plan = planner.assess(
        shape.arch, shape.format, budget, wishes=choosing.wishes_of(settings), weights=shape.block_bytes,
        scheme=shape.scheme, name=target.name,
    )  # fmt: skip
    if not plan.fits and not force:
        why = f"it will not fit: {plan.reason}"
        step = "`localq fit` lists what does; --force fetches it all the same."
        raise LocalqError(target.name, why, step, ExitCode.DOES_NOT_FIT)
    return f"{target.name}: {_said(plan, budget)}"


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
    allowed = options.budget(settings)
    if here is not None or allowed is None:
        return here
    return max(0, allowed - options.reserved(settings))

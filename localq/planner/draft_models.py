"""The draft model that the settings name: its files, its shape for the plan, and whether it can draft. Torch-free."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from localq import drafts
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog, format_facts
from localq.files.architecture import Architecture
from localq.files.catalog import Target
from localq.files.catalog_file import ModelEntry
from localq.planner.draft_shape import DraftShape
from localq.settings import Settings

if TYPE_CHECKING:
    from localq.planner.offers import Offer


def target(settings: Settings) -> Target | None:
    """The draft model that `settings` name; None without one. Raises LocalqError (exit 4) for an unknown name."""
    name = settings.draft_model
    if name is None:
        return None
    try:
        return catalog.resolve(name)
    except LocalqError as error:
        if error.exit_code != ExitCode.UNKNOWN_MODEL:
            raise
        why = f"neither a draft source ({', '.join(drafts.CHOICES)}) nor a known model"
        raise LocalqError(f"draft '{name:.80}'", why, error.next_step, error.exit_code) from None


def shape(settings: Settings) -> DraftShape | None:
    """The draft model to plan for; None without one.

    Raises LocalqError: exit 4 for an unknown name, 2 for a model that cannot draft, else as `fit_rows.of_model`: a
    repository outside the catalogue is asked over the network.
    """
    found = target(settings)
    return None if found is None else _shape(settings.draft, settings.offline)


def check_mtp(name: str, entry: ModelEntry | None, settings: Settings) -> None:
    """Raise LocalqError (exit 2) where an MTP block must draft, for a model of the catalogue that cannot have one."""
    if settings.draft == drafts.MTP and entry is not None and not entry.arch.traits.hybrid:
        raise drafts.no_mtp(name, "the model has no MTP block")


@functools.lru_cache(maxsize=1)  # a plan asks several times, and a repository is asked over the network
def _shape(name: str, offline: bool) -> DraftShape:
    offer = _offer(name, offline)
    check(offer.name, offer.arch)
    if reason := offer.unsupported or format_facts.why_unsupported(offer.arch, offer.format):
        raise LocalqError(f"draft model {offer.name}", reason, "Use another draft model, or --draft auto.")
    return DraftShape(offer.name, offer.arch, offer.format, offer.scheme, offer.block_bytes)


def _offer(name: str, offline: bool) -> Offer:
    from localq.planner import fit_rows  # start-up cost: most runs have no draft model

    chosen = catalog.resolve(name)
    if chosen.entry is None:
        return fit_rows.of_model(name, offline=offline)[0]
    return fit_rows.of_model(chosen.entry.name, chosen.format, offline)[0]


def check(name: str, arch: Architecture) -> None:
    """Raise LocalqError (exit 2) for a model that cannot draft, whatever it drafts for."""
    if arch.recurrent_layers:
        why = "the state of its recurrent layers cannot be rolled back to the last accepted token"
        raise usage_error(f"draft model {name}", why, "Use a draft model without recurrent layers, or --draft auto.")


def warning(name: str, arch: Architecture, draft_name: str, draft: Architecture) -> str:
    """Return the objection to a draft model, in one line; empty if there is none."""
    if draft.active_linear_parameters >= arch.active_linear_parameters:
        return f"{draft_name} is no smaller than {name}, so its drafts will rarely be used"
    return ""

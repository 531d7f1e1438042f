"""The model of `localq chat`, `run` and bare `localq` where the user names none: chosen for this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from localq import settings as settings_module
from localq.chat.open_options import Opening, OpenOptions
from localq.cli import agree
from localq.cli.output import note, stderr
from localq.settings import Settings

if TYPE_CHECKING:
    from localq.planner.recommend import Recommendation


def choose(settings: Settings, wanted: OpenOptions, *, named: bool, on_screen: bool, quiet: bool = False) -> Opening:
    """The model to open: the named one, else the best on this machine, else the best for it after a question.

    named      the user named it, here or in a setting
    on_screen  the full screen asks; else the question is asked here
    """
    given = Opening(settings, wanted)
    if named or is_named():
        return given
    from localq.planner import recommend  # start-up cost: only where no model is named

    if not wanted.fresh and (model := _of_server()) is not None:
        if not quiet and not on_screen:
            note(f"using {model}, which `localq serve` has loaded; for another model, run `localq chat MODEL`")
        return replace(given, settings=settings.replace(model=model))
    found = recommend.best_here(settings)
    if found is not None:
        opening = _opening(given, found, notice=f"{found.why}; to use another model, run `localq chat MODEL`")
        if not quiet and not on_screen:
            note(opening.notice)
        return opening
    if not _may_fetch(settings, on_screen):
        return given
    found = recommend.best_to_fetch(settings)
    if found is None:
        return given
    if on_screen or wanted.agreed:
        return _opening(given, found, found.why)
    from localq.files import catalog
    from localq.planner import open_cost

    name = f"{found.name}@{found.format}" if found.format else found.name
    cost = open_cost.of(catalog.resolve(name), settings, found.why)
    if cost is not None:
        cost = replace(cost, alternative=f"{settings.model}, the small built-in model (answer no to use it)")
    if cost is None or agree.ask([cost]):
        return _opening(Opening(settings, replace(wanted, agreed=True)), found)
    note(f"using {settings.model}, the built-in model")
    return given


def chooser(settings: Settings, wanted: OpenOptions, *, named: bool) -> Callable[[], Opening] | None:
    """`choose` for the full screen, which calls it after its first frame; None if the user named a model."""
    if named or is_named():
        return None
    return partial(choose, settings, wanted, named=False, on_screen=True)


def planned(settings: Settings, *, named: bool, on_screen: bool = False) -> tuple[Settings, str | None]:
    """The settings with the model that `choose` would open, and its format, for --dry-run: nothing is asked."""
    if named or is_named():
        return settings, None
    from localq.planner import recommend  # start-up cost, as above

    found = recommend.best_here(settings)
    if found is None and _may_fetch(settings, on_screen):
        found = recommend.best_to_fetch(settings)
    return (settings, None) if found is None else (settings.replace(model=found.name), found.format)


def _of_server() -> str | None:
    """The model that a server of this user holds: it is loaded, and leaves no memory for another."""
    from localq.worker import shared  # start-up cost, as above

    held = next((engine.holding for engine in shared.servers()), None)
    return None if held is None else held.asked if os.path.isabs(held.asked) else held.model


def is_named() -> bool:
    """Return whether a setting names the model."""
    return settings_module.origins()["model"].source != "built-in"


def _may_fetch(settings: Settings, on_screen: bool) -> bool:
    """Return whether a model may be downloaded: with a network, and a user who can be asked."""
    from localq.files.hub import client as hub_client  # start-up cost, as above

    is_online = not (settings.offline or hub_client.is_offline())
    return is_online and (on_screen or (sys.stdin.isatty() and stderr().isatty()))


def _opening(given: Opening, found: Recommendation, why: str = "", notice: str = "") -> Opening:
    wanted = replace(given.wanted, format=given.wanted.format or found.format, why=why)
    return Opening(given.settings.replace(model=found.name), wanted, notice)

"""The list of GGUF models for a verb whose model is a repository with several, none of which is named."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from localq.errors import LocalqError
from localq.files import catalog
from localq.files.catalog import Target
from localq.settings import Settings


def explain(settings: Settings, verb: str) -> AbstractContextManager[None]:
    """In this context the error for such a repository is the list, which ends with the command of `verb`."""
    target = _plain_repo(settings)
    if target is None:
        return contextlib.nullcontext()
    from localq.planner import gguf_list  # start-up cost: only repositories outside the catalogue need it

    return gguf_list.explain([target], settings, verb)


def check(settings: Settings, verb: str) -> None:
    """Raise the list for such a repository, before the full screen starts."""
    if (target := _plain_repo(settings)) is not None:
        from localq.planner import gguf_list  # start-up cost, as above

        gguf_list.check(target, settings, verb)


def _plain_repo(settings: Settings) -> Target | None:
    """The model of the settings if it is a repository outside the catalogue without a tag."""
    if "/" not in settings.model:
        return None
    try:
        target = catalog.resolve(settings.model)
    except LocalqError:  # opening it says so
        return None
    return target if target.kind == "repo" and target.entry is None and not target.choice else None

"""`localq bench MODEL --drafts --draft SOURCE`: what drafts in a benchmark."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from localq import drafts
from localq.cli import agree, help_page, progress
from localq.cli.output import note
from localq.errors import usage_error
from localq.settings import Settings

if TYPE_CHECKING:
    from localq.bench.models.model_bench import BenchRequest

_DRAFT = "With --drafts: auto, lookup, mtp or a draft model."
Draft = Annotated[
    str | None,
    typer.Option("--draft", metavar="SOURCE", help=_DRAFT, show_default=False, rich_help_panel=help_page.MODES),
]


class DraftArguments(Protocol):
    """Arguments of all benchmarks of a model."""

    @property
    def synthetic(self) -> bool:
        """True for random weights."""
        ...

    @property
    def quiet(self) -> bool:
        """True for no progress."""
        ...

    @property
    def yes(self) -> bool:
        """True to download without a question."""
        ...


def with_draft(request: BenchRequest, name: str | None, settings: Settings, arguments: DraftArguments) -> BenchRequest:
    """The benchmark with the source of drafts `name`, a draft model fetched if need be; None: "auto".

    Raises LocalqError: exit 2 for one that cannot draft for the model, else as opening a model does.
    """
    chosen = settings.replace(draft=drafts.AUTO if name is None else name)
    if chosen.draft in (drafts.LOOKUP, *drafts.OF_MTP):
        takes = chosen.takes_mtp and not (arguments.synthetic and name is None)
        return replace(request, options=replace(request.options, mtp=chosen.draft if takes else ""))
    if chosen.draft_model is None:
        raise usage_error("--draft", f"'{name}' is not a model", "Pass the name of a draft model, or remove --draft.")
    assert name is not None
    if arguments.synthetic:
        why = "a model with random weights has no tokenizer to compare with that of the draft model"
        raise usage_error("--draft", why, "Remove --synthetic or --draft.")
    from localq.files.architecture import Architecture
    from localq.files.model_folder import open_model
    from localq.planner import draft_models, prepare
    from localq.text import same_tokenizer
    from localq.text.tokenizer import Tokenizer

    target = draft_models.target(chosen)
    assert target is not None
    agree.check([target], settings, arguments.yes)
    with progress.fetch_bar(target.name, arguments.quiet) as show:
        files = open_model(prepare.model_path(target, note, show, settings.offline))
    draft_models.check(target.name, Architecture.from_config(files.config))
    same_tokenizer.check(request.files.name, Tokenizer.load(request.files), target.name, Tokenizer.load(files))
    options = replace(request.options, draft_name=target.name)
    return replace(request, options=options, draft=files)

"""Open a model for a conversation: name -> files -> tokenizer and engine process.

May run in any thread. Progress and notices go to the `Watcher` of the front end.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from localq.chat import background, default_sampling
from localq.chat.open_options import OpenOptions
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts
from localq.planner import budget, consent, draft_models, open_cost, prepare
from localq.planner.consent import OpenCost
from localq.sampling import Sampling
from localq.settings import Settings
from localq.text import template
from localq.wording import OnProgress
from localq.worker import shared
from localq.worker.client import ONCE, EngineClient
from localq.worker.messages import Event, Load, Loaded
from localq.worker.shared import SharedEngine

if TYPE_CHECKING:
    from localq.files.model_folder import ModelFiles
    from localq.text.tokenizer import Tokenizer


class Watcher(Protocol):
    """Shows progress and notices while a model is opened."""

    def say(self, text: str) -> None:
        """Show a notice."""

    def agree(self, cost: OpenCost) -> bool:
        """Ask the user about a large download or quantization; may raise ConsentError to ask later."""

    def fetching(self, name: str) -> AbstractContextManager[OnProgress]:
        """Show progress of fetching or converting `name`; an exception in it ends the fetch, which can be resumed."""

    def loading(self, event: Event) -> None:
        """Show progress of a load."""


@dataclass(frozen=True)
class OpenSession:
    """A session with the client it runs on."""

    session: ChatSession
    client: EngineClient

    def answer_once(self) -> None:
        """State that no message follows: notices name options, and errors promise no new engine process."""
        self.session.in_chat, self.client.next_step = False, ONCE


@contextlib.contextmanager
def open_session(
    name: str,
    settings: Settings,
    watcher: Watcher,
    wanted: OpenOptions = OpenOptions(),  # noqa: B008 - it is frozen
) -> Iterator[OpenSession]:
    """A session with the model `name`. The engine process starts at once, and imports while the files are found.

    Raises LocalqError: exit 4 for an unknown name, 3 for a model that does not fit, else as fetching and reading files.
    """
    template.start_ahead()  # the tokenizer needs it
    engine = None if wanted.fresh or wanted.force else shared.find(name, wanted.format)
    client = EngineClient(shared=engine)
    try:
        target = _target(name, settings, wanted, watcher) if engine is None else _target_of(name, engine)
        draft = _check(target, settings, wanted, watcher)
        in_background = engine is None and not wanted.fresh and not wanted.force and background.is_wanted(settings)
        if not in_background:
            client.start()
        with watcher.fetching(target.name) as show:
            path = prepare.model_path(target, watcher.say, show, settings.offline)
        draft_path = None if draft is None else _fetch(draft, settings, watcher)
        files, tokenizer = _read(path, target, watcher)
        thinks = files.thinks if target.entry is None else target.entry.arch.thinks
        request = load_request(str(path), target.name, settings, wanted.force, thinks)
        if draft is not None and draft_path is not None:
            request = _with_draft(request, draft, draft_path, files, tokenizer, watcher)
        if in_background:
            asked = name if target.path is None else str(target.path.absolute())
            _start_in_background(client, asked, wanted.format, settings, watcher)
        sampling = settings.sampling(default_sampling.sampling(target.entry, files.generation_config))
        for line in default_sampling.notes(files.generation_config):
            watcher.say(line)
        _tell_idle(sampling, settings, watcher)
        longest = settings.max_tokens or default_sampling.max_tokens(target.entry)
        session = ChatSession(client, request, tokenizer, sampling, longest, settings.loop_guard)
        _set_up(session, settings, watcher)
        own_path = None if target.store else target.path
        session.record.model = target.name if own_path is None else str(own_path.absolute())
        yield OpenSession(session, client)
    finally:
        client.close()


def _check(target: catalog.Target, settings: Settings, wanted: OpenOptions, watcher: Watcher) -> catalog.Target | None:
    """The draft model, if there is one, once the user has agreed to what both cost. Raises LocalqError."""
    _refuse_unsupported(target)
    draft_models.shape(settings)  # what cannot draft is refused before the download
    draft_models.check_mtp(target.name, target.entry, settings)
    draft = draft_models.target(settings)
    cost = None if wanted.agreed else open_cost.of_all([target, *filter(None, [draft])], settings, wanted.why)
    if cost is not None and (cost.is_large or cost.why) and not watcher.agree(cost):
        raise consent.declined(target.name)
    return draft


def _read(path: Path, target: catalog.Target, watcher: Watcher) -> tuple[ModelFiles, Tokenizer]:
    """The files of the model at `path`, and its tokenizer. Raises LocalqError (exit 8) for damaged ones."""
    from localq.files.model_folder import open_model
    from localq.text.tokenizer import Tokenizer  # start-up cost: a wrong name is answered without these

    try:
        files = open_model(path)
        return files, Tokenizer.load(files)
    except LocalqError as error:
        if (damage := _damage(error, path, target.name, watcher)) is None:
            raise
        raise damage from error


def _set_up(session: ChatSession, settings: Settings, watcher: Watcher) -> None:
    session.system, session.think_budget = settings.system, settings.think_budget
    session.draft, session.draft_max = settings.draft, settings.draft_max
    for set_choice, choice in (
        (session.set_think, settings.think),
        (session.set_preserve_thinking, settings.preserve_thinking),
    ):
        try:
            set_choice(choice)
        except LocalqError as error:  # a setting for all models need not suit each
            watcher.say(str(error))


def _start_in_background(
    client: EngineClient, name: str, format: str | None, settings: Settings, watcher: Watcher
) -> None:
    """Give `client` an engine that stays for `keep_alive`, or one of its own where that cannot be started."""
    engine = background.start(name, format, settings)
    if engine is None:
        watcher.say(f"keep_alive has no effect: the background process did not start; see {background.log_file()}")
        client.start()
        return
    client.share(engine)
    watcher.say(
        f"the model stays in memory until it has been idle for {settings.keep_alive}; to unload it, run `localq stop`"
    )


def _fetch(draft: catalog.Target, settings: Settings, watcher: Watcher) -> Path:
    with watcher.fetching(draft.name) as show:
        return prepare.model_path(draft, watcher.say, show, settings.offline)


def _with_draft(
    request: Load, draft: catalog.Target, path: Path, files: ModelFiles, tokenizer: Tokenizer, watcher: Watcher
) -> Load:
    """The request with a draft model, which is checked against the model `files`. Raises LocalqError (exit 2)."""
    from localq.files.architecture import Architecture
    from localq.files.model_folder import open_model
    from localq.text import same_tokenizer
    from localq.text.tokenizer import Tokenizer  # start-up cost, as above

    name, draft_files = request.options.name, open_model(path)
    arch, of_draft = (Architecture.from_config(each.config) for each in (files, draft_files))
    draft_models.check(draft.name, of_draft)
    same_tokenizer.check(name, tokenizer, draft.name, Tokenizer.load(draft_files))
    if line := draft_models.warning(name, arch, draft.name, of_draft):
        watcher.say(line)
    options = dataclasses.replace(request.options, draft_path=str(path), draft_name=draft.name)
    return dataclasses.replace(request, options=options)


def _tell_idle(sampling: Sampling, settings: Settings, watcher: Watcher) -> None:
    chosen = [each.name for each in dataclasses.fields(sampling) if getattr(settings, each.name) is not None]
    if idle := sampling.greedy_warning(chosen):
        watcher.say(idle)


def load_now(opened: OpenSession, watcher: Watcher) -> Loaded:
    """Load the model if it is not loaded, with progress; show the engine's notes."""
    if opened.session.loaded is not None and opened.client.alive:
        return opened.session.loaded
    try:
        loaded = opened.session.ensure_loaded(watcher.loading)
    except LocalqError as error:
        request, has_ended = opened.session.request, not opened.client.alive
        if (damage := _damage(error, Path(request.path), request.options.name, watcher, has_ended)) is None:
            raise
        raise damage from error
    for line in loaded.notes:
        watcher.say(line)
    if loaded.device == "cuda" and not loaded.shared:
        from localq.planner.speed import local_measurements  # start-up cost: a server has kept them

        took = local_measurements.LoadMemory(
            loaded.device_name, loaded.format, loaded.context_size, loaded.kv_bits, loaded.embed, loaded.head,
            loaded.predicted, loaded.ledger,
        )  # fmt: skip
        local_measurements.keep_load(loaded.name, took)
    return loaded


def _damage(error: LocalqError, path: Path, name: str, watcher: Watcher, has_ended: bool = False) -> LocalqError | None:
    """The error (exit 8) for a file of the model with a wrong hash, if `error` may come from one; else None.

    has_ended: the engine process, over the load. Reads all files that have recorded hashes, with progress.
    """
    if error.exit_code != ExitCode.BAD_FILE and not (has_ended and error.exit_code == ExitCode.FAILURE):
        return None
    from localq.files import verification  # start-up cost: only a failed load needs it

    with watcher.fetching(name) as show:
        return verification.find_damage(path, name, show, again=True)


def load_request(path: str, name: str, settings: Settings, force: bool = False, thinks: bool = False) -> Load:
    """Return the engine's load request for these settings."""
    return Load(path, budget.load_options(settings, name, force=force, thinks=thinks, drafts=True))


def check_chat_template(opened: OpenSession, name: str) -> None:
    """Raise LocalqError for a base model: without a chat template it cannot hold a conversation."""
    if opened.session.tokenizer.chat_template is None:
        why = "this base model has no chat template"
        raise LocalqError(name, why, f"To complete plain text, use `localq run {name} TEXT`.")


def _target(name: str, settings: Settings, wanted: OpenOptions, watcher: Watcher) -> catalog.Target:
    """The model that `name` selects on this machine, with a notice where its format is not the usual one.

    Raises LocalqError (exit 3) for a model that does not fit and is not on this machine.
    """
    from localq.planner import choose, room  # start-up cost: nothing is planned for the engine of a server

    available = room.here(settings).budget
    target, choice = choose.choose_target(name, wanted.format, settings, available)
    if choice is None:
        choose.check_unlisted(target, available, settings, wanted.force)
        return target
    if not choice.taken.offer.preferred and wanted.format is None and target.name != name:
        watcher.say(f"{target.name}: {choice.why}")
    refusal = None if choice.taken.here or wanted.force else choose.too_large(choice.taken.offer, available, settings)
    if refusal is not None and choice.taken.offer.unsupported is None:
        raise refusal
    return target


def _target_of(name: str, engine: SharedEngine) -> catalog.Target:
    """The target of `name` in the format that a server holds: its memory is taken, so nothing is planned."""
    target = catalog.resolve(name)
    return catalog.resolve(engine.holding.model) if target.kind == "catalogue" else target


def _refuse_unsupported(target: catalog.Target) -> None:
    """Refuse a model that this version cannot run, before it is downloaded."""
    reason = format_facts.why_unsupported(target.entry.arch, target.format) if target.entry and target.format else None
    if reason is not None:
        step = "To list the models that fit in that much VRAM, run `localq fit --vram SIZE`."
        raise LocalqError(target.name, reason, step, ExitCode.FAILURE)

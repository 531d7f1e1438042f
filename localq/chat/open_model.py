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
from typing import Protocol

from localq.chat import default_sampling
from localq.chat.open_options import OpenOptions
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts
from localq.planner import budget, choose, consent, open_cost, prepare, room
from localq.planner.consent import OpenCost
from localq.planner.speed import local_measurements
from localq.sampling import Sampling
from localq.settings import Settings
from localq.wording import OnProgress
from localq.worker.client import ONCE, EngineClient
from localq.worker.messages import Event, Load, Loaded


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
    target = _target(name, settings, wanted, watcher)
    _refuse_unsupported(target)
    cost = None if wanted.agreed else open_cost.of(target, settings, wanted.why)
    if cost is not None and (cost.is_large or cost.why) and not watcher.agree(cost):
        raise consent.declined(target.name)
    client = EngineClient()
    try:
        client.start()
        with watcher.fetching(target.name) as show:
            path = prepare.model_path(target, watcher.say, show, settings.offline)
        from localq.files.model_folder import open_model
        from localq.text.tokenizer import Tokenizer  # start-up cost: a wrong name is answered without these

        try:
            files = open_model(path)
            tokenizer = Tokenizer.load(files)
        except LocalqError as error:
            if (damage := _damage(error, path, target.name, watcher)) is None:
                raise
            raise damage from error
        thinks = files.thinks if target.entry is None else target.entry.arch.thinks
        request = load_request(str(path), target.name, settings, wanted.force, thinks)
        sampling = settings.sampling(default_sampling.sampling(target.entry, files.generation_config))
        for line in default_sampling.notes(files.generation_config):
            watcher.say(line)
        _tell_idle(sampling, settings, watcher)
        longest = settings.max_tokens or default_sampling.max_tokens(target.entry)
        session = ChatSession(client, request, tokenizer, sampling, longest, settings.loop_guard)
        session.system, session.think_budget = settings.system, settings.think_budget
        for choose, choice in (
            (session.set_think, settings.think),
            (session.set_preserve_thinking, settings.preserve_thinking),
        ):
            try:
                choose(choice)
            except LocalqError as error:  # a setting for all models need not suit each
                watcher.say(str(error))
        own_path = None if target.store else target.path
        session.record.model = target.name if own_path is None else str(own_path.absolute())
        yield OpenSession(session, client)
    finally:
        client.close()


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
    if loaded.device == "cuda":
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
    """What the engine is asked to load, by the settings."""
    return Load(path, budget.load_options(settings, name, force=force, thinks=thinks))


def check_chat_template(opened: OpenSession, name: str) -> None:
    """Raise LocalqError for a base model: without a chat template it cannot hold a conversation."""
    if opened.session.tokenizer.chat_template is None:
        why = "this base model has no chat template"
        raise LocalqError(name, why, f"To complete plain text, use `localq run {name} TEXT`.")


def _target(name: str, settings: Settings, wanted: OpenOptions, watcher: Watcher) -> catalog.Target:
    """The model that `name` selects on this machine, with a notice where its format is not the usual one.

    Raises LocalqError (exit 3) for a model that does not fit and is not on this machine.
    """
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


def _refuse_unsupported(target: catalog.Target) -> None:
    """Refuse a model that this version cannot run, before it is downloaded."""
    reason = format_facts.why_unsupported(target.entry.arch, target.format) if target.entry and target.format else None
    if reason is not None:
        step = "`localq fit --vram SIZE` lists the models that fit in SIZE of VRAM."
        raise LocalqError(target.name, reason, step, ExitCode.FAILURE)

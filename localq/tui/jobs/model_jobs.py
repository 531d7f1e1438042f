"""Work of jobs on a model: open and load it, or fetch it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from localq.chat import open_model
from localq.chat.open_model import OpenSession
from localq.chat.open_options import OpenOptions
from localq.files.hub import fetch
from localq.planner import open_cost, prepare, pull_report
from localq.settings import Settings
from localq.tui.jobs.thread_messages import PostingWatcher
from localq.worker.messages import Loaded


@dataclass(frozen=True)
class ReadyModel:
    """A model that is open and loaded; `close` ends its engine process."""

    opened: OpenSession
    loaded: Loaded
    stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """End the engine process; may be called again."""
        self.stack.close()


def open_and_load(name: str, settings: Settings, wanted: OpenOptions, watcher: PostingWatcher) -> ReadyModel:
    """Open and load `name` for a conversation. Raises LocalqError as `open_session` and loading."""
    with ExitStack() as stack:
        opened = stack.enter_context(open_model.open_session(name, settings, watcher, wanted))
        open_model.check_chat_template(opened, name)
        watcher.at_stop = opened.client.close  # a load may be silent for long
        loaded = open_model.load_now(opened, watcher)
        watcher.at_stop = None
        return ReadyModel(opened, loaded, stack.pop_all())


def pull(name: str, settings: Settings, watcher: PostingWatcher, agreed: bool = False) -> Path:
    """Fetch `name` as `localq pull` does; return its path.

    Raises LocalqError, also where it does not fit; ConsentError for a large download, unless `agreed`.
    """
    target, why = pull_report.choose_target(name, settings)
    if why:
        watcher.say(why)
    asks = target.entry is not None or not settings.offline  # else `model_path` below raises the error
    if fetch.local_path(target) is None and asks:
        verdict = pull_report.verdict(target, settings, None, force=False)
        if verdict is not None and verdict.refusal is not None:
            raise verdict.refusal
        if verdict is not None:
            watcher.say(verdict.text)
    cost = None if agreed else open_cost.of(target, settings)
    if cost is not None and cost.is_large:
        watcher.agree(cost)
    with watcher.fetching(target.name) as show:
        return prepare.model_path(target, watcher.say, show, settings.offline)

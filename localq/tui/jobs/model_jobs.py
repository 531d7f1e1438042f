"""What screens do to a model in a `job`: opening it, fetching it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from localq.chat import open_model
from localq.chat.open_model import OpenOptions, OpenSession
from localq.files.hub import fetch as hub
from localq.planner import prepare, pull_report
from localq.settings import Settings
from localq.tui.jobs.thread_messages import PostingWatcher
from localq.worker.messages import Loaded


@dataclass(frozen=True)
class ReadyModel:
    """A model that is open and loaded; whoever takes it closes it, which ends its engine process."""

    opened: OpenSession
    loaded: Loaded
    stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """More than once is fine."""
        self.stack.close()


def open_and_load(name: str, settings: Settings, wanted: OpenOptions, watcher: PostingWatcher) -> ReadyModel:
    """`name`, ready for a conversation. Raises LocalqError as opening and loading do."""
    with ExitStack() as stack:
        opened = stack.enter_context(open_model.open_session(name, settings, watcher, wanted))
        open_model.check_chat_template(opened, name)
        watcher.at_stop = opened.client.close  # a load may say nothing for long
        loaded = open_model.load_now(opened, watcher)
        watcher.at_stop = None
        return ReadyModel(opened, loaded, stack.pop_all())


def pull(name: str, settings: Settings, watcher: PostingWatcher) -> Path:
    """`name` on this machine, as `localq pull` fetches it: what does not fit is refused. Raises LocalqError."""
    target, why = pull_report.choose_target(name, settings)
    if why:
        watcher.say(why)
    asks = target.entry is not None or not settings.offline  # else what follows says that it is not here
    if hub.local_path(target) is None and asks:
        verdict = pull_report.verdict(target, settings, None, force=False)
        if verdict is not None and verdict.refusal is not None:
            raise verdict.refusal
        if verdict is not None:
            watcher.say(verdict.text)
    with watcher.fetching(target.name) as show:
        return prepare.model_path(target, watcher.say, show, settings.offline)

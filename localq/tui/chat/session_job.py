"""What touches the session, in a thread: a reply or a command. It posts what comes of it; only one runs at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.message import Message

from localq.errors import LocalqError
from localq.tui.chat.reply_buffer import ReplyBuffer
from localq.tui.jobs.model_handle import ModelHandle

if TYPE_CHECKING:  # start-up cost
    from localq.chat.commands.models import SwitchModel
    from localq.chat.reply import Replies

SessionWork = Callable[[], "str | Replies | SwitchModel"]


class ReplyBegan(Message):
    """The question of a reply is in the conversation; the reply comes through the feed."""


class JobNotice(Message):
    """What a job has to say; it may be nothing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class SwitchRequested(Message):
    """The conversation is to go on with another model."""

    def __init__(self, switch: SwitchModel) -> None:
        super().__init__()
        self.switch = switch


class JobFailed(Message):
    """An error that users meet."""

    def __init__(self, error: LocalqError) -> None:
        super().__init__()
        self.error = error


class JobEnded(Message):
    """The last message of a job."""


def run(job: SessionWork, model: ModelHandle, feed: ReplyBuffer, stop: threading.Event, post: Callable[[Message], object]) -> None:
    """Do `job`; what it streams is gathered in `feed`. `stop` is set when the user wants no more of it."""
    from localq.chat.commands.models import SwitchModel  # start-up cost

    try:
        result = job()
        if isinstance(result, str):
            post(JobNotice(result))
        elif isinstance(result, SwitchModel):
            post(SwitchRequested(result))
        else:
            post(ReplyBegan())
            _gather(result, model, feed, stop)
    except LocalqError as error:
        post(JobFailed(error))
    finally:
        post(JobEnded())


def _gather(parts: Replies, model: ModelHandle, feed: ReplyBuffer, stop: threading.Event) -> None:
    with contextlib.closing(parts):  # closed: what came of it is kept
        if stop.is_set():  # before there was an answer to stop
            model.session.stop()
        model.load()
        for part in parts:
            feed.put(part)

"""A job on the session in a thread: a reply or a command. It posts its results; one runs at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.message import Message

from localq.chat.terminal import error_log
from localq.errors import LocalqError
from localq.tui.chat.reply_buffer import ReplyBuffer
from localq.tui.jobs.model_handle import ModelHandle

if TYPE_CHECKING:  # start-up cost
    from localq.chat.commands.models import SwitchModel
    from localq.chat.reply import Replies

SessionWork = Callable[[], "str | Replies | SwitchModel"]


class ReplyBegan(Message):
    """A reply has begun; its text comes through the buffer."""


class JobNotice(Message):
    """The notice of a job; may be empty."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class SwitchRequested(Message):
    """Continue the conversation with another model."""

    def __init__(self, switch: SwitchModel) -> None:
        super().__init__()
        self.switch = switch


class JobFailed(Message):
    """A job failed with a LocalqError."""

    def __init__(self, error: LocalqError) -> None:
        super().__init__()
        self.error = error


class JobEnded(Message):
    """The last message of a job."""


def run(
    job: SessionWork, model: ModelHandle, feed: ReplyBuffer, stop: threading.Event, post: Callable[[Message], object]
) -> None:
    """Run `job`; a reply goes into `feed`. stop: set when the user stops it."""
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
    except Exception as error:
        post(JobFailed(error_log.unexpected("chat", error)))
    finally:
        post(JobEnded())


def _gather(parts: Replies, model: ModelHandle, feed: ReplyBuffer, stop: threading.Event) -> None:
    with contextlib.closing(parts):  # closing keeps the text so far
        if stop.is_set():  # stopped before the reply began
            model.session.stop()
        model.load()
        for part in parts:
            feed.put(part)

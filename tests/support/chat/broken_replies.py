"""Replies that end in an error, and that nothing is lost by them."""

from __future__ import annotations

from localq.chat.history.conversation import Message
from localq.chat.reply import ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import LocalqError


def failed_reply(session: ChatSession, text: str) -> tuple[LocalqError, str]:
    """The error that a message ends in, and what had come of the answer; that is kept, and nothing is lost."""
    before, got = list(session.messages), ""
    error: LocalqError | None = None
    try:
        for part in session.ask(text):
            got += part.text if isinstance(part, ReplyPiece) else ""
    except LocalqError as caught:
        error = caught
    assert error is not None
    partial = [Message("user", text), Message("assistant", got, complete=False)] if got else []
    assert session.messages == before + partial
    return error, got

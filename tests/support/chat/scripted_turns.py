"""Turns and commands of a scripted conversation, in a context that is large enough."""

from __future__ import annotations

import functools

from localq.chat import commands
from localq.chat.session import ChatSession
from tests.support.chat import scripted_client
from tests.support.chat.scripted_client import streamed

session_over = functools.partial(scripted_client.session_over, context_size=10_000)


def said(session: ChatSession, *messages: str) -> ChatSession:
    for message in messages:
        streamed(session.ask(message))
    return session


def command(session: ChatSession, line: str):
    name, argument = commands.parse(line)
    return commands.COMMANDS[name](session, argument, None)

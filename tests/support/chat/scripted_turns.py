"""Turns and commands of a scripted conversation, in a context that is large enough."""

from __future__ import annotations

import functools

import scripted_client
from scripted_client import streamed

from localq import commands
from localq.chat import ChatSession

session_over = functools.partial(scripted_client.session_over, context_size=10_000)


def said(session: ChatSession, *messages: str) -> ChatSession:
    for message in messages:
        streamed(session.ask(message))
    return session


def command(session: ChatSession, line: str):
    name, argument = commands.parse(line)
    return commands.COMMANDS[name](session, argument, None)

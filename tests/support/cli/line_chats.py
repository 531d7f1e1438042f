"""A line chat over a scripted engine, in the middle of a test."""

from __future__ import annotations

import io

import pytest

from localq.chat.history.store import ConversationStore
from localq.chat.open_model import OpenSession
from localq.chat.session import ChatSession
from localq.cli.line.line_chat import LineChat
from localq.cli.line.session import TerminalWatcher
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient


class Terminal(io.StringIO):
    """A stdout that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Chat:
    """A line chat in the middle of the test: `says` handles one line and returns what came to stdout and to stderr."""

    def __init__(self, capsys, replies: tuple, store: ConversationStore | None, scripted: bool = False) -> None:
        self.client = ScriptedClient(*[reply if isinstance(reply, list) else [reply] for reply in replies])
        self.session = ChatSession(self.client, Load("path", LoadOptions("tiny")), CharTokenizer(), store=store)
        self.session.record.model = "tiny"
        self.capsys = capsys
        opened, watcher = OpenSession(self.session, self.client), TerminalWatcher(quiet=True)
        self.loop = LineChat(opened, watcher, show_stats=False, scripted=scripted)

    def says(self, line: str) -> tuple[str, str]:
        self.capsys.readouterr()
        assert self.loop.handle(line) is None
        return tuple(self.capsys.readouterr())

    def refuses(self, line: str) -> str:
        with pytest.raises(LocalqError) as caught:
            self.loop.handle(line)
        assert caught.value.exit_code == 2
        return str(caught.value)

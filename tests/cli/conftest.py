"""For tests of the command line: a folder of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localq.chat.history.store import ConversationStore
from tests.support.cli.line_chats import Chat


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test is, with its settings and its conversations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path


@pytest.fixture
def start(capsys: pytest.CaptureFixture[str], own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Chat]:
    """A line chat over these replies, in a folder of its own; `saved=False`: its conversation is not."""
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.delenv("EDITOR", raising=False)
    return lambda *replies, saved=True: Chat(capsys, replies, ConversationStore() if saved else None)

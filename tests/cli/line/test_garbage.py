"""What a reply leaves behind in the line chat: nothing that only a full collection frees, and one is run after it."""

from __future__ import annotations

import gc
import subprocess
import sys

from localq.cli.line.line_chat import LineChat
from tests.support.cli.line_chats import Chat
from tests.support.cli.markdown_pages import DOCUMENT, printed


def cycles(action) -> int:
    """How many objects of `action` reference counts do not free, once its caches are full."""
    action()
    gc.collect()
    gc.disable()
    try:
        action()
        return gc.collect()
    finally:
        gc.enable()


def test_a_drawn_reply_leaves_no_reference_cycles():
    def drawn():
        printed(DOCUMENT, (60, 40)).close()

    assert cycles(drawn) == 0


def test_garbage_is_collected_once_after_each_reply(capsys, monkeypatch):
    talk, looked = Chat(capsys, ("one", "two", "three"), None), []
    lines = iter(["/help", "a", "b", "", "c"])

    def see(phase, info):
        if phase == "start" and info["generation"] == 2:
            looked.append(len(talk.client.prompts))

    def read(reader) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("localq.cli.line.line_input.Reader.__call__", read)
    monkeypatch.setattr(LineChat, "takes_commands", True)
    gc.callbacks.append(see)
    try:
        assert talk.loop.run() == 0
    finally:
        gc.callbacks.remove(see)
    assert looked == [1, 2, 2, 3]  # the empty line is a turn as well


def test_what_was_there_at_the_first_reply_is_looked_through_once_and_again_after_the_chat():
    code = """
import gc
from localq.cli.line.garbage import collect_between
for _ in range(2):
    with collect_between() as collect:
        assert gc.get_freeze_count() == 0
        collect()
        frozen = gc.get_freeze_count()
        assert frozen > 1000, frozen
        cycle = []
        cycle.append(cycle)
        del cycle
        found = []
        see = lambda phase, info: found.append(info["collected"]) if phase == "stop" else None
        gc.callbacks.append(see)
        collect()
        gc.callbacks.remove(see)
        assert found == [1], found
        assert 1000 < gc.get_freeze_count() <= frozen
    assert gc.get_freeze_count() == 0
gc.freeze()
frozen = gc.get_freeze_count()
with collect_between() as collect:
    collect()
assert 1000 < gc.get_freeze_count() <= frozen
"""
    subprocess.run([sys.executable, "-c", code], check=True)

"""The commands of the line chat, over a scripted engine: what they print, where, and what the model then reads."""

from __future__ import annotations

import contextlib
import io
import re
import sqlite3
import stat

import pytest

from localq.chat import commands, open_conversation
from localq.chat.history.store import ConversationStore
from localq.chat.session import ChatSession
from localq.cli.line import line_editor
from localq.errors import LocalqError
from localq.settings import Settings
from tests.support.chat.scripted_client import DEAD, CharTokenizer
from tests.support.cli.line_chats import Terminal


def test_every_command_is_in_the_help_and_only_those(start):
    named = set(re.findall(r"(?:^|, )(/[a-z]+)", commands.HELP, re.MULTILINE))
    assert named == {*commands.COMMANDS, "/exit"}
    assert start().says("/?")[1].startswith("/help")
    assert start().loop.handle("/x") == 0


def test_an_unknown_command_is_refused_and_two_slashes_send_one(start):
    talk = start("fine")
    assert "unknown command" in talk.refuses("/nonsense and more")
    assert talk.client.prompts == []
    talk.says("//etc/passwd is what?")
    assert talk.client.prompts == ["<user>/etc/passwd is what?<assistant>"]


def test_edit_regenerate_undo_and_going_back(start):
    talk = start("a", "b", "c", "d")
    assert talk.says("one") == ("a\n", "")
    assert talk.says("/edit  two ") == ("b\n", "")
    same = "(temperature 0 always gives the same reply; to vary replies, use /set temp 0.7)\n"
    assert talk.says("/regenerate") == ("c\n", same)
    assert talk.client.prompts == ["<user>one<assistant>", "<user>two<assistant>", "<user>two<assistant>"]
    assert talk.says("/n")[1] == "  1  b\n* 2  c\n  3  >>> one\n"
    assert talk.says("/n 1")[1] == "b\n"
    assert "is not a number from 1 to 3" in talk.refuses("/n 4")
    assert (
        talk.says("/edit -a  better")[1] == "reply edited; /continue continues it, and /n lists the previous version\n"
    )
    assert [message.content for message in talk.session.messages] == ["two", "better"]
    assert talk.says("/undo")[1] == "removed: two\n"
    assert talk.session.messages == []
    assert "nothing to undo" in talk.refuses("/undo")
    talk.says("three")
    saved = ConversationStore().find(None).conversation
    assert [message.content for message in saved.messages()] == ["three", "d"]
    assert len(saved.turns) == 8


def test_without_words_edit_opens_the_editor(start, monkeypatch, tmp_path):
    talk = start("a", "b")
    talk.says("one")
    monkeypatch.setattr("sys.stdin", Terminal())
    assert "$VISUAL and $EDITOR are not set" in talk.refuses("/edit")
    script = tmp_path / "editor.sh"
    script.write_text('#!/bin/sh\nstat -c %a "$2" > mode\nprintf "%s more\\n" "$1$(cat "$2")" > "$2"\n')
    script.chmod(0o755)
    monkeypatch.setenv("EDITOR", f"{script} 'said: '")
    talk.says("/edit")
    assert talk.client.prompts[-1] == "<user>said: one more<assistant>"
    assert (tmp_path / "mode").read_text() == "600\n"
    talk.says("/edit -a")
    assert talk.session.messages[-1].content == "said: b more"
    for editor, why in (
        ("true", "unchanged or empty"),
        ("false", "failed with exit code 1"),
        ("/no/such", "cannot start the editor"),
    ):
        monkeypatch.setenv("VISUAL", editor)
        with pytest.raises(LocalqError, match=why):
            talk.loop.handle("/edit")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(LocalqError, match="temporary file"):
        talk.loop.handle("/edit")
    assert talk.session.messages[-1].content == "said: b more"


def test_what_was_edited_cleared_or_taken_back_is_gone_back_to(start):
    talk = start("a", "b", "c", "d")
    for line in ("one", "/edit two", "more", "/clear"):
        talk.says(line)
    assert talk.says("/n")[1] == "  1  >>> one\n  2  >>> two\n"
    assert talk.says("/n 2")[1] == "one (4 messages)\n>>> more\nc\n"
    talk.says("/undo")
    assert talk.says("/n")[1] == "* 1  b\n  2  >>> one\n  3  >>> more\n"
    talk.says("/n 2")
    talk.says("and then")
    assert talk.client.prompts[-1] == "<user>one<assistant>a<user>and then<assistant>"
    assert "there are no other versions" in start().refuses("/n")


def test_values_that_a_command_cannot_take_are_refused_and_change_nothing(start):
    talk = start()
    for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty"):
        assert "is not a" in talk.refuses(f"/set {name} none")
    assert "is not a whole number" in talk.refuses("/set top_k infk")
    assert talk.says("/set seed none")[1] == "seed = None\n"
    assert talk.says("/set max_tokens none")[1] == "max_tokens = None\n"
    assert "cannot be read" in talk.refuses("/system @a\0b")
    assert "not a regular file" in talk.refuses("/system @/dev/zero")
    assert talk.session.system is None
    assert talk.session.sampling == ChatSession(talk.client, talk.session.request, CharTokenizer()).sampling


def test_everything_that_set_lists_can_be_set_with_it(start):
    talk = start()
    listed = [line.partition(" = ")[0] for line in talk.says("/set")[1].splitlines()]
    assert {"temperature", "stop", "think", "grammar"} < set(listed)
    for name in listed:
        assert talk.says(f"/set {name}")[1]
    assert talk.says("/set grammar regex [ab]+") == talk.says("/grammar regex [ab]+")
    assert talk.says("/set grammar")[1] == "answers are now constrained by regex [ab]+\n"
    assert talk.refuses("/set think on") == talk.refuses("/think on")
    assert "stop, think, preserve_thinking, grammar" in talk.refuses("/set nothing 1")


def test_tokens_and_the_prompt_are_those_that_the_model_reads(start):
    talk = start("a" * 20)
    assert talk.says("/tokens")[1] == talk.says("/show prompt")[1] == "the conversation is empty\n"
    talk.says("/system Be brief.")
    talk.says("one")
    prompt = "<system>Be brief.<user>one<assistant>" + "a" * 20 + "<assistant>"
    assert talk.says("/show prompt") == (prompt + "\n", f"({len(prompt)} tokens)\n")
    assert talk.says("/tokens")[1] == (
        f"prompt: {len(prompt)} tokens (3 messages including the system prompt), 7% of the 1000-token context\n"
    )
    assert talk.says("/show template")[1] == "scripted\n"
    assert "/show info, params, prompt or template" in talk.refuses("/show")
    assert "this conversation: 1 replies, 0 tokens" in talk.says("/stats")[1]


def test_a_stop_string_is_set_listed_and_removed(start):
    talk = start("a. b", "a. b")
    talk.says("/set stop . ")
    assert "stop = ." in talk.says("/set")[1].splitlines()
    assert talk.says("one")[0] == "a\n"
    talk.says("/set stop none")
    assert talk.says("two")[0] == "a. b\n"


def test_a_disk_that_cannot_be_written_is_told_and_the_chat_goes_on(start, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "file" / "data"))
    said: list[str] = []
    store = open_conversation.open_store(Settings(), said.append)
    assert "not saved yet" in said[0]
    talk = start("a", "b")
    talk.session.store = store
    out, told = talk.says("one")
    assert out == "a\n"
    assert told.startswith("(not saved (will retry after the next turn): ")
    assert told.count("\n") == 1
    assert "not saved" in talk.says("/undo")[1]
    assert open_conversation.open_store(Settings(save=False), said.append) is None


def test_what_commands_change_is_saved_at_once(start):
    talk = start("a")
    talk.says("one")
    for line in ("/set temperature 0.5", "/set stop ##", "/system Be brief.", "/clear"):
        talk.says(line)
    saved = ConversationStore().find(None)
    assert (saved.settings.sampling.temperature, saved.settings.stop) == (0.5, ("##",))
    assert (saved.conversation.system, saved.conversation.messages()) == ("Be brief.", [])
    assert len(saved.conversation.turns) == 2


def test_what_leaves_the_context_is_said_before_the_reply(start):
    talk = start("a" * 10, "b" * 10)
    talk.client.context_size = 50
    talk.says("x" * 12)
    out, told = talk.says("y" * 12)
    assert out == "b" * 10 + "\n"
    assert told.startswith("(the context is full: the oldest exchange is left out of the prompt")
    assert "the oldest 2 messages were left out" in talk.says("/tokens")[1]


def test_a_second_ctrl_c_leaves_and_what_came_of_the_reply_is_kept(start, monkeypatch):
    talk = start(["par", "tial", "never"])
    screen = io.StringIO()
    monkeypatch.setattr("sys.stdout", screen)

    def write(text: str) -> int:
        if screen.getvalue():
            raise KeyboardInterrupt
        return io.StringIO.write(screen, text)

    monkeypatch.setattr(screen, "write", write)
    with pytest.raises(KeyboardInterrupt):
        talk.loop.handle("go")
    last = ConversationStore().find(None).conversation.messages()[-1]
    assert (last.content, last.complete) == ("partial", False)


def test_the_input_history_is_private_and_can_do_without_a_disk(start, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("localq.places.state_dir", lambda: tmp_path / "state")
    history = line_editor._history_on_disk()
    history.append_string("secret \x1b[31mwords")
    path = tmp_path / "state" / "history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "\x1b" not in path.read_text()
    assert list(line_editor._history_on_disk().load_history_strings()) == ["secret [31mwords"]
    path.unlink()
    path.parent.rmdir()
    history.append_string("lost, and nothing else")
    path.parent.write_text("in the way")
    capsys.readouterr()
    line_editor._history_on_disk().append_string("in memory")
    assert "cannot save the input history" in capsys.readouterr().err


def test_a_clock_that_is_far_off_is_no_error(start):
    talk = start("a")
    talk.says("one")
    with contextlib.closing(sqlite3.connect(ConversationStore().path)) as database, database:
        database.execute("UPDATE sessions SET changed_s = 1e300")
    assert "????-??-??" in talk.says("/sessions")[1]


def test_an_error_begins_a_line_of_its_own(start, capsys):
    talk = start(["so far", DEAD], ["a line\n", DEAD], [DEAD], ["<think>hm", DEAD])
    for written in ("so far\n", "a line\n", "", ""):
        capsys.readouterr()
        with pytest.raises(LocalqError):
            talk.loop.handle("go")
        assert capsys.readouterr().out == written


def test_a_bug_in_a_command_is_one_line_and_the_chat_goes_on(start, monkeypatch, tmp_path, capsys):
    def fail(*given):
        raise LookupError("a bug")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setitem(commands.COMMANDS, "/undo", fail)
    talk = start("fine")
    for at_terminal in (True, False):
        monkeypatch.setattr("sys.stdin", Terminal() if at_terminal else io.StringIO())
        with contextlib.nullcontext() if at_terminal else pytest.raises(LookupError), talk.loop._report_errors():
            talk.loop.handle("/undo")
    assert "chat: unexpected error (LookupError)" in capsys.readouterr().err
    assert talk.says("hello") == ("fine\n", "")

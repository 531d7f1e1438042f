"""The input history that both front ends share: its format, what is damaged, and going back and forth in it."""

from __future__ import annotations

from prompt_toolkit.history import FileHistory

from localq.chat.terminal.input_history import InputHistory, append, open_file, read


def test_it_is_the_format_of_prompt_toolkit_both_ways(tmp_path):
    path = tmp_path / "history"
    theirs = FileHistory(str(path))
    theirs.store_string("one\ntwo")
    append(path, "three\n\nfour")
    assert read(path) == ["one\ntwo", "three\n\nfour"]
    assert list(theirs.load_history_strings()) == ["three\n\nfour", "one\ntwo"]


def test_what_is_damaged_is_read_as_far_as_it_is_text(tmp_path):
    path = tmp_path / "history"
    path.write_bytes(b"+a\xff\x1bb\n\n# 2026\n+cut off")
    assert read(path) == ["a\ufffdb", "cut off"]


def test_the_file_is_private_and_control_characters_stay_out(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = open_file()
    InputHistory(path).add("red\x1b[31m\nline")
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"\x1b" not in path.read_bytes()
    assert InputHistory(path).entries == ["red[31m\nline"]


def test_back_and_forth_keeps_what_was_being_written(tmp_path):
    history = InputHistory(tmp_path / "none")
    for text in ("first", "second", "second", " "):
        history.add(text)
    assert [history.older("draft"), history.older("second"), history.older("first")] == ["second", "first", None]
    assert [history.newer(), history.newer(), history.newer()] == ["second", "draft", None]


def test_a_disk_that_takes_nothing_ends_no_chat(tmp_path):
    history = InputHistory(tmp_path / "no" / "such" / "folder")
    history.add("kept in memory")
    assert history.entries == ["kept in memory"]

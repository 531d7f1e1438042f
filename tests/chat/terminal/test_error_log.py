"""The log of unexpected errors: frames and messages, without locals and secrets."""

from __future__ import annotations

import os

import pytest

from localq.chat.terminal import error_log
from localq.errors import ExitCode, LocalqError

TOKEN = "hf_of-the-user-and-nobody-else"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def caught(error):
    said = "what the user said in the chat"
    try:
        try:
            assert said
            raise KeyError(TOKEN)
        except KeyError as cause:
            raise error from cause
    except type(error) as found:
        return found


def test_an_entry_has_frames_and_causes_but_no_values():
    text = error_log.entry(caught(ValueError(f"no \x1b[31m {TOKEN}\nhttps://me:pass@h/?sig=9 {'x' * 5000}")))
    assert "what the user said" not in text.replace('said = "what the user said in the chat"', "")
    assert TOKEN not in text
    assert "me:pass" not in text
    assert "\x1b" not in text
    assert text.index("builtins.KeyError: '***'") < text.index("builtins.ValueError: no")
    assert "which caused:" in text
    assert "in caught" in text
    assert len(text) < 5000


class Mute(Exception):
    def __str__(self):
        raise RuntimeError(TOKEN)


def deep(n):
    return deep(n - 1) if n else 1 // 0


def endless():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    return first


def recursion():
    try:
        deep(10**6)
    except RecursionError as error:
        return error


@pytest.mark.parametrize(
    "make",
    [
        Mute,
        endless,
        recursion,
        lambda: OSError(5, "x", TOKEN),
        lambda: ExceptionGroup("g", [Mute()]),
        lambda: UnicodeDecodeError("utf-8", TOKEN.encode(), 0, 1, "no"),
    ],
)
def test_any_exception_makes_an_entry(make):
    error = error_log.unexpected("it", make())
    assert error.exit_code == ExitCode.FAILURE
    assert str(error_log.path()) in str(error)
    log = error_log.path().read_text()
    assert TOKEN not in log
    assert len(log) < 20_000
    assert error_log.count() == 1


def test_expected_errors_and_what_the_machine_lacks_are_no_bugs():
    known = LocalqError("a", "b")
    assert error_log.unexpected("it", known) is known
    assert error_log.unexpected("it", MemoryError()).exit_code == ExitCode.DOES_NOT_FIT
    assert error_log.count() == 0


def test_the_log_is_private_and_bounded(monkeypatch):
    monkeypatch.setattr(error_log, "MAX_BYTES", 2000)
    for _ in range(20):
        error_log.unexpected("it", caught(ValueError("a bug")))
    log = error_log.path()
    sizes = [each.stat().st_size for each in log.parent.iterdir()]
    assert sorted(each.name for each in log.parent.iterdir()) == ["errors.log", "errors.log.1"]
    assert max(sizes) < 5000
    assert {each.stat().st_mode & 0o777 for each in log.parent.iterdir()} == {0o600}


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "closed", "file for the folder"])
def test_a_log_that_cannot_be_written_is_said_and_touches_nothing(tmp_path, kind):
    log, other = error_log.path(), tmp_path / "other"
    other.write_text("of the user")
    if kind == "file for the folder":
        log.parent.parent.mkdir(parents=True, exist_ok=True)
        log.parent.write_text("of the user")
    else:
        log.parent.mkdir(parents=True)
    if kind == "link":
        log.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(log)
    elif kind == "folder":
        log.mkdir()
    elif kind == "closed":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        log.parent.chmod(0o500)
    error = error_log.unexpected("it", ValueError("a bug"))
    assert "The error log could not be written" in str(error)
    assert other.read_text() == "of the user"

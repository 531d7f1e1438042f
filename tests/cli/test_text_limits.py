"""Every text that a command reads has a limit: what is larger is refused while it comes, with exit code 2."""

from __future__ import annotations

import io
import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from localq.chat import attachments
from localq.cli import execute
from localq.errors import ExitCode, LocalqError
from localq.quantize import calibration
from tests.support.cli.line_chats import Chat

SIZE = 200 * 2**20
MOST_MEMORY = 60 * 2**20  # of a text of 8 MiB in several forms, not of 200
FILES = {  # command lines with a text in a file; in the folder of the test
    "--file": ["run", "no-such-model", "sum up", "--file", "FILE"],
    "@FILE": ["run", "no-such-model", "sum up @FILE"],
    "--system": ["run", "no-such-model", "sum up", "--system", "@FILE"],
    "--system of a chat": ["chat", "no-such-model", "--system", "@FILE"],
    "--json-schema": ["run", "no-such-model", "sum up", "--json-schema", "@FILE"],
    "--grammar": ["run", "no-such-model", "sum up", "--grammar", "@FILE"],
    "--token": ["pull", "no-such-model", "--token", "@FILE"],
    "--text": ["eval", "no-such-model", "--text", "FILE"],
}  # fmt: skip
KINDS = ("a large file", "a device without an end", "a pipe without a writer")
STDIN = {
    "run": ["run", "no-such-model", "sum up"],
    "a prompt of chat": ["chat", "no-such-model", "-p", "sum up"],
    "--text -": ["eval", "no-such-model", "--text", "-"],
    "--token -": ["pull", "no-such-model", "--token", "-"],
}


class Endless(io.RawIOBase):
    """Letters without an end or a line end; `taken`: how many were read."""

    taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        self.taken += len(buffer)
        assert self.taken < SIZE, "read without a limit"
        buffer[:] = b"a" * len(buffer)
        return len(buffer)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("LOCALQ_DATA", "LOCALQ_CACHE", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("LOCALQ_OFFLINE", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return tmp_path


@pytest.fixture
def peak() -> Iterator[None]:
    """The memory that a test takes has a limit, too."""
    tracemalloc.start()
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MOST_MEMORY


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert execute(arguments) in (ExitCode.USAGE, ExitCode.GATED)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert "no-such-model" not in err
    return err


def make(path: Path, kind: str) -> None:
    if kind == "a large file":
        path.touch()
        os.truncate(path, SIZE)
    elif kind == "a device without an end":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)


@pytest.mark.usefixtures("peak")
@pytest.mark.parametrize(
    ("name", "kind"),
    # A word of a message that names no regular file is a word.
    [(name, kind) for kind in KINDS for name in FILES if name != "@FILE" or kind == "a large file"],
)
def test_no_file_is_read_beyond_its_limit(name, kind, own_folder, capsys):
    make(own_folder / "FILE", kind)
    err = refused(FILES[name], capsys)
    assert "too large" in err if kind == "a large file" else "too large" in err or "not a regular file" in err


@pytest.mark.usefixtures("peak")
@pytest.mark.parametrize("name", ["FILE", "FILE.jsonl"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_calibration_text_is_read_beyond_its_limit(name, kind, own_folder):
    make(own_folder / name, kind)
    with pytest.raises(
        LocalqError, match=r"FILE\S* is (too large \(limit: 8,388,608 bytes\)|not a regular file)"
    ) as caught:
        calibration.read_texts([Path(name)])
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.usefixtures("peak")
@pytest.mark.parametrize("name", STDIN)
def test_stdin_is_not_read_beyond_its_limit(name, monkeypatch, capsys):
    endless = Endless()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(endless)))
    err = refused(STDIN[name], capsys)
    assert "limit: 8,388,608" in err or "token" in err


@pytest.mark.usefixtures("peak")
def test_a_line_of_a_chat_without_an_end(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    chat = Chat(capsys, ("yes",), None)
    with pytest.raises(LocalqError, match="limit: 8,388,608 characters") as caught:
        chat.loop.run()
    assert caught.value.exit_code == ExitCode.USAGE
    assert chat.session.messages == []


def test_many_files_have_a_limit_together(own_folder, monkeypatch, capsys):
    monkeypatch.setattr(attachments, "MOST_BYTES", 5_000)
    names = [f"{number}.txt" for number in range(9)]
    for name in names:
        (own_folder / name).write_text("a" * 1_000)
    mentioned = " ".join(f"@{name}" for name in names)
    assert "5.txt: the attached files are too large (limit: 5.0 kB in total)" in refused(
        ["run", "no-such-model", f"sum up {mentioned}"], capsys
    )
    given = [part for name in names for part in ("-f", name)]
    assert "5.txt: the attached files are too large (limit: 5.0 kB in total)" in refused(
        ["run", "no-such-model", "sum up", *given], capsys
    )
    message = attachments.expand_mentions(mentioned)
    assert (len(message.attachments), len(message.failures)) == (5, 1)

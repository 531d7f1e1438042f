"""Text from stdin: a pipe that stays open is named on stderr, a text that no context holds is refused."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localq.chat import commands
from localq.chat.history.store import ConversationStore
from localq.cli import options, piped_input
from localq.cli.line.line_input import Reader
from localq.errors import ExitCode, LocalqError
from tests.support.cli.cli_processes import LOCALQ, environment_of
from tests.support.cli.line_chats import Chat


class Pipe:
    """A pipe at stdin. The other end is a process that may leave it open."""

    def __init__(self) -> None:
        at, self.end = os.pipe()
        self.stdin = open(at, encoding="utf-8")  # noqa: SIM115 - closed by the fixture

    def send(self, text: str) -> None:
        os.write(self.end, text.encode())

    def close(self) -> None:
        os.close(self.end)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    made = Pipe()
    monkeypatch.setattr(sys, "stdin", made.stdin)
    yield made
    made.stdin.close()


def at_the_note(monkeypatch: pytest.MonkeyPatch, act) -> list[str]:
    """The notes about waiting; `act` is called at the first."""
    notes: list[str] = []

    def noted(text: str) -> None:
        notes.append(text)
        act()

    monkeypatch.setattr(piped_input, "WAIT_S", 0.01)
    monkeypatch.setattr(piped_input, "note", noted)
    return notes


def test_a_pipe_that_does_not_end_is_named_and_waited_for(pipe, monkeypatch):
    notes = at_the_note(monkeypatch, lambda: (pipe.send("late\n"), pipe.close()))
    assert options.read_prompt(["sum", "up"], "localq run", "x").text == "late\n\nsum up"
    assert notes == ["localq: reading stdin until EOF; use `</dev/null` to skip this"]


def test_a_pipe_that_stays_open_after_some_text_is_named_too(pipe, monkeypatch):
    pipe.send("half")
    notes = at_the_note(monkeypatch, pipe.close)
    assert piped_input.read() == "half"
    assert len(notes) == 1


def test_a_pipe_that_does_not_block_is_read_to_its_end(pipe, monkeypatch):
    os.set_blocking(pipe.stdin.fileno(), False)  # as some parents leave it
    at_the_note(monkeypatch, lambda: (pipe.send("é" * 3), pipe.close()))
    assert piped_input.read() == "ééé"


def test_text_that_ends_at_once_needs_no_note(pipe, monkeypatch, capsys):
    pipe.send("a\nb\n\n")
    pipe.close()
    assert piped_input.read() == "a\nb"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("read", [piped_input.read, lambda: piped_input.read_line(first=True)])
def test_what_no_context_holds_is_refused_while_it_comes(read, monkeypatch):
    class Endless(io.StringIO):
        taken = 0

        def read(self, size: int | None = -1) -> str:
            assert size is not None
            assert size > 0, "all of it at once"
            self.taken += size
            return "x" * size

        def readline(self, size: int | None = -1) -> str:
            return self.read(size)

    monkeypatch.setattr(piped_input, "MOST_CHARACTERS", 100_000)
    monkeypatch.setattr(sys, "stdin", Endless())
    with pytest.raises(LocalqError, match=r"^stdin: too long for any context \(limit: 100,000 characters\)") as caught:
        read()
    assert caught.value.exit_code == ExitCode.USAGE
    assert sys.stdin.taken < 300_000


def test_stdin_that_cannot_be_read_is_an_error_in_one_line(monkeypatch, tmp_path):
    class Folder(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            raise IsADirectoryError(21, "Is a directory")

    monkeypatch.setattr(sys, "stdin", Folder())
    with pytest.raises(LocalqError, match=r"^stdin: cannot be read \(Is a directory\)\. Pipe text in") as caught:
        piped_input.read()
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("arguments", [["run", "smollm2-135m"], ["pull", "a/b", "--token", "-"]])
def test_input_that_is_not_in_the_encoding_of_the_environment(arguments, tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "utf-16", "LOCALQ_CONFIG": str(tmp_path / "config.toml")}
    done = subprocess.run(
        [sys.executable, "-m", "localq", *arguments],
        input=b"hello\n",
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == ExitCode.USAGE
    assert "stdin: not valid utf-16 text (UTF-16 stream does not start with BOM)." in done.stderr.decode("utf-16")


def test_the_line_chat_says_once_that_it_waits_for_messages(pipe, monkeypatch):
    notes = at_the_note(monkeypatch, lambda: threading.Thread(target=pipe.send, args=["one\\\ntwo\nthree\n"]).start())
    reader = Reader()
    assert reader() == "one\ntwo"
    assert reader() == "three"
    assert notes == ["localq: waiting for messages on stdin; use `</dev/null` to skip this"]
    pipe.close()
    with pytest.raises(EOFError):
        reader()


@pytest.mark.parametrize(("start", "line"), [('"""', "x\n"), ("", "x\\\n")])
def test_a_message_of_lines_without_an_end_is_refused_while_it_comes(start, line, monkeypatch):
    class Endless(io.StringIO):
        taken, begun = 0, False

        def readline(self, size: int | None = -1) -> str:
            self.taken += 1
            assert self.taken < 60_000
            first, self.begun = not self.begun, True
            return (start if first else "") + line

    monkeypatch.setattr(piped_input, "MOST_CHARACTERS", 100_000)
    monkeypatch.setattr(sys, "stdin", Endless())
    with pytest.raises(LocalqError, match=r"^stdin: too long for any context \(limit: 100,000 characters\)") as caught:
        Reader()()
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("piped", "messages"),
    [
        ('"""one\ntwo\n', ["one\ntwo"]),
        ("one\\\ntwo\\", ["one\ntwo"]),
        ('"""\na\n"""\nb\n', ["a", "b"]),
        ('x\n"""', ["x", ""]),
    ],
)
def test_a_pipe_that_ends_inside_a_message_loses_nothing(piped, messages, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    reader = Reader()
    assert [reader() for _ in messages] == messages
    with pytest.raises(EOFError):
        reader()


# ---- only a terminal gives commands


@pytest.fixture
def piped_chat(monkeypatch, capsys, tmp_path):
    """Pipe text into a line chat; returns the messages that were sent and what came to stdout and stderr."""

    def act(text: str, store: ConversationStore | None = None) -> tuple[list[str], str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        chat = Chat(capsys, ("yes",) * 300, store)
        assert chat.loop.run() == ExitCode.OK
        return [each.content for each in chat.session.messages[::2]], *capsys.readouterr()

    return act


NAMES = [*commands.COMMANDS, *commands.ALIASES, "/unknown", "//", "/"]


def test_no_command_is_obeyed_in_what_is_piped(piped_chat, tmp_path, monkeypatch):
    """All commands, with arguments that would change, write or end something."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{name} {argument}".rstrip() for name in NAMES for argument in ("", "md made.md", "off", "1", "json")]
    store = ConversationStore(tmp_path / "sessions.db")
    sent, out, err = piped_chat("\n".join(["hello", *lines]), store)
    assert sent == ["hello", *lines]
    assert out.count("yes") == len(sent)
    assert err.count("piped lines are sent as plain text; /commands and @files need a terminal or --plain") == 1
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("sessions.db")] == []


def test_a_script_of_the_user_gives_commands(monkeypatch, capsys, tmp_path):
    """`chat --plain`: the flag alone, no setting that a project's file could have."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/set max_tokens 7\n/export md " + str(tmp_path / "talk.md")))
    chat = Chat(capsys, ("yes",), None, scripted=True)
    assert chat.loop.run() == ExitCode.OK
    assert chat.session.max_tokens == 7
    assert "yes" in (tmp_path / "talk.md").read_text()


def test_no_file_is_read_for_a_word_that_is_piped(piped_chat, tmp_path):
    (tmp_path / "key.txt").write_text("TOP SECRET")
    said = [f"sum up @{tmp_path / 'key.txt'}", f'"@{tmp_path / "key.txt"}" \\@x', "mail a@b.c or @nobody"]
    sent, _, err = piped_chat("\n".join(said))
    assert sent == said
    assert "TOP SECRET" not in repr(sent)
    assert err.count("piped lines are sent as plain text") == 1


def test_plain_text_that_is_piped_needs_no_note(piped_chat):
    assert piped_chat("hello\n\n  \nmail a@b.c")[0::2] == (["hello", "mail a@b.c"], "")


@pytest.mark.parametrize("verb", [["run", "smollm2-135m", "hello"], ["chat", "smollm2-135m", "-p", "hello"], ["run"]])
def test_a_command_says_that_it_reads_stdin(verb, tmp_path: Path):
    """As a user meets it: a parent that leaves a pipe open, and the text that comes in the end."""
    child = subprocess.Popen(
        [*LOCALQ, *verb], env={**environment_of(tmp_path, tmp_path / "no-model"), "LOCALQ_OFFLINE": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with child:
        assert child.stderr is not None
        assert child.stderr.readline() == "localq: reading stdin until EOF; use `</dev/null` to skip this\n"
        child.terminate()


def test_no_notice_names_a_command_where_none_is_taken(monkeypatch, capsys):
    """A context of 1,000 characters: it becomes full, is full, and the oldest exchanges are left out."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(["a" * 14] * 60)))
    chat = Chat(capsys, ("yes",) * 90, None)
    assert chat.loop.run() == ExitCode.OK
    err = capsys.readouterr().err
    assert "% full" in err
    assert "the context is full: the oldest" in err
    assert not re.search(r"/(compact|clear|continue|set)", err)

"""`localq chat --mcp` as a user runs it: a real server, a scripted engine, questions at a terminal, pipes."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest

from localq.cli import command_line
from tests.support.chat.tool_chats import COMMAND as SERVER
from tests.support.chat.tool_chats import NAME, call
from tests.support.cli.terminal import CTRL_C, CTRL_D, ENTER, Terminal
from tests.support.cli.terminal_engine import Script
from tests.support.cli.terminal_faces import FACES, Place
from tests.support.cli.terminal_localq import COMMAND, TOOL_TEMPLATE, environment

NOTE = call("note", text="hello")
READY = f"tools: 9 from {NAME}"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, template=TOOL_TEMPLATE)


def notes(place: Place) -> list[str]:
    written = place.home / "notes"
    return written.read_text().split() if written.exists() else []


def say(terminal: Terminal, text: str) -> None:
    terminal.send(text)
    terminal.until(text)
    terminal.send(ENTER)


def test_the_line_chat_asks_before_each_call_and_ctrl_c_stays_in_it(place):
    slow = call("wait", seconds=30)
    replies = (NOTE, slow, f"I note it.\n{NOTE}", "Done.", NOTE, "Twice.", NOTE, "Thrice.", NOTE, "Never.")
    place.says(Script(replies=replies))
    face = FACES["line"]()
    with face.start(place, "--mcp", SERVER, "--mcp-allow", "wait") as terminal:
        terminal.until(READY)
        terminal.until(lambda: face.is_ready(terminal))
        say(terminal, "stop")
        terminal.until("[v] never")
        terminal.send("y")  # without Enter
        terminal.send(CTRL_C)
        terminal.until("(note failed: stopped by the user)")
        terminal.until("(stopped)")
        terminal.until(lambda: face.is_ready(terminal))
        say(terminal, "slowly")
        terminal.until(lambda: (place.home / "waiting").exists())
        terminal.send(CTRL_C)
        terminal.until("(wait failed: stopped by the user)")
        terminal.until(lambda: face.is_ready(terminal))
        terminal.send("\x0c")  # clears the screen
        terminal.until(lambda: "stopped" not in terminal.text)
        say(terminal, "write")
        terminal.until("Call note from mcp_server?")
        terminal.until("text: hello")
        terminal.until("[v] never")
        assert notes(place) == []
        terminal.send("maybe" + ENTER)  # is no answer
        terminal.until(lambda: terminal.text.count("[v] never") == 2)
        terminal.send("y" + ENTER)
        terminal.until("Done.")
        assert "(note: 12 characters)" in terminal.text
        assert notes(place) == ["hello"]
        terminal.until(lambda: face.is_ready(terminal))
        say(terminal, "again")
        terminal.until(lambda: terminal.text.count("[v] never") == 3)
        terminal.send("s" + ENTER)
        terminal.until("Twice.")
        terminal.until(lambda: face.is_ready(terminal))
        say(terminal, "third")
        terminal.until("Thrice.")
        assert "(calling mcp_server: note" in terminal.text
        assert notes(place) == ["hello"] * 3
        terminal.until(lambda: face.is_ready(terminal))
        say(terminal, "/tools never note")
        terminal.until("note: never")
        say(terminal, "fourth")
        terminal.until("Never.")
        assert "(note failed: the user does not allow this tool)" in terminal.text
        assert notes(place) == ["hello"] * 3
        terminal.until(lambda: face.is_ready(terminal))
        terminal.send(CTRL_D)
        assert terminal.wait() == 0


def test_the_full_screen_asks_and_keeps_the_chat(place):
    place.says(Script(replies=(NOTE, "Done.")))
    face = FACES["tui"]()
    with face.start(place, "--mcp", SERVER, size=(100, 30)) as terminal:
        terminal.until(READY)
        face.say(terminal, "write")
        terminal.until("Call note from mcp_server?")
        assert notes(place) == []
        terminal.send("y")
        terminal.until("Done.")
        terminal.until("mcp_server: note")
        assert notes(place) == ["hello"]
        assert face.leave(terminal) == 0


def piped(place: Place, *options: str, text: str = "write\n") -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, str(place.script), "chat", str(place.model), *options]
    return subprocess.run(
        command, env=environment(place.home), cwd=place.home, input=text, capture_output=True, text=True, timeout=60
    )


def test_without_a_terminal_only_what_is_allowed_runs(place):
    place.says(Script(replies=(f"{NOTE}\n{call('add', a=1, b=2)}", "Done.")))
    done = piped(place, "--mcp", SERVER, "--mcp-allow", f"{NAME}.add")
    assert (done.returncode, done.stdout) == (0, "Done.\n")
    assert (
        "(note failed: not allowed: without a terminal, the user cannot be asked (to allow it, use --mcp-allow note))"
        in done.stderr
    )
    assert "(add: 1 character)" in done.stderr
    assert notes(place) == []


def test_a_project_may_name_no_server(place):
    planted = place.home / "planted"
    (place.home / "localq.toml").write_text(f'[mcp]\nfiles = "touch {planted}"\n')
    done = piped(place)
    assert done.returncode == 2
    assert "mcp in " in done.stderr
    assert "a project file cannot change this setting" in done.stderr
    assert not planted.exists()


def test_a_server_of_the_users_settings_starts_only_where_it_is_named(place):
    started = place.home / "started"
    (place.home / "config").write_text(f'mcp_timeout = 5\n[mcp]\nfiles = "touch {started}"\n')
    place.says(Script(text="Hello."))
    assert piped(place).stdout == "Hello.\n"
    assert not started.exists()
    done = piped(place, "--mcp", "files", "--mcp", "/no/such/server")
    assert (done.returncode, done.stdout) == (0, "Hello.\n")
    assert "--mcp server: no such program: /no/such/server." in done.stderr
    assert "--mcp files: the server exited (exit code 0)" in done.stderr
    assert started.exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--mcp", ""), "--mcp: the command is empty"),
        (("--mcp", "http://10.0.0.1/mcp"), "must begin with https://"),
        (("--mcp-allow", "add"), "--mcp-allow: no MCP server was given"),
    ],
)
def test_wrong_options_end_before_a_model_is_looked_for(own_folder, capsys, monkeypatch, options, why):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert command_line.execute(["chat", "smollm2-135m", *options]) == 2
    assert why in capsys.readouterr().err

"""Both front ends over SSH, from a client in a terminal to a server on this machine (`ssh_server.py`)."""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localq.chat.history.store import ConversationStore
from tests.support.cli.ssh_server import OPENSSH, Session, SshServer
from tests.support.cli.terminal import ENTER, Terminal
from tests.support.cli.terminal_engine import Script
from tests.support.cli.terminal_faces import FACES, Line, Place
from tests.support.cli.terminal_localq import COMMAND, environment

WAIT_S = 20.0
FACE = pytest.mark.parametrize("face", [each() for each in FACES.values()], ids=list(FACES))
NEEDS_SSH = pytest.mark.skipif(not os.access(OPENSSH, os.X_OK), reason=f"no {OPENSSH}")
LONG = Script(step=4, step_s=0.01, text="one line of **Markdown** and\n" * 8 + "\n", repeat=0)  # 100 tokens a second
MOST_BYTES_PER_S = 200_000
FAR_S, GAP_S = 0.1, 0.02  # one way; between the bytes of a key, as OpenSSH spaces its packets (ObscureKeystrokeTiming)
PATIENCE_S = 0.045  # less than ESCDELAY, with which the full screen takes what it has
EDITOR = '#!/bin/sh\ntest -t 0 && test -t 1 && printf "written over there" > "$1"\n'


@contextlib.contextmanager
def connected(
    home: Path, face: Line, client: str, *, delay_s: float = 0.0, before: str = "exec"
) -> Iterator[tuple[Terminal, Session, Place]]:
    """A chat over SSH that waits for a message. before: what its command line begins with; the shell that is given that
    gives way to what is executed."""
    place = Place(home)
    own = ("LOCALQ_", "HF_", "XDG_", "HOME", "PYTHONPATH")
    given = {name: value for name, value in environment(home, LOCALQ_UI=face.ui).items() if name.startswith(own)}
    line = f"{before} {shlex.join([*COMMAND, str(place.script), 'chat', str(place.model)])}"
    with SshServer(home, given, delay_s) as server:
        local = environment(home)  # of the client: nothing of it but TERM and LANG goes over
        with Terminal(server.client(client, line), local, folder=home) as terminal:
            terminal.until(lambda: face.is_ready(terminal))
            yield terminal, server.sessions[0], place


def left(face: Line, terminal: Terminal, session: Session) -> None:
    """It ends as a user leaves it, and both terminals are as they were."""
    assert face.leave(terminal) == 0
    assert terminal.left_behind() == session.left == []


def widened(face: Line, terminal: Terminal) -> None:
    """What is drawn is as wide as the window is now."""
    terminal.resize(101, 30)
    if face.name == "tui":
        terminal.until(f"╭{'─' * 99}╮")
        terminal.until(lambda: face.is_ready(terminal))
        assert terminal.text.splitlines()[29].strip().startswith("ready")
    else:
        terminal.send("a" * 90)
        terminal.until(f">>> {'a' * 90}\n")
        terminal.send("\x15")  # Ctrl-U
        terminal.until(lambda: face.is_ready(terminal))


def stopped(face: Line, terminal: Terminal, session: Session, place: Place, count: int) -> None:
    """A long reply comes at a bearable rate, and stops at a key."""
    place.says(LONG)
    face.say(terminal, f"say {count}.")
    before, start = session.written, time.monotonic()
    terminal.until(lambda: terminal.scrolled.count("one line of") >= 5)
    rate = (session.written - before) / (time.monotonic() - start)
    assert rate < MOST_BYTES_PER_S
    terminal.send(face.stops[-1])  # Esc, of the full screen
    terminal.until(lambda: face.is_stopped(terminal, 1))
    terminal.until(lambda: face.is_ready(terminal))


@pytest.mark.parametrize(
    ("face", "client"),
    [(FACES["line"](), "asyncssh"), pytest.param(FACES["tui"](), "openssh", marks=NEEDS_SSH)],
    ids=["line-asyncssh", "tui-openssh"],
)
def test_a_chat_with_copying_and_an_editor(tmp_path, face, client):
    editor = tmp_path / "editor"
    editor.write_text(EDITOR)
    editor.chmod(0o700)
    with connected(tmp_path, face, client, before=f"EDITOR={editor} exec") as (terminal, session, place):
        face.say(terminal, "say 1.")
        terminal.until(lambda: "Hello." in terminal.text and face.is_ready(terminal))
        widened(face, terminal)
        face.say(terminal, "/copy")
        copied = f"\x1b]52;c;{base64.b64encode(b'Hello.').decode()}\x07"
        terminal.until(lambda: copied in [token.text for token in terminal.foreign])
        terminal.until(lambda: face.is_ready(terminal))
        terminal.send("\x07")  # Ctrl-G
        terminal.until("written over there")
        place.says(Script(text="Thanks."))
        terminal.send(ENTER)
        terminal.until("Thanks.")
        stopped(face, terminal, session, place, 3)
        left(face, terminal, session)


def keys_in_time(terminal: Terminal, session: Session, keys: str) -> bool:
    """Whether the bytes of `keys` reached the pty as far apart as they were meant to; a busy machine may be late."""
    before = len(session.gaps_s)
    terminal.send(keys)
    terminal.until(lambda: len(session.gaps_s) >= before + len(keys) and not session.on_their_way)
    return max(session.gaps_s[before + 1 :]) < PATIENCE_S


@FACE
def test_keys_that_arrive_in_pieces_from_far_away(tmp_path, face):
    """0.1 s each way, and every byte on its own: an arrow is never the key Esc with letters behind it."""
    with connected(tmp_path, face, "asyncssh", delay_s=FAR_S) as (terminal, session, place):
        session.gap_s = GAP_S  # only now: what the terminal answers at the start cannot be sent again if it is late
        while not keys_in_time(terminal, session, "bd\x1b[D\x1b[Dac\x1b[1;5D\x1b[C\x1b[3~\x1b[F"):
            terminal.send("\x15" if face.name == "line" else "\x1b[18~\x7f")
            terminal.until(lambda: face.is_ready(terminal))
        terminal.until("abd")
        terminal.send(ENTER)
        terminal.until("Hello.")
        stopped(face, terminal, session, place, 1)
        left(face, terminal, session)


def still_running(home: Path) -> list[str]:
    """Processes that were started with what lies below `home`."""
    found = []
    for each in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"LOCALQ_DATA={home}/".encode() in each.read_bytes():
                found.append(each.parent.name)
    return found


@pytest.mark.parametrize("before", ["exec", "true;"], ids=["alone", "below a shell"])
@FACE
def test_a_connection_that_is_cut_amid_a_reply(tmp_path, face, before):
    """The process ends, and so does its engine; what was said until then is kept."""
    with connected(tmp_path, face, "asyncssh", before=before) as (terminal, session, place):
        place.says(LONG)
        face.say(terminal, "say 1.")
        terminal.until(lambda: terminal.scrolled.count("one line of") >= 3)
        terminal.process.kill()
        assert session.ended.wait(WAIT_S)
        assert session.process.wait(WAIT_S) == (143 if before == "exec" else -signal.SIGHUP)
        end = time.monotonic() + WAIT_S
        while (running := still_running(tmp_path)) and time.monotonic() < end:
            time.sleep(0.02)
        assert running == []
    turns = ConversationStore(tmp_path / "data" / "sessions.db").load(1).conversation.turns
    assert [turn.message.role for turn in turns] == ["user", "assistant"]
    assert turns[1].message.content.count("one line of") >= 3

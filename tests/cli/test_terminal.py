"""Both front ends at a terminal, from outside: interrupts, random keys and sizes, what reaches the terminal (T2-T5).

Each is the small form of a campaign in tests/support, which says how to run the large one. The limits of time here are
those of a machine that does other things too; the campaigns print what was measured.
"""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from localq.sanitize import sanitize
from tests.support.cli.hostile_sequences import ACTING, Watch
from tests.support.cli.terminal import CTRL_C, Terminal
from tests.support.cli.terminal_engine import Script, latin
from tests.support.cli.terminal_faces import FACES, Place
from tests.support.cli.terminal_localq import COMMAND, environment
from tests.support.cli.terminal_stream import Modes, Reader, tokens
from tests.support.text.tiny_tokenizers import SENTENCES
from tests.tools import terminal_bytes, terminal_fuzz, terminal_interrupts

FACE = pytest.mark.parametrize("face", [each() for each in FACES.values()], ids=list(FACES))


# ---- the instruments themselves


def test_a_stream_is_taken_apart_alike_however_it_is_cut():
    raw = "".join(f"words {each} \x1b[1m語\x1b[0m\r\n" for each in ACTING.values()).encode()
    whole = [*(reader := Reader()).feed(raw), *reader.finish()]
    bytewise = [token for byte in raw for token in reader.feed(bytes([byte]))] + list(reader.finish())
    assert "".join(token.text for token in whole) == "".join(token.text for token in bytewise) == raw.decode()
    assert [token for token in whole if token.kind != "text"] == [token for token in bytewise if token.kind != "text"]


@pytest.mark.parametrize("payload", ACTING.values(), ids=ACTING)
def test_every_sequence_would_be_seen_and_none_is_once_it_is_sanitized(payload):
    for text, seen in ((f"a {payload} b", True), (sanitize(f"a {payload} b"), False)):
        watch = Watch()
        for token in tokens(text):
            watch(token)
        assert bool(watch.wrong) == (seen and payload not in ("ZQ\b\b\bZQ",)), watch.wrong


def test_what_is_left_on_is_seen():
    modes = Modes()
    for token in tokens("\x1b[?1049;1006h\x1b[?2004h\x1b[?25l\x1b[>25u\x1b[?7l\x1b[?1h"):
        modes.see(token)
    assert len(modes.left()) == 7
    for token in tokens("\x1b[?1049l\x1b[?1006;2004l\x1b[?25h\x1b[<u\x1b[?7h\x1b[?1l"):
        modes.see(token)
    assert modes.left() == []


# ---- T2, T3


@FACE
def test_random_interrupts(tmp_path, face):
    report = terminal_interrupts.campaign(tmp_path, face, events=12, seed=3)
    assert report.wrong == []
    assert report.events >= 12


def test_nobody_leaves_by_what_is_typed_between_two_presses_and_it_is_not_lost(tmp_path):
    face, place = FACES["line"](), Place(tmp_path)
    with face.start(place) as terminal:
        terminal.until(lambda: face.is_ready(terminal))
        terminal.send(CTRL_C)
        terminal.until(lambda: face.has_hinted(terminal, 0) and face.is_ready(terminal))
        terminal.send(f"half a message{CTRL_C}")
        terminal.until(lambda: face.is_ready(terminal) and "half" in terminal.text)
        terminal.send(CTRL_C)
        terminal.until(lambda: face.has_hinted(terminal, 1) and face.is_ready(terminal))
        place.says(Script(step_s=0.002, text=latin("1st " + "words " * 10_000)))
        face.say(terminal, "say 1.")
        terminal.until("1st")
        place.says(Script(step_s=0.002, text=latin("2nd " + "words " * 10_000)))
        terminal.send("\x1b[200~pasted, ")
        terminal.send("and its end\x1b[201~ ")
        face.say(terminal, "say 2.")
        terminal.send(CTRL_C)
        terminal.until("2nd")
        terminal.send(CTRL_C)
        terminal.until(lambda: face.is_stopped(terminal, 2))
        assert ">>> pasted, and its end say 2." in terminal.scrolled
        terminal.until(lambda: face.is_ready(terminal))
        face.leave(terminal)


@FACE
def test_random_keys_pastes_and_sizes(tmp_path, face):
    report = terminal_fuzz.campaign(tmp_path, face, events=120, seed=5)
    assert report.wrong == []
    assert report.events == 120
    assert report.bytes_out > 400 * report.lives  # what is there before the keys, which may end a life soon


def test_a_size_that_came_and_went_is_drawn_anew(tmp_path):
    """The terminal cut off what does not fit the small one, and says so once, of the size that it has then."""
    face = FACES["tui"]()
    with face.start(Place(tmp_path)) as terminal:
        terminal.until(lambda: face.is_ready(terminal))
        os.kill(terminal.process.pid, signal.SIGSTOP)  # it sees the last size alone
        terminal.resize(7, 3)
        terminal.resize(80, 24)
        while terminal.read(0.1):
            pass
        assert not face.is_ready(terminal)
        os.kill(terminal.process.pid, signal.SIGCONT)
        terminal.until(lambda: face.is_ready(terminal))
        face.leave(terminal)


@pytest.mark.parametrize("face", list(FACES))
def test_a_closed_stdout_ends_with_141(tmp_path, face):
    place = Place(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, str(place.script), "chat", str(place.model)]
    with Terminal(command, environment(tmp_path, LOCALQ_UI=FACES[face].ui), stdout=writer) as terminal:
        os.close(writer)
        terminal.until(lambda: face == "tui" or ">>>" in terminal.text or terminal.process.poll() is not None)
        terminal.send("hello\r")
        assert terminal.wait() == 141, terminal.scrolled
        assert terminal.left_behind() == []
        assert b"Traceback" not in terminal.raw


# ---- T4, T5


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_stdout_is_the_reply_byte_for_byte(tmp_path, verb):
    """Many languages, cut between any two bytes, with bytes that are no text; thought never among it."""
    place = Place(tmp_path)
    said = "\n".join([*SENTENCES, "".join(ACTING.values())])
    raw = latin(said) + "\xff caf\xc3"
    place.says(Script(text=raw, step=1))
    arguments = ["hello"] if verb == "run" else []
    done = subprocess.run(
        [*COMMAND, str(place.script), verb, str(place.model), *arguments], env=environment(tmp_path),
        input=b"" if verb == "run" else b"hello\n", capture_output=True, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = raw.encode("latin-1").decode("utf-8", "replace")
    assert done.stdout.decode() == sanitize(whole) + "\n"


@FACE
def test_nothing_that_acts_reaches_the_terminal(tmp_path, face):
    report = terminal_bytes.Report()
    terminal_bytes.ways(tmp_path, face, report)
    terminal_bytes.strings(tmp_path, face, report, 150, seed=7)
    assert report.wrong == []
    assert report.tokens > 500


@FACE
def test_without_the_sanitizer_it_would_be_seen(tmp_path, face):
    place, report = Place(tmp_path), terminal_bytes.Report()
    with terminal_bytes.Watched(face, place, report, LOCALQ_TEST_UNSAFE="1") as seen:
        seen.rest()
        place.says(Script(text=latin(" ".join(ACTING.values())), step=500))
        face.say(seen.terminal, "say it")
        seen.terminal.until(lambda: len(seen.watch.wrong) > 10)

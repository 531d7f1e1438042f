"""Other locales than UTF-8 (T7): text in and out is that of the locale, what it lacks is said; no traceback."""

from __future__ import annotations

import io
import json
import shutil
import subprocess

import pytest

from localq.chat.history.store import ConversationStore
from localq.cli import stream_encoding
from tests.support.cli.terminal import Terminal
from tests.support.cli.terminal_engine import Script, latin
from tests.support.cli.terminal_faces import Line, Place
from tests.support.cli.terminal_localq import COMMAND, environment
from tests.support.cli.typed_lines import run_typed

SAID = "café 語 “quoted” 🦙 end"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
BECAME = "are shown as '?'"


@pytest.fixture(scope="module")
def latin_1(tmp_path_factory) -> dict[str, str]:
    """A locale of ISO-8859-1, made here: few machines have one."""
    folder = tmp_path_factory.mktemp("locales")
    name = "en_US.ISO-8859-1"
    if shutil.which("localedef") is not None:
        subprocess.run(
            ["localedef", "-c", "-i", "en_US", "-f", "ISO-8859-1", str(folder / name)], capture_output=True, check=False
        )
    if not (folder / name).is_dir():
        pytest.skip("localedef cannot make a locale here")
    return {"LOCPATH": str(folder), "LC_ALL": name}


def asked(place: Place, environ: dict[str, str], *arguments: str, stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    """`localq` with a scripted engine."""
    done = subprocess.run(
        [*COMMAND, str(place.script), *arguments], env=environment(place.home, **environ), input=stdin,
        capture_output=True, cwd=place.home, timeout=60, check=False,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr
    return done


def typed(place: Place, environ: dict[str, str], *arguments: str, lines: bytes) -> subprocess.CompletedProcess[bytes]:
    """As `asked`, with lines that are typed at a terminal."""
    done = run_typed([*COMMAND, str(place.script), *arguments], environment(place.home, **environ), lines, place.home)
    assert b"Traceback" not in done.stderr
    return done


@pytest.fixture
def place(tmp_path) -> Place:
    place = Place(tmp_path)
    place.says(Script(text=latin(SAID), step=3))
    return place


@pytest.mark.parametrize("environ", [{"LANG": "C"}, {"LC_ALL": "POSIX"}, {"LANG": ""}], ids=["C", "POSIX", "none"])
def test_without_a_locale_text_is_utf8(place, environ):
    done = typed(place, environ, "chat", str(place.model), lines="né ü\n/save Größe\n".encode())
    assert done.returncode == 0
    assert done.stdout.decode() == f"{SAID}\n"
    assert "Größe" in done.stderr.decode()
    assert "became" not in done.stderr.decode()
    assert kept(place) == ["né ü", SAID]


def test_in_latin_1_the_chat_reads_and_writes_that_and_says_what_it_lacks(place, latin_1):
    done = typed(place, latin_1, "chat", str(place.model), lines="né ü\n/save Größe\n".encode("latin-1"))
    assert done.returncode == 0
    assert done.stdout.decode("latin-1") == "café ? ?quoted? ? end\n"
    assert done.stderr.decode("latin-1").count(BECAME) == 1  # once, however much it is
    assert "saved as conversation 1: Größe" in done.stderr.decode("latin-1")
    assert kept(place) == ["né ü", SAID]  # nothing of it is lost on the disk


def test_json_is_whole_in_every_locale(place, latin_1):
    for environ in (latin_1, ASCII):
        done = asked(place, environ, "run", str(place.model), "hi", "--json", stdin=b"")
        assert json.loads(done.stdout)["text"] == SAID
        assert done.stdout.isascii()
        assert BECAME.encode() not in done.stderr


def test_in_ascii_an_answer_says_what_it_lost_and_what_is_piped_in_is_utf8(place):
    done = asked(place, ASCII, "chat", str(place.model), stdin="né ü\n".encode())
    assert done.stdout == b"caf? ? ?quoted? ? end\n"
    assert done.stderr.count(BECAME.encode()) == 1
    assert kept(place) == ["né ü", SAID]


def test_bytes_that_are_no_text_are_told_of(place):
    done = asked(place, {}, "run", str(place.model), stdin=b"caf\xe9")
    assert done.returncode == 0
    assert "input bytes that are not valid utf-8" in done.stderr.decode()


def test_at_a_latin_1_terminal_the_chat_goes_by_lines_and_says_why(place, latin_1):
    command = [*COMMAND, str(place.script), "chat", str(place.model)]
    with Terminal(command, environment(place.home, **latin_1), folder=place.home) as terminal:
        terminal.until(lambda: Line().is_ready(terminal))
        assert "line mode because full-screen mode needs a UTF-8 locale" in terminal.text
        terminal.send("né\r".encode("latin-1"))
        terminal.until(BECAME)
        terminal.until(lambda: Line().is_ready(terminal))
        assert b"caf\xe9 ? ?quoted? ? end" in terminal.raw
        assert Line().leave(terminal) == 0
    assert kept(place) == ["né", SAID]


def test_half_characters_and_unknown_encodings_are_no_fault_of_the_locale(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(stream_encoding, "_warnings", {})
    stream_encoding.prepare(out, None)
    print("\udc80 é", file=out, flush=True)
    assert out.buffer.getvalue() == "? é\n".encode()
    assert stream_encoding.take_warnings() == []
    assert not stream_encoding.is_utf8(type("Odd", (), {"encoding": "no such"})())
    assert stream_encoding.is_utf8(type("Unknown", (), {"encoding": None})())


def kept(place: Place) -> list[str]:
    """The turns of the last conversation."""
    store = ConversationStore(place.home / "data" / "sessions.db")
    return [turn.message.content for turn in store.find(None).conversation.turns]

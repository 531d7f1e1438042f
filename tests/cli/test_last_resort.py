"""The last handler of the command line: one line that names the log, whatever fails and wherever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localq import cli
from localq.chat.terminal import error_log
from localq.cli import command_line, pause_line
from localq.cli.registry import VERBS
from localq.errors import ExitCode
from localq.files.hub import pauses
from tests.support.files import fake_hub, raw_hub

ROOT, TOKEN = Path(__file__).parents[2], "hf_of-the-user-and-nobody-else"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.mark.parametrize(
    "error",
    [
        LookupError(TOKEN),
        AssertionError(),
        UnicodeEncodeError("ascii", TOKEN, 0, 1, "no"),
        RecursionError(),
        OSError(5, TOKEN),
        EOFError(),
        ExceptionGroup("g", [ValueError(TOKEN)]),
        StopIteration(TOKEN),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_one_line_with_the_log(monkeypatch, capsys, error):
    def fails(*given, **named):
        raise error

    monkeypatch.setattr(command_line, "app", fails)
    assert cli.execute(["ls"]) == ExitCode.FAILURE
    out, shown = capsys.readouterr()
    assert out == ""
    assert shown.count("\n") == 1
    assert shown.startswith(f"localq: unexpected error ({type(error).__name__})")
    assert str(error_log.path()) in shown
    assert TOKEN not in shown + error_log.path().read_text()


INSIDE = """
import os, sys, threading, time
from localq import cli
from localq.cli import command_line
token = os.environ["HF_TOKEN"]
def fail(*given, **named):
    headers = {"authorization": f"Bearer {token}"}
    raise LookupError(f"no answer to {headers}")
class Destroyed:
    def __del__(self):
        fail()
def in_thread(*given, **named):
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
def in_destructor(*given, **named):
    Destroyed()
def while_reporting(*given, **named):
    sys.modules["localq.cli.last_resort"] = None
    fail()
def at_flush(*given, **named):
    flush = sys.stdout.flush
    def once():
        sys.stdout.flush = flush
        fail()
    sys.stdout.flush = once
command_line.app = globals()[sys.argv[1]]
del sys.argv[1]
cli.main()
"""


@pytest.mark.parametrize(
    ("where", "code", "lines"),
    [("fail", 1, 1), ("in_thread", 0, 0), ("in_destructor", 0, 0), ("while_reporting", 1, 1), ("at_flush", 1, 1)],
)
def test_no_traceback_reaches_the_terminal(where, code, lines):
    result = subprocess.run(
        [sys.executable, "-c", INSIDE, where, "ls"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == lines
    assert "Traceback" not in result.stderr
    assert TOKEN not in result.stderr
    if where != "while_reporting":
        log = error_log.path().read_text()
        assert "in fail" in log
        assert TOKEN not in log


def test_every_verb_has_the_handler(monkeypatch, capsys):
    """Each fails in the parser's hands, where its own function is called."""

    def fails(*given, **named):
        raise LookupError(TOKEN)

    monkeypatch.setattr("typer._click.core.Command.invoke", fails)
    for verb in VERBS:
        assert cli.execute([verb]) == ExitCode.FAILURE, verb
        assert "unexpected error (LookupError)" in capsys.readouterr().err, verb


BAD = {
    "HTTP_PROXY": ["http://[", "http://h:port", "socks9://me:p4ssword@h", "http://me:p4ssword@127.0.0.1:9", "\x7f",
                   "x" * 9000],
    "ALL_PROXY": ["://", "http://me:p4ssword@[::1", "http://127.0.0.1:99999999"],
    "NO_PROXY": ["[", "::", "http://["],
    "SSL_CERT_FILE": ["/dev/zero", "/", "/nowhere/at/all", "/proc/self/mem", "FIFO"],
    "SSLKEYLOGFILE": ["/nowhere/at/all", "/", "FIFO"],
    "HF_ENDPOINT": ["http://[", "ftp://me:p4ssword@h", "https://me:p4ssword@127.0.0.1:9", "me:p4ssword@h", "http://h:port",
                    "\x7f", "https://me:p4ssword@", "https://" + "a" * 9000, "http://me:p4ss/w@rd@127.0.0.1:9", "http://\u0130.example"],
    "HF_HUB_DOWNLOAD_TIMEOUT": ["soon"],
    "HF_HUB_ETAG_TIMEOUT": ["1e9"],
    "HF_TOKEN": ["schl\u00fcssel-p4ssword", "two words-p4ssword"],
    "HF_TOKEN_PATH": ["/", "/proc/self/mem"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_variable_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, capfd, name, value):
    if value == "FIFO":
        value = str(tmp_path / "pipe")
        os.mkfifo(value)
    homes = {f"LOCALQ_{each}": str(tmp_path / each) for each in ("DATA", "CACHE", "CONFIG", "MODELS")}
    kept = {each: text for each, text in os.environ.items() if not each.startswith(("HF_", "LOCALQ_"))}
    kept |= {**homes, "HF_HOME": str(tmp_path / "home"), "XDG_STATE_HOME": str(tmp_path / "state")}
    with fake_hub.FakeHub() as hub:  # without the repository
        environment = {**kept, "HF_ENDPOINT": hub.url, name: value}
        command = [sys.executable, "-m", "localq", "pull", "maker/tiny-model"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    allowed = {ExitCode.NETWORK, ExitCode.GATED} if name.startswith("HF_TOKEN") else {ExitCode.NETWORK}
    if name in ("NO_PROXY", "SSLKEYLOGFILE", "HF_HUB_ETAG_TIMEOUT"):  # of some, the hub is asked: it has no such model
        allowed |= {ExitCode.UNKNOWN_MODEL}
    assert done.returncode in allowed, done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert "p4ss" not in done.stderr
    assert len(done.stderr) < 600
    assert not (tmp_path / "state").exists()  # no log: it is no bug


def test_a_pause_is_a_line_at_once_and_each_minute(monkeypatch, capsys):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pauses.shown_by(pause_line.show):
        pauses.pause(150, "the hub \x1b[31mis busy")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"retrying in {left} s: the hub [31mis busy" for left in (150, 90, 30)]


def test_ctrl_c_ends_a_pause(tmp_path):
    def busy(link, path):
        raw_hub.send(link, b"503 busy\r\nRetry-After: 300")

    homes = {f"LOCALQ_{each}": str(tmp_path / each) for each in ("DATA", "CACHE", "CONFIG", "MODELS")}
    with raw_hub.running(busy) as hub:
        process = subprocess.Popen(
            [sys.executable, "-m", "localq", "pull", "maker/tiny-model"], cwd=ROOT, text=True,
            env={**os.environ, **homes, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == f"retrying in 300 s: {hub.url} returned HTTP status 503\n"
        process.send_signal(2)
        assert process.wait(10) == ExitCode.INTERRUPTED
        with process.stderr as rest:
            assert "Traceback" not in rest.read()

"""What is asked of an engine process about snapshots, and that neither a watchdog nor an exit waits for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from localq.errors import ExitCode, LocalqError
from localq.worker.client import EngineClient
from localq.worker.messages import (
    CacheRestored,
    CacheSaved,
    Generate,
    Load,
    Profile,
    RestoreCache,
    SaveCache,
    decode,
    encode,
)

SCRIPTED = (sys.executable, "-m", "tests.support.worker.scripted_engine")


@pytest.mark.parametrize(
    "message",
    [
        SaveCache("a b/\u00e4.kv"),
        RestoreCache("x.kv"),
        CacheSaved(2**40),
        CacheRestored(7),
        Profile(None, True),
        Profile(3),
    ],
    ids=str,
)
def test_messages_cross_the_pipe_as_they_are(message):
    assert decode(encode(message)) == message


def test_both_answer_or_say_why_not_and_the_client_goes_on():
    with EngineClient(SCRIPTED) as client:
        client.load(Load("m"))
        assert client.save_cache("seven") == 5
        assert client.restore_cache("file") == 4
        with pytest.raises(LocalqError, match="snapshot not used: the file cannot be read") as caught:
            client.restore_cache("missing")
        assert caught.value.exit_code == ExitCode.DISK
        assert len(list(client.generate(Generate(1, [5], max_tokens=3)))) > 1


def test_a_write_that_takes_longer_than_a_step_may_is_waited_for():
    with EngineClient((*SCRIPTED, "0.2"), silence_s=0.4) as client:
        client.load(Load("m"))
        assert client.save_cache("seven") == 5
        assert client.alive


def test_without_a_process_nothing_is_kept():
    with pytest.raises(LocalqError, match="not running"):
        EngineClient(SCRIPTED).save_cache("x")


def test_ctrl_c_breaks_off_a_write_and_the_process_ends():
    """The interrupt comes when the engine has said that it writes; it would for a minute."""
    with EngineClient(SCRIPTED) as client:
        client.load(Load("m"))
        pid = client.pid

        def interrupt() -> None:
            while "saving" not in client.log:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            client.save_cache("stuck")
    assert not client.alive
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("what", ["save_cache", "restore_cache"])
def test_a_process_that_hangs_over_a_file_is_ended_and_named(what):
    with EngineClient(SCRIPTED, file_s=0.3) as client:
        client.load(Load("m"))
        with pytest.raises(LocalqError, match="and was killed"):
            getattr(client, what)("stuck")
        assert not client.alive


def test_the_answer_to_what_was_broken_off_is_taken_for_no_other(monkeypatch):
    with EngineClient(SCRIPTED) as client:
        client.load(Load("m"))
        for path in ("seven", "missing"):  # sent, and not waited for, as Ctrl-C has it
            work = client.save_cache if path == "seven" else client.restore_cache
            with monkeypatch.context() as patch:
                patch.setattr(client, "_replies", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    work(path)
        assert client.restore_cache("file") == 4
        assert client.profile(Profile(7))["position"] == 7
        with pytest.raises(LocalqError, match="no such position"):
            client.profile(Profile(-1))
        assert len(list(client.generate(Generate(1, [5], max_tokens=3)))) > 1


def interrupted(limit_s: float | None = None):
    raise KeyboardInterrupt

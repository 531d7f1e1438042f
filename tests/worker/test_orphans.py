"""No engine process outlives its front end, however that ends, and whatever state the engine process is in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTED = (sys.executable, "-m", "tests.support.worker.scripted_engine")
PATIENCE_S = 40.0  # less than the minute that the engine sleeps


def test_no_orphan_when_the_front_end_is_killed():
    script = (
        "import sys; from localq.worker.client import EngineClient; from localq.worker.messages import *\n"
        "c = EngineClient(sys.argv[1:]); c.load(Load('tiny'))\n"
        "for e in c.generate(Generate(1, [0], max_tokens=10**6)):\n"
        "    if isinstance(e, Tokens): print(c.pid, flush=True); sys.stdin.read()\n"
    )
    front = subprocess.Popen(
        [sys.executable, "-c", script, *SCRIPTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
    )
    assert front.stdout is not None
    engine = int(front.stdout.readline())
    os.kill(engine, 0)  # it lives
    front.kill()
    front.communicate()
    deadline = time.monotonic() + PATIENCE_S
    while _runs(engine) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(engine)


FRONT_END = """
import signal, sys, threading, time
from localq.worker.client import EngineClient
from localq.worker.messages import *
c = EngineClient(sys.argv[2:], silence_s=60)
def work():
    c.load(Load("tiny"))
start = threading.Thread(target=work)
start.run() if sys.argv[1] == "main" else start.start()
if sys.argv[1] == "thread":
    start.join()  # it has ended, as those of the full screen do
assert [e for e in c.generate(Generate(1, [0], max_tokens=3)) if isinstance(e, Done)]
print(c.pid, flush=True)
sys.stdin.readline()
c.close()
"""


@pytest.mark.parametrize("end", ["killed", "terminated", "closed"])
@pytest.mark.parametrize("starter", ["main", "thread"])
def test_a_stopped_engine_ends_with_its_front_end(starter, end):
    """By the kernel where the front end is killed: a stopped process sees no end of its pipe."""
    command = [sys.executable, "-c", FRONT_END, starter, *SCRIPTED]
    front = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())
    assert front.stdout is not None
    assert front.stdin is not None
    engine = int(front.stdout.readline())
    os.kill(engine, signal.SIGSTOP)
    while _state(engine) != "T":
        time.sleep(0.01)
    if end == "closed":
        front.stdin.write(b"\n")
        front.stdin.flush()
    else:
        front.send_signal(signal.SIGKILL if end == "killed" else signal.SIGTERM)
    front.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while _runs(engine) and time.monotonic() < deadline:
        time.sleep(0.02)
    front.communicate()
    assert not _runs(engine)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _state(pid: int) -> str:
    """The letter of /proc: Z where it has ended, T where it is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def _runs(pid: int) -> bool:
    return _state(pid) != "Z"

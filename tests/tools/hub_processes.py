"""Many processes at one cache, and signals at random moments: `localq pull` in processes of its own.

    python -m tests.tools.hub_processes parallel --rounds 50 [--no-locks]
    python -m tests.tools.hub_processes signals --rounds 200

`parallel` fetches one model in 8 processes at once, into an empty cache each time; with `--no-locks` every lock is
given to everybody, as on some network drives. `signals` sends SIGINT, SIGTERM or SIGHUP after some milliseconds. The
last line is one JSON object; the exit status is 1 where anything was not as it must be.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import close_session

from localq.files.catalog import Source
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import fetch as hub
from tests.tools import hub_kills

PROCESSES = 8
FOLDERS = {"HF_HUB_CACHE": "hub", "LOCALQ_DATA": "data", "LOCALQ_CACHE": "cache", "HF_HOME": "home"}


def begin(work: Callable[[], int], output: Path) -> int:
    """Run `work` in a process of its own, whose exit status it returns; what it prints goes to `output`."""
    child = os.fork()
    if child == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 99
        try:
            code = work()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_right(files: dict[str, bytes]) -> bool:
    found = hub_cache.find(hub_kills.REPO, "main")
    return found is not None and all((found / name).read_bytes() == content for name, content in files.items())


def without_locks() -> None:
    """As on a drive where everybody gets every lock."""
    fcntl.flock = lambda descriptor, operation: None


def parallel(files: dict[str, bytes], sent: Callable[[], dict[str, int]], root: Path, locks: bool) -> list[str]:
    """One model by all processes at once: what is wrong afterwards."""

    def work() -> int:
        if not locks:
            without_locks()
        hub.fetch(Source(format="bf16", repo=hub_kills.REPO))
        return 0

    before, log = sent(), root / "log"
    children = [begin(work, log) for _ in range(PROCESSES)]
    codes = [status_of(child) for child in children]
    wrong = [] if codes == [0] * PROCESSES else [f"exit codes {codes}: {log.read_text()}"]
    wrong += hub_kills.Looker().wrong(files) + ([] if is_right(files) else ["the model is not complete"])
    twice = [name for name, count in sent().items() if count - before[name] != len(files[name])]
    if twice and locks:
        wrong.append(f"fetched more than once: {twice}")
    left = [path.name for path in (root / "cache").rglob("*") if path.is_file()]
    return wrong + ([f"left over: {left}"] if left else [])


def interrupted(
    files: dict[str, bytes], root: Path, rng: random.Random, codes: collections.Counter[int], most_s: float
) -> list[str]:
    """One signal at one moment of `localq pull`: what is wrong afterwards."""
    from localq import cli
    from localq.cli import command_line

    (ready, says_so), execute = os.pipe(), command_line.execute

    def begun(arguments: list[str]) -> int:
        os.write(says_so, b".")  # before `main` has begun the system would end the process at once
        return execute(arguments)

    def work() -> int:
        command_line.execute = begun
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["localq", "pull", hub_kills.REPO, "--force"]  # its weights are noise
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    number, log = rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)), root / "log"
    log.unlink(missing_ok=True)
    child = begin(work, log)
    os.read(ready, 1)
    os.close(ready)
    os.close(says_so)
    time.sleep(rng.random() ** 4 * 0.5)  # mostly early, as a pull is short
    sent_at = time.monotonic()
    os.kill(child, number)
    code, took_s = status_of(child), time.monotonic() - sent_at
    codes[code] += 1
    wrong, text = [], log.read_text()
    if code not in (0, 130 if number == signal.SIGINT else 143):
        wrong.append(f"exit code {code} after {number.name}: {text}")
    if took_s > most_s:
        wrong.append(f"{took_s:.1f} s after {number.name}")
    if "Traceback" in text:
        wrong.append(text)
    return wrong + hub_kills.Looker().wrong(files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("parallel", "signals"))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-locks", action="store_true")
    parser.add_argument("--most-s", type=float, default=1.0, help="from a signal to the end of the process")
    given = parser.parse_args()
    rng, wrong, begun = random.Random(given.seed), [], time.monotonic()
    codes: collections.Counter[int] = collections.Counter()
    files = hub_kills.model(rng, [3 * 2**20, 2**20, 2**19])
    memory = Path("/dev/shm")
    with (
        hub_kills.served(files) as (url, sent),
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
    ):
        root = Path(folder)
        os.environ |= {"HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1", "LOCALQ_CONFIG": str(root / "none.toml")}
        os.environ |= {name: str(root / place) for name, place in FOLDERS.items()}
        hub_client.list_files(hub_kills.REPO, "main")
        close_session()  # else processes would inherit its connection
        for number in range(given.rounds):
            if given.what == "parallel":
                wrong += parallel(files, sent, root, not given.no_locks)
            else:
                wrong += interrupted(files, root, rng, codes, given.most_s)
            if given.what == "parallel" or number % 4 == 3:
                for place in FOLDERS.values():
                    shutil.rmtree(root / place, ignore_errors=True)
        if given.what == "signals":
            os.waitpid(
                begin(lambda: int(hub.fetch(Source(format="bf16", repo=hub_kills.REPO)) is None), root / "log"), 0
            )
            wrong += [] if is_right(files) else ["the model is not complete after all"]
    report: dict[str, Any] = {"rounds": given.rounds, "wrong": wrong, "codes": dict(codes)}
    print(json.dumps({**report, "seconds": round(time.monotonic() - begun, 1)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

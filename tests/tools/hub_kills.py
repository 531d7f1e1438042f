"""Kills downloads with SIGKILL at seeded moments, again and again, and looks at what is left each time.

    python -m tests.tools.hub_kills --kills 2000 --mib 64 64 64 64 64 64 64 64

A model is fetched from a fake hub in a process of its own, which is killed: before, in the middle of, or after the nth
write, fsync, rename or link, or after some milliseconds. Then no file of the cache may have wrong content, and the next
process goes on. After a few kills one is let through: all files must be right, and no file may have been sent more than
16 MiB of again for each kill that met it. The last line is one JSON object; the exit status is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localq.files.catalog import Source
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import fetch as hub
from tests.support.files import fake_hub

REPO = "maker/killed"
LIMIT_BYTES = 16 * 2**20  # that may be fetched again, for each file that a kill meets
KILLS_IN_A_ROW = 8
OPERATIONS = ("write", "fsync", "ftruncate", "replace", "symlink", "unlink")


@dataclass
class Report:
    """What was seen. `wrong` are final states, or names in the cache, that are not as they must be."""

    kills: int = 0
    models: int = 0
    wrong: list[str] = field(default_factory=list)
    most_again_bytes: int = 0  # of one file, per kill that met it


def model(rng: random.Random, shard_bytes: list[int]) -> dict[str, bytes]:
    """A model with shards of random bytes, of these sizes: nothing reads them but hashes."""
    files = fake_hub.model_files(len(shard_bytes))
    names = sorted(name for name in files if name.endswith(".safetensors"))
    return files | {name: rng.randbytes(size) for name, size in zip(names, shard_bytes, strict=True)}


@contextlib.contextmanager
def served(files: dict[str, bytes]) -> Iterator[tuple[str, Callable[[], dict[str, int]]]]:
    """The address of a hub in a process of its own, and what asks it how many bytes of each file it has sent so far."""
    asked, answered = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with fake_hub.FakeHub() as server, os.fdopen(asked[0]) as questions, os.fdopen(answered[1], "w") as answers:
            server.add(REPO, files)
            os.close(asked[1])
            print(server.url, file=answers, flush=True)
            for _ in questions:  # asked where no client runs
                server.settle()
                print(json.dumps({name: server.sent_of(name) for name in files}), file=answers, flush=True)
        os._exit(0)
    os.close(asked[0])
    os.close(answered[1])
    with os.fdopen(asked[1], "w") as questions, os.fdopen(answered[0]) as answers:
        url = answers.readline().strip()

        def sent() -> dict[str, int]:
            print("?", file=questions, flush=True)
            counts: dict[str, int] = json.loads(answers.readline())
            return counts

        yield url, sent
    os.waitpid(child, 0)


def kill_at(rng: random.Random, writes: int) -> Callable[[], None]:
    """What arms a process to kill itself at a moment that `rng` chooses, among about `writes` writes or all else."""
    frequent = rng.random() < 0.5
    names = ("write",) if frequent else OPERATIONS[1:]
    left = rng.randrange(writes if frequent else 60)
    when = rng.choice(("before", "within", "after"))

    def arm() -> None:
        for name in names:
            setattr(os, name, _counted(getattr(os, name), name == "write"))

    def _counted(operation: Callable[..., Any], is_write: bool) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                return operation(*arguments, **options)
            if when == "within" and is_write:
                operation(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif when == "after":
                operation(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        return counted

    return arm


def fetch(arm: Callable[[], None], kill_after_s: float | None = None) -> bool:
    """Fetch the model in a process of its own: True where it was done, False where it was killed."""
    child = os.fork()
    if child == 0:
        arm()
        try:
            hub.fetch(Source(format="bf16", repo=REPO))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)  # one that has ended is a zombie until it is waited for
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("the process failed instead of being killed")
    return os.WIFEXITED(status)


class Looker:
    """Looks for files with wrong content under names of the cache; hashes each content once."""

    def __init__(self) -> None:
        self._good: set[tuple[int, int, int]] = set()

    def wrong(self, files: dict[str, bytes]) -> list[str]:
        """Names of the snapshot and of blobs whose content is not right."""
        folder = hub_cache.repo_folder(REPO)
        wrong = [path.name for path in (folder / "snapshots").rglob("*")
                 if path.is_file() and path.name not in files]  # fmt: skip
        wrong += [path.name for path in (folder / "refs").rglob("*") if path.name != "main"]
        return wrong + [path.name for path in (folder / "blobs").glob("*") if not self._is_good(path)]

    def _is_good(self, path: Path) -> bool:
        stat = path.stat()
        key = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if key not in self._good:
            content = path.read_bytes()
            names = (hashlib.sha256(content).hexdigest(), fake_hub.git_id(content))
            if path.name not in names:
                return False
            self._good.add(key)
        return True


def one_model(
    report: Report, rng: random.Random, files: dict[str, bytes], sent: Callable[[], dict[str, int]], kills: int
) -> None:
    """Fetch the model with `kills` kills on the way, or until it is there, and look at it."""
    looker, met, at_first = Looker(), dict.fromkeys(files, 0), sent()
    writes = sum(map(len, files.values())) // 2**16 // 4  # a few kills until the model is there
    done, before = False, at_first
    while not done and kills > 0:
        by_the_clock = rng.uniform(0.02, 0.3) if rng.random() < 0.3 else None
        done = fetch(kill_at(rng, writes) if by_the_clock is None else lambda: None, by_the_clock)
        now = sent()
        if not done:
            report.kills, kills = report.kills + 1, kills - 1
            for name in files:
                met[name] += now[name] > before[name]
        report.wrong += looker.wrong(files)
        before = now
    if not done:
        fetch(lambda: None)
    found = hub_cache.find(REPO, "main")
    right = found is not None and all((found / name).read_bytes() == content for name, content in files.items())
    report.wrong += [] if right else ["the model is not complete"]
    report.models += 1
    for name, count in sent().items():
        again = count - at_first[name] - len(files[name])
        report.most_again_bytes = max(report.most_again_bytes, again // max(met[name], 1))
        if again > LIMIT_BYTES * met[name]:
            report.wrong.append(f"{name}: {again:,} bytes were sent again, in {met[name]} kills")


def campaign(kills: int, seed: int, shard_bytes: list[int], root: Path) -> Report:
    """`kills` kills in all, below `root`."""
    report, rng = Report(), random.Random(seed)
    files = model(rng, shard_bytes)
    with served(files) as (url, sent):
        places = {"HF_HUB_CACHE": "hub", "LOCALQ_DATA": "data", "LOCALQ_CACHE": "cache", "HF_HOME": "home"}
        os.environ |= {
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_ENDPOINT": url,
            **{name: str(root / folder) for name, folder in places.items()},
        }
        import huggingface_hub.file_download

        hub_client.list_files(REPO, "main")  # imports are made once, and not in every process that is killed
        huggingface_hub.close_session()  # else processes would inherit its connection
        while report.kills < kills:
            one_model(report, rng, files, sent, min(KILLS_IN_A_ROW, kills - report.kills))
            for folder in places.values():
                shutil.rmtree(root / folder, ignore_errors=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mib", type=float, nargs="+", default=[64] * 8, help="size of each shard")
    given = parser.parse_args()
    begun = time.monotonic()
    in_memory = Path("/dev/shm")  # kills need no disk, and `fsync` takes longer there than all else
    with tempfile.TemporaryDirectory(prefix="hub-kills-", dir=in_memory if in_memory.is_dir() else None) as folder:
        report = campaign(given.kills, given.seed, [int(size * 2**20) for size in given.mib], Path(folder))
    print(json.dumps({**vars(report), "seconds": round(time.monotonic() - begun, 1)}))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

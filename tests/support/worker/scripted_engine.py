"""An engine process without torch, for the tests of the pipe: `python scripted_engine.py [step_limit_s]`.

What a reply does is written in the prompt's first id: see `SCRIPTS`. Otherwise it counts up from the last id, one
token per millisecond, until max_tokens.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from localq.errors import ExitCode, LocalqError
from localq.stats import Stats
from localq.worker import server
from localq.worker.messages import (
    CacheRestored,
    CacheSaved,
    Generate,
    Load,
    Loaded,
    Profile,
    Profiled,
    RestoreCache,
    SaveCache,
)


@dataclass(frozen=True)
class Step:
    ids: tuple[int, ...]
    stats: Stats
    reason: str | None = None
    logprobs: tuple[object, ...] = ()


def print_a_lot() -> None:
    os.write(1, b"a library prints this to stdout\n")
    print('{"type":"done"', flush=True)


def device_fault() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")


def named_failure() -> None:
    raise LocalqError("tiny", "non-finite logits at token 3", "Try other weights.", ExitCode.BAD_FILE)


def bug() -> None:
    raise KeyError("unexpected")


def killed() -> None:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


SCRIPTS: dict[int, Callable[[], None]] = {
    1001: print_a_lot,
    1002: device_fault,
    1003: named_failure,
    1004: bug,
    1005: killed,
    1006: lambda: time.sleep(60),
    1007: lambda: sys.exit("left early"),
}
DEFAULT_TOKENS = 10


class ScriptedBackend:
    can_hang = True

    def load(self, request: Load, on_progress: Callable[[str, int, int], None]) -> Loaded:
        if request.path == "missing":
            raise LocalqError(request.path, "no such file", "", ExitCode.UNKNOWN_MODEL)
        if request.path == "slow":
            time.sleep(60)
        on_progress("loading weights", 5, 10)
        if (name := os.path.basename(request.path)).startswith("SIG"):
            while os.path.exists(f"{request.path}.wait"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.Signals[name])
        return Loaded(request.path, "cpu", "CPU", "float32", "dense", 100, 50, False, 0.5, {"weights": 10}, ["a note"])

    def unload(self) -> None:
        print("unloaded", file=sys.stderr, flush=True)

    def profile(self, request: Profile) -> Profiled:
        if request.position is not None and request.position < 0:
            raise LocalqError("profile", "no such position", "", ExitCode.USAGE)
        return Profiled({"position": request.position, "rows": []})

    def save_cache(self, request: SaveCache) -> CacheSaved:
        print("saving", file=sys.stderr, flush=True)
        time.sleep(60 if request.path == "stuck" else 1)  # longer than a step may take where that is set to less
        return CacheSaved(len(request.path))

    def restore_cache(self, request: RestoreCache) -> CacheRestored:
        if request.path == "missing":
            raise LocalqError("snapshot not used", "the file cannot be read", "", ExitCode.DISK)
        time.sleep(60 if request.path == "stuck" else 0)
        return CacheRestored(len(request.path))

    def generate(self, request: Generate, cancelled: Callable[[], bool]) -> Iterator[Step]:
        yield Step((), Stats(prompt_tokens=len(request.prompt)))
        for count in range(1, (request.max_tokens or DEFAULT_TOKENS) + 1):
            if cancelled():
                yield Step((), Stats("done", generated_tokens=count - 1), "cancelled")
                return
            if count == 4 and (script := SCRIPTS.get(request.prompt[0])):
                script()
            yield Step((request.prompt[-1] + count,), Stats("decode", generated_tokens=count))
            time.sleep(0.001)
        yield Step((), Stats("done"), "length")


if __name__ == "__main__":
    server.main(ScriptedBackend, float(sys.argv[1]) if len(sys.argv) > 1 else server.STEP_LIMIT_S)

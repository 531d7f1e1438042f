"""An engine process without torch that says what a file tells it to: `python terminal_engine.py SCRIPT`.

SCRIPT holds a `Script` as JSON and is read anew for each load and each reply, so a test changes it between two
messages. Every token is one byte, by the tokenizer that `write_model` makes: any bytes can be said, cut anywhere.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from localq.errors import ExitCode, LocalqError
from localq.stats import Stats
from localq.worker import server
from localq.worker.messages import Generate, Load, Loaded, Profile

CONTEXT = 100_000_000  # so that no test meets its end unless it wants to
TICK_S = 0.005  # as often as this it looks whether it is to stop


@dataclass(frozen=True)
class Script:
    """What the engine does. Times in seconds.

    text     what it says, in Latin-1: one character per byte
    repeat   it says the text so many times; 0 = without end
    step     bytes in a step
    replies  what it says in turn, in Latin-1, in place of the text; after the last of them that one again
    fails    the load or the reply (after the text) fails with this cause
    """

    load_s: float = 0.0
    prefill_s: float = 0.0
    step_s: float = 0.0
    step: int = 1
    text: str = "Hello."
    repeat: int = 1
    replies: tuple[str, ...] = ()
    fails: str = ""
    load_fails: str = ""
    notes: tuple[str, ...] = ()
    device_name: str = "CPU"
    context: int = CONTEXT

    def write(self, path: Path) -> Path:
        """So that a process never reads half of it."""
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.replace(path)
        return path


def latin(text: str) -> str:
    """`text` as `Script` wants it; half characters as UTF-8 would have them, which is no UTF-8."""
    return text.encode("utf-8", "surrogatepass").decode("latin-1")


def letters() -> dict[int, str]:
    """Byte -> letter, as byte-level tokenizers since GPT-2 write bytes (gpt-2/src/encoder.py, bytes_to_unicode)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}


class ScriptedBackend:
    """See the module."""

    can_hang = False

    def __init__(self) -> None:
        self.path, self.ids = Path(sys.argv[1]), dict[int, int]()
        self.count = 0  # of replies

    @property
    def script(self) -> Script:
        return Script(**json.loads(self.path.read_text()))

    def load(self, request: Load, on_progress: Callable[[str, int, int], None]) -> Loaded:
        script = self.script
        vocab: dict[str, int] = json.loads((Path(request.path) / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
        self.ids = {byte: vocab[letter] for byte, letter in letters().items()}
        start = time.monotonic()
        while (spent := time.monotonic() - start) < script.load_s:
            on_progress("loading weights", int(spent * 1e9), int(script.load_s * 1e9))
            time.sleep(TICK_S)
        if script.load_fails:
            raise LocalqError(request.options.name, script.load_fails, "Try other weights.", ExitCode.BAD_FILE)
        return Loaded(
            request.options.name, "cpu", script.device_name, "float32", "bf16", request.options.ctx or script.context,
            320, False, script.load_s, {"weights": 10**8}, list(script.notes),
        )  # fmt: skip

    def unload(self) -> None:
        """There is nothing to free."""

    def profile(self, request: Profile) -> NoReturn:
        raise LocalqError("profile", "a script has no kernels", "")

    def save_cache(self, request: Any) -> NoReturn:
        raise LocalqError("the cache", "a script has none", "")

    restore_cache = save_cache

    def generate(self, request: Generate, cancelled: Callable[[], bool]) -> Iterator[Step]:
        script, start, count = self.script, time.monotonic(), len(request.prompt)
        window = {"prompt_tokens": count, "context_size": script.context}
        yield step((), Stats(**window))
        while (spent := time.monotonic() - start) < script.prefill_s and not cancelled():
            done = int(count * spent / script.prefill_s)
            yield step((), Stats(**window, prefilled_tokens=done, context_used=done))
            time.sleep(TICK_S)
        first, said = time.monotonic(), 0
        for ids in self._pieces(script):
            if cancelled():
                break
            said += len(ids)
            times = {"time_to_first_token_s": first - start, "decode_s": time.monotonic() - first + 1e-9}
            stats = Stats("decode", **window, prefilled_tokens=count, generated_tokens=said, **times,
                          context_used=count + said)  # fmt: skip
            yield step(ids, stats)
            wait(script.step_s, cancelled)
        if script.fails and not cancelled():
            raise LocalqError("the scripted engine", script.fails, "Ask again.")
        end = Stats("done", **window, prefilled_tokens=count, generated_tokens=said, context_used=count + said)
        yield step((), end, "cancelled" if cancelled() else "stop")

    def _pieces(self, script: Script) -> Iterator[tuple[int, ...]]:
        text = script.replies[min(self.count, len(script.replies) - 1)] if script.replies else script.text
        self.count += 1
        said = [self.ids[byte] for byte in text.encode("latin-1")]
        count = 0
        while script.repeat == 0 or count < script.repeat:
            yield from (tuple(said[place : place + script.step]) for place in range(0, len(said), script.step))
            count += 1


def step(ids: tuple[int, ...], stats: Stats, reason: str | None = None) -> Step:
    """One of the engine's steps."""
    return Step(ids, stats, reason)


@dataclass(frozen=True)
class Step:
    ids: tuple[int, ...]
    stats: Stats
    reason: str | None = None
    logprobs: tuple[object, ...] = ()


def wait(seconds: float, cancelled: Callable[[], bool]) -> None:
    """A step takes its time, but not to be stopped."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not cancelled():
        time.sleep(min(left, TICK_S))


if __name__ == "__main__":
    server.main(ScriptedBackend)

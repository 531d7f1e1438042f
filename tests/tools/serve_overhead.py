"""What the server costs over the worker: python -m tests.tools.serve_overhead [--runs 15] [--tokens 400]

An engine process that says a token every 2 ms (500 tok/s) is read directly, and through HTTP as a stream, in turn.
Prints tok/s (medians) and the time to the first token (lower quartiles: other work on a machine only adds to it) of
both. Limits: 1 % of tok/s, 5 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from localq.files.model_folder import open_model
from localq.text.tokenizer import Tokenizer
from localq.worker.messages import Generate, Tokens
from tests.support.cli.terminal_localq import write_model
from tests.support.server.live_server import HELLO, LiveServer

STEP_S = 0.002


@dataclass(frozen=True)
class Pace:
    """Of one reply: seconds to its first token, and tokens a second after it."""

    first_s: float
    rate: float


def direct(server: LiveServer, tokenizer: Tokenizer) -> Pace:
    """A reply of the engine process, read without the server's HTTP: chat template and ids as there."""
    begun = time.perf_counter()
    ids = tokenizer.chat_ids(HELLO["messages"])
    model = server.slot.model
    assert model is not None
    first, last, count = 0.0, 0.0, 0
    for event in model.client.generate(Generate(1, ids)):
        if isinstance(event, Tokens):
            last, count = time.perf_counter(), count + len(event.ids)
            first = first or last
    return Pace(first - begun, (count - 1) / (last - first))


def served(server: LiveServer) -> Pace:
    """The same reply as a stream of chat completion chunks."""
    begun = time.perf_counter()
    connection = server.connect()
    first, last, held, count = 0.0, 0.0, b"", 0
    while b"[DONE]" not in held:
        held += connection.recv(65536)
        *lines, held = held.split(b"\n\n") if b"[DONE]" not in held else [*held.split(b"\n\n")[:-1], b"[DONE]"]
        for line in lines:
            _, mark, data = line.partition(b"data: ")
            if mark and data.startswith(b"{") and (text := _text(data)):
                last, count = time.perf_counter(), count + len(text.encode())
                first = first or last
    connection.close()
    return Pace(first - begun, (count - 1) / (last - first))


def _text(data: bytes) -> str:
    choices = json.loads(data)["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


def measure(runs: int, tokens: int) -> tuple[list[Pace], list[Pace]]:
    """Paces of direct and of served replies."""
    with tempfile.TemporaryDirectory() as home:
        folder = write_model(Path(home) / "tiny")
        server = LiveServer(folder, Path(home))
        tokenizer = Tokenizer.load(open_model(folder))
        try:
            server.say("x", repeat=tokens, step_s=STEP_S)
            pairs = [(direct(server, tokenizer), served(server)) for _ in range(runs + 1)]
        finally:
            server.close()
    return [each for each, _ in pairs[1:]], [each for _, each in pairs[1:]]


def main() -> int:
    """Measure, print, and exit with 1 beyond the limits."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.serve_overhead")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=400)
    given = parser.parse_args()
    without, through = measure(given.runs, given.tokens)
    rates = [statistics.median(each.rate for each in paces) for paces in (without, through)]
    firsts = [statistics.quantiles([each.first_s for each in paces])[0] * 1e3 for paces in (without, through)]
    cost, delay = 1 - rates[1] / rates[0], firsts[1] - firsts[0]
    print(f"engine {rates[0]:.1f} tok/s, first token {firsts[0]:.1f} ms; served {rates[1]:.1f} tok/s, "
          f"first token {firsts[1]:.1f} ms: {cost:+.2%} of tok/s, {delay:+.1f} ms")  # fmt: skip
    return 1 if cost > 0.01 or delay > 5 else 0


if __name__ == "__main__":
    sys.exit(main())

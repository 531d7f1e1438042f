"""Campaigns against `localq serve` with the packaged model: python -m tests.tools.serve_campaign [OPTIONS]

--disconnects 10000  clients that go away at random moments: while queued, in prefill, in a stream
--bad 100000         requests with a wrong field: each is refused by its name
--soak 30m           four clients chat, stream, hang up and err, while memory, descriptors and threads are watched

Prints what was found, and exits with 1 if anything leaked, hung or was answered wrongly. `tests/server` has 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from localq import wording
from tests.support.server.bad_fields import ALL, draw
from tests.support.server.spawned_server import Holdings, SpawnedServer, reset

QUESTION = {"messages": [{"role": "user", "content": "Count from one to a hundred."}]}
IDLE_S = 0.25  # from a disconnect to an idle slot, 99th percentile; or a step of the engine, where that takes longer
GROWTH = 1_000_000  # bytes an hour, of a soak; as much altogether for the other campaigns, times 8


class Findings:
    """What went wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def add(self, text: str) -> None:
        self.wrong.append(text)
        print(f"WRONG {text}", flush=True)

    def compare(self, before: Holdings, after: Holdings, most_bytes: float) -> None:
        """Add what a process holds more than before."""
        if after.descriptors > before.descriptors + 1:
            self.add(f"descriptors: {before.descriptors} before, {after.descriptors} after")
        if after.threads > before.threads + 4:  # asyncio's pool of 6 may not have been full
            self.add(f"threads: {before.threads} before, {after.threads} after")
        if after.rss - before.rss > most_bytes:
            self.add(f"memory: {(after.rss - before.rss) / 1e6:.1f} MB more")
        print(f"  {before} -> {after}", flush=True)


def idle(server: SpawnedServer, seconds: float = 30.0) -> float:
    """Wait until nothing runs or waits; how long it took."""
    begun = time.monotonic()
    while server.metric("busy") or server.metric("queue_length"):
        if time.monotonic() - begun > seconds:
            return seconds
        time.sleep(0.005)
    return time.monotonic() - begun


def disconnects(server: SpawnedServer, count: int, seed: int, findings: Findings) -> None:
    """Clients that go away; every hundredth time it is measured how soon the slot is idle."""
    source, times = random.Random(seed), []
    for _ in range(20):  # what is allocated once
        server.send({**QUESTION, "stream": True}).close()
    idle(server)
    steps = [_one_token(server) for _ in range(5)]
    before = server.holdings()
    for number in range(count):
        connections = [
            server.send({**QUESTION, "stream": source.random() < 0.7}) for _ in range(source.choice((1, 1, 1, 4)))
        ]
        time.sleep(source.choice((0.0, 0.001, 0.01, 0.05)) * source.random())
        for each in connections:
            (reset if source.random() < 0.5 else lambda one: one.close())(each)
        if number % 100 == 99:
            times.append(idle(server))
    idle(server)
    status, body = server.post("/v1/chat/completions", {**QUESTION, "max_tokens": 2})
    if status != 200:
        findings.add(f"after the disconnects a request is answered with {status}: {body}")
    steps += [_one_token(server) for _ in range(5)]
    limit = max(IDLE_S, max(steps))
    if times and (worst := sorted(times)[int((len(times) - 1) * 0.99)]) > limit:
        findings.add(f"an idle slot after {worst:.2f} s; a step takes up to {max(steps):.2f} s")
    print(f"disconnects: {count}; idle after {statistics.median(times or [0]) * 1e3:.0f} ms (median), "
          f"{max(times or [0]) * 1e3:.0f} ms (worst)")  # fmt: skip
    findings.compare(before, server.holdings(), 8 * GROWTH)


def _one_token(server: SpawnedServer) -> float:
    """Seconds of a request for one token: the longest step of the engine, and little else."""
    begun = time.monotonic()
    server.post("/v1/chat/completions", {**QUESTION, "max_tokens": 1})
    return time.monotonic() - begun


def bad_fields(server: SpawnedServer, count: int, seed: int, findings: Findings) -> None:
    """Requests with a wrong field."""
    source = random.Random(seed)
    _send_each(server)
    before, begun = server.holdings(), time.monotonic()
    for _ in range(count):
        case = draw(source)
        status, body = server.post(case.path, case.body)
        named = body["error"].get("param") or body["error"]["message"] if status == 400 else ""
        if case.field not in named:
            findings.add(f"{case}: {status} {str(body)[:200]}")
    print(f"bad fields: {count} in {time.monotonic() - begun:.0f} s")
    findings.compare(before, server.holdings(), 8 * GROWTH)


def _send_each(server: SpawnedServer) -> None:
    """Send every wrong field once: what is loaded or allocated once is there. A schema's llguidance alone takes 7 MB.

    Drawn at random, the few cases that load it may come late, and look like a leak.
    """
    for case in ALL:
        server.post(case.path, case.body)


def soak(server: SpawnedServer, seconds: float, seed: int, findings: Findings) -> None:
    """Clients at work; memory is compared from the first tenth on."""
    _send_each(server)
    end, counts = time.monotonic() + seconds, [0] * 4
    threads = [
        threading.Thread(target=_client, args=[server, end, random.Random(seed + number), findings, counts, number])
        for number in range(len(counts))
    ]
    for each in threads:
        each.start()
    time.sleep(seconds / 10)
    before, begun = server.holdings(), time.monotonic()
    for each in threads:
        each.join()
    idle(server)
    hours = (time.monotonic() - begun) / 3600
    print(f"soak: {sum(counts)} requests in {seconds:.0f} s")
    findings.compare(before, server.holdings(), max(GROWTH * hours, 4 * GROWTH))


def _client(
    server: SpawnedServer, end: float, source: random.Random, findings: Findings, counts: list[int], number: int
) -> None:
    ways: list[Callable[[SpawnedServer, random.Random, Findings], None]] = [_chat, _stream, _hang_up, _err]
    while time.monotonic() < end:
        try:
            source.choice(ways)(server, source, findings)
        except Exception as error:
            findings.add(f"{type(error).__name__}: {error}")
            time.sleep(1)
        counts[number] += 1


def _chat(server: SpawnedServer, source: random.Random, findings: Findings) -> None:
    path = source.choice(("/v1/chat/completions", "/v1/messages"))
    status, body = server.post(path, {**QUESTION, "max_tokens": source.randrange(1, 12)})
    if status not in (200, 503):
        findings.add(f"chat: {status} {body}")


def _stream(server: SpawnedServer, source: random.Random, findings: Findings) -> None:
    with contextlib.closing(
        server.send({**QUESTION, "stream": True, "max_tokens": source.randrange(1, 12)})
    ) as connection:
        whole = b""
        while b"[DONE]" not in whole and b"HTTP/1.1 503" not in whole:
            part = connection.recv(65536)
            if not part:
                findings.add(f"stream: it ended without [DONE]: {whole[-200:]!r}")
                return
            whole += part


def _hang_up(server: SpawnedServer, source: random.Random, findings: Findings) -> None:
    connection = server.send({**QUESTION, "stream": True})
    time.sleep(source.random() * 0.3)
    reset(connection)


def _err(server: SpawnedServer, source: random.Random, findings: Findings) -> None:
    case = draw(source)
    status, body = server.post(case.path, case.body)
    if status != 400:
        findings.add(f"{case}: {status} {body}")


def run(arguments: list[str], command: tuple[str, ...] = (), model: str = "smollm2-135m") -> int:
    """Run the campaigns of a command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.serve_campaign")
    parser.add_argument("--disconnects", type=int, default=0)
    parser.add_argument("--bad", type=int, default=0)
    parser.add_argument("--soak", type=wording.parse_duration, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    findings = Findings()
    with tempfile.TemporaryDirectory() as home:
        server = SpawnedServer(Path(home), model, command)
        try:
            if given.disconnects:
                disconnects(server, given.disconnects, given.seed, findings)
            if given.bad:
                bad_fields(server, given.bad, given.seed, findings)
            if given.soak:
                soak(server, given.soak, given.seed, findings)
        finally:
            code = server.close()
    if code:
        findings.add(f"the server ended with {code}")
    print(f"{len(findings.wrong)} wrong")
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

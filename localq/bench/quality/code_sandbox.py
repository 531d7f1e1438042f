"""Runs Python that a model wrote in a child process without files, network or processes (`code_child`)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import time

from localq import processes
from localq.bench.quality.code_child import NO_SANDBOX, PASSED, READY
from localq.errors import LocalqError

START_SECONDS = 60  # of Python, on a busy machine too
WALL_SECONDS = 30  # the limit of processor time is the child's; this one ends a function that sleeps
_MOST = 256  # bytes of an answer; a function may write to the pipe as long as it likes


def check() -> None:
    """Raise LocalqError if no function can run here: no seccomp filters, or a child that does not start."""
    passes("", "")


def passes(source: str, checks: str) -> bool:
    """Return whether `checks` pass after `source` in one namespace. Model-written code never runs without a sandbox.

    The verdict is as honest as the source: one that looks for this protocol in the child's frames can forge it.
    Raises LocalqError as `check` does.
    """
    nonce = secrets.token_hex(16)
    process = processes.start_module("localq.bench.quality.code_child")
    with process:
        try:
            return _exchange(process, {"source": source, "checks": checks, "nonce": nonce}) == f"{PASSED} {nonce}"
        finally:
            process.kill()


def _exchange(process: subprocess.Popen[bytes], request: dict[str, str]) -> str:
    """Return the child's verdict, or "" if a limit ended it."""
    assert process.stdin is not None
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    word = _read(pipe, len(READY), START_SECONDS)
    if word != READY:
        if word and NO_SANDBOX.startswith(word):
            why = "this Linux kernel does not support seccomp filters, and model-written code never runs without them"
            raise LocalqError("--tasks", why, "Omit --tasks, or use Linux 3.17 or newer on x86-64 or AArch64.")
        why = "the process that runs model-written code did not start"
        raise LocalqError("--tasks", why, "Omit --tasks, or run `localq doctor`.")
    with contextlib.suppress(BrokenPipeError):  # it was killed
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.close()
    return _read(pipe, _MOST, WALL_SECONDS)


def _read(pipe: int, most: int, seconds: float) -> str:
    """Read until `most` bytes have come, the pipe ends or `seconds` have passed."""
    found, end = b"", time.monotonic() + seconds
    while len(found) < most and select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
        piece = os.read(pipe, most - len(found))
        if not piece:
            break
        found += piece
    return found.decode("ascii", "replace")

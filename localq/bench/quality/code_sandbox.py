"""Runs Python that a model wrote in a child process without files, network or processes (`code_child`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from localq import places, processes
from localq.bench.quality.code_child import NO_SANDBOX, PASSED
from localq.errors import LocalqError

WALL_SECONDS = 30  # the limit of processor time is the child's; this one ends a function that sleeps


def passes(source: str, checks: str) -> bool:
    """Whether `checks` pass after `source` in one namespace.

    Raises LocalqError where the kernel offers no seccomp filter: code that a model wrote never runs without one.
    """
    word = _ask(json.dumps({"source": source, "checks": checks}).encode() + b"\n")
    if word == NO_SANDBOX:
        why = "this Linux kernel does not support seccomp filters, and model-written code never runs without them"
        raise LocalqError("--tasks", why, "Omit --tasks, or use Linux 3.17 or newer on x86-64 or AArch64.")
    return word == PASSED


def _ask(line: bytes) -> str:
    """The child's word, or "" if it was ended by a limit."""
    command = [sys.executable, "-P", "-m", "localq.bench.quality.code_child"]
    environment = {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "PYTHONPATH": str(places.PACKAGE_PARENT)}
    process = processes.start_child(
        lambda: subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
    )
    with process:
        try:
            return process.communicate(line, timeout=WALL_SECONDS)[0].decode("ascii", "replace")
        except subprocess.TimeoutExpired:
            return ""
        finally:
            process.kill()

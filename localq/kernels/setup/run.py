"""Runs the steps of an installation, side by side where they do not wait for each other."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localq.kernels.setup.progress import Display, StepProgress, about, seconds_left
from localq.kernels.setup.steps import SetupRecord, SetupStep, environment_of

LOOK_S = 0.25
TAIL_LINES = 25  # of the log of a step that failed
GRACE_S = 5.0
_PIP_ENDS = "error: subprocess-exited-with-error"  # what follows says nothing of the cause


class SetupError(Exception):
    """A step failed; the text says which, with the end of its log."""


@dataclass
class RunningStep:
    """A step under way."""

    step: SetupStep
    process: subprocess.Popen[str]
    log: Path
    temporary: Path
    start: float
    progress: StepProgress = field(default_factory=StepProgress)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self.follow, daemon=True)

    def follow(self) -> None:
        """Copy what the command writes to the log until it ends."""
        assert self.process.stdout is not None
        with self.process.stdout as lines, self.log.open("w", encoding="utf-8") as log:
            for line in lines:
                log.write(line)
                log.flush()
                self.progress.read(line)


class Installation:
    """The steps, which of them are done and under way, and how long each took."""

    def __init__(self, steps: Sequence[SetupStep], record: SetupRecord, display: Display) -> None:
        self.steps, self.record, self.display = steps, record, display
        self.folder = record.path.parent
        self.done: dict[str, float] = {step.name: 0.0 for step in steps if record.covers(step)}
        self._running: dict[str, RunningStep] = {}
        self._begin = time.monotonic()

    def run(self) -> dict[str, float]:
        """Run what is not done. Returns seconds of each step that ran; times.json beside the record has them as well.

        Raises SetupError; no command runs on when it returns or raises.
        """
        missing = [step for step in self.steps if step.name not in self.done]
        for step in missing:
            if step.early is not None:
                threading.Thread(target=step.early, daemon=True).start()
        try:
            while len(self.done) < len(self.steps):
                self._start_ready()
                time.sleep(LOOK_S)
                for each in list(self._running.values()):
                    if each.process.poll() is not None:
                        self._end(each)
                self._show()
        finally:
            for each in self._running.values():
                _stop(each.process)
                each.reader.join(GRACE_S)
                shutil.rmtree(each.temporary, ignore_errors=True)
        took = {step.name: self.done[step.name] for step in missing}
        times = {"total": round(self.elapsed, 2), **{name: round(each, 2) for name, each in took.items()}}
        if missing:
            (self.folder / "times.json").write_text(json.dumps(times), encoding="utf-8")
        return took

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begin

    def seconds_left(self) -> float:
        """About how long the rest takes."""
        now = time.monotonic()
        running = {name: (now - each.start, each.progress.fraction) for name, each in self._running.items()}
        return seconds_left(self.steps, running, self.done)

    def _start_ready(self) -> None:
        names = {step.name for step in self.steps}
        for step in self.steps:
            waits = [each for each in step.needs if each in names and each not in self.done]
            if step.name not in self.done and step.name not in self._running and not waits:
                self._start(step)

    def _start(self, step: SetupStep) -> None:
        name = step.name.replace(" ", "-")
        command, environment = step.command()
        self.record.forget(step)
        log, temporary = self.folder / f"{name}.log", self.folder / f"tmp-{name}"
        temporary.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment_of(environment, temporary), start_new_session=True,
        )  # fmt: skip
        running = RunningStep(step, process, log, temporary, time.monotonic())
        running.reader.start()
        self._running[step.name] = running

    def _end(self, running: RunningStep) -> None:
        step, took = running.step, time.monotonic() - running.start
        running.reader.join(GRACE_S)
        del self._running[step.name]
        shutil.rmtree(running.temporary, ignore_errors=True)
        if running.process.returncode == 0:
            self.record.add(step)
            self.display.line(f"  {step.title:<34} {about(took)}")
        elif step.optional:
            self.display.line(f"  {step.title:<34} failed; {step.optional} (log: {running.log})")
        else:
            raise SetupError(f"{step.title} failed. Last lines of {running.log}:\n{_tail(running.log)}")
        self.done[step.name] = took

    def _show(self) -> None:
        parts = []
        for each in self._running.values():
            each.progress.look(each.temporary)
            parts.append(f"{each.step.title}{f' ({each.progress.detail})' if each.progress.detail else ''}")
        if parts:
            count = f"{len(self.done)} of {len(self.steps)}"
            left = about(self.seconds_left())
            self.display.status(f"  {count} done, about {left} left: {', '.join(parts)}", self.elapsed)


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if "is ignored: it is neither a file nor a directory" not in line]
    end = next((i for i, line in enumerate(kept) if _PIP_ENDS in line), len(kept))
    last = kept[max(0, end - TAIL_LINES) : end] or kept[-TAIL_LINES:]
    start = next((i for i, line in enumerate(last) if "CMake Error" in line), 0)
    return "\n".join(f"  | {line}".rstrip() for line in last[start:])


def _stop(process: subprocess.Popen[str]) -> None:
    """End a command and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            return

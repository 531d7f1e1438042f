"""One hostile run as a process, with pipes or a terminal: what it wrote, how it ended, and whether it hung.

Time is what the machine gave: while a thread of the run waits for a processor or a disk, only the processor time that
the run used counts, else the clock on the wall. A busy machine makes no run look as if it hung.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cli.terminal import CTRL_C, CTRL_D, ESCAPE, Gave, Terminal
from tests.support.cli.terminal_localq import COMMAND
from tests.tools.hostile_scratch import Scratch, command
from tests.tools.process_tree import descendants, family, fields_of, states_of

LIMIT_S, WHOLE_S = 10.0, 60.0  # without output and without an end; of a whole run
QUIET_S = 40.0  # where no output is asked for: a hub that is busy is asked again, after 1, 2, 4 and 8 s
TICK_S = 0.03
BEHIND_S = 2.0  # after so long, keys are sent to a program that writes without end
GRACE_S = 5.0  # until the processes that a run has started are gone too
OUTPUT_BYTES = 32 * 2**20
MEMORY_BYTES, FILE_BYTES = 6 * 2**30, 2**28  # of every run, so that none takes the machine
# Leaves what is open, a line editor, the full screen, a pager; after Ctrl-Q an editor takes the next key as text.
LEAVING = (ESCAPE, CTRL_C, CTRL_C, CTRL_C, CTRL_D, "\x11", CTRL_C, CTRL_C, CTRL_C, "\r", "q")
OF_A_PAGER = ("\r", "q", CTRL_C, "q", CTRL_D)  # where Esc would begin a command
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Plan:
    """A run as drawn. argv: after `localq`. trap: what is hostile about it, for the report.

    stdin     bytes; "endless", "closed" or "open" (a pipe in which nothing comes)
    stdout, stderr  "pipe", "closed", "full" (/dev/full) or "broken" (nobody reads)
    keys      at a terminal: what is typed, resized (columns, rows) or sent (a signal) in turn; None: pipes
    signal, child_signal  (number, seconds after the start); the second goes to the youngest process below
    patience  seconds after which a run that waits, as it should, is interrupted; it must end then
    scripted  with the scripted engine (`scratch.script`) instead of the product's
    deletes   a folder that is gone by the time the run starts: its working folder
    during    (what somebody else does meanwhile, seconds after the start)
    may_tell  the conversation is what the command shows
    """

    argv: list[str]
    trap: str
    environment: dict[str, str | None] = field(default_factory=dict)
    stdin: bytes | str = b""
    stdout: str = "pipe"
    stderr: str = "pipe"
    keys: Sequence[str | bytes | tuple[int, int] | signal.Signals] | None = None
    size: tuple[int, int] = (100, 30)
    signal: tuple[signal.Signals, float] | None = None
    child_signal: tuple[signal.Signals, float] | None = None
    patience: float | None = None
    scripted: bool = False
    limits: dict[int, int] = field(default_factory=dict)
    umask: int = 0o022
    folder: Path | None = None
    deletes: Path | None = None
    may_tell: bool = False
    during: tuple[Callable[[], object], float] | None = None
    foreign_requests: Callable[[], list[str]] = list
    close: Callable[[], None] = lambda: None


@dataclass
class Outcome:
    """What came of a run. code: as a shell tells it. hung: why it counts as hung. arguments: of all its processes."""

    code: int | None = None
    output: dict[str, bytes] = field(default_factory=dict)
    hung: str = ""
    arguments: set[bytes] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    sent: set[int] = field(default_factory=set)  # signals
    at_terminal: bool = False
    terminal_left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0


# ---- the processes of a run


class Clock:
    """Seconds that a run was given so far; see the module."""

    def __init__(self, leader: int, outcome: Outcome) -> None:
        self.leader, self.outcome = leader, outcome
        self.seconds, self._at, self._used = 0.0, time.monotonic(), 0.0

    def tick(self) -> float:
        """Look at the processes now; all seconds so far."""
        used, waits, now = 0.0, True, time.monotonic()
        for process in descendants(self.leader):
            fields = fields_of(process)
            used += sum(map(int, fields[11:15])) / _TICKS if fields else 0.0
            waits = waits and not any(state in ("R", "D") for state in states_of(process))
            with contextlib.suppress(OSError):
                self.outcome.arguments.add(Path(f"/proc/{process}/cmdline").read_bytes())
        spent = max(0.0, used - self._used)
        self.seconds += (now - self._at) if waits else min(spent, now - self._at)
        self._at, self._used = now, max(used, self._used)
        self.outcome.cpu_s = self._used
        return self.seconds


def _prepare(plan: Plan) -> Callable[[], None]:
    """What the process sets for itself before it becomes localq."""

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.umask(plan.umask)
        limits = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_CORE: 0}
        for kind, most in (limits | plan.limits).items():
            resource.setrlimit(kind, (most, most))
        for stream, how in ((0, plan.stdin), (1, plan.stdout), (2, plan.stderr)):
            if how == "closed" and plan.keys is None:
                os.close(stream)

    return prepare


def start(plan: Plan, scratch: Scratch) -> tuple[list[str], dict[str, str], Path]:
    """Command, environment and working folder."""
    environment = scratch.environment()
    for name, value in plan.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    words = [*COMMAND, str(scratch.script)] if plan.scripted else command()
    return [*words, *plan.argv], environment, plan.folder or scratch.work


def run(plan: Plan, scratch: Scratch) -> Outcome:
    """Run it to its end, or until it hangs; then nothing of it runs any more."""
    begun = time.monotonic()
    outcome = at_terminal(plan, scratch) if plan.keys is not None else piped(plan, scratch)
    outcome.seconds = time.monotonic() - begun
    return outcome


def end(leader: int, outcome: Outcome) -> None:
    """Give what the run has started its time to end; end and name the rest."""
    clocks: dict[int, Clock] = {}
    while rest := [each for each in family(leader) if each != leader and fields_of(each)[:1] not in ([], ["Z"])]:
        if any(clocks.setdefault(each, Clock(each, Outcome())).tick() > GRACE_S for each in rest):
            break
        time.sleep(TICK_S)
    for process in rest:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            outcome.left.append(line.strip()[:200])
            os.kill(process, signal.SIGKILL)


# ---- pipes


def piped(plan: Plan, scratch: Scratch) -> Outcome:
    """Without a terminal."""
    outcome, (words, environment, folder) = Outcome(), start(plan, scratch)
    with contextlib.ExitStack() as stack:
        stdin = _stdin(plan, stack)
        streams = {name: _stream(how, stack) for name, how in (("stdout", plan.stdout), ("stderr", plan.stderr))}
        process = subprocess.Popen(
            _deleting(plan, words), env=environment, cwd=folder, stdin=stdin, stdout=streams["stdout"],
            stderr=streams["stderr"], preexec_fn=_prepare(plan), start_new_session=True, close_fds=True,
        )  # fmt: skip
        stack.callback(_gone, process)
        readers = {name: getattr(process, name) for name in streams if getattr(process, name)}
        _watch(process, plan, outcome, readers)
        end(process.pid, outcome)
        for name, reader in readers.items():
            outcome.output[name] = outcome.output.get(name, b"") + _rest(reader)
            reader.close()
    outcome.code = _code(process.returncode)
    return outcome


def _deleting(plan: Plan, words: list[str]) -> list[str]:
    """Through a shell that removes the folder in which it stands, where the plan says so."""
    return ["/bin/sh", "-c", '/bin/rm -r "$0" && exec "$@"', str(plan.deletes), *words] if plan.deletes else words


def _stdin(plan: Plan, stack: contextlib.ExitStack) -> Any:
    if plan.stdin == "endless":
        return stack.enter_context(open("/dev/zero", "rb"))
    if plan.stdin == "open":
        reader, writer = os.pipe()
        stack.callback(os.close, writer)
        stack.callback(os.close, reader)
        return reader
    if isinstance(plan.stdin, str):
        return subprocess.DEVNULL
    descriptor = os.memfd_create("stdin")
    os.write(descriptor, plan.stdin)
    os.lseek(descriptor, 0, os.SEEK_SET)
    stack.callback(os.close, descriptor)
    return descriptor


def _stream(how: str, stack: contextlib.ExitStack) -> Any:
    if how == "full":
        return stack.enter_context(open("/dev/full", "wb"))
    if how == "broken":
        reader, writer = os.pipe()
        os.close(reader)
        stack.callback(os.close, writer)
        return writer
    return subprocess.PIPE if how == "pipe" else subprocess.DEVNULL


def _watch(process: subprocess.Popen[bytes], plan: Plan, outcome: Outcome, readers: dict[str, Any]) -> None:
    clock, last, begun = Clock(process.pid, outcome), 0.0, time.monotonic()
    interrupted, waiting, others = False, dict(readers), _others(process.pid, plan)
    while process.poll() is None:
        ready, _, _ = select.select(list(waiting.values()), [], [], TICK_S)
        seconds = clock.tick()
        for name in [name for name, each in waiting.items() if each in ready]:
            data = os.read(waiting[name].fileno(), 2**16)
            outcome.output[name] = outcome.output.get(name, b"") + data
            last = seconds if data else last
            if not data:
                del waiting[name]  # closed; the process need not have ended
        for what, after_s in [each for each in others if time.monotonic() - begun >= each[1]]:
            others.remove((what, after_s))
            what()
        if plan.signal and plan.signal[0] not in outcome.sent and time.monotonic() - begun >= plan.signal[1]:
            last = _send(process.pid, plan.signal[0], outcome, seconds)
        if plan.patience is not None and not interrupted and seconds > plan.patience:
            interrupted, last = True, _send(process.pid, signal.SIGINT, outcome, seconds)
        if why := _hangs(seconds, last, outcome, QUIET_S if {"-q", "--quiet"} & {*plan.argv} else LIMIT_S):
            outcome.hung = why
            return


def _others(process: int, plan: Plan) -> list[tuple[Callable[[], object], float]]:
    """What is done meanwhile, and when."""

    def strike(number: signal.Signals) -> None:
        below = [each for each in descendants(process) if each != process]
        if below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(max(below), number)

    found = [plan.during] if plan.during else []
    if plan.child_signal:
        number, after_s = plan.child_signal
        found.append((lambda: strike(number), after_s))
    return found


def _hangs(seconds: float, last: float, outcome: Outcome, limit_s: float) -> str:
    if seconds - last > limit_s:
        return f"{seconds - last:.0f} s without output and without an end"
    if seconds > WHOLE_S or sum(map(len, outcome.output.values())) > OUTPUT_BYTES:
        return f"no end after {seconds:.0f} s and {sum(map(len, outcome.output.values())):,} bytes"
    return ""


def _send(process: int, number: signal.Signals, outcome: Outcome, seconds: float) -> float:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
    outcome.sent.add(number)
    return seconds


def _gone(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _rest(reader: Any) -> bytes:
    os.set_blocking(reader.fileno(), False)
    return reader.read() or b""


def _code(status: int) -> int:
    """As a shell tells it."""
    return 128 - status if status < 0 else status


# ---- a terminal


def at_terminal(plan: Plan, scratch: Scratch) -> Outcome:
    """In a pty: keys in turn, then whatever leaves a program, until it has ended."""
    outcome, (words, environment, folder) = Outcome(at_terminal=True), start(plan, scratch)
    prepared = [sys.executable, "-c", _LIMITED, str(MEMORY_BYTES), str(FILE_BYTES), oct(plan.umask), *words]
    with Terminal(_deleting(plan, prepared), environment, plan.size, folder) as terminal:
        clock = Clock(terminal.process.pid, outcome)
        with contextlib.suppress(Gave):
            _quiet(terminal, clock, 2.0)
            for key in plan.keys or ():
                _press(terminal, key, outcome)
                _quiet(terminal, clock, 0.6)
        is_chat = plan.argv[:1] in (["chat"], ["run"], ["tui"], [])
        _leave(terminal, clock, outcome, LEAVING if is_chat else OF_A_PAGER)
        if terminal.process.poll() is not None:
            _read_all(terminal)
            outcome.code = _code(terminal.process.returncode)
            outcome.terminal_left = terminal.left_behind()
        end(terminal.process.pid, outcome)
        outcome.output = {"terminal": bytes(terminal.raw), "screen": terminal.scrolled.encode("utf-8", "replace")}
    return outcome


# Sets its limits by itself: `Terminal` has a preexec_fn of its own.
_LIMITED = (
    "import os, resource as r, sys; memory, file, umask = sys.argv[1:4]; os.umask(int(umask, 8));"
    "r.setrlimit(r.RLIMIT_AS, (int(memory),) * 2); r.setrlimit(r.RLIMIT_FSIZE, (int(file),) * 2);"
    "os.execvp(sys.argv[4], sys.argv[4:])"
)


def _press(terminal: Terminal, key: str | bytes | tuple[int, int] | signal.Signals, outcome: Outcome) -> None:
    if isinstance(key, signal.Signals):
        outcome.sent.add(key)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(terminal.process.pid, key)
    elif isinstance(key, tuple):
        terminal.resize(*key)
    else:
        if CTRL_C in (key if isinstance(key, str) else key.decode("latin-1")):
            outcome.sent.add(signal.SIGINT)
        terminal.send(key, patience_s=2.0)


def _quiet(terminal: Terminal, clock: Clock, seconds: float) -> None:
    """Until it has written and then nothing for a moment, has ended, or has had its time."""
    begun, wrote, silent = clock.tick(), False, 0
    while clock.tick() - begun < seconds and terminal.process.poll() is None:
        if terminal.read(0.05):
            wrote, silent = True, 0
        elif wrote and (silent := silent + 1) > 3:
            return


def _leave(terminal: Terminal, clock: Clock, outcome: Outcome, leaving: Sequence[str]) -> None:
    """Send what leaves, again and again; less often while output is unread: a terminal reads at once, and at a Ctrl-C
    the kernel throws away what is unread, the end of a mode among it."""
    begun, count, last, is_behind = clock.tick(), 0, -1.0, False
    while terminal.process.poll() is None:
        seconds = clock.tick() - begun
        if seconds > LIMIT_S:
            outcome.hung = f"at the terminal {seconds:.0f} s after the first key that leaves; screen:\n{terminal.text}"
            return
        if seconds - last > (BEHIND_S if is_behind else 0.3):
            terminal.send(leaving[count % len(leaving)], patience_s=0.5)
            count, last = count + 1, seconds
            outcome.sent.add(signal.SIGINT)
        is_behind = terminal.read(TICK_S)


def _read_all(terminal: Terminal) -> None:
    while terminal.read(0.0):
        pass
    for token in terminal.reader.finish():
        if terminal.on_token is not None:
            terminal.on_token(token)

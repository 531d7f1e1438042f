"""Work in a thread, so that Ctrl-C stays responsive; child processes; what a machine has too little of."""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import gc
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from localq import places
from localq.errors import ExitCode, LocalqError, usage_error

if TYPE_CHECKING:
    import subprocess

T = TypeVar("T")
MAX_CHAIN = 20  # causes of an error; they may form a circle
SLOWEST = 10  # on a busy machine a process may get only a tenth of a processor


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile: where many objects are made and none are in cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Return `work()`. Raises what it raises, or TimeoutError after `seconds`; the thread is abandoned.

    The seconds are those of the processor, so that other work on the machine does not make sound input fail; by the
    clock it may take up to `SLOWEST` times as long. Ctrl-C is handled at once. Works only for code that releases the
    GIL.
    """
    answers: queue.SimpleQueue[tuple[bool, T | BaseException]] = queue.SimpleQueue()
    begun, used = time.monotonic(), time.process_time()
    threading.Thread(target=lambda: answers.put(_outcome(work)), daemon=True).start()
    left = seconds
    while True:
        try:
            answer = answers.get(timeout=left)
            break
        except queue.Empty:
            left = min(seconds - (time.process_time() - used), SLOWEST * seconds - (time.monotonic() - begun))
            if left <= 0:
                raise TimeoutError from None
    return _unpack(*answer)


def _outcome(work: Callable[[], T]) -> tuple[bool, T | BaseException]:
    """Run `work`; return whether it succeeded, and its result or error."""
    try:
        return True, work()
    except BaseException as error:  # raised again by `_unpack`
        return False, error


def _unpack(worked: bool, answer: T | BaseException) -> T:
    if not worked:
        raise answer  # type: ignore[misc]
    return answer  # type: ignore[return-value]


def run_to_completion(work: Callable[[], None]) -> None:
    """Run `work` to its end, and raise what it raises.

    Ctrl-C is handled at once; the process exits after `work`.
    """
    failed: list[BaseException] = []

    def worker() -> None:
        try:
            work()
        except BaseException as error:  # raised again by the caller
            failed.append(error)

    thread = threading.Thread(target=worker, daemon=False)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even while this process is stopped."""
    import ctypes  # start-up cost: only child processes need it

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def start_child(start: Callable[[], T]) -> T:
    """Return `start()`, which starts a child that calls `end_with_parent`, run by a thread that lasts."""
    return start() if threading.current_thread() is threading.main_thread() else _lasting_thread().run(start)


def start_module(module: str, keep: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a Python module of localq with pipes, which Ctrl-C does not reach.

    keep: variables of the environment that it gets besides PATH
    """
    import subprocess  # start-up cost: only those who start children need it

    names = [name for name in ("PATH", *keep) if name in os.environ]
    environment = {**{name: os.environ[name] for name in names}, "LANG": "C.UTF-8"}
    environment["PYTHONPATH"] = str(places.PACKAGE_PARENT)
    # -P: the working folder may be a stranger's, and must not give the child its modules.
    command = [sys.executable, "-P", "-m", module]
    return start_child(
        lambda: subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
    )


class _LastingThread:
    """A thread that ends with the process: the kernel takes the thread that started a child for its parent."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="children", daemon=True).start()

    def run(self, work: Callable[[], T]) -> T:
        """Return `work()`, or raise what it raises."""
        answers: queue.SimpleQueue[tuple[bool, T | BaseException]] = queue.SimpleQueue()
        self._work.put(lambda: answers.put(_outcome(work)))
        return _unpack(*answers.get())

    def _serve(self) -> None:
        while True:
            self._work.get()()


_lasting_thread = functools.cache(_LastingThread)


def child_environment() -> dict[str, str]:
    """Return the environment for child processes; makes an uninstalled source tree importable despite -P."""
    import sysconfig  # start-up cost: only a child process needs it

    environment, root = dict(os.environ), places.PACKAGE_PARENT
    if root != Path(sysconfig.get_path("purelib")).resolve() and root != Path(sysconfig.get_path("platlib")).resolve():
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else str(root)
    return environment


def exit_reason(code: int) -> str:
    """Return a process's return code in words: "exit code 1", "signal SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def last_message(log: Sequence[str] | collections.deque[str]) -> str:
    """Return the last meaningful line of a log: not blank, not the inside of a traceback."""
    lines = [line.strip() for line in log if line.strip() and not line.startswith((" ", "\t"))]
    return lines[-1] if lines else ""


LEAST_ADDRESS_SPACE = 2**30  # of torch; with less its libraries abort, where no handler is called


def check_limits() -> None:
    """Raises LocalqError where torch would end this process: too little address space (exit 3)."""
    import resource  # start-up cost: only for torch

    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= allowed < LEAST_ADDRESS_SPACE:
        why = f"torch needs 1 GiB of address space, but this process is limited to {allowed / 2**20:.0f} MiB"
        raise LocalqError("memory", why, "Raise the limit with `ulimit -v unlimited`.", ExitCode.DOES_NOT_FIT)


def check_torch() -> None:
    """As `check_limits`; also (exit 2) where the working folder is deleted, in which torch's libraries do not load."""
    check_limits()
    if is_in_deleted_folder():
        raise usage_error(*_DELETED)


def is_in_deleted_folder() -> bool:
    """Return whether the working folder of this process has been deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


_DELETED = ("working folder", "has been deleted", "Change to another folder with `cd`.")
_NO_MEMORY = ("cannot allocate memory", "failed to map segment", "can't start new thread", "not enough memory")


def shortage(error: BaseException) -> LocalqError | None:
    """Return the shortage behind `error`, if any: descriptors, memory, a working, temporary or home folder."""
    seen: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if seen is None or (found := _shortage(seen)) is not None:
            return None if seen is None else found
        seen = seen.__cause__ or seen.__context__
    return None


def _shortage(error: BaseException) -> LocalqError | None:
    try:
        number, text = getattr(error, "errno", None), str(error)
    except Exception:  # of another's class
        return None
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        return LocalqError("open files", "this process has reached its limit", "Raise it with `ulimit -n 1024`.")
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(each in text.lower() for each in _NO_MEMORY):
        step = "Close other programs, or raise the limit (`ulimit -v`, `ulimit -u`)."
        return LocalqError("memory", "this process cannot allocate more memory", step, ExitCode.DOES_NOT_FIT)
    if isinstance(error, FileNotFoundError) and error.filename is None:
        if "temporary directory" in text:
            step = "Set TMPDIR to a writable folder."
            return LocalqError("temporary folder", "no writable folder was found", step, ExitCode.DISK)
        return usage_error(*_DELETED)
    if isinstance(error, RuntimeError) and "home directory" in text:
        return LocalqError(
            "home folder", "this user does not have one", "Set HOME to a writable folder.", ExitCode.DISK
        )
    return None

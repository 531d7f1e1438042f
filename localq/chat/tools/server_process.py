"""The program that runs the command of an MCP server: `python -I server_process.py PARENT LOG COMMAND...`.

The server gets stdin and stdout; its stderr goes to the file LOG, as printable text, up to a limit. The program leads a
process group. When the chat ends it, or is killed (the kernel then signals this program), all processes of the group
end: a server is often a launcher that has started the real one. Standard library only, so that it starts at once and
adds nothing to the server's environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, NoReturn

from localq.disk import open_to_append

MOST_LOG_BYTES = 2**20
GRACE_S = 2.0  # between the request to end and the kill
NOT_STARTED = 127  # exit code, as of a shell
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def main() -> int:
    """Run the command; returns its exit code."""
    parent, log, *command = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before
        return 1
    with _open_log(log) as file:
        try:
            process = subprocess.Popen(command, stderr=subprocess.PIPE)
        except (OSError, ValueError) as error:
            file.write(f"{command[0]}: {getattr(error, 'strerror', None) or error}\n".encode("utf-8", "replace"))
            return NOT_STARTED
        _leave_streams()
        assert process.stderr is not None
        copy = threading.Thread(target=_copy, args=(process.stderr, file), daemon=True)
        copy.start()
        code = process.wait()
        copy.join(0.2)  # a process that the server left behind may hold the stream open
        _end_others()
        return code if code >= 0 else 128 - code


def _open_log(path: str) -> IO[bytes]:
    """The log, begun anew where it is full."""
    descriptor = open_to_append(Path(path))
    if os.fstat(descriptor).st_size > MOST_LOG_BYTES:
        os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, "ab")


def _leave_streams() -> None:
    """Close stdin and stdout here, so that the server's end of them is the only one."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    os.close(null)


def _copy(source: IO[bytes], file: IO[bytes]) -> None:
    written = 0
    for line in iter(lambda: source.readline(2**16), b""):
        if written < MOST_LOG_BYTES:
            text = line.decode("utf-8", "replace")
            shown = "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text).encode()
            written += len(shown)
            file.write(shown)
            file.flush()


def _end(number: int, frame: object) -> NoReturn:
    """The chat has ended, or ends the server."""
    _end_others()
    os._exit(128 + number)


def _end_others() -> None:
    """End the other processes of the group: politely, then by force."""
    end = time.monotonic() + GRACE_S
    _signal(_others(), signal.SIGTERM)
    while (left := _others()) and time.monotonic() < end:
        time.sleep(0.02)
    _signal(left, signal.SIGKILL)


def _others() -> list[int]:
    """The processes of this group but this one; what has ended does not count."""
    found, group = [], os.getpgrp()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", encoding="utf-8", errors="replace") as file:
                state, _, its_group = file.read().rpartition(")")[2].split()[:3]
            if int(its_group) == group and int(name) != os.getpid() and state != "Z":
                found.append(int(name))
    return found


def _signal(processes: list[int], number: signal.Signals) -> None:
    for each in processes:
        with contextlib.suppress(OSError):
            os.kill(each, number)


if __name__ == "__main__":
    sys.exit(main())

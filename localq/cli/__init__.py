"""The command line: `main` is the `localq` command; it turns exceptions into messages and exit codes.

Here: entry point (`command_line`), list of verbs (`registry`), shared options, help pages, output, progress bars,
pager; `verbs/` with one file a verb, `line/` with the chat line by line, `markdown/` with replies as terminal rows.
Not here: what a verb does (`planner`, `files`, `chat`, `quantize`, `bench`) and the full screen (`tui`).
Called by: the `localq` script and `python -m localq`.
Start-up: this file imports next to nothing, so that a Ctrl-C finds its handler from the first millisecond. A verb's
file is imported when the verb runs, and heavy libraries inside its functions. `localq --help` answers in 0.3 s and
imports no torch; comments "start-up cost" mark these imports.
Open first: `command_line.py`, `registry.py`, then `verbs/<verb>.py`; options that verbs share are in `options.py`.
"""

import gc
import os
import signal
from types import FrameType

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all of this file
if TYPE_CHECKING:
    from typing import NoReturn

COLLECT_AT = 20_000  # new objects; at Python's 700 a start collects 300 times, and imports make no garbage

# Prepared: there may be no memory to put it together.
_NO_MEMORY = b"localq: out of memory. Raise the limit with `ulimit -v unlimited`.\n"


def main() -> None:
    """Entry point of the `localq` command."""
    _leave_on_signals()
    gc.set_threshold(COLLECT_AT, 10, 10)
    try:
        from localq.cli import command_line  # with the handlers in place: it imports the parser
    except Exception as error:
        _give_up(error)
    try:
        command_line.run()
    except KeyboardInterrupt:  # one more, while the last one was handled; Python would kill this process with SIGINT
        os._exit(128 + signal.SIGINT)
    except (MemoryError, SystemError) as error:  # what reports errors had none left; or CPython itself
        _give_up(error)


def execute(arguments: list[str]) -> int:
    """Run one command line and return its exit code; expected failures are printed as one line on stderr."""
    from localq.cli import command_line  # as above

    return command_line.execute(arguments)


def _give_up(error: Exception) -> "NoReturn":
    """End with one line, for too little memory, too few descriptors or a damaged installation."""
    is_short = isinstance(error, MemoryError | SystemError)
    said = _NO_MEMORY
    if not is_short:
        first = (str(error).splitlines() or [""])[0][:200]
        is_short = "failed to map segment" in first
        step = "Reinstall localq, or raise the open-file limit (`ulimit -n`)."
        why = f"cannot start ({type(error).__name__}: {first}). {step}"
        said = said if is_short else f"localq: {why}\n".encode("utf-8", "replace")
    try:  # noqa: SIM105 - `contextlib` is an import more
        os.write(2, said)  # no stream, which may need memory that is not there
    except OSError:  # nobody reads it
        pass
    os._exit(3 if is_short else 1)  # the codes of `errors.ExitCode`, which may not be there


def _leave_on_signals() -> None:
    """End the process at once on Ctrl-C or SIGTERM: an exception inside an import would be printed, or get lost."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell starts jobs of scripts without Ctrl-C
            signal.signal(number, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # blocked by the script of `make`


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # nothing is open yet

"""The command line: `main` is the `localq` command, and turns exceptions into messages and exit codes.

Here: entry point, list of verbs (`registry`), shared options, help pages, output, progress bars, pager; `verbs/` with
one file a verb, `line/` with the chat line by line, `markdown/` with replies drawn as terminal rows.
Not here: what a verb does (`planner`, `files`, `chat`, `quantize`, `bench`) and the full screen (`tui`).
Called by: the `localq` script and `python -m localq`.
Start-up: a verb's file is imported when the verb runs, and heavy libraries inside its functions. `localq --help`
answers in 0.3 s and imports no torch; comments "start-up cost" mark these imports.
Open first: `registry.py`, then `verbs/<verb>.py`; options that verbs share are in `options.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from types import FrameType
from typing import Annotated

import typer
from typer._click.exceptions import ClickException  # typer carries its parser and exports only parts of it

from localq import __version__
from localq.cli import stream_encoding
from localq.cli.output import has_screen, is_hung_up, note, note_lost_characters
from localq.cli.registry import Verbs
from localq.errors import ExitCode, LocalqError

app = typer.Typer(
    name="localq",
    cls=Verbs,
    help="Chat with the largest language model that fits on your NVIDIA GPU.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: quick to start, and readable in pipes, logs and screen readers
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        print(f"localq {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `localq` command."""
    _open_closed_streams()
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # set by `nohup`: continue
        signal.signal(signal.SIGHUP, _terminate)  # the terminal is gone
    sys.unraisablehook = _stop_again
    stream_encoding.prepare(sys.stdin, sys.stdout, sys.stderr)
    try:
        code = execute(sys.argv[1:] or _without_arguments())
    except KeyboardInterrupt:  # a second one, while the first was handled
        code = ExitCode.INTERRUPTED
    except (OSError, termios.error) as error:  # raised before the signal arrives
        if not is_hung_up() and not _is_full(error):
            raise
        code = ExitCode.TERMINATED if is_hung_up() else _report_full(error)
    try:
        note_lost_characters()
        sys.stdout.flush()
    except BrokenPipeError:
        code = ExitCode.CLOSED_PIPE
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except OSError as error:
        if not is_hung_up() and not _is_full(error):
            raise
        code = code if is_hung_up() else _report_full(error)
    _ignore_interrupts()
    if code in (ExitCode.CLOSED_PIPE, ExitCode.DISK) or is_hung_up():
        # The interpreter flushes stdout again at exit, and it has no reader any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _is_full(error: Exception) -> bool:
    """The disk that stdout is redirected to is full; verbs handle the files that they write."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _report_full(error: Exception) -> ExitCode:
    with contextlib.suppress(OSError):  # stderr may go to the same place
        note(f"localq: stdout: cannot write ({error}). Free some space, or redirect elsewhere.")
    return ExitCode.DISK


def _ignore_interrupts() -> None:
    """A Ctrl-C during interpreter exit would replace the exit code and print a traceback."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # one that came before the next line took effect
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return


def _open_closed_streams() -> None:
    """Open a closed standard stream (`<&-`) as an empty one, so that none is None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is that of the stream.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as the process


def _without_arguments() -> list[str]:
    """Bare `localq`: the full screen at a terminal, else the help."""
    return ["tui"] if has_screen() else []


def execute(arguments: list[str]) -> int:
    """Run one command line and return its exit code; expected failures are printed as one line on stderr."""
    try:
        result = app(arguments, prog_name="localq", standalone_mode=False)
    except LocalqError as error:
        note(f"localq: {error}")
        return error.exit_code
    except ClickException as error:  # usage errors, in the parser's words
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return ExitCode.CLOSED_PIPE
    except SystemExit as stop:
        # The parser turns a closed pipe into exit 1; the context tells the two apart.
        if isinstance(stop.__context__, BrokenPipeError):
            return ExitCode.CLOSED_PIPE
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILURE
    except Exception as error:  # a bug, unless an installed package has the wrong version
        from localq.cli import requirements  # only needed after a failure

        unmet = requirements.find_unmet()
        if unmet is None:
            raise
        note(f"localq: {unmet} ({type(error).__name__}: {error})")
        return unmet.exit_code
    return result if isinstance(result, int) else ExitCode.OK


def _stop_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C or termination that came inside a destructor, where Python only prints it."""
    number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(unraisable.exc_type)
    if number is None:
        sys.__unraisablehook__(unraisable)
    else:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()  # during this hook it would be lost again


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.TERMINATED)

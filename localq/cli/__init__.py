"""The command line: its entry point, and the one place where exceptions become messages and exit codes.

Verbs live in files of their own (`verbs` lists and loads them) and load heavy libraries inside their functions:
`localq --help` must answer in 0.3 s and must not import torch.
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
from localq.cli.output import has_screen, is_hung_up, note, tell_lost
from localq.cli.registry import Verbs
from localq.errors import ExitCode, LocalqError

app = typer.Typer(
    name="localq",
    cls=Verbs,
    help="Chat with the largest language model that one consumer NVIDIA GPU can hold.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: quick to start, and readable in pipes, logs and screen readers
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` asks to go on
        signal.signal(signal.SIGHUP, _terminate)  # the terminal is gone
    sys.unraisablehook = _stop_again
    stream_encoding.prepare(sys.stdin, sys.stdout, sys.stderr)
    try:
        code = execute(sys.argv[1:] or _without_arguments())
    except KeyboardInterrupt:  # one that came while another was being answered
        code = ExitCode.INTERRUPTED
    except (OSError, termios.error) as error:  # met before the signal of it
        if not is_hung_up() and not _is_full(error):
            raise
        code = ExitCode.TERMINATED if is_hung_up() else _tell_full(error)
    try:
        tell_lost()
        sys.stdout.flush()
    except BrokenPipeError:
        code = ExitCode.CLOSED_PIPE
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except OSError as error:
        if not is_hung_up() and not _is_full(error):
            raise
        code = code if is_hung_up() else _tell_full(error)
    _hear_no_more()
    if code in (ExitCode.CLOSED_PIPE, ExitCode.DISK) or is_hung_up():
        # The interpreter flushes stdout once more at exit; nobody reads it any longer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _is_full(error: Exception) -> bool:
    """What verbs write to a disk they answer for themselves: this is where stdout was sent to."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _tell_full(error: Exception) -> ExitCode:
    with contextlib.suppress(OSError):  # stderr may go to the same place
        note(f"localq: stdout: it cannot be written ({error}). Free some space, or print elsewhere.")
    return ExitCode.DISK


def _hear_no_more() -> None:
    """A Ctrl-C while the interpreter ends would take the exit code's place, with a traceback."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # one that came before this was done
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return


def _open_closed_streams() -> None:
    """A standard stream that was closed (`<&-`) is an empty one: nothing further down has to expect that it is None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest number that is free, which is the stream's own.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as the process


def _without_arguments() -> list[str]:
    """Bare `localq`: the full screen where there is one, else the help."""
    return ["tui"] if has_screen() else []


def execute(arguments: list[str]) -> int:
    """Run one command line and return its exit code; expected failures are printed as one line on stderr."""
    try:
        result = app(arguments, prog_name="localq", standalone_mode=False)
    except LocalqError as error:
        note(f"localq: {error}")
        return error.exit_code
    except ClickException as error:  # usage errors: the parser's own words
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return ExitCode.CLOSED_PIPE
    except SystemExit as stop:
        # The parser turns a closed pipe into exit 1; told apart by what it was handling.
        if isinstance(stop.__context__, BrokenPipeError):
            return ExitCode.CLOSED_PIPE
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILURE
    except Exception as error:  # a fault of localq's own, unless a package is not the one that it was written for
        from localq.cli import requirements  # only what failed asks

        unmet = requirements.unmet()
        if unmet is None:
            raise
        note(f"localq: {unmet} ({type(error).__name__}: {error})")
        return unmet.exit_code
    return result if isinstance(result, int) else ExitCode.OK


def _stop_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Deliver a Ctrl-C or a termination once more that came while an object was destroyed: Python only prints those."""
    number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(unraisable.exc_type)
    if number is None:
        sys.__unraisablehook__(unraisable)
    else:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()  # while this hook runs it would be lost again


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.TERMINATED)

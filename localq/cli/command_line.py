"""One run of the command line: signals, standard streams, the parser, and exit codes for exceptions."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import sys
import tempfile
import termios
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated

import typer
from typer._click.exceptions import ClickException  # typer carries its parser and exports only parts of it

from localq import __version__
from localq.cli import completion, import_guard, pause_line, stream_encoding
from localq.cli.output import has_screen, is_hung_up, note, note_lost_characters, print_line
from localq.cli.registry import Verbs
from localq.errors import ExitCode, LocalqError
from localq.files.hub import pauses
from localq.processes import shortage
from localq.sanitize import clean_stream

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
        print_line(f"localq {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def run() -> None:
    """Run the command line of this process, and exit."""
    _open_closed_streams()
    _use_streams()
    sys.unraisablehook, threading.excepthook = _stop_again, _log_thread
    sys.excepthook = _report_escaped
    pauses.use(pause_line.show)
    import_guard.install()
    try:
        _raise_on_signals()
        code = execute(sys.argv[1:] or _without_arguments())
    except KeyboardInterrupt:  # a second one, while the first was handled
        code = ExitCode.INTERRUPTED
    except (OSError, termios.error) as error:  # raised before the signal arrives
        code = _report_stream(error)
    try:
        note_lost_characters()
        sys.stdout.flush()
    except BrokenPipeError:
        code = ExitCode.CLOSED_PIPE
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    except OSError as error:
        code = code if is_hung_up() else _report_stream(error)
    _ignore_interrupts()
    _remove_abandoned()
    if code in (ExitCode.CLOSED_PIPE, ExitCode.DISK) or is_hung_up():
        # The interpreter flushes stdout again at exit, and it has no reader any more.
        with contextlib.suppress(OSError):  # no descriptor is free
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _use_streams() -> None:
    """Put the filter in front of stdout and stderr; a stderr that cannot be written does not end a command."""
    stream_encoding.prepare(sys.stdin, sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = clean_stream(sys.stdout), clean_stream(sys.stderr, optional=True)


def _raise_on_signals() -> None:
    """From here on a signal is an exception, which verbs clean up after."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # set by `nohup`: continue
        signal.signal(signal.SIGHUP, _terminate)  # the terminal is gone


def _report_stream(error: Exception) -> int:
    """The exit code for an error of a standard stream: a closed terminal or a full disk; another one is a bug."""
    if is_hung_up():
        return ExitCode.TERMINATED
    return _report_unwritable(error) if _is_unwritable(error) else _report_unexpected(error)


def _is_unwritable(error: Exception) -> bool:
    """Return whether stdout is closed or redirected to a full disk; verbs handle the files that they write."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return full or _is_of_closed(error)


def _is_of_closed(error: Exception) -> bool:
    """Return whether `error` is that of a write to a stdout that is not open for writing."""
    if not isinstance(error, OSError) or error.errno != errno.EBADF:
        return False
    with contextlib.suppress(OSError):
        return fcntl.fcntl(1, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    return True  # not open at all


def _report_unwritable(error: Exception) -> ExitCode:
    step = "Free some space, or redirect the output elsewhere."
    if _is_of_closed(error):
        step = "stdout is closed; redirect the output to a file."
    note(f"localq: stdout: cannot write ({error}). {step}")
    return ExitCode.DISK


def _ignore_interrupts() -> None:
    """A Ctrl-C during interpreter exit would replace the exit code and print a traceback."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # one that came before the next line took effect
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return


def _remove_abandoned() -> None:
    """Remove the temporary folders of killed processes."""
    with contextlib.suppress(Exception):  # a chore, which changes no exit code
        place = tempfile.gettempdir()  # as `scratch` makes them
        if any(name.startswith("localq-") for name in os.listdir(place)):
            from localq.files import scratch  # start-up cost: hardly ever needed

            scratch.remove_abandoned(Path(place))


def _open_closed_streams() -> None:
    """Open a closed standard stream (`<&-`), so that none is None: stdin is empty, stderr takes everything.

    stdout takes nothing: a command whose output is lost must not succeed, as with a full disk.
    """
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is that of the stream.
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))


def _without_arguments() -> list[str]:
    """Bare `localq`: the full screen at a terminal, else the help."""
    return ["tui"] if has_screen() else []


def execute(arguments: list[str]) -> int:
    """Run one command line and return its exit code; expected failures are printed as one line on stderr."""
    try:
        result = app(arguments, prog_name="localq", standalone_mode=False)
    except LocalqError as error:
        if not completion.is_asked():
            note(f"localq: {error}")
        return error.exit_code
    except ClickException as error:  # usage errors, in the parser's words
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort) as stop:
        # The parser takes any EOFError for a Ctrl-D; a question that gets one has no cause.
        return _report_unexpected(stop.__cause__) if isinstance(stop.__cause__, EOFError) else ExitCode.INTERRUPTED
    except BrokenPipeError:
        return ExitCode.CLOSED_PIPE
    except SystemExit as stop:
        # The parser turns a closed pipe into exit 1; the context tells the two apart.
        if isinstance(stop.__context__, BrokenPipeError):
            return ExitCode.CLOSED_PIPE
        return stop.code if isinstance(stop.code, int) else ExitCode.FAILURE
    except (OSError, termios.error) as error:
        if is_hung_up() or _is_unwritable(error):
            raise  # `run` handles them
        return _report_unexpected(error)
    except Exception as error:
        # A shell may state its line in variables that are incomplete.
        return ExitCode.FAILURE if completion.is_asked() else _report_unexpected(error)
    return result if isinstance(result, int) else ExitCode.OK


def _report_unexpected(error: BaseException) -> int:
    """Print one line for `error`, whatever happens meanwhile; returns the exit code."""
    try:
        from localq.cli import last_resort  # only needed after a failure

        return last_resort.report(error)
    except Exception as failure:  # without descriptors, memory or files nothing can be imported
        if (found := shortage(error) or shortage(failure)) is not None:
            note(f"localq: {found}")
            return found.exit_code
        note(f"localq: unexpected error ({type(error).__name__}, then {type(failure).__name__})")
        return ExitCode.FAILURE


def _report_escaped(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """In place of Python's traceback, for what ends the process outside of a command."""
    if not isinstance(error, KeyboardInterrupt):
        _report_unexpected(error)


def _log_thread(failed: threading.ExceptHookArgs) -> None:
    """Write what ends a thread to the log: printed, it would stand in the middle of an answer or of the screen."""
    if failed.exc_value is not None:
        _log(failed.exc_value)


def _log(error: BaseException) -> None:
    with contextlib.suppress(Exception):  # nobody waits for it
        from localq.cli import last_resort  # as above

        last_resort.log(error)


def _stop_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C or termination that came inside a destructor, where Python only prints it."""
    number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(unraisable.exc_type)
    if number is None:
        if unraisable.exc_value is not None:
            _log(unraisable.exc_value)
    else:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()  # during this hook it would be lost again


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.TERMINATED)

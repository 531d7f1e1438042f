"""The log of unexpected errors: where the code was, without local variables and without secrets.

An error that nobody foresaw is a bug, and its traceback is what a report needs. Local variables are never written: they
hold tokens and what was said. The messages of exceptions are shortened and go through `sanitize.redact`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
import traceback
from pathlib import Path

from localq import __version__, disk, places
from localq.errors import ExitCode, LocalqError
from localq.processes import shortage
from localq.sanitize import redact, sanitize

MAX_BYTES = 2**20  # then the log becomes `errors.log.1`
MAX_MESSAGE = 300  # characters of an exception's message
_MAX_FRAMES = 60  # of a traceback: the outermost and the innermost half
_MAX_CHAIN = 8  # exceptions, with their causes
_HEAD = "---- "  # begins an entry


def path() -> Path:
    """The log; it need not exist. Raises LocalqError (exit 2) without a home folder."""
    return places.state_dir() / "errors.log"


def count() -> int:
    """Number of errors in the log; 0 without one."""
    with contextlib.suppress(OSError, LocalqError):
        if path().is_file():  # a pipe would block
            with path().open(encoding="utf-8", errors="replace") as file:
                return sum(line.startswith(_HEAD) for line in file)
    return 0


def unexpected(what: str, error: BaseException) -> LocalqError:
    """The error to show for `error`, which is written to the log, unless the machine lacks something.

    what: what failed, as in other errors. A LocalqError is returned as it is.
    """
    known = error if isinstance(error, LocalqError) else shortage(error)
    if known is not None:
        return known
    why = f"unexpected error ({type(error).__name__})"
    try:
        where = write(error)
    except (OSError, LocalqError) as failure:
        reason = getattr(failure, "strerror", None) or type(failure).__name__
        return LocalqError(what, why, f"The error log could not be written ({reason}).")
    return LocalqError(what, why, f"This is a bug; please report it and attach {where}.", ExitCode.FAILURE)


def write(error: BaseException) -> Path:
    """Append an entry for `error`; returns the path of the log. Raises OSError, and LocalqError as `path`."""
    log = path()
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > MAX_BYTES:
            os.replace(log, log.with_name(f"{log.name}.1"))
    descriptor = disk.open_to_append(log)
    try:
        content = entry(error).encode("utf-8", "replace")
        disk.write_all(descriptor, content)  # in one call where the disk takes it: other processes append as well
    finally:
        os.close(descriptor)
    return log


def entry(error: BaseException) -> str:
    """The text of an entry: date, versions, and for each exception of the chain its frames, type and message."""
    system = f"{platform.system()} {platform.machine()}"
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    lines = [f"{_HEAD}{now} localq {__version__}, Python {platform.python_version()}, {system}"]
    for each, link in reversed(_chain(error)):
        lines += [*_frames(each), f"{type(each).__module__}.{type(each).__qualname__}: {_message(each)}", *link]
    return redact(sanitize("\n".join([*lines, "", ""])))


def _chain(error: BaseException) -> list[tuple[BaseException, list[str]]]:
    """`error` and its causes, each with the line that links it to the one before."""
    found: list[tuple[BaseException, list[str]]] = []
    each: BaseException | None = error
    link: list[str] = []
    while each is not None and len(found) < _MAX_CHAIN and all(each is not known for known, _ in found):
        found.append((each, link))
        if each.__cause__ is not None:
            each, link = each.__cause__, ["which caused:"]
        else:
            each, link = (None if each.__suppress_context__ else each.__context__), ["and during its handling:"]
    return found


def _frames(error: BaseException) -> list[str]:
    """The frames of an exception, the outermost first: file, line, function and the line of code."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), capture_locals=False)
    places_of_code = [(f'  File "{each.filename}", line {each.lineno}, in {each.name}', each.line) for each in frames]
    lines = [line for place, code in places_of_code for line in (place, f"    {code}")]
    if len(lines) > 2 * _MAX_FRAMES:
        lines = [*lines[:_MAX_FRAMES], "  ...", *lines[-_MAX_FRAMES:]]
    return lines


def _message(error: BaseException) -> str:
    """The message on one line, shortened; an exception may fail to state one."""
    try:
        text = " ".join(redact(str(error)).split())
    except Exception as failure:  # of another's class
        text = f"(str() raised {type(failure).__name__})"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} ..."

"""The last handler of the command line: an error that nobody foresaw is one line that names the log.

Imported only after such an error. What the machine lacks, or a package of the wrong version, is named instead.
"""

from __future__ import annotations

from localq.chat.terminal import error_log
from localq.cli import requirements
from localq.cli.output import note
from localq.errors import LocalqError
from localq.processes import shortage
from localq.sanitize import redact


def report(error: BaseException) -> int:
    """Print one line for `error`, and write it to the log if it is a bug; returns the exit code."""
    found: LocalqError | None = shortage(error)
    if found is None and (unmet := requirements.find_unmet()) is not None:
        note(f"localq: {unmet} ({type(error).__name__}: {redact(str(error))})")
        return unmet.exit_code
    found = found or error_log.unexpected("localq", error)
    note(str(found) if found.what == "localq" else f"localq: {found}")
    return found.exit_code


def log(error: BaseException) -> None:
    """Write an error that ends nothing to the log: of a thread, or inside a destructor."""
    error_log.unexpected("localq", error)

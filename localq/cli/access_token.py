"""`--token`: the hub's access token, from the command line, a file, stdin or a prompt.

Every user of the machine sees a command line, and the shell saves it: a file, stdin or a prompt keeps the token
private. A token of the command line is overwritten there (`hide_argument`), but the time until then remains, and
the shell's history. The token is set as HF_TOKEN, which the hub's library reads, and is never printed or saved.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

from localq.cli import piped_input
from localq.cli.output import note, stderr
from localq.disk import read_text
from localq.errors import ExitCode, LocalqError, usage_error
from localq.sanitize import HIDDEN, Secret

_TOKEN = re.compile("[!-~]{1,1000}")
MAX_LINE = 2000  # characters of a line of stdin
_SEEN = "the token is visible in the process list and shell history; use --token - or --token @FILE instead"


def use(value: str | None) -> None:
    """Use the token of `--token VALUE` in this process. Raises LocalqError (exit 2 or 5)."""
    if value is None:
        return
    token = _read(value)
    if not _TOKEN.fullmatch(token.reveal()):
        why = "not a valid access token (must be ASCII without spaces)" if token.reveal() else "the token is empty"
        raise LocalqError("--token", why, "`hf auth login` stores a token permanently.", ExitCode.GATED)
    os.environ["HF_TOKEN"] = token.reveal()


def _read(value: str) -> Secret:
    if value == "-":
        return _prompt()
    if value.startswith("@"):
        return Secret(read_text(Path(value[1:])).strip())
    if os.environ.get("LOCALQ_TOKEN") != value:
        hide_argument(value)
        note(_SEEN)
    return Secret(value.strip())


def _prompt() -> Secret:
    """The first line of stdin; at a terminal a prompt without echo."""
    if not sys.stdin.isatty():
        with piped_input.read_errors():
            return Secret(sys.stdin.readline(MAX_LINE).strip())
    import getpass  # start-up cost: rarely needed

    try:
        return Secret(getpass.getpass("Access token: ", stream=stderr()).strip())
    except EOFError:
        raise usage_error("--token -", "no token entered", "Paste the token and press Enter.") from None
    except UnicodeDecodeError:  # getpass reads the terminal by itself, not through `stream_encoding`
        return Secret("\ufffd")


def hide_argument(value: str) -> None:
    """Overwrite `value` among this process's arguments, as `ps` shows them, and in `sys.argv`; where that works."""
    hidden = value.encode(errors="surrogateescape")
    if len(hidden) < len(HIDDEN):
        return
    sys.argv = [each.replace(value, HIDDEN) for each in sys.argv]
    with contextlib.suppress(OSError, ValueError, IndexError):
        import ctypes  # start-up cost: rarely needed

        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, as proc(5) has them
        arguments = ctypes.string_at(start, end - start)
        at = arguments.find(hidden)
        while start and at >= 0:
            ctypes.memmove(start + at, HIDDEN.encode() + b" " * (len(hidden) - len(HIDDEN)), len(hidden))
            at = arguments.find(hidden, at + len(hidden))

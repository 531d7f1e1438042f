"""`--token`: where the access token of the hub comes from for this command. It is never printed, saved or asked twice.

What stands on a command line is seen by every user of the machine and kept by the shell, so a file, stdin or a question
at the terminal can give it too. It takes the place of HF_TOKEN, where the hub's own library looks.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from localq.cli.output import note
from localq.disk import text_of
from localq.errors import ExitCode, LocalqError, usage_error

_TOKEN = re.compile("[!-~]{1,1000}")
_SEEN = "the token stands in the list of processes and in the shell's history; --token - and --token @FILE keep it out"


def use(value: str | None) -> None:
    """Take the token of `--token VALUE` for this process. Raises LocalqError (exit 2, or 5 for what is no token)."""
    if value is None:
        return
    if value == "-":
        token = _asked()
    elif value.startswith("@"):
        token = text_of(Path(value[1:]))
    else:
        token = value
        if os.environ.get("LOCALQ_TOKEN") != value:
            note(_SEEN)
    token = token.strip()
    if not _TOKEN.fullmatch(token):
        why = "there is no token" if not token else "what it gives is no access token (one word of ASCII)"
        raise LocalqError("--token", why, "`hf auth login` keeps one for good.", ExitCode.GATED)
    os.environ["HF_TOKEN"] = token


def _asked() -> str:
    """The first line of stdin; at a terminal it is asked for, and not shown."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    import getpass  # start-up cost: hardly any command asks

    try:
        return getpass.getpass("Access token: ", stream=sys.stderr)
    except EOFError:
        raise usage_error("--token -", "nothing was typed", "Paste the token, and press Enter.") from None

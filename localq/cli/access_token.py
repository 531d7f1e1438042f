"""`--token`: the hub's access token, from the command line, a file, stdin or a prompt.

Every user of the machine sees a command line, and the shell saves it: a file, stdin or a prompt keeps the token
private. It is set as HF_TOKEN, which the hub's library reads, and is never printed or saved.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from localq.cli.output import note, stderr
from localq.disk import read_text
from localq.errors import ExitCode, LocalqError, usage_error

_TOKEN = re.compile("[!-~]{1,1000}")
_SEEN = "the token is visible in the process list and the shell history; use --token - or --token @FILE"


def use(value: str | None) -> None:
    """Use the token of `--token VALUE` in this process. Raises LocalqError (exit 2 or 5)."""
    if value is None:
        return
    if value == "-":
        token = _prompt()
    elif value.startswith("@"):
        token = read_text(Path(value[1:]))
    else:
        token = value
        if os.environ.get("LOCALQ_TOKEN") != value:
            note(_SEEN)
    token = token.strip()
    if not _TOKEN.fullmatch(token):
        why = "the token is empty" if not token else "not a valid access token (one ASCII word)"
        raise LocalqError("--token", why, "`hf auth login` stores a token permanently.", ExitCode.GATED)
    os.environ["HF_TOKEN"] = token


def _prompt() -> str:
    """The first line of stdin; at a terminal a prompt without echo."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    import getpass  # start-up cost: rarely needed

    try:
        return getpass.getpass("Access token: ", stream=stderr())
    except EOFError:
        raise usage_error("--token -", "no token entered", "Paste the token and press Enter.") from None

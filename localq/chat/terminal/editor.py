"""Edit a text in the user's editor: $VISUAL, or $EDITOR."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from localq import disk
from localq.chat.terminal import child
from localq.errors import ExitCode, LocalqError, usage_error


def edit(text: str, otherwise: str) -> str:
    """Return `text` as edited. Raises LocalqError where no editor is set (with the advice `otherwise`), it fails, or
    nothing was changed.
    """
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not command or not sys.stdin.isatty():
        why = "$VISUAL and $EDITOR are not set" if not command else "cannot open an editor without a terminal"
        raise usage_error("editor", why, otherwise)
    try:
        with disk.temporary_file("localq-", ".md", text.encode("utf-8", "replace")) as path:
            result = _run(command, path).rstrip("\n")
    except OSError as error:
        why = f"cannot write a temporary file ({error.strerror or error})"
        raise LocalqError("editor", why, otherwise, ExitCode.DISK) from error
    if not result.strip() or result == text.rstrip("\n"):
        raise usage_error("editor", "the text is unchanged or empty", "Nothing was changed.")
    return result


def _run(command: str, path: Path) -> str:
    try:
        code = child.run([*shlex.split(command), str(path)])
        if code != 0:
            raise LocalqError(command, f"failed with exit code {code}", "Nothing was changed.")
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:  # not found; quotes that do not close
        raise LocalqError(
            command,
            f"cannot start the editor ({getattr(error, 'strerror', None) or error})",
            "Set $VISUAL or $EDITOR to an installed editor.",
        ) from error

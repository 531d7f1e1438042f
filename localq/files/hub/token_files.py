"""The access token, as the hub's library finds it; its files are checked first.

The library reads a token's file whatever that is: a pipe blocks it, a device fills the memory.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from localq import disk
from localq.errors import ExitCode, LocalqError

MOST_BYTES = 2**20  # of a file with tokens; one token takes 40
STEP = "`hf auth login` stores a token permanently; HF_TOKEN and --token take precedence."
_WITHOUT_FILES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # with one of them the library reads no file
_EXCHANGE = "HF_OIDC_RESOURCE"  # with it the library exchanges the identity of a CI job for a token


def find(library: Any) -> str | None:
    """The access token of the user; None without one. Raises LocalqError (exit 5), also for a file that is none."""
    if not any(os.environ.get(name, "").strip() for name in _WITHOUT_FILES):
        for path in (library.constants.HF_TOKEN_PATH, library.constants.HF_STORED_TOKENS_PATH):
            _check(Path(path))
    try:
        found: str | None = library.get_token()
    except (LocalqError, MemoryError):
        raise
    except Exception as error:  # of many kinds: of the file, or of the exchange and its answer
        raise _error(error) from None
    return found


def _check(path: Path) -> None:
    """Raises LocalqError (exit 5) for what is no file, or too large. Whether it can be read, the library finds out."""
    with contextlib.suppress(OSError):
        try:
            if len(disk.read_regular(path, MOST_BYTES + 1)) > MOST_BYTES:
                raise _refused(f"{path} is too large (limit: {MOST_BYTES / 1e6:.1f} MB)")
        except disk.NotRegularError:
            raise _refused(f"{path} is not a regular file") from None


def _error(error: Exception) -> LocalqError:
    if os.environ.get(_EXCHANGE):
        why = f"{_EXCHANGE} is set, but exchanging it for an access token failed ({type(error).__name__})"
        return _refused(why, f"Check {_EXCHANGE} and HF_OIDC_ID_TOKEN, or unset them.")
    return _refused(f"the token file cannot be read ({getattr(error, 'strerror', None) or type(error).__name__})")


def _refused(why: str, step: str = STEP) -> LocalqError:
    return LocalqError("access token", why, step, ExitCode.GATED)

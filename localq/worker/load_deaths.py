"""What a load says whose engine process ended by a signal: which file, or what ran out. Torch-free."""

from __future__ import annotations

import signal
from pathlib import Path

from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.safetensors_headers import read_header, shard_paths
from localq.processes import exit_reason

_DOCTOR = "`localq doctor` shows what is wrong."
_MEMORY = "The system may lack memory: use a smaller model or a shorter context (--ctx), or close other programs."
_AGAIN = "Check the disk, and run the command again once no other program writes to the file."


def load_death(code: int, last: str, model: Path, started_s: float) -> LocalqError:
    """The error for an engine process that ended with `code` while it loaded `model`, from `started_s` (epoch) on.

    last: its last message, "" without one. A mapped file that is cut, or that the disk cannot read, is SIGBUS.
    """
    reason = exit_reason(code)
    if code == -signal.SIGBUS:
        file = _suspect(model, started_s)
        what = "the file" if file != model or model.is_file() else "a file in it"
        why = f"{what} cannot be read, or was changed while it was read (engine process: {reason})"
        return bad_file(str(file), why, _AGAIN)
    why = f"ended while the model was loaded ({reason})" + (f": {last}" if last else "")
    step = _MEMORY if code == -signal.SIGKILL else _DOCTOR
    return LocalqError("engine process", why, step, ExitCode.FAILURE)


def _suspect(model: Path, started_s: float) -> Path:
    """The file of weights that is damaged or was written since; the model itself where none stands out."""
    if model.is_file():
        return model
    try:
        paths = list(shard_paths(model).values())
    except (LocalqError, OSError):
        return model
    for path in paths:
        try:
            if path.stat().st_mtime >= started_s:
                return path
            read_header(path)
        except (LocalqError, OSError):
            return path
    return paths[0] if len(paths) == 1 else model

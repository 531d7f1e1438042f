"""The error for an engine process that ended during a load: the file at fault, or what ran out. Torch-free."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.file_state import State, state_of
from localq.files.gguf_choice import parts_of
from localq.files.safetensors_headers import read_header
from localq.processes import exit_reason
from localq.worker.messages import DOCTOR, PROCESS

_MEMORY = "The system may be out of memory: use a smaller model or a shorter context (--ctx), or close other programs."
_AGAIN = "Check the disk, then run the command again when no other program is writing to the file."


@dataclass(frozen=True)
class LoadedFiles:
    """A model that is being loaded, and the states of its weights before."""

    model: Path
    states: dict[Path, State]

    @classmethod
    def of(cls, model: Path) -> Self:
        """The files of `model`, a folder or a .gguf file, as they are now."""
        return cls(model, {path: state for path in _weights(model) if (state := _state(path)) is not None})

    def death(self, code: int, last: str) -> LocalqError:
        """The error for an engine process that ended with `code` in the load; last: its last message, "" without one.

        A mapped file that is cut, or that the disk cannot read, is SIGBUS.
        """
        reason = exit_reason(code)
        if code == -signal.SIGBUS:
            file = self._suspect()
            what = "a file in it" if file.is_dir() else "the file"
            why = f"{what} could not be read, or was modified while localq was reading it (engine process: {reason})"
            return bad_file(str(file), why, _AGAIN)
        why = f"stopped while loading the model ({reason})" + (f": {last}" if last else "")
        step = _MEMORY if code == -signal.SIGKILL else DOCTOR
        return LocalqError(PROCESS, why, step, ExitCode.FAILURE)

    def _suspect(self) -> Path:
        """The file that was written since, or that is damaged; the model itself where none stands out."""
        changed = [path for path, state in self.states.items() if _state(path) != state]
        if changed or len(self.states) == 1:
            return [*changed, *self.states][0]
        return next((path for path in self.states if not _is_sound(path)), self.model)


def _weights(model: Path) -> list[Path]:
    try:
        return sorted(model.glob("*.safetensors")) if model.is_dir() else parts_of(model)
    except OSError:
        return []


def _state(path: Path) -> State | None:
    try:
        return state_of(path.stat())
    except OSError:
        return None


def _is_sound(path: Path) -> bool:
    try:
        read_header(path)
    except LocalqError:
        return False
    return True

"""Errors for users, and the table of exit codes.

Every expected failure is a `LocalqError`: the thing, the cause, the next step and the exit code of the command.
"""

from __future__ import annotations

import enum
from typing import Any

from localq.sanitize import redact


class ExitCode(enum.IntEnum):
    """Process exit codes; `localq help exit-codes` prints `EXIT_CODE_MEANINGS`."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    UNKNOWN_MODEL = 4
    GATED = 5
    NETWORK = 6
    NO_DEVICE = 7
    BAD_FILE = 8
    DISK = 9
    INTERRUPTED = 130
    CLOSED_PIPE = 141
    TERMINATED = 143


EXIT_CODE_MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "success",
    ExitCode.FAILURE: "any other failure",
    ExitCode.USAGE: "usage error: unknown option, missing or invalid value, input too long",
    ExitCode.DOES_NOT_FIT: "does not fit in the available memory",
    ExitCode.UNKNOWN_MODEL: "unknown model",
    ExitCode.GATED: "gated model, or missing or invalid access token",
    ExitCode.NETWORK: "network failure, or file not available offline",
    ExitCode.NO_DEVICE: "no usable CUDA device, driver or kernels",
    ExitCode.BAD_FILE: "damaged, modified or malformed file",
    ExitCode.DISK: "disk full or access denied",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitCode.CLOSED_PIPE: "the output pipe was closed",
    ExitCode.TERMINATED: "terminated (SIGTERM)",
}


class LocalqError(Exception):
    """An expected failure: what failed, why, and the next step.

    `str(error)` is the line that users read: "what: why. next_step". Secrets in the texts of others are left out.
    """

    def __init__(self, what: str, why: str, next_step: str = "", exit_code: ExitCode = ExitCode.FAILURE) -> None:
        self.what, self.why, self.next_step = redact(what), redact(why), redact(next_step)
        self.exit_code = exit_code
        super().__init__(str(self))

    def __str__(self) -> str:
        line = f"{self.what}: {self.why.rstrip('.')}."
        return f"{line} {self.next_step}" if self.next_step else line

    def to_dict(self) -> dict[str, Any]:
        """Plain form, for `--json` and the pipe of the engine process."""
        return {
            "what": self.what,
            "why": self.why,
            "next_step": self.next_step,
            "exit_code": int(self.exit_code),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> LocalqError:
        """Inverse of `to_dict`."""
        code = ExitCode(fields["exit_code"])
        return LocalqError(fields["what"], fields["why"], fields["next_step"], code)


def usage_error(what: str, why: str, next_step: str = "") -> LocalqError:
    """A bad option, value or argument (exit 2)."""
    return LocalqError(what, why, next_step, ExitCode.USAGE)


def bad_file(what: str, why: str, next_step: str = "") -> LocalqError:
    """A damaged, malformed or rejected file (exit 8)."""
    return LocalqError(what, why, next_step, ExitCode.BAD_FILE)

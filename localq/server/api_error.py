"""`ApiError`: an error that a client gets, with the status and the fields that APIs have for it.

The two shapes are OpenAI's `{"error": {"message", "type", "param", "code"}}` and Anthropic's
`{"type": "error", "error": {"type", "message"}}`. A message never has the `repr` of
an object in it, and no text of a file.
"""

from __future__ import annotations

from typing import Any

from localq.errors import ExitCode, LocalqError
from localq.sanitize import sanitize
from localq.server.slot import QueueFull, SlotClosed

RETRY_S = 5  # of Retry-After
MAX_MESSAGE = 2000  # characters: a grammar or a template may answer with much
_STATUS = {
    ExitCode.USAGE: 400,
    ExitCode.UNKNOWN_MODEL: 404,
    ExitCode.DOES_NOT_FIT: 503,
    ExitCode.NO_DEVICE: 503,
}
_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip


class ApiError(LocalqError):
    """param: the field that is wrong; code: a word for programs. Retry-After is sent with 503."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__("", message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return getattr(self, "message", "")


def bad_field(param: str, why: str, allowed: str = "", code: str | None = None) -> ApiError:
    """The error for a wrong field: "temperature: 3 is out of range. Allowed: 0 to 2."."""
    return ApiError(400, f"{param}: {why}.{f' {allowed}' if allowed else ''}", param, code)


def of_error(error: LocalqError, param: str | None = None) -> ApiError:
    """The error of the API for any error of localq; param: the field that it belongs to."""
    if isinstance(error, ApiError):
        return error
    message = sanitize(str(error))[:MAX_MESSAGE]
    if isinstance(error, QueueFull | SlotClosed):
        return ApiError(503, message, code="overloaded")
    status = _STATUS.get(error.exit_code, 500)
    return ApiError(status, message, param, "model_not_found" if status == 404 else None)


def openai_body(error: ApiError) -> dict[str, Any]:
    """The error in OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "authentication_error" if error.status == 401 else kind
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error in Anthropic's shape."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC.get(error.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def headers(error: ApiError) -> dict[str, str]:
    """Headers of the response with this error."""
    found = {"retry-after": str(RETRY_S)} if error.status == 503 else {}
    return found | ({"www-authenticate": "Bearer"} if error.status == 401 else {})

"""Failures of an upload as LocalqErrors that name the cause and the next step.

Messages of the client library are never shown: they may hold signed addresses. Exit codes: no write right or token 5,
no such organization 4, network and limits of the hub 6, a repository that changed meanwhile 1, a card that the hub
rejects 2, a local file that changed 8.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from localq.errors import ExitCode, LocalqError, bad_file, usage_error
from localq.files.hub import errors as hub_errors
from localq.files.hub.errors import UnreadableError, endpoint, no_hub

RESUME = "Run the same command again; it sends only what is missing."
NEEDS_WRITE = "Create a token with write access at {}/settings/tokens, then run `hf auth login` (or use --token)."
CHANGED_STATUS = (409, 412)
FULL_STATUS = (402, 413, 507)


def cause_of(error: BaseException) -> BaseException:
    """The failure of a request that `error` wraps: the library raises RuntimeError around those of files.

    An answer that is no JSON, as from a proxy or a hub that is being updated, is an UnreadableError.
    """
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return cause_of(error.__cause__)
    return UnreadableError("not JSON") if isinstance(error, json.JSONDecodeError) else error


def translate(error: BaseException, repo: str) -> BaseException:
    """The LocalqError for `error`, a failure of an upload to `repo`; `error` itself if it is a bug."""
    found = cause_of(error)
    if isinstance(found, LocalqError):
        return found
    if (status := hub_errors.status_of(found)) is not None:
        return _of_status(repo, status)
    if isinstance(found, ValueError):  # an answer of another form, or a refusal of a file in an answer
        return no_hub(repo, f"{endpoint()} refused a file, or its response cannot be read", RESUME)
    if not isinstance(found, Exception):
        return found
    known = hub_errors.translate(found, repo, "", "")
    if isinstance(known, LocalqError) and known.exit_code == ExitCode.NETWORK:
        return LocalqError(known.what, known.why, RESUME, ExitCode.NETWORK)
    return known


def _of_status(repo: str, status: int) -> LocalqError:
    if status == 401:
        return no_token(repo, "the hub rejected the access token")
    if status == 403:
        return no_token(repo, f"the access token does not allow writing to {repo.partition('/')[0]}")
    if status == 404:
        why = f"the token may not write to {repo.partition('/')[0]}, or there is no such user or organization"
        return LocalqError(repo, why, "Check the name.", ExitCode.UNKNOWN_MODEL)
    if status in CHANGED_STATUS:
        return changed(repo)
    if status in FULL_STATUS:
        why = f"the hub has no room for the files (HTTP status {status})"
        return no_hub(repo, why, f"Check the storage limit at {endpoint()}/settings/billing.")
    if status == 429:
        return no_hub(repo, "the hub's limit on requests was reached", f"Wait a few minutes. {RESUME}")
    return no_hub(repo, f"the hub returned HTTP status {status}", RESUME)


def changed(repo: str) -> LocalqError:
    """The error (exit 1) for a repository that is not what the plan was made for."""
    return LocalqError(repo, "the repository was changed in the meantime", RESUME)


def changed_file(path: Path) -> LocalqError:
    """The error (exit 8) for a local file that is not what it was when it was hashed."""
    step = "Restore the file, or quantize the model again; then run the same command."
    return bad_file(str(path), "the file changed during the upload", step)


def rejected_card(repo: str) -> LocalqError:
    """The error (exit 2) for a model card whose front matter the hub does not accept."""
    step = "Check --license and --base; --dry-run shows the card."
    return usage_error(repo, "the hub rejected the front matter of the model card", step)


def no_token(repo: str, why: str = "uploading needs an access token with write access") -> LocalqError:
    """The error (exit 5) for a missing or insufficient token."""
    return LocalqError(repo, why, NEEDS_WRITE.format(endpoint()), ExitCode.GATED)


def passes(error: Any) -> bool:
    """Return whether the failure is temporary."""
    found = cause_of(error)
    return isinstance(found, UnreadableError) or (isinstance(found, Exception) and hub_errors.breaks_off(found))

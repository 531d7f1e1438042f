"""What a repository of the hub has: names and hashes of its files, and its licence.

Unlike `hub.client.list_files`, all files are listed, in folders too: an upload must not replace what it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from localq.errors import ExitCode, LocalqError
from localq.files.hub import cache as hub_cache
from localq.files.hub import client
from localq.files.hub import errors as hub_errors
from localq.files.publish import licences

MAX_FILES = 100_000
OWN_FILES = (".gitattributes",)  # files that the hub itself puts into every repository


@dataclass(frozen=True)
class RemoteRepo:
    """A repository as it is on the hub.

    commit   the current one of the main branch; "" for a repository that does not exist
    files    name -> sha256 of its content (LFS), or git's id; without those of `OWN_FILES`
    """

    repo: str
    commit: str = ""
    private: bool = False
    files: dict[str, str] = field(default_factory=dict)


def read(repo: str) -> RemoteRepo:
    """The state of `repo`. Raises LocalqError: exit 5 for a rejected token, 6 for the network."""
    try:
        info = client.repo_info(repo)
    except LocalqError as error:
        if error.exit_code == ExitCode.UNKNOWN_MODEL:
            return RemoteRepo(repo)
        raise
    try:
        if not hub_cache.COMMIT.fullmatch(info["sha"]):
            raise hub_errors.no_model_hub(repo, "the repository has no commit")
        siblings = (info.get("siblings") or ())[:MAX_FILES]
        files = {str(each["rfilename"]): _content_id(each) for each in siblings}
        return RemoteRepo(
            repo, info["sha"], bool(info.get("private")),
            {name: id for name, id in files.items() if name not in OWN_FILES},
        )  # fmt: skip
    except (AttributeError, KeyError, TypeError) as error:  # JSON of another shape
        raise hub_errors.no_model_hub(repo) from error


def _content_id(sibling: dict[str, Any]) -> str:
    lfs = sibling.get("lfs")
    return str(lfs["sha256"] if lfs else sibling.get("blobId") or "")


def stated_licences(repo: str) -> tuple[str, ...]:
    """The ids of the licences that the model card of `repo` names; () where it does not name every one.

    Every id of a list counts. `other` stands for the id in `license_name`. Raises LocalqError as `read`.
    """
    try:
        card = client.repo_info(repo).get("cardData")
    except LocalqError as error:
        if error.exit_code == ExitCode.UNKNOWN_MODEL:
            return ()
        raise
    if not isinstance(card, dict):
        return ()
    stated = card.get("license")
    listed = stated if isinstance(stated, list) else [stated]
    ids = [licences.id_of(card.get("license_name") if each == "other" else each) for each in listed]
    return tuple(dict.fromkeys(ids)) if all(ids) else ()

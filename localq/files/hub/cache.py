"""The Hugging Face cache on the disk: its repositories, and which are complete. No network, no client library.

Layout (shared with every other tool that uses it; documented by huggingface_hub):

    models--ORG--REPO/refs/BRANCH             the commit that a branch or tag stood for
    models--ORG--REPO/snapshots/COMMIT/FILE   a link to ../../blobs/HASH (a plain file where there are no links)
    models--ORG--REPO/blobs/HASH              the content, named by sha256 (LFS) or by git's id; may itself be a link
                                              into a store that the whole cache shares
    models--ORG--REPO/blobs/HASH.*.incomplete a download of another tool that runs, or was killed (ours are elsewhere)

A snapshot is complete when it has `config.json`, `tokenizer.json` and every shard. `hub.fetch` places `config.json`
last, after the hashes of all other files: a snapshot that it left half done is never taken for a complete one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localq import disk, places
from localq.errors import LocalqError
from localq.files.json_files import inside
from localq.files.safetensors_headers import shard_paths

MARKER_NAME = "config.json"  # placed last
TOKENIZER_NAME = "tokenizer.json"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")  # what a file's name may be before it becomes a path
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_PREFIX = "models--"
_MAX_REF_BYTES = 256
_CONTENT_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Snapshot:
    """One revision of a repository in the cache; `refs` are the branches and tags that stood for it."""

    repo: str
    commit: str
    folder: Path
    refs: tuple[str, ...]


def repo_folder(repo: str, cache: Path | None = None) -> Path:
    """Where the cache (the user's, unless one is given) keeps `repo` ("org/name"), there or not."""
    return (cache or places.hub_cache()) / (_PREFIX + repo.replace("/", "--"))


def repos() -> dict[str, Path]:
    """Every model repository of the cache -> its folder."""
    root = places.hub_cache()
    if not root.is_dir():
        return {}
    folders = sorted(path for path in root.glob(f"{_PREFIX}*") if path.is_dir() and not path.is_symlink())
    return {path.name.removeprefix(_PREFIX).replace("--", "/", 1): path for path in folders}


def snapshots(repo: str) -> list[Snapshot]:
    """The revisions of `repo` in the cache, those that a branch or tag stood for first."""
    folder = repo_folder(repo)
    refs: dict[str, list[str]] = {}
    for path in sorted((folder / "refs").rglob("*")):
        if not path.name.startswith(".") and path.is_file() and (commit := _read_ref(path)):
            refs.setdefault(commit, []).append(path.relative_to(folder / "refs").as_posix())
    found = [
        Snapshot(repo, path.name, path, tuple(refs.get(path.name, ())))
        for path in sorted((folder / "snapshots").glob("*"))
        if COMMIT.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(found, key=lambda each: not each.refs)


def snapshot_folder(repo: str, revision: str) -> Path | None:
    """The folder of `repo` at a commit, the beginning of one, a branch or a tag, as last seen; None without one."""
    folder = repo_folder(repo)
    if not _REVISION.fullmatch(revision):
        return None
    if COMMIT.fullmatch(revision):
        commit: str | None = revision
    else:
        commit = _read_ref(folder / "refs" / revision)
    if commit is None and _SHORT_COMMIT.fullmatch(revision):
        starting = [path.name for path in (folder / "snapshots").glob(f"{revision}*")]
        commit = starting[0] if len(starting) == 1 else None
    path = folder / "snapshots" / commit if commit else None
    return path if path is not None and path.is_dir() else None


def find(repo: str, revision: str, files: tuple[str, ...] = ()) -> Path | None:
    """What can be loaded of `repo` at `revision` without the network: its folder or its .gguf file; None without.

    `files` names the .gguf of a GGUF source. Without it, a folder that holds one .gguf and no other weights is that
    file.
    """
    folder = snapshot_folder(repo, revision)
    if folder is None:
        return None
    if files and all(name.endswith(".gguf") for name in files):
        return folder / files[0] if all((folder / name).is_file() for name in files) else None
    if is_complete(folder):
        return folder
    gguf = gguf_files(folder)
    return gguf[0] if len(gguf) == 1 else None


def is_complete(folder: Path) -> bool:
    """True when `folder` (a snapshot, or any model folder) has its configuration, tokenizer and every shard."""
    try:
        known = all(inside(folder, name) is not None for name in (MARKER_NAME, TOKENIZER_NAME))
        return known and bool(shard_paths(folder))
    except LocalqError:  # a shard missing, an index or a link that is damaged
        return False


def gguf_files(folder: Path) -> list[Path]:
    """The .gguf files of a snapshot whose content is there."""
    return sorted(path for path in folder.glob("*.gguf") if path.is_file())


def incomplete_files(repo: str) -> list[Path]:
    """What cut-off downloads of `repo` by other tools left behind."""
    return sorted((repo_folder(repo) / "blobs").glob("*.incomplete"))


def content(folder: Path) -> Iterator[os.stat_result]:
    """The stat of every file of a snapshot, of what a link leads to; one for each content, however often linked."""
    seen = set()
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            stat = path.stat()
            if (stat.st_dev, stat.st_ino) not in seen:
                seen.add((stat.st_dev, stat.st_ino))
                yield stat


def remember(repo: str, revision: str, commit: str) -> None:
    """Record which commit a branch or tag stood for, so that the next run needs no network. Atomic."""
    if COMMIT.fullmatch(revision) or not _REVISION.fullmatch(revision):
        return
    path = repo_folder(repo) / "refs" / revision
    if _read_ref(path) == commit:
        return
    disk.write_durably(path, commit.encode(), places.downloads_dir())  # not beside it: it would be taken for a branch


def is_content_id(name: str) -> bool:
    """`name` is a sha256 or a git id in hex, as blobs are called."""
    return _CONTENT_ID.fullmatch(name) is not None


def content_id(pointer: Path) -> str | None:
    """The hash that the content of a file of a snapshot must have: its blob's name. None for a file that is no link."""
    blob = _hops(pointer)[1:2]
    return blob[0].name if blob and is_content_id(blob[0].name) else None


def place(part: Path, blob: Path) -> None:
    """Give a part, whose bytes are durable and right, its name in the cache, durably. Raises OSError."""
    disk.make_folder(blob.parent)
    os.replace(part, blob)
    disk.sync_folder(blob.parent)


def link(pointer: Path, blob: Path) -> None:
    """Let a file of a snapshot stand for `blob`, durably; where the disk knows no links, it becomes the content."""
    target = os.path.relpath(blob, pointer.parent)
    if pointer.is_symlink() and os.readlink(pointer) == target:
        return
    disk.make_folder(pointer.parent)
    pointer.unlink(missing_ok=True)  # it leads nowhere, or to what was found wrong
    try:
        pointer.symlink_to(target)  # under its own name at once: a kill leaves nothing that other tools stumble over
    except FileExistsError:  # another process was quicker, where locks do nothing
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        os.replace(blob, pointer)
    disk.sync_folder(pointer.parent)


def discard(pointer: Path) -> None:
    """Remove a file of a snapshot and its content, whoever else links to it: the content is not what it should be."""
    for hop in _hops(pointer):
        hop.unlink(missing_ok=True)


def remove_file(pointer: Path) -> int:
    """Remove a file of a snapshot, and its content unless something else links to it. Returns the bytes freed."""
    hops, size = _hops(pointer), pointer.stat().st_size
    others = (path for path in pointer.parent.parent.rglob("*") if path.is_symlink() and path != pointer)
    shared = any(path.resolve() == hops[-1].resolve() for path in others)
    own_folder = pointer.parent.parent.parent  # content outside it belongs to the whole cache: only its client frees it
    for hop in hops[:1] if shared else hops:
        if hop.is_relative_to(own_folder):
            hop.unlink(missing_ok=True)
    return size if not shared and hops[-1].is_relative_to(own_folder) else 0


def _hops(pointer: Path) -> list[Path]:
    """`pointer` and what it links to, link by link."""
    hops = [pointer]
    while hops[-1].is_symlink() and len(hops) < 8:
        hops.append(Path(os.path.normpath(hops[-1].parent / os.readlink(hops[-1]))))
    return hops


def _read_ref(path: Path) -> str | None:
    try:
        with path.open(encoding="ascii") as file:
            commit = file.read(_MAX_REF_BYTES).strip()
    except (OSError, UnicodeDecodeError):  # no such ref, or none that a client wrote
        return None
    return commit if COMMIT.fullmatch(commit) else None

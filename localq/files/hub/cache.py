"""The Hugging Face cache on the disk: its repositories, and which are complete.

No network, no client library.

Layout (shared with other tools; documented by huggingface_hub):

    models--ORG--REPO/refs/BRANCH             the last known commit of a branch or tag
    models--ORG--REPO/snapshots/COMMIT/FILE   a link to ../../blobs/HASH (a plain file on disks without links);
                                              .gguf files may be in a folder: COMMIT/FOLDER/FILE
    models--ORG--REPO/blobs/HASH              the content, named by sha256 (LFS) or by git's id; may itself be a link
                                              into a store that the whole cache shares
    models--ORG--REPO/blobs/HASH.*.incomplete another tool's running or interrupted download (localq's are elsewhere)

A snapshot is complete if it has `config.json`, `tokenizer.json` and every shard. `hub.fetch` places `config.json` last,
after all other hashes were checked, so an interrupted fetch never looks complete.
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
from localq.files import gguf_choice
from localq.files.json_files import inside
from localq.files.safetensors_headers import shard_paths

MARKER_NAME = "config.json"  # placed last
TOKENIZER_NAME = "tokenizer.json"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")  # names that may become part of a path
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_PREFIX = "models--"
_MAX_REF_BYTES = 256
_CONTENT_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Revision:
    """One revision of a repository in the cache; `refs`: its branches and tags."""

    repo: str
    commit: str
    folder: Path
    refs: tuple[str, ...]


def repo_folder(repo: str, cache: Path | None = None) -> Path:
    """The folder of `repo` ("org/name") in `cache` (default: the user's); it need not exist."""
    return (cache or places.hub_cache()) / (_PREFIX + repo.replace("/", "--"))


def repo_of(folder: Path) -> str | None:
    """The repository whose folder in the user's cache is `folder`; None for any other folder."""
    if not folder.name.startswith(_PREFIX) or folder.parent.absolute() != places.hub_cache().absolute():
        return None
    return folder.name.removeprefix(_PREFIX).replace("--", "/", 1)


def repos() -> dict[str, Path]:
    """All model repositories of the cache -> their folders, or links to them. Raises OSError if it cannot be read."""
    folders = [path for path in children(places.hub_cache()) if path.name.startswith(_PREFIX) and _is_folder(path)]
    return {path.name.removeprefix(_PREFIX).replace("--", "/", 1): path for path in folders}


def revisions(repo: str) -> list[Revision]:
    """The revisions of `repo` in the cache, those with a branch or tag first. Raises OSError if they cannot be read."""
    folder = repo_folder(repo)
    refs: dict[str, list[str]] = {}
    for path in files_below(folder / "refs"):
        if not path.name.startswith(".") and (commit := read_ref(path)):
            refs.setdefault(commit, []).append(path.relative_to(folder / "refs").as_posix())
    found = [
        Revision(repo, path.name, path, tuple(refs.get(path.name, ())))
        for path in children(folder / "snapshots")
        if COMMIT.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(found, key=lambda each: not each.refs)


def _is_folder(path: Path) -> bool:
    """Return whether `path` is a folder or links to one; True if access is denied, which reading reports."""
    try:
        return path.is_dir()
    except OSError:
        return True


def children(folder: Path) -> list[Path]:
    """The entries of `folder`, sorted; [] without one. Raises OSError: `Path.glob` calls a closed folder empty."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_below(folder: Path) -> Iterator[Path]:
    """The files below `folder`, links to files included. Raises OSError, as `children`."""
    return (path for path in names_below(folder) if path.is_file())


def names_below(folder: Path) -> Iterator[Path]:
    """Everything below `folder` but folders; links, also broken ones, are not followed. Raises OSError."""
    for path in children(folder):
        if path.is_dir() and not path.is_symlink():
            yield from names_below(path)
        else:
            yield path


def snapshot_folder(repo: str, revision: str) -> Path | None:
    """The folder of `repo` at a commit (also abbreviated), branch or tag (last known commit), or None.

    Raises OSError for a repository that cannot be read.
    """
    folder = repo_folder(repo)
    if not _REVISION.fullmatch(revision):
        return None
    if COMMIT.fullmatch(revision):
        commit: str | None = revision
    else:
        commit = _commit_in(folder / "refs" / revision)
    if commit is None and _SHORT_COMMIT.fullmatch(revision):
        starting = [path.name for path in children(folder / "snapshots") if path.name.startswith(revision)]
        commit = starting[0] if len(starting) == 1 else None
    path = folder / "snapshots" / commit if commit else None
    return path if path is not None and path.is_dir() else None


def find(repo: str, revision: str, files: tuple[str, ...] = (), choice: str = "") -> Path | None:
    """The complete folder or .gguf file of `repo` at `revision` in the cache, else None.

    files, choice   name the .gguf of a GGUF source; of a split model, the first part is returned

    Without both, a folder with one GGUF model means that model, unless its other files are those of safetensors.
    Raises OSError for a repository that cannot be read.
    """
    folder = snapshot_folder(repo, revision)
    if folder is None:
        return None
    if files and all(name.endswith(".gguf") for name in files):
        return folder / files[0] if all((folder / name).is_file() for name in files) else None
    names = gguf_names(folder)
    if choice:
        found = gguf_choice.find(names, choice)
        return folder / found[0] if found else None
    if is_complete(folder):
        return folder
    models = gguf_choice.choices(names)
    if len(models) != 1 or all((folder / name).is_file() for name in (MARKER_NAME, TOKENIZER_NAME)):
        return None
    return folder / models[0].files[0]


def is_complete(folder: Path) -> bool:
    """Return whether `folder` (a snapshot or other model folder) has config, tokenizer and every shard."""
    try:
        known = all(inside(folder, name) is not None for name in (MARKER_NAME, TOKENIZER_NAME))
        return known and bool(shard_paths(folder))
    except LocalqError:  # a missing shard, a damaged index or link
        return False


def gguf_files(folder: Path) -> list[Path]:
    """The .gguf files of a snapshot and of the folders in it, without broken links."""
    folders = (folder, *(path for path in children(folder) if path.is_dir()))
    return [path for each in folders for path in children(each) if is_gguf(path.name) and path.is_file()]


def is_gguf(name: str) -> bool:
    """Return whether a file of this name is in GGUF."""
    return name.casefold().endswith(gguf_choice.SUFFIX)


def gguf_names(folder: Path) -> list[str]:
    """The names of `gguf_files` in the snapshot: FILE or FOLDER/FILE."""
    return [path.relative_to(folder).as_posix() for path in gguf_files(folder)]


def snapshot_of(path: Path) -> Path | None:
    """The snapshot folder that has the file at `path`, directly or in a folder; None for any other file."""
    parents = (each for each in path.parents[:2] if COMMIT.fullmatch(each.name) and each.parent.name == "snapshots")
    return next(parents, None)


def incomplete_files(repo: str) -> list[Path]:
    """Files of interrupted downloads of `repo` by other tools."""
    return sorted((repo_folder(repo) / "blobs").glob("*.incomplete"))


def content(folder: Path) -> Iterator[os.stat_result]:
    """The stat of every file of a snapshot, links resolved, each content once. Raises OSError."""
    seen = set()
    for path in files_below(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            stat = path.stat()
            if (stat.st_dev, stat.st_ino) not in seen:
                seen.add((stat.st_dev, stat.st_ino))
                yield stat


def remember(repo: str, revision: str, commit: str) -> None:
    """Record the commit of a branch or tag, so that the next run needs no network. Atomic."""
    if COMMIT.fullmatch(revision) or not _REVISION.fullmatch(revision):
        return
    path = repo_folder(repo) / "refs" / revision
    if read_ref(path) == commit:
        return
    disk.write_durably(
        path, commit.encode(), places.downloads_dir()
    )  # in another folder, where it is not mistaken for a branch


def is_content_id(name: str) -> bool:
    """Return whether `name` is the name of a blob: a sha256 or git id in hex."""
    return _CONTENT_ID.fullmatch(name) is not None


def content_id(pointer: Path) -> str | None:
    """The hash that a file of a snapshot must have: the name of its blob.

    None for a file that is not a link.
    """
    blob = _hops(pointer)[1:2]
    return blob[0].name if blob and is_content_id(blob[0].name) else None


def place(part: Path, blob: Path) -> None:
    """Move a finished part, verified and durable, to its place in the cache, durably. Raises OSError."""
    disk.make_folder(blob.parent)
    os.replace(part, blob)
    disk.sync_folder(blob.parent)


def link(pointer: Path, blob: Path) -> None:
    """Link a file of a snapshot to `blob`, durably; on a disk without links the blob is moved there."""
    target = os.path.relpath(blob, pointer.parent)
    if pointer.is_symlink() and os.readlink(pointer) == target:
        return
    disk.make_folder(pointer.parent)
    pointer.unlink(missing_ok=True)  # a broken link, or a link to wrong content
    try:
        pointer.symlink_to(target)  # created in place: a kill leaves no temporary file for other tools to find
    except FileExistsError:  # by another process, on a drive without locks
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        os.replace(blob, pointer)
    disk.sync_folder(pointer.parent)


def discard(pointer: Path) -> None:
    """Remove a file of a snapshot and its content, even if other files link to it: the content is wrong."""
    for hop in _hops(pointer):
        hop.unlink(missing_ok=True)


def leads_to(pointer: Path) -> Path | None:
    """The file that a file of a snapshot links to; None for a loop of links. Raises OSError."""
    try:
        return disk.resolve(pointer)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


def remove_file(pointer: Path) -> int:
    """Remove a file of a snapshot, and its content unless other files link to it; returns the bytes freed.

    Raises OSError, also where one of the snapshots cannot be read: it may use the content.
    """
    hops, size = _hops(pointer), pointer.stat().st_size
    snapshots = (snapshot_of(pointer) or pointer.parent).parent
    others = [path for path in names_below(snapshots) if path.is_symlink() and path != pointer]
    shared = any(leads_to(path) == disk.resolve(hops[-1]) for path in others)
    own_folder = snapshots.parent  # content outside it is shared by the cache; only its client frees it
    for hop in hops[:1] if shared else hops:
        if hop.is_relative_to(own_folder):
            hop.unlink(missing_ok=True)
    return size if not shared and hops[-1].is_relative_to(own_folder) else 0


def _hops(pointer: Path) -> list[Path]:
    """`pointer` and the chain of its link targets."""
    hops = [pointer]
    while hops[-1].is_symlink() and len(hops) < 8:
        hops.append(Path(os.path.normpath(hops[-1].parent / os.readlink(hops[-1]))))
    return hops


def read_ref(path: Path) -> str | None:
    """The commit that a branch or tag names, None without a valid one, or where this user may not read it."""
    try:
        return _commit_in(path)
    except OSError:
        return None


def _commit_in(path: Path) -> str | None:
    """As `read_ref`. Raises OSError for one that cannot be read."""
    if not path.is_file():  # a pipe would block
        return None
    try:
        with path.open(encoding="ascii") as file:
            commit = file.read(_MAX_REF_BYTES).strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return commit if COMMIT.fullmatch(commit) else None

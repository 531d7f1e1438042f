"""Check the files of local models against their recorded hashes.

The Hugging Face cache names content by its hash; the catalogue has the hashes of embedded models. Models that were
quantized here have none. A file with a wrong hash is hashed again before it is loaded. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from localq import disk
from localq.errors import LocalqError
from localq.files import catalog
from localq.files.hub import cache as hub_cache
from localq.files.hub import fetch as hub
from localq.files.hub import records as hub_records
from localq.files.local_models import LocalModel
from localq.files.safetensors_headers import read_index

OnFile = Callable[[str, int], None]  # name and bytes of the file that is hashed next

RIGHT, WRONG, MISSING, UNRECORDED = "right", "wrong", "missing", "unrecorded"


@dataclass(frozen=True)
class CheckedFile:
    """A file and its state. `ours`: localq downloaded it, so `pull` replaces it."""

    path: Path
    bytes: int
    state: str
    ours: bool = True


def check(model: LocalModel, on_file: OnFile) -> list[CheckedFile]:
    """The state of every file of `model` that localq reads.

    Raises LocalqError (exit 9) if one cannot be read.
    """
    with disk.disk_errors(model.path):
        if model.where == "hub":
            return [*_of_cache(model, on_file), *_missing(model)]
        if model.where == "embedded":
            return [_check_embedded(model.path, on_file)]
        return [CheckedFile(path, path.stat().st_size, UNRECORDED) for path in _present(model.path)]


def repair(model: LocalModel, checked: list[CheckedFile]) -> str | None:
    """The command that repairs `model`; None if nothing is wrong."""
    bad = [each for each in checked if each.state in (WRONG, MISSING)]
    if not bad and model.complete:
        return None
    wrong = [each for each in bad if each.state == WRONG]
    if all(each.ours for each in wrong):
        return f"localq pull {model.name}"
    return f"localq rm {model.name} && localq pull {model.name}"


def _present(path: Path) -> list[Path]:
    try:
        return list(hub.read_files(path))
    except LocalqError:  # a damaged index or a missing shard: hash the files that exist
        return [each for each in sorted(path.iterdir()) if each.is_file()]


def _of_cache(model: LocalModel, on_file: OnFile) -> Iterator[CheckedFile]:
    store = hub_records.users()
    if not model.path.is_file() and not model.path.is_dir():
        return
    for path in _present(model.path) if model.commit else ():
        size, content_id = path.stat().st_size, hub_cache.content_id(path)
        if content_id is None:
            yield CheckedFile(path, size, UNRECORDED, ours=False)
            continue
        on_file(path.name, size)
        right = hub_records.check(store, model.repo, content_id, path)
        if not right:
            hub_records.distrust(store, model.repo, content_id)
        yield CheckedFile(
            path, size, RIGHT if right else WRONG, hub_records.is_ours(store, model.repo, content_id, path)
        )


def _missing(model: LocalModel) -> Iterator[CheckedFile]:
    """Files of an incomplete folder that the index or the layout requires and that do not exist."""
    if model.complete or model.path.is_file():
        return
    try:
        shards = sorted(set(read_index(model.path).values()))
    except LocalqError:
        shards = []
    names = [name for name in (*shards, hub_cache.MARKER_NAME, hub_cache.TOKENIZER_NAME)
             if not (model.path / name).is_file()]  # fmt: skip
    for name in names:
        yield CheckedFile(model.path / name, 0, MISSING)


def _check_embedded(path: Path, on_file: OnFile) -> CheckedFile:
    """The state of an embedded model.

    Not `ours`: `pull` fetches it only if no file is there, so `rm` comes first.
    """
    size = path.stat().st_size
    recorded = {
        PurePosixPath(source.member).name: source.sha256
        for entry in catalog.load_catalogue()
        for source in entry.sources
        if source.kind == "pypi"
    }.get(path.name, {})
    if path.name not in recorded:
        return CheckedFile(path, size, UNRECORDED, ours=False)
    on_file(path.name, size)
    right = disk.has_content(path, recorded[path.name])
    return CheckedFile(path, size, RIGHT if right else WRONG, ours=False)

"""Check the files of local models against their recorded hashes.

The Hugging Face cache and ollama name content by its hash; the catalogue has the hashes of embedded models, and a model
that was quantized here has those in its folder (`checked_files`). `check` reads every file; before a load only files
that changed since are read. Files of LM Studio have no recorded hashes. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localq import disk
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, checked_files, gguf_choice, ollama_store, other_stores, packaged_model
from localq.files.checked_files import OnFile
from localq.files.hub import cache as hub_cache
from localq.files.hub import fetch as hub
from localq.files.hub import records as hub_records
from localq.files.safetensors_headers import read_index
from localq.wording import OnProgress

if TYPE_CHECKING:
    from localq.files.local_models import LocalModel

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
    with disk.read_errors(model.path, model.name):
        if model.where == "hub":
            return [*_of_cache(model, on_file), *_missing(model)]
        if model.where == "embedded":
            return [_check_embedded(model.path, on_file)]
        if model.where in other_stores.TITLES:
            return [_check_foreign(path, on_file) for path in gguf_choice.parts_of(model.path)]
        return [*_check_made_here(model.path, on_file)]


def repair(model: LocalModel, checked: list[CheckedFile]) -> str | None:
    """The command that repairs `model`; None if nothing is wrong."""
    bad = [each for each in checked if each.state in (WRONG, MISSING)]
    if not bad and model.complete:
        return None
    if model.where in other_stores.TITLES:
        return other_stores.repair_command(model.name)
    if model.where == "quantized" and not _can_make(model.name):
        return f"localq rm {model.name}"
    wrong = [each for each in bad if each.state == WRONG]
    if all(each.ours for each in wrong):
        return f"localq pull {model.name}"
    return f"localq rm {model.name} && localq pull {model.name}"


def _can_make(name: str) -> bool:
    """Return whether `localq pull NAME` can quantize a model of this name again."""
    try:
        return catalog.resolve(name).base is not None
    except LocalqError:
        return False


def refuse_damaged(path: Path, name: str, on_progress: OnProgress | None = None) -> None:
    """Raises what `find_damage` finds."""
    if (damage := find_damage(path, name, on_progress)) is not None:
        raise damage


def find_damage(
    path: Path, name: str, on_progress: OnProgress | None = None, *, again: bool = False
) -> LocalqError | None:
    """The error (exit 8) for a model at `path` of which a file is not what its recorded hash says, else None.

    Also for damage of what records the hashes. Files that are unchanged since they were right are not read, unless
    `again`: after a load error. Raises LocalqError (exit 9) for a file that cannot be read.
    """

    def say(file: str, size: int) -> None:
        if on_progress is not None:
            on_progress(f"checking {file}", 0, 0)

    try:
        with disk.read_errors(path, name):
            return _find_wrong(path, name, say, again=again) if path.exists() else None
    except LocalqError as error:
        if error.exit_code == ExitCode.BAD_FILE:
            return error
        raise


def _find_wrong(path: Path, name: str, on_file: OnFile, *, again: bool) -> LocalqError | None:
    """As `find_damage`, wherever the model is; looks nowhere else unless there is one. Raises OSError."""
    folder = (hub_cache.snapshot_of(path) or path.parent) if path.is_file() else path
    if folder.parent.name == "snapshots" and (repo := hub_cache.repo_of(folder.parent.parent)) is not None:

        def say(what: str, done: int, total: int) -> None:
            on_file(what.removeprefix("checking "), 0)

        wrong = hub.wrong_files(repo, path, say, again=again)
        fetched = gguf_choice.name_of(repo, None, path.relative_to(folder).as_posix()) if path.is_file() else repo
        return checked_files.damaged(name, wrong[0], f"localq pull {fetched}") if wrong else None
    if path.is_file() and (digest := ollama_store.digest_of(path)) is not None:
        wrong = checked_files.wrong_files(path.parent, {path.name: digest}, on_file, again=again)
        return other_stores.damaged(name, path) if wrong else None
    if path.is_file():
        source = packaged_model.source_of(path)
        wrong = [] if source is None else packaged_model.wrong_files(source, on_file, again=again)
        command = "" if source is None else f"localq pull {packaged_model.name_of(source)}"
        return checked_files.damaged(name, wrong[0], command) if wrong else None
    wrong = checked_files.wrong_files(path, checked_files.recorded_sums(path), on_file, again=again)
    return checked_files.damaged(name, wrong[0], f"localq pull {name}" if _can_make(name) else None) if wrong else None


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
    """The state of an embedded model."""
    size, source = path.stat().st_size, packaged_model.source_of(path)
    if source is None:
        return CheckedFile(path, size, UNRECORDED, ours=False)
    wrong = packaged_model.wrong_files(source, on_file, again=True)
    return CheckedFile(path, size, WRONG if wrong else RIGHT)


def _check_foreign(path: Path, on_file: OnFile) -> CheckedFile:
    """The state of a file of another program, which is only read."""
    size, digest = path.stat().st_size, ollama_store.digest_of(path)
    if digest is None:
        return CheckedFile(path, size, UNRECORDED, ours=False)
    wrong = checked_files.wrong_files(path.parent, {path.name: digest}, on_file, again=True)
    return CheckedFile(path, size, WRONG if wrong else RIGHT, ours=False)


def _check_made_here(path: Path, on_file: OnFile) -> Iterator[CheckedFile]:
    """The states of the files of a folder with recorded hashes, and of others that localq reads there."""
    present = _present(path) if path.is_dir() else [path]
    try:
        sums = checked_files.recorded_sums(path) if path.is_dir() else {}
    except LocalqError:
        yield CheckedFile(path / checked_files.SUMS_NAME, 0, WRONG)
        sums = {}
    wrong = checked_files.wrong_files(path, sums, on_file, again=True)
    for each in (path / name for name in sums):
        state = RIGHT if each not in wrong else WRONG if each.exists() else MISSING
        yield CheckedFile(each, each.stat().st_size if each.exists() else 0, state)
    for each in present:
        if each.name not in sums:
            yield CheckedFile(each, each.stat().st_size, UNRECORDED)

"""The models on this machine: names, formats and sizes; and their removal.

Three places: repositories in the Hugging Face cache with weights that localq reads (downloaded by any tool), unpacked
embedded models, and models quantized here. Listing reads only folders, without network or hub client. Torch-free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from localq import disk, places
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog, quantization_files, stored_format
from localq.files.hub import cache as hub_cache
from localq.files.hub import parts as download_parts
from localq.files.hub import records as hub_records
from localq.files.hub.cache import Revision
from localq.files.hub.parts import UnfinishedPart
from localq.files.hub.records import Store
from localq.files.json_files import inside, read_object

MAX_CONFIG_BYTES = 8 * 2**20


@dataclass(frozen=True)
class LocalModel:
    """One model on the disk.

    name       the catalogue's name, else org/repo, or org/repo@COMMIT for a revision without a branch
    format     a name of `format_facts.FORMATS`, or that of its config.json
    path       the folder or file; the repository's folder for a download of which nothing is usable yet
    bytes      on the disk, of all `paths_of` it; links followed, shared content of one model counted once
    where      "hub", "embedded" or "quantized"
    complete   it can be loaded
    last_used  access time in seconds since 1970, 0 without a file
    shared     another tool put some of its files into the Hugging Face cache, and may use them
    """

    name: str
    format: str
    path: Path
    bytes: int
    where: str
    complete: bool
    last_used: float
    repo: str = ""
    commit: str = ""
    shared: bool = False


def list_local() -> list[LocalModel]:
    """Every model on this machine, the most recently used first. Raises LocalqError (exit 9)."""
    with disk.disk_errors(places.hub_cache()):
        return sorted(
            (*_in_hub_cache(), *_embedded_models(), *_quantized_models()), key=lambda each: (-each.last_used, each.name)
        )


def matching(name: str) -> list[LocalModel]:
    """The local models that `name` means: a name from `ls`, or any that `catalog.resolve` accepts.

    A repository without a revision means all its revisions. Raises LocalqError: exit 4 without a match, 2 for a path.
    """
    models = list_local()
    shown = [each for each in models if each.name.casefold() == name.strip().casefold()]
    if shown:
        return shown
    target = catalog.resolve(name)
    if target.path is not None:
        why = "this is a path, not the name of a model in the Hugging Face cache or in localq's folders"
        raise usage_error(name, why, "Use a name from `localq ls`, or delete the files with other tools.")
    found = [each for each in models if _means(target, each)]
    if not found:
        why = "not on this machine"
        raise LocalqError(target.name, why, "`localq ls` lists the models on this machine.", ExitCode.UNKNOWN_MODEL)
    return found


def _means(target: catalog.Target, model: LocalModel) -> bool:
    source = target.source
    if source is not None and source.kind == "pypi":
        return model.where == "embedded" and model.path.name == PurePosixPath(source.member).name
    if target.kind == "repo" and target.repo is not None:
        pinned = target.revision if source is None else None
        return _same_repo(model, target.repo, pinned)
    if source is not None:
        return _same_repo(model, source.repo, source.revision)
    return model.where == "quantized" and model.name == target.name


def _same_repo(model: LocalModel, repo: str, revision: str | None) -> bool:
    if model.where != "hub" or model.repo.casefold() != repo.casefold():
        return False
    folder = hub_cache.snapshot_folder(model.repo, revision) if revision else None
    return revision is None or (folder is not None and folder.name == model.commit) or not model.commit


# ---- the Hugging Face cache


def _in_hub_cache() -> Iterator[LocalModel]:
    folders, parts = hub_cache.repos(), unfinished_downloads()
    for repo in dict.fromkeys((*folders, *parts)):
        revisions = hub_cache.revisions(repo)
        paths = [*hub_cache.incomplete_files(repo), *(part.path for part in parts.get(repo, ()))]
        left = disk.total_bytes(paths)
        rows = [row for each in revisions for row in _of_revision(each, bool(left), len(revisions) == 1)]
        if rows and left:
            owner = next((row for row in rows if not row.complete), rows[0])
            rows[rows.index(owner)] = dataclasses.replace(owner, bytes=owner.bytes + left)
        elif left:
            path = folders.get(repo, paths[0])
            with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                rows = [LocalModel(repo, stored_format.UNKNOWN, path, left, "hub", False, path.stat().st_mtime, repo)]
        yield from rows


def unfinished_downloads() -> dict[str, list[UnfinishedPart]]:
    """Unfinished downloads by repository, without those that do not state their repository yet."""
    found: dict[str, list[UnfinishedPart]] = {}
    for part in download_parts.unfinished_parts(places.downloads_dir()):
        if catalog.is_repo(part.repo):  # it becomes part of paths
            found.setdefault(part.repo, []).append(part)
    return found


def _of_revision(revision: Revision, cut_off: bool, alone: bool) -> list[LocalModel]:
    """The models of a revision: its .gguf files, or its folder. Empty without weights that localq reads."""
    folder, store, of = revision.folder, hub_records.users(), (revision.repo, revision.commit)
    stats = list(hub_cache.content(folder))
    used = max((each.st_atime for each in stats), default=0.0)
    rows = []
    for path in hub_cache.gguf_files(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            stat, along = path.stat(), _along(path) or []
            name, size = _hub_name(revision, alone, path.name), sum(each.stat().st_size for each in (path, *along))
            shared = any(_is_shared(store, revision.repo, each) for each in (path, *along))
            rows.append(LocalModel(name, "gguf", path, size, "hub", True, stat.st_atime, *of, shared))
    complete = hub_cache.is_complete(folder)
    # Tokenizer and some shards without the rest: an interrupted download, or another kind of model.
    unfinished = cut_off or ((folder / hub_cache.TOKENIZER_NAME).exists() and any(folder.glob("*.safetensors")))
    if complete or (unfinished and not rows):
        size = sum(each.st_size for each in stats) - sum(row.bytes for row in rows)
        name = _hub_name(revision, alone)
        shared = any(_is_shared(store, revision.repo, path) for path in folder.iterdir() if path.is_file())
        rows.append(LocalModel(name, _format_of(folder), folder, size, "hub", complete, used, *of, shared))
    return rows


def _is_shared(store: Store, repo: str, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        content_id = hub_cache.content_id(path)
        return content_id is None or not hub_records.is_ours(store, repo, content_id, path)
    return False  # removed meanwhile


def _along(path: Path) -> list[Path] | None:
    """The small files next to the .gguf file of a snapshot; None if the snapshot has other files too."""
    if not hub_cache.COMMIT.fullmatch(path.parent.name):
        return []  # a folder, or a file elsewhere
    from localq.files.hub import fetch as hub  # start-up cost: only .gguf files of snapshots need it

    others = [each for each in sorted(path.parent.rglob("*")) if each.is_file() and each != path]
    small = all(hub.SMALL_FILES.fullmatch(each.relative_to(path.parent).as_posix()) for each in others)
    return others if small else None


def _hub_name(revision: Revision, alone: bool, file: str = "") -> str:
    """The catalogue's name if it resolves to this revision, else the repository's."""
    for entry in catalog.load_catalogue():
        for source in entry.sources:
            here = source.revision == revision.commit or source.revision in revision.refs
            if source.repo.casefold() != revision.repo.casefold() or not here:
                continue
            this_file = file in source.files if file and source.files else bool(file) == (source.format == "gguf")
            if this_file and entry.source(source.format) == source:
                return entry.name if source.format == entry.default_format else f"{entry.name}@{source.format}"
    return revision.repo if revision.refs or alone else f"{revision.repo}@{revision.commit[:12]}"


def _format_of(folder: Path) -> str:
    try:
        path = inside(folder, hub_cache.MARKER_NAME)
        config = read_object(path, MAX_CONFIG_BYTES) if path else {}
        if (described := quantization_files.describe(folder, config)) is not None:
            config["quantization_config"] = described
    except LocalqError:  # listed anyway, so that `rm` can remove it
        return stored_format.UNKNOWN
    return stored_format.format_of_config(config)


# ---- the other two places


def _embedded_models() -> Iterator[LocalModel]:
    names = {
        PurePosixPath(source.member).name: (entry.name, entry.default_format)
        for entry in catalog.load_catalogue()
        for source in entry.sources
        if source.kind == "pypi"
    }
    for path in sorted(places.embedded_dir().glob("*.gguf")):
        name, default = names.get(path.name, (path.stem, "gguf"))
        name = name if default == "gguf" else f"{name}@gguf"
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            stat = path.stat()
            yield LocalModel(name, "gguf", path, stat.st_size, "embedded", True, stat.st_atime)


def _quantized_models() -> Iterator[LocalModel]:
    for folder in sorted(places.quantized_dir().glob("*")):
        if not folder.is_dir():
            continue
        stats = list(hub_cache.content(folder))
        size, used = sum(each.st_size for each in stats), max((each.st_atime for each in stats), default=0.0)
        complete = hub_cache.is_complete(folder)
        format = _format_of(folder) if complete else folder.name.rpartition("@")[2]
        yield LocalModel(folder.name, format, folder, size, "quantized", complete, used)


# ---- removing


def remove(models: Iterable[LocalModel]) -> int:
    """Remove `models`, but no file that another model needs; returns the bytes freed.

    Raises LocalqError (exit 9).
    """
    freed = 0
    for model in models:
        with disk.disk_errors(model.path):
            if model.where == "hub":
                freed += _remove_from_hub_cache(model)
            elif model.path.is_dir():
                freed += model.bytes
                shutil.rmtree(model.path)
            else:
                freed += model.bytes
                model.path.unlink()
    return freed


def paths_of(model: LocalModel) -> list[Path]:
    """The folder or files that `remove` deletes."""
    return [model.path, *(_along(model.path) or ())]


def _remove_from_hub_cache(model: LocalModel) -> int:
    together = [each for each in list_local() if (each.repo, each.commit) == (model.repo, model.commit)]
    if len(together) > 1 or _along(model.path) is None:  # the snapshot has other files: remove these only
        files = [model.path] if model.path.is_file() else [each for each in model.path.iterdir() if each.is_file()]
        others = {each.path for each in together if each != model}
        return sum(hub_cache.remove_file(path) for path in files if path not in others)
    folder, revisions = hub_cache.repo_folder(model.repo), hub_cache.revisions(model.repo)
    parts = unfinished_downloads().get(model.repo, [])
    if any(part.busy for part in parts):
        why = "another localq process is downloading this model"
        raise LocalqError(model.name, why, "Stop that process, or wait until it has finished.")
    incomplete = hub_cache.incomplete_files(model.repo)
    left = disk.total_bytes(incomplete)
    freed = _delete_revision(model) if model.commit else 0
    if all(each.commit == model.commit for each in revisions):  # the last revision: remove the whole repository
        if folder.is_dir():  # an unfinished download, or a state that the client leaves alone
            left = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
            shutil.rmtree(folder)
        shutil.rmtree(hub_records.users().records / folder.name, ignore_errors=True)
        return freed + left + sum(download_parts.remove(part) for part in parts)
    if model.path.exists():
        why = "this entry of the Hugging Face cache is damaged, and huggingface_hub cannot remove it"
        raise LocalqError(str(model.path), why, f"Delete the folder {folder}.", ExitCode.DISK)
    if not model.complete:
        for path in incomplete:
            path.unlink(missing_ok=True)
        freed += left + sum(download_parts.remove(part) for part in parts)
    return freed


def _delete_revision(model: LocalModel) -> int:
    """Delete one revision through the hub's client, which knows the content shared with other revisions."""
    import huggingface_hub  # start-up cost: 0.4 s

    cache = huggingface_hub.scan_cache_dir(places.hub_cache())
    repos = frozenset(each for each in cache.repos if each.repo_type == "model" and each.repo_id == model.repo)
    strategy = dataclasses.replace(cache, repos=repos).delete_revisions(model.commit)
    strategy.execute()
    return strategy.expected_freed_size

"""The models on this machine: names, formats and sizes (their removal: `removal`).

Four places: repositories in the Hugging Face cache with weights that localq reads (downloaded by any tool), unpacked
embedded models, models quantized here, and GGUF models of other programs (`other_stores`). Listing reads only folders,
without network or hub client. What this user may not read, or is damaged, is told apart from the others, which are
listed. Torch-free.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar, TypeVarTuple

from localq import disk, places
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog, gguf_choice, other_stores, quantization_files, stored_format
from localq.files.gguf_choice import GgufChoice
from localq.files.hub import cache as hub_cache
from localq.files.hub import parts as download_parts
from localq.files.hub import records as hub_records
from localq.files.hub.cache import Revision
from localq.files.hub.parts import UnfinishedPart
from localq.files.hub.records import Store
from localq.files.json_files import inside, read_object

MAX_CONFIG_BYTES = 8 * 2**20
Arguments = TypeVarTuple("Arguments")
Found = TypeVar("Found")


@dataclass(frozen=True)
class LocalModel:
    """One model on the disk.

    name       the catalogue's name, else org/repo, or org/repo@COMMIT for a revision without a branch; with `:TAG` or
               `/FILE` for a GGUF model; of another program as in `other_stores`
    format     a name of `format_facts.FORMATS`, or that of its config.json
    path       the folder or file, of a model in parts the first; the repository's folder for a download of which
               nothing is usable yet
    bytes      on the disk, of all its files; links followed, shared content of one model counted once
    where      "hub", "embedded", "quantized", or the program whose file it is: "ollama", "lm-studio"
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


@dataclass(frozen=True)
class Unreadable:
    """A model or a folder of models that cannot be read: its name, repository or folder, and the error."""

    name: str
    error: LocalqError


@dataclass(frozen=True)
class Inventory:
    """The models on this machine, the most recently used first, and what cannot be read."""

    models: list[LocalModel]
    unreadable: list[Unreadable]


def inventory(*, others: bool = True) -> Inventory:
    """Return the models on this machine. others: also those of other programs."""
    unreadable: list[Unreadable] = []
    cache, embedded, quantized = places.hub_cache(), places.embedded_dir(), places.quantized_dir()
    folders = dict(_look(unreadable, "Hugging Face cache", cache, lambda: hub_cache.repos().items()))
    parts = unfinished_downloads()
    found: list[LocalModel] = []
    for repo in dict.fromkeys((*folders, *parts)):
        folder, begun = folders.get(repo), parts.get(repo, [])
        found += _look(unreadable, repo, folder or places.downloads_dir(), _of_repo, repo, folder, begun)
    found += _look(unreadable, "embedded models", embedded, _embedded_models)
    for folder in _look(unreadable, "quantized models", quantized, hub_cache.children, quantized):
        found += _look(unreadable, folder.name, folder, _quantized_model, folder)
    found += _of_other_programs(unreadable) if others else ()
    return Inventory(sorted(found, key=lambda each: (-each.last_used, each.name)), unreadable)


def _look(
    unreadable: list[Unreadable], name: str, path: Path, find: Callable[[*Arguments], Iterable[Found]],
    *arguments: *Arguments,
) -> list[Found]:  # fmt: skip
    """Return the results of `find`; on a read error return none, and add the error to `unreadable`."""
    try:
        return list(find(*arguments))
    except FileNotFoundError:  # removed meanwhile
        return []
    except OSError as error:
        unreadable.append(Unreadable(name, disk.read_error(path, error, name)))
        return []


def list_local(*, others: bool = True) -> list[LocalModel]:
    """Every model on this machine that can be read, the most recently used first; others: as for `inventory`."""
    return inventory(others=others).models


def matching(name: str) -> list[LocalModel]:
    """The local models that `name` means: a name from `ls`, or any that `catalog.resolve` accepts.

    A repository without a revision means all its revisions. Raises LocalqError: exit 4 without a match, 9 for one that
    cannot be read, 2 for a path.
    """
    here = inventory()
    models = here.models
    shown = [each for each in models if each.name.casefold() == name.strip().casefold()]
    if shown:
        return shown
    closed = {each.name.casefold(): each for each in here.unreadable}
    if name.strip().casefold() in closed:
        raise closed[name.strip().casefold()].error
    target = catalog.resolve(name)
    if target.path is not None and not target.store:
        why = "this is a path, not a model name"
        raise usage_error(name, why, "Use a name from `localq ls`, or delete the files yourself.")
    found = [each for each in models if _means(target, each)]
    repo = target.repo or (target.source.repo if target.source is not None else "")
    if not found and repo.casefold() in closed:
        raise closed[repo.casefold()].error
    if not found:
        why = "not on this machine"
        raise LocalqError(
            target.name, why, "To list the models on this machine, run `localq ls`.", ExitCode.UNKNOWN_MODEL
        )
    return found


def _means(target: catalog.Target, model: LocalModel) -> bool:
    source = target.source
    if target.store:
        return model.where == target.store and model.name == target.name
    if source is not None and source.kind == "pypi":
        return model.where == "embedded" and model.path.name == PurePosixPath(source.member).name
    if target.kind == "repo" and target.repo is not None:
        pinned = target.revision if source is None else None
        return _same_repo(model, target.repo, pinned) and (not target.choice or _is_choice(model, target.choice))
    if source is not None:
        return _same_repo(model, source.repo, source.revision)
    return model.where == "quantized" and model.name == target.name


def _is_choice(model: LocalModel, choice: str) -> bool:
    """Return whether a GGUF model of a repository is the one with this tag or file name."""
    folder = hub_cache.snapshot_of(model.path)
    if folder is None or model.format != "gguf":
        return False
    names = [path.relative_to(folder).as_posix() for path in gguf_choice.parts_of(model.path)]
    return any(gguf_choice.means(choice, each) for each in gguf_choice.choices(names, incomplete=True))


def _same_repo(model: LocalModel, repo: str, revision: str | None) -> bool:
    if model.where != "hub" or model.repo.casefold() != repo.casefold():
        return False
    folder = hub_cache.snapshot_folder(model.repo, revision) if revision else None
    return revision is None or (folder is not None and folder.name == model.commit) or not model.commit


# ---- the Hugging Face cache


def _of_repo(repo: str, folder: Path | None, parts: list[UnfinishedPart]) -> list[LocalModel]:
    """The models of a repository; folder: None if only downloads of it have begun."""
    revisions = hub_cache.revisions(repo)
    paths = [*hub_cache.incomplete_files(repo), *(part.path for part in parts)]
    left = disk.total_bytes(paths)
    rows = [row for each in revisions for row in _of_revision(each, bool(left), len(revisions) == 1)]
    if rows and left:
        owner = next((row for row in rows if not row.complete), rows[0])
        rows[rows.index(owner)] = dataclasses.replace(owner, bytes=owner.bytes + left)
    elif left:
        path = folder or paths[0]
        used = path.stat().st_mtime
        rows = [LocalModel(repo, stored_format.UNKNOWN, path, left, "hub", False, used, repo)]
    return rows


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
    for each in gguf_choice.choices(hub_cache.gguf_names(folder), incomplete=True):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            path = folder / each.files[0]
            stat, files = path.stat(), [*gguf_choice.parts_of(path), *(files_along(path) or ())]
            name, size = _gguf_name(revision, alone, each), sum(file.stat().st_size for file in files)
            shared = any(_is_shared(store, revision.repo, file) for file in files)
            whole = gguf_choice.is_whole(each.files)
            rows.append(LocalModel(name, "gguf", path, size, "hub", whole, stat.st_atime, *of, shared))
    complete = hub_cache.is_complete(folder)
    # Tokenizer and some shards without the rest: an interrupted download, or another kind of model.
    names = {path.name for path in hub_cache.children(folder)}
    has_weights = any(name.endswith(".safetensors") for name in names)
    unfinished = cut_off or (hub_cache.TOKENIZER_NAME in names and has_weights)
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


def files_along(path: Path) -> list[Path] | None:
    """The small files next to the GGUF model of a snapshot; None if the snapshot has other files too."""
    folder = hub_cache.snapshot_of(path)
    if folder is None:
        return []  # a folder, or a file elsewhere
    from localq.files.hub import layout  # start-up cost: only .gguf files of snapshots need it

    parts = gguf_choice.parts_of(path)
    others = [each for each in hub_cache.files_below(folder) if each not in parts]
    small = all(layout.SMALL_FILES.fullmatch(each.relative_to(folder).as_posix()) for each in others)
    return others if small else None


def _gguf_name(revision: Revision, alone: bool, choice: GgufChoice) -> str:
    """The name of a GGUF model; the repository's for the only one, if its file states no quantization."""
    name = _hub_name(revision, alone, choice.files[0])
    repo, _, commit = name.partition("@")
    if repo != revision.repo or (not choice.tag and len(hub_cache.gguf_names(revision.folder)) == 1):
        return name
    return choice.name(repo, commit or None)


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


# ---- the other places


def _embedded_models() -> Iterator[LocalModel]:
    names = {
        PurePosixPath(source.member).name: (entry.name, entry.default_format)
        for entry in catalog.load_catalogue()
        for source in entry.sources
        if source.kind == "pypi"
    }
    for path in hub_cache.gguf_files(places.embedded_dir()):
        name, default = names.get(path.name, (path.stem, "gguf"))
        name = name if default == "gguf" else f"{name}@gguf"
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            stat = path.stat()
            yield LocalModel(name, "gguf", path, stat.st_size, "embedded", True, stat.st_atime)


def _quantized_model(folder: Path) -> list[LocalModel]:
    if not folder.is_dir():
        return []
    stats = list(hub_cache.content(folder))
    size, used = sum(each.st_size for each in stats), max((each.st_atime for each in stats), default=0.0)
    complete = hub_cache.is_complete(folder)
    format = _format_of(folder) if complete else folder.name.rpartition("@")[2]
    return [LocalModel(folder.name, format, folder, size, "quantized", complete, used)]


def _of_other_programs(unreadable: list[Unreadable]) -> Iterator[LocalModel]:
    """The GGUF models of other programs; what cannot be used of them is added to `unreadable`."""
    for each in other_stores.scan(lambda name, error: unreadable.append(Unreadable(name, error))):
        try:
            stats = [path.stat() for path in each.paths]
        except OSError:  # removed meanwhile
            continue
        size, used = sum(stat.st_size for stat in stats), max(stat.st_atime for stat in stats)
        yield LocalModel(each.name, "gguf", each.path, size, each.store, True, used, shared=True)

"""Remove models from this machine: what nothing else uses, and of a link the link alone.

Models of other programs are refused. Torch-free.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from localq import disk, places
from localq.errors import ExitCode, LocalqError
from localq.files import checked_files, gguf_choice, other_stores
from localq.files.hub import cache as hub_cache
from localq.files.hub import connection
from localq.files.hub import parts as download_parts
from localq.files.hub import records as hub_records
from localq.files.local_models import LocalModel, files_along, list_local, unfinished_downloads


def remove(models: Iterable[LocalModel]) -> int:
    """Remove `models`, but no file that another model needs; returns the bytes freed.

    Of a model that is a link only the link is removed. Raises LocalqError: exit 9, and as `refuse_foreign`.
    """
    freed = 0
    for model in models:
        refuse_foreign([model])
        with disk.disk_errors(model.path):
            if model.where == "hub":
                freed += _remove_from_hub_cache(model)
                continue
            freed += bytes_freed(model)
            checked_files.forget(model.path if model.where == "quantized" else model.path.parent)
            if model.path.is_dir() and not model.path.is_symlink():
                shutil.rmtree(model.path)
            else:
                model.path.unlink(missing_ok=True)
    return freed


def refuse_foreign(models: Iterable[LocalModel]) -> None:
    """Raises LocalqError (exit 2) for a model of another program."""
    for model in models:
        if model.where in other_stores.TITLES:
            raise other_stores.refusal(model.where, model.name)


def link_of(model: LocalModel) -> Path | None:
    """The link that a model is: its folder or file, or its repository's folder; None for one that is here."""
    candidates = [model.path]
    if model.where == "hub":  # files of a snapshot are links to their content
        candidates = [hub_cache.repo_folder(model.repo), hub_cache.snapshot_of(model.path) or model.path]
    return next((path for path in candidates if path.is_symlink()), None)


def bytes_freed(model: LocalModel) -> int:
    """The bytes that `remove` frees at most: none of a link, since what it leads to stays."""
    return model.bytes if link_of(model) is None else 0


def paths_of(model: LocalModel) -> list[str]:
    """Return the paths that `remove` deletes, in words: the folder or files, or the link."""
    link = link_of(model)
    if link is not None:
        return [f"{link} (a link; its target {os.readlink(link)} is kept)"]
    return [*map(str, gguf_choice.parts_of(model.path)), *map(str, files_along(model.path) or ())]


def _remove_from_hub_cache(model: LocalModel) -> int:
    folder = hub_cache.repo_folder(model.repo)
    if (link := link_of(model)) is not None:
        link.unlink(missing_ok=True)
        if link == folder:
            shutil.rmtree(hub_records.users().records / folder.name, ignore_errors=True)
        else:
            _delete_refs(model)
        return 0
    together = [each for each in list_local(others=False) if (each.repo, each.commit) == (model.repo, model.commit)]
    if len(together) > 1 or files_along(model.path) is None:  # the snapshot has other files: remove these only
        is_file, found = model.path.is_file(), model.path
        files = gguf_choice.parts_of(found) if is_file else [each for each in found.iterdir() if each.is_file()]
        others = {part for each in together if each != model for part in gguf_choice.parts_of(each.path)}
        return sum(hub_cache.remove_file(path) for path in files if path not in others)
    revisions = hub_cache.revisions(model.repo)
    parts = unfinished_downloads().get(model.repo, [])
    if any(part.busy for part in parts):
        why = "another localq process is downloading this model"
        raise LocalqError(model.name, why, "Stop that process, or wait until it has finished.")
    incomplete = hub_cache.incomplete_files(model.repo)
    left = disk.total_bytes(incomplete)
    freed = _delete_revision(model) if model.commit and model.path.exists() else 0
    if all(each.commit == model.commit for each in revisions):  # the last revision: remove the whole repository
        if folder.is_dir():  # an unfinished download, or a state that the client leaves alone
            left = sum(path.lstat().st_size for path in hub_cache.files_below(folder) if not path.is_symlink())
            shutil.rmtree(folder)
        shutil.rmtree(hub_records.users().records / folder.name, ignore_errors=True)
        return freed + left + sum(download_parts.remove(part) for part in parts)
    if model.path.exists():
        why = "this entry in the Hugging Face cache is damaged, and huggingface_hub cannot remove it"
        raise LocalqError(str(model.path), why, f"Delete the folder {folder}.", ExitCode.DISK)
    if not model.complete:
        for path in incomplete:
            path.unlink(missing_ok=True)
        freed += left + sum(download_parts.remove(part) for part in parts)
    return freed


def _delete_revision(model: LocalModel) -> int:
    """Delete one revision through the hub's client, which knows the content shared with other revisions.

    Content outside the repository's folder stays: a file of the snapshot may be a link of the user's.
    """
    try:
        cache = connection.library().scan_cache_dir(places.hub_cache())
    except (OSError, RuntimeError):  # of another repository, or a loop of links: the client reads them all
        return _delete_files(model)
    repos = frozenset(each for each in cache.repos if each.repo_type == "model" and each.repo_id == model.repo)
    strategy = dataclasses.replace(cache, repos=repos).delete_revisions(model.commit)
    of_commit = [at for each in repos for at in each.revisions if at.commit_hash == model.commit]
    found = {file.blob_path for at in of_commit for file in at.files}
    whole = disk.resolve(places.hub_cache())
    inside = frozenset(path for path in strategy.blobs if any(path.is_relative_to(each.repo_path) for each in repos))
    staying = sum(path.stat().st_size for path in found if not disk.resolve(path).is_relative_to(whole))
    dataclasses.replace(strategy, blobs=inside).execute()
    freed: int = strategy.expected_freed_size - staying
    return max(freed, 0)


def _delete_files(model: LocalModel) -> int:
    """Delete the files of one revision, its branches and tags; content of the whole cache's store stays there."""
    folder = hub_cache.snapshot_of(model.path) or model.path
    freed = sum(hub_cache.remove_file(path) for path in hub_cache.files_below(folder))
    shutil.rmtree(folder)
    _delete_refs(model)
    return freed


def _delete_refs(model: LocalModel) -> None:
    """Delete the branches and tags that name the removed commit: other tools call one without its commit damaged."""
    for path in hub_cache.files_below(hub_cache.repo_folder(model.repo) / "refs"):
        if hub_cache.read_ref(path) == model.commit:
            path.unlink(missing_ok=True)

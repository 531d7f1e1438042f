"""The store of LM Studio: its GGUF models, PUBLISHER/REPO/FILE.gguf in `~/.lmstudio/models`. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from localq.errors import LocalqError, bad_file
from localq.files import gguf_choice
from localq.files.store_files import OnUnreadable, StoreModel, below, below_home, check_magic

STORE = "lm-studio"


def folders() -> list[Path]:
    """The folders of LM Studio's models that may exist: today's, and that of older versions."""
    return [*below_home(".lmstudio/models"), *below_home(".cache/lm-studio/models")]


def scan(on_unreadable: OnUnreadable) -> Iterator[StoreModel]:
    """All models. Reads four bytes of each file."""
    for root in folders():
        for repo in below(root, 2, STORE, on_unreadable):
            names = [path.name for path in below(repo, 1, STORE, on_unreadable)]
            for each in gguf_choice.choices(names, incomplete=True):
                paths = tuple(repo / name for name in each.files)
                name = _name(root, paths[0])
                try:
                    yield _of_files(name, paths)
                except LocalqError as error:
                    on_unreadable(name, error)


def find(rest: str) -> StoreModel | None:
    """The model PUBLISHER/REPO/FILE; None for an unknown one. Raises LocalqError as `other_stores.find`."""
    parts = rest.split("/")
    if len(parts) != 3 or any(each in ("", ".", "..") or "\0" in each for each in parts):
        return None
    for path in (root.joinpath(*parts) for root in folders()):
        if os.path.lexists(path) and gguf_choice.is_model(path.name):
            paths = tuple(gguf_choice.parts_of(path))
            return _of_files(f"{STORE}/{rest}", paths)
    return None


def _name(root: Path, path: Path) -> str:
    return f"{STORE}/{path.relative_to(root).as_posix()}"


def _of_files(name: str, paths: tuple[Path, ...]) -> StoreModel:
    """The model in these files. Raises LocalqError about `name`."""
    again = "Download it again in LM Studio."
    if not gguf_choice.is_whole([path.name for path in paths]):
        raise bad_file(name, f"incomplete: some parts are missing (found {len(paths)})", again)
    for path in paths:
        check_magic(path, name, again)
    return StoreModel(name, STORE, paths)

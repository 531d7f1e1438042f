"""Detection of a separate output head in files whose config.json says that the embedding is the head.

The weights decide, as in transformers: a stored head that differs from the embedding is what the model was trained
with, and a quantized head is another matrix anyway. Torch-free.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from localq.errors import LocalqError
from localq.files.architecture import Architecture
from localq.files.safetensors_headers import Entry, Header

_KEY = re.compile(r"(?:(?:model|language_model|text_model)\.)*(lm_head|embed_tokens)\.(.+)")
_BLOCK = 16 * 2**20  # bytes compared at a time


def untied(config: dict[str, Any], headers: Iterable[Header], compare: bool = True) -> dict[str, Any]:
    """`config`, with tie_word_embeddings false where the head in the files of `headers` is not the embedding.

    compare: read both matrices; without, as where the files are not here yet, any stored head counts as another one.
    """
    inner = config.get("text_config")
    parts = [config, inner] if isinstance(inner, dict) else [config]
    stated = [part.get("tie_word_embeddings") for part in parts]
    if not all(each is None or isinstance(each, bool) for each in stated):
        return config  # reported where the model is loaded
    if all(each is False for each in stated) or not _may_be_tied(config):
        return config
    if not _has_own_head(list(headers), compare):
        return config
    changed = {**config, "tie_word_embeddings": False}
    if isinstance(inner, dict):
        changed["text_config"] = {**inner, "tie_word_embeddings": False}
    return changed


def _may_be_tied(config: dict[str, Any]) -> bool:
    """False for a flat file whose head is not the embedding, stated or by default of its family."""
    try:
        return isinstance(config.get("text_config"), dict) or Architecture.from_config(config).tied
    except (LocalqError, TypeError, ValueError):  # reported where the model is loaded
        return False


def _has_own_head(headers: list[Header], compare: bool) -> bool:
    found: dict[str, dict[str, tuple[Path, Entry]]] = {"lm_head": {}, "embed_tokens": {}}
    for header in headers:
        for key, entry in header.tensors.items():
            if match := _KEY.fullmatch(key):
                found[match[1]][match[2]] = (header.path, entry)
    parts, table = found["lm_head"], found["embed_tokens"].get("weight")
    if not parts.keys() - {"bias"} or table is None:  # without an embedding, the head is the embedding too
        return False
    if parts.keys() - {"bias"} != {"weight"}:
        return True  # quantized
    head = parts["weight"]
    if (head[1].dtype, head[1].shape) != (table[1].dtype, table[1].shape):
        return True
    return not (compare and _same_bytes(*(_Range(str(path), entry.begin, entry.nbytes, path.stat().st_mtime_ns)
                                          for path, entry in (head, table))))  # fmt: skip


class _Range(NamedTuple):
    """Bytes of a file, with what tells a changed file."""

    path: str
    begin: int
    nbytes: int
    modified_ns: int


@functools.lru_cache(maxsize=16)  # front ends open a model several times
def _same_bytes(first: _Range, second: _Range) -> bool:
    with open(first.path, "rb") as head, open(second.path, "rb") as table:
        for offset in range(0, first.nbytes, _BLOCK):
            size = min(_BLOCK, first.nbytes - offset)
            ours, theirs = (
                os.pread(file.fileno(), size, each.begin + offset) for file, each in ((head, first), (table, second))
            )
            if ours != theirs:
                return False
    return True

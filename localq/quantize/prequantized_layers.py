"""Layers that were quantized before, from the same source: 2 bits without the hours of the search.

A folder holds `layers.safetensors`, every tensor of every layer by its name in the checkpoint, and `made.json`: what
they were made from (sha256 of the weights, seed of the rotations) and sha256 of the tensors. A conversion
that is given one (`localq quantize --layers`) writes them as they are and makes only the embedding and the head, which
are the source's own, turned. The model that comes with localq has such a folder in `localq/data/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localq.disk import sha256_of
from localq.errors import bad_file, usage_error
from localq.files.hub.shards import Shards
from localq.files.json_files import read_object
from localq.files.model_folder import ModelFiles
from localq.files.safetensors_headers import shard_paths
from localq.quantize.output.shards import Shard, ShardWriter

TENSORS, RECORD = "layers.safetensors", "made.json"
MAX_RECORD_BYTES = 2**16
AGAIN = "Fetch localq again, or quantize without --layers."


@dataclass(frozen=True)
class ReadyLayers:
    """What `made.json` says.

    sha256         of layers.safetensors
    source_sha256  see `source_sha256`
    seed           of the rotations
    """

    folder: Path
    sha256: str
    source_sha256: str
    seed: int


def open_ready(folder: Path) -> ReadyLayers:
    """Raises LocalqError: exit 2 where `folder` is none, 8 where its record is damaged."""
    if not (folder / RECORD).is_file() or not (folder / TENSORS).is_file():
        step = f"Give a folder with {TENSORS} and {RECORD}."
        raise usage_error(f"--layers {folder}", "it holds no quantized layers", step)
    record = read_object(folder / RECORD, MAX_RECORD_BYTES)
    sha256, source, seed = (record.get(key) for key in ("sha256", "source_sha256", "seed"))
    if not isinstance(sha256, str) or not isinstance(source, str) or type(seed) is not int:
        raise bad_file(str(folder / RECORD), "sha256, source_sha256 or seed is missing or no such value", AGAIN)
    return ReadyLayers(folder, sha256, source, seed)


def check(ready: ReadyLayers, source: ModelFiles, shards: Shards | None = None) -> None:
    """Before anything is written. shards: where the weights of `source` are, when they are not on the disk.

    Raises LocalqError: exit 2 unless `source` is what the layers were made from, 8 unless they are what was recorded.
    """
    if sha256_of(ready.folder / TENSORS) != ready.sha256:
        raise bad_file(str(ready.folder / TENSORS), "its sha256 is not the one that was recorded", AGAIN)
    if source_sha256(source, shards) != ready.source_sha256:
        why = f"{source.name} is not the model that they were made from"
        raise usage_error(f"--layers {ready.folder}", why, "Leave out --layers.")


def adopt(ready: ReadyLayers, writer: ShardWriter, shards: Sequence[Shard]) -> None:
    """Write those of `shards`, the layers', that are not there yet. Raises LocalqError (exit 8) for other tensors."""
    from safetensors import SafetensorError, safe_open  # reads whole tensors without a checkpoint around them

    path = ready.folder / TENSORS
    pending = {shard.name for shard in writer.pending()}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for shard in shards:
                if missing := set(shard.tensors) - names:
                    raise bad_file(str(path), f"{min(missing)} is missing", AGAIN)
                if shard.name in pending:
                    writer.write(shard, ((name, file.get_tensor(name)) for name in shard.tensors))
    except (SafetensorError, ValueError) as error:  # no safetensors file, or tensors of another shape
        raise bad_file(str(path), str(error), AGAIN) from None


def source_sha256(source: ModelFiles, shards: Shards | None = None) -> str:
    """Of the weights of a model: of its one file; of several, of their hashes one behind the other, by name."""
    if shards is not None:
        hashes = [shards.sha256(name) for name in sorted(shards.names)]
    else:
        paths = [source.path] if source.kind == "gguf" else shard_paths(source.path).values()
        hashes = [sha256_of(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

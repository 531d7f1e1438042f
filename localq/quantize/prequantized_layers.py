"""Layers that are already quantized, from the same source: 2 bits without the hours of the search.

A folder holds `layers.safetensors`, every tensor of every layer by its checkpoint name, and `made.json`: sha256 of the
source's weights, seed of the rotations, and sha256 of the tensors. A conversion with such a folder (`localq quantize
--layers`) copies the layers and converts only embedding and head, which are the source's, rotated. The packaged model
has such a folder in `localq/data/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localq.disk import sha256_of
from localq.errors import LocalqError, bad_file, usage_error
from localq.files.hub.shards import Shards
from localq.files.json_files import read_object
from localq.files.model_folder import ModelFiles
from localq.files.safetensors_headers import read_header
from localq.quantize.output.shards import Shard, ShardWriter

TENSORS, RECORD = "layers.safetensors", "made.json"
MAX_RECORD_BYTES = 2**16
AGAIN = "Reinstall localq, or quantize without --layers."


@dataclass(frozen=True)
class PrequantizedLayers:
    """A folder of quantized layers, with the fields of its `made.json`.

    sha256         of layers.safetensors
    source_sha256  see `source_sha256`
    seed           of the rotations
    """

    folder: Path
    sha256: str
    source_sha256: str
    seed: int


def open_layers(folder: Path) -> PrequantizedLayers:
    """Open `folder`. Raises LocalqError: exit 2 where it holds no layers, 8 where its record is damaged."""
    if not (folder / RECORD).is_file() or not (folder / TENSORS).is_file():
        step = f"Use a folder that contains {TENSORS} and {RECORD}."
        raise usage_error(f"--layers {folder}", "the folder contains no quantized layers", step)
    record = read_object(folder / RECORD, MAX_RECORD_BYTES)
    sha256, source, seed = (record.get(key) for key in ("sha256", "source_sha256", "seed"))
    if not isinstance(sha256, str) or not isinstance(source, str) or type(seed) is not int:
        raise bad_file(str(folder / RECORD), "sha256, source_sha256 or seed is missing or malformed", AGAIN)
    return PrequantizedLayers(folder, sha256, source, seed)


def check(ready: PrequantizedLayers, source: ModelFiles, shards: Shards | None = None) -> None:
    """Check the layers against their record and `source`; shards: its weights, where they are not on disk.

    Raises LocalqError: exit 2 unless the layers belong to `source`, 8 where they differ from their record.
    """
    if sha256_of(ready.folder / TENSORS) != ready.sha256:
        raise bad_file(str(ready.folder / TENSORS), "the SHA-256 hash does not match the recorded one", AGAIN)
    if source_sha256(source, shards) != ready.source_sha256:
        why = f"the layers were not quantized from {source.name}"
        raise usage_error(f"--layers {ready.folder}", why, "Remove --layers.")


def copy_layers(ready: PrequantizedLayers, writer: ShardWriter, shards: Sequence[Shard]) -> None:
    """Write the pending `shards` of the layers. Raises LocalqError (exit 8) for missing or other tensors."""
    from localq.formats.tensor_files import each_tensor  # torch: only where layers are copied

    path = ready.folder / TENSORS
    pending = {shard.name for shard in writer.pending()}
    try:
        header = read_header(path)
    except LocalqError as error:
        raise bad_file(error.what, error.why, AGAIN) from error
    try:
        for shard in shards:
            if missing := set(shard.tensors) - header.tensors.keys():
                raise bad_file(str(path), f"{min(missing)} is missing", AGAIN)
            if shard.name in pending:
                writer.write(shard, each_tensor(header, shard.tensors))
    except ValueError as error:  # tensors of another shape
        raise bad_file(str(path), str(error), AGAIN) from None


def source_sha256(source: ModelFiles, shards: Shards | None = None) -> str:
    """Return the sha256 of a model's weights: of its one file, or of the files' hashes joined in the order of names."""
    if shards is not None:
        hashes = [shards.sha256(name) for name in sorted(shards.names)]
    else:
        hashes = [sha256_of(path) for path in source.weight_paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

"""Snapshots: the cache of a conversation on disk, so that it resumes without a prefill. Knows ids, no text.

A snapshot stores the bytes of the cache as they are, in the dtype of the model or as codes and scales: of positions
0..n-1, where a window slides of the last window - 1 of them, and states after position n-1. A cache of any capacity
from n on can restore it. Integers are little endian.

    0       8   b"localqKV"
    8       8   u64 H: bytes of the header, at most MAX_HEADER
    16      H   the header, a JSON object in UTF-8:
                  "version"      2 (1: before windows slid)
                  "fingerprint"  key -> text: everything the bytes depend on (`fingerprint`); older files have labels
                                 in place of the keys (`_OLD_LABELS`)
                  "ids"          the n token ids
                  "parts"        layer by layer k, v and, of codes, the scales of k and v: [dtype, kv_heads, slots,
                                 width]; of latents one: [dtype, 1, slots, width]; of a recurrent layer its matrix
                                 and columns: [dtype, *shape]
    16 + H  32  sha256 of everything before
    blocks      the parts joined, each in C order as the device holds it, cut every BLOCK bytes; behind each block 32
                bytes: sha256 of (the header's sha256, the number of the block from 0 as u64, the block)

Nothing follows the last block. A file is written under a temporary name, under a lock, and renamed last; a block enters
the cache after its hash is verified. So a truncated, damaged or foreign file is never used.

sha256 and not blake2b: 1.5 against 0.7 GB/s on a core with SHA instructions, and several blocks run in parallel.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from localq import disk
from localq.engine.cache import KVCache
from localq.engine.cache_blocks import BLOCK, CacheBlocks, block_count
from localq.engine.load.load import LoadedModel
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.json_files import inside, parse_object
from localq.files.model_folder import ModelFiles
from localq.files.safetensors_headers import INDEX_NAME

NUMERICS = 1  # raise it when the same ids give other bits of keys and values
VERSION, MAGIC = 2, b"localqKV"
MAX_HEADER = 2**25  # a million ids are 8 MB
NOT_USED = "snapshot not used"
_HASH = 32
_MESSAGES = {  # key of the fingerprint -> what a file with another value was saved with
    "weights": "with different weights",
    "format": "in a different weight format",
    "dtype": "with a different dtype",
    "cache_bits": "with a different KV cache precision",
    "config": "with a different model configuration",
    "rotary": "with different RoPE tables",
    "kernels": "with a different version of torch or localq's kernels",
    "device": "on a different kind of device",
}
_OLD_LABELS = {  # of files written before there were keys, without spaces -> key
    "set_of_weights": "weights",
    "type": "dtype",
    "number_of_bits_in_the_cache": "cache_bits",
    "configuration": "config",
    "rotary_table": "rotary",
    "version_of_the_kernels": "kernels",
    "kind_of_device": "device",
}


def weights_id(files: ModelFiles) -> str:
    """Return an id of the weights: a hash of path, size and modification time of each file.

    Call before the files are read: a change in the meantime then never matches.
    """
    small = () if files.kind == "gguf" else (inside(files.path, name) for name in ("config.json", INDEX_NAME))
    paths = [*filter(None, small), *files.weight_paths]
    stats = [(str(disk.resolve(path)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode("utf-8", "surrogateescape")).hexdigest()


def fingerprint(
    model: LoadedModel, weights: str, positions: int, rotary_rows: list[Tensor] | None = None
) -> dict[str, str]:
    """Return what the bytes of the first `positions` slots depend on besides the ids; weights: `weights_id`.

    The keys are stored in files: they stay as they are, and messages have words of their own (`_MESSAGES`).

    Rotary tables are hashed by content, because some kinds depend on the length of the text. rotary_rows: instead of
    the first rows of those that are in use.
    """
    rotary = hashlib.sha256()
    for rows in rotary_rows or [table[:positions].cpu() for table in model.model.rotary_tables]:
        rotary.update(rows.contiguous().view(torch.uint8).numpy().data)
    device = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if model.device.type == "cuda":
        device = "cuda {}.{}".format(*torch.cuda.get_device_capability(model.device))
    return {
        "weights": weights,
        "format": model.format,
        "dtype": str(model.dtype),
        "cache_bits": str(model.cache.bits),
        "config": hashlib.sha256(repr(model.model.config).encode()).hexdigest(),
        "rotary": rotary.hexdigest(),
        "kernels": f"{NUMERICS}, torch {torch.__version__}",
        "device": device,
    }


# ---- writing


def save(path: Path, model: LoadedModel, weights: str, ids: list[int]) -> int:
    """Write the cache of `model` for `ids`, which is not empty, to `path`, mode 0600; returns the bytes of the file.

    Raises LocalqError (exit 9) where it cannot be written; an earlier file then stays.
    """
    header = _header(model, weights, ids)
    data = CacheBlocks(model.cache.parts(len(ids)))
    with disk.disk_errors(path):
        disk.make_folder(path.parent)
        name = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
        with disk.new_file(name) as file:
            part = file.fileno()
            fcntl.flock(part, fcntl.LOCK_EX)  # held until the end: an unlocked file was left by a killed process
            _write(part, header, 0)

            def write(block: int, buffer: Tensor) -> None:
                content, offset = data.read(block, buffer), len(header) + block * (BLOCK + _HASH)
                _write(part, content, offset)
                _write(part, _hash(header[-_HASH:], block, content), offset + len(content))

            data.each_block(write)
            os.fsync(part)
            os.replace(name, path)
        disk.sync_folder(path.parent)
    return len(header) + _stored_bytes(data.bytes)


def _header(model: LoadedModel, weights: str, ids: list[int]) -> bytes:
    """Return everything up to the first block."""
    fields = {
        "version": VERSION,
        "fingerprint": fingerprint(model, weights, len(ids)),
        "ids": ids,
        "parts": _shapes(model.cache, len(ids)),
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + text
    return head + hashlib.sha256(head).digest()


def _write(file: int, content: bytes | memoryview, offset: int) -> None:
    left = memoryview(content)
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count


# ---- reading


class Snapshot:
    """An open snapshot file that matches `model` and has its full size; a context manager that closes it."""

    def __init__(self, path: Path, model: LoadedModel, weights: str) -> None:
        """Open and check `path`. Raises LocalqError: exit 8 for damage, 1 for another model's file, 9 for the disk."""
        self._cache = model.cache
        with _reading():
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe by this name must not block
        try:
            with _reading():
                self.ids, self._start, self._digest = self._check(model, weights)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._file)

    def restore(self) -> None:
        """Restore all parts. Raises LocalqError as above; the cache then holds no conversation, but valid bytes."""
        data = CacheBlocks(self._cache.place(len(self.ids)))

        def read(block: int, buffer: Tensor) -> None:
            size, offset = data.size(block), self._start + block * (BLOCK + _HASH)
            content = buffer.numpy().data[:size]
            self._read(content, offset)
            digest = bytearray(_HASH)
            self._read(memoryview(digest), offset + size)
            if digest != _hash(self._digest, block, content):
                raise _damaged_error("a block does not match its hash")
            data.write(block, buffer)

        with _reading():
            data.each_block(read)

    def _check(self, model: LoadedModel, weights: str) -> tuple[list[int], int, bytes]:
        """Return the ids, the offset of the first block, and the hash of the header."""
        status, head = os.fstat(self._file), bytearray(16)
        if not stat.S_ISREG(status.st_mode):
            raise _damaged_error("not a regular file")
        self._read(memoryview(head), 0)
        length = int.from_bytes(head[8:], "little")
        if head[:8] != MAGIC or length > MAX_HEADER:
            raise _damaged_error("not a snapshot file")
        rest = bytearray(length + _HASH)
        self._read(memoryview(rest), 16)
        text, digest = bytes(rest[:length]), bytes(rest[length:])
        if hashlib.sha256(head + text).digest() != digest:
            raise _damaged_error("the header does not match its hash")
        ids = _matching_ids(_parse(text), model, weights)
        shapes = model.cache.part_shapes(len(ids))
        if status.st_size != 16 + len(rest) + _stored_bytes(sum(math.prod(each) * of.itemsize for each, of in shapes)):
            raise _damaged_error("wrong file size")
        return ids, 16 + len(rest), digest

    def _read(self, into: memoryview, offset: int) -> None:
        while into:
            count = os.preadv(self._file, [into], offset)
            if not count:
                raise _damaged_error("truncated file")
            into, offset = into[count:], offset + count


def _matching_ids(header: dict[str, Any], model: LoadedModel, weights: str) -> list[int]:
    """Return the ids of a header that belongs to `model` and fits into its cache."""
    if header.get("version") != VERSION:
        found = header.get("version")
        raise LocalqError(NOT_USED, f"the format version is {found!r}, but this version of localq supports {VERSION}")
    ids, theirs = header.get("ids"), header.get("fingerprint")
    if not isinstance(theirs, dict) or not isinstance(ids, list) or not ids:
        raise _damaged_error("the header is malformed")
    if any(type(id) is not int or not 0 <= id < model.vocab for id in ids):
        raise _damaged_error("the snapshot contains tokens outside the vocabulary")
    if len(ids) > model.ctx:
        raise LocalqError(
            NOT_USED, f"the snapshot contains {len(ids)} tokens, but the context is only {model.ctx} tokens"
        )
    ours = fingerprint(model, weights, len(ids), model.model.rotary_rows(len(ids)))  # as a prompt of these ids has them
    theirs = {_OLD_LABELS.get(name.replace(" ", "_"), name): text for name, text in theirs.items()}
    other = [key for key, text in ours.items() if theirs.get(key) != text]
    if other:
        raise LocalqError(NOT_USED, f"the snapshot was saved {_MESSAGES[other[0]]}")
    if header.get("parts") != _shapes(model.cache, len(ids)):
        raise LocalqError(NOT_USED, "the snapshot was saved with a KV cache of a different shape")
    return ids


def _parse(text: bytes) -> dict[str, Any]:
    try:
        return parse_object(text.decode(), NOT_USED)
    except UnicodeDecodeError as error:
        raise _damaged_error("the header is malformed") from error


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalqError(NOT_USED, f"the file cannot be read ({error.strerror})", "", ExitCode.DISK) from error


def _damaged_error(why: str) -> LocalqError:
    return bad_file(NOT_USED, why)


# ---- both


def _shapes(cache: KVCache, tokens: int) -> list[list[str | int]]:
    return [[str(dtype), *shape] for shape, dtype in cache.part_shapes(tokens)]


def _stored_bytes(size: int) -> int:
    """Return the bytes of all blocks with their hashes; size: of the blocks."""
    return size + block_count(size) * _HASH


def _hash(header: bytes, block: int, content: bytes | memoryview) -> bytes:
    found = hashlib.sha256(header + block.to_bytes(8, "little"))
    found.update(content)
    return found.digest()

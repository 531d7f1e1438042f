"""Safetensors headers and indexes that no writer makes (reliability M1, M2): as bytes, and as cases."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from tests.support.files.hostile_models import Case, Change
from tests.support.files.raw_safetensors import entry, write_raw

DATA = bytes(range(24))
HEADERS: dict[str, tuple[Any, bytes]] = {
    "zero length": (b"", b""),
    "one byte": (b"{", b""),
    "not utf-8": (b'{"\xff\xfe": {}}', b""),
    "no brace": (b'[{"a": 1}]', b""),
    "leading space": (b' {"a": {}}', b""),
    "not json": (b'{"a": ', b""),
    "trailing text": (b"{} {}", b""),
    "list": (b"{}]", b""),
    "nan literal": (b'{"a": NaN}', b""),
    "deep": (b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}", b""),
    "deep objects": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b""),
    "long integer": (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 24]}}', DATA),
    "duplicate tensor": (b'{"a": {}, "a": {}}', b""),
    "duplicate field": (b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}', DATA),
    "tensor is a list": ({"a": [1]}, b""),
    "tensor is null": ({"a": None}, b""),
    "no dtype": ({"a": {"shape": [6], "data_offsets": [0, 24]}}, DATA),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 24]}}, DATA),
    "no offsets": ({"a": {"dtype": "F32", "shape": [6]}}, DATA),
    "unknown dtype": ({"a": entry("F31")}, DATA),
    "dtype is a list": ({"a": {**entry(), "dtype": ["F32"]}}, DATA),
    "dtype is a number": ({"a": {**entry(), "dtype": 4}}, DATA),
    "shape of text": ({"a": entry("F32", ["6"])}, DATA),
    "shape of floats": ({"a": entry("F32", [2.0, 3.0])}, DATA),
    "shape of bool": ({"a": entry("F32", [True, 6])}, DATA),
    "negative shape": ({"a": entry("F32", [-2, -3])}, DATA),
    "shape is text": ({"a": {**entry(), "shape": "6"}}, DATA),
    "nine dimensions": ({"a": entry("F32", [1] * 8 + [6])}, DATA),
    "overflow to fit": ({"a": entry("F32", [2**62, 4])}, DATA),
    "overflow to zero": ({"a": entry("F32", [2**32, 2**32], [0, 0])}, b""),
    "dimension of 2^63": ({"a": entry("F32", [2**63], [0, 24])}, DATA),
    "shape too small": ({"a": entry("F32", [5])}, DATA),
    "shape too large": ({"a": entry("F32", [7])}, DATA),
    "three offsets": ({"a": entry("F32", [6], [0, 12, 24])}, DATA),
    "one offset": ({"a": entry("F32", [6], [24])}, DATA),
    "offsets of text": ({"a": entry("F32", [6], ["0", "24"])}, DATA),
    "offsets of bool": ({"a": entry("U8", [1], [False, True])}, b"x"),
    "offsets of floats": ({"a": entry("F32", [6], [0.0, 24.0])}, DATA),
    "negative offsets": ({"a": entry("F32", [6], [-24, 0])}, DATA),
    "backward offsets": ({"a": entry("F32", [6], [24, 0])}, DATA),
    "past the end": ({"a": entry("F32", [6], [8, 32])}, DATA),
    "far past the end": ({"a": entry("U8", [2**40], [0, 2**40])}, DATA),
    "overlap": ({"a": entry("U8", [20], [0, 20]), "b": entry("U8", [8], [16, 24])}, DATA),
    "same bytes twice": ({"a": entry(), "b": entry()}, DATA),
    "hole in front": ({"a": entry("U8", [20], [4, 24])}, DATA),
    "hole between": ({"a": entry("U8", [8], [0, 8]), "b": entry("U8", [8], [16, 24])}, DATA),
    "bytes left over": ({"a": entry("U8", [23], [0, 23])}, DATA),
    "data without tensors": ({}, DATA),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry()}, DATA),
    "metadata is a list": ({"__metadata__": [], "a": entry()}, DATA),
    "a name that is half a character": (b'{"\\ud800": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}', DATA),
}
LENGTHS = {"huge": 2**60, "negative": 2**64 - 8, "past the end": 10**6, "cap": 17 * 2**20, "short": 5}
OTHER_FILES = {
    "empty": b"",
    "seven zeros": b"\0" * 7,
    "eight zeros": b"\0" * 8,
    "a page of zeros": b"\0" * 4096,
    "a pointer of git-lfs": b"version https://git-lfs",
    "a zip archive": b"PK\3\4" + b"\0" * 60,
    "a pickle": b"\x80\x02}q\x00.",
}
ITEMS = {"objects": b'"%d":{"dtype":0}', "lists": b'"%d":[[]]', "numbers": b'"%d":1', "texts": b'"%d":""'}
SHARD = "model-00001-of-00001.safetensors"
SHARD_NAMES: tuple[Any, ...] = (
    "../x.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b.safetensors", "x\0.safetensors", "x.bin", "..", "",
    ".safetensors", ".hidden.safetensors", "x.safetensors\n", "x" * 200 + ".safetensors", "ünicode.safetensors",
    "\ud800.safetensors", "\u202exslsnetas.safetensors", 7, None, True, ["x.safetensors"], {"x": 1},
)  # fmt: skip
INDEXES: dict[str, Any] = {
    "list": [],
    "empty": {},
    "map is a list": {"weight_map": []},
    "map is empty": {"weight_map": {}},
    "map is text": {"weight_map": "x"},
    "not json": b"{",
    "not utf-8": b"\xff",
    "nine objects": b'{"weight_map": {}' * 9,
    "tensor twice": b'{"weight_map": {"a": "%b", "a": "%b"}}' % (SHARD.encode(), SHARD.encode()),
    "missing shard": {"weight_map": {"a": "model-00002-of-00002.safetensors"}},
    "tensor elsewhere": {"weight_map": {"b": SHARD}},
    "deep": b'{"weight_map":' + b"[" * 100_000,
}


def many_items(item: bytes) -> bytes:
    """A header of 700,000 things."""
    return b"{" + b",".join(item % index for index in range(700_000)) + b"}"


def index_bytes(index: Any) -> bytes:
    return index if isinstance(index, bytes) else json.dumps(index).encode()


# ---- over a sound folder


def _weights(content: bytes) -> Change:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def _header(header: Any, data: bytes, length: int | None = None) -> Change:
    return lambda folder: write_raw(folder / "model.safetensors", header, data, length)


def _index(content: bytes) -> Change:
    """The sound shard under the name of one of several, and this index."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / SHARD)
        (folder.parent / "x.safetensors").write_bytes(b"must not be opened")
        (folder / "model.safetensors.index.json").write_bytes(content)

    return change


def _sparse(name: str, size: int, start: bytes = b"") -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(start)
        os.truncate(folder / name, size)

    return change


def linked(name: str, target: str) -> Change:
    """`name` as a symbolic link; "outside" stands for a sound file beside the folder."""

    def change(folder: Path) -> None:
        outside = folder.parent / "outside"
        outside.write_bytes((folder / name).read_bytes())
        (folder / name).unlink()
        (folder / name).symlink_to(outside if target == "outside" else target)

    return change


def piped(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def as_folder(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def _cut(keep: float) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    return change


def _two_shards(folder: Path) -> None:
    """Every tensor in both."""
    _index(index_bytes({"weight_map": {"lm_head.weight": SHARD, "model.norm.weight": "second.safetensors"}}))(folder)
    (folder / "second.safetensors").write_bytes((folder / SHARD).read_bytes())


CASES = [
    *(Case(f"M1 header: {name}", _header(*content)) for name, content in HEADERS.items()),
    *(Case(f"M1 length: {name}", _header({"a": entry()}, DATA, length)) for name, length in LENGTHS.items()),
    *(Case(f"M1 file: {name}", _weights(content)) for name, content in OTHER_FILES.items()),
    *(Case(f"M1 a million {name}", lambda folder, item=item: _header(many_items(item), b"")(folder))
      for name, item in ITEMS.items()),
    Case("M1 a header over the cap", _sparse("model.safetensors", 2**25, struct.pack("<Q", 2**24 + 1) + b"{")),
    *(Case(f"M1 cut at {keep:.0%}", _cut(keep)) for keep in (0.001, 0.1, 0.999)),
    *(Case(f"M1 {what}", change("model.safetensors")) for what, change in
      {"a pipe": piped, "a folder": as_folder}.items()),
    *(Case(f"M1 a link to {target}", linked("model.safetensors", target))
      for target in ("outside", "nowhere", "model.safetensors", "/dev/zero", "/proc/self/mem")),
    *(Case(f"M2 shard name {name!r:.40}", _index(index_bytes({"weight_map": {"a": name}}))) for name in SHARD_NAMES),
    *(Case(f"M2 index: {name}", _index(index_bytes(index))) for name, index in INDEXES.items()),
    Case("M2 an index of 100 MiB", lambda folder: (
        _index(b"")(folder), _sparse("model.safetensors.index.json", 100 * 2**20)(folder))),
    Case("M2 tensors in two shards", _two_shards),
    *(Case(f"M2 the index {what}", lambda folder, change=change: (
        _index(index_bytes({"weight_map": {"a": SHARD}}))(folder), change("model.safetensors.index.json")(folder)))
      for what, change in {"is a pipe": piped, "is a folder": as_folder,
                           "is a link out": lambda name: linked(name, "outside"),
                           "is a device": lambda name: linked(name, "/dev/zero")}.items()),
]  # fmt: skip

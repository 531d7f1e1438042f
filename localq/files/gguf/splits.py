"""Models split into several .gguf files, `NAME-00001-of-00003.gguf` and so on, read as one. Torch-free and numpy-free.

Each file states `split.no` (from 0), `split.count` and `split.tensors.count` (of all files); only the first has the
metadata of the model. As llama.cpp's `llama-gguf-split` and gguf-py write them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.gguf.binary import Container, RawTensor, read_container, read_part

PART_NAME = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.ASCII | re.IGNORECASE
)
_TOGETHER = "Download all of its parts into one folder."


def part_paths(path: Path) -> tuple[Path, ...]:
    """The paths of all parts, in order, of the model of which `path` is one; only `path` if its name is of no part.

    By the name alone: none need exist (`files.gguf_choice.parts_of` has those that do).
    """
    match = PART_NAME.fullmatch(path.name)
    count = int(match["count"]) if match else 0
    if match is None or not 1 <= int(match["number"]) <= count:
        return (path,)
    names = (f"{match['stem']}-{number:05}-of-{match['count']}{match['suffix']}" for number in range(1, count + 1))
    return tuple(path.with_name(name) for name in names)


def model_name(path: Path) -> str:
    """The name of the model in the file: without the number of the part, and without the suffix."""
    match = PART_NAME.fullmatch(path.name)
    return path.stem if match is None or len(part_paths(path)) == 1 else match["stem"]


def read_first(path: Path) -> Container:
    """The file that holds the metadata of the model of which `path` is a file. Raises LocalqError as `read_model`."""
    container = read_container(path)
    if _count(container) == 1:
        return container
    first, *_ = _paths(container)
    return container if first == path else _read_first(first, container)


def read_model(path: Path) -> Container:
    """The model of which `path` is the only file, or any part: metadata of the first one, tensors of all.

    Raises LocalqError (exit 8), which names the part that is missing, or that is of another model.
    """
    first = read_first(path)
    if _count(first) == 1:
        return first
    parts = [first, *(_read_part(part, first) for part in _paths(first)[1:])]
    tensors: dict[str, RawTensor] = {}
    for number, part in enumerate(parts):
        _check(part, number, first)
        for name, tensor in part.tensors.items():
            if name in tensors:
                earlier = parts[tensors[name].file].path.name
                raise bad_file(str(part.path), f"tensor {name!r} is also in {earlier}", _TOGETHER)
            tensors[name] = replace(tensor, file=number)
    if len(tensors) != _integer(first, "split.tensors.count", len(tensors)):
        stated = _integer(first, "split.tensors.count")
        raise bad_file(
            str(first.path), f"the parts contain {len(tensors)} tensors in total; expected {stated}", _TOGETHER
        )
    return Container(first.values, tensors, tuple(part.files[0] for part in parts))


def _read_first(path: Path, of: Container) -> Container:
    _check_exists(path, 1, _count(of))
    first = read_container(path)
    _check(first, 0, of)
    return first


def _read_part(path: Path, first: Container) -> Container:
    _check_exists(path, _paths(first).index(path) + 1, _count(first))
    return read_part(path)


def _check_exists(path: Path, number: int, count: int) -> None:
    if not path.exists():
        raise bad_file(str(path), f"part {number} of {count} is missing from this split model", _TOGETHER)


def _check(part: Container, number: int, first: Container) -> None:
    """Raise LocalqError (exit 8) unless `part` is the part `number` (from 0) of the model of `first`."""
    for key, expected in _stated(number, first):
        if part.values.get(key, expected if key == "general.architecture" else None) != expected:
            why = f"not part {number + 1} of {_count(first)} in the split model: {key} is {part.values.get(key)}"
            raise bad_file(str(part.path), f"{why}, not {expected}", _TOGETHER)


def _stated(number: int, first: Container) -> Iterator[tuple[str, object]]:
    """Keys and values of part `number`."""
    yield "split.no", number
    for key in ("split.count", "split.tensors.count", "general.architecture"):
        if key in first.values:
            yield key, first.values[key]


def _paths(container: Container) -> tuple[Path, ...]:
    """The parts of the model of a container, by its name. Raises LocalqError (exit 1) for a file that was renamed."""
    paths, count = part_paths(container.path), _count(container)
    if len(paths) != count:
        why = f"the name of this part of a split model does not end in a part number such as -00001-of-{count:05}.gguf"
        raise LocalqError(str(container.path), why, "Restore the original file names of all parts.", ExitCode.FAILURE)
    return paths


def _count(container: Container) -> int:
    """The number of files of the model."""
    count = _integer(container, "split.count", 1)
    if not 0 <= count < 100_000:
        raise bad_file(str(container.path), f"split.count has an invalid value: {count}", "Download the file again.")
    return max(count, 1)


def _integer(container: Container, key: str, default: int = 0) -> int:
    value = container.values.get(key, default)
    if type(value) is not int:
        why = f"{key} has an invalid value: {str(value)[:40]!r}"
        raise bad_file(str(container.path), why, "Download the file again.")
    return value

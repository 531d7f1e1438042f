"""Typed access to the metadata of a .gguf file. Torch-free and numpy-free."""

from __future__ import annotations

import struct
from typing import Any

from localq import disk
from localq.errors import LocalqError, bad_file
from localq.files.gguf.binary import Container, RawTensor

_F32 = 0
LARGEST = 1e12  # limit of a float in the metadata, the same as `model_folder.LARGEST_FLOAT`


class Facts:
    """Values of the metadata, checked; errors name the key."""

    def __init__(self, container: Container) -> None:
        self.container, self.values = container, container.values
        self.architecture = str(self.get("general.architecture", str, required=True))

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None, required: bool = False) -> Any:
        """The value of `full(key)`, checked to be of type `kind`. Raises LocalqError (exit 8)."""
        value = self.values.get(self.full(key), default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # some writers store one value per layer
        if value is None and not required:
            return None
        if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
            why = "is missing" if value is None else f"has an invalid value: {str(value)[:40]!r}"
            raise self.bad(key, why)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = int(self.get(key, int, default, required=True))
        if value <= 0:
            raise self.bad(key, f"has an invalid value: {value}")
        return value

    def integers(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """A positive integer per layer: of a list, or the same for all."""
        stated = self.values.get(self.full(key))
        if not isinstance(stated, list):
            return [self.integer(key, default)] * layers
        if len(stated) != layers or any(type(each) is not int or each <= 0 for each in stated):
            raise self.bad(key, f"is not a list of {layers} positive integers")
        return stated

    def number(self, key: str, default: float | None = None) -> float:
        """A positive float. Files store f32: returned as its shortest decimal (1e-05, not 9.99999974e-06)."""
        value = self.get(key, (int, float), default, required=True)
        if not 0 < value < LARGEST:  # NaN fails every comparison
            raise self.bad(key, f"has an invalid value: {value}")
        return shortest_f32(float(value))

    def floats(self, name: str, tensor: RawTensor, count: int, largest: float = LARGEST) -> list[float]:
        """The values of an f32 tensor [count] that holds positive numbers of the configuration, below `largest`."""
        path = self.container.files[tensor.file].path
        what = str(path)
        if tensor.type != _F32 or tensor.shape != (count,):
            why = f"tensor {name!r} has shape {tensor.shape} and type {tensor.type}; expected {count} f32 values"
            raise bad_file(what, why, "Download the file again.")
        try:
            with path.open("rb") as file:
                file.seek(tensor.offset)
                values = struct.unpack(f"<{count}f", file.read(4 * count))
        except OSError as error:
            raise disk.read_error(path, error) from error
        except struct.error:
            raise bad_file(what, f"tensor {name!r} is truncated", "Download the file again.") from None
        if not all(0 < value < largest for value in values):  # NaN fails every comparison
            raise bad_file(
                what, f"tensor {name!r} contains a value that is not a positive number", "Download the file again."
            )
        return [shortest_f32(value) for value in values]

    def bad(self, key: str, why: str) -> LocalqError:
        """The error for a key (exit 8)."""
        return bad_file(str(self.container.path), f"the key {self.full(key)} {why}", "Download the file again.")

    def full(self, key: str) -> str:
        """The key in the file: `<architecture>.<key>`, or `key` itself with a general prefix."""
        return key if key.startswith(("tokenizer.", "general.")) else f"{self.architecture}.{key}"


def shortest_f32(value: float) -> float:
    """The shortest decimal that rounds to the same f32: the number that the writer started from."""
    if not abs(value) <= LARGEST:  # NaN and infinity too; an f64 beyond f32's range
        return value
    for digits in range(6, 10):
        text = float(f"{value:.{digits}g}")
        if struct.unpack("<f", struct.pack("<f", text))[0] == value:
            return text
    return value

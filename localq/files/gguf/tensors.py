"""Tensors of a .gguf file, dequantized to float32 in the Hugging Face layout.

Supported types: all that the `gguf` package dequantizes (`gguf.quants`, numpy definitions of ggml's formats).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from localq import disk
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files import file_state
from localq.files.gguf.names import OFFSET_NORMS, PERMUTED
from localq.files.gguf.reader import GgufModel, GgufTensor
from localq.files.json_files import DAMAGED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE_VALUES = 2**22  # of a piece of rows; 16 MiB in f32
_JOINED = 9216  # most values of rows joined into one; 16 such rows in f32 are 590 kB


class FileBytes:
    """The bytes of a .gguf file, readable after the file is removed. Read, not mapped: pages of a map count as memory.

    Raises LocalqError: exit 8 for a file that is damaged or has changed, 9 for one that cannot be read.
    """

    def __init__(self, model: GgufModel) -> None:
        self._path, self._model = str(model.path), model
        try:
            self._file = model.path.open("rb")
        except OSError as error:
            raise disk.read_error(model.path, error) from error
        try:
            self._check_state()
        except LocalqError:
            self._file.close()
            raise

    def _check_state(self) -> None:
        if file_state.state_of(os.fstat(self._file.fileno())) != (self._model.size, self._model.mtime_ns):
            raise file_state.changed(self._model.path)

    def read(self, first: int, count: int, gguf_name: str) -> NDArray[np.uint8]:
        """`count` bytes from `first` on, a part of the tensor `gguf_name`."""
        import numpy as np  # start-up cost: headers need no numpy

        size = os.fstat(self._file.fileno()).st_size
        if first + count > size:  # before memory is taken for what is not there
            raise bad_file(self._path, f"tensor {gguf_name!r} is truncated", DAMAGED)
        data, done = np.empty(count, np.uint8), 0
        try:
            while done < count and (got := os.preadv(self._file.fileno(), [data[done:].data], first + done)):
                done += got
        except OSError as error:
            raise disk.read_error(self._model.path, error) from error
        if done < count:
            raise bad_file(self._path, f"tensor {gguf_name!r} is truncated", DAMAGED)
        self._check_state()
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_tensor(model: GgufModel, name: str, file: FileBytes | None = None) -> NDArray[np.float32]:
    """Tensor `name` (Hugging Face) as float32 in its Hugging Face shape.

    `file`: of the model, to read many tensors.

    Raises LocalqError: exit 8 for a damaged file, 1 for an unsupported type.
    """
    if file is None:
        with contextlib.closing(FileBytes(model)) as opened:
            return read_tensor(model, name, opened)
    values = _dequantize(model, _tensor(model, name), file)
    if _is_permuted(model, name):
        key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        return _unpermute(model, values, model.config[key])
    if model.architecture in OFFSET_NORMS and name.endswith("norm.weight"):
        return values - values.dtype.type(1)
    return values


def read_pieces(model: GgufModel, name: str, file: FileBytes) -> Iterator[NDArray[np.float32]]:
    """The rows of tensor `name` in order, with the values of `read_tensor`, some rows at a time.

    A matrix comes in pieces of `PIECE_VALUES` values at most; a matrix whose rows are permuted, and a tensor of another
    rank, as one piece. Raises LocalqError as `read_tensor` does.
    """
    tensor = _tensor(model, name)
    if len(tensor.shape) != 2 or _is_permuted(model, name):
        yield read_tensor(model, name, file)
        return
    rows, columns = tensor.shape
    row_bytes, together = _row_bytes(model, tensor), max(1, PIECE_VALUES // columns)
    for first in range(0, rows, together):
        shape, offset = (min(together, rows - first), columns), tensor.offset + first * row_bytes
        yield _dequantize(model, dataclasses.replace(tensor, shape=shape, offset=offset), file)


def _tensor(model: GgufModel, name: str) -> GgufTensor:
    tensor = model.tensors.get(name)
    if tensor is None:
        raise bad_file(str(model.path), f"tensor {name!r} is missing", DAMAGED)
    return tensor


def _is_permuted(model: GgufModel, name: str) -> bool:
    return model.architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name)


def _row_bytes(model: GgufModel, tensor: GgufTensor) -> int:
    """Stored bytes of a row. Raises LocalqError for an unsupported type, and for a part of a block."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    except (ValueError, KeyError):
        raise _unsupported_error(model, tensor, f"number {tensor.type}") from None
    columns = tensor.shape[-1]
    if columns % block:
        raise bad_file(
            str(model.path),
            f"tensor {tensor.gguf_name!r} has rows of {columns} values, not a multiple of its block size, {block}",
            DAMAGED,
        )
    return columns // block * block_bytes


def _dequantize(model: GgufModel, tensor: GgufTensor, file: FileBytes) -> NDArray[np.float32]:
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    *rows, columns = tensor.shape
    shape = (*rows, _row_bytes(model, tensor))
    kind = GGMLQuantizationType(tensor.type)
    data = file.read(tensor.offset, math.prod(shape), tensor.gguf_name).reshape(shape)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        stored = np.float32 if kind == GGMLQuantizationType.F32 else np.float16
        return data.view(stored).astype(np.float32)
    try:
        with np.errstate(all="ignore"):  # a NaN scale shows up in the logits, which are checked
            joined = data.reshape(_joined_shape(math.prod(rows), columns, shape[-1]))
            return dequantize(joined, kind).astype(np.float32, copy=False).reshape(tensor.shape)
    except NotImplementedError:
        raise _unsupported_error(model, tensor, kind.name) from None


def _joined_shape(rows: int, columns: int, row_bytes: int) -> tuple[int, int]:
    """The shape in which `dequantize` gets the rows: several rows joined into one, up to `_JOINED` values.

    It handles 16 rows at a time, and short rows cost half of its time in overhead. Blocks are independent of rows.
    """
    together = 1
    while rows % (2 * together) == 0 and 2 * together * columns <= _JOINED:
        together *= 2
    return rows // together, together * row_bytes


def _unpermute(model: GgufModel, values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the interleaving of the two halves of every head's rows: [heads, half, 2] -> [heads, 2, half]."""
    if values.shape[0] % (2 * heads):
        raise bad_file(str(model.path), f"{values.shape[0]} rows cannot be divided into {heads} heads", DAMAGED)
    rest = values.shape[1:]
    return values.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(values.shape)


def _unsupported_error(model: GgufModel, tensor: GgufTensor, kind: str) -> LocalqError:
    why = f"tensor {tensor.gguf_name!r} has type {kind}, which localq cannot dequantize"
    return LocalqError(
        str(model.path), why, "Use a file with another quantization type, such as Q8_0 or Q4_K.", ExitCode.FAILURE
    )

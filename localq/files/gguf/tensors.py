"""Tensors of a .gguf file, dequantized to float32 in the Hugging Face layout.

Supported types: all that the `gguf` package dequantizes (`gguf.quants`, numpy definitions of ggml's formats). A reader
with torch brings a faster `Decode`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

from localq import disk
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files import file_state
from localq.files.gguf.block_types import BLOCK_TYPES, by_name
from localq.files.gguf.directory import GgufTensor, rows_of
from localq.files.gguf.layout import StoredLayout
from localq.files.gguf.packing import blocks_shape
from localq.files.gguf.reader import GgufModel
from localq.files.json_files import DAMAGED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Bytes of whole blocks, u8 [count], and the number of their type -> their values, f32 [count]; None for other types.
Decode = Callable[["NDArray[np.uint8]", int], "NDArray[np.float32] | None"]

PIECE_VALUES = 2**22  # of a piece of rows; 16 MiB in f32
_MXFP4 = by_name("MXFP4")
_JOINED = 9216  # most values of rows joined into one; 16 such rows in f32 are 590 kB


class FileBytes:
    """The bytes of a .gguf model, readable after its files are removed. Read, not mapped: pages of a map are memory.

    decode  what dequantizes blocks in place of `gguf.quants`

    Raises LocalqError: exit 8 for a file that is damaged or has changed, 9 for one that cannot be read.
    """

    def __init__(self, model: GgufModel, decode: Decode | None = None) -> None:
        self.decode = decode
        self._states = model.files
        with contextlib.ExitStack() as opened:  # all of them, or none
            self._files = [opened.enter_context(self._open(number)) for number in range(len(model.files))]
            for number in range(len(model.files)):
                self._check_state(number)
            self._closing = opened.pop_all()

    def _open(self, number: int) -> BinaryIO:
        path = self._states[number].path
        try:
            return path.open("rb")
        except OSError as error:
            raise disk.read_error(path, error) from error

    def _check_state(self, number: int) -> None:
        known = self._states[number]
        if file_state.state_of(os.fstat(self._files[number].fileno())) != (known.size, known.mtime_ns):
            raise file_state.changed(known.path)

    def read(self, first: int, count: int, gguf_name: str, number: int = 0) -> NDArray[np.uint8]:
        """`count` bytes from `first` on of the file `number`, a part of the tensor `gguf_name`."""
        import numpy as np  # start-up cost: headers need no numpy

        file, path = self._files[number].fileno(), self._states[number].path
        if first + count > os.fstat(file).st_size:  # before memory is taken for what is not there
            raise bad_file(str(path), f"tensor {gguf_name!r} is truncated", DAMAGED)
        data, done = np.empty(count, np.uint8), 0
        try:
            while done < count and (got := os.preadv(file, [data[done:].data], first + done)):
                done += got
        except OSError as error:
            raise disk.read_error(path, error) from error
        if done < count:
            raise bad_file(str(path), f"tensor {gguf_name!r} is truncated", DAMAGED)
        self._check_state(number)
        return data

    def close(self) -> None:
        """Close the files."""
        self._closing.close()


def row_order(tensor: GgufTensor) -> NDArray[np.int64] | None:
    """int64 [rows]: row i of Hugging Face is the stored row row_order[i]; None where the order is the same."""
    return None if tensor.layout.rows is None else tensor.layout.rows.indices()


def column_order(tensor: GgufTensor) -> NDArray[np.int64] | None:
    """int64 [columns]: column i of Hugging Face is the stored column column_order[i]; None where it is the same.

    A product with the stored matrix needs its input in the opposite order: stored column column_order[i] reads input i.
    """
    return None if tensor.layout.columns is None else tensor.layout.columns.indices()


def read_tensor(model: GgufModel, name: str, file: FileBytes | None = None) -> NDArray[np.float32]:
    """Tensor `name` (Hugging Face) as float32 in its Hugging Face shape.

    `file`: of the model, to read many tensors.

    Raises LocalqError: exit 8 for a damaged file, 1 for an unsupported type.
    """
    import numpy as np

    if file is None:
        with contextlib.closing(FileBytes(model)) as opened:
            return read_tensor(model, name, opened)
    tensor = _tensor(model, name)
    if not _is_stack(tensor):
        return _in_layout(_dequantize(model, tensor, file), tensor.layout)
    values = np.empty(tensor.stored_shape, np.float32)
    for expert, piece in enumerate(_entries(model, tensor, file)):
        values[expert] = piece[0]
    return values.swapaxes(-1, -2) if tensor.transposed else values


def read_pieces(model: GgufModel, name: str, file: FileBytes) -> Iterator[NDArray[np.float32]]:
    """The rows of tensor `name` in order, with the values of `read_tensor`, some rows at a time.

    A matrix comes in pieces of `PIECE_VALUES` values at most, a stack of experts expert by expert; a matrix whose rows
    are in another order, and a tensor of another rank, as one piece. Raises LocalqError as `read_tensor` does.
    """
    tensor = _tensor(model, name)
    if _is_stack(tensor):
        for entry in _entries(model, tensor, file):
            yield entry.swapaxes(-1, -2) if tensor.transposed else entry
        return
    if len(tensor.shape) != 2 or tensor.layout.rows is not None:
        yield read_tensor(model, name, file)
        return
    rows, columns = tensor.shape
    together = max(1, PIECE_VALUES // columns)
    for first in range(0, rows, together):
        piece = rows_of(tensor, first, min(together, rows - first))
        yield _in_layout(_dequantize(model, piece, file), tensor.layout)


def read_blocks(tensor: GgufTensor, file: FileBytes) -> NDArray[np.uint8]:
    """A matrix of whole blocks (`packing`), u8 [rows, bytes of a row]: rows in the order of Hugging Face, columns as
    stored. Raises LocalqError as `read_tensor` does."""
    rows, row_bytes = blocks_shape(tensor)
    blocks = file.read(tensor.offset, rows * row_bytes, tensor.gguf_name, tensor.file).reshape(rows, row_bytes)
    order = row_order(tensor)
    return blocks if order is None else blocks[order]


def read_mxfp4(tensor: GgufTensor, file: FileBytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes u8 [..., out, in/32, 16] and scales u8 [..., out, in/32] of one of `packing.mxfp4_tensors`.

    In the order of OpenAI's files (`formats.mxfp4`): a byte holds the weights 2i and 2i + 1 of a block, in GGUF it
    holds i and i + 16. Raises LocalqError as `read_tensor` does.
    """
    import numpy as np

    if not _is_stack(tensor):
        return _mxfp4_parts(read_blocks(tensor, file))
    experts, rows, columns = tensor.stored_shape
    parts, blocks = tensor.parts or (tensor,), columns // _MXFP4.values
    codes, scales = np.empty((experts, rows, blocks, 16), np.uint8), np.empty((experts, rows, blocks), np.uint8)
    for expert, (number, part) in itertools.product(range(experts), enumerate(parts)):
        of_one, height = rows_of(part, expert, 1), rows // len(parts)
        data = file.read(of_one.offset, height * blocks * _MXFP4.bytes, of_one.gguf_name, of_one.file)
        of_part = expert, slice(number, None, len(parts))
        codes[of_part], scales[of_part] = _mxfp4_parts(data.reshape(height, -1))
    return codes, scales


def read_scale(tensor: GgufTensor, file: FileBytes) -> NDArray[np.float32]:
    """The factor of a tensor with `scale`, f32 [1]. Raises LocalqError as `read_tensor` does."""
    import numpy as np

    assert tensor.scale is not None
    number, offset = tensor.scale
    return file.read(offset, 4, tensor.gguf_name, number).view(np.float32)


def _mxfp4_parts(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes and scales of rows of blocks."""
    import numpy as np

    data = blocks.reshape(len(blocks), -1, _MXFP4.bytes)
    low, high = data[..., 1:] & 15, data[..., 1:] >> 4
    codes = np.concatenate([each[..., ::2] | each[..., 1::2] << 4 for each in (low, high)], -1)
    return codes, np.ascontiguousarray(data[..., 0])


def _is_stack(tensor: GgufTensor) -> bool:
    """Return whether the tensor holds all experts of a layer."""
    return bool(tensor.parts) or tensor.transposed


def _entries(model: GgufModel, stack: GgufTensor, file: FileBytes) -> Iterator[NDArray[np.float32]]:
    """[1, out, ...] of every expert, as stored, with the rows of its parts alternating."""
    import numpy as np

    for expert in range(stack.shape[0]):
        parts = [_dequantize(model, rows_of(part, expert, 1), file) for part in stack.parts or (stack,)]
        yield parts[0] if len(parts) == 1 else np.stack(parts, 2).reshape(1, -1, *parts[0].shape[2:])


def _in_layout(values: NDArray[np.float32], layout: StoredLayout) -> NDArray[np.float32]:
    """Stored values as those of Hugging Face."""
    import numpy as np

    if layout.rows is not None:
        values = values[layout.rows.indices()]
    if layout.columns is not None:
        values = values[..., layout.columns.indices()]
    if layout.negated_exp:
        with np.errstate(all="ignore"):  # NaN shows up in the logits, which are checked
            values = np.log(-values)
    return values + np.float32(layout.add) if layout.add else values


def _tensor(model: GgufModel, name: str) -> GgufTensor:
    tensor = model.tensors.get(name)
    if tensor is None:
        raise bad_file(str(model.path), f"tensor {name!r} is missing", DAMAGED)
    return tensor


def _row_bytes(model: GgufModel, tensor: GgufTensor) -> int:
    """Stored bytes of a row. Raises LocalqError for an unsupported type, and for a part of a block."""
    block, block_bytes = _block_size(model, tensor)
    columns = tensor.stored_shape[-1]
    if columns % block:
        raise bad_file(
            str(model.path),
            f"tensor {tensor.gguf_name!r} has {columns} values per row, not a multiple of its block size, {block}",
            DAMAGED,
        )
    return columns // block * block_bytes


def _block_size(model: GgufModel, tensor: GgufTensor) -> tuple[int, int]:
    """Values and bytes of a block."""
    if (known := BLOCK_TYPES.get(tensor.type)) is not None:
        return known.values, known.bytes
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    except (ValueError, KeyError):
        raise _unsupported_error(model, tensor, f"number {tensor.type}") from None
    return values, size


def _dequantize(model: GgufModel, tensor: GgufTensor, file: FileBytes) -> NDArray[np.float32]:
    *rows, columns = tensor.stored_shape
    shape = (*rows, _row_bytes(model, tensor))
    data = file.read(tensor.offset, math.prod(shape), tensor.gguf_name, tensor.file)
    decoded = None if file.decode is None else file.decode(data, tensor.type)
    values = _dequantize_by_package(model, tensor, data.reshape(shape)) if decoded is None else decoded
    values = values.reshape(*rows, columns)
    return values if tensor.scale is None else values * read_scale(tensor, file)


def _dequantize_by_package(model: GgufModel, tensor: GgufTensor, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """data u8 [..., bytes of a row]."""
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    *rows, columns = tensor.stored_shape
    kind = GGMLQuantizationType(tensor.type)
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        stored = np.float32 if kind == GGMLQuantizationType.F32 else np.float16
        return data.view(stored).astype(np.float32)
    try:
        with np.errstate(all="ignore"):  # a NaN scale shows up in the logits, which are checked
            joined = data.reshape(_joined_shape(math.prod(rows), columns, data.shape[-1]))
            return dequantize(joined, kind).astype(np.float32, copy=False).reshape(*rows, columns)
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


def _unsupported_error(model: GgufModel, tensor: GgufTensor, kind: str) -> LocalqError:
    why = f"tensor {tensor.gguf_name!r} has type {kind}, which localq cannot dequantize"
    return LocalqError(
        str(model.path), why, "Use a file with another quantization type, such as Q8_0 or Q4_K.", ExitCode.FAILURE
    )

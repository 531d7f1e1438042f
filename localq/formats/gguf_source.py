"""Tensors of a .gguf model for a checkpoint: dequantized, or matrices in the blocks of the file (`formats.gguf`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from localq.files.gguf import packing
from localq.files.gguf.block_types import BLOCK_TYPES
from localq.files.gguf.reader import GgufModel
from localq.formats import mxfp4
from localq.formats.gguf import codec
from localq.formats.mxfp4 import experts as mxfp4_experts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CODES, _SCALES = mxfp4_experts.suffixes
Description = tuple[torch.dtype, tuple[int, ...]]  # of a tensor


class GgufSource:
    """Tensors under their Hugging Face names, read one at a time; the files are opened with the first.

    packed   matrices that a GPU keeps in blocks are P.blocks, P.block_type, P.places and P.factor, those in MXFP4 and
             stacks of experts N in it N_blocks and N_scales (`formats.mxfp4`); all else is float32
    """

    converts = True

    def __init__(self, model: GgufModel, *, packed: bool) -> None:
        self._model = model
        self._file: Any = None
        self._packed = packing.packed_matrices(model) if packed else {}
        self._mxfp4 = packing.mxfp4_tensors(model) if packed else {}

    def describe(self) -> dict[str, Description]:
        """Name -> dtype and shape, of all tensors."""
        found: dict[str, Description] = {
            name: (torch.float32, tensor.shape)
            for name, tensor in self._model.tensors.items()
            if name not in self._packed and name not in self._mxfp4
        }
        for name, tensor in self._mxfp4.items():
            *rows, columns = tensor.stored_shape
            blocks = (*rows, columns // mxfp4.BLOCK)
            found[name + _CODES] = torch.uint8, (*blocks, mxfp4.BLOCK // 2)
            found[name + _SCALES] = torch.uint8, blocks
        for name, tensor in self._packed.items():
            prefix = name.removesuffix(".weight")
            found[prefix + ".blocks"] = torch.uint8, packing.blocks_shape(tensor)
            found[prefix + ".block_type"] = torch.int32, (1,)
            if tensor.scale is not None:
                found[prefix + ".factor"] = torch.float32, (1,)
            if tensor.layout.columns is not None:
                found[prefix + ".places"] = torch.int16, (tensor.shape[1] // packing.WORD,)
        return found

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        from localq.files.gguf import tensors  # numpy and the gguf package: only where a .gguf file is read

        for number, suffix in enumerate((_CODES, _SCALES)):
            if name.endswith(suffix) and (found := self._mxfp4.get(name.removesuffix(suffix))) is not None:
                return torch.from_numpy(tensors.read_mxfp4(found, self._opened())[number])
        prefix, _, part = name.rpartition(".")
        tensor = self._packed.get(prefix + ".weight")
        if tensor is None or part == "weight":
            return torch.from_numpy(tensors.read_tensor(self._model, name, self._opened()))
        if part == "block_type":
            return torch.tensor([tensor.type], dtype=torch.int32)
        if part == "factor":
            return torch.from_numpy(tensors.read_scale(tensor, self._opened()))
        if part == "places":
            columns = tensors.column_order(tensor)
            assert columns is not None, "a tensor in order has no places"
            words = torch.from_numpy(columns[:: packing.WORD] // packing.WORD)
            return (words - (words >= 2**15) * 2**16).to(torch.int16)
        return torch.from_numpy(tensors.read_blocks(tensor, self._opened()))

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """One float32 tensor in `dtype`, converted some rows at a time."""
        from localq.files.gguf import tensors

        values, first = torch.empty(self._model.tensors[name].shape, dtype=dtype), 0
        for piece in tensors.read_pieces(self._model, name, self._opened()):
            values[first : first + len(piece)] = torch.from_numpy(piece)
            first += len(piece)
        return values

    def _opened(self) -> Any:
        from localq.files.gguf import tensors

        if self._file is None:
            self._file = tensors.FileBytes(self._model, _decode)
        return self._file

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _decode(data: NDArray[np.uint8], type: int) -> NDArray[np.float32] | None:
    """`Decode` of `files.gguf.tensors` by the codec, on all cores."""
    kind = BLOCK_TYPES.get(type)
    if kind is None or not kind.is_quantized:
        return None
    values = codec.dequantize(codec.Packed(torch.from_numpy(data).view(-1, kind.bytes), kind.name), torch.float32)
    found: NDArray[np.float32] = values.view(-1).numpy()
    return found

"""A quantized checkpoint as if it were a plain one: what the same engine reads for its 16-bit baseline."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from localq.checkpoint import Checkpoint, info
from localq.quant import FORMATS, owner, shared_names


def dequantized(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """`checkpoint` with every quantized matrix as one tensor of `dtype`, dequantized on `device` when it is read."""
    source = _Dequantized(checkpoint, device, dtype)
    owned = {f"{prefix}{suffix}" for prefix, module in source.quantized.items() for suffix in module.suffixes}
    for prefix, module in source.quantized.items():
        owned.update(shared_names(module, checkpoint.tensors, prefix))
    tensors = {name: described for name, described in checkpoint.tensors.items() if name not in owned}
    for prefix, module in source.quantized.items():
        tensors[f"{prefix}.weight"] = info(dtype, module.from_checkpoint(checkpoint, prefix).shape)
    return Checkpoint(tensors, source)


class _Dequantized:
    """See `checkpoint.Source`. quantized: prefix of a Linear -> the module of its format."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self.quantized: dict[str, ModuleType] = {}
        for name in checkpoint.tensors:
            if found := owner(checkpoint.tensors, name):
                format, prefix = found
                self.quantized[prefix] = FORMATS[format]

    def read(self, name: str) -> Tensor:
        """See `Checkpoint.read`; what was quantized comes on the device."""
        prefix = name.removesuffix(".weight")
        if prefix not in self.quantized or prefix == name:
            return self._checkpoint.read(name)
        module = self.quantized[prefix]
        packed = module.from_checkpoint(self._checkpoint, prefix).to(self._device)
        weight: Tensor = module.dequantize(packed, self._dtype)
        return weight

    def close(self) -> None:
        """Free the files."""
        self._checkpoint.close()

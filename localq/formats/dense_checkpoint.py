"""A quantized checkpoint as if it were a plain one: what the same engine reads for its 16-bit baseline."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from localq.formats import FORMATS, STACKS, keys, owner, shared_names
from localq.formats.checkpoint import Checkpoint, info


def dequantized(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """`checkpoint` with every quantized matrix as one tensor of `dtype`, dequantized on `device` when it is read."""
    source = _Dequantized(checkpoint, device, dtype)
    owned = {key for prefix, module in source.quantized.items() for key in keys(module, checkpoint.tensors, prefix)}
    for prefix, module in source.quantized.items():
        owned.update(shared_names(module, checkpoint.tensors, prefix))
    owned |= {f"{name}{suffix}" for name, (_, module) in source.stacks.items() for suffix in module.suffixes}
    tensors = {name: described for name, described in checkpoint.tensors.items() if name not in owned}
    for prefix, module in source.quantized.items():
        tensors[f"{prefix}.weight"] = info(dtype, module.stored_shape(checkpoint, prefix))
    for name, (_, module) in source.stacks.items():
        experts, out, columns = module.stored_shape(checkpoint, name)
        tensors[name] = info(dtype, (experts, columns, out))  # as gpt-oss has it in 16 bit
    return Checkpoint(tensors, source)


class _Dequantized:
    """Tensors of a quantized checkpoint in 16 bit.

    quantized   prefix of a Linear -> the module of its format; stacks: of experts
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self.quantized: dict[str, ModuleType] = {}
        self.stacks: dict[str, tuple[str, ModuleType]] = {}
        for name in checkpoint.tensors:
            for format, module in STACKS.items():
                stack = name.removesuffix(module.suffixes[0])
                if stack != name and module.is_quantized(checkpoint.tensors, stack):
                    self.stacks[stack] = format, module
            if found := owner(checkpoint.tensors, name):
                self.quantized[found[1]] = FORMATS[found[0]]

    def read(self, name: str) -> Tensor:
        """One tensor; what was quantized comes dequantized, on the device."""
        if name in self.stacks:
            return self._stack(name)
        prefix = name.removesuffix(".weight")
        if prefix not in self.quantized or prefix == name:
            return self._checkpoint.read(name)
        module = self.quantized[prefix]
        packed = module.from_checkpoint(self._checkpoint, prefix).to(self._device)
        weight: Tensor = module.dequantize(packed, self._dtype)
        return weight

    def _stack(self, name: str) -> Tensor:
        """[experts, in, out], a view."""
        format, module = self.stacks[name]
        shape = module.stored_shape(self._checkpoint, name)
        tall = module.from_checkpoint(self._checkpoint, name).to(self._device)
        weight: Tensor = FORMATS[format].dequantize(tall, self._dtype).view(shape)
        return weight.mT

    def close(self) -> None:
        """Free the files."""
        self._checkpoint.close()

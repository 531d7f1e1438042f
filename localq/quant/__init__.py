"""The quantized formats, one module each. A reader finds every format in this dict.

A format module has
  its docstring                        the format, byte by byte
  Packed                               the tensors of one matrix; .placed(place, device) -> the same, copied by `place`
  quantize(weight) -> Packed           weight f32 | bf16 | f16 [out, in]
  dequantize(packed, dtype) -> Tensor  the definition of the format and the reference of its kernels
  bytes(out, in) -> int                device bytes of one matrix
  suffixes                             the checkpoint tensors P + suffix that a Linear P owns
  is_quantized(tensors, P) -> bool     does a checkpoint hold P in this format?
  stored_bytes(tensors, P) -> int      what P takes there: codes, scales, tables
  placed_bytes(tensors, P) -> [int]    what each tensor of P takes on a device, in the order of Packed.placed
  from_checkpoint(checkpoint, P) -> Packed, to_tensors(packed, P) -> dict, layout(out, in) -> dict
  quantization_config(dtype, skipped)  what config.json says about a checkpoint in this format
  Linear(packed, bias)                 an nn.Module: x [T, in] -> [T, out]
"""

from __future__ import annotations

from types import ModuleType

from localq.quant import nf4

FORMATS: dict[str, ModuleType] = {"nf4": nf4}

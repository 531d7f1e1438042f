"""AWQ and GPTQ checkpoints of tiny random models: packed word by word with plain integers, as the formats' pages say.

No quantizer is involved: codes, zero points and scales are random. `reference` is the documented formula of the
projects (AutoAWQ's `dequantize_gemm`, GPTQModel's `dequantize_weight`) on the stored tensors, in words of its own:
element by element of the words, and not the way of `localq.formats`. transformers itself needs gptqmodel for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from localq.formats.checkpoint import Checkpoint
from tests.support.formats.memory_checkpoint import Held
from tests.support.models.tiny_checkpoints import make_model, write_tokenizer

OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the nibbles of a word of AWQ, the lowest first


@dataclass(frozen=True)
class Int4:
    """What the Linears of a checkpoint share. act_order: g_idx mixes the groups; g_idx False: there is none."""

    method: str = "awq"
    group: int = 64
    act_order: bool = False
    version: str = "gptq"
    g_idx: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """quantization_config."""
        shared = {"quant_method": self.method, "bits": 4, "group_size": self.group}
        if self.method == "awq":
            return {**shared, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
        return {**shared, "desc_act": self.act_order, "sym": False, "checkpoint_format": self.version}


def words(nibbles: list[int]) -> int:
    """Eight values, the lowest nibble first, as a signed int32."""
    word = sum(value << (4 * place) for place, value in enumerate(nibbles))
    return word - 2**32 if word >= 2**31 else word


def along_rows(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[n, 8 m] -> int32 [n, m]: neighbours of a row in a word, nibble i that of place order[i]."""
    rows = [[words([row[8 * c + place] for place in order]) for c in range(len(row) // 8)] for row in values.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def tensors(shape: tuple[int, int], of: Int4, dtype: torch.dtype = torch.float16, seed: int = 0) -> dict[str, Tensor]:
    """Suffix -> random tensor of a matrix [out, in] whose weights have a deviation of about 0.15."""
    out, columns = shape
    generator = torch.Generator().manual_seed(seed)
    size = columns if of.group == -1 else of.group
    groups = -(-columns // size)
    codes = torch.randint(0, 16, (columns, out), generator=generator)
    zeros = torch.randint(1, 16, (groups, out), generator=generator)  # 0 is stored as 15 in v1, which carries
    scales = (0.02 + 0.02 * torch.rand(groups, out, generator=generator)).to(dtype)
    codes[0, 0], codes[-1, -1], zeros[0, 0] = 15, 0, 15
    if of.method == "awq":
        return {".qweight": along_rows(codes, OUTPUTS), ".qzeros": along_rows(zeros, OUTPUTS), ".scales": scales}
    stored = zeros - 1 if of.version == "gptq" else zeros
    made = {".qweight": along_rows(codes.T).T.contiguous(), ".qzeros": along_rows(stored), ".scales": scales}
    if of.g_idx:
        g_idx = torch.arange(columns) // size
        g_idx = g_idx[torch.randperm(columns, generator=generator)] if of.act_order else g_idx
        made[".g_idx"] = g_idx.to(torch.int32)
    return made


def _unpacked(stored: Tensor) -> Tensor:
    """int32 [n, m] -> int64 [n, m, 8], the lowest nibble first."""
    return (stored.long().unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15


def reference(made: dict[str, Tensor], of: Int4) -> Tensor:
    """The weights [out, in] in the type of the scales."""
    qweight, qzeros, scales = made[".qweight"], made[".qzeros"], made[".scales"]
    if of.method == "awq":
        inverse = torch.tensor(OUTPUTS).argsort()
        codes, zeros = (_unpacked(each)[:, :, inverse].flatten(1) for each in (qweight, qzeros))
        g_idx = torch.arange(len(codes)) // (len(codes) // len(scales))
    else:
        if of.version == "gptq":
            qzeros = ((qzeros.long() + 0x11111111 + 2**31) % 2**32 - 2**31).to(torch.int32)
        codes, zeros = _unpacked(qweight).permute(0, 2, 1).flatten(0, 1), _unpacked(qzeros).flatten(1)
        g_idx = made.get(".g_idx", torch.arange(len(codes)) // (of.group if of.group > 0 else len(codes))).long()
    return (scales[g_idx] * (codes - zeros[g_idx]).to(torch.int8)).T.contiguous()


def write(
    folder: Path,
    of: Int4,
    dtype: torch.dtype = torch.float16,
    model_type: str = "llama",
    plain: str = "\n",
    idle_biases: bool = False,
    **overrides: Any,
) -> dict[str, dict[str, Tensor]]:
    """A checkpoint whose block Linears are `of` that, but for those whose path ends in `plain`; their tensors by path.

    idle_biases: Linears without a bias have one of zeros, as AutoGPTQ wrote them.
    """  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(model_type, initializer_range=0.15, **overrides).to(dtype)
    model.config.dtype = dtype
    held = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    linears: dict[str, dict[str, Tensor]] = {}
    for path, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or path == "lm_head" or path.endswith(plain):
            continue
        linears[path] = tensors(tuple(linear.weight.shape), of, dtype, seed=len(linears))
        del held[f"{path}.weight"]
        held |= {path + suffix: tensor for suffix, tensor in linears[path].items()}
        if idle_biases and linear.bias is None:
            held[f"{path}.bias"] = torch.zeros(linear.out_features, dtype=dtype)
    model.config.quantization_config = of.config
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    write_tokenizer(folder)
    return linears


def checkpoint_of(made: Mapping[str, Tensor], quantization: dict[str, Any]) -> Checkpoint:
    """Of the Linear "P": its tensors by suffix, in memory."""
    return Held({f"P{suffix}": tensor for suffix, tensor in made.items()}).checkpoint(quantization)

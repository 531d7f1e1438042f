"""4-bit checkpoints of tiny random models: packed word by word with plain integers, as the formats' pages say.

No quantizer is involved: codes, zero points and scales are random. `reference` is the documented formula of the
projects (AutoAWQ's `dequantize_gemm`, GPTQModel's `dequantize_weight`) on the stored tensors, in words of its own:
element by element of the words, and not the way of `localq.formats`. transformers itself needs gptqmodel for both.
That of compressed-tensors is its package, but for the order of columns, which versions from 0.20 on do not have.
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

COMPRESSED = "compressed-tensors"
OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the nibbles of a word of AWQ, the lowest first


@dataclass(frozen=True)
class Int4:
    """What the Linears of a checkpoint share. act_order: g_idx mixes the groups; g_idx False: there is none.

    symmetric: without zero points; of compressed-tensors, of which half the scales are negative.
    """

    method: str = "awq"
    group: int = 64
    act_order: bool = False
    version: str = "gptq"
    g_idx: bool = True
    symmetric: bool = False
    bits: int = 4

    @property
    def config(self) -> dict[str, Any]:
        """quantization_config."""
        if self.method == COMPRESSED:
            return compressed_config(compressed_group(self))
        shared = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return {**shared, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
        return {**shared, "desc_act": self.act_order, "sym": False, "checkpoint_format": self.version}


def compressed_group(of: Int4, targets: tuple[str, ...] = ("Linear",)) -> dict[str, Any]:
    """An entry of `config_groups`, with the fields that the package writes."""
    strategy = {"strategy": "channel", "group_size": None} if of.group == -1 else {
        "strategy": "group", "group_size": of.group,
    }  # fmt: skip
    weights = {
        "num_bits": of.bits, "type": "int", "symmetric": of.symmetric, **strategy, "block_structure": None,
        "dynamic": False,
        "actorder": "group" if of.act_order else None, "observer": "mse", "observer_kwargs": {},
    }  # fmt: skip
    return {"targets": [*targets], "weights": weights, "input_activations": None, "output_activations": None}


def compressed_config(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors with these entries."""
    return {
        "quant_method": COMPRESSED, "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "global_compression_ratio": None, **fields,
    }  # fmt: skip


def words(nibbles: list[int]) -> int:
    """Eight values, the lowest nibble first, as a signed int32."""
    return run_of_words(nibbles, 4)[0]


def run_of_words(values: list[int], bits: int) -> list[int]:
    """Values, the lowest bits first, as signed int32: as many words as they fill."""
    joined = sum(value << (bits * place) for place, value in enumerate(values))
    found = [joined >> (32 * place) & 0xFFFFFFFF for place in range(-(-len(values) * bits // 32))]
    return [word - 2**32 if word >= 2**31 else word for word in found]


def along_rows(values: Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """[n, 8 m] -> int32 [n, bits m / 4]: neighbours of a row in a word, of eight the code i that of place order[i]."""
    ordered = ([row[8 * c + place] for c in range(len(row) // 8) for place in order] for row in values.tolist())
    return torch.tensor([run_of_words(row, bits) for row in ordered], dtype=torch.int32)


def tensors(shape: tuple[int, int], of: Int4, dtype: torch.dtype = torch.float16, seed: int = 0) -> dict[str, Tensor]:
    """Suffix -> random tensor of a matrix [out, in] whose weights have a deviation of about 0.15."""
    if of.method == COMPRESSED:
        return _compressed(shape, of, dtype, seed)
    out, columns = shape
    generator = torch.Generator().manual_seed(seed)
    size = columns if of.group == -1 else of.group
    groups = -(-columns // size)
    end = 2**of.bits
    codes = torch.randint(0, end, (columns, out), generator=generator)
    zeros = torch.randint(1, end, (groups, out), generator=generator)  # 0 is stored as 15 in v1, which carries
    scales = (0.02 + 0.02 * torch.rand(groups, out, generator=generator)).mul_(16 / end).to(dtype)
    codes[0, 0], codes[-1, -1], zeros[0, 0] = end - 1, 0, end - 1
    if of.method == "awq":
        return {".qweight": along_rows(codes, OUTPUTS), ".qzeros": along_rows(zeros, OUTPUTS), ".scales": scales}
    stored = zeros - 1 if of.version == "gptq" else zeros
    words_of_codes, words_of_zeros = (along_rows(each, bits=of.bits) for each in (codes.T, stored))
    made = {".qweight": words_of_codes.T.contiguous(), ".qzeros": words_of_zeros, ".scales": scales}
    if of.g_idx:
        g_idx = torch.arange(columns) // size
        g_idx = g_idx[torch.randperm(columns, generator=generator)] if of.act_order else g_idx
        made[".g_idx"] = g_idx.to(torch.int32)
    return made


def _compressed(shape: tuple[int, int], of: Int4, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    out, columns = shape
    generator = torch.Generator().manual_seed(seed)
    size = columns if of.group == -1 else of.group
    groups = columns // size
    end = 2**of.bits
    codes = torch.randint(0, end, (out, columns), generator=generator)
    zeros = torch.randint(0, end, (groups, -(-out // 8) * 8), generator=generator)  # the rest of a word: no zero point
    signs = 2 * torch.randint(0, 2, (out, groups), generator=generator) - 1
    scales = (signs * (0.02 + 0.02 * torch.rand(out, groups, generator=generator)) * (16 / end)).to(dtype)
    codes[0, 0], codes[-1, -1], zeros[0, 0] = end - 1, 0, end - 1
    made = {
        ".weight_packed": along_rows(codes, bits=of.bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([out, columns]),
    }
    if not of.symmetric:
        made[".weight_zero_point"] = along_rows(zeros, bits=of.bits).T.contiguous()[: -(-out * of.bits // 32)]
    if of.act_order:
        g_idx = (torch.arange(columns) // size)[torch.randperm(columns, generator=generator)]
        made[".weight_g_idx"] = g_idx.to(torch.int32)
    return made


def _by_package(made: dict[str, Tensor], of: Int4) -> Tensor:
    """The weights [out, in] that the package of compressed-tensors decompresses."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, unpack_from_int32
    from compressed_tensors.quantization import QuantizationScheme

    packed, scales, shape = (made[f".weight_{name}"] for name in ("packed", "scale", "shape"))
    if ".weight_g_idx" not in made:
        stated = compressed_group(of)
        scheme = QuantizationScheme(targets=stated["targets"], weights=stated["weights"])
        held = {name.removeprefix("."): each for name, each in made.items()}
        return PackedQuantizationCompressor.decompress(held, scheme)["weight"]
    g_idx, zeros = made[".weight_g_idx"].long(), torch.zeros(scales.shape, dtype=torch.int8)
    if ".weight_zero_point" in made:
        zeros = unpack_from_int32(made[".weight_zero_point"], of.bits, scales.shape, packed_dim=0)
    return (unpack_from_int32(packed, of.bits, shape).to(scales.dtype) - zeros[:, g_idx]) * scales[:, g_idx]


def _unpacked(stored: Tensor, bits: int = 4) -> Tensor:
    """int32 [n, m] -> int64 [n, 32 m / bits, 1], the lowest bits of a row first; of 4 bits [n, m, 8]."""
    if bits == 4:
        return (stored.long().unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
    rows = []
    for row in stored.tolist():
        joined = sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(row))
        rows.append([joined >> (bits * place) & (2**bits - 1) for place in range(32 * len(row) // bits)])
    return torch.tensor(rows).unsqueeze(-1)


def reference(made: dict[str, Tensor], of: Int4) -> Tensor:
    """The weights [out, in] in the type of the scales."""
    if of.method == COMPRESSED:
        return _by_package(made, of)
    qweight, qzeros, scales = made[".qweight"], made[".qzeros"], made[".scales"]
    if of.method == "awq":
        inverse = torch.tensor(OUTPUTS).argsort()
        codes, zeros = (_unpacked(each)[:, :, inverse].flatten(1) for each in (qweight, qzeros))
        g_idx = torch.arange(len(codes)) // (len(codes) // len(scales))
    else:
        ones = {2: 0x55555555, 3: 0, 4: 0x11111111, 8: 0x01010101}[of.bits]
        if of.version == "gptq":
            qzeros = ((qzeros.long() + ones + 2**31) % 2**32 - 2**31).to(torch.int32)
        codes, zeros = _unpacked(qweight.T, of.bits).flatten(1).T, _unpacked(qzeros, of.bits).flatten(1)
        zeros = zeros + 1 if of.version == "gptq" and of.bits == 3 else zeros
        g_idx = made.get(".g_idx", torch.arange(len(codes)) // (of.group if of.group > 0 else len(codes))).long()
    return (scales[g_idx] * (codes - zeros[g_idx]).to(torch.int16)).T.contiguous()


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

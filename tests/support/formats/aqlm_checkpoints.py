"""AQLM checkpoints of tiny random models, written tensor by tensor as the format's page says: no quantizer is involved.

`write(folder, LAYOUTS["2x8g8"])` gives a folder that localq reads, and transformers with the package aqlm.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.models.tiny_checkpoints import make_model, write_tokenizer


@dataclass(frozen=True)
class Layout:
    """books codebooks of `bits` bits; groups of out_group rows and in_group columns."""

    books: int
    bits: int
    in_group: int
    out_group: int = 1


LAYOUTS = {
    "1x16g8": Layout(1, 16, 8),
    "1x16g16": Layout(1, 16, 16),
    "2x8g8": Layout(2, 8, 8),
    "1x8g8": Layout(1, 8, 8),
    "8x8g32": Layout(8, 8, 32),
    "3x5g16": Layout(3, 5, 16),  # nobody publishes such, and blocks of rows
    "2x12g4x2": Layout(2, 12, 4, 2),
}


def tensors(shape: tuple[int, int], layout: Layout, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Suffix -> random tensor of a matrix [out, in] whose weights have a deviation of about 0.15, with outliers."""
    out, columns = shape
    generator = torch.Generator().manual_seed(seed)
    integers, entries = torch.int8 if layout.bits <= 8 else torch.int16, 1 << layout.bits
    sizes = (out // layout.out_group, columns // layout.in_group, layout.books)
    codes = torch.randint(0, entries, sizes, generator=generator)
    codes[0, 0, 0], codes[-1, -1, -1] = 0, entries - 1
    books = torch.randn(layout.books, entries, layout.out_group, layout.in_group, generator=generator)
    books *= 0.15 / layout.books**0.5
    books[0, 0], books[-1, -1] = 1.5, -0.0
    scales = 0.5 + torch.rand(sizes[0], 1, 1, 1, generator=generator)
    wrapped = torch.where(codes >= entries // 2, codes - entries, codes)  # what is meant unsigned is stored signed
    return {".codes": wrapped.to(integers), ".codebooks": books.to(dtype), ".scales": scales.to(dtype)}


def write(
    folder: Path,
    layout: Layout,
    dtype: torch.dtype = torch.float16,
    model_type: str = "llama",
    plain: tuple[str, ...] = (),
    **overrides: Any,
) -> Path:
    """A checkpoint whose block Linears are in AQLM, but for those whose path ends in one of `plain`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(model_type, initializer_range=0.15, **overrides).to(dtype)
    model.config.dtype = dtype
    held = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for seed, (path, linear) in enumerate(model.named_modules()):
        if not isinstance(linear, nn.Linear) or path == "lm_head" or path.endswith(plain or ("\n",)):
            continue
        del held[f"{path}.weight"]
        made = tensors(tuple(linear.weight.shape), layout, dtype, seed)
        held |= {path + suffix: tensor for suffix, tensor in made.items()}
    if model.config.tie_word_embeddings:
        del held["lm_head.weight"]
    names = [name for name in held if name.endswith(".weight")]
    # AQLM's converter writes names of weights; transformers 5 compares with names of modules, so it gets these as well.
    names += [name.removesuffix(".weight") for name in names]
    model.config.quantization_config = config(layout, names)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def config(layout: Layout, unquantized: list[str]) -> dict[str, Any]:
    """config.json's `quantization_config`."""
    return {
        "quant_method": "aqlm",
        "in_group_size": layout.in_group,
        "out_group_size": layout.out_group,
        "num_codebooks": layout.books,
        "nbits_per_codebook": layout.bits,
        "linear_weights_not_to_quantize": unquantized,
    }

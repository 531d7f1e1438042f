"""vq2 by another way than the product's: matrices of random tensors, what they mean in float64, and tiny checkpoints.

`write(folder, "s4l16")` gives a folder that localq reads; no quantizer is involved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from localq.files.schemes import vq2_codebooks
from localq.formats.codebooks import vq2
from localq.formats.codebooks.vq2 import Packed
from tests.support.models.tiny_checkpoints import make_model, write_tokenizer

SCHEMES = ("s4l16", "s4l16+s16l16", "s4l16+s8l32", "s4l16+s4l4", "s2l6", "s8l8", "s16l32", "s8l8+s8l8")


def packed_of(shape: tuple[int, int], scheme: str = "s4l16", signs: bool = True, seed: int = 0) -> Packed:
    """A random matrix [out, in] whose weights have a deviation of about 0.15, with outliers among the codewords."""
    out, columns = shape
    generator = torch.Generator().manual_seed(seed)
    books = []
    for stride, length in vq2_codebooks(scheme):
        codes = torch.randint(0, 256, (out, columns // stride), generator=generator, dtype=torch.uint8)
        codes[0, 0], codes[-1, -1] = 0, 255
        codebook = 0.1 * (stride / length) ** 0.5 * torch.randn(256, length, generator=generator)
        codebook[0, 0], codebook[255, -1] = 1.5, -0.0
        books.append((codes, codebook.half()))
    scales = (0.5 + torch.rand(out, generator=generator)).half()
    bits = torch.randint(0, 256, (columns // 8,), generator=generator, dtype=torch.uint8)
    return Packed(tuple(books), scales, bits if signs else None, shape)


def sylvester(size: int) -> Tensor:
    """The Hadamard matrix of that size, f64, normalized: (H H; H -H) of the one of half the size."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rotation(columns: int, signs: Tensor) -> Tensor:
    """H diag(signs) as one f64 matrix."""
    block = next(size for size in (4096, 2048, 1024, 512, 256, 128, 64, 32, 16) if columns % size == 0)
    hadamard = torch.block_diag(*[sylvester(block)] * (columns // block))
    return hadamard * torch.tensor([-1.0 if signs[i // 8] >> (i % 8) & 1 else 1.0 for i in range(columns)]).double()


def decoded(packed: Packed) -> Tensor:
    """Term by term in f32, in the order of the format's page."""
    out, columns = packed.shape
    weight = torch.zeros(out, columns)
    for codes, codebook in packed.books:
        stride, length = columns // codes.shape[1], codebook.shape[1]
        for h in range(codes.shape[1]):
            end = min(stride * h + length, columns)
            weight[:, stride * h : end] += codebook[codes[:, h].long(), : end - stride * h].float()
    return weight * packed.scales.float()[:, None]


def exact(packed: Packed) -> Tensor:
    """W in f64, but for the f32 sums of `decoded`."""
    weight = decoded(packed).double()
    return weight if packed.signs is None else weight @ rotation(packed.shape[1], packed.signs)


def write(
    folder: Path,
    scheme: str = "s4l16",
    model_type: str = "llama",
    *,
    signs: bool = True,
    home: Callable[[str], str | None] = lambda path: None,
    plain: tuple[str, ...] = ("lm_head",),
    **overrides: Any,
) -> dict[str, Packed]:
    """A checkpoint whose Linears are in vq2, but for those whose path ends in one of `plain`; they are returned.

    home   path of a Linear -> the module whose codebooks it has, as in `vq2.to_tensors`
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(model_type, initializer_range=0.15, **overrides).half()
    model.config.dtype = torch.float16
    held = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    matrices: dict[str, Packed] = {}
    of_home: dict[str, Packed] = {}
    for seed, (path, linear) in enumerate(model.named_modules()):
        if not isinstance(linear, nn.Linear) or path.endswith(plain):
            continue
        packed, where = packed_of(tuple(linear.weight.shape), scheme, signs, seed), home(path)
        if where is not None:
            books = of_home.setdefault(where, packed).books
            codebooks = [codebook for _, codebook in books]
            shared = tuple((codes, each) for (codes, _), each in zip(packed.books, codebooks, strict=True))
            packed = Packed(shared, packed.scales, packed.signs, packed.shape)
        matrices[path] = packed
        del held[f"{path}.weight"]
        held |= vq2.to_tensors(packed, path, where)
    if model.config.tie_word_embeddings:
        del held["lm_head.weight"]
    model.config.quantization_config = vq2.quantization_config("float16", ["lm_head"])
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    write_tokenizer(folder)
    return matrices

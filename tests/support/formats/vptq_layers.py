"""Random VPTQ layers as they lie in checkpoints, written with code of the tests' own, and the `vptq` package's answer.

The package's compiled library needs CUDA and its import needs `sentence_transformers`, which it never uses here: a
stand-in takes that name while it is imported. `dequant` is plain torch and comes from the package unchanged.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from localq.formats.checkpoint import Checkpoint
from tests.support.formats.memory_checkpoint import Held

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Layout:
    """Of a Linear; `scheme` is (vector length, centroids, residual centroids), `outlier` the same with a column count.

    perm: type of the permutation, None without. dtypes: of the centroids, of the residual ones, of the outliers', of
    the norm.
    """

    scheme: tuple[int, int, int]
    out: int
    columns: int
    outlier: tuple[int, int, int] = (-1, -1, 0)
    groups: int = 1
    packed: bool = True
    perm: torch.dtype | None = torch.int16
    norm: bool = True
    dtypes: tuple[torch.dtype, ...] = (F16, F16, F16, F16)

    @property
    def group_size(self) -> int:
        return (self.columns - self.outlier[2]) // self.groups


# The sizes of all differ; a vector length that does not divide `out`, and words that end within an index, are the rule.
LAYOUTS = {
    "v8-k65536-0": Layout((8, 65536, 0), 44, 39),
    "v8-k65536-256": Layout((8, 65536, 256), 35, 70, dtypes=(BF16, BF16, BF16, BF16)),
    "v8-k65536-65536": Layout((8, 65536, 65536), 24, 33),
    "v16-k65536-65536": Layout((16, 65536, 65536), 47, 19),
    "v16-k65536-1024": Layout((16, 65536, 1024), 33, 50, dtypes=(BF16, BF16, BF16, BF16)),
    "v6-k4096-0": Layout((6, 4096, 0), 41, 53),
    "v12-k512-64": Layout((12, 512, 64), 31, 45, dtypes=(F32, F32, F32, F32)),
    "v1-k2-0": Layout((1, 2, 0), 9, 67),
    "longer than out": Layout((16, 128, 32), 5, 37),
    "three groups": Layout((8, 256, 16), 21, 3 * 17, groups=3),
    "outliers": Layout((8, 1024, 0), 43, 36, outlier=(4, 32, 5)),
    "outliers, longer vectors": Layout((6, 512, 128), 38, 41, outlier=(16, 256, 8), dtypes=(BF16, BF16, BF16, BF16)),
    "outliers of many": Layout((8, 64, 0), 30, 40, outlier=(2, 65536, 7)),
    "all at once": Layout((16, 4096, 256), 75, 11 + 2 * 23, outlier=(3, 100, 11), groups=2),
    "no permutation": Layout((8, 2048, 0), 27, 46, perm=None),
    "64-bit permutation": Layout((8, 2048, 0), 28, 57, perm=torch.int64),
    "no norm": Layout((8, 8192, 32), 29, 48, norm=False),
    "indices alone": Layout((8, 128, 0), 25, 30, perm=None, norm=False),
    "unpacked": Layout((8, 65536, 0), 26, 31, packed=False, perm=torch.int64),
    "unpacked, odd counts": Layout((7, 1000, 99), 51, 34, outlier=(5, 77, 4), packed=False, dtypes=(BF16,) * 4),
    "unpacked groups": Layout((16, 300, 20), 52, 4 * 9, groups=4, packed=False),
    "four types": Layout((8, 512, 16), 42, 63, outlier=(4, 16, 3), dtypes=(F16, BF16, F32, F16)),
    "two types": Layout((8, 512, 0), 45, 61, dtypes=(BF16, BF16, BF16, F32)),
}


@dataclass(frozen=True)
class Layer:
    """tensors: suffix -> tensor; config: its block of config.json; numbers: main and residual indices, unpacked."""

    layout: Layout
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    numbers: tuple[Tensor, Tensor]


def make(layout: Layout, seed: int = 0, spread: float = 0.5) -> Layer:
    """A layer with random numbers in all its tensors; weights have a standard deviation of about `spread`."""
    generator = torch.Generator().manual_seed(seed)

    def floats(dtype: torch.dtype, *shape: int, mean: float = 0.0, by: float = 1.0) -> Tensor:
        return (mean + by * torch.randn(*shape, generator=generator)).to(dtype)

    def integers(count: int, *shape: int) -> Tensor:
        found = torch.randint(count, shape, generator=generator)
        found.view(-1)[-1], found.view(-1)[0] = count - 1, 0  # the ends of the codebook
        return found

    length, count, residuals = layout.scheme
    outlier_len, outlier_count, outliers = layout.outlier
    places = (layout.groups, -(-layout.out // length), layout.group_size)
    main = integers(count, *places)
    residual = integers(residuals, *places) if residuals else torch.zeros_like(main)
    tensors = {".centroids.weight": floats(layout.dtypes[0], layout.groups, count * length, by=spread)}
    if residuals:
        tensors[".res_centroids.weight"] = floats(layout.dtypes[1], layout.groups, residuals * length, by=spread / 4)
    tensors |= _stored(layout, main, residual)
    if outliers:
        tensors[".outlier_centroids.weight"] = floats(layout.dtypes[2], 1, outlier_count * outlier_len, by=4 * spread)
        indices = integers(outlier_count, 1, -(-layout.out // outlier_len), outliers)
        tensors[".outlier_indices"] = shorts(indices)
    if layout.perm is not None:
        order = torch.randperm(layout.columns, generator=generator)
        tensors[".perm"] = order if layout.perm == torch.int64 else shorts(order)
    if layout.norm:
        tensors[".weight_scale"] = floats(layout.dtypes[3], layout.columns, mean=1, by=0.3)
        tensors[".weight_bias"] = floats(layout.dtypes[3], layout.columns, by=spread / 9)
    return Layer(layout, tensors, _config(layout), (main, residual))


def _stored(layout: Layout, main: Tensor, residual: Tensor) -> dict[str, Tensor]:
    _, count, residuals = layout.scheme
    if layout.packed:
        bits = count.bit_length() - 1
        total = bits + (residuals.bit_length() - 1 if residuals else 0)
        return {".indices": packed(main + (residual << bits), total)}
    stored = {".indices": shorts(main)}
    return {**stored, ".res_indices": shorts(residual)} if residuals else stored


def _config(layout: Layout) -> dict[str, Any]:
    (length, count, residuals), (outlier_len, outlier_count, outliers) = layout.scheme, layout.outlier
    return {
        "bias": None,
        "enable_norm": layout.norm,
        "enable_perm": layout.perm is not None,
        "group_num": layout.groups,
        "group_size": layout.group_size,
        "in_features": layout.columns,
        "indices_as_float": False,
        "is_indice_packed": layout.packed,
        "num_centroids": [outlier_count, count],
        "num_res_centroids": [-1, residuals or -1],
        "out_features": layout.out,
        "outlier_size": outliers,
        "vector_lens": [outlier_len, length],
    }


def shorts(numbers: Tensor) -> Tensor:
    """int16 with the bits of each number below 65,536."""
    return ((numbers + 2**15) % 2**16 - 2**15).to(torch.int16)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Each row [..., columns] as one long integer, the first number lowest, cut into int32 words."""
    words = -(-numbers.shape[-1] * bits // 32)
    rows = []
    for row in numbers.reshape(-1, numbers.shape[-1]).tolist():
        whole = sum(number << place * bits for place, number in enumerate(row))
        rows.append(torch.frombuffer(bytearray(whole.to_bytes(4 * words, "little")), dtype=torch.int32))
    return torch.stack(rows).reshape(*numbers.shape[:-1], words)


def checkpoint_of(layer: Layer, name: str = "a.q_proj") -> Checkpoint:
    tensors = {name + suffix: tensor for suffix, tensor in layer.tensors.items()}
    return Held(tensors).checkpoint({"quant_method": "vptq", "config_for_layers": {name: layer.config}})


# ---- the package


def package_dequant() -> Callable[..., Tensor]:
    """`vptq.ops.dequant`; skips the test where the package is not installed."""
    pytest.importorskip("tqdm")  # the package's, which is installed without its dependencies
    named = "sentence_transformers.SentenceTransformer"
    outer, inner = types.ModuleType("sentence_transformers"), types.ModuleType(named)
    inner.SentenceTransformer = type("SentenceTransformer", (), {})  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules):
        sys.modules.setdefault("sentence_transformers", outer)
        sys.modules.setdefault(named, inner)
        package = pytest.importorskip("vptq.ops", reason="vptq has wheels for Linux only")
        loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] != outer.__name__}
    sys.modules.update(loaded)
    dequant: Callable[..., Tensor] = package.dequant
    return dequant


def by_package(dequant: Callable[..., Tensor], layer: Layer) -> Tensor:
    """The weights [out, in] as the package has them, in the types that are stored."""
    layout, tensors = layer.layout, layer.tensors
    (length, count, residuals), (outlier_len, outlier_count, outliers) = layout.scheme, layout.outlier
    perm = tensors.get(".perm")
    result: Tensor = dequant(
        indices=tensors[".indices"],
        centroids=tensors[".centroids.weight"].view(layout.groups, count, length),
        outlier_indices=tensors.get(".outlier_indices"),
        outlier_centroids=tensors.get(".outlier_centroids.weight"),
        res_indices=tensors.get(".res_indices"),
        res_centroids=tensors.get(".res_centroids.weight"),
        perm=None if perm is None else shorts(perm.long()),  # it knows only 16 bits
        weight_scale=tensors.get(".weight_scale"),
        weight_bias=tensors.get(".weight_bias"),
        is_indice_packed=layout.packed,
        enable_outlier=outliers > 0,
        enable_residual=residuals > 0,
        enable_perm=layout.perm is not None,
        enable_norm=layout.norm,
        num_centroids=count,
        num_outlier_centroids=outlier_count,
        num_res_centroids=residuals or -1,
        padding=-layout.out % length,
        outlier_padding=-layout.out % outlier_len if outliers else 0,
        num_codebooks=layout.groups,
        group_size=layout.group_size,
        outlier_size=outliers,
        vector_len=length,
        outlier_vector_len=outlier_len,
    )
    return result

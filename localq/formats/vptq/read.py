"""Reading VPTQ from a checkpoint: what config.json says, what the tensors are, and that the two agree.

Names say nothing and config.json is not believed by itself: every shape and type is compared with it, every index is
within its table, and the permutation is one. Whatever differs is a LocalqError (exit 8) that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files.json_files import DAMAGED
from localq.formats.checkpoint import Checkpoint
from localq.formats.vptq.codec import FIELDS, WORD, Packed, index_bits, words_of

SUFFIXES = {name: f".{name}.weight" if name.endswith("centroids") else f".{name}" for name in FIELDS}
SUFFIXES["places"] = ".perm"  # read as its inverse
LARGEST = {"vector length": 256, "centroids": 2**16, "groups": 2**16, "columns": 2**20, "rows": 2**20}
PERMUTABLE = 2**16  # columns that 16 bits tell apart
OPTIONAL = {"places": "enable_perm", "weight_scale": "enable_norm", "weight_bias": "enable_norm"}
SHORTS = (torch.int16, torch.uint16, torch.float16)  # all hold the bits of a u16
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CHECKED_AT_A_TIME = 2**20


@dataclass(frozen=True)
class Layer:
    """Facts of a Linear from config.json. residuals, outlier_len and outlier_count are 0 if there are none."""

    out: int
    columns: int
    vector_len: int
    count: int
    residuals: int
    outlier_len: int
    outlier_count: int
    outliers: int
    groups: int
    group_size: int
    packed: bool

    @property
    def vectors(self) -> int:
        """Vectors of a column."""
        return -(-self.out // self.vector_len)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Field -> the shape that its tensor has in a checkpoint, of all that this layer can have."""
        bits = index_bits(self.count) + (index_bits(self.residuals) if self.residuals else 0)
        unpacked = (self.groups, self.vectors, self.group_size)
        shapes: dict[str, tuple[int, ...]] = {
            "indices": (*unpacked[:2], words_of(self.group_size, bits)) if self.packed else unpacked,
            "centroids": (self.groups, self.count * self.vector_len),
        }
        if self.residuals:
            shapes["res_centroids"] = (self.groups, self.residuals * self.vector_len)
            if not self.packed:
                shapes["res_indices"] = unpacked
        if self.outlier_count:
            shapes["outlier_indices"] = (1, -(-self.out // self.outlier_len), self.outliers)
            shapes["outlier_centroids"] = (1, self.outlier_count * self.outlier_len)
        return shapes | dict.fromkeys(("places", "weight_scale", "weight_bias"), (self.columns,))


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, by config.json and headers; LocalqError (exit 8) where they are unsound."""
    layer = _layer(_entry(checkpoint.quantization, prefix), checkpoint.tensors, prefix)
    return layer.out, layer.columns


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound."""
    said = _entry(checkpoint.quantization, prefix)
    layer = _layer(said, checkpoint.tensors, prefix)
    shapes = layer.shapes()
    _check_presence(said, checkpoint.tensors, prefix, shapes)
    held: dict[str, Tensor | None] = {}
    for name, suffix in SUFFIXES.items():
        held[name] = None
        if prefix + suffix not in checkpoint.tensors:
            continue
        found = tuple(checkpoint.tensors[prefix + suffix].shape)
        _require(prefix, found == shapes[name], f"{suffix[1:]} has shape {list(found)}; expected {list(shapes[name])}")
        held[name] = _sound(checkpoint.read(prefix + suffix), name, layer, prefix)
    assert held["indices"] is not None  # for the type checker: `_check_presence` has seen these two
    assert held["centroids"] is not None
    return Packed(**held, shape=(layer.out, layer.columns))  # type: ignore[arg-type]  # the two are no None


# ---- config.json


def _entry(quantization: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The block of the Linear `prefix`."""
    layers, shared = quantization.get("config_for_layers"), quantization.get("shared_layer_config")
    said = layers.get(prefix) if isinstance(layers, dict) else None
    if said is None and isinstance(shared, dict):
        said = shared.get(prefix.rpartition(".")[2])
    _require(prefix, isinstance(said, dict), "quantization_config in config.json has no entry for this layer")
    assert isinstance(said, dict)  # for the type checker
    _require(prefix, said.get("vector_quant_dim", "out") == "out", "the vectors do not run along the output dimension")
    _require(prefix, said.get("norm_dim") in (None, 0), "normalization is not applied per input column")
    return said


def _layer(said: dict[str, Any], tensors: Mapping[str, Any], prefix: str) -> Layer:
    """The block, every number within its limits. Sizes that it leaves out (or gives as -1) follow from the others."""
    outlier_len, length = _pair(said, "vector_lens", LARGEST["vector length"], prefix)
    outlier_count, count = _pair(said, "num_centroids", LARGEST["centroids"], prefix)
    outlier_residuals, residuals = _pair(said, "num_res_centroids", LARGEST["centroids"], prefix)
    _require(prefix, length >= 1 and count >= 1, f"{count} centroids of {length} weights do not form a valid codebook")
    outliers = _number(said, "outlier_size", 0, LARGEST["columns"], prefix)
    if outlier_len < 2 or outlier_count < 1:  # then, as the package has it, there are none, whatever their number
        outliers = outlier_len = outlier_count = 0
    elif outlier_residuals > 0:
        raise bad_file(prefix, "outliers with residual centroids are not supported", DAMAGED)
    groups = _number(said, "group_num", 1, LARGEST["groups"], prefix)
    size = _number(said, "group_size", 1, LARGEST["columns"], prefix)
    indices = _part(tensors, "indices", prefix)
    packed, residuals = indices.dtype == "int32", max(residuals, 0)
    _require(prefix, len(indices.shape) == 3, f"indices has shape {list(indices.shape)}; expected three dimensions")
    _require(prefix, not packed or _whole_bits(count, residuals), f"{count} and {residuals} centroids cannot be packed")
    columns = outliers + groups * size
    out = indices.shape[1] * length
    out = out if said.get("out_features") in (None, -1) else _number(said, "out_features", 1, LARGEST["rows"], prefix)
    _require(
        prefix,
        said.get("in_features") in (None, -1, columns),
        f"in_features does not match the {columns} columns of the groups",
    )
    return Layer(out, columns, length, count, residuals, outlier_len, outlier_count, outliers, groups, size, packed)


def _whole_bits(count: int, residuals: int) -> bool:
    """Return whether every number of so many bits is an index, and two of them fit a word."""
    sizes = [each for each in (count, residuals) if each]
    return all(size & (size - 1) == 0 for size in sizes) and 1 <= sum(map(index_bits, sizes)) <= WORD


def _pair(said: dict[str, Any], name: str, greatest: int, prefix: str) -> tuple[int, int]:
    """[of the outliers, of the others]; -1 and 0 are none."""
    value = said.get(name)
    sound = isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
    _require(prefix, sound and all(-1 <= each <= greatest for each in value or ()), _not_allowed(name, value))
    assert isinstance(value, list)  # for the type checker
    return value[0], value[1]


def _number(said: dict[str, Any], name: str, least: int, greatest: int, prefix: str) -> int:
    value = said.get(name)
    _require(prefix, type(value) is int and least <= value <= greatest, _not_allowed(name, value))
    assert type(value) is int  # for the type checker
    return value


def _not_allowed(name: str, value: object) -> str:
    return f"config.json specifies an invalid {name}, {str(value)[:40]}"


# ---- tensors


def _part(tensors: Mapping[str, Any], name: str, prefix: str) -> Any:
    if prefix + SUFFIXES[name] not in tensors:
        raise bad_file(prefix, f"the checkpoint lacks {prefix + SUFFIXES[name]}", DAMAGED)
    return tensors[prefix + SUFFIXES[name]]


def _check_presence(
    said: dict[str, Any], tensors: Mapping[str, Any], prefix: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Every tensor is there that must be, and none that must not. What config.json leaves unsaid the tensors say."""
    for name, suffix in SUFFIXES.items():
        there, stated = prefix + suffix in tensors, said.get(OPTIONAL.get(name, ""))
        _require(
            prefix,
            name in shapes or not there,
            f"the checkpoint contains {suffix[1:]}, which config.json does not declare",
        )
        if name in shapes and name not in OPTIONAL:
            _part(tensors, name, prefix)
        elif name in shapes and stated is not None:
            has = f"but the checkpoint has {'a' if there else 'no'} {suffix[1:]}"
            _require(prefix, stated is there, f"{OPTIONAL[name]} is {str(stated)[:20]} in config.json, {has}")
    scale, bias = (prefix + SUFFIXES[name] in tensors for name in ("weight_scale", "weight_bias"))
    _require(prefix, scale == bias, "only one of weight_scale and weight_bias is present")
    stated, dtype = said.get("is_indice_packed"), tensors[prefix + SUFFIXES["indices"]].dtype
    why = f"is_indice_packed is {str(stated)[:20]} in config.json, but indices are {dtype}"
    _require(prefix, stated in (None, dtype == "int32"), why)


def _sound(stored: Tensor, name: str, layer: Layer, prefix: str) -> Tensor:
    """A tensor of the right shape, in the form that `Packed` has it."""
    if name == "indices" and layer.packed:
        return stored
    if name == "places":
        return _places(stored, layer, prefix)
    if name.endswith("indices"):
        counts = {"indices": layer.count, "res_indices": layer.residuals, "outlier_indices": layer.outlier_count}
        indices = _shorts(stored, name, counts[name], prefix)
        return indices[0] if name == "outlier_indices" else indices
    _require(prefix, stored.dtype in FLOATS, f"{name} has dtype {stored.dtype}; expected floats")
    _require(prefix, bool(torch.isfinite(stored).all()), f"{name} contains NaN or infinity")
    if name == "outlier_centroids":
        return stored.view(layer.outlier_count, layer.outlier_len)
    return stored.view(layer.groups, -1, layer.vector_len) if name.endswith("centroids") else stored


def _shorts(stored: Tensor, name: str, count: int, prefix: str) -> Tensor:
    """The bits of a u16 as int16, each below `count`."""
    _require(prefix, stored.dtype in SHORTS, f"{name} has dtype {stored.dtype}; expected 16-bit indices")
    shorts = stored.view(torch.int16)
    for part in torch.split(shorts.reshape(-1), CHECKED_AT_A_TIME):
        largest = int((part.to(torch.int32) & 0xFFFF).max()) if part.numel() else 0
        _require(prefix, largest < count, f"{name} contains the index {largest}, but there are only {count} centroids")
    return shorts


def _places(stored: Tensor, layer: Layer, prefix: str) -> Tensor:
    """The inverse of a permutation, every column once: int64, int16 or uint16 [in] -> int16 (bits of a u16)."""
    known = stored.dtype in (torch.int64, torch.int16, torch.uint16)
    _require(
        prefix,
        known and layer.columns <= PERMUTABLE,
        f"perm has dtype {stored.dtype} for {layer.columns} columns, which is not supported",
    )
    order = stored if stored.dtype == torch.int64 else stored.view(torch.int16).long() & 0xFFFF
    in_order, places = order.sort()
    each_once = torch.equal(in_order, torch.arange(layer.columns))
    _require(prefix, each_once, "perm does not list every column exactly once")
    return (places - ((places >= 2**15) * 2**16)).to(torch.int16)


def _require(prefix: str, holds: bool, why: str) -> None:
    if not holds:
        raise bad_file(prefix, f"damaged VPTQ weights: {why}", DAMAGED)

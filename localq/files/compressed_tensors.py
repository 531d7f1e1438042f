"""The `quantization_config` of compressed-tensors: groups of weights, their scheme, and what localq does not read.

`config_groups` has one entry per kind of quantization, with `targets` (names, "re:" patterns, classes); `ignore` names
modules left in 16 bit. Neither is matched against names: the tensors of a module say whether it is quantized, in which
groups and with which zero points, and some entry must agree (`formats.int4.compressed`). So patterns of a foreign file
never run. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHOD = "compressed-tensors"
PACKED = "pack-quantized"
FLOATS = ("float-quantized", "naive-quantized")  # layouts of FP8
BITS = 4
LARGEST = 2**16  # columns of a group
_PRESETS = {"W4A16": True, "W4A16_ASYM": False}  # name of an entry that lists targets alone -> symmetric
_ORDERED = ("group", "dynamic", "true")  # values of `actorder` with a tensor weight_g_idx


@dataclass(frozen=True)
class WeightGroup:
    """How an entry of `config_groups` quantizes weights. group: columns that share a scale, -1 for all of a row."""

    group: int
    symmetric: bool
    ordered: bool = False

    def __str__(self) -> str:
        """For errors."""
        size = "whole rows" if self.group == -1 else f"groups of {self.group}"
        return f"{size} {'without' if self.symmetric else 'with'} zero points"


def weight_groups(quantization: Mapping[str, Any]) -> list[WeightGroup]:
    """The entries that quantize weights, those that are not `unreadable`, in their order."""
    found = (_group(*entry) for entry in _of_weights(quantization).items())
    return [each for each in found if isinstance(each, WeightGroup)]


def scheme_of_config(quantization: Mapping[str, Any]) -> str:
    """The scheme of the first entry: "g32", or "row"."""
    first = next(iter(weight_groups(quantization)), None)
    return "" if first is None else "row" if first.group == -1 else f"g{first.group}"


def is_fp8(quantization: Mapping[str, Any]) -> bool:
    """Whether all quantized weights are floats of 8 bits with scales (`formats.fp8_source`)."""
    entries = _of_weights(quantization)
    types = [_weights(name, entry) or {} for name, entry in entries.items()]
    are_floats = all(each.get("type") == "float" and each.get("num_bits") == 8 for each in types)
    layouts = {_layout(quantization, entry) for entry in entries.values()}
    return bool(entries) and are_floats and layouts <= {*FLOATS} and not _change(quantization)


def fp8_block(quantization: Mapping[str, Any]) -> Any:
    """`block_structure` of the first weights that have one: rows and columns that share a scale; None without one."""
    blocks = ((_weights(*entry) or {}).get("block_structure") for entry in _of_weights(quantization).items())
    return next((each for each in blocks if each is not None), None)


def unreadable(quantization: Mapping[str, Any]) -> str:
    """The variant in a few words, if localq does not read it; empty if it does."""
    if change := _change(quantization):
        return f"compressed-tensors with {change}"
    weights = _of_weights(quantization)
    if not weights:
        return "compressed-tensors without a group of quantized weights"
    for name, entry in weights.items():
        layout = _layout(quantization, entry)
        if layout != PACKED:
            return f"compressed-tensors in the layout {layout[:40]!r} (localq supports {PACKED!r})"
        if isinstance(why := _group(name, entry), str):
            return f"compressed-tensors {why}"
    return ""


def _change(quantization: Mapping[str, Any]) -> str:
    """What else was done to the weights, which makes them useless alone; empty for nothing."""
    sparsity, rotations = quantization.get("sparsity_config"), quantization.get("transform_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        return "sparse weights"
    return "rotated inputs" if isinstance(rotations, dict) and rotations.get("config_groups") else ""


def _of_weights(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that quantize weights, malformed ones as well."""
    stated = quantization.get("config_groups")
    entries = stated.items() if isinstance(stated, dict) else ()
    return {name: entry for name, entry in entries if _weights(name, entry) is not None}


def _weights(name: str, entry: Any) -> Mapping[str, Any] | None:
    """The arguments of an entry's weights; None where it has none."""
    if isinstance(entry, list):
        return {"preset": name}
    found = entry.get("weights") if isinstance(entry, dict) else {"malformed": True}
    return found if found is None or isinstance(found, dict) else {"malformed": True}


def _layout(quantization: Mapping[str, Any], entry: Any) -> str:
    """How the weights of an entry are stored."""
    own = entry.get("format") if isinstance(entry, dict) else None
    return str(own or quantization.get("format"))


def _group(name: str, entry: Any) -> WeightGroup | str:
    """How an entry quantizes weights, or why localq does not read it, in a few words."""
    weights = _weights(name, entry) or {}
    if "malformed" in weights:
        return f"with the malformed group {name[:40]!r}"
    if "preset" in weights:
        return WeightGroup(128, _PRESETS[name]) if name in _PRESETS else f"in the preset {name[:40]!r}"
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if weights.get("type", "int") != "int":
        return f"with weights of type {str(weights['type'])[:20]!r} (localq supports integers)"
    if type(bits) is not int or bits != BITS:
        return f"with {repr(bits)[:20]} bits (localq supports {BITS})"
    if strategy not in ("group", "channel"):
        return f"with one scale per {str(strategy)[:20]} (localq supports groups and channels)"
    if strategy == "group" and not (type(size) is int and 0 < size <= LARGEST):
        return f"in groups of {repr(size)[:20]} columns"
    symmetric, order = weights.get("symmetric", True), weights.get("actorder")
    if type(symmetric) is not bool:
        return f"with symmetric = {repr(symmetric)[:20]}"
    return WeightGroup(-1 if size is None or strategy == "channel" else size, symmetric, str(order).lower() in _ORDERED)

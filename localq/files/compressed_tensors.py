"""The `quantization_config` of compressed-tensors: groups of weights, their scheme, and what localq does not read.

Weights are integers of 4 or 8 bits, NVFP4, MXFP4 or FP8, also several of these in one model. `config_groups` has one
entry per kind of quantization, with `targets` (names, "re:" patterns, classes); `ignore` names modules left in 16 bit.
Neither is matched against names: the tensors of a module say whether it is quantized, in which groups and with which
zero points, and some entry must agree (`formats.int4.compressed`). So patterns of a foreign file never run. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHOD = "compressed-tensors"
PACKED, NVFP4, MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
NAIVE = "naive-quantized"
FLOATS, INTEGERS = ("float-quantized", NAIVE), ("int-quantized", NAIVE)  # layouts of FP8, and of integers in bytes
BITS = (4, 8)
FP4_GROUPS = {NVFP4: 16, MXFP4: 32}  # layout -> columns of a group
LARGEST = 2**16  # columns of a group
_PRESETS = {"W4A16": True, "W4A16_ASYM": False}  # name of an entry that lists targets alone -> symmetric
_ORDERED = ("group", "dynamic", "true")  # values of `actorder` with a tensor weight_g_idx


@dataclass(frozen=True)
class WeightGroup:
    """Integer quantization of weights, from an entry of `config_groups`.

    group   columns that share a scale, -1 for all of a row
    """

    group: int
    symmetric: bool
    ordered: bool = False
    bits: int = 4

    def __str__(self) -> str:
        """For errors."""
        size = "one group per row" if self.group == -1 else f"groups of {self.group}"
        return f"{self.bits}-bit weights with {size} and {'no ' if self.symmetric else ''}zero points"


def weight_groups(quantization: Mapping[str, Any]) -> list[WeightGroup]:
    """The entries that quantize weights to integers, those that are not `unreadable`, in their order."""
    kinds = (_kind(quantization, *entry) for entry in _of_weights(quantization).items())
    return [each for each in kinds if isinstance(each, WeightGroup)]


def packed_bits(quantization: Mapping[str, Any], words: int, groups: int) -> list[int]:
    """Bits that integers in rows of so many words and groups may have; those of some entry, else 4."""
    stated = weight_groups(quantization)
    possible = [each.bits for each in stated
                if groups == (1 if each.group == -1 else words * 32 // each.bits / each.group)]  # fmt: skip
    return list(dict.fromkeys(possible or [each.bits for each in stated] or [4]))


def scheme_of_config(quantization: Mapping[str, Any]) -> str:
    """The scheme of the first entry of integers: "g32", "row", or "g128, 8 bits"."""
    first = next(iter(weight_groups(quantization)), None)
    if first is None:
        return ""
    size = "row" if first.group == -1 else f"g{first.group}"
    return size if first.bits == 4 else f"{size}, {first.bits} bits"


def format_of(quantization: Mapping[str, Any]) -> str:
    """The format of the weights: "nvfp4" or "mxfp4" if some are, "fp8" if all are, else METHOD."""
    if unreadable(quantization):
        return METHOD
    kinds = {_kind(quantization, *entry) for entry in _of_weights(quantization).items()}
    names = {each if isinstance(each, str) else METHOD for each in kinds}
    return next((each for each in ("nvfp4", METHOD, "mxfp4", "fp8") if each in names), METHOD)


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
        return "compressed-tensors without any quantized weights"
    for name, entry in weights.items():
        if isinstance(why := _kind(quantization, name, entry), _Refusal):
            return f"compressed-tensors {why.why}"
    return ""


def _change(quantization: Mapping[str, Any]) -> str:
    """Return the other change made to the weights, which makes them useless alone; empty if there is none."""
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
    """Return the storage layout of an entry's weights."""
    own = entry.get("format") if isinstance(entry, dict) else None
    return str(own or quantization.get("format"))


@dataclass(frozen=True)
class _Refusal:
    """Reason localq does not read an entry, in a few words."""

    why: str


def _kind(quantization: Mapping[str, Any], name: str, entry: Any) -> WeightGroup | str | _Refusal:
    """Return the quantization of an entry's weights: to integers, or to a float format, by its name."""
    weights, layout = _weights(name, entry) or {}, _layout(quantization, entry)
    if "malformed" in weights:
        return _Refusal(f"with a malformed group, {name[:40]!r}")
    if "preset" in weights:
        preset = WeightGroup(128, _PRESETS[name]) if name in _PRESETS else None
        return preset or _Refusal(f"with preset {name[:40]!r}")
    bits, of_type = weights.get("num_bits", 8), weights.get("type", "int")
    if layout in FP4_GROUPS:
        sound = of_type == "float" and bits == 4 and weights.get("group_size") == FP4_GROUPS[layout]
        return layout.partition("-")[0] if sound else _Refusal(f"in layout {layout!r} with unsupported weight settings")
    if layout in FLOATS and of_type == "float":
        return "fp8" if bits == 8 else _Refusal(f"with {repr(bits)[:20]}-bit floats")
    if layout not in (PACKED, *INTEGERS):
        return _Refusal(f"in layout {layout[:40]!r}")
    if of_type != "int":
        return _Refusal(f"with {str(of_type)[:20]} weights in layout {layout!r}")
    found = _group(weights)
    if isinstance(found, WeightGroup) and layout in INTEGERS and found.bits != 8:
        return _Refusal(f"with {found.bits} bits in layout {layout!r}")
    return found


def _group(weights: Mapping[str, Any]) -> WeightGroup | _Refusal:
    """Return the integer quantization stated in `weights`."""
    bits, size, strategy = weights.get("num_bits", 8), weights.get("group_size"), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if type(bits) is not int or bits not in BITS:
        return _Refusal(f"with {repr(bits)[:20]} bits (localq supports {' and '.join(map(str, BITS))})")
    if strategy not in ("group", "channel"):
        return _Refusal(f"with one scale per {str(strategy)[:20]} (must be one per group or channel)")
    if strategy == "group" and not (type(size) is int and 0 < size <= LARGEST):
        return _Refusal(f"with a group size of {repr(size)[:20]}")
    symmetric, order = weights.get("symmetric", True), weights.get("actorder")
    if type(symmetric) is not bool:
        return _Refusal(f"with symmetric = {repr(symmetric)[:20]}")
    group = -1 if size is None or strategy == "channel" else size
    return WeightGroup(group, symmetric, str(order).lower() in _ORDERED, bits)

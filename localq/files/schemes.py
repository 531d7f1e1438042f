"""Schemes, the variants of a format: parsed ("2x8g8", "s4l16", "q3g128"), and derived from files.

Torch-free; reads no file. For estimates the first matrix of AQLM or VPTQ stands for all; loading checks every matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from typing import Any

from localq.errors import LocalqError, usage_error
from localq.files.architecture import Architecture

MIX = "mix"  # mixed schemes are "mix" and bits per weight, of codes only (vq2) or of all tensors (bcq): "mix2.27"
LARGEST = 2**16  # entries of a codebook, weights of a codeword
BCQ_GROUPS = (32, 64, 128, 256, 512)  # columns that share scales
VQ2_SCHEMES = {"2": "s4l16", "2.5": "s4l16+s16l16", "3": "s4l16+s8l16", "4": "s4l16+s4l16"}  # by --bits of quantize
INT4_LAYOUTS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}  # quant_method -> supported packings
AUTO_ROUND_LAYOUTS = {  # `packing_format` of AutoRound -> the same packing
    "auto_round:auto_awq": "gemm", "auto_round:awq": "gemm", "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2",
}  # fmt: skip
INT4_BITS = (2, 3, 4, 8)  # of GPTQ; those of AWQ are 4
PLAIN_BITS = (16, 32)  # of layers that AutoRound leaves as they are

Shapes = Mapping[str, tuple[int, ...]]  # of all tensors of a checkpoint, by name


# ---- schemes as text


def mixed_bits(scheme: str) -> float | None:
    """Bits per weight of a mixture ("mix2.27"); None for a scheme that all matrices share."""
    match = re.fullmatch(rf"{MIX}(\d(?:\.\d+)?)", scheme)
    return float(match[1]) if match else None


def aqlm_scheme(scheme: str) -> tuple[int, int, int]:
    """(codebooks, bits of a code, columns of a codeword) of "2x8g8"; "" is "1x16g8"."""
    match = re.fullmatch(r"(\d+)x(\d+)g(\d+)", scheme or "1x16g8")
    if match is None:
        raise _no_scheme("aqlm", scheme, "2x8g8")
    return int(match[1]), int(match[2]), int(match[3])


def vptq_scheme(scheme: str) -> tuple[int, int, int]:
    """(weights of a codeword, codewords, residual codewords) of "v8-k65536-256"; "" is "v8-k65536-0"."""
    match = re.fullmatch(r"v(\d+)-k(\d+)-(\d+)", scheme or "v8-k65536-0")
    if match is None:
        raise _no_scheme("vptq", scheme, "v8-k65536-256")
    return int(match[1]), int(match[2]), int(match[3])


def int4_scheme(scheme: str) -> tuple[int, int]:
    """(columns that share a scale, bits) of integers: "g64", "g128, 8 bits"; 0 for "row", all columns; "" is "g128"."""
    match = re.fullmatch(r"(?:g([1-9]\d{0,5})|row)(?:, ([2348]) bits)?", scheme or "g128")
    if match is None:
        raise _no_scheme("4-bit groups:", scheme, "g128")
    return int(match[1] or 0), int(match[2] or 4)


def int4_group(scheme: str) -> int:
    """Columns that share a scale; see `int4_scheme`."""
    return int4_scheme(scheme)[0]


def int4_text(group: int, bits: int) -> str:
    """The reverse of `int4_scheme`."""
    size = f"g{group}" if group else "row"
    return size if bits == 4 else f"{size}, {bits} bits"


def vq2_codebooks(scheme: str) -> list[tuple[int, int]]:
    """(stride, length) of the codebooks of a vq2 scheme: "s4l16", or "s4l16+s8l16"; "" is "s4l16"."""
    books = [re.fullmatch(r"s(2|4|8|16)l(\d{1,2})", part) for part in (scheme or "s4l16").split("+")]
    found = [(int(match[1]), int(match[2])) for match in books if match]
    if not 1 <= len(books) == len(found) <= 2 or any(n % s or not s <= n <= 32 for s, n in found):
        raise _no_scheme("vq2", scheme, "s4l16, or s4l16+s8l16 for two codebooks")
    return found


def bcq_scheme(scheme: str) -> tuple[int, int, bool]:
    """(planes, columns of a group or 0 for all, has a zero point) of "q2row", "q4g64z"; "" is "q3g128"."""
    match = re.fullmatch(r"q([1-5])(?:g(32|64|128|256|512)|row)(z?)", scheme or "q3g128")
    if match is None:
        raise _no_scheme("bcq", scheme, "q3g128, q3row or q3g128z")
    return int(match[1]), int(match[2] or 0), bool(match[3])


def _no_scheme(format: str, scheme: str, example: str) -> LocalqError:
    return usage_error(
        f"{format} {scheme}", f"not a valid {format.rstrip(':')} scheme", f"Use a scheme such as {example}."
    )


_LAYER = re.compile(r"\blayers\.(\d{1,3})\.", re.ASCII)

# ---- schemes of files; "" if they state none


def aqlm_of_tensors(shapes: Shapes, config: dict[str, Any]) -> str:
    """The scheme from the shape of a codebook: [codebooks, entries, rows of a group, columns of a group]."""
    for shape in (shape for name, shape in shapes.items() if name.endswith(".codebooks")):
        if len(shape) == 4 and all(0 < size <= LARGEST for size in shape):
            books, entries, rows, columns = shape
            return f"{books}x{(entries - 1).bit_length()}g{rows * columns}"
    return ""


def vq2_of_tensors(shapes: Shapes, config: dict[str, Any]) -> str:
    """The scheme from the shapes of all Linears: codes [rows, codes] and codebooks [256, length].

    If matrices differ: "mix" and the bits per weight of all codes, such as "mix2.27".
    """
    found: set[str] = set()
    weights = bits = 0
    try:
        arch = Architecture.from_config(config)
        for prefix in (name.removesuffix(".codes") for name in shapes if name.endswith(".codes")):
            columns = columns_of(arch, prefix) or 0
            suffixes = [each for each in ("", "_2") if f"{prefix}.codes{each}" in shapes]
            scheme = "+".join(_vq2_codebook(shapes, prefix, each, columns) for each in suffixes)
            vq2_codebooks(scheme or "none")
            found.add(scheme)
            weights += shapes[f"{prefix}.codes"][0] * columns
            bits += sum(8 * math.prod(shapes[f"{prefix}.codes{each}"]) for each in suffixes)
    except LocalqError:  # for loading to name
        return ""
    return f"{MIX}{math.ceil(100 * bits / max(weights, 1)) / 100:.2f}" if len(found) > 1 else "".join(found)


def _vq2_codebook(shapes: Shapes, prefix: str, suffix: str, columns: int) -> str:
    """The scheme of one codebook: "s4l16"; empty for other shapes."""
    codes, codebook = shapes[f"{prefix}.codes{suffix}"], codebook_name(shapes, prefix, f".codebook{suffix}")
    book = shapes[codebook] if codebook else ()
    if len(codes) != 2 or len(book) != 2 or codes[1] < 1 or columns % codes[1]:
        return ""
    return f"s{columns // codes[1]}l{book[1]}"


def columns_of(arch: Architecture, prefix: str) -> int | None:
    """Columns of the Linear `prefix` of a checkpoint; None for an unknown name.

    The down projections of experts, shared experts and dense layers may differ in width.
    """
    name = prefix.rpartition(".")[2]
    if (".shared_expert." in prefix or ".shared_experts." in prefix) and name == "down_proj":
        return arch.shared_intermediate or None
    if ".experts." in prefix and name in ("down_proj", "w2"):
        return arch.expert_intermediate or None
    layer = _LAYER.search(prefix)
    return arch.columns_of(name, int(layer[1]) if layer else 0)


def codebook_name(names: Container[str], prefix: str, suffix: str) -> str | None:
    """Name of the vq2 tensor `suffix` (".codebook") of the Linear `prefix`: its own, or of a module above."""
    module = prefix
    while module:
        if module + suffix in names:
            return module + suffix
        module = module.rpartition(".")[0]
    return None


def bcq_of_tensors(shapes: Shapes, config: dict[str, Any]) -> str:
    """The scheme from the shapes of all signs [rows, planes, eights] and alphas [rows, layers, groups].

    If matrices differ: "mix" and the bits per weight of all tensors, such as "mix3.27". A row no longer than a group
    has one group in both spellings ("row" and "g128"), so it does not count as a difference.
    """
    pairs = [(shapes[name], shapes.get(f"{name.removesuffix('signs')}alphas", ())) for name in shapes
             if name.endswith(".signs")]  # fmt: skip
    pairs = [(signs, alphas) for signs, alphas in pairs if len(signs) == len(alphas) == 3 and all((*signs, *alphas))]
    found = {_bcq_matrix(signs, alphas) for signs, alphas in pairs}
    found -= {each for each in found for other in found if each != other and each == re.sub(r"g\d+", "row", other)}
    weights = sum(8 * signs[0] * signs[2] for signs, _ in pairs)
    stored = sum(math.prod(signs) + 2 * math.prod(alphas) for signs, alphas in pairs)
    return f"{MIX}{math.ceil(800 * stored / weights) / 100:.2f}" if len(found) > 1 else "".join(found)


def _bcq_matrix(signs: tuple[int, ...], alphas: tuple[int, ...]) -> str:
    """The scheme of one Linear: "q3g128"; empty for other shapes."""
    groups = (each for each in BCQ_GROUPS if -(-8 * signs[2] // each) == alphas[2])
    group = "row" if alphas[2] == 1 else f"g{next(groups, 0)}"
    scheme = f"q{signs[1]}{group}{'z' if alphas[1] > signs[1] else ''}"
    try:
        bcq_scheme(scheme)
    except LocalqError:  # for loading to name
        return ""
    return scheme


def int4_of_config(quantization: Mapping[str, Any]) -> str:
    """The scheme of AWQ or GPTQ from config.json: "g64", "row", or "g128, 8 bits"."""
    size = quantization.get("group_size", quantization.get("q_group_size", 128))
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    if type(size) is not int or not (size == -1 or 0 < size <= LARGEST) or bits not in INT4_BITS:
        return ""
    return int4_text(max(size, 0), bits)


def vptq_of_config(quantization: Mapping[str, Any]) -> str:
    """The scheme from the first matrix in config.json: three sizes, each [outliers, other columns]."""
    layers = quantization.get("config_for_layers")
    stated = next(iter(layers.values()), None) if isinstance(layers, dict) else None
    if not isinstance(stated, dict):
        return ""
    pairs = [stated.get(key) for key in ("vector_lens", "num_centroids", "num_res_centroids")]
    sizes = [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and type(pair[1]) is int]
    if len(sizes) != 3 or not all(0 < size <= LARGEST for size in sizes[:2]) or sizes[2] > LARGEST:
        return ""
    return f"v{sizes[0]}-k{sizes[1]}-{max(sizes[2], 0)}"


# ---- variants of AWQ and GPTQ


def int4_layout(quantization: Mapping[str, Any]) -> str:
    """The packing of AWQ or GPTQ in config.json, in lower case: "gemm", "gptq", "gptq_v2", "marlin"."""
    if "packing_format" in quantization:
        stated_packing = str(quantization["packing_format"])
        return AUTO_ROUND_LAYOUTS.get(stated_packing, stated_packing)
    if quantization.get("is_marlin_format") is True:
        return "marlin"
    if quantization.get("backend") == "llm-awq":
        return "llm-awq"
    is_awq = quantization.get("quant_method") == "awq"
    names = ("version", "checkpoint_format", "format") if is_awq else ("checkpoint_format", "format")
    stated = (quantization.get(name) for name in names)
    return next((str(each).lower() for each in stated if each), "gemm" if is_awq else "gptq")


def int4_unreadable(quantization: Mapping[str, Any]) -> str:
    """The variant of AWQ or GPTQ, in a few words, if localq does not read it; else empty."""
    method = str(quantization.get("quant_method"))
    layout, name = int4_layout(quantization), method.upper()
    stated = [quantization.get("bits", quantization.get("w_bit", 4 if method == "awq" else None))]
    stated += [each["bits"] for each in _layers(quantization, "dynamic") if "bits" in each]
    if "packing_format" in quantization:
        name, layers = "AutoRound", _layers(quantization, "extra_config")
        stated += [each["bits"] for each in layers if each.get("bits") not in (None, *PLAIN_BITS)]
        if variant := _auto_round_variant(quantization, layers):
            return variant
    known = (4,) if method == "awq" else INT4_BITS
    if others := [each for each in stated if type(each) is not int or each not in known]:
        many = "an unknown number of" if others[0] is None else repr(others[0])[:20]
        return f"{name} with {many} bits (localq supports {', '.join(map(str, known))})"
    if layout not in INT4_LAYOUTS[method]:
        return f"{name} in layout {layout[:40]!r} (localq supports {' and '.join(INT4_LAYOUTS[method])})"
    return ""


def _layers(quantization: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the entries of config.json for single layers."""
    stated = quantization.get(key)
    return [each for each in stated.values() if isinstance(each, dict)] if isinstance(stated, dict) else []


def _auto_round_variant(quantization: Mapping[str, Any], layers: list[dict[str, Any]]) -> str:
    """Return the AutoRound feature that GPTQ and AWQ tensors do not show, briefly; empty for plain integers."""
    if quantization.get("rotation_config"):
        return "AutoRound with rotated inputs"
    quantized = [quantization, *(each for each in layers if each.get("bits") not in PLAIN_BITS)]
    types = [str(each.get("data_type") or "int") for each in quantized]
    others = [each for each in types if each != "int"]
    return f"AutoRound with {others[0][:20]} weights (localq supports only integers)" if others else ""

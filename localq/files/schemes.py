"""Which variant of its format a model on the disk is in, in the catalogue's words: "2x8g8", "s4l16". Torch-free.

For estimates: the first matrix of AQLM or VPTQ speaks for all. Loading looks at every one. And which variants of AWQ
and GPTQ are not read, so that this is said before anything is fetched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from typing import Any

from localq.errors import LocalqError
from localq.files import format_sizes
from localq.files.architecture import Architecture
from localq.files.model_folder import ModelFiles
from localq.files.safetensors_headers import read_header, shard_paths

LARGEST = 2**16  # entries of a codebook, weights of a codeword
INT4_LAYOUTS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}  # quant_method -> how its words may be packed


def scheme_of(files: ModelFiles) -> str:
    """Empty for formats without variants, and where the files do not tell. A bad header is a LocalqError (exit 8)."""
    method = files.quantization.get("quant_method")
    if method in ("aqlm", "localq_vq2"):
        return scheme_in(files, _shapes(files))
    if method == "localq_bcq":
        return _bcq(files)
    if method in ("awq", "gptq"):
        return _int4(files.quantization)
    return _vptq(files.quantization) if method == "vptq" else ""


def scheme_in(files: ModelFiles, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The same of AQLM and vq2 by the shapes of all tensors, wherever these are; empty of other formats."""
    method = files.quantization.get("quant_method")
    if method == "aqlm":
        return _aqlm(shapes)
    return _vq2(shapes, files.config) if method == "localq_vq2" else ""


def _shapes(files: ModelFiles) -> dict[str, tuple[int, ...]]:
    """Of all tensors of the files."""
    headers = (read_header(path).tensors for path in shard_paths(files.path).values())
    return {name: each.shape for tensors in headers for name, each in tensors.items()}


def layout_of(quantization: Mapping[str, Any]) -> str:
    """How config.json says that words of AWQ or GPTQ are packed, in lower case: "gemm", "gptq", "gptq_v2", "marlin"."""
    if quantization.get("is_marlin_format") is True:
        return "marlin"
    if quantization.get("backend") == "llm-awq":
        return "llm-awq"
    is_awq = quantization.get("quant_method") == "awq"
    names = ("version", "checkpoint_format", "format") if is_awq else ("checkpoint_format", "format")
    stated = (quantization.get(name) for name in names)
    return next((str(each).lower() for each in stated if each), "gemm" if is_awq else "gptq")


def not_read(quantization: dict[str, Any]) -> str:
    """What of AWQ or GPTQ localq does not read in these files, in a few words; empty where there is nothing."""
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in INT4_LAYOUTS:
        return ""
    layout, layers = layout_of(quantization), quantization.get("dynamic")
    said = [quantization.get("bits", quantization.get("w_bit", 4 if method == "awq" else None))]
    if isinstance(layers, dict):
        said += [each["bits"] for each in layers.values() if isinstance(each, dict) and "bits" in each]
    if others := [each for each in said if type(each) is not int or each != 4]:
        many = "an unknown number of" if others[0] is None else repr(others[0])[:20]
        return f"{method.upper()} in {many} bits (4 are read)"
    if layout not in INT4_LAYOUTS[method]:
        return f"{method.upper()} in the layout {layout[:40]!r} ({' and '.join(INT4_LAYOUTS[method])} are read)"
    return ""


def only_experts(files: ModelFiles) -> bool:
    """Is nothing but the experts of a mixture quantized, in MXFP4? A conversion copies these as they are."""
    return files.quantization.get("quant_method") == "mxfp4" and Architecture.from_config(files.config).experts > 0


def _aqlm(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """By the shape of a codebook: [books, entries, rows of a group, columns of a group]."""
    for shape in (shape for name, shape in shapes.items() if name.endswith(".codebooks")):
        if len(shape) == 4 and all(0 < size <= LARGEST for size in shape):
            books, entries, rows, columns = shape
            return f"{books}x{(entries - 1).bit_length()}g{rows * columns}"
    return ""


def _vq2(shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]) -> str:
    """By the shapes of codes [rows, codes] and codebooks [256, length] of Linears whose columns are known.

    Where matrices differ, "mix" and the bits per weight of all codes: "mix2.27".
    """
    found: set[str] = set()
    weights = bits = 0
    try:
        arch = Architecture.from_config(config)
        for prefix in (name.removesuffix(".codes") for name in shapes if name.endswith(".codes")):
            columns = columns_of(arch, prefix) or 0
            suffixes = [each for each in ("", "_2") if f"{prefix}.codes{each}" in shapes]
            scheme = "+".join(_vq2_book(shapes, prefix, each, columns) for each in suffixes)
            format_sizes.vq2_books(scheme or "none")
            found.add(scheme)
            weights += shapes[f"{prefix}.codes"][0] * columns
            bits += sum(8 * math.prod(shapes[f"{prefix}.codes{each}"]) for each in suffixes)
    except LocalqError:  # for loading to name
        return ""
    mixed = f"{format_sizes.MIX}{math.ceil(100 * bits / max(weights, 1)) / 100:.2f}"
    return mixed if len(found) > 1 else "".join(found)


def _vq2_book(shapes: Mapping[str, tuple[int, ...]], prefix: str, suffix: str, columns: int) -> str:
    """Of one book: "s4l16"; empty where the shapes are none of a book."""
    codes, codebook = shapes[f"{prefix}.codes{suffix}"], codebook_name(shapes, prefix, f".codebook{suffix}")
    book = shapes[codebook] if codebook else ()
    if len(codes) != 2 or len(book) != 2 or codes[1] < 1 or columns % codes[1]:
        return ""
    return f"s{columns // codes[1]}l{book[1]}"


def columns_of(arch: Architecture, prefix: str) -> int | None:
    """Columns of the Linear `prefix` of a checkpoint; None for one not known. Of a model with both, the down projection
    of an expert is not as wide as that of a dense layer."""
    name = prefix.rpartition(".")[2]
    if ".experts." in prefix and name in ("down_proj", "w2"):
        return arch.expert_intermediate or None
    return arch.columns_of(name)


def codebook_name(names: Container[str], prefix: str, suffix: str) -> str | None:
    """The tensor of vq2 that the Linear `prefix` has as `suffix` (".codebook"): its own, or the nearest around it."""
    module = prefix
    while module:
        if module + suffix in names:
            return module + suffix
        module = module.rpartition(".")[0]
    return None


def _bcq(files: ModelFiles) -> str:
    """By the shapes of signs [rows, planes, eights] and alphas [rows, layers, groups] of all Linears.

    Where matrices differ, "mix" and the bits per weight of all that is stored: "mix3.27". Rows that are no longer than
    a group have the one that they would have in groups too.
    """
    shapes = _shapes(files)
    pairs = [(shapes[name], shapes.get(f"{name.removesuffix('signs')}alphas", ())) for name in shapes
             if name.endswith(".signs")]  # fmt: skip
    pairs = [(signs, alphas) for signs, alphas in pairs if len(signs) == len(alphas) == 3 and all((*signs, *alphas))]
    found = {_bcq_scheme(signs, alphas) for signs, alphas in pairs}
    found -= {each for each in found for other in found if each != other and each == re.sub(r"g\d+", "row", other)}
    weights = sum(8 * signs[0] * signs[2] for signs, _ in pairs)
    stored = sum(math.prod(signs) + 2 * math.prod(alphas) for signs, alphas in pairs)
    mixed = len(found) > 1
    return f"{format_sizes.MIX}{math.ceil(800 * stored / weights) / 100:.2f}" if mixed else "".join(found)


def _bcq_scheme(signs: tuple[int, ...], alphas: tuple[int, ...]) -> str:
    """Of one Linear: "q3g128"; empty where the shapes are none."""
    groups = (each for each in format_sizes.BCQ_GROUPS if -(-8 * signs[2] // each) == alphas[2])
    group = "row" if alphas[2] == 1 else f"g{next(groups, 0)}"
    scheme = f"q{signs[1]}{group}{'z' if alphas[1] > signs[1] else ''}"
    try:
        format_sizes.bcq_scheme(scheme)
    except LocalqError:  # for loading to name
        return ""
    return scheme


def _int4(quantization: dict[str, Any]) -> str:
    """Columns of a group: "g64", or "row"."""
    size = quantization.get("group_size", quantization.get("q_group_size", 128))
    if type(size) is not int or not (size == -1 or 0 < size <= LARGEST):
        return ""
    return "row" if size == -1 else f"g{size}"


def _vptq(quantization: dict[str, Any]) -> str:
    """By what config.json says of a matrix: [of outliers, of the rest] for each of three sizes."""
    layers = quantization.get("config_for_layers")
    said = next(iter(layers.values()), None) if isinstance(layers, dict) else None
    if not isinstance(said, dict):
        return ""
    pairs = [said.get(key) for key in ("vector_lens", "num_centroids", "num_res_centroids")]
    sizes = [pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and type(pair[1]) is int]
    if len(sizes) != 3 or not all(0 < size <= LARGEST for size in sizes[:2]) or sizes[2] > LARGEST:
        return ""
    return f"v{sizes[0]}-k{sizes[1]}-{max(sizes[2], 0)}"

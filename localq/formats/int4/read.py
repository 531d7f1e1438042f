"""Reading AWQ and GPTQ from a checkpoint: what the tensors are, what config.json says, and that the two agree.

Words of 32 bits hold whole codes of 2, 4 and 8 bits; three words hold 32 codes of 3 bits.

AWQ and GPTQ have P.qweight, P.qzeros and P.scales, packed along different sides (`awq`, `gptq`). Whatever differs from
the one that config.json names is a LocalqError (exit 8) that names it. `compressed` uses the checks of single tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localq.errors import bad_file
from localq.files import quantization_files, schemes
from localq.files.json_files import DAMAGED
from localq.formats.checkpoint import Checkpoint, TensorInfo
from localq.formats.int4.codec import ROWS, nibbles

WORD = 8  # codes of 4 bits in an int32
SIZES = (16, 32, 64, 128, 256, 512, 1024)  # of groups, as GPTQModel writes them; -1 is the whole row
DEFAULT_SIZE = 128  # where config.json says nothing: that of transformers
SUFFIXES = (".qweight", ".qzeros", ".scales")
FLOATS = ("float16", "bfloat16", "float32")
CHUNK_WEIGHTS = 2**22  # weights that are repacked together
LABELS = {"awq": "AWQ", "gptq": "GPTQ", "compressed-tensors": "compressed-tensors"}  # in errors
Sure = Callable[[bool, str], None]  # raises LocalqError (exit 8) with this reason unless the condition holds


@dataclass(frozen=True)
class Layout:
    """Of one Linear: [out, columns] of `bits` in `groups` groups of `group` columns, the last may have fewer."""

    out: int
    columns: int
    groups: int
    group: int
    bits: int = 4


def is_along_out(tensors: Mapping[str, Any], prefix: str) -> bool:
    """Return whether the Linear `prefix` packs 4-bit weights along the output like AWQ: words of qweight and qzeros."""
    if prefix + ".qweight" not in tensors or prefix + ".g_idx" in tensors:
        return False
    widths = [tensors[prefix + suffix].shape[-1:] for suffix in SUFFIXES if prefix + suffix in tensors]
    return len(widths) < len(SUFFIXES) or widths[0] != widths[2]


def layout(checkpoint: Checkpoint, prefix: str, method: str) -> Layout:
    """Sizes of the Linear `prefix` in `method` ("awq", "gptq"), by headers and config.json alone."""
    sure = functools.partial(require, prefix, method)
    said, tensors = checkpoint.quantization, checkpoint.tensors
    check_named(checkpoint, prefix, method, SUFFIXES)
    qweight, qzeros, scales = (tensors[prefix + suffix] for suffix in SUFFIXES)
    for name, tensor, types in (("qweight", qweight, ("int32",)), ("qzeros", qzeros, ("int32",)),
                                ("scales", scales, FLOATS)):  # fmt: skip
        check_matrix(sure, name, tensor, types)
    rows, width = qweight.shape
    bits = 4 if method == "awq" else _bits(said, qzeros.shape[1], width, sure)
    out, columns = (width * WORD, rows) if method == "awq" else (width, rows * 32 // bits)
    codes = 32 // math.gcd(32, bits)  # of whole words
    whole = out % codes == 0 and columns % codes == 0 and rows * 32 % bits == 0
    sure(whole, f"{out} x {columns} codes cannot be packed into words of {codes} codes")
    groups = scales.shape[0]
    for name, tensor, expected in (("scales", scales, (groups, out)), ("qzeros", qzeros, (groups, out * bits // 32))):
        sure(tuple(tensor.shape) == expected, f"{name} has shape {list(tensor.shape)}; expected {list(expected)}")
    if prefix + ".g_idx" in tensors:
        check_groups(sure, "g_idx", tensors[prefix + ".g_idx"], columns)
    return Layout(out, columns, groups, _group(said, columns, groups, sure), bits)


def check_named(checkpoint: Checkpoint, prefix: str, method: str, suffixes: Sequence[str]) -> None:
    """The Linear `prefix` has tensors of these suffixes, and config.json names `method`; else LocalqError (exit 8)."""
    for suffix in suffixes:
        if prefix + suffix not in checkpoint.tensors:
            raise bad_file(prefix, f"the checkpoint lacks {prefix + suffix}", DAMAGED)
    said, label = checkpoint.quantization, LABELS[method]
    if not said:
        files = " or ".join(("config.json", *quantization_files.NAMES[:2]))
        why = f"the weights are packed as {label}, but no file ({files}) describes the quantization"
        raise bad_file(prefix, why, "Download the model again, including all of its .json files.")
    named = said.get("quant_method")
    why = f"config.json specifies quant_method {repr(named)[:40]}, but the tensors are packed for {method}"
    require(prefix, method, named == method, why)


def check_matrix(sure: Sure, name: str, tensor: TensorInfo, types: Sequence[str]) -> None:
    """A tensor of one of `types` with two dimensions."""
    sure(tensor.dtype in types, f"{name} has dtype {tensor.dtype}; expected {' or '.join(types)}")
    sound = len(tensor.shape) == 2 and min(tensor.shape) > 0
    sure(sound, f"{name} has shape {list(tensor.shape)}; expected two dimensions")


def check_groups(sure: Sure, name: str, tensor: TensorInfo, columns: int) -> None:
    """A group for each column, of few enough columns for `Packed.order`."""
    sure(tensor.dtype in ("int32", "int64"), f"{name} has dtype {tensor.dtype}; expected int32")
    sure(tuple(tensor.shape) == (columns,), f"{name} has shape {list(tensor.shape)}; expected {[columns]}")
    sure(columns <= 2**16, f"{name} covers {columns} columns, but at most {2**16} are supported")


def scales(checkpoint: Checkpoint, prefix: str, method: str, suffix: str = ".scales") -> Tensor:
    """P.scales, all of them numbers."""
    stored = checkpoint.read(prefix + suffix)
    name = suffix.removeprefix(".")
    require(prefix, method, bool(torch.isfinite(stored).all()), f"{name} contain NaN or infinity")
    return stored


def grouped_order(checkpoint: Checkpoint, prefix: str, of: Layout) -> Tensor | None:
    """GPTQ's g_idx as the columns in the order of their groups, int64 [in]; None where the checkpoint has none."""
    sure, key = functools.partial(require, prefix, "gptq"), prefix + ".g_idx"
    if key not in checkpoint.tensors:
        sure(checkpoint.quantization.get("desc_act") is not True, "desc_act is true, but g_idx is missing")
        return None
    return columns_by_group(checkpoint.read(key).long(), of, sure, "g_idx")


def columns_by_group(groups: Tensor, of: Layout, sure: Sure, name: str) -> Tensor:
    """int64 [in], the group of each column -> the columns in the order of their groups, int64 [in]."""
    least, greatest = int(groups.min()), int(groups.max())
    sure(
        least >= 0 and greatest < of.groups,
        f"{name} contains values from {least} to {greatest}, but there are {of.groups} groups",
    )
    counts, full = torch.bincount(groups, minlength=of.groups), torch.full((of.groups,), of.group)
    full[-1] = of.columns - (of.groups - 1) * of.group
    sure(torch.equal(counts, full), f"{name} does not assign {of.group} columns to every full group")
    return torch.argsort(groups, stable=True)


def repacked(of: Layout, part: Callable[[slice], Tensor]) -> Tensor:
    """Codes u8 [out, in / 2], of 8 bits [out, in], from what `part` gives for some rows, a multiple of `ROWS`."""
    codes = torch.empty(of.out, of.columns if of.bits == 8 else of.columns // 2, dtype=torch.uint8)
    step = max(CHUNK_WEIGHTS // of.columns // ROWS, 1) * ROWS
    for first in range(0, of.out, step):
        rows = slice(first, min(first + step, of.out))
        codes[rows] = part(rows)
    return codes


def is_varied(said: Mapping[str, Any]) -> bool:
    """Return whether config.json states bits and groups of single layers ("dynamic", "extra_config")."""
    return bool(said.get("dynamic") or said.get("extra_config"))


def _bits(said: Mapping[str, Any], words: int, out: int, sure: Sure) -> int:
    """Bits of the codes of GPTQ, by the words of qzeros where they fit, and as config.json has them."""
    stated = said.get("bits", 4)
    bits, rest = divmod(32 * words, out)
    if rest or bits not in schemes.INT4_BITS:
        return stated if stated in schemes.INT4_BITS else 4  # sizes then say what is wrong
    sure(bits == stated or is_varied(said), f"the codes have {bits} bits, but config.json specifies {str(stated)[:20]}")
    return bits


def fields(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> u8 [n, 32 m / bits]: codes, the lowest bits of a row of words first."""
    held = words.contiguous().view(torch.uint8)
    if bits == 8:
        return held
    if bits == 4:
        return nibbles(held)
    if bits == 2:
        return torch.stack([held >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    three = held.view(len(held), -1, 3).int()
    joined = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
    return torch.stack([joined >> 3 * place & 7 for place in range(8)], -1).flatten(-2).to(torch.uint8)


def _group(said: Mapping[str, Any], columns: int, groups: int, sure: Sure) -> int:
    """Columns of a group; by the number of groups where config.json has sizes of layers ("dynamic", "extra_config")."""
    stated = said.get("group_size", said.get("q_group_size", DEFAULT_SIZE))
    known = type(stated) is int and stated in (-1, *SIZES)
    supported = ", ".join(map(str, SIZES))
    sure(known, f"config.json specifies a group size of {repr(stated)[:40]}; supported: -1 (whole rows), {supported}")
    possible = (stated, -1, *SIZES) if is_varied(said) else (stated,)
    sizes = [columns if each == -1 else min(each, columns) for each in possible]
    found = next((size for size in sizes if -(-columns // size) == groups), 0)
    sure(found > 0, f"{groups} groups for {columns} columns do not match the group size of {stated} in config.json")
    return found


def require(prefix: str, method: str, holds: bool, why: str) -> None:
    """Raises LocalqError (exit 8) for `prefix` unless it `holds`."""
    if not holds:
        raise bad_file(prefix, f"damaged {LABELS[method]} weights: {why}", DAMAGED)

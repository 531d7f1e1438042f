"""Bytes of a matrix in each format: in files, and on a GPU in addition to its weights. Torch-free.

`format_facts` lists these functions by format; `planner.footprint` sums them over a model. Sizes of a matrix exclude
padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from localq.files.gguf.block_types import BLOCK_TYPES, KERNEL_TYPES, WITH_FACTORS
from localq.files.linears import Linears
from localq.files.schemes import (
    MIX,
    aqlm_scheme,
    bcq_scheme,
    int4_scheme,
    mixed_bits,
    vptq_scheme,
    vq2_codebooks,
)

# Codebooks with 256 codewords, in addition to the weights: codewords as operands (`formats.codebooks.tiles`), 16
# weights of each of the 256.
FRAGMENT_BYTES = 2 * 256 * 16
WORKSPACE_BYTES = 8 * 2**20  # in which blocks of a product hand each other sums (`kernels.workspace`)
GGUF_PLACE_BYTES = 8  # address of one expert matrix in GGUF blocks (csrc/gguf/experts.h)
GGUF_FACTOR_BYTES = 4  # its factor, if it is in NVFP4 (a mixture of types does not tell)
PLACE_BYTES = 48  # addresses of one expert matrix in codebooks (csrc/lookup/experts.h)
MOST_FRAGMENTS = 4  # per matrix of vq2: at most two codebooks of its own, with codewords of up to 32 weights
SECTOR = 32  # bytes moved per gathered codeword, from a table in L2
SHARED_TABLE = 256  # entries; tables up to this size stay in shared memory


# ---- one matrix in files


def plain(linear: Linears, scheme: str) -> int:
    """16 bits per weight."""
    return 2 * linear.rows * linear.columns


def fp8(linear: Linears, scheme: str) -> int:
    """Codes of a byte, and an f32 scale per block of 16 x 64, as a GPU has them; files have fewer."""
    return linear.rows * linear.columns + 4 * -(-linear.rows // 16) * -(-linear.columns // 64)


def nf4(linear: Linears, scheme: str) -> int:
    """Codes, an 8-bit absmax per 64 weights, an f32 absmax per 256 of these, two f32 maps of 16 and 256."""
    n = linear.rows * linear.columns
    blocks = -(-n // 64)
    return -(-n // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256)


def nf4_expert(linear: Linears, scheme: str) -> int:
    """In memory, with f32 scales: experts are rows of one matrix, but each has its own mean of scales."""
    return linear.rows * linear.columns // 2 * 9 // 8


def squeezellm(linear: Linears, scheme: str) -> int:
    """Codes, and 16 values of 16 bit per row."""
    return linear.rows * linear.columns // 2 + 32 * linear.rows


def mxfp4(linear: Linears, scheme: str) -> int:
    """Codes, and one e8m0 scale per 32 weights."""
    n = linear.rows * linear.columns
    return n // 2 + n // 32


def nvfp4(linear: Linears, scheme: str) -> int:
    """Codes, one e4m3 scale per 16 weights, and an f32 scale."""
    n = linear.rows * linear.columns
    return n // 2 + n // 16 + 4


def bcq(linear: Linears, scheme: str) -> int:
    """Signs of every plane, and 16-bit scales and zero points of every group."""
    rows, columns = linear.rows, linear.columns
    if (bits := mixed_bits(scheme)) is not None:
        return math.ceil(rows * columns * bits / 8)
    planes, group, zero_point = bcq_scheme(scheme)
    return rows * (planes * columns // 8 + 2 * (planes + zero_point) * -(-columns // (group or columns)))


def awq(linear: Linears, scheme: str) -> int:
    """Codes, and a 16-bit scale and a 4-bit zero point per group of a row; of 8 bits see `_int8`.

    Codes of 2 and 3 bits take 4 on a GPU.
    """
    group, bits = int4_scheme(scheme)
    if bits == 8:
        return _int8(linear, group)
    groups = linear.rows * (-(-linear.columns // group) if group else 1)
    return linear.rows * linear.columns // 2 + 2 * groups + -(-groups // 2)


def _int8(linear: Linears, group: int) -> int:
    """Codes, and per group of at most 128 columns an f32 scale and an 8-bit zero point, as a GPU has them."""
    size = min(group or 128, 128)
    return linear.rows * (linear.columns + 5 * -(-linear.columns // size))


def gptq(linear: Linears, scheme: str) -> int:
    """As `awq`, and a u16 per column."""
    return awq(linear, scheme) + 2 * linear.columns


def gguf(linear: Linears, scheme: str) -> int:
    """Blocks of the type `scheme`, or of so many bits on average ("mix4.85"); 16 bits where nothing is known."""
    if (bits := mixed_bits(scheme.partition(",")[0])) is not None:
        return math.ceil(linear.rows * linear.columns * bits / 8)
    kind = next((each for each in BLOCK_TYPES.values() if each.name == scheme), None)
    return plain(linear, "") if kind is None else linear.rows * linear.columns // kind.values * kind.bytes


def aqlm(linear: Linears, scheme: str) -> int:
    """Codes, a 16-bit scale per row, and the codebooks."""
    books, bits, group = aqlm_scheme(scheme)
    codes = linear.rows * -(-linear.columns // group) * books * bits // 8
    return codes + 2 * linear.rows + 2 * books * (1 << bits) * group


def vptq(linear: Linears, scheme: str) -> int:
    """Codes, codebooks, and per column an int16 permutation and a 16-bit scale and bias."""
    length, main, residual = vptq_scheme(scheme)
    bits = math.ceil(math.log2(main)) + (math.ceil(math.log2(residual)) if residual else 0)
    codes = -(-linear.rows // length) * linear.columns * bits // 8
    return codes + 2 * length * (main + residual) + 6 * linear.columns


def vq2(linear: Linears, scheme: str) -> int:
    """The largest case: a matrix with its own signs and codebooks.

    Gate and up of an expert share a codebook.
    """
    rows, columns, opens = linear.rows, linear.columns, _opens_expert(linear)
    if (bits := mixed_bits(scheme)) is not None:  # at most two codebooks with codewords of 16 weights
        codes = math.ceil(rows * columns * bits / 8) + 2 * 2 * 256 * 16
    else:
        share = 2 if opens else 1
        pairs = vq2_codebooks(scheme)
        codes = sum(rows * -(-columns // stride) + 2 * 256 * length // share for stride, length in pairs)
    return codes + 2 * rows + (0 if opens else -(-columns // 8))


def _opens_expert(linear: Linears) -> bool:
    """Return whether `linear` is an expert's gate or up: in vq2 these share a codebook and are not rotated."""
    return linear.expert and linear.name == "gate, up"


# ---- all matrices of a model, on a GPU in addition to the weights


def no_tables(linears: Sequence[Linears], scheme: str) -> int:
    """Nothing."""
    return 0


def no_workspace(scheme: str) -> int:
    """Products whose blocks share no sums."""
    return 0


def workspace(scheme: str) -> int:
    """Products of every scheme whose blocks share sums."""
    return WORKSPACE_BYTES


def aqlm_workspace(scheme: str) -> int:
    """Of codebooks that are looked up in tables."""
    return WORKSPACE_BYTES if table_codebooks(scheme) else 0


def bcq_tables(linears: Sequence[Linears], scheme: str) -> int:
    """Padding of the signs of every matrix."""
    return sum(each.count * sign_padding(each, scheme) for each in linears)


def vq2_tables(linears: Sequence[Linears], scheme: str) -> int:
    """Codewords as operands."""
    return _lookup_tables(linears, MOST_FRAGMENTS, [expert_tables(each, "vq2", scheme) for each in linears])


def aqlm_tables(linears: Sequence[Linears], scheme: str) -> int:
    """As `vq2_tables` for codewords that are looked up in tables; 0 for gathered ones."""
    books = table_codebooks(scheme)
    return _lookup_tables(linears, books, [expert_tables(each, "aqlm", scheme) for each in linears]) if books else 0


def _lookup_tables(linears: Sequence[Linears], fragments: int, of_experts: Sequence[int]) -> int:
    dense = fragments * FRAGMENT_BYTES * sum(each.count for each in linears if not each.expert)
    experts = sum(size for size, each in zip(of_experts, linears, strict=True) if each.expert)
    return dense + experts


def gguf_tables(linears: Sequence[Linears], scheme: str) -> int:
    """Addresses and factors of expert matrices (`formats.gguf.experts_kernel`); none where no kernel reads any."""
    has_kernels = scheme in KERNEL_TYPES or scheme.startswith(MIX)
    may_have_factors = scheme == WITH_FACTORS or scheme.startswith(MIX)
    of_one = GGUF_PLACE_BYTES + (GGUF_FACTOR_BYTES if may_have_factors else 0)
    return of_one * sum(each.count for each in linears if each.expert) if has_kernels else 0


def expert_tables(linear: Linears, format: str, scheme: str) -> int:
    """Bytes on a GPU of all expert matrices like `linear` in codebooks, in addition to their weights.

    Codewords as operands, and addresses of each matrix (`formats.codebooks.experts_kernel`).
    """
    if format == "vq2" and scheme.startswith(MIX):  # at most two codebooks with codewords of 16 weights
        fragments = 2 * FRAGMENT_BYTES
    elif format == "vq2":
        fragments = sum(FRAGMENT_BYTES * -(-length // 16) for _, length in vq2_codebooks(scheme))
        fragments = fragments // 2 if _opens_expert(linear) else fragments
    else:
        fragments = FRAGMENT_BYTES * table_codebooks(scheme)
    return linear.count * (fragments + PLACE_BYTES) if fragments else 0


def table_codebooks(scheme: str) -> int:
    """Codebooks of an AQLM matrix whose codewords are looked up in tables; 0 if they are gathered."""
    match = re.fullmatch(r"([12])x([1-8])g(2|4|8|16)", scheme)
    return int(match[1]) if match else 0


def sign_padding(linear: Linears, scheme: str) -> int:
    """Bytes of padding signs of a binary-coded matrix on a GPU: rows to a multiple of 16, columns of 128."""
    bits = mixed_bits(scheme)
    planes = math.ceil(bits) if bits is not None else bcq_scheme(scheme)[0]
    full = -(-linear.rows // 16) * 16 * -(-linear.columns // 128) * 128
    return planes * (full - linear.rows * linear.columns) // 8


# ---- reads of a product from L2


def aqlm_gather_bytes(rows: int, columns: int, scheme: str) -> int:
    """Bytes of the sectors read for gathered codewords; 0 if codewords are looked up in tables."""
    books, bits, group = aqlm_scheme(scheme)
    return rows * -(-columns // group) * SECTOR * books if bits > 8 else 0


def vptq_gather_bytes(rows: int, columns: int, scheme: str) -> int:
    """Bytes of the sectors read for gathered codewords."""
    length, _, residual = vptq_scheme(scheme)
    return -(-rows // length) * columns * SECTOR * (2 if residual > SHARED_TABLE else 1)

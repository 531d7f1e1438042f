"""Bytes of a matrix in each format: in files, and what it takes on a GPU besides its weights. Torch-free.

`format_facts` lists these functions by format; `planner.footprint` sums them over a model. Sizes of a matrix leave out
padding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from localq.files.architecture import Linears
from localq.files.schemes import (
    MIX,
    aqlm_scheme,
    bcq_scheme,
    int4_group,
    mixed_bits,
    vptq_scheme,
    vq2_codebooks,
)

# Of codebooks with 256 codewords, besides the weights: codewords as operands (`formats.codebooks.tiles`), 16 weights of
# each of the 256 of a codebook; and the workspace where slices of columns add up (`formats.codebooks.lookup_kernel`).
FRAGMENT_BYTES, WORKSPACE_BYTES = 2 * 256 * 16, 8 * 2**20
PLACE_BYTES = 48  # of a matrix of an expert in codebooks: where it is (csrc/lookup/experts.h)
MOST_FRAGMENTS = 4  # of a matrix of vq2: two codebooks of up to 32 weights, which it may have for itself
SECTOR = 32  # bytes that a gathered codeword moves, of a table that lies in L2
SHARED_TABLE = 256  # entries: a table that small stays in shared memory


# ---- of one matrix in files


def plain(linear: Linears, scheme: str) -> int:
    """16 bits a weight."""
    return 2 * linear.rows * linear.columns


def nf4(linear: Linears, scheme: str) -> int:
    """Codes, 8-bit absmax of 64, f32 absmax of 256 of these, two f32 maps of 16 and 256."""
    n = linear.rows * linear.columns
    blocks = -(-n // 64)
    return -(-n // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256)


def nf4_expert(linear: Linears, scheme: str) -> int:
    """In memory, where experts are rows of one matrix, each quantized around its own mean: their scales are f32."""
    return linear.rows * linear.columns // 2 * 9 // 8


def squeezellm(linear: Linears, scheme: str) -> int:
    """Codes, and 16 values of 16 bit for each row."""
    return linear.rows * linear.columns // 2 + 32 * linear.rows


def mxfp4(linear: Linears, scheme: str) -> int:
    """Codes, and one e8m0 scale for 32."""
    n = linear.rows * linear.columns
    return n // 2 + n // 32


def bcq(linear: Linears, scheme: str) -> int:
    """Signs of every plane, and 16-bit scales of every group, layer by layer."""
    rows, columns = linear.rows, linear.columns
    if (bits := mixed_bits(scheme)) is not None:
        return math.ceil(rows * columns * bits / 8)
    planes, group, zero_point = bcq_scheme(scheme)
    return rows * (planes * columns // 8 + 2 * (planes + zero_point) * -(-columns // (group or columns)))


def awq(linear: Linears, scheme: str) -> int:
    """Codes, and a 16-bit scale and a 4-bit zero point for each group of a row."""
    group = int4_group(scheme)
    groups = linear.rows * (-(-linear.columns // group) if group else 1)
    return linear.rows * linear.columns // 2 + 2 * groups + -(-groups // 2)


def gptq(linear: Linears, scheme: str) -> int:
    """As `awq`, and a u16 for each column."""
    return awq(linear, scheme) + 2 * linear.columns


def aqlm(linear: Linears, scheme: str) -> int:
    """Codes, a 16-bit scale for each row, and the codebooks."""
    books, bits, group = aqlm_scheme(scheme)
    codes = linear.rows * -(-linear.columns // group) * books * bits // 8
    return codes + 2 * linear.rows + 2 * books * (1 << bits) * group


def vptq(linear: Linears, scheme: str) -> int:
    """Codes and codebooks, and for each column an int16 permutation and a 16-bit scale and bias."""
    length, main, residual = vptq_scheme(scheme)
    bits = math.ceil(math.log2(main)) + (math.ceil(math.log2(residual)) if residual else 0)
    codes = -(-linear.rows // length) * linear.columns * bits // 8
    return codes + 2 * length * (main + residual) + 6 * linear.columns


def vq2(linear: Linears, scheme: str) -> int:
    """With its own signs and codebooks, the most that a matrix takes; gate and up of experts share theirs."""
    rows, columns, opens = linear.rows, linear.columns, _opens_expert(linear)
    if (bits := mixed_bits(scheme)) is not None:  # two codebooks of 16 weights at most
        codes = math.ceil(rows * columns * bits / 8) + 2 * 2 * 256 * 16
    else:
        share = 2 if opens else 1
        pairs = vq2_codebooks(scheme)
        codes = sum(rows * -(-columns // stride) + 2 * 256 * length // share for stride, length in pairs)
    return codes + 2 * rows + (0 if opens else -(-columns // 8))


def _opens_expert(linear: Linears) -> bool:
    """Gate or up of an expert, which in vq2 share a codebook and are not rotated."""
    return linear.expert and linear.name == "gate, up"


# ---- of all matrices of a model, on a GPU besides the weights


def no_tables(linears: Sequence[Linears], scheme: str) -> int:
    """Nothing."""
    return 0


def bcq_tables(linears: Sequence[Linears], scheme: str) -> int:
    """Signs that pad every matrix."""
    return sum(each.count * sign_padding(each, scheme) for each in linears)


def vq2_tables(linears: Sequence[Linears], scheme: str) -> int:
    """Codewords as operands, and the workspace."""
    return _lookup_tables(linears, MOST_FRAGMENTS, [expert_tables(each, "vq2", scheme) for each in linears])


def aqlm_tables(linears: Sequence[Linears], scheme: str) -> int:
    """The same, where codewords are looked up in tables; nothing where they are gathered."""
    books = looked_up(scheme)
    return _lookup_tables(linears, books, [expert_tables(each, "aqlm", scheme) for each in linears]) if books else 0


def _lookup_tables(linears: Sequence[Linears], fragments: int, of_experts: Sequence[int]) -> int:
    dense = fragments * FRAGMENT_BYTES * sum(each.count for each in linears if not each.expert)
    experts = sum(size for size, each in zip(of_experts, linears, strict=True) if each.expert)
    return WORKSPACE_BYTES + dense + experts


def expert_tables(linear: Linears, format: str, scheme: str) -> int:
    """Bytes on a GPU of all matrices like `linear`, of experts in codebooks, besides their weights.

    The codewords as operands, and where each matrix is (`formats.codebooks.experts_kernel`).
    """
    if format == "vq2" and scheme.startswith(MIX):  # two codebooks at most, of codewords of 16 weights
        fragments = 2 * FRAGMENT_BYTES
    elif format == "vq2":
        fragments = sum(FRAGMENT_BYTES * -(-length // 16) for _, length in vq2_codebooks(scheme))
        fragments = fragments // 2 if _opens_expert(linear) else fragments
    else:
        fragments = FRAGMENT_BYTES * looked_up(scheme)
    return linear.count * (fragments + PLACE_BYTES) if fragments else 0


def looked_up(scheme: str) -> int:
    """Codebooks of a matrix of AQLM whose codewords are looked up in tables; 0 where they are gathered."""
    match = re.fullmatch(r"([12])x([1-8])g(2|4|8|16)", scheme)
    return int(match[1]) if match else 0


def sign_padding(linear: Linears, scheme: str) -> int:
    """Bytes of signs that fill up a matrix of binary codes on a GPU: its columns to a multiple of 128, rows of 16."""
    bits = mixed_bits(scheme)
    planes = math.ceil(bits) if bits is not None else bcq_scheme(scheme)[0]
    full = -(-linear.rows // 16) * 16 * -(-linear.columns // 128) * 128
    return planes * (full - linear.rows * linear.columns) // 8


# ---- what a product reads from L2


def aqlm_gathered(rows: int, columns: int, scheme: str) -> int:
    """Bytes of the sectors that gathered codewords move; 0 where they are looked up in tables."""
    books, bits, group = aqlm_scheme(scheme)
    return rows * -(-columns // group) * SECTOR * books if bits > 8 else 0


def vptq_gathered(rows: int, columns: int, scheme: str) -> int:
    """Bytes of the sectors that gathered codewords move."""
    length, _, residual = vptq_scheme(scheme)
    return -(-rows // length) * columns * SECTOR * (2 if residual > SHARED_TABLE else 1)

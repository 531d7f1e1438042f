"""Facts of the formats: bytes of a matrix, and of its unpacking. Torch-free."""

from __future__ import annotations

import math
import re

from localq.errors import usage_error
from localq.files.architecture import Linears
from localq.files.format_sizes import MIX, bcq_scheme, opens_expert, vq2_books

MIB = 2**20
# Beside the scratch: temporaries of what torch dequantizes (`CHUNK_WEIGHTS` of its module). Of vq2 only models in
# 32 bit have them: in 16 bit kernels read codes in tiles and rotate, and write nothing but the result.
UNPACK_BYTES = {
    "aqlm": 48 * MIB,
    "vptq": 32 * MIB,
    "vq2": 64 * MIB,
    "bcq": 64 * MIB,
    "awq": 64 * MIB,
    "gptq": 64 * MIB,
}
_PLAIN = ("bf16", "fp16", "gguf")


def linear_bytes(linear: Linears, format: str, scheme: str = "") -> int:
    """Bytes of one [rows, columns] matrix in `format`; the format's own tensors, without padding."""
    rows, columns = linear.rows, linear.columns
    n = rows * columns
    if format in _PLAIN:
        return 2 * n
    if format == "nf4":  # codes, 8-bit absmax of 64, f32 absmax of 256 of these, two f32 maps of 16 and 256
        blocks = -(-n // 64)
        return -(-n // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256)
    if format == "squeezellm":  # codes, 16 values of 16 bit for each row
        return n // 2 + 32 * rows
    if format == "mxfp4":  # codes, one e8m0 scale for 32
        return n // 2 + n // 32
    if format == "bcq":  # signs of every plane, 16-bit scales of every group, layer by layer
        if mix := re.fullmatch(rf"{MIX}(\d(?:\.\d+)?)", scheme):
            return math.ceil(n * float(mix[1]) / 8)
        planes, group, zero_point = bcq_scheme(scheme)
        return rows * (planes * columns // 8 + 2 * (planes + zero_point) * -(-columns // (group or columns)))
    if format in ("awq", "gptq") and (match := re.fullmatch(r"g([1-9]\d{0,5})|row", scheme or "g128")):
        # codes, a 16-bit scale and a 4-bit zero point for each group of a row; a u16 for each column
        groups = rows * (-(-columns // int(match[1])) if match[1] else 1)
        return n // 2 + 2 * groups + -(-groups // 2) + (2 * columns if format == "gptq" else 0)
    if format == "aqlm" and (match := re.fullmatch(r"(\d+)x(\d+)g(\d+)", scheme or "1x16g8")):
        books, bits, group = map(int, match.groups())
        return rows * -(-columns // group) * books * bits // 8 + 2 * rows + 2 * books * (1 << bits) * group
    if format == "vptq" and (match := re.fullmatch(r"v(\d+)-k(\d+)-(\d+)", scheme or "v8-k65536-0")):
        length, main, residual = map(int, match.groups())
        bits = math.ceil(math.log2(main)) + (math.ceil(math.log2(residual)) if residual else 0)
        # per input column: int16 permutation, 16-bit scale and bias
        return -(-rows // length) * columns * bits // 8 + 2 * length * (main + residual) + 6 * columns
    if format == "vq2":  # with signs and codebooks of its own, the most that a matrix takes; not of gate, up of experts
        if mix := re.fullmatch(rf"{MIX}(\d(?:\.\d+)?)", scheme):  # two books of 16 weights at most
            codes = math.ceil(n * float(mix[1]) / 8) + 2 * 2 * 256 * 16
        else:
            share = 2 if opens_expert(linear) else 1
            pairs = vq2_books(scheme)
            codes = sum(rows * -(-columns // stride) + 2 * 256 * length // share for stride, length in pairs)
        return codes + 2 * rows + (0 if opens_expert(linear) else -(-columns // 8))
    raise usage_error(f"{format} {scheme}".strip(), "the size of this format is not known")

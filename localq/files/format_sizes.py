"""What codebooks of 256 codewords take on a GPU, of vq2 and of AQLM's 1x8 and 2x8. Torch-free; `footprint` sums up."""

from __future__ import annotations

import math
import re

from localq.errors import usage_error
from localq.files.architecture import Linears

MIX = "mix"  # before the bits per weight, where schemes of vq2 (of codes alone) or bcq (of all) are mixed: "mix2.27"
# Of vq2 besides its weights: codewords as operands (`vq_tiles.fragments`), 16 weights of each of the 256 of a book, and
# where slices of columns meet (`kernels.vq.meeting_place`).
FRAGMENT_BYTES, MEETING_BYTES = 2 * 256 * 16, 8 * 2**20
PLACE_BYTES = 48  # of a matrix of an expert in codebooks: where it is (csrc/vq_experts.h)
MOST_FRAGMENTS = 4  # of a matrix: two books of up to 32 weights, which it may have for itself
BCQ_GROUPS = (32, 64, 128, 256, 512)  # columns that share scales


def opens_expert(linear: Linears) -> bool:
    """Gate or up of an expert, which in vq2 share a codebook and are not rotated."""
    return linear.expert and linear.name == "gate, up"


def expert_tables(linear: Linears, format: str, scheme: str) -> int:
    """Bytes on a GPU of all matrices like `linear`, of experts in codebooks, besides their weights: the codewords as
    operands, and where each matrix is (`kernels.vq_experts`)."""
    if format == "vq2" and scheme.startswith(MIX):  # two books at most, of codewords of 16 weights
        fragments = 2 * FRAGMENT_BYTES
    elif format == "vq2":
        fragments = sum(FRAGMENT_BYTES * -(-length // 16) for _, length in vq2_books(scheme))
        fragments = fragments // 2 if opens_expert(linear) else fragments
    else:
        fragments = FRAGMENT_BYTES * small_books(format, scheme)
    return linear.count * (fragments + PLACE_BYTES) if fragments else 0


def small_books(format: str, scheme: str) -> int:
    """Books of a matrix of AQLM whose codewords are looked up in tables; 0 where they are gathered."""
    match = re.fullmatch(r"([12])x([1-8])g(2|4|8|16)", scheme) if format == "aqlm" else None
    return int(match[1]) if match else 0


def vq2_books(scheme: str) -> list[tuple[int, int]]:
    """(stride, length) of the codebooks of a scheme of vq2: "s4l16", or with two "s4l16+s8l16"; "" is "s4l16"."""
    books = [re.fullmatch(r"s(2|4|8|16)l(\d{1,2})", part) for part in (scheme or "s4l16").split("+")]
    found = [(int(match[1]), int(match[2])) for match in books if match]
    if not 1 <= len(books) == len(found) <= 2 or any(n % s or not s <= n <= 32 for s, n in found):
        raise usage_error(f"vq2 {scheme}", "this is no scheme of vq2", "One is s4l16, or with two books s4l16+s8l16.")
    return found


def bcq_scheme(scheme: str) -> tuple[int, int, bool]:
    """(planes, columns of a group or 0 for all, is there a zero point) of "q2row", "q4g64z"; "" is "q3g128"."""
    match = re.fullmatch(r"q([1-5])(?:g(32|64|128|256|512)|row)(z?)", scheme or "q3g128")
    if match is None:
        raise usage_error(f"bcq {scheme}", "this is no scheme of bcq", "One is q3g128, or q3row, or q3g128z.")
    return int(match[1]), int(match[2] or 0), bool(match[3])


def sign_padding(linear: Linears, scheme: str) -> int:
    """Bytes of signs that fill up a matrix of binary codes on a GPU: its columns to a multiple of 128, rows of 16."""
    planes = math.ceil(float(mix[1])) if (mix := re.fullmatch(rf"{MIX}(.+)", scheme)) else bcq_scheme(scheme)[0]
    full = -(-linear.rows // 16) * 16 * -(-linear.columns // 128) * 128
    return planes * (full - linear.rows * linear.columns) // 8

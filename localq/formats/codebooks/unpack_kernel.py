"""Additive codebooks to plain weights, for prefill: checks of the tensors, then the kernel on torch's stream.

Bit for bit what `formats.codebooks.definition` and the formats built on it define.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq import kernels
from localq.kernels.checks import TYPES, addresses, check, check_cuda, place

WIDTHS = {torch.uint8: 256, torch.int8: 256, torch.int16: 65_536}  # type of codes -> entries that they can tell apart
MOST_BOOKS, LONGEST = 256, 65_536


@dataclass(frozen=True)
class CodeSet:
    """Codebooks of one stride and length.

    codes      u8 | i8 | i16 [out / out_group, in / stride, books]    they count modulo `entries`
    codebooks  f16 | bf16 | f32 [books, entries, length]              length: out_group rows, one after the other
    stride     columns from one code to the next
    """

    codes: Tensor
    codebooks: Tensor
    stride: int


def additive_dequantize(
    sets: Sequence[CodeSet], scales: Tensor, first: int, out: Tensor, *, out_group: int = 1, rounded: bool
) -> Tensor:
    """Rows of a matrix from `first` on into `out` [count, in] of f16, bf16 or f32, and `out`.

    sets     one or two; terms of the second are added to the sum of the first
    scales   [out / out_group] of the type of the codebooks: of groups of rows, in which `first` and count are whole
    rounded  sum and product are rounded to the type of the codebooks (AQLM), or only the f32 product to that of `out`

    Memory-bound with small codebooks: `additive_dequantize_bytes`. Raises ValueError by the argument's name.
    """
    op, columns = "additive_dequantize", out.shape[-1]
    if out.dim() != 2 or not 1 <= len(sets) <= 2:
        raise ValueError(f"{op}: out has shape {tuple(out.shape)} for {len(sets)} sets, must be [count, in] for 1 or 2")
    groups, device = scales.numel(), sets[0].codes.device
    rows = groups * out_group
    if first % out_group or out.shape[0] % out_group or not 0 <= first <= rows - out.shape[0]:
        raise ValueError(f"{op}: rows {first} .. {first + out.shape[0] - 1} of {rows}, in groups of {out_group}")
    check(op, "out", out, device, tuple(TYPES), out.numel())
    check(op, "scales", scales, device, (sets[0].codebooks.dtype,), groups)
    for each in sets:
        _check_set(op, each, groups, columns, out_group, sets[0].codebooks.dtype)
    check_cuda(op, "codes", sets[0].codes)
    kernels.module().additive_dequantize(
        sets=[_of_kernel(each) for each in sets],
        scales=scales.data_ptr(),
        out_features=rows,
        in_features=columns,
        out_group=out_group,
        rounded=rounded,
        stored=TYPES[scales.dtype],
        out=out.data_ptr(),
        type=TYPES[out.dtype],
        row_begin=first,
        row_count=out.shape[0],
        **place(out),
    )
    return out


def additive_dequantize_bytes(sets: Sequence[CodeSet], rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes that must move for so many rows: codes and codebooks once, the weights once."""
    codes = sum(rows * (columns // each.stride) * each.codes.shape[2] * each.codes.element_size() for each in sets)
    return codes + sum(each.codebooks.nbytes for each in sets) + rows * columns * dtype.itemsize


def _check_set(op: str, given: CodeSet, groups: int, columns: int, out_group: int, dtype: torch.dtype) -> None:
    codes, books = given.codes, given.codebooks
    if codes.dim() != 3 or books.dim() != 3 or books.shape[0] != codes.shape[2] or books.shape[0] > MOST_BOOKS:
        raise ValueError(f"{op}: codes {tuple(codes.shape)} and codebooks {tuple(books.shape)} do not belong together")
    entries, length = books.shape[1:]
    check(op, "codes", codes, codes.device, tuple(WIDTHS), groups * -(-columns // given.stride) * books.shape[0])
    check(op, "codebooks", books, codes.device, (dtype,), books.numel())
    if entries < 2 or entries & (entries - 1) or entries > WIDTHS[codes.dtype]:
        raise ValueError(f"{op}: entries = {entries}, must be a power of two within the range of the codes")
    if columns % given.stride or length % (out_group * given.stride) or length > LONGEST:
        why = f"length {length}, stride {given.stride}, groups of {out_group} rows, {columns} columns"
        raise ValueError(f"{op}: codebooks have a {why}, which do not divide each other")


def _of_kernel(given: CodeSet) -> dict[str, int]:
    """The fields that csrc/lookup/bind.cpp reads, by name."""
    books, entries, length = given.codebooks.shape
    return {
        **addresses(codes=given.codes, codebooks=given.codebooks),
        "books": books,
        "entries": entries,
        "length": length,
        "stride": given.stride,
        "wide": given.codes.dtype == torch.int16,
    }

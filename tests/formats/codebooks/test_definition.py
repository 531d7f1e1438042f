"""Additive codebooks: a row worked by hand without and with overlap, then against a sum over every term."""

from __future__ import annotations

import pytest
import torch

from localq.formats.codebooks.definition import dequantize_codes


def test_codewords_side_by_side_by_hand():
    books = torch.tensor(
        [
            [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [-1.0, -2.0, -3.0]],
            [[0.5, 0.0, 0.0], [0.0, 0.25, 0.0], [0.0, 0.0, 0.125], [10.0, 20.0, 30.0]],
        ]
    )
    codes = torch.tensor([[[0, 3], [-1, 2]]], dtype=torch.int8)  # -1 is the last of four
    assert dequantize_codes(codes, books, 3, 3, 6).tolist() == [[11.0, 22.0, 33.0, -1.0, -2.0, -2.875]]
    assert dequantize_codes(codes, books, 3, 3, 5).tolist() == [[11.0, 22.0, 33.0, -1.0, -2.0]]  # cut at the row's end


def test_overlapping_codewords_by_hand():
    book = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 50.0]]])  # length 5, stride 2
    codes = torch.tensor([[[0], [1], [0], [1]]], dtype=torch.uint8)
    # position 0:  1  2  3  4  5
    # position 1:       10 20 30 40 50
    # position 2:              1  2  3  (4  5)
    # position 3:                    10 (20 ..)
    assert dequantize_codes(codes, book, 2, 5, 7).tolist() == [[1.0, 2.0, 13.0, 24.0, 36.0, 42.0, 63.0]]
    assert dequantize_codes(codes[:, :1], book, 2, 5, 2).tolist() == [[1.0, 2.0]]  # a row shorter than a codeword


def term_by_term(codes, books, stride, columns):
    """The definition, one addition after the other, in f32."""
    entries, length = books.shape[1:]
    weight = torch.zeros(codes.shape[0], columns)
    for r in range(codes.shape[0]):
        for h in range(codes.shape[1]):
            for m in range(codes.shape[2]):
                word = books[m, int(codes[r, h, m]) % entries].float()
                end = min(stride * h + length, columns)
                weight[r, stride * h : end] += word[: end - stride * h]
    return weight


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("books", "entries", "stride", "length", "columns"),
    [(2, 16, 8, 8, 40), (1, 256, 4, 16, 90), (1, 8, 4, 10, 31), (3, 32, 5, 6, 27), (2, 64, 1, 3, 9), (1, 4, 7, 30, 20)],
)
def test_every_member_is_the_sum_of_its_terms(dtype, books, entries, stride, length, columns):
    generator = torch.Generator().manual_seed(columns)
    table = torch.randn(books, entries, length, generator=generator).half()
    table[0, 1] *= 300  # an outlier
    least = torch.iinfo(dtype).min if dtype != torch.int64 else -(2**40)
    codes = torch.randint(least, 128, (3, -(-columns // stride), books), generator=generator).to(dtype)
    assert torch.equal(
        dequantize_codes(codes, table, stride, length, columns), term_by_term(codes, table, stride, columns)
    )


def test_books_of_other_strides_and_lengths_are_added_to_the_sum():
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(1, 16, 6, generator=generator), 30 * torch.randn(1, 8, 4, generator=generator)
    codes = torch.randint(0, 16, (3, 12, 1), generator=generator), torch.randint(0, 8, (3, 6, 1), generator=generator)
    total = dequantize_codes(codes[0], first, 2, 6, 24)
    expected = total.clone()
    for r in range(3):
        for h in range(6):
            expected[r, 4 * h : 4 * h + 4] += second[0, int(codes[1][r, h, 0])]
    assert torch.equal(dequantize_codes(codes[1], second, 4, 4, 24, total), expected)
    assert torch.equal(total, expected)  # in place
    for wrong in (torch.zeros(3, 23), torch.zeros(2, 24), torch.zeros(3, 24).double()):
        with pytest.raises(ValueError, match=r"not float32 \[3, 24\]"):
            dequantize_codes(codes[1], second, 4, 4, 24, wrong)


@pytest.mark.parametrize(
    ("codes", "books", "stride", "length", "columns", "why"),
    [
        (torch.zeros(2, 3, 1), torch.zeros(1, 4, 8), 8, 8, 24, "not integers"),
        (torch.zeros(2, 3, dtype=torch.int8), torch.zeros(1, 4, 8), 8, 8, 24, r"not integers \[rows"),
        (torch.zeros(2, 3, 2, dtype=torch.int8), torch.zeros(1, 4, 8), 8, 8, 24, r"not \[2, entries, 8\]"),
        (torch.zeros(2, 3, 1, dtype=torch.int8), torch.zeros(1, 4, 8), 8, 16, 24, r"not \[1, entries, 16\]"),
        (torch.zeros(2, 3, 1, dtype=torch.int8), torch.zeros(1, 5, 8), 8, 8, 24, "5 entries"),
        (torch.zeros(2, 3, 1, dtype=torch.int8), torch.zeros(1, 0, 8), 8, 8, 24, "0 entries"),
        (torch.zeros(2, 3, 1, dtype=torch.int8), torch.zeros(1, 4, 8), 8, 8, 25, "do not fit 25 columns"),
        (torch.zeros(2, 3, 1, dtype=torch.int8), torch.zeros(1, 4, 8), 9, 8, 24, "stride 9"),
        (torch.zeros(2, 3, 1, dtype=torch.int8), torch.zeros(1, 4, 8), 0, 8, 24, "stride 0"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_belong_together_are_refused(codes, books, stride, length, columns, why):
    with pytest.raises(ValueError, match=why):
        dequantize_codes(codes, books, stride, length, columns)

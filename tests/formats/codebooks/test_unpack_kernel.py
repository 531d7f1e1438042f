"""additive_dequantize, vptq_dequantize: what they refuse; on a GPU, the definitions of the formats bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.formats import vptq
from localq.formats.codebooks import aqlm, vq2, vq2_codec
from localq.formats.codebooks.unpack_kernel import (
    CodeSet,
    additive_dequantize,
    additive_dequantize_bytes,
)
from localq.formats.vptq import codec as vptq_codec
from localq.formats.vptq.kernel import vptq_dequantize, vptq_dequantize_bytes
from tests.support.kernels.gather_operands import aqlm_packed, integers, normal, vptq_matrix, vptq_packed
from tests.support.kernels.nf4_operands import bits
from tests.support.kernels.refusals import refused_by_name

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
HALF = torch.float16
# codebooks, entries, rows and columns of a group; a shape
AQLM = {
    "1x16g8": ((1, 65536, 1, 8), (83, 1048)),
    "1x16g16": ((1, 65536, 1, 16), (21, 2064)),
    "2x8g8": ((2, 256, 1, 8), (130, 584)),
    "1x8g8": ((1, 256, 1, 8), (7, 8)),
    "8x8g32": ((8, 256, 1, 32), (33, 96)),
    "groups of rows, 6 columns": ((3, 16, 2, 6), (90, 102)),
    "square groups of 12 bits": ((2, 4096, 4, 4), (52, 132)),
}
VQ2 = {
    "2 bits": ((4, 16),), "as 1x8": ((8, 8),), "4 bits": ((2, 6),), "2.5 bits": ((4, 16), (16, 32)),
    "3 bits": ((4, 8), (8, 24)), "twice the same": ((4, 20), (4, 4)), "one a row": ((16, 16),),
}  # fmt: skip
VPTQ = {
    "v8": {}, "v8 residual": {"scheme": (8, 1024, 64)}, "v16 residual": {"scheme": (16, 512, 65536)},
    "v12": {"scheme": (12, 4096, 16)}, "v6": {"scheme": (6, 256, 0)}, "v7, unpacked": {"scheme": (7, 300, 37)},
    "unpacked": {"packed": False, "scheme": (8, 65536, 65536)}, "as it comes": {"places": False, "norm": False},
    "outliers": {"scheme": (8, 256, 16), "outliers": (5, 4, 19)},
    "groups and outliers": {"scheme": (16, 256, 0), "outliers": (8, 12, 64), "groups": 3},
}  # fmt: skip
VPTQ["v7, unpacked"]["packed"] = False


def codes(packed: aqlm.Packed) -> list[CodeSet]:
    books, entries, rows, columns = packed.codebooks.shape
    return [CodeSet(packed.codes, packed.codebooks.reshape(books, entries, rows * columns), columns)]


def vq2_packed(books: tuple[tuple[int, int], ...], shape: tuple[int, int]) -> vq2_codec.Packed:
    made = tuple(
        (integers(256, shape[0], shape[1] // s, seed=s).to(torch.uint8), normal(256, n, dtype=HALF, seed=n))
        for s, n in books
    )
    return vq2_codec.Packed(made, normal(shape[0], dtype=HALF, seed=3), None, shape)


PACKED = aqlm_packed((10, 80), HALF, 1, (2, 512, 1, 8))
OUT = torch.empty(10, 80, dtype=HALF)
VPTQ_MATRIX = vptq_matrix(vptq_packed((10, 80), HALF, 1, (8, 64, 16)))
REFUSED = {
    "no set": ({"sets": []}, "for 0 sets"),
    "rows that are not there": ({"first": 1}, r"rows 1 \.\. 10 of 10"),
    "half a group": ({"out_group": 3}, "in groups of 3"),
    "scales of another type": ({"scales": PACKED.scales.float()}, "scales is torch.float32"),
    "books without codes": ({"sets": [replace(codes(PACKED)[0], codes=PACKED.codes[:, :, :1])]}, "do not belong"),
    "codes of floats": ({"sets": [replace(codes(PACKED)[0], codes=PACKED.codes.half())]}, "codes is torch.float16"),
    "more entries than codes": (
        {"sets": [replace(codes(PACKED)[0], codes=PACKED.codes.to(torch.int8))]}, "within the range of the codes",
    ),
    "another stride": ({"sets": [replace(codes(PACKED)[0], stride=7)]}, "codes has shape"),
    "a result of integers": ({"out": OUT.to(torch.int32)}, "out is torch.int32"),
    "all on the CPU": ({}, "codes are on cpu, must be on a CUDA device"),
}  # fmt: skip


test_additive_refuses_by_name = refused_by_name(
    additive_dequantize,
    {"sets": codes(PACKED), "scales": PACKED.scales, "first": 0, "out": OUT, "rounded": True},
    REFUSED,
)


@pytest.mark.parametrize(
    ("matrix", "first", "message"),
    [
        (VPTQ_MATRIX, 4, r"rows 4 \.\. 13 of 10, in vectors of 8"),
        (replace(VPTQ_MATRIX, centroids=VPTQ_MATRIX.centroids.int()), 0, "centroids is torch.int32"),
        (replace(VPTQ_MATRIX, indices=VPTQ_MATRIX.indices.to(torch.int16)), 0, "indices has shape"),
        (replace(VPTQ_MATRIX, outlier_indices=torch.zeros(2, 0, dtype=torch.int16)), 0, "one of outlier_indices"),
        (VPTQ_MATRIX, 0, "indices are on cpu, must be on a CUDA device"),
    ],
)
def test_vptq_refuses_by_name(matrix, first, message):
    with pytest.raises(ValueError, match=message):
        vptq_dequantize(matrix, first, OUT)


def test_bytes():
    sets = codes(PACKED)
    assert additive_dequantize_bytes(sets, 10, 80, HALF) == 10 * 10 * 2 * 2 + 2 * 512 * 8 * 2 + 10 * 80 * 2
    stored = 2 * 80 * 10 // 8 + 2 * 8 * 80 + 3 * 2 * 80
    assert vptq_dequantize_bytes(VPTQ_MATRIX, torch.float32) == stored + 10 * 80 * 4


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("name", AQLM)
def test_aqlm_bit_for_bit(name, stored, dtype):
    layout, shape = AQLM[name]
    packed = aqlm_packed(shape, stored, 1, layout)
    expected = aqlm.dequantize(packed, dtype)
    for first in (0, 2 * layout[2]):
        linear = aqlm.Linear(packed.to("cuda"))
        got = linear.dequantized_rows(first, shape[0] - first, dtype, None)
        assert torch.equal(bits(got.cpu()), bits(expected[first:]))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VQ2)
def test_vq2_bit_for_bit(name, dtype):
    packed = vq2_packed(VQ2[name], (83, 1072))
    expected = vq2.dequantize(packed, dtype)
    for first in (0, 16):
        got = vq2.Linear(packed.to("cuda")).dequantized_rows(first, 83 - first, dtype, None)
        assert torch.equal(bits(got.cpu()), bits(expected[first:]))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("name", VPTQ)
def test_vptq_bit_for_bit(name, stored, dtype):
    apart, groups = VPTQ[name].get("outliers", (0,))[0], VPTQ[name].get("groups", 1)
    packed = vptq_packed((83, apart + 333 * groups), stored, 1, **VPTQ[name])
    expected = vptq_codec.dequantize(packed, dtype)
    for first, count in ((0, 83), (packed.vector_len, 83 - packed.vector_len - 3)):
        got = vptq.Linear(packed.to("cuda")).dequantized_rows(first, count, dtype, None)
        assert torch.equal(bits(got.cpu()), bits(expected[first : first + count]))


@pytest.mark.cuda
def test_the_widest_permutation():
    packed = vptq_packed((9, 65536), HALF, 1)
    assert int((packed.places.int() & 0xFFFF).max()) == 65535
    got = vptq.Linear(packed.to("cuda")).dequantized_rows(0, 9, HALF, None)
    assert torch.equal(bits(got.cpu()), bits(vptq_codec.dequantize(packed, HALF)))


@pytest.mark.cuda
def test_the_neighbours_of_a_slab_stay():
    buffer = torch.full((40, 1048), torch.nan, dtype=HALF, device="cuda")
    packed = aqlm_packed((83, 1048), HALF, 1).to("cuda")
    additive_dequantize(codes(packed), packed.scales, 3, buffer[8:24], rounded=True)
    vptq_dequantize(vptq_matrix(vptq_packed((83, 1048), HALF, 1).to("cuda")), 8, buffer[27:37])
    assert torch.isfinite(buffer[8:24]).all()
    assert torch.isfinite(buffer[27:37]).all()
    assert buffer[[*range(8), 24, 25, 26, 37, 38, 39]].isnan().all()

"""vq_gemv's launcher and kernel, compiled for the CPU (vq_machine_on_cpu.cuh): indices, barriers, joins.

Every kind of position, tile and slice that the kernel can meet, without a GPU: each code must be looked up at the entry
that is its own, or sums differ by far more than rounding. Conflicts between banks of shared memory are counted: there
are none.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from localq import kernels
from localq.formats.codebooks import lookup_kernel
from localq.formats.codebooks.rotation import packed_signs, rotate
from localq.kernels import gemv
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.gemv_structs import Extras, Matrix, Workspace, matrix_of
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.row_operands import biased, normed
from tests.support.kernels.vq_operands import SCHEMES, VqSample, by_tables, make

# Multiprocessors, shared memory of a block: of an H200, with room for two tables, and of a consumer card.
LARGE, SMALL, ONE = (16, 232_448), (6, 101_376), (1, 101_376)
MEETING = 2**18
SUMS = 2e-6  # of at most 288 entries in f32, over the sum of magnitudes


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compile_on_cpu(
        tmp_path_factory.mktemp("library"), "vq_on_cpu.cpp", ["lookup/gemv_launch.cu"], launch="", faults=("vq_gemv",)
    )


@pytest.fixture
def emulated(library, monkeypatch):
    """vq_gemv on a device (`LARGE` or `SMALL`), by the kernel; conflicts between banks are counted."""
    place = torch.full((MEETING,), -1, dtype=torch.int32)
    counts = (ctypes.c_int64 * 4)()

    def run(device, x, operands, *, signs=None, **named):
        rotating = [replace(each, signs=signs) for each in operands]

        def launch(*, x, matrices, workspace, y, type, rows, biases, signs, device, stream, **extras):
            all_matrices = (Matrix * len(matrices))(*(matrix_of(each) for each in matrices))
            around = Extras(bias=(ctypes.c_void_p * 3)(*biases), **extras)
            meeting = Workspace(place.data_ptr(), MEETING)
            library.vq_gemv_on_cpu(
                all_matrices, len(matrices), ctypes.byref(around), ctypes.c_void_p(signs), ctypes.byref(meeting),
                ctypes.c_void_p(x), ctypes.c_void_p(y), type, rows, *device, counts,
            )  # fmt: skip
            assert (place == -1).all(), "not as it was before"
            assert counts[0] > 0
            assert list(counts)[1::2] == [0, 0], "conflicts between banks"

        with monkeypatch.context() as patch:
            patch.setattr(kernels, "module", lambda: SimpleNamespace(vq_gemv=launch))
            patch.setattr(lookup_kernel, "check_cuda", lambda *given: None)
            patch.setattr(lookup_kernel, "place", lambda tensor: {"device": device, "stream": 0})
            return lookup_kernel.vq_gemv(x, rotating, **named)

    return run


def close(got: torch.Tensor, operand: VqSample, x: torch.Tensor) -> None:
    """Within the rounding of sums in f32: the scale of x may differ between slices, which changes no entry."""
    expected, size = by_tables(operand, x)
    assert ((got - expected).abs() <= SUMS * size).all(), float(((got - expected).abs() / size).max())


SHAPES = {1: (177, 576), 2: (83, 640), 3: (35, 1088), 8: (35, 576)}  # by rows of x
CASES = [
    *((LARGE, scheme, 1) for scheme in SCHEMES),
    *((LARGE, "s4l16+s16l32", rows) for rows in (2, 3, 8)),
    *((SMALL, scheme, rows) for scheme in ("s4l16", "s8l8+s8l8") for rows in SHAPES),
]


@pytest.mark.parametrize(("device", "scheme", "rows"), CASES, ids=str)
def test_it_looks_up_every_code_once(emulated, device, scheme, rows):
    shape, dtype = SHAPES[rows], torch.bfloat16 if rows == 2 else torch.float16
    operand = make(shape, SCHEMES[scheme], seed=shape[0], together=scheme == "s8l8+s8l8")
    x = inputs(rows, shape[1], dtype)
    got = emulated(device, x, [operand.matrix], out=torch.full((rows, shape[0]), torch.nan))
    close(got, operand, x)


@pytest.mark.parametrize("shape", [(1, 16), (15, 320), (16, 4112), (1700, 48), (603, 1104)], ids=str)
def test_odd_shapes(emulated, shape):
    operand = make(shape, SCHEMES["s4l16"], seed=3, scales=torch.bfloat16)
    x = inputs(1, shape[1], torch.bfloat16)
    for device in (LARGE, SMALL):
        close(emulated(device, x, [operand.matrix], out=torch.empty(1, shape[0])), operand, x)


@pytest.mark.parametrize("shared", [False, True], ids=["own codebooks", "one codebook"])
@pytest.mark.parametrize("device", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("columns", [640, 1040])
def test_three_matrices_with_norm_bias_and_residual(emulated, device, shared, columns):
    outs = (40, 17, 90)
    operands = [make((out, columns), SCHEMES["s8l8"], seed=1 if shared else out) for out in outs]
    x, weight = inputs(1, columns, torch.float16), torch.rand(columns) + 0.5
    bias, residual = torch.randn(147).half(), torch.randn(1, 147).half()
    matrices = [operand.matrix for operand in operands]
    if shared:
        first = matrices[0].books[0]
        books = [lookup_kernel.VqBook(each.codes, first.fragments, 8, 0, columns // 8) for each in matrices]
        matrices = [lookup_kernel.VqOperand((book,), each.scales, each.factor, each.out_features, columns)
                    for book, each in zip(books, matrices, strict=True)]  # fmt: skip
        operands = [VqSample(matrix, weights(operand, operands[0]), operand.codes, operands[0].codebooks)
                    for matrix, operand in zip(matrices, operands, strict=True)]  # fmt: skip
    norm = gemv.Norm(weight, 1e-5)
    got = emulated(device, x, biased(matrices, bias.split(outs)), norm=norm, residual=residual,
                   out=torch.empty(1, 147))  # fmt: skip
    wide = normed(x, norm)
    parts, sizes = zip(*(by_tables(operand, wide) for operand in operands), strict=True)
    expected, size = torch.cat(parts, 1) + bias.float() + residual.float(), torch.cat(sizes, 1)
    assert ((got - expected).abs() <= 3e-4 * size + 1e-6).all()  # x/rms may round to its other neighbour


def weights(operand: VqSample, other: VqSample) -> torch.Tensor:
    """f32 [out, in] of the codes of one matrix with the codebook of another (8 columns each)."""
    rows = other.codebooks[0].float()[operand.codes[0][..., 0].long()].flatten(1)
    return rows * operand.matrix.scales[:, None].float()


@pytest.mark.parametrize("shared", [False, True], ids=["own codebooks", "one codebook"])
@pytest.mark.parametrize("rows", [1, 5])
def test_gate_and_up(emulated, rows, shared):
    pair = [make((101, 576), SCHEMES["s8l8"], seed=seed) for seed in (1, 2)]
    if shared:
        one, two = pair
        books = (lookup_kernel.VqBook(two.matrix.books[0].codes, one.matrix.books[0].fragments, 8, 0, 72),)
        matrix = lookup_kernel.VqOperand(books, two.matrix.scales, one.matrix.factor, 101, 576)
        pair[1] = VqSample(matrix, weights(two, one), two.codes, one.codebooks)
    x = inputs(rows, 576, torch.float16) / 32
    for device in (LARGE, SMALL, ONE):
        got = emulated(device, x, [each.matrix for each in pair], activation="silu", out=torch.empty(rows, 101))
        gate, up = (by_tables(each, x)[0] for each in pair)
        torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up, rtol=2e-4, atol=2e-4)


def test_more_slices_than_a_thread_reads_at_once_and_than_there_are_results(emulated):
    operand = make((16, 28_672), SCHEMES["s4l16"], seed=5)
    x = inputs(1, 28_672, torch.float16)
    close(emulated((32, 232_448), x, [operand.matrix], out=torch.empty(1, 16)), operand, x)


@pytest.mark.parametrize("slices", [3, 5, 7, 11])
def test_any_number_of_slices(emulated, slices):
    """One table per multiprocessor (test_lookup_launch_geometry.py): equal bits twice, a NaN stays in its row."""
    operand, device = make((33, 512 * slices), SCHEMES["s4l16"], seed=slices), (slices, 232_448)
    x = inputs(2, 512 * slices, torch.float16)
    for rows in (1, 2):
        got = emulated(device, x[:rows], [operand.matrix], out=torch.empty(rows, 33))
        close(got, operand, x[:rows])
        again = emulated(device, x[:rows], [operand.matrix], out=torch.empty(rows, 33))
        assert torch.equal(bits(got), bits(again))
    x[1, -1] = torch.nan
    assert torch.equal(emulated(device, x, [operand.matrix]).isnan().any(1), torch.tensor([False, True]))


@pytest.mark.parametrize(("scheme", "columns", "slices"), [("s8l8+s8l8", 1856, 6), ("s4l16+s16l32", 4208, 8)], ids=str)
def test_slices_of_one_book(emulated, scheme, columns, slices):
    """The cuts of test_lookup_launch_geometry.py: items of two, three and four loads; a NaN stays in its row of y."""
    operand, device = make((49, columns), SCHEMES[scheme], seed=slices), (slices, 232_448)
    x = inputs(2, columns, torch.bfloat16)
    close(emulated(device, x[:1], [operand.matrix], out=torch.empty(1, 49)), operand, x[:1])
    close(emulated(device, x, [operand.matrix], out=torch.empty(2, 49)), operand, x)
    x[0, columns - 3] = torch.nan
    assert torch.equal(emulated(device, x, [operand.matrix]).isnan().any(1), torch.tensor([True, False]))


# Columns by how slices meet Hadamard blocks: many in a warp, one of several warps, across their ends, in three pieces.
TURNED = [
    (LARGE, "s4l16", 48), (LARGE, "s8l8+s8l8", 576), (SMALL, "s4l16", 768), ((3, 101_376), "s4l16+s16l32", 1536),
    ((7, 232_448), "s4l16", 6144), ((9, 232_448), "s4l16", 8192), (ONE, "s8l8", 12_288),
    ((5, 232_448), "s4l16", 12_288),
]  # fmt: skip


@pytest.mark.parametrize(("device", "scheme", "columns"), TURNED, ids=str)
def test_it_rotates_x_as_a_launch_before_it_would(emulated, device, scheme, columns):
    """Bit for bit, in both types; and with a norm what rotating the normed x gives."""
    operand = make((35, columns), SCHEMES[scheme], seed=columns)
    signs = packed_signs(torch.rand(columns, generator=torch.Generator().manual_seed(columns)) < 0.5)
    for dtype in (torch.float16, torch.bfloat16):
        x = inputs(1, columns, dtype)
        got = emulated(device, x, [operand.matrix], signs=signs, out=torch.empty(1, 35))
        turned = rotate(x, signs)
        close(got, operand, turned)
        assert torch.equal(bits(got), bits(emulated(device, turned, [operand.matrix], out=torch.empty(1, 35))))
        norm = gemv.Norm((torch.rand(columns) + 0.5).to(dtype), 1e-5)
        got = emulated(device, x, [operand.matrix], signs=signs, norm=norm, out=torch.empty(1, 35))
        expected, size = by_tables(operand, rotate(normed(x, norm).to(dtype), signs))
        assert ((got - expected).abs() <= torch.finfo(dtype).eps * size).all()  # x/rms may round to its other neighbour


def test_rotated_gate_and_up_and_what_is_not_finite(emulated):
    pair = [make((37, 1536), SCHEMES["s4l16"], seed=seed) for seed in (1, 2)]
    x, signs = inputs(1, 1536, torch.bfloat16) / 32, torch.full((192,), 0xA5, dtype=torch.uint8)
    given = {"activation": "silu", "out": torch.empty(1, 37)}
    got = emulated(LARGE, x, [each.matrix for each in pair], signs=signs, **given).clone()
    gate, up = (by_tables(each, rotate(x, signs))[0] for each in pair)
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up, rtol=2e-4, atol=2e-4)
    x[0, 1100] = torch.inf
    assert emulated(LARGE, x, [each.matrix for each in pair], signs=signs, **given).isnan().all()


def test_what_is_not_finite_stays_in_its_row(emulated):
    operand = make((99, 640), SCHEMES["s4l16"])
    x = inputs(5, 640, torch.float16)
    clean = emulated(LARGE, x, [operand.matrix])
    x[2, 635], x[4, 70] = torch.inf, torch.nan
    got = emulated(LARGE, x, [operand.matrix])
    assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
    assert got[[2, 4]].isnan().all()


def test_unaligned_tensors_and_wrong_numbers_are_named(emulated):
    operand = make((16, 64), SCHEMES["s4l16"])
    first = operand.matrix.books[0]
    x = inputs(1, 64, torch.float16)
    odd = torch.zeros(first.codes.numel() + 1, dtype=torch.uint8)[1:]
    other = lookup_kernel.VqOperand(
        (lookup_kernel.VqBook(odd, first.fragments, 4, 0, 16),), operand.matrix.scales, 1.0, 16, 64
    )
    with pytest.raises(ValueError, match="vq_gemv: codes = 1, bytes past"):
        emulated(LARGE, x, [other])
    two = make((16, 64), SCHEMES["s8l8"])
    with pytest.raises(ValueError, match="vq_gemv: book = 0, must be like that of the first matrix"):
        emulated(LARGE, x, [operand.matrix, two.matrix])

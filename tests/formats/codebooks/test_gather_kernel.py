"""gather_gemv, vptq_gemv: what they refuse; on a GPU, as close to fp64 as a 16-bit product is, and the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.formats.codebooks import gather_kernel
from localq.formats.codebooks.gather_kernel import gather_gemv, gather_roof, reads
from localq.formats.vptq import kernel as vptq_kernel
from localq.formats.vptq.kernel import vptq_gemv
from tests.support.kernels import gather_operands
from tests.support.kernels.gather_operands import AQLM, VPTQ, aqlm_packed, gather_matrix, vptq_matrix, vptq_packed
from tests.support.kernels.nf4_operands import inputs
from tests.support.kernels.row_checks import RowProductChecks

HALF = torch.float16
X = inputs(3, 80, HALF)
AQLM_MATRIX = gather_matrix(aqlm_packed((10, 80), HALF, 1, (1, 512, 1, 8)))
VPTQ_MATRIX = vptq_matrix(vptq_packed((10, 80), HALF, 1, (8, 64, 16)))
REFUSED = {
    "nine rows": (AQLM_MATRIX, {"x": inputs(9, 80, HALF)}, r"x has shape \(9, 80\)"),
    "x of floats": (AQLM_MATRIX, {"x": X.float()}, "x is torch.float32"),
    "x in another type than the codebook": (AQLM_MATRIX, {"x": X.bfloat16()}, "codebooks is torch.float16"),
    "x of another width": (AQLM_MATRIX, {"x": X[:, :64].contiguous()}, "x has 64 columns, a matrix has 80"),
    "codes of 8 bits": (replace(AQLM_MATRIX, codes=AQLM_MATRIX.codes.to(torch.int8)), {}, "codes are torch.int8"),
    "two codebooks": (gather_matrix(aqlm_packed((10, 80), HALF, 1, (2, 512, 1, 8))), {}, "must be of one codebook"),
    "groups of 4": (gather_matrix(aqlm_packed((10, 80), HALF, 1, (1, 512, 1, 4))), {}, "with 8 or 16 columns"),
    "groups of two rows": (gather_matrix(aqlm_packed((10, 80), HALF, 1, (1, 512, 2, 8))), {}, "with 8 or 16 columns"),
    "an odd number of groups": (
        gather_matrix(aqlm_packed((10, 80), HALF, 1, (1, 512, 1, 16))), {}, "an even number",
    ),
    "too few scales": (replace(AQLM_MATRIX, scales=AQLM_MATRIX.scales[:9]), {}, r"scales has shape \(9, 1, 1, 1\)"),
    "all on the CPU": (AQLM_MATRIX, {}, "codes are on cpu, must be on a CUDA device"),
    "vectors of 12": (vptq_matrix(vptq_packed((10, 80), HALF, 1, (12, 64, 0))), {}, "vectors, columns, outliers"),
    "VPTQ in groups": (vptq_matrix(vptq_packed((10, 80), HALF, 1, (8, 64, 0), groups=2)), {}, "it does not read"),
    "outliers": (
        vptq_matrix(vptq_packed((10, 80), HALF, 1, (8, 64, 0), outliers=(8, 4, 16))), {}, "it does not read",
    ),
    "VPTQ in f32": (vptq_matrix(vptq_packed((10, 80), torch.float32, 1, (8, 64, 0))), {}, "it does not read"),
    "tables of another type": (
        vptq_matrix(vptq_packed((10, 80), torch.bfloat16, 1, (8, 64, 0))), {}, "centroids is torch.bfloat16",
    ),
    "half a norm": (replace(VPTQ_MATRIX, weight_bias=None), {}, "one of weight_scale and weight_bias"),
    "a short permutation": (replace(VPTQ_MATRIX, places=VPTQ_MATRIX.places[:79]), {}, r"places has shape \(79,\)"),
    "too few indices": (replace(VPTQ_MATRIX, indices=VPTQ_MATRIX.indices[:, :1]), {}, "indices has shape"),
    "VPTQ on the CPU": (VPTQ_MATRIX, {}, "indices are on cpu, must be on a CUDA device"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses_by_name(case):
    matrix, changes, message = REFUSED[case]
    multiply = gather_gemv if isinstance(matrix, gather_kernel.GatherOperand) else vptq_gemv
    with pytest.raises(ValueError, match=message):
        multiply(**{"x": X, "operands": [matrix], **changes})


@pytest.mark.parametrize("changes", [{"step": 8}, {"size": 3 * 512}, {"size": 16}], ids=str)
def test_the_roof_refuses_by_name(changes):
    table = torch.zeros(changes.get("size", 1024), dtype=torch.uint8)
    with pytest.raises(ValueError, match="gather_roof: table has"):
        gather_roof(table, changes.get("step", 16), 16, torch.zeros(256, dtype=torch.int32))


def test_which_layouts_are_read():
    assert reads(AQLM_MATRIX)
    assert not reads(gather_matrix(aqlm_packed((10, 80), HALF, 1, (1, 256, 1, 8))))
    assert vptq_kernel.reads(VPTQ_MATRIX)
    assert not vptq_kernel.reads(vptq_matrix(vptq_packed((10, 84), HALF, 1, (8, 64, 0))))


def test_bytes():
    matrix = gather_matrix(aqlm_packed((96, 160), HALF, 1, (1, 512, 1, 8)))
    assert gather_kernel.gather_gemv_bytes(3, matrix) == 2 * (96 * 20 + 512 * 8 + 96) + 2 * 3 * (96 + 160)
    assert gather_kernel.gather_gemv_sectors(matrix) == 32 * 96 * 20
    vptq = vptq_matrix(vptq_packed((90, 160), HALF, 1, (8, 256, 16)))
    assert vptq_kernel.vptq_gemv_bytes(1, vptq) == 12 * 160 * 12 // 8 + 2 * 8 * (256 + 16) + 3 * 2 * 160 + 2 * (
        90 + 160
    )
    assert vptq_kernel.vptq_gemv_sectors(vptq) == 2 * 32 * 12 * 160
    assert gather_kernel.gather_roof_bytes(512, 1024) == 2**24


class OnTheDevice(RowProductChecks):
    """Three matrices of one launch, and one whose codebook shared memory holds in part or as a whole."""

    def test_codewords_kept_in_shared_memory_are_the_same(self):
        for shape in ((6007, 4096), (257, 4096)):  # enough codes to keep codewords, and too few
            operand = self.format.make(shape, torch.float16, 0, "cuda")
            for rows in (1, 8):
                x = torch.eye(shape[1], dtype=torch.float16, device="cuda")[8 : 8 + rows]
                got = self.multiply(operand, x, out=torch.empty(rows, shape[0], device="cuda"))
                assert torch.equal(got, operand.dense[:, 8 : 8 + rows].T)


@pytest.mark.cuda
class TestAqlm1x16g8(OnTheDevice):
    format = AQLM["1x16g8"]


@pytest.mark.cuda
class TestAqlm1x12g8(OnTheDevice):
    format = AQLM["1x12g8"]


@pytest.mark.cuda
class TestVptqV8(OnTheDevice):
    format = VPTQ["v8-k65536-0"]


@pytest.mark.cuda
class TestVptqV8Residual(OnTheDevice):
    format = VPTQ["v8-k65536-256"]


@pytest.mark.cuda
class TestVptqV16(OnTheDevice):
    format = VPTQ["v16-k65536-0"]


@pytest.mark.cuda
class TestVptqV16Residual(OnTheDevice):
    format = VPTQ["v16-k65536-65536"]


@pytest.mark.cuda
class TestVptqUnpacked(OnTheDevice):
    format = VPTQ["v8-k300-37 unpacked"]


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("shape", [(37, 64), (130, 544), (1003, 2080), (70, 28672)], ids=str)
def test_groups_of_16(shape, rows):
    operand = AQLM["1x16g16"].make(shape, HALF, 3, "cuda")
    x = inputs(rows, shape[1], HALF, "cuda")
    got = gather_gemv(x, [operand.matrix], out=torch.full((rows, shape[0]), torch.nan, device="cuda"))
    exact, size = x.double() @ operand.dense.double().T, x.double().abs() @ operand.dense.double().abs().T
    assert ((got.double() - exact).abs() <= 1e-5 * size).all()


@pytest.mark.cuda
def test_codes_beyond_the_entries_count_modulo():
    packed = aqlm_packed((33, 96), HALF, 2, (1, 512, 1, 8)).to("cuda")
    assert int(packed.codes.max()) >= 512
    x = torch.eye(96, dtype=HALF, device="cuda")[:8]
    got = gather_gemv(x, [gather_matrix(packed)], out=torch.empty(8, 33, device="cuda"))
    assert torch.equal(got, gather_operands.unrounded(packed)[:, :8].T)


@pytest.mark.cuda
def test_matrices_of_different_sizes_are_named():
    pair = [gather_matrix(aqlm_packed((8, 96), HALF, 2, (1, n, 1, 8)).to("cuda")) for n in (512, 1024)]
    with pytest.raises(ValueError, match="gather_gemv: entries = 1024, must be those of the first"):
        gather_gemv(torch.zeros(1, 96, dtype=HALF, device="cuda"), pair)
    pair = [vptq_matrix(vptq_packed((8, 96), HALF, 2, (8, n, 0)).to("cuda")) for n in (512, 1024)]
    with pytest.raises(ValueError, match="vptq_gemv: count = 1024, must be that of the first"):
        vptq_gemv(torch.zeros(1, 96, dtype=HALF, device="cuda"), pair)


@pytest.mark.cuda
def test_the_roof_reads_what_is_there():
    sums = torch.ones(1024, dtype=torch.int32, device="cuda")
    table = torch.full((2**20,), 0x5A, dtype=torch.uint8, device="cuda")
    for step in (16, 32):
        assert not gather_roof(table, step, 32, sums).any()
    table.view(torch.int32)[::4] = torch.arange(2**18, dtype=torch.int32, device="cuda")[::4]
    first = gather_roof(table, 16, 16, sums).clone()
    assert len(first.unique()) > 1000
    assert torch.equal(gather_roof(table, 16, 16, sums), first)

"""nf4_gemv compiled for the CPU (vq_machine_on_cpu.cuh): above all the last chunk of a row, where it is
shorter than the others.

Every number of blocks that a chunk can have, with any number of whole chunks before it, in both orders, with 1 to 8
rows of x and everything that is fused. Products with unit vectors pick single weights, which come out exactly: a wrong
nibble, lane or scale cannot hide in a sum. How often each byte of codes is read is counted, and by which warps.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from localq import kernels
from localq.formats import nf4
from localq.formats.nf4 import kernel as wrapper
from localq.formats.nf4.kernel import Nf4Operand
from localq.kernels import gemv, workspace
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.gemv_structs import Extras, Workspace
from tests.support.kernels.nf4_operands import Operands, bits, in_order, inputs, operands
from tests.support.kernels.row_operands import biased, normed

KERNELS = ("nf4/gemv.cu", "nf4/gemv_rows.cu", "nf4/gemv_launch.cu")
HALF, BF16 = torch.float16, torch.bfloat16
# Multiprocessors, shared memory of a block: of an H200; of a consumer card; too little for x.
LARGE, SMALL, TINY = (3, 232_448), (2, 101_376), (1, 72_000)
TABLE_SCALE = {HALF: 1.6384992599487305, BF16: 1.1888107061386108}  # csrc/nf4/mma.cuh
SUMS = 1e-5  # of at most 200 sums in f32, one behind the other, over the sum of magnitudes
ITEM = 8 * 32 * 16 + 128  # bytes of a whole chunk of a tile: codes and absmax


class Matrix(ctypes.Structure):
    """csrc/nf4/nf4.h, Nf4."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "absmax", "nested_absmax", "nested_map")),
        ("offset", ctypes.c_float), ("code_map", ctypes.c_void_p), ("out", ctypes.c_int64),
        ("columns", ctypes.c_int64), ("tiled", ctypes.c_bool),
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    found = compile_on_cpu(tmp_path_factory.mktemp("library"), "nf4_on_cpu.cpp", KERNELS, faults=("nf4_gemv",))
    found.nf4_gemv_kernel_on_cpu.restype = ctypes.c_void_p
    return found


@pytest.fixture
def emulated(library, monkeypatch):
    """`formats.nf4.kernel.nf4_gemv` by the kernel on a CPU, the device first.

    `reads` and `left` are of the last launch. Every launch finds and leaves the workspace vacant; `alone`: has none, so
    that units are whole.
    """
    reads, left = (ctypes.c_int64 * 4)(), ctypes.c_int64()
    words = torch.full((2**16,), -1, dtype=torch.int32)

    def launch(*, x, matrices, workspace, y, type, rows, biases, device, stream, **extras):
        all_matrices = (Matrix * len(matrices))(*(Matrix(*each.values()) for each in matrices))
        around = Extras(bias=(ctypes.c_void_p * 3)(*biases), **extras)
        library.nf4_gemv_on_cpu(
            all_matrices, len(matrices), ctypes.byref(around), ctypes.byref(Workspace(*workspace)), ctypes.c_void_p(x),
            ctypes.c_void_p(y), type, rows, *device, reads, ctypes.byref(left),
        )  # fmt: skip
        assert (words == -1).all(), "a word that is not vacant"

    where = {"device": LARGE, "stream": 0}
    monkeypatch.setattr(kernels, "module", lambda: SimpleNamespace(nf4_gemv=launch))
    monkeypatch.setattr(wrapper, "check_cuda", lambda *given: None)
    monkeypatch.setattr(wrapper, "place", lambda tensor: dict(where))

    def multiply(device, *given, alone=False, **named):
        where["device"] = device
        held = workspace.Workspace(None if alone else words)
        monkeypatch.setattr(wrapper, "workspace_of", lambda device: held)
        return wrapper.nf4_gemv(*given, **named)

    return SimpleNamespace(gemv=multiply, reads=reads, left=left)


def rounded(operand: Operands, dtype: torch.dtype) -> torch.Tensor:
    """f64 [out, in]: the weights with the 16 values as the table of this type has them."""
    packed = operand.packed
    pairs = torch.stack((packed.codes >> 4, packed.codes & 15), dim=-1).flatten().int()
    table = (nf4.CODE_MAP * TABLE_SCALE[dtype]).to(dtype).double() / TABLE_SCALE[dtype]
    scales = nf4.absmax_f32(packed).double().view(-1, 1)
    return (table[pairs].view(-1, 64) * scales).view(packed.shape)


def close(got: torch.Tensor, operand: Operands, x: torch.Tensor) -> None:
    weight = rounded(operand, x.dtype)
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    assert ((got.double() - exact).abs() <= SUMS * size).all(), float(((got - exact).abs() / size).max())


def f32(rows: int, results: int) -> torch.Tensor:
    return torch.full((rows, results), torch.nan)


# Blocks of a row: 1 to 8 in the last chunk, alone and behind whole ones; 45 are 2880 columns.
BLOCKS = (1, 4, 6, 11, 15, 16, 18, 45)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_it_multiplies_every_weight_once(emulated, blocks):
    rows = blocks % 7 + 2
    operand = operands((32, 64 * blocks), seed=blocks)
    matrix = in_order(operand.matrix, tiled=True)
    for device, number, dtype in ((LARGE, 1, HALF), (SMALL, rows, BF16)):
        x = inputs(number, 64 * blocks, dtype, seed=number)
        close(emulated.gemv(device, x, [matrix], out=f32(number, 32)), operand, x)
        assert list(emulated.reads)[:2] == [1, 1], "bytes of codes that are not read once"


@pytest.mark.parametrize("rows", range(1, 9))
def test_every_number_of_rows(emulated, rows):
    dtype = BF16 if rows % 2 else HALF
    operand = operands((37, 832), seed=rows)  # a last chunk of 5 blocks, and a last tile of 5 rows
    x, bias = inputs(rows, 832, dtype, seed=rows), torch.randn(37).to(dtype)
    got = emulated.gemv(LARGE, x, biased([in_order(operand.matrix, True)], [bias]), out=f32(rows, 37))
    close(got - bias.float(), operand, x)


@pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "row-wise"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("rows", [1, 6])
def test_both_orders_and_both_kinds_of_scales(emulated, rows, nested, tiled):
    for shape in ((32, 704), (50, 1024)):  # a last chunk of 3 blocks, and a whole one
        operand = operands(shape, nested, seed=rows)
        x = inputs(rows, shape[1], HALF)
        close(emulated.gemv(SMALL, x, [in_order(operand.matrix, tiled)], out=f32(rows, shape[0])), operand, x)


def test_single_columns_come_out_exactly(emulated):
    for blocks in (3, 14):  # of a short chunk: one half or two; every place of a block
        operand = operands((16, 64 * blocks), seed=blocks)
        matrix = in_order(operand.matrix, True)
        table = (nf4.CODE_MAP * TABLE_SCALE[HALF]).half().float()
        pairs = torch.stack((operand.packed.codes >> 4, operand.packed.codes & 15), dim=-1).flatten().int()
        scaled = table[pairs].view(-1, 64) * nf4.absmax_f32(operand.packed).view(-1, 1)
        expected = (scaled * torch.tensor(1 / TABLE_SCALE[HALF]).float()).view(16, -1)
        columns = torch.randperm(64 * blocks, generator=torch.Generator().manual_seed(blocks))[:16]
        columns[:4] = torch.tensor([64 * blocks - 1, 64 * blocks - 64, 64 * (blocks // 8 * 8), 64 * blocks - 66])
        for each in columns.split(8):
            x = F.one_hot(each, 64 * blocks).half()
            for part in (x, x[:1]):
                got = emulated.gemv(LARGE, part, [matrix], out=f32(len(part), 16))
                assert torch.equal(got, expected[:, each[: len(part)]].T)


@pytest.mark.parametrize("rows", [1, 5])
def test_x_is_read_where_it_is_when_it_does_not_fit(emulated, rows):
    operand = operands((32, 2880), seed=4)
    x = inputs(rows, 2880, HALF)
    close(emulated.gemv(TINY, x, [in_order(operand.matrix, True)], out=f32(rows, 32)), operand, x)


@pytest.mark.parametrize("columns", [192, 768])
def test_more_tiles_than_warps_and_than_fit(emulated, columns):
    operand = operands((16 * 24, columns), seed=2)
    matrix = in_order(operand.matrix, True)
    for rows in (1, 8) if columns == 192 else (1,):
        x = inputs(rows, columns, HALF)
        results = [emulated.gemv(device, x, [matrix], out=f32(rows, 384)) for device in (TINY, (7, 232_448))]
        for got in results:
            close(got, operand, x)
        if rows == 1:  # whatever warp had them, chunks are added in their order
            assert torch.equal(*map(bits, results))


@pytest.mark.parametrize("columns", [768, 832, 3840])  # short chunks of 4 and 5 blocks; 2 and 8 chunks, 16 warps
def test_no_warp_has_more_short_items_than_another(emulated, columns):
    rows = 16 * 24 if columns < 1000 else 16 * 6
    matrix = in_order(operands((rows, columns)).matrix, True)
    for number in (1, 2):
        emulated.gemv((1, 232_448), inputs(number, columns, HALF), [matrix])
        least, most = list(emulated.reads)[2:]
        assert most - least <= ITEM, "bytes that one warp reads more than another"


@pytest.mark.parametrize("kind", ["plain", "offset"])
@pytest.mark.parametrize("columns", [576, 1216])
def test_three_matrices_with_norm_bias_and_residual(emulated, columns, kind):
    outs = (48, 17, 96)
    parts = [operands((out, columns), seed=out) for out in outs]
    matrices = sharing([in_order(part.matrix, True) for part in parts])
    x, weight = inputs(1, columns, HALF), torch.rand(columns) + 0.5
    norm = gemv.Norm(weight if kind == "offset" else weight.half(), 1e-5)
    bias, residual = torch.randn(161).half(), torch.randn(1, 161).half()
    got = emulated.gemv(SMALL, x, biased(matrices, bias.split(outs)), norm=norm, residual=residual,
                        out=f32(1, 161))  # fmt: skip
    dense = torch.cat([rounded(part, HALF) for part in parts])
    wide = normed(x, norm).double()
    exact, size = wide @ dense.T + bias.double() + residual.double(), wide.abs() @ dense.abs().T
    assert ((got - exact).abs() <= 3e-4 * size + 1e-6).all()  # x/rms may round to its other neighbour


def sharing(matrices: list[Nf4Operand]) -> list[Nf4Operand]:
    """Matrices of one launch share their tables."""
    first = matrices[0]
    return [replace(each, nested_map=first.nested_map, code_map=first.code_map) for each in matrices]


@pytest.mark.parametrize(("rows", "dtype"), [(1, HALF), (5, BF16)], ids=str)
def test_gate_and_up(emulated, rows, dtype):
    pair = [operands((101, 704), seed=seed) for seed in (1, 2)]
    matrices = sharing([in_order(each.matrix, True) for each in pair])
    x = inputs(rows, 704, dtype) / 8
    biases = [torch.randn(101).to(dtype) for _ in pair]
    gate, up = (x.double() @ rounded(each, dtype).T + bias.double() for each, bias in zip(pair, biases, strict=True))
    for device in (LARGE, SMALL):
        got = emulated.gemv(device, x, biased(matrices, biases), activation="silu", out=f32(rows, 101))
        torch.testing.assert_close(got.double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4])
def test_infinities_keep_their_sign_and_their_row(emulated, rows):
    """The last block of a short chunk stands in for those that are not there: what is in it must not count twice."""
    operand = operands((32, 704), seed=3)
    matrix = in_order(operand.matrix, True)
    x = inputs(rows, 704, HALF)
    clean = emulated.gemv(LARGE, x, [matrix])
    x[-1, 700] = torch.inf
    got = emulated.gemv(LARGE, x, [matrix])
    assert torch.equal(bits(got[:-1]), bits(clean[:-1]))
    expected = torch.inf * operand.dense[:, 700]  # inf * 0 is NaN
    assert torch.equal(got[-1].float().nan_to_num(0.5), expected.half().float().nan_to_num(0.5))


# Equal shares (csrc/nf4/gemv_shares.cuh): rows of each matrix, columns, multiprocessors. Units of 8 items that two
# blocks share; one unit, and two, over many blocks; a last chunk of 5 blocks, in the middle of shares and as a share of
# its own; rows that fill no tile; three matrices.
SHARED = (
    ((80,), 4096, 3),
    ((16,), 6144, 4),
    ((32,), 6144, 7),
    ((77,), 4416, 3),
    ((9,), 4416, 9),
    ((16,), 5952, 4),
    ((48, 17, 96), 4096, 4),
)


def left_words(outs: tuple[int, ...], chunks: int, blocks: int, parts: int = 1) -> int:
    """What blocks leave for others: 16 sums of each item of a unit that begins in an earlier block."""
    unit = parts * chunks
    items = sum(-(-out // 16) for out in outs) * unit
    begins = [items // blocks * block + min(block, items % blocks) for block in range(blocks + 1)]
    return 16 * sum(min(-begin % unit, end - begin) for begin, end in pairwise(begins))


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize(("outs", "columns", "blocks"), SHARED, ids=str)
def test_blocks_that_share_units_give_the_bits_of_whole_units(emulated, outs, columns, blocks, nested):
    parts = [operands((out, columns), nested, seed=out) for out in outs]
    matrices, device = sharing([in_order(part.matrix, True) for part in parts]), (blocks, 232_448)
    for dtype in (HALF, BF16):
        x = inputs(1, columns, dtype)
        joined, again, whole = (
            emulated.gemv(device, x, matrices, out=f32(1, sum(outs)), alone=alone) for alone in (False, False, True)
        )
        assert emulated.left.value == 0
        reads = list(emulated.reads)[:2]  # rows that fill no tile are read in place of those that are not there
        assert torch.equal(bits(joined), bits(whole))
        assert torch.equal(bits(again), bits(whole))
        for got, part in zip(joined.split(outs, dim=1), parts, strict=True):
            close(got, part, x)
    emulated.gemv(device, x, matrices)
    assert list(emulated.reads)[:2] == reads
    assert reads == [1, 1] or any(out % 16 for out in outs), "bytes of codes that are not read once"
    assert emulated.left.value == left_words(outs, -(-columns // 512), blocks)


@pytest.mark.parametrize(("out", "columns", "blocks"), [(101, 1024, 5), (16, 3072, 7), (40, 5056, 5)], ids=str)
def test_gate_and_up_in_equal_shares(emulated, out, columns, blocks):
    pair = [operands((out, columns), seed=seed) for seed in (1, 2)]
    x, biases = inputs(1, columns, HALF) / 8, [torch.randn(out).half() for _ in pair]
    matrices = biased(sharing([in_order(each.matrix, True) for each in pair]), biases)
    norm = gemv.Norm(torch.rand(columns).half() + 0.5, 1e-5)
    joined, whole = (
        emulated.gemv((blocks, 232_448), x, matrices, norm=norm, activation="silu", out=f32(1, out), alone=alone)
        for alone in (False, True)
    )
    assert torch.equal(bits(joined), bits(whole))
    wide = normed(x, norm).double()
    gate, up = (wide @ rounded(each, HALF).T + bias.double() for each, bias in zip(pair, biases, strict=True))
    torch.testing.assert_close(joined.double(), F.silu(gate) * up, rtol=1e-3, atol=1e-3)
    emulated.gemv((blocks, 232_448), x, matrices, norm=norm, activation="silu")
    assert emulated.left.value == left_words((out,), -(-columns // 512), blocks, parts=2)


def test_bias_and_residual_enter_once_in_equal_shares(emulated):
    operand, x = operands((77, 4416), seed=1), inputs(1, 4416, HALF)
    bias, stream = torch.randn(77).half(), torch.randn(1, 77).half()
    matrix = biased([in_order(operand.matrix, True)], [bias])
    joined, whole = (
        emulated.gemv((3, 232_448), x, matrix, residual=stream, out=f32(1, 77), alone=alone) for alone in (False, True)
    )
    assert torch.equal(bits(joined), bits(whole))
    close(joined - bias.float() - stream.float(), operand, x)
    emulated.gemv((3, 232_448), x, matrix, residual=stream, out=stream)  # out may be the residual
    assert emulated.left.value > 0
    assert torch.equal(bits(stream), bits(whole.half()))


def test_a_sum_with_the_bits_of_a_vacant_word_is_no_deadlock(emulated):
    matrix = in_order(operands((16, 6144), nested=False).matrix, True)
    absmax = matrix.absmax.clone()
    absmax.view(torch.int32)[-4:] = -1  # a NaN: rows of the last chunk, which the last of 4 blocks has
    x = inputs(1, 6144, HALF)
    joined, whole = (
        emulated.gemv((4, 232_448), x, [replace(matrix, absmax=absmax)], alone=alone) for alone in (False, True)
    )
    assert joined.isnan().any()
    assert not joined.isnan().all()
    assert torch.equal(joined.isnan(), whole.isnan())


@pytest.mark.parametrize(
    "case", ["balanced", "two rows", "row-wise", "no room for sums", "small workspace", "whole"], ids=str
)
def test_units_stay_whole(emulated, case, monkeypatch):
    operand = operands((80, 4096))
    device = {"balanced": (5, 232_448), "no room for sums": (3, 75_200)}.get(case, (3, 232_448))
    if case == "small workspace":
        small = workspace.Workspace(torch.full((16 * 40 - 1,), -1, dtype=torch.int32))
        monkeypatch.setattr(workspace, "Workspace", lambda words: small)
    x = inputs(1 + (case == "two rows"), 4096, HALF)
    got = emulated.gemv(device, x, [in_order(operand.matrix, case != "row-wise")], out=f32(len(x), 80),
                        alone=case == "whole")  # fmt: skip
    close(got, operand, x)
    assert emulated.left.value == 0


CARDS = {"H200": (132, 232_448), "RTX 4090": (128, 101_376), "RTX 3090": (82, 101_376), "RTX 5090": (170, 101_376)}
# out, in, tiles of a unit -> cards on which blocks share units (csrc/nf4/README.md).
JOINED = {
    (5120, 6144, 1): ("H200", "RTX 4090"),
    (5120, 17408, 1): ("H200", "RTX 4090", "RTX 3090", "RTX 5090"),
    (17408, 5120, 2): ("H200", "RTX 4090", "RTX 3090", "RTX 5090"),
    (4096, 4096, 1): ("RTX 3090", "RTX 5090"),
    (1024, 4096, 1): (),
    (248320, 5120, 1): (),
}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("shape", JOINED, ids=str)
def test_which_launches_are_in_equal_shares(library, shape, card):
    rows, columns, parts = shape
    matrix = Matrix(4096, 4096, 4096, 4096, 0.0, 4096, rows, columns, True)
    around, blocks = Extras(activation=parts - 1), ctypes.c_int64()
    whole, joined = (
        library.nf4_gemv_kernel_on_cpu(
            (Matrix * parts)(*[matrix] * parts), parts, ctypes.byref(around),
            ctypes.byref(Workspace(4096, words)), *CARDS[card], ctypes.byref(blocks),
        )
        for words in (0, workspace.WORDS)
    )  # fmt: skip
    assert whole is not None
    assert (joined != whole) == (card in JOINED[shape])
    if joined != whole:
        assert blocks.value == CARDS[card][0]  # one on each multiprocessor, so that all run at once

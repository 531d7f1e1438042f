"""nf4_gemv on a GPU: as close to fp64 as a 16-bit product is, the same bits every time, rows that stay apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from localq.formats import nf4
from localq.formats.cases import BY_OP
from localq.formats.nf4 import kernel
from localq.formats.nf4 import tiles as nf4_tiles
from localq.formats.nf4.kernel import Nf4Operand, nf4_gemv
from localq.kernels import gemv
from localq.kernels.workspace import Workspace, workspace_of
from tests.support.kernels.nf4_operands import assert_as_good_as_naive, bits, inputs, operands, operands_of
from tests.support.kernels.row_operands import biased

pytestmark = pytest.mark.cuda

DTYPES = [torch.float16, torch.bfloat16]
# Column blocks 1, 5, 8, 9, 17, 33, 65, 448: chunks of eight that are full, partly full and missing. Outputs: one, tiles
# that are not full, less than a tile, more tiles than a GPU holds at a time.
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
SHAPES = BY_OP["nf4_gemv"].shapes
TABLE_SCALE = 1.6384992599487305  # of the float16 table, csrc/nf4/mma.cuh


LAST = {}  # the matrix made last: making one waits for the device, which a capture must not


def matrix(weight, tiled=True):
    if LAST.get("of") is not weight or LAST["matrix"].tiled != tiled:
        LAST.update({"of": weight, "matrix": make_matrix(weight.packed, tiled)})
    return LAST["matrix"]


def make_matrix(packed, tiled=True, like=None):
    """`like`: the matrix to share the tables with, as the matrices of one launch must."""
    codes, absmax = packed.codes, packed.absmax
    if tiled:
        codes, absmax = nf4_tiles.tile(codes, absmax, packed.shape)
    map = packed.nested_map if like is None else like.nested_map
    code_map = nf4.CODE_MAP.to(codes.device) if like is None else like.code_map
    offset = 0.0 if packed.offset is None else packed.offset.item()
    return Nf4Operand(codes, absmax, packed.nested_absmax, map, offset, code_map, *packed.shape, tiled)


def multiply(weight, x, bias=None, out=None, tiled=True):
    return nf4_gemv(x, biased([matrix(weight, tiled)], [bias]), out=out)


@pytest.mark.parametrize("tiled", [True, False], ids=["tiled", "row-wise"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_as_good_as_a_16_bit_product(shape, dtype, nested, tiled):
    weight = operands(shape, nested, seed=shape[0], device="cuda")
    x = inputs(24, shape[1], dtype, "cuda")  # so many that even one output gives a largest error worth comparing
    for rows in (1, 3, 8):
        results = [multiply(weight, part, tiled=tiled) for part in x.split(rows)]
        assert results[0].shape == (rows, shape[0])
        assert results[0].dtype == dtype
        assert_as_good_as_naive(torch.cat(results), x, weight.dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", range(1, 9))
def test_every_number_of_rows_with_bias(rows, dtype):
    weight = operands((321, 1344), seed=rows, device="cuda")
    bias = 5 * torch.randn(321, device="cuda", generator=torch.Generator("cuda").manual_seed(rows)).to(dtype)
    x = inputs(rows, 1344, dtype, "cuda", seed=rows)
    assert_as_good_as_naive(multiply(weight, x, bias), x, weight.dense, bias)


@pytest.mark.parametrize("shape", [(37, 640), (130, 2112)], ids=str)
def test_single_columns_come_out_exactly(shape):
    """x = one unit vector per row picks columns of W: a wrong nibble, lane or scale cannot hide in a sum."""
    weight = operands(shape, seed=9, device="cuda")
    packed = weight.packed
    table = (nf4.CODE_MAP.cuda() * TABLE_SCALE).half().float()
    pairs = torch.stack((packed.codes >> 4, packed.codes & 15), dim=-1).flatten(-2).int()
    scaled = table[pairs].view(shape[0], -1, 64) * nf4.absmax_f32(packed).unsqueeze(-1)
    expected = (scaled * torch.tensor(1 / TABLE_SCALE).float().cuda()).half().view(shape)
    for first in range(0, shape[1], 8):
        x = torch.eye(shape[1], dtype=torch.float16, device="cuda")[first : first + 8]
        assert torch.equal(multiply(weight, x), expected[:, first : first + 8].T)


def test_a_row_does_not_depend_on_the_others():
    weight = operands((257, 1216), device="cuda")
    x = inputs(8, 1216, torch.bfloat16, "cuda")
    together = multiply(weight, x)
    for first in range(7):  # one row alone is another kernel, with another order of its sums
        assert torch.equal(bits(multiply(weight, x[first : first + 2])), bits(together[first : first + 2]))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_infinities_stay_in_their_row_and_have_the_right_sign(value):
    weight = operands((99, 1088), nested=False, device="cuda")
    weight.packed.absmax[-3:] = 0.0
    x = inputs(5, 1088, torch.float16, "cuda")
    clean = multiply(weight, x)
    x[2, 1085], x[4, 70] = value, value
    got = multiply(weight, x)
    assert torch.equal(bits(got[[0, 1, 3]]), bits(clean[[0, 1, 3]]))
    for row, column in ((2, 1085), (4, 70)):
        expected = value * weight.dense[:, column]  # inf * 0 is NaN, and so is a NaN of any sign
        assert torch.equal(got[row].isnan(), expected.isnan())
        assert torch.equal(got[row].float().nan_to_num(0.0), expected.nan_to_num(0.0))  # infinities become the largest


def test_out_is_filled_and_its_neighbours_stay():
    weight = operands((203, 704), device="cuda")
    buffer = torch.full((5, 203), torch.nan, dtype=torch.bfloat16, device="cuda")
    out = buffer[1:4]
    assert multiply(weight, inputs(3, 704, torch.bfloat16, "cuda"), out=out) is out
    assert torch.isfinite(out).all()
    assert buffer[[0, 4]].isnan().all()


@pytest.mark.parametrize("shape", [(77, 28672), (40009, 192)], ids=str)
def test_20_runs_give_the_same_bits(shape):
    weight, x = operands(shape, device="cuda"), inputs(7, shape[1], torch.float16, "cuda")
    first = multiply(weight, x)
    for _ in range(20):
        assert torch.equal(bits(multiply(weight, x)), bits(first))


def test_it_runs_on_the_current_stream():
    weight = operands((513, 2112), device="cuda")
    x, later = (inputs(2, 2112, torch.float16, "cuda", seed=seed) for seed in (1, 2))
    expected = multiply(weight, later)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # some 10 ms: another stream would read the old x
        x.copy_(later)
        got = multiply(weight, x)
    stream.synchronize()
    assert torch.equal(bits(got), bits(expected))


def test_a_captured_graph_reads_what_is_there_at_replay():
    weight, bias = operands((321, 576), device="cuda"), torch.ones(321, device="cuda").half()
    x, later = (inputs(4, 576, torch.float16, "cuda", seed=seed) for seed in (1, 2))
    expected = multiply(weight, later, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = multiply(weight, x, bias)
    x.copy_(later)
    for _ in range(3):
        got.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(got), bits(expected))


def test_it_runs_where_the_tensors_are():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    weight, x = operands((65, 576), device="cuda:1"), inputs(3, 576, torch.float16, "cuda:0")
    expected = multiply(operands_of(weight.packed.to("cuda:0")), x)
    with torch.cuda.device(0):
        assert torch.equal(bits(multiply(weight, x.to("cuda:1")).to("cuda:0")), bits(expected))
        assert torch.cuda.current_device() == 0


def test_unaligned_tensors_are_named():
    weight = operands((3, 64), device="cuda")
    x = torch.zeros(65, dtype=torch.float16, device="cuda")[1:].view(1, 64)
    with pytest.raises(ValueError, match="nf4_gemv: x = 2, bytes past"):
        multiply(weight, x, tiled=False)
    shifted = replace(weight.packed, codes=torch.zeros(97, dtype=torch.uint8, device="cuda")[1:].view(3, 32))
    with pytest.raises(ValueError, match="nf4_gemv: codes = 1, bytes past"):
        multiply(operands_of(shifted), torch.zeros(1, 64, dtype=torch.float16, device="cuda"), tiled=False)


def segments(outs, columns):
    weights = [operands((out, columns), seed=out, device="cuda") for out in outs]
    matrices = [make_matrix(weights[0].packed)]
    matrices += [make_matrix(weight.packed, like=matrices[0]) for weight in weights[1:]]
    return matrices, torch.cat([weight.dense for weight in weights])


def normed(x, norm):
    """As llama's and gemma's RMSNorm: localq/models/layers.py."""
    if norm.weight.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x.float(), norm.weight.shape, norm.weight, norm.eps).to(x.dtype)
    return torch.nn.functional.rms_norm(x, norm.weight.shape, None, norm.eps) * norm.weight


@pytest.mark.parametrize("kind", ["plain", "offset"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [576, 4096])
def test_norm_three_matrices_biases_and_residual_in_one_launch(columns, dtype, kind):
    matrices, dense = segments((577, 96, 33), columns)
    generator = torch.Generator("cuda").manual_seed(3)
    x = inputs(1, columns, dtype, "cuda", seed=columns)
    weight = torch.rand(columns, device="cuda", generator=generator) + 0.5
    norm = gemv.Norm(weight if kind == "offset" else weight.to(dtype), 1e-5)
    bias = torch.randn(706, device="cuda", generator=generator).to(dtype)
    residual = torch.randn(1, 706, device="cuda", generator=generator).to(dtype)
    got = nf4_gemv(x, biased(matrices, bias.split((577, 96, 33))), norm=norm, residual=residual)
    # The residual enters before the one rounding, so the sum as a whole is what a naive product with a bias gives.
    assert_as_good_as_naive(got, normed(x, norm), dense, bias=(bias.float() + residual[0].float()).to(dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("rows", [1, 5])
def test_gate_and_up_in_one_launch(rows, activation):
    matrices, dense = segments((1055, 1055), 1088)
    x = inputs(rows, 1088, torch.float16, "cuda") / 8
    got = nf4_gemv(x, matrices, activation=activation, out=torch.full((rows, 1055), torch.nan, device="cuda"))
    gate, up = (x.double() @ dense.double().T).split(1055, dim=1)
    exact = ACTIVATIONS[activation](gate) * up
    halves = torch.nn.functional.linear(x, dense.half()).split(1055, dim=1)
    naive = ((ACTIVATIONS[activation](halves[0]) * halves[1]).double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= 2 * naive


def test_out_may_be_the_residual():
    matrices, _ = segments((321,), 640)
    x, stream = inputs(1, 640, torch.bfloat16, "cuda"), torch.randn(1, 321, device="cuda").bfloat16()
    expected = nf4_gemv(x, matrices, residual=stream)
    assert torch.equal(bits(nf4_gemv(x, matrices, residual=stream, out=stream)), bits(expected))


# Equal shares: rows and columns whose units are badly spread over 132, 128 and 82 multiprocessors; few units over all
# of them; a last chunk of 3 blocks, and rows that fill no tile. The last is balanced on every card.
UNEVEN = [(5120, 6144), (1024, 8192), (96, 14336), (5000, 5312), (5120, 17408), (16, 512)]


def alone(monkeypatch, *given, **named):
    """Without a workspace, in which units are whole."""
    with monkeypatch.context() as patched:
        patched.setattr(kernel, "workspace_of", lambda device: Workspace(None))
        return nf4_gemv(*given, **named)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("shape", UNEVEN, ids=str)
def test_blocks_that_share_units_give_the_bits_of_whole_units_200_times(monkeypatch, shape, nested):
    weight = operands(shape, nested, seed=shape[0], device="cuda")
    x = inputs(1, shape[1], torch.bfloat16, "cuda")
    whole = alone(monkeypatch, x, [matrix(weight)])
    assert_as_good_as_naive(whole, x, weight.dense)
    results = [multiply(weight, x) for _ in range(200)]  # one behind the other, so that launches overlap
    assert all(torch.equal(bits(each), bits(whole)) for each in results)
    assert (workspace_of(x.device).words == -1).all()


@pytest.mark.parametrize("columns", [5120, 5312])
def test_gate_and_up_in_equal_shares(monkeypatch, columns):
    matrices, _ = segments((4352, 4352), columns)
    x = inputs(1, columns, torch.float16, "cuda") / 8
    norm = gemv.Norm(torch.rand(columns, device="cuda").half() + 0.5, 1e-5)
    whole = alone(monkeypatch, x, matrices, norm=norm, activation="silu")
    results = [nf4_gemv(x, matrices, norm=norm, activation="silu") for _ in range(200)]
    assert all(torch.equal(bits(each), bits(whole)) for each in results)


def test_graphs_of_launches_that_share_units(monkeypatch):
    """Products of one another in one workspace, with nothing between them, replayed without a pause."""
    first, second = (operands(shape, seed=shape[0], device="cuda") for shape in ((5120, 6144), (6144, 5120)))
    matrices = [make_matrix(first.packed), make_matrix(second.packed)]
    norms = [gemv.Norm(torch.ones(columns, device="cuda").half(), 1e-6) for columns in (6144, 5120)]
    start = inputs(1, 6144, torch.float16, "cuda")

    def steps(multiply):
        x = start
        for _ in range(8):
            for matrix, norm in zip(matrices, norms, strict=True):
                x = multiply(x, [matrix], norm=norm)
        return x

    whole = steps(partial(alone, monkeypatch))
    assert whole.isfinite().all()
    assert torch.equal(bits(steps(nf4_gemv)), bits(whole))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = steps(nf4_gemv)
    for _ in range(50):
        got.fill_(torch.nan)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(got), bits(whole))
    assert (workspace_of(start.device).words == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(28672, 8192), (8192, 28672)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_matrices(shape, dtype):
    weight = operands(shape, device="cuda")
    dense = weight.dense
    for rows in (1, 8):
        x = inputs(rows, shape[1], dtype, "cuda", seed=rows)
        got = multiply(weight, x)
        for first in range(0, shape[0], 4096):  # the fp64 copy of a part of W at a time
            part = slice(first, first + 4096)
            assert_as_good_as_naive(got[:, part], x, dense[part])

"""The kernel benchmark: honest bytes, cold copies, a table and a last line that agree, a clear end without a GPU."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from types import SimpleNamespace

import pytest
import torch

from localq import cli
from localq.bench import plot
from localq.bench.kernels import products, rivals, shapes
from localq.bench.kernels import timing as kernel_timing
from localq.bench.kernels.roofline import CPU_PROBES, Timing, read_bytes_per_s, read_probes
from localq.bench.kernels.shapes import GATE_UP, NORM, PLAIN, RESIDUAL, Product, Workload
from localq.bench.kernels.table import FORMAT, HEADER, Rival, Row, as_json, lines
from localq.bench.kernels.timing import Bench, check
from localq.errors import ExitCode, LocalqError
from localq.formats import nf4 as nf4_format
from localq.formats.nf4 import kernel as nf4_kernel

CPU = torch.device("cpu")
MIB = 2**20
ON_CPU = Bench(CPU, 60 * MIB, 3)


@pytest.fixture
def bench():
    """The runner; it imports all wrappers."""
    from localq.bench.kernels import kernel_bench

    return kernel_bench


def row(**changes) -> Row:
    timing = Timing(median_us=50.0, low_us=49.5, high_us=61.0)
    fields = {
        "family": "nf4", "op": "nf4_gemv", "what": "300+20 x 128 (norm)", "rows": 2, "dtype": "float16",
        "bytes": 200_000_000, "timing": timing, "rivals": (Rival("cublas", Timing(150.0, 140.0, 160.0)),),
    }  # fmt: skip
    return Row(**{**fields, **changes})


def test_a_row_by_hand():
    (line,) = lines(row(), 5e12)
    assert line.split() == [
        "nf4_gemv", "300+20", "x", "128", "(norm)", "2", "float16", "50.0", "49.5-61.0", "4000", "80%", "150.0", "3.00",
        "-", "-",
    ]  # fmt: skip
    body = as_json(row(), 5e12)
    assert body["share_of_roof"] == 0.8
    assert body["rivals_us"] == {"cublas": 150.0}
    assert len(HEADER) == len(FORMAT.split())


def test_rivals_without_a_column_get_lines_of_their_own():
    rivals = (Rival("triton fused", Timing(100.0, 99.0, 103.0)), Rival("triton joined", None, "not installed"))
    first, fused, joined = lines(row(rivals=rivals), 5e12)
    assert first.split()[-4:] == ["-"] * 4
    assert fused.split() == ["triton", "fused", "100.0", "99.0-103.0", "2000", "40%", "ours", "2.00"]
    assert joined == "  triton joined: not installed"
    assert as_json(row(rivals=rivals), 5e12)["rivals_us"] == {"triton fused": 100.0, "triton joined": None}


def test_bytes_are_those_of_the_tensors():
    shape = (96, 576)  # 864 blocks: the last nested block is not full
    packed = nf4_format.sample(shape, seed=3)
    stored = packed.codes.nbytes + packed.absmax.nbytes + packed.nested_absmax.nbytes
    assert nf4_kernel.nf4_weight_bytes(96 * 576) == stored == nf4_format.Linear(packed).operand().nbytes
    assert nf4_kernel.nf4_weight_bytes(96 * 576, nested=False) == packed.codes.nbytes + 4 * packed.absmax.numel()
    assert nf4_kernel.nf4_dequantize_bytes(shape, torch.float32) == stored + torch.empty(shape).nbytes
    x, y = torch.empty(5, 576, dtype=torch.bfloat16), torch.empty(5, 96, dtype=torch.bfloat16)
    assert nf4_kernel.nf4_gemv_bytes(5, 96, 576) == stored + x.nbytes + y.nbytes


def test_copies_share_nothing_that_is_read():
    tiled = nf4_format.Linear(nf4_format.sample((33, 576), seed=4)).tile_().operand()
    matrices = [tiled, tiled.copy(), tiled.copy()]
    assert len({matrix.code_map.data_ptr() for matrix in matrices}) == 1  # a launch has one
    for name in ("codes", "absmax", "nested_absmax"):
        tensors = [getattr(matrix, name) for matrix in matrices]
        assert len({tensor.data_ptr() for tensor in tensors}) == 3
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def test_tiled_weights_are_the_same_weights():
    packed = nf4_format.sample((35, 576), seed=5)
    tiled = nf4_format.Linear(copy.deepcopy(packed)).tile_().operand()
    assert tiled.tiled
    plain = rivals.row_by_row(tiled)
    assert not plain.tiled
    assert torch.equal(plain.codes, packed.codes)
    assert torch.equal(plain.absmax, packed.absmax)


def test_bitsandbytes_is_given_the_same_weights():
    bnb = pytest.importorskip("bitsandbytes")
    packed = nf4_format.sample((33, 576), seed=4)
    codes, state = rivals.for_bitsandbytes(nf4_format.Linear(packed).operand().copy(), torch.bfloat16)
    theirs = bnb.functional.dequantize_4bit(codes, state)
    assert torch.equal(theirs, nf4_format.dequantize(packed, torch.bfloat16))


# ---- shapes


def test_shapes_on_the_command_line():
    work = shapes.workload("28672x8192, 40x64")
    assert [(each.outs, each.columns, each.form) for each in work.nf4] == [((28672,), 8192, PLAIN), ((40,), 64, PLAIN)]
    assert work.dense == work.int8 == work.batches == work.dequantized == work.nf4
    assert work.attention == work.widths == work.tables == ()


@pytest.mark.parametrize("text", ["8192x100", "0x64", "8192x64,x", "99999999x99968", "12x64,llama"])
def test_what_is_no_shape(text):
    with pytest.raises(LocalqError) as caught:
        shapes.workload(text)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "--kernels" not in str(caught.value)  # --bcq takes shapes too


def test_shapes_of_a_model():
    work = shapes.workload("llama-3.1-8b")
    assert [(each.name, each.form) for each in work.nf4] == [
        ("4096+1024+1024 x 4096", NORM),
        ("4096 x 4096", RESIDUAL),
        ("14336+14336 x 4096", GATE_UP),
        ("4096 x 14336", RESIDUAL),
        ("128256 x 4096", PLAIN),
    ]
    assert work.attention[0].name == "32/8 heads of 128"
    with pytest.raises(LocalqError) as caught:
        shapes.workload("no-such-model")
    assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL


def test_norms_after_the_output_are_no_residual():
    forms = [each.form for each in shapes.workload("gemma-2-9b").nf4]
    assert forms == [NORM, PLAIN, GATE_UP, PLAIN, PLAIN]


def test_a_hybrid_has_the_products_of_both_kinds_of_layers():
    assert [each.name for each in shapes.workload("qwen3.8-27b").nf4] == [
        "12288+1024+1024 x 5120", "5120 x 6144", "10240+6144 x 5120", "5120 x 6144", "17408+17408 x 5120",
        "5120 x 17408", "248320 x 5120",
    ]  # fmt: skip


# ---- what is compared


@pytest.mark.parametrize("form", [PLAIN, NORM, GATE_UP, RESIDUAL], ids=["plain", "norm", "gate and up", "residual"])
def test_the_references_agree_and_errors_are_found(form):
    product = Product((96, 96) if form == GATE_UP else (96,), 192, form)
    given = products.inputs(ON_CPU, product, 1, torch.float16)
    weights = [torch.randn(out, 192, generator=torch.Generator().manual_seed(out)) / 14 for out in product.outs]
    halves = [weight.half() for weight in weights]
    exact = products.exact(given, [weight.float() for weight in halves])
    naive = products.naive(given, halves)
    assert exact.shape == naive.shape == (1, 96)
    check("op", "what", naive, exact, naive)
    bad = naive.clone()
    bad[0, 7] *= 1.2
    bad[0, 7] += 0.1 * exact.abs().max()
    with pytest.raises(LocalqError, match="op: wrong result for what: the error is"):
        check("op", "what", bad, exact, naive)
    with pytest.raises(LocalqError, match="the error is nan"):
        check("op", "what", torch.full_like(naive, torch.nan), exact, naive)


def test_the_roof_is_the_best_probe(monkeypatch):
    monkeypatch.setattr("localq.bench.kernels.roofline.CPU_BUFFER_BYTES", 4 * MIB)
    probes = read_probes(CPU)
    assert set(probes) == set(CPU_PROBES)
    assert min(probes.values()) > 1e8
    assert read_bytes_per_s(CPU) > 1e8


# ---- the runner


def test_without_a_gpu_it_says_so(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LocalqError, match="torch cannot use a GPU on this machine") as caught:
        bench.run(io.StringIO())
    assert caught.value.exit_code == ExitCode.NO_DEVICE


def test_without_kernels_it_says_why(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.kernels, "why_not", lambda: "built without CUDA kernels")
    with pytest.raises(LocalqError, match="built without") as caught:
        bench.run(io.StringIO())
    assert caught.value.exit_code == ExitCode.NO_DEVICE


def test_an_unknown_family_is_named(bench):
    with pytest.raises(LocalqError, match="unknown kernel family 'nf5'") as caught:
        bench.run(io.StringIO(), families=["nf4", "nf5"])
    assert caught.value.exit_code == ExitCode.USAGE


def test_too_little_memory_leaves_a_row_out(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def greedy_row(bench, product):
        raise torch.OutOfMemoryError("2 GiB, please\nand more")

    from functools import partial

    said = "skipped greedy product=3: not enough memory (2 GiB, please)"
    assert bench._measured(partial(greedy_row, product=3), ON_CPU) == said


def test_a_shape_that_no_kernel_takes_leaves_a_row_out(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def wide_row(bench, columns):
        raise ValueError(f"rowlut_gemv: in = {columns}, is too large for the shared memory of this device")

    from functools import partial

    assert bench._measured(partial(wide_row, columns=57_344), ON_CPU) == (
        "skipped wide columns=57344: not supported by any kernel (rowlut_gemv: in = 57344, is too large for the shared "
        "memory of this device)"
    )


def without_device(bench, monkeypatch, cases):
    """Let `bench.run` measure `cases` on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "_cases", lambda asked, families: cases)
    monkeypatch.setattr(bench, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench, "_facts", lambda at, probes: {"device": "none"})
    monkeypatch.setattr(bench, "Bench", lambda device, cache, replays: ON_CPU)
    monkeypatch.setattr(bench.roofline, "read_probes", lambda device: {"sum": 1e9})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1))


@pytest.mark.parametrize("mode", ["--kernels", "--bcq"])
def test_the_last_line_on_stdout_is_json_beside_a_picture(bench, monkeypatch, tmp_path, capsys, mode):
    def right_row(bench):
        return Row("step", "embed", "64 x 64", 1, "float16", 10, Timing(1.0, 1.0, 1.0))

    from functools import partial

    without_device(bench, monkeypatch, [partial(right_row)])
    figure = SimpleNamespace(savefig=lambda file, **_: file.write(b"PNG"))
    pyplot = SimpleNamespace(subplots=lambda **_: (figure, None), close=lambda figure: None)  # may not be installed
    monkeypatch.setattr(plot, "_pyplot", lambda: pyplot)
    monkeypatch.setattr(plot, "_bars", lambda axes, bars, title: None)
    target = tmp_path / "roof.png"
    assert cli.execute(["bench", mode, "--quiet", "--plot", str(target)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["device"] == "none"
    assert err == f"plot: {target}\n"
    assert target.read_bytes() == b"PNG"


@pytest.mark.parametrize("breaks", [False, True])
def test_a_kernel_that_fails_is_named_and_costs_no_other_row(bench, monkeypatch, breaks):
    from functools import partial

    def wrong_row(bench, rows):
        raise kernel_timing.wrong("nf4_gemv", "64 x 64", "the error is 1")

    def crashing_row(bench):
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    def right_row(bench):
        return Row("step", "embed", "64 x 64", 1, "float16", 10, Timing(1.0, 1.0, 1.0))

    cases = [partial(wrong_row, rows=3), partial(right_row), partial(crashing_row), partial(right_row)]
    monkeypatch.setattr(bench, "_answers", lambda device: not breaks)
    without_device(bench, monkeypatch, cases)
    out, told = io.StringIO(), []

    @contextlib.contextmanager
    def on_case(kernel, done, total):
        printed = len(out.getvalue())
        yield
        told.append((kernel, done, total))
        assert len(out.getvalue()) == printed, "a bar stood where a line was printed"

    result = bench.run(out, on_case=on_case)
    assert told == [("right", 1, 4), ("right", 3, 4)][: len(result["rows"])]  # of those that did not fail
    assert json.loads(out.getvalue().splitlines()[-1]) == result
    assert len(result["rows"]) == (1 if breaks else 2)
    assert result["failures"] == [
        "wrong rows=3: nf4_gemv: wrong result for 64 x 64: the error is 1. The kernel was not timed. "
        "Report this as a bug.",
        "crashing: CUDA error: an illegal memory access",
    ]
    assert out.getvalue().count("FAILED") == 2


@pytest.mark.cuda
def test_a_small_run_on_the_gpu(bench):
    small = Workload(
        nf4=(Product((1536,), 576), Product((577, 33, 31), 1088, NORM), Product((96, 96), 576, GATE_UP)),
        dense=(Product((577,), 1088, RESIDUAL),),
        int8=(Product((577,), 1088),),
        batches=(Product((577,), 1088),),
        dequantized=(Product((577,), 1088),),
        attention=(shapes.Heads(6, 2, 64),),
        widths=(1088,),
        tables=((4099, 576),),
    )
    out = io.StringIO()
    result = bench.run(out, small, replays=3, plot_to="-")
    assert json.loads(out.getvalue().splitlines()[-1]) == result
    assert {each["family"] for each in result["rows"]} == set(bench.FAMILIES)
    for each in result["rows"]:
        assert each["share_of_roof"] > 0
        assert each["share_of_roof"] < 1.1 or each["op"] == "gather_roof"  # that one reads L2, the roof is memory's
        assert each["low_us"] <= each["median_us"] <= each["high_us"]

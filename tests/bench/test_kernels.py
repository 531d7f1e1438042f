"""The kernel benchmark: honest bytes, cold copies, a table and a last line that agree, a clear end without a GPU."""

from __future__ import annotations

import io
import json

import pytest
import torch

from localq.bench import kernels as bench
from localq.bench.kernels import HEADER, Row, as_json, line, needed_bytes
from localq.bench.nf4_weights import Weights
from localq.bench.roofline import Timing, copies_for_cold_cache
from localq.errors import ExitCode, LocalqError
from localq.kernels import ops
from localq.quant import nf4

CPU = torch.device("cpu")
MIB = 2**20


def test_a_row_by_hand():
    timing = Timing(median_us=50.0, low_us=49.5, high_us=61.0)
    row = Row("nf4_gemv", (300, 128), 2, torch.float16, 200_000_000, timing, Timing(150.0, 140.0, 160.0), None)
    assert row.bytes_per_s == 4e12
    assert line(row, 5e12).split() == [
        "nf4_gemv", "300", "x", "128", "2", "float16", "50.0", "49.5-61.0", "4000", "80%", "150.0", "3.00", "-", "-",
    ]  # fmt: skip
    body = as_json(row, 5e12)
    assert body["share_of_roof"] == 0.8
    assert body["linear_us"] == 150.0
    assert body["bitsandbytes_us"] is None
    assert len(HEADER) == len(bench.FORMAT.split())


def test_bytes_are_those_of_the_tensors():
    shape = (96, 576)  # 864 blocks: the last nested block is not full
    weights = Weights.random(shape, CPU, seed=3)
    packed = weights.packed
    stored = packed.codes.nbytes + packed.absmax.nbytes + packed.nested_absmax.nbytes
    assert ops.nf4_weight_bytes(96 * 576) == stored
    assert ops.nf4_weight_bytes(96 * 576, nested=False) == packed.codes.nbytes + 4 * packed.absmax.numel()
    assert ops.nf4_dequantize_bytes(shape, torch.float32) == stored + torch.empty(shape).nbytes
    x, y = torch.empty(5, 576, dtype=torch.bfloat16), torch.empty(5, 96, dtype=torch.bfloat16)
    assert ops.nf4_gemv_bytes(5, 96, 576) == stored + x.nbytes + y.nbytes


@pytest.mark.parametrize("bytes_each", [3 * MIB, 50 * MIB, 700 * MIB])
def test_copies_outgrow_the_cache(bytes_each):
    cache = 60 * MIB
    copies = copies_for_cold_cache(bytes_each, cache)
    # what was touched between two visits of the same copy
    assert (copies - 1) * bytes_each > 2 * cache
    assert copies >= 2
    assert needed_bytes((8192, 4096), cache) > 2 * cache


def test_bitsandbytes_is_given_the_same_weights():
    bnb = pytest.importorskip("bitsandbytes")
    weights = Weights.random((33, 576), CPU, seed=4)
    codes, state = weights.copies(2)[1].for_bitsandbytes(torch.bfloat16)
    theirs = bnb.functional.dequantize_4bit(codes, state)
    assert torch.equal(theirs, nf4.dequantize(weights.packed, torch.bfloat16))


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LocalqError, match="no GPU") as caught:
        bench.run(io.StringIO())
    assert caught.value.exit_code == ExitCode.NO_DEVICE


def test_without_kernels_it_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.kernels, "why_not", lambda: "built without CUDA kernels")
    with pytest.raises(LocalqError, match="built without") as caught:
        bench.run(io.StringIO())
    assert caught.value.exit_code == ExitCode.NO_DEVICE


@pytest.mark.cuda
def test_a_small_run_on_the_gpu():
    out = io.StringIO()
    result = bench.run(out, shapes=[(1536, 576), (577, 1088)], replays=3)
    assert json.loads(out.getvalue().splitlines()[-1]) == result
    assert [row["op"] for row in result["rows"]] == 2 * ["nf4_dequantize", "nf4_gemv", "nf4_gemv", "nf4_gemv"]
    for row in result["rows"]:
        assert 0 < row["share_of_roof"] < 1.1
        assert row["low_us"] <= row["median_us"] <= row["high_us"]
        assert (row["linear_us"] is None) == (row["op"] == "nf4_dequantize")

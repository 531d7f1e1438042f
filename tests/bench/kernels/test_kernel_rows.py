"""Every row of the kernel benchmark with stand-ins for the kernels: what is checked, counted and compared with what."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from localq import kv_bits
from localq.bench.kernels import attention as attention_rows
from localq.bench.kernels import formats as format_rows
from localq.bench.kernels import rivals
from localq.bench.kernels import search as search_rows
from localq.bench.kernels import step as step_rows
from localq.bench.kernels import timing as kernel_timing
from localq.bench.kernels.roofline import Timing
from localq.bench.kernels.shapes import GATE_UP, NORM, RESIDUAL, Heads, Product, Workload
from localq.bench.kernels.table import Rival, as_json, lines
from localq.bench.kernels.timing import Bench
from localq.errors import LocalqError
from localq.formats.nf4 import kernel as nf4_kernel
from localq.kernels import attention
from tests.support.bench import package_stand_ins
from tests.support.kernels import reference_kernels

WORK = Workload(
    nf4=(
        Product((83,), 576),
        Product((64, 32, 31), 576, NORM),
        Product((40, 40), 640, GATE_UP),
        Product((50,), 64, RESIDUAL),
        Product((48,), 640),
        Product((32, 32), 256, GATE_UP),
    ),
    dense=(Product((83,), 576), Product((40, 40), 640, GATE_UP)),
    int8=(Product((83,), 576),),
    batches=(Product((83,), 576),),
    dequantized=(Product((83,), 576), Product((48,), 640)),
    attention=(Heads(6, 2, 64), Heads(6, 2, 64, gated=True)),
    widths=(640,),
    tables=((4099, 64),),
)
OF_FORMATS = ("nf4", "gemm", "dequantize", "int8", "int4", "scaled", "gguf", "rowlut", "gather", "vq", "bcq")
FAMILIES = (
    *(partial(format_rows.cases, family=family) for family in OF_FORMATS),
    format_rows.dense_cases, attention_rows.cases, step_rows.cases, search_rows.cases,
)  # fmt: skip


@pytest.fixture
def bench(monkeypatch):
    """On the CPU: two copies each, every launch run once, a microsecond long."""
    reference_kernels.install(monkeypatch)
    monkeypatch.setattr(attention_rows, "DEPTHS", (5, 130))
    monkeypatch.setattr(attention_rows, "TOKENS", 32)
    monkeypatch.setattr(step_rows, "PASS", 3)
    monkeypatch.setattr(attention, "kv_write", kv_write)
    monkeypatch.setattr(attention, "kv_read", kv_read)
    monkeypatch.setattr(Bench, "copies", lambda bench, size: 2)
    monkeypatch.setattr(Bench, "time", lambda bench, launches: [each() for each in launches] and Timing(1.0, 1.0, 1.0))
    monkeypatch.setattr(rivals, "is_installed", lambda package: False)
    return Bench(torch.device("cpu"), 1, 1)


def kv_write(layer, k, v, positions):
    from localq.engine import kv_codec

    kept = ((layer.k, layer.k_scales, k), (layer.v, layer.v_scales, v))
    for (stored, scales, part), bits in zip(kept, kv_bits.split(layer.bits), strict=True):
        stored[:, positions], scales[:, positions] = kv_codec.quantize(part.transpose(0, 1), bits)


def kv_read(layer, k, v):
    from localq.engine import kv_codec

    kept = ((layer.k, layer.k_scales, k), (layer.v, layer.v_scales, v))
    for (stored, scales, part), bits in zip(kept, kv_bits.split(layer.bits), strict=True):
        live = part.shape[1]
        part.copy_(kv_codec.dequantize(stored[:, :live], scales[:, :live], bits, part.dtype))


def test_every_row_is_measured(bench):
    rows = [case(bench) for cases in FAMILIES for case in cases(WORK)]
    assert {row.op for row in rows} == {
        "nf4_gemv", "nf4_gemm", "nf4_dequantize", "dense_gemv", "int8_gemv", "attention_decode", "kv_write", "kv_read",
        "embed", "rmsnorm", "sample", "dry_match", "adjust", "gather_gemv", "vptq_gemv", "gather_roof",
        "additive_dequantize", "vptq_dequantize", "vq_search", "vq_adjoint", "vq_gemv", "vq_dequantize", "hadamard",
        "int4_gemv", "int4_dequantize", "gguf_gemv", "gguf_dequantize", "bcq_gemv", "bcq_dequantize", "rowlut_gemv",
        "rowlut_dequantize", "delta_decode", "delta_verify", "delta_prefill", "scaled_gemv", "scaled_dequantize",
    }  # fmt: skip
    assert all(row.bytes > 0 for row in rows)
    plain = next(row for row in rows if row.op == "nf4_gemv" and row.rows == 8)
    assert plain.bytes == nf4_kernel.nf4_gemv_bytes(8, 83, 576)
    tables = next(row for row in rows if row.op == "rowlut_gemv" and row.rows == 8)
    assert tables.bytes == 83 * (576 // 2 + 16 * 2) + 2 * 8 * (83 + 576)
    ordered = [row for row in rows if row.op == "int4_gemv" and row.what == "48 x 640, g128, ordered"]
    assert [row.bytes for row in ordered] == [48 * 640 // 2 + 48 * 5 * 5 // 2 + 2 * (48 + 640) + 2 * 640]
    decode = next(row for row in rows if row.op == "attention_decode" and row.what.endswith("130, 8-bit"))
    assert decode.bytes == 130 * 2 * 2 * (64 + 4) + 2 * 64 * (6 + 4 + 6)
    gated = next(row for row in rows if row.what == "6/2 heads of 64, gated, depth 130, 8-bit")
    assert gated.bytes == decode.bytes + 2 * 64 * 6
    mixed = next(row for row in rows if row.op == "attention_decode" and "130, 8-bit keys, 4-bit values" in row.what)
    assert mixed.bytes == 130 * 2 * (64 + 32 + 2 * 4) + 2 * 64 * (6 + 4 + 6)
    state = 48 * 128 * 128 * 4  # read and written
    delta = next(row for row in rows if row.op == "delta_decode")
    rows_of_rates = 2 * 48 * 5120 * 2
    assert 2 * state + rows_of_rates < delta.bytes < 2.1 * state + rows_of_rates
    of_rows = {row.rows: row.bytes for row in rows if row.op == "delta_verify" and " 48 value heads" in row.what}
    assert delta.bytes < of_rows[2] < of_rows[4] < of_rows[8] < 1.15 * delta.bytes
    prefill = next(row for row in rows if row.op == "delta_prefill")
    assert (prefill.rows, prefill.what) == (3, "3 tokens, 48 heads, 0.5 GFLOP")
    assert 2 * state < prefill.bytes < 2.2 * state
    names = {rival.name for row in rows for rival in row.rivals}
    assert names >= {"cublas", "bitsandbytes", "torch attention", "triton two-step", "triton fused", "triton joined"}


def test_trade_offs_of_binary_codes_are_every_planes_and_group_with_their_sizes(bench):
    rows = [case(bench) for case in format_rows.trade_offs(Workload(nf4=(Product((48,), 1088),)))]
    assert len(rows) == 5 * 6
    assert {row.what for row in rows} >= {"48 x 1088, q1g32, 0.0 MB", "48 x 1088, q5row, 0.0 MB"}
    bytes_of = {row.what.split(", ")[1]: row.bytes for row in rows}
    assert bytes_of["q3g128"] - bytes_of["q3row"] == 48 * 3 * 2 * (9 - 1)
    assert bytes_of["q3row"] - bytes_of["q2row"] == 48 * (1088 // 8 + 2)


@pytest.mark.parametrize(
    ("module", "name"), [(nf4_kernel, "nf4_gemv"), (attention, "attention_decode")], ids=["nf4", "attention"]
)
def test_a_wrong_kernel_is_not_timed(bench, monkeypatch, module, name):
    right = getattr(reference_kernels, name)
    monkeypatch.setattr(module, name, lambda *given, **named: right(*given, **named).roll(1))
    cases = format_rows.cases(WORK, "nf4") if module is nf4_kernel else attention_rows.cases(WORK)
    for case in cases[:3]:
        with pytest.raises(LocalqError, match=f"{name}: wrong result for .*: the error is"):
            case(bench)


def test_a_rival_that_fails_is_a_note_under_our_row(bench, monkeypatch):
    def broken(*given, **named):
        raise OSError("no compiler\nand more")

    monkeypatch.setattr(rivals, "_bitsandbytes_products", broken)
    monkeypatch.setattr(rivals, "is_installed", lambda package: package == "triton")
    monkeypatch.setitem(rivals.triton_rivals.VARIANTS, "triton fused", broken)
    monkeypatch.setitem(rivals.triton_rivals.VARIANTS, "triton two-step", lambda matrix, out: None)
    rows = [format_rows.cases(WORK, family)[0](bench) for family in ("nf4", "dequantize")]
    said = [line for row in rows for line in lines(row, 1e12)]
    assert "  bitsandbytes: not measured (OSError: no compiler)" in said
    assert "  triton fused: not measured (OSError: no compiler)" in said
    assert "  triton two-step: produces wrong dequantized values" in said
    assert as_json(rows[0], 1e12)["rivals_us"] == {"cublas": 1.0, "bitsandbytes": None}


def test_the_packages_own_products_are_checked_and_timed_beside_ours(bench, monkeypatch):
    for module in package_stand_ins.modules():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(rivals, "is_installed", lambda package: True)
    rows = {
        (row.what, row.rows): row for row in (case(bench) for case in format_rows.cases(WORK, "gather")) if row.rivals
    }
    for scheme in ("v8-k65536-0", "v8-k65536-256", "v16-k65536-65536"):
        assert rows[f"83 x 576, {scheme} (L2)", 1].rival("vptq") == Rival("vptq", Timing(1.0, 1.0, 1.0))
        assert rows[f"83 x 576, {scheme} (L2)", 8].rival("vptq") == Rival("vptq", None, "supports only 1 or 2 rows")
    for row in [row for row in rows.values() if row.op == "gather_gemv"]:
        assert row.rival("aqlm") == Rival("aqlm", Timing(1.0, 1.0, 1.0))


def test_a_package_with_a_wrong_result_is_not_timed(bench, monkeypatch):
    for module in package_stand_ins.modules(broken=lambda result: result * 0):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(rivals, "is_installed", lambda package: True)
    asked = [case for case in format_rows.cases(WORK, "gather") if isinstance(case, format_rows.FormatRow)]
    products = [case for case in asked if case.kernel.op in ("gather_gemv", "vptq_gemv") and case.timed.rows == 1]
    assert len(products) == 6
    for case in products:
        said = lines(case(bench), 1e12)
        assert said[-1].endswith("not measured: the result is off by 100.00% (limit: 0.63%)"), said


def test_chunks_of_the_exact_product_join(monkeypatch):
    monkeypatch.setattr(kernel_timing, "CHUNK", 4)
    x, weight = torch.randn(2, 8), torch.randn(11, 8)
    assert torch.allclose(kernel_timing.exact_product(x, weight), x.double() @ weight.double().T)

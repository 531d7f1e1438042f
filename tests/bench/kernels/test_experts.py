"""The rows of mixtures of experts and of MXFP4, with stand-ins for the kernels: what is checked and what is counted."""

from __future__ import annotations

import pytest
import torch

from localq.bench.kernels import experts as expert_rows
from localq.bench.kernels.roofline import Timing
from localq.bench.kernels.shapes import MixtureShape, Product, Workload, workload
from localq.bench.kernels.timing import Bench
from localq.errors import LocalqError
from localq.formats.experts import kernel as expert_kernel
from tests.support.kernels import reference_experts

GPT_OSS = MixtureShape("a little gpt-oss", 128, 64, 6, 2, "mxfp4", "clamped", True)
QWEN = MixtureShape("a little qwen", 64, 128, 9, 4, "nf4")
SHARED = MixtureShape("a little qwen with a shared expert", 64, 128, 9, 4, "nf4", shared=True)
IN_2_BITS = MixtureShape("a little qwen in 2 bits", 64, 128, 9, 4, "vq2")
IN_BLOCKS = MixtureShape("a little qwen in GGUF blocks", 256, 512, 9, 4, "gguf")
WORK = Workload(
    mixtures=(GPT_OSS, QWEN, SHARED, IN_2_BITS, IN_BLOCKS),
    batches=(Product((83,), 576),),
    dequantized=(Product((48,), 640),),
)


@pytest.fixture
def bench(monkeypatch):
    """On the CPU: two copies each, every launch run once, a microsecond long."""
    reference_experts.install(monkeypatch)
    weights = reference_experts.weights_of
    monkeypatch.setattr(expert_kernel, "experts_dequantize", lambda stack, index, to: to.copy_(weights(stack)[index]))
    monkeypatch.setattr(Bench, "copies", lambda bench, size: 2)
    monkeypatch.setattr(Bench, "time", lambda bench, launches: [each() for each in launches] and Timing(1.0, 1.0, 1.0))
    return Bench(torch.device("cpu"), 1, 1)


def test_every_row_is_measured(bench):
    rows = [case(bench) for case in expert_rows.cases(WORK)]
    mixtures = ["router", "experts_gate_up", "experts_down", "mixture"]
    in_2_bits = ["router", "vq_experts_gate_up", "vq_experts_down", "mixture"]
    in_blocks = ["router", "gguf_experts_gate_up", "gguf_experts_down", "mixture"]
    prompts = [op for _ in range(6) for op in ("experts_sort", "experts_gemm", "experts_sum")]
    of_mxfp4 = ["mxfp4_gemv", "mxfp4_gemv", "mxfp4_dequantize"]
    assert [row.op for row in rows] == [*mixtures * 3, *in_2_bits, *in_blocks, "route", *prompts, *of_mxfp4]
    gate_up = next(row.bytes for row in rows if row.op == "vq_experts_gate_up")
    assert gate_up == 4 * 2 * (128 * 64 // 4 + 8192 + 2 * 128) + 2 * (64 + 4 * 128)  # with codebooks
    gate_up = next(row.bytes for row in rows if row.op == "gguf_experts_gate_up")
    assert gate_up == 4 * 2 * 512 * 144 + 2 * (256 + 4 * 512)
    by_name = {(row.op, row.what.partition(",")[0]): row.bytes for row in rows}
    parts = [by_name[(name, GPT_OSS.name)] for name in mixtures]
    assert parts[1] == 2 * 128 * (64 + 4) + 2 * (128 + 2 * 64)
    assert parts[3] == sum(parts[:3])
    shared, alone = ([by_name[(name, each.name)] for name in mixtures] for each in (SHARED, QWEN))
    one = 64 * 128 * 9 // 16  # a matrix with scales in u8 would have less: stacks of one matrix each
    assert shared[0] - alone[0] == 2 * 64
    assert shared[3] - alone[3] == sum(shared[:3]) - sum(alone[:3])
    assert shared[1] - alone[1] == pytest.approx(2 * one + 2 * 128, rel=0.1)


def test_a_wrong_product_of_a_prompt_is_not_timed(bench, monkeypatch):
    right = reference_experts.ExpertsGemm.__call__

    def wrong(product, *given, out, **named):
        return out.copy_(right(product, *given, out=out, **named).roll(1))

    monkeypatch.setattr(reference_experts.ExpertsGemm, "__call__", wrong)
    with pytest.raises(LocalqError, match=r"experts_gemm: wrong result for .*: the error is"):
        expert_rows.grouped_row(bench, QWEN, 30, "experts_gemm")


@pytest.mark.parametrize("name", ["experts_gate_up", "experts_down"])
def test_a_wrong_kernel_is_not_timed(bench, monkeypatch, name):
    right = getattr(expert_kernel, name)

    def wrong(*given, out, **named):
        right(*given, out=out, **named)
        out.copy_(out.roll(1))

    monkeypatch.setattr(expert_kernel, name, wrong)
    row = expert_rows.gate_up_row if name == "experts_gate_up" else expert_rows.down_row
    for mixture in WORK.mixtures:
        with pytest.raises(LocalqError, match=f"{name}: wrong result for .*: the error is"):
            row(bench, mixture)


def test_a_router_that_chooses_others_is_not_timed(bench, monkeypatch):
    def wrong(*given, chosen, **named):
        reference_experts.router(*given, chosen=chosen, **named)
        chosen.add_(1)

    monkeypatch.setattr(expert_kernel, "router", wrong)
    with pytest.raises(LocalqError, match="the selected experts do not have the largest logits"):
        expert_rows.router_row(bench, GPT_OSS)


@pytest.mark.parametrize("change", ["weights", "chosen"])
def test_a_router_that_forgets_the_shared_expert_is_not_timed(bench, monkeypatch, change):
    def wrong(*given, **named):
        reference_experts.router(*given, **named)
        named[change][-1] = 0

    monkeypatch.setattr(expert_kernel, "router", wrong)
    with pytest.raises(LocalqError, match="the shared expert is missing"):
        expert_rows.router_row(bench, SHARED)


def test_models_with_experts_have_their_mixture():
    of = workload("gpt-oss-20b").mixtures
    assert of == (MixtureShape("gpt_oss", 2880, 2880, 32, 4, "mxfp4", "clamped", True),)
    (of,) = workload("qwen3.6-35b-a3b").mixtures
    assert of == MixtureShape("qwen3_5_moe", 2048, 512, 256, 8, "nf4", shared=True)
    assert of.entries == 9
    assert workload("llama-3.1-8b").mixtures == ()

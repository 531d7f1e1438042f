"""The checks of the self-test: right results pass, each kind of wrong result is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from localq.engine.selftest import first_failure
from localq.engine.selftest.checks import CHECKS
from localq.engine.selftest.compare import Mismatch
from localq.formats.bcq import kernel as bcq_kernel
from localq.formats.cases import KERNELS
from localq.formats.codebooks import (
    adjoint_kernel,
    dequantize_kernel,
    gather_kernel,
    lookup_kernel,
    rotation_kernel,
    search_kernel,
    unpack_kernel,
)
from localq.formats.codebooks import experts_kernel as codebook_experts
from localq.formats.experts import grouped
from localq.formats.experts import kernel as expert_kernel
from localq.formats.gguf import experts_kernel as gguf_experts
from localq.formats.gguf import kernel as gguf_kernel
from localq.formats.int4 import kernel as int4_kernel
from localq.formats.int8 import kernel as int8_kernel
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.scaled import kernel as scaled_kernel
from localq.formats.squeezellm import kernel as squeezellm_kernel
from localq.formats.vptq import kernel as vptq_kernel
from localq.kernels import attention, delta_net, dense, embed, logit_adjust, rmsnorm, sampling
from tests.support.kernels import reference_experts, reference_kernels

CPU = torch.device("cpu")
Check = Callable[[torch.device], None]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    reference_kernels.install(monkeypatch)


def one_off(result):
    """The last element wrong by half of the largest."""
    result.view(-1)[-1] += 0.5 * result.abs().max()
    return result


def next_token(*given, chosen, **named):
    reference_kernels.sampled(*given, chosen=chosen, **named)
    chosen.add_(1)


def swapped_entries(chosen, experts):
    """The first and the last place change."""
    entries = reference_experts.experts_sort(chosen, experts)
    entries.places[entries.places == 0] = entries.count
    entries.places[entries.places == entries.count - 1] = 0
    entries.places[entries.places == entries.count] = entries.count - 1
    return entries


def off(function):
    """`function` with its result `one_off`."""
    return lambda *given, **named: one_off(function(*given, **named))


def another_expert(function):
    """`function`, which then chooses the next expert instead of the last."""

    def choose(*given, chosen, **named):
        function(*given, chosen=chosen, **named)
        chosen[-1] += 1

    return choose


WRONG = {
    "nf4_dequantize": (nf4_kernel, off(reference_kernels.nf4_dequantize)),
    "nf4_gemv": (nf4_kernel, off(reference_kernels.nf4_gemv)),
    "nf4_gemm": (nf4_kernel, off(reference_kernels.nf4_gemm)),
    "dense_gemv": (dense, off(reference_kernels.dense_gemv)),
    "int8_gemv": (int8_kernel, off(reference_kernels.int8_gemv)),
    "int4_gemv": (int4_kernel, off(reference_kernels.int4_gemv)),
    "int4_dequantize": (int4_kernel, off(reference_kernels.int4_dequantize)),
    "scaled_gemv": (scaled_kernel, off(reference_kernels.scaled_gemv)),
    "scaled_dequantize": (scaled_kernel, off(reference_kernels.scaled_dequantize)),
    "gguf_gemv": (gguf_kernel, off(reference_kernels.gguf_gemv)),
    "gguf_dequantize": (gguf_kernel, off(reference_kernels.gguf_dequantize)),
    "rowlut_gemv": (squeezellm_kernel, off(reference_experts.rowlut_gemv)),
    "rowlut_dequantize": (squeezellm_kernel, off(reference_experts.rowlut_dequantize)),
    "mxfp4_gemv": (mxfp4_kernel, off(reference_experts.mxfp4_gemv)),
    "mxfp4_dequantize": (mxfp4_kernel, off(reference_experts.mxfp4_dequantize)),
    "route": (expert_kernel, another_expert(reference_experts.route)),
    "router": (expert_kernel, another_expert(reference_experts.router)),
    "experts_gate_up": (expert_kernel, off(reference_experts.experts_gate_up)),
    "experts_down": (expert_kernel, off(reference_experts.experts_down)),
    "experts_sort": (grouped, swapped_entries),
    "experts_gemm": (grouped, off(reference_experts.experts_gemm)),
    "experts_sum": (grouped, off(reference_experts.experts_sum)),
    "additive_dequantize": (unpack_kernel, off(reference_kernels.additive_dequantize)),
    "vptq_dequantize": (vptq_kernel, off(reference_kernels.vptq_dequantize)),
    "gather_gemv": (gather_kernel, off(reference_kernels.gather_gemv)),
    "vptq_gemv": (vptq_kernel, off(reference_kernels.vptq_gemv)),
    "gather_roof": (gather_kernel, lambda table, step, loads, sums: sums.fill_(1)),
    "vq_gemv": (lookup_kernel, off(reference_kernels.vq_gemv)),
    "vq_dequantize": (dequantize_kernel, off(reference_kernels.vq_dequantize)),
    "vq_experts_gate_up": (codebook_experts, off(reference_experts.vq_experts_gate_up)),
    "vq_experts_down": (codebook_experts, off(reference_experts.vq_experts_down)),
    "gguf_experts_gate_up": (gguf_experts, off(reference_experts.gguf_experts_gate_up)),
    "gguf_experts_down": (gguf_experts, off(reference_experts.gguf_experts_down)),
    "bcq_gemv": (bcq_kernel, off(reference_kernels.bcq_gemv)),
    "bcq_dequantize": (bcq_kernel, off(reference_kernels.bcq_dequantize)),
    "hadamard": (rotation_kernel, off(reference_kernels.rotated)),
    "attention_decode": (attention, off(reference_kernels.attention_decode)),
    "vq_search": (
        search_kernel,
        lambda *given: ([each + 1 for each in reference_kernels.vq_search(*given)[0]], given[0]),
    ),
    "vq_adjoint": (adjoint_kernel, off(reference_kernels.vq_adjoint)),
    "delta_decode": (delta_net, off(reference_kernels.delta_decoded)),
    "delta_verify": (delta_net, off(reference_kernels.delta_verified)),
    "delta_prefill": (delta_net, off(reference_kernels.delta_prefilled)),
    "embed": (embed, off(reference_kernels.embedded)),
    "rmsnorm": (rmsnorm, off(reference_kernels.normed)),
    "dry_match": (logit_adjust, lambda state, token: None),
    "adjust": (logit_adjust, lambda logits, state: state.matches.zero_()),
    "sample": (sampling, next_token),
}


@pytest.fixture(scope="module")
def right():
    """What the self-test says of right results, and the checks that call each operation, in their order."""
    calling: dict[str, dict[str, Check]] = {name: {} for name in WRONG}

    def noted(operation):
        function = getattr(WRONG[operation][0], operation)

        def call(*given, **named):
            calling[operation][checking[0]] = CHECKS[checking[0]]
            return function(*given, **named)

        return call

    def started(name):
        def check(device):
            checking[:] = [name]
            CHECKS[name](device)

        return check

    checking: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        reference_kernels.install(patch)
        for name, (module, _) in WRONG.items():
            patch.setattr(module, name, noted(name))
        return first_failure(CPU, {name: started(name) for name in CHECKS}), calling


def test_right_results_pass(right):
    assert right[0] == ("", "")


@pytest.mark.parametrize("name", CHECKS)
def test_a_wrong_result_is_found(name, right, monkeypatch):
    """By the check of its name first. Those that do not call it pass as they do with right results."""
    module, wrong = WRONG[name]
    monkeypatch.setattr(module, name, wrong)
    assert first_failure(CPU, right[1][name])[0] == name


@pytest.mark.parametrize(
    "name", [kernel.op for kernel in KERNELS if torch.bfloat16 in kernel.dtypes and 1 in kernel.rows]
)
def test_what_is_wrong_in_bf16_alone_is_found(name, right, monkeypatch):
    """Where codes or x become operands in another way than in f16."""
    module, wrong = WRONG[name]
    correct = getattr(module, name)

    def product(x, *given, **named):
        return (wrong if x.dtype == torch.bfloat16 else correct)(x, *given, **named)

    monkeypatch.setattr(module, name, product)
    assert first_failure(CPU, right[1][name])[0] == name


def test_sums_of_nan_are_found(monkeypatch):
    monkeypatch.setattr(adjoint_kernel, "vq_adjoint", lambda *given: torch.full((256, given[-1]), torch.nan))
    with pytest.raises(Mismatch, match="exceeds its bound by nan"):
        CHECKS["vq_adjoint"](CPU)


def test_a_result_of_nan_is_found(monkeypatch):
    monkeypatch.setattr(nf4_kernel, "nf4_gemv", lambda x, *given, **named: torch.full((x.shape[0], 83), torch.nan))
    with pytest.raises(Mismatch, match="off by nan"):
        CHECKS["nf4_gemv"](CPU)

"""What the planner reduces so that a usable context fits, and what it keeps as it was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localq.errors import ExitCode, LocalqError
from localq.planner import plan as memory_plan
from localq.planner.placement import Placement, Wishes
from tests.support.planner.catalogue_models import arch

pytestmark = pytest.mark.usefixtures("no_own_models")

MIB, GB = 2**20, 1e9


def test_the_table_is_on_the_gpu_only_where_all_of_the_context_fits_beside_it():
    plan = memory_plan.plan(arch("qwen3-8b"), "nf4", 16 * 2**30)
    assert (plan.ctx, plan.placement, plan.choice) == (arch("qwen3-8b").max_context, Placement(), "")
    plan = memory_plan.plan(arch("qwen3-8b"), "nf4", 11 * 2**30)
    assert (plan.placement, plan.choice) == (Placement(16, "host"), "")
    left = memory_plan.plan(arch("qwen3-8b"), "nf4", 11 * 2**30, wishes=Wishes(embed="device", head="16", kv_bits=16))
    assert left.ctx < plan.ctx


def test_steps_of_an_untied_model_are_taken_in_order_until_16k_tokens_fit():
    shape, found = arch("llama-3.1-8b"), []
    tried = Wishes().placements(shape)
    assert tried == [
        Placement(), Placement(16, "host"),
        Placement(16, "host", "8"),
        Placement(8, "host", "16"), Placement(8, "host", "8"),
        Placement(16, "host", "nf4"), Placement(8, "host", "nf4"),
        Placement("k8v4", "host", "16"), Placement("k8v4", "host", "8"), Placement("k8v4", "host", "nf4"),
        Placement(4, "host", "16"), Placement(4, "host", "8"), Placement(4, "host", "nf4"),
    ]  # fmt: skip
    for mib in range(24_000, 4000, -10):
        plan = memory_plan.assess(shape, "nf4", mib * MIB)
        if plan.ctx >= memory_plan.COMFORTABLE_CONTEXT and plan.placement not in found:
            found.append(plan.placement)
        if plan.head != "16":  # with a step that changes replies the context is no longer than it is taken for
            assert plan.ctx <= memory_plan.COMFORTABLE_CONTEXT
    assert found == [each for each in tried if each in found]
    assert {Placement(), Placement(16, "host"), Placement(16, "host", "8"), Placement(8, "host", "8")} < {*found}
    assert found[-1] == Placement(4, "host", "nf4")


@pytest.mark.parametrize(("name", "tokens"), [
    ("llama-3.1-8b", 16_384), ("qwen3-8b", 32_768), ("gemma-2-9b", 8192), ("gpt-oss-20b", 32_768),
])  # fmt: skip
def test_a_model_that_thinks_gets_twice_as_much_and_none_more_than_it_supports(name, tokens):
    shape = arch(name)
    assert memory_plan.comfortable_context(shape) == tokens
    reduced = [plan.ctx for mib in range(4000, 24_000, 20) if (plan := memory_plan.assess(shape, "nf4", mib * MIB)).fits
               and (plan.head, plan.kv_bits) != ("16", 16)]  # fmt: skip
    assert max(reduced) == tokens


def test_the_table_of_a_tied_model_moves_only_with_a_head_of_its_own():
    shape = arch("llama-3.2-1b")
    assert Wishes().placements(shape) == [
        Placement(), Placement(16, "host", "8"), Placement(8), Placement(8, "host", "8"),
        Placement(16, "host", "nf4"), Placement(8, "host", "nf4"),
        Placement("k8v4"), Placement("k8v4", "host", "8"), Placement("k8v4", "host", "nf4"),
        Placement(4), Placement(4, "host", "8"), Placement(4, "host", "nf4"),
    ]  # fmt: skip
    assert Wishes(embed="device").placements(shape) == [Placement(), Placement(8), Placement("k8v4"), Placement(4)]
    assert Wishes(embed="host").placements(shape)[0] == Placement(16, "host", "8")
    assert Wishes(head="8").placements(shape)[:2] == [Placement(head="8"), Placement(16, "host", "8")]
    with pytest.raises(LocalqError, match="also its output head") as raised:
        memory_plan.plan(shape, "nf4", 8 * 2**30, wishes=Wishes(embed="host", head="16"))
    assert raised.value.exit_code == ExitCode.USAGE


def test_what_was_decided_is_said_and_what_was_asked_for_is_kept():
    shape, budget = arch("llama-3.1-8b"), 6500 * MIB
    plan = memory_plan.plan(shape, "nf4", budget)
    assert plan.choice == "saves memory: KV cache 8-bit (--kv)"
    kept = memory_plan.assess(shape, "nf4", budget, wishes=Wishes(kv_bits=16, embed="device", head="8"))
    assert (kept.placement, kept.choice) == (Placement(16, "device", "8"), "")
    longer = memory_plan.plan(shape, "nf4", 8 * 2**30, wishes=Wishes(30_000))
    assert (longer.ctx, longer.kv_bits) == (30_000, 8)
    assert "KV cache 8-bit (--kv)" in longer.choice
    longest = memory_plan.plan(shape, "nf4", 8 * 2**30, wishes=Wishes(30_000, embed="device", head="16"))
    assert (longest.ctx, longest.kv_bits) == (30_000, "k8v4")
    assert "KV cache 8-bit keys, 4-bit values (--kv)" in longest.choice


def test_heads_that_the_quantized_cache_does_not_cover():
    shape = replace(arch("llama-3.1-8b"), head_dim=100)
    assert all(placement.kv_bits == 16 for placement in Wishes().placements(shape))
    with pytest.raises(LocalqError, match="not supported for a head dimension of 100"):
        memory_plan.plan(shape, "nf4", 8 * 2**30, wishes=Wishes(kv_bits=8))


def test_heads_that_a_form_does_not_cover():
    shape = replace(arch("llama-3.1-8b"), hidden=4096 + 8)
    assert all(placement.head == "16" for placement in Wishes().placements(shape))
    with pytest.raises(LocalqError, match="8-bit heads require a column count divisible by 16; this head has 4104"):
        memory_plan.plan(shape, "bf16", 80 * 2**30, wishes=Wishes(head="8"))


@pytest.mark.parametrize("wrong", [{"kv_bits": 5}, {"kv_bits": "k4v8"}, {"embed": "disk"}, {"head": "4"}])
def test_wishes_that_do_not_exist(wrong):
    with pytest.raises(LocalqError) as raised:
        Wishes(**wrong)
    assert raised.value.exit_code == ExitCode.USAGE


def test_without_a_budget_the_context_is_8k_or_what_was_asked():
    assert memory_plan.plan(arch("llama-3.1-8b"), "nf4", None).ctx == 8192
    assert memory_plan.plan(arch("phi-3-mini"), "nf4", None).ctx == 4096
    plan = memory_plan.plan(arch("llama-3.1-8b"), "bf16", None, wishes=Wishes(20_000), itemsize=4)
    assert plan.ctx == 20_000
    assert plan.ledger.components["cuda_context"] == 0
    assert plan.ledger.components["kv_cache"] == 20_000 * 256 * 1024

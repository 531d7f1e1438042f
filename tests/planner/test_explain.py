"""What a plan says of itself: every choice with a reason, and figures that the planner itself confirms."""

from __future__ import annotations

import re

import pytest

from localq.files import catalog
from localq.planner import explain
from localq.planner import plan as memory_plan
from localq.planner.footprint import MIB
from localq.planner.placement import Wishes
from localq.planner.ram import Ram


def told(name: str, budget: memory_plan.Budget, **wishes) -> tuple[memory_plan.Plan, dict[str, explain.Line]]:
    arch, asked = catalog.find(name).arch, Wishes(**wishes)
    plan = memory_plan.assess(arch, "nf4", budget, wishes=asked)
    return plan, {line.what: line for line in explain.lines(plan, asked, arch, budget)}


def test_where_all_fits_nothing_gives_way():
    _, lines = told("qwen3-8b", 16 * 2**30)
    assert [line.option for line in lines.values()] == ["--embed", "--head", "--kv", "--ctx"]
    assert {lines[what].why for what in ("embedding", "head", "KV cache")} == {"the default"}
    assert (lines["KV cache"].value, lines["context"].why) == ("16-bit", "the model's maximum")
    _, lines = told("qwen3-8b", 10 * 2**30)
    assert (lines["head"].why, lines["context"].why) == ("the default", "the largest that fits")


def test_what_was_reduced_says_what_would_fit_without_it():
    plan, lines = told("llama-3.1-8b", 6500 * MIB)
    assert (plan.embed, lines["embedding"].value[:14]) == ("host", "in RAM, one ro")
    assert lines["context"].why == "a larger context needs lower precision"
    found = re.search(r"otherwise only ([\d,]+) tokens would fit", lines["embedding"].why)
    if found is None:
        assert "would not fit" in lines["embedding"].why
    left = memory_plan.assess(
        catalog.find("llama-3.1-8b").arch, "nf4", 6500 * MIB, wishes=Wishes(None, plan.kv_bits, "device", plan.head)
    )
    assert left.ctx < memory_plan.COMFORTABLE_CONTEXT
    assert (found is not None) == left.fits
    assert found is None or int(found[1].replace(",", "")) == left.ctx


def test_what_was_asked_for_and_what_the_model_was_made_for():
    _, lines = told("qwen2.5-0.5b", 80 * 2**30, kv_bits=8, head="8")
    assert (lines["KV cache"].why, lines["head"].why) == ("as requested", "as requested")
    assert lines["head"].value == "8-bit, separate from the embedding"
    assert told("qwen2.5-0.5b", 80 * 2**30, kv_bits="k8v4")[1]["KV cache"].value == "8-bit keys, 4-bit values"
    assert lines["context"].why == "the model's maximum"
    _, lines = told("qwen2.5-0.5b", 80 * 2**30, ctx=2000)
    assert (lines["context"].value, lines["context"].why) == ("2,000 tokens", "as requested")
    assert "shared with the embedding" in lines["head"].value


@pytest.mark.parametrize("mib", range(900, 2600, 100))
def test_a_tied_table_and_its_head_give_way_together(mib):
    plan, lines = told("llama-3.2-1b", mib * MIB)
    assert (plan.embed == "host") == ("separate from" in lines["head"].value)
    assert ("saves memory" in lines["head"].why) == (plan.embed == "host")
    assert len({line.what for line in lines.values()}) == 4


def test_on_the_cpu():
    for budget in (None, Ram(400 * 2**30, "float32")):
        _, lines = told("llama-3.1-8b", budget)
        assert lines["embedding"].value == "in RAM"
        assert lines["context"].why == "the default on the CPU"
    _, lines = told("llama-3.1-8b", Ram(31 * 2**30, "float32"))
    assert lines["context"].why == "the largest that fits"
    _, lines = told("llama-3.1-8b", Ram(3 * 2**30, "float32"))
    assert lines["context"].why == "the minimum"

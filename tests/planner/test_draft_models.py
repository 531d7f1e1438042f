"""A draft model is planned beside its target: weights, cache, buffers; what cannot draft is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog
from localq.planner import choose, costs, draft_cost, draft_models, footprint, open_cost, ram
from localq.planner import plan as memory_plan
from localq.planner.consent import OpenCost
from localq.planner.draft_shape import DraftShape
from localq.planner.growth import Growth, total
from localq.planner.placement import Placement, Wishes
from localq.settings import Settings

MIB = 2**20
CARD = 23_896 * MIB


@pytest.fixture(autouse=True)
def nothing_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))


def settings_of(name: str, **more: object) -> Settings:
    return Settings(draft=name, offline=True, **more)


def plan_of(name: str, format: str, draft: str, **wishes: object) -> memory_plan.Plan:
    shape = draft_models.shape(settings_of(draft))
    asked = Wishes(draft_tokens=7, draft=shape, **wishes)
    return memory_plan.assess(catalog.find(name).arch, format, CARD, wishes=asked)


# ---- names


def test_words_are_no_models_and_other_names_are():
    assert [draft_models.shape(settings_of(word)) for word in ("auto", "off", "lookup")] == [None] * 3
    assert draft_models.target(settings_of("auto")) is None
    shape = draft_models.shape(settings_of("llama-3.2-1b@nf4"))
    assert (shape.name, shape.format, shape.arch) == ("llama-3.2-1b", "nf4", catalog.find("llama-3.2-1b").arch)
    usual = draft_models.shape(settings_of("llama-3.2-1b"))
    assert usual.format == catalog.resolve("llama-3.2-1b").format


def test_an_unknown_name_is_told_from_a_source():
    with pytest.raises(
        LocalqError, match=r"draft 'lokup': neither a draft source \(auto, off, lookup, mtp\) nor"
    ) as caught:
        draft_models.target(settings_of("lokup"))
    assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL


def test_a_model_with_recurrent_layers_is_refused():
    with pytest.raises(LocalqError, match="recurrent layers") as caught:
        draft_models.shape(settings_of("qwen3.5-0.8b"))
    assert caught.value.exit_code == ExitCode.USAGE
    assert "--draft auto" in caught.value.next_step


def test_a_model_that_is_no_smaller_gets_a_warning():
    large, small = (catalog.find(name).arch for name in ("llama-3.1-8b", "llama-3.2-1b"))
    assert draft_models.warning("large", large, "small", small) == ""
    assert draft_models.warning("small", small, "large", large) == (
        "large is no smaller than small, so its drafts will rarely be used"
    )


# ---- memory


def test_it_takes_context_from_the_model():
    alone = memory_plan.assess(catalog.find("llama-3.1-8b").arch, "nf4", CARD, wishes=Wishes(draft_tokens=7))
    both = plan_of("llama-3.1-8b", "nf4", "llama-3.2-1b@nf4")
    assert both.fits
    assert memory_plan.MIN_CONTEXT < both.ctx < alone.ctx
    assert both.ledger.total <= CARD < both.ledger.total + 200 * MIB
    assert both.draft.name == "llama-3.2-1b"
    parts, arch = both.ledger.components, both.draft.arch
    weights = footprint.placed_weights(arch, "nf4") + 2 * (arch.embedding_parameters + arch.head_parameters)
    assert parts["draft_weights"] == weights
    assert parts["draft_kv_cache"] == both.ctx * arch.kv_bytes_per_token(16)
    assert 0 < parts["draft_workspace"] < 400 * MIB
    assert parts["graphs"] > alone.ledger.components["graphs"]  # of both, outside of the allocator
    assert not any(alone.ledger.components[part] for part in draft_cost.COMPONENTS)


def test_its_cache_has_the_bits_of_the_model_and_ends_with_its_own_context():
    both = plan_of("llama-3.1-8b", "nf4", "llama-3.2-1b@nf4", ctx=4096, kv_bits=8)
    dense = footprint.per_token_bytes(both.draft.arch, Placement(8), 2)["kv_cache"]
    assert both.ledger.components["draft_kv_cache"] == 4096 * dense
    shape = replace(both.draft, arch=replace(both.draft.arch, max_context=1000))
    short = memory_plan.assess(
        catalog.find("llama-3.1-8b").arch, "nf4", CARD, wishes=Wishes(ctx=4096, kv_bits=8, draft_tokens=7, draft=shape)
    )
    assert short.ledger.components["draft_kv_cache"] == 1000 * dense


def test_without_drafts_it_takes_nothing():
    shape = draft_models.shape(settings_of("llama-3.2-1b@nf4"))
    plan = memory_plan.assess(catalog.find("llama-3.1-8b").arch, "nf4", CARD, wishes=Wishes(draft=shape))
    assert plan.draft is None
    assert not any(plan.ledger.components[part] for part in draft_cost.COMPONENTS)


def test_on_the_cpu_it_lies_in_ram_dequantized():
    shape = draft_models.shape(settings_of("llama-3.2-1b@nf4"))
    free = ram.Ram(64 * 2**30, "float32")
    asked = Wishes(ctx=2048, draft_tokens=7, draft=shape)
    plan = memory_plan.assess(catalog.find("llama-3.1-8b").arch, "nf4", free, wishes=asked)
    arch = shape.arch
    assert plan.ledger.components["draft_weights"] == 4 * arch.parameters
    assert plan.ledger.components["draft_kv_cache"] == 2 * 2048 * arch.kv_bytes_per_token(16)


def test_the_way_out_by_a_shorter_context_counts_it():
    shape, arch = draft_models.shape(settings_of("llama-3.2-1b@nf4")), catalog.find("llama-3.1-8b").arch
    asked = Wishes(ctx=131_072, kv_bits=16, draft_tokens=7, draft=shape)
    with pytest.raises(LocalqError, match=r"--ctx (\d+)") as caught:
        memory_plan.plan(arch, "nf4", CARD, wishes=asked, name="llama-3.1-8b")
    context = int(str(caught.value).partition("--ctx ")[2].partition(")")[0])
    assert memory_plan.assess(arch, "nf4", CARD, wishes=replace(asked, ctx=context)).fits
    assert not memory_plan.assess(arch, "nf4", CARD, wishes=replace(asked, ctx=context + 2000)).fits


def test_settings_carry_it_to_every_plan():
    settings = settings_of("llama-3.2-1b@nf4")
    assert choose.wishes_of(settings).draft.name == "llama-3.2-1b"
    assert choose.wishes_of(settings_of("lookup")).draft is None


# ---- growth


@pytest.mark.parametrize("limited", [(), ((100, 7),), ((100, 7), (2000, 3)), ((2000, 3), (50, 4), (2000, 1))])
def test_the_context_of_a_growth_is_the_largest_that_fits(limited):
    growth = Growth(5, limited)
    for context in (0, 1, 49, 50, 51, 99, 100, 101, 1999, 2000, 2001, 50_000):
        size = growth.bytes(context)
        assert growth.context(size) == context
        assert growth.context(growth.bytes(context + 1) - 1) == context
    assert growth.context(-1) == 0


def test_a_growth_ends_at_a_context_and_several_add_up():
    growth = Growth(5, ((100, 7),)).up_to(60)
    assert [growth.bytes(context) for context in (0, 60, 1000)] == [0, 720, 720]
    both = total([growth, Growth(2, ((60, 1), (9, 1)))])
    for context in (0, 5, 30, 61, 700):
        assert both.bytes(context) == growth.bytes(context) + Growth(2, ((60, 1), (9, 1))).bytes(context)
    arch = catalog.find("gemma-3-4b").arch
    cost = costs.growth(arch, Placement(rows=8), None, 2, footprint.prefill_chunk(True))
    assert cost.limited


# ---- consent


def test_the_cost_of_both_is_one_question():
    names = ("llama-3.1-8b", "llama-3.2-1b")
    targets = [catalog.resolve(name) for name in names]
    one, other = (open_cost.of(each, Settings()) for each in targets)
    both = open_cost.of_all(targets, Settings(), "the best")
    assert (both.download, both.disk) == (one.download + other.download, one.disk + other.disk)
    assert both.name == f"{one.name} and {other.name}"
    assert both.why == "the best"
    assert both.is_large
    assert open_cost.of_all(targets, Settings(offline=True)) is None
    made = OpenCost("a", "b", 0, 5, 60.0, ()).plus(OpenCost("c", "d", 7, 9, None, ()))
    assert (made.make_s, made.disk) == (60.0, 14)


# ---- MTP blocks


def test_a_plan_counts_the_mtp_block_only_where_it_drafts():
    arch = catalog.find("qwen3.5-4b").arch
    wishes, gib = choose.wishes_of(settings_of("auto")), 1024 * MIB

    def drafting(budget, wishes, arch=arch):
        made = memory_plan.plan(arch, "nf4", budget, wishes=wishes)
        return made.draft, made.ledger.components["draft_weights"]

    on_cpu = ram.Ram(64 * gib, "bfloat16", None, 0)
    shape, size = drafting(on_cpu, wishes)
    assert (shape.name, shape.is_block, shape.on_gpu) == ("mtp", True, False)
    hidden, layer = arch.hidden, arch.linear_parameters / arch.layers
    assert 2 * 2 * hidden**2 < size < 2 * (2 * layer + 2 * hidden**2)
    for other in ("lookup", "off"):
        assert drafting(on_cpu, choose.wishes_of(settings_of(other)))[0] is None
    assert drafting(on_cpu, wishes, catalog.find("llama-3.2-1b").arch)[0] is None
    shape, packed = drafting(24 * gib, wishes)
    assert shape.is_block
    assert size / 4 < packed < size / 3.5, "on a GPU it stays in NF4"


def test_all_models_of_the_families_with_mtp_blocks_say_so():
    found = {entry.name for entry in catalog.load_catalogue() if entry.arch.mtp}
    assert found == {entry.name for entry in catalog.load_catalogue() if entry.arch.traits.hybrid}
    assert {"qwen3.8-27b", "qwen3.6-35b-a3b"} <= found
    arch = catalog.find("qwen3.8-27b").arch
    assert DraftShape.of_block(arch, "bf16").on_cpu(2).weights == pytest.approx(850e6, rel=0.01)  # as published
    arch = catalog.find("qwen3.6-35b-a3b").arch
    assert DraftShape.of_block(arch, "bf16").on_cpu(2).weights == pytest.approx(2 * 0.845e9, rel=0.01)

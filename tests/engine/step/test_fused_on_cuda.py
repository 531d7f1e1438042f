"""The fused decode step on a GPU: its logits against f32, the graph against the eager launches, and its profile."""

from __future__ import annotations

import pytest
import torch

from localq.engine import profile
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.engine.step.fused import OPERATIONS, why_not
from localq.engine.step.graph import StepGraphs
from localq.engine.step.state import Readback
from localq.files.layer_caches import KeysAndValues
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from tests.support.engine import fused_models
from tests.support.engine.engine_runs import ids_of, prompt_of
from tests.support.engine.fused_models import (
    CASES,
    CONTEXT,
    GEMMA4_CASES,
    GEMMA4_CHECKPOINTS,
    UNCUT_PHI3,
    assert_as_good_as_the_modules,
    step_of,
    wide_llama,
)
from tests.support.models.tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.cuda
LONG = 4096
DTYPES = [torch.float16, torch.bfloat16]
SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.97, min_p=0.001, repeat_penalty=1.1, seed=9)


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_every_family_is_as_near_to_f32_as_its_modules(name, dtype, quantized):
    ours, exact = fused_models.pair(name, CASES[name], dtype, quantized, CONTEXT)
    assert why_not(ours) == ""
    assert_as_good_as_the_modules(ours, exact, seed=6 if name == "gemma4-experts" else 5)  # 5: two experts nearly tie


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("name", GEMMA4_CASES)
def test_several_rows_are_as_near_to_f32_as_the_modules(name, rows, quantized):
    ours, exact = fused_models.pair(name, CASES[name], torch.bfloat16, quantized, CONTEXT)
    assert_as_good_as_the_modules(ours, exact, rows=rows)


@torch.inference_mode()
def test_gemma4_reads_layer_inputs_from_pinned_host_memory_with_the_same_bits():
    model, _ = fused_models.pair("gemma4-inputs", CASES["gemma4-inputs"], torch.bfloat16, True, CONTEXT)
    ids = fused_models.text_of(model.config.vocab_size)
    expected, table = fused_models.by_launches(model, ids), model.embed_tokens_per_layer.weight.detach().cpu()
    model.embed_tokens_per_layer.weight = torch.nn.Parameter(table.pin_memory(), requires_grad=False)
    assert why_not(model) == ""
    assert torch.equal(fused_models.by_launches(model, ids), expected)


@pytest.mark.parametrize("kind", GEMMA4_CHECKPOINTS)
def test_gemma4_replies_by_graphs_are_those_of_launches_with_the_memory_of_the_plan(kind, tmp_path):
    folder = make_checkpoint(tmp_path, "gemma4_text", **GEMMA4_CHECKPOINTS[kind])
    found = []
    for use_graphs in (True, False):
        options = LoadOptions(device="cuda", dtype="bfloat16", ctx=512, draft_tokens=7)
        engine = Engine(load(open_model(folder), options), use_graphs=use_graphs, draft_tokens=7)
        assert engine.graphs == use_graphs
        assert not [note for note in engine.notes if "slow" in note]
        planned, ledger = engine.model.plan.ledger.components, engine.ledger()
        assert ledger["step_buffers"] == planned["step_buffers"]
        assert ledger["attention_workspace"] <= planned["attention_workspace"]
        found.append(ids_of(engine, prompt_of(40), max_tokens=200, draft_tokens=0))
    assert len(found[0]) == 200 or found[0][-1] == 258
    assert found[0] == found[1]


def test_gate_and_up_that_cannot_be_cut_are_multiplied_by_torch():
    ours, exact = fused_models.pair("phi3-window", UNCUT_PHI3, torch.float16, True, CONTEXT)
    step, _ = step_of(ours, CONTEXT)
    operations = [launch.operation for launch in step.launches(greedy=True)]
    assert operations.count("gate_up") == 2 * ours.config.layers
    assert_as_good_as_the_modules(ours, exact)


def test_projections_of_two_formats_are_launched_one_by_one():
    kept = ("1.self_attn.k_proj", "2.mlp.up_proj")
    ours, exact = fused_models.pair("llama-biases", CASES["llama-biases"], torch.bfloat16, True, CONTEXT, kept)
    assert_as_good_as_the_modules(ours, exact)


@pytest.mark.parametrize(
    ("name", "bits", "lengths"),
    [
        ("qwen3", 16, 1000),
        ("gemma2", 16, 200),
        ("qwen3", 8, 200),
        ("qwen3", 4, 200),
        ("qwen3.5", 16, 1000),
        ("qwen3.5-moe", 8, 200),
        *((name, 16, 200) for name in GEMMA4_CASES),
    ],
)
@torch.inference_mode()
def test_graph_equals_eager_bit_for_bit_at_random_lengths(name, bits, lengths):
    model, _ = fused_models.pair(name, {**CASES[name], "sliding_window": 700}, torch.bfloat16, True, LONG)
    step, cache = step_of(model, LONG, bits)
    fill(model, cache)
    states = [part for state in cache.states.values() for part in state]
    step.state.sampler.reset(SAMPLED, torch.arange(20), LONG)
    graphs, sampler = StepGraphs(step), step.state.sampler
    seen = sampler.seen.clone()
    generator = torch.Generator().manual_seed(lengths + bits)
    positions = torch.randint(LONG - 2, (lengths,), generator=generator).tolist()
    positions[:4] = [0, LONG - 1, 699, 700]
    tokens = torch.randint(model.config.vocab_size, (lengths,), generator=generator).cuda()
    differing = torch.zeros(1, dtype=torch.int64, device="cuda")
    for number, position in enumerate(positions):
        found, before = [], [part.clone() for part in states]
        for run in (graphs.replay, step.run):
            step.state.rewind(position)
            for part, kept in zip(states, before, strict=True):
                part.copy_(kept)
            sampler.step.fill_(number)
            sampler.seen.copy_(seen)
            step.state.token.copy_(tokens[number : number + 1])
            step.logits.fill_(float("nan"))
            run(number % 2 == 0)
            found.append([step.logits.clone(), step.state.chosen.clone(), step.state.position.clone()])
            found[-1] += [part.clone() for part in states]
        for mine, theirs in zip(*found, strict=True):
            differing += (mine != theirs).sum()  # NaN differs from itself
    assert int(differing) == 0


@pytest.mark.parametrize(("name", "bits"), [
    ("gemma2", 16), ("gemma3-text", 16), ("mistral-window", 8), *((name, 16) for name in GEMMA4_CASES),
])  # fmt: skip
@torch.inference_mode()
def test_windows_that_slide_give_the_bits_of_a_cache_that_keeps_everything(name, bits):
    """Past window and chunk several times: as a graph, launch by launch, and with every position kept."""
    model, _ = fused_models.pair(name, {**CASES[name], "sliding_window": 20}, torch.bfloat16, True, LONG)
    (whole, kept), (step, cache) = step_of(model, LONG, bits), step_of(model, LONG, bits, chunk=30)
    graphs = StepGraphs(step)
    cache.clear()
    tokens = torch.randint(model.config.vocab_size, (300,), generator=torch.Generator().manual_seed(bits)).cuda()
    differing = torch.zeros(1, dtype=torch.int64, device="cuda")
    model(tokens[:30], torch.arange(30, device="cuda"), kept, 30)
    cache.make_room(0, 30)
    model(tokens[:30], torch.arange(30, device="cuda"), cache, 30)
    for position in range(30, 300):
        cache.make_room(position, 1)
        found = []
        for each, run in ((whole, whole.run), (step, graphs.replay), (step, step.run)):
            each.state.rewind(position)
            each.state.token.copy_(tokens[position : position + 1])
            run(True)
            found.append(each.logits.clone())
        differing += sum((other != found[0]).sum() for other in found[1:])
    assert int(differing) == 0
    assert cache.view(20, 300)[0] > 200


def fill(model, cache) -> None:
    """Random keys and values in every slot, through the cache's own write; random states."""
    for state in cache.states.values():
        for part in state:
            part.normal_()
    for layer, kept in enumerate(model.cache_layout()):
        if not isinstance(kept, KeysAndValues):
            continue
        k, v = torch.randn(2, LONG, kept.kv_heads, kept.head_dim, dtype=torch.bfloat16, device="cuda")
        cache.update(layer, k, v, torch.arange(LONG, device="cuda"), LONG)


@pytest.mark.parametrize("name", ["gemma2", *GEMMA4_CASES])
@torch.inference_mode()
def test_a_step_allocates_nothing_in_a_graph_or_not(name):
    model, _ = fused_models.pair(name, CASES[name], torch.float16, True, CONTEXT)
    step, _ = step_of(model, CONTEXT)
    graphs = StepGraphs(step)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for greedy in (True, False):
        for run in (graphs.replay, step.run):
            run(greedy)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.fixture(scope="module")
def wide_step():
    context = 1024
    return step_of(wide_llama(4096, 4, torch.bfloat16, context), context)[0], context


@torch.inference_mode()
def test_times_of_the_operations_add_up_to_the_step(wide_step):
    step, context = wide_step
    found = profile.profile_step(step, Readback(step.state.chosen), context, position=300, greedy=True)
    print(found.to_dict())
    assert found.timer == "cupti"
    others = ("router", "norm", "delta", "conv")
    assert [row.kernel for row in found.rows] == [name for name in OPERATIONS if name not in others]
    assert {row.kernel: row.calls for row in found.rows}["down"] == 4
    assert found.sum_us == pytest.approx(found.step_us, rel=0.05)
    assert all(0 < row.gb_per_s < 20_000 for row in found.rows)
    assert 0 <= found.host_gap_us < found.step_us


@torch.inference_mode()
def test_events_time_the_operations_where_cupti_may_not(wide_step, monkeypatch):
    step, context = wide_step
    monkeypatch.setattr(profile, "_by_cupti", lambda *arguments: None)
    found = profile.profile_step(step, Readback(step.state.chosen), context, position=300, greedy=False)
    assert found.timer == "events"
    # an event between two kernels keeps them from overlapping and takes some microseconds itself
    assert found.step_us * 0.9 < found.sum_us < found.step_us * 2.5

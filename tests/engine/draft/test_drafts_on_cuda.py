"""Steps of several rows on a GPU: as near to f32 as one row, the graph as the launches, and replies that stay."""

from __future__ import annotations

import pytest
import torch

from localq.drafts import ROWS
from localq.engine.cache import KVCache
from localq.engine.generate import Engine
from localq.engine.load.draft import load_draft
from localq.engine.load.load import LoadedModel, load
from localq.engine.sampler import SamplerState
from localq.engine.step.fused import FusedStep
from localq.engine.step.graph import CapturedPass
from localq.engine.step.rows import StepBuffers
from localq.engine.step.state import SKIPPED, StepState
from localq.files.model_folder import open_model
from localq.planner import draft_cost
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from localq.text.tokenizer import Tokenizer
from tests.support.engine import fused_models
from tests.support.engine.engine_runs import ids_of, prompt_of, steps_of
from tests.support.engine.fused_models import CASES, CONTEXT, PROMPT, STEPS, by_modules, capped, text_of
from tests.support.engine.lossless import EagerTimes, Oracle
from tests.support.engine.mtp_models import loads, save_mtp
from tests.support.files.real_model import smollm2

pytestmark = pytest.mark.cuda

SEVERAL = ROWS[1:]
SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.97, repeat_penalty=1.1, seed=9)
# As in test_greedy_on_cuda: a gap of two logits below this is a tie that rounding may break.
NEAR_TIE = {"float16": 0.05, "bfloat16": 0.4}


def steps_of_rows(model, context: int, bits: int | str = 16, chunk: int | None = None):
    """The steps of every number of rows over one cache."""
    device, dtype = torch.device("cuda", 0), model.norm.weight.dtype
    cache = KVCache(model.cache_layout(), context, dtype, device, bits, chunk, ROWS[-1])
    state, buffers = StepState(SamplerState(model.config.vocab_size, context, device), device), StepBuffers(ROWS[-1])
    return {rows: FusedStep(model, cache, state, rows, buffers) for rows in ROWS}, cache


@pytest.mark.parametrize("quantized", [False, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("rows", SEVERAL)
@pytest.mark.parametrize("name", sorted(CASES))
@torch.inference_mode()
def test_every_row_is_as_near_to_f32_as_the_modules(name, rows, quantized):
    ours, exact = fused_models.pair(name, CASES[name], torch.bfloat16, quantized, CONTEXT)
    ids = text_of(ours.config.vocab_size)
    steps, cache = steps_of_rows(ours, CONTEXT)
    step, device_ids, found = steps[rows], ids.cuda(), []
    ours(device_ids[:PROMPT], torch.arange(PROMPT, device="cuda"), cache, PROMPT)
    step.forget_drafts()
    for position in range(PROMPT, PROMPT + STEPS - rows + 1, rows):  # each step replays the rows of the one before
        step.state.tokens[:rows] = device_ids[position : position + rows]
        step.state.position.fill_(position)
        step.logits.fill_(float("nan"))
        step.forward()
        found.append(capped(step.logits.clone(), step.softcap))
    logits = torch.cat(found).cpu()
    expected = by_modules(exact, ids, "cpu")[: len(logits)]
    naive = (by_modules(ours, ids, "cuda")[: len(logits)] - expected).square().mean().sqrt().item()
    error = (logits - expected).square().mean().sqrt().item()
    assert error <= 2 * naive + 1e-6 * expected.square().mean().sqrt().item()


@pytest.mark.parametrize("bits", [16, 8, "k8v4", 4])
@pytest.mark.parametrize("rows", SEVERAL)
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@torch.inference_mode()
def test_the_graph_of_several_rows_equals_the_launches_bit_for_bit(name, rows, bits):
    context = 1024
    model, _ = fused_models.pair(name, {**CASES[name], "sliding_window": 300}, torch.bfloat16, True, context)
    steps, cache = steps_of_rows(model, context, bits)
    step, generator = steps[rows], torch.Generator().manual_seed(rows)
    tokens = torch.randint(model.config.vocab_size, (context,), generator=generator).cuda()
    model(tokens, torch.arange(context, device="cuda"), cache, context)
    graph = CapturedPass(step)
    differing = torch.zeros(1, dtype=torch.int64, device="cuda")
    for position in (0, 1, 299, 300, 301, 640, context - rows):
        found = []
        for run in (graph.forward, step.forward):
            step.state.rewind(position)
            step.state.tokens[:rows] = tokens[position : position + rows]
            step.logits.fill_(float("nan"))
            run()
            found.append(step.logits.clone())
        differing += (found[0] != found[1]).sum()
    assert int(differing) == 0


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, Sampling(temperature=1.0, dry_multiplier=1.0, seed=1)])
@torch.inference_mode()
def test_rows_are_followed_as_far_as_choices_were_drafted(sampling):
    vocab, cuda = 5000, torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(8, vocab, generator=generator)
    prompt = torch.randint(vocab, (40,), generator=generator)

    def state() -> StepState:
        found = StepState(SamplerState(vocab, 100, cuda), cuda)
        found.sampler.reset(sampling, prompt, 50)
        return found

    alone, plain = state(), []
    for row in logits:
        alone.choose(row.cuda(), sampling.greedy)
        plain.append(int(alone.chosen))
    for accepted in range(8):
        together = state()
        draft = [id if place < accepted else (id + 1) % vocab for place, id in enumerate(plain[:-1])]
        together.draft(draft, 8)
        together.follow(logits.cuda(), sampling.greedy)
        assert together.choices.tolist() == plain[: accepted + 1] + [SKIPPED] * (7 - accepted)
        assert int(together.sampler.step) == int(together.position) == accepted + 1


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def real(request) -> LoadedModel:
    return load(open_model(smollm2()), LoadOptions(device="cuda", dtype=request.param, ctx=1024, draft_tokens=7))


def near_tie(model: LoadedModel, prompt: list[int], plain: list[int], drafted: list[int]) -> float:
    """The gap of the two logits at the first token that differs; 0 where none does."""
    place = next((at for at, pair in enumerate(zip(plain, drafted, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return 0.0
    ids = [*prompt, *plain[:place]]
    model.cache.clear()
    with torch.inference_mode():
        positions = torch.arange(len(ids), device="cuda")
        logits = model.model(torch.tensor(ids, device="cuda"), positions, model.cache, len(ids))[0]
    return abs(float(logits[plain[place]] - logits[drafted[place]]))


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
def test_greedy_replies_of_the_embedded_model_are_those_of_plain_decoding(real, graphs):
    tokenizer = Tokenizer.load(open_model(smollm2()))
    engine = Engine(real, use_graphs=graphs, draft_tokens=7)
    dtype = str(real.dtype).removeprefix("torch.")
    accepted = 0
    for text in ("Write a haiku about the sea.", "Repeat three times: the cat sat on the mat.", "Count to forty."):
        prompt = tokenizer.chat_ids([{"role": "user", "content": text}])
        plain = ids_of(engine, prompt, max_tokens=96)
        for drafter in (Oracle(plain, 5), engine._drafter):
            engine._drafter = drafter
            steps = steps_of(engine, prompt, max_tokens=96, draft_tokens=7)
            drafted = [id for step in steps for id in step.ids]
            accepted += sum(steps[-1].stats.accepted.values())
            assert near_tie(real, prompt, plain, drafted) <= NEAR_TIE[dtype]
        engine._text.clear()
        engine.model.cache.clear()
    assert accepted > 50


def test_memory_is_as_planned_with_and_without_drafts(real):
    engine = Engine(real, draft_tokens=7)
    ledger, planned = engine.ledger(), real.plan.ledger.components
    assert ledger["step_buffers"] <= planned["step_buffers"]
    assert ledger["attention_workspace"] <= planned["attention_workspace"]
    assert ledger["sampler"] == planned["sampler"]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
def test_a_draft_model_with_the_same_weights_is_right_but_for_near_ties(graphs):
    files, options = open_model(smollm2()), LoadOptions(device="cuda", ctx=1024, draft_tokens=7)
    model = load(files, options, draft=files)
    draft = load_draft(files, model, options, lambda *report: None)
    engine = Engine(model, use_graphs=graphs, draft_tokens=7, draft=draft)
    tokenizer, dtype = Tokenizer.load(files), str(model.dtype).removeprefix("torch.")
    prompt = tokenizer.chat_ids([{"role": "user", "content": "Write a story about a lighthouse keeper."}])
    plain = ids_of(engine, prompt, max_tokens=96)
    engine._drafter.times = EagerTimes()
    steps = steps_of(engine, prompt, max_tokens=96, draft_tokens=7)
    stats = steps[-1].stats
    assert near_tie(model, prompt, plain, [id for step in steps for id in step.ids]) <= NEAR_TIE[dtype]
    assert stats.drafted["model"] > 40
    assert stats.accepted["model"] > 0.8 * stats.drafted["model"]
    planned, ledger = model.plan.ledger.components, engine.ledger()
    for part in draft_cost.COMPONENTS:
        assert ledger[part] == pytest.approx(planned[part], rel=0.05, abs=2**20)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
def test_an_mtp_block_drafts_as_on_the_cpu(graphs, tmp_path):
    sizes = {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    folder = save_mtp(tmp_path / "hybrid", "qwen3_5_text", **sizes)
    shares, prompt = [], prompt_of(40)
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        options = LoadOptions(device=device, dtype=dtype, draft_tokens=7, mtp="mtp")
        model, head = loads(folder, options)
        engine = Engine(model, use_graphs=graphs, draft_tokens=7, draft=head)
        plain = ids_of(engine, prompt, max_tokens=96)
        engine._drafter.times = EagerTimes()
        steps = steps_of(engine, prompt, max_tokens=96, draft_tokens=3)
        stats = steps[-1].stats
        shares.append(stats.accepted["mtp"] / stats.drafted["mtp"])
    assert near_tie(model, prompt, plain, [id for step in steps for id in step.ids]) <= NEAR_TIE["bfloat16"]
    assert shares[1] > shares[0] - 0.15
    planned, ledger = model.plan.ledger.components, engine.ledger()
    for part in draft_cost.COMPONENTS:
        assert ledger[part] == pytest.approx(planned[part], rel=0.05, abs=2**20)

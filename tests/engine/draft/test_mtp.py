"""Replies that an MTP block drafts are those of plain decoding; its cache follows the model's; the plan counts it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localq.engine.cache import KVCache
from localq.engine.draft.drafter import Drafter
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.extra_tensors import MORE_TOKENS
from localq.files.model_folder import open_model
from localq.planner import draft_cost, footprint, slabs
from localq.planner.draft_shape import DraftShape
from localq.planner.load_options import LoadOptions
from localq.planner.placement import Placement
from localq.sampling import Sampling
from tests.support.engine import step_stand_ins
from tests.support.engine.engine_runs import ids_of, prompt_of, steps_of
from tests.support.engine.lossless import SAMPLINGS, EagerTimes, PlainReplies, case_of, compare
from tests.support.engine.mtp_models import MODEL_TYPES, OPTIONS, engine_of, loads, save_mtp, without_block
from tests.support.formats import fp8_checkpoints
from tests.support.models.tiny_checkpoints import make_checkpoint

WEIGHTS = "w" * 64
PLAIN = LoadOptions(device="cpu", dtype="float32")


@pytest.fixture(scope="module", params=MODEL_TYPES)
def folder(request, tmp_path_factory):
    return save_mtp(tmp_path_factory.mktemp("mtp") / request.param, request.param)


@pytest.fixture(scope="module")
def plain(folder) -> Engine:
    return Engine(load(open_model(folder), PLAIN))


@pytest.fixture(scope="module")
def shared(folder) -> Engine:
    return engine_of(folder)


@pytest.fixture
def drafting(shared) -> Engine:
    """Drafts whenever it can."""
    return eager(shared)


def eager(engine: Engine) -> Engine:
    engine._drafter = Drafter(engine._draft_model)
    engine._drafter.times = EagerTimes()
    return engine


def test_drafts_do_not_change_replies(plain, drafting):
    drafted = accepted = 0
    for number in range(len(SAMPLINGS)):
        drafting._steps.lookahead = number % 2
        found = compare(PlainReplies(lambda: plain), drafting, case_of(number), "mtp")
        drafted, accepted = drafted + found["drafted"], accepted + found["accepted"]
    assert drafted > accepted > drafted / 10


def test_a_block_that_is_right_often_gives_several_tokens_a_step(plain, drafting):
    prompt = prompt_of(40)
    steps = steps_of(drafting, prompt, max_tokens=120, draft_tokens=3)
    stats = steps[-1].stats
    assert [id for step in steps for id in step.ids] == ids_of(plain, prompt, max_tokens=120)
    assert stats.drafted["mtp"] > stats.accepted["mtp"] > 0.3 * stats.drafted["mtp"]
    assert stats.tokens_per_step > 1.4
    assert stats.accepted_at[0] > stats.accepted_at[2] > 0


def test_a_reply_may_do_without_it(drafting):
    steps = steps_of(drafting, prompt_of(20), max_tokens=40, draft_tokens=7, ask_draft_model=False)
    assert "mtp" not in steps[-1].stats.drafted


# ---- its cache


def expected_parts(engine: Engine, text: list[int], pairs: int) -> list[torch.Tensor]:
    """The keys and values of the first positions of a text, from hidden states that one pass gives."""
    model, block, kept = engine.model.model, engine._draft_model.model.model, []
    take, model.tap = model.tap, lambda positions, hidden: kept.append(hidden)
    cache = KVCache(model.cache_layout(), engine.model.ctx, torch.float32, "cpu")
    with torch.inference_mode():
        model(torch.tensor(text), torch.arange(len(text)), cache, len(text))
        model.tap = take
        own = KVCache(block.cache_layout(), engine.model.ctx, torch.float32, "cpu")
        step = block.begin(torch.arange(pairs), own, pairs)
        block.combine(kept[0][:pairs], block.embed(torch.tensor(text[1 : pairs + 1])), step)
    return own.parts(pairs)


def check_cache(engine: Engine, text: list[int], least: int, but: int = -1) -> None:
    """What the block has cached of `text`, `least` positions at least, is right; but: a position that need not be."""
    head = engine._draft_model
    head._agree(text)
    pairs = head._agreed
    assert pairs >= least
    for ours, theirs in zip(head.model.cache.parts(pairs), expected_parts(engine, text, pairs), strict=True):
        differ = ((ours - theirs).abs() > 1e-3).any(-1).any(0).nonzero().flatten().tolist()
        assert differ in ([], [but])


@pytest.mark.parametrize("length", [5, 130, 300, 450])  # within a pass, and over several: the ring goes round
def test_prompt_and_reply_are_cached_with_the_hidden_states_of_the_model(drafting, length):
    prompt = prompt_of(length, seed=length)
    reply = ids_of(drafting, prompt, max_tokens=40, draft_tokens=3)
    check_cache(drafting, [*prompt, *reply], length + 5)  # (the last drafts may be of look-up)


def test_a_reply_without_drafts_is_read_before_its_hidden_states_are_overwritten(drafting):
    prompt = prompt_of(20, seed=1)
    reply = ids_of(drafting, prompt, max_tokens=300)
    turn = [*prompt, *reply, *prompt_of(4, seed=2)]
    more = ids_of(drafting, turn, max_tokens=20, draft_tokens=7)
    check_cache(drafting, [*turn, *more], len(turn) - 1)


def test_turns_and_versions_of_a_reply_go_on_from_what_is_cached(shared, folder):
    model, head = loads(folder)
    engine = eager(Engine(dataclasses.replace(model, checkpoint_bytes=2**24), draft_tokens=7, draft=head))
    prompt = prompt_of(60, seed=3)
    for seed in (1, 2, 3):
        again = Sampling(temperature=0.8, seed=seed)
        reply = ids_of(engine, prompt, again, max_tokens=40, draft_tokens=5, marks=(50, 55))
    check_cache(engine, [*prompt, *reply], 80)
    turn = [*prompt, *reply, *prompt_of(30, seed=4)]
    reply = ids_of(engine, turn, max_tokens=30, draft_tokens=5)
    check_cache(engine, [*turn, *reply], len(turn))
    other = [*turn[:55], *prompt_of(20, seed=5)]
    assert steps_of(engine, other, max_tokens=1)[-1].stats.cached_tokens == 55
    reply = ids_of(engine, other, max_tokens=30, draft_tokens=5)
    check_cache(engine, [*other, *reply], len(other), but=54)  # whose hidden state is not that of the last pass


def test_of_a_restored_cache_there_are_no_hidden_states_and_drafts_go_on(plain, drafting, tmp_path):
    prompt = prompt_of(150, seed=6)
    reply = ids_of(drafting, prompt, max_tokens=30, draft_tokens=7)
    saved = drafting.save_cache(tmp_path / "1.kv", WEIGHTS)
    ids_of(drafting, prompt_of(200, seed=7), max_tokens=10, draft_tokens=7)
    assert saved
    assert drafting.restore_cache(tmp_path / "1.kv", WEIGHTS) >= 150
    drafting._draft_model._text.clear()
    turn = [*prompt, *reply, *prompt_of(5, seed=8)]
    steps = steps_of(drafting, turn, max_tokens=60, draft_tokens=3)
    assert steps[-1].stats.cached_tokens >= 150
    assert [id for step in steps for id in step.ids] == ids_of(plain, turn, max_tokens=60)
    assert steps[-1].stats.accepted["mtp"] > 10
    head = drafting._draft_model
    text = [*turn, *(id for step in steps for id in step.ids)]
    late = [part[:, len(turn) : head._agreed] for part in head.model.cache.parts(head._agreed)]
    known = [part[:, len(turn) : head._agreed] for part in expected_parts(drafting, text, head._agreed)]
    for ours, theirs in zip(late, known, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def test_a_text_that_begins_otherwise_shares_nothing(drafting):
    prompt = prompt_of(40, seed=9)
    ids_of(drafting, prompt, max_tokens=10, draft_tokens=3)
    other = [(prompt[0] + 1) % 256, *prompt[1:]]
    reply = ids_of(drafting, other, max_tokens=10, draft_tokens=3)
    check_cache(drafting, [*other, *reply], 40)


def test_an_error_amid_a_reply_leaves_nothing_wrong_behind(plain, drafting):
    prompt, forward, failing = prompt_of(30), drafting._steps._modules.forward, [3]

    def fail(live: int, rows: int = 1) -> None:
        forward(live, rows)
        failing[0] -= 1
        if failing[0] == 0:
            raise RuntimeError("a device error")

    drafting._steps._modules.forward = fail
    with pytest.raises(RuntimeError, match="a device error"):
        ids_of(drafting, prompt, max_tokens=60, draft_tokens=7)
    drafting._steps._modules.forward = forward
    reply = ids_of(drafting, prompt, max_tokens=40, draft_tokens=3)
    assert reply == ids_of(plain, prompt, max_tokens=40)
    check_cache(drafting, [*prompt, *reply], 60)


def test_logits_that_are_not_finite_end_its_drafts_and_not_the_reply(plain, folder):
    engine = eager(engine_of(folder))
    engine._draft_model.model.model.fc.weight.data.fill_(float("nan"))
    prompt = prompt_of(30)
    assert ids_of(engine, prompt, max_tokens=40, draft_tokens=7) == ids_of(plain, prompt, max_tokens=40)
    assert engine._draft_model.room(prompt) == 0


def test_a_full_context_ends_drafts(plain, drafting):
    prompt = prompt_of(drafting.model.ctx - 9, seed=11)
    found, expected = steps_of(drafting, prompt, draft_tokens=7), steps_of(plain, prompt)
    assert [id for step in found for id in step.ids] == [id for step in expected for id in step.ids]
    assert found[-1].reason == expected[-1].reason == "context"


def test_k_falls_to_none_while_a_block_is_wrong_and_comes_back(drafting):
    drafter = drafting._drafter = Drafter(drafting._draft_model)
    times = drafter.times
    times.record = lambda rows, seconds: None
    times.record_drafting = lambda tokens, seconds: None
    times._seconds, times._plain, times._drafting = {1: 1.0, 2: 1.2, 4: 1.4, 8: 2.0}, 3, 0.05
    drafter.begin(prompt_of(30))
    kind = ("mtp", 0)
    for _ in range(60):
        drafter.acceptance.record(kind, False)
    assert drafter._model_length(7, masked=False)[0] <= 1  # at most a trial
    for _ in range(60):
        drafter.acceptance.record(kind, True)
    assert drafter._model_length(7, masked=False)[0] > 2


# ---- the launches of a GPU, with the kernels' work done by torch


@pytest.mark.parametrize("ahead", [0, 1], ids=["in step", "ahead"])
def test_the_launches_of_a_gpu_draft_the_same(plain, folder, ahead, monkeypatch):
    step_stand_ins.install(monkeypatch)
    engines = [eager(engine_of(folder)) for _ in range(2)]
    fused = engines[1]
    fused._steps.fuse()
    fused._draft_model._steps.fuse()
    fused._steps.lookahead = ahead
    prompt = prompt_of(40)
    sampling = Sampling(temperature=0.7, seed=1)
    found = [steps_of(each, prompt, sampling, max_tokens=80, draft_tokens=3) for each in engines]
    expected = ids_of(plain, prompt, sampling, max_tokens=80)
    assert all([id for step in steps for id in step.ids] == expected for steps in found)
    by_modules, by_launches = (steps[-1].stats for steps in found)
    assert by_launches.accepted["mtp"] > 20
    assert ahead or by_launches.accepted == by_modules.accepted
    check_cache(fused, [*prompt, *expected], len(prompt) + 5)


def test_the_buffers_of_its_launches_are_planned(folder, monkeypatch):
    step_stand_ins.install(monkeypatch)
    engine = engine_of(folder)
    shape = dataclasses.replace(engine.model.plan.draft, on_gpu=True)
    parts = {part: size for part, size, _ in draft_cost.parts(shape, 16, 4, None)}
    on_cpu = {part: size for part, size, _ in draft_cost.parts(engine.model.plan.draft, 16, 4, None)}
    taken = engine._draft_model._steps.fuse()
    ring = 4 * engine.model.model.config.hidden * (draft_cost.ring_slots(True) - draft_cost.ring_slots(False))
    slab = slabs.slab_of(shape.arch, "bf16", 4)
    workspace = footprint.fixed_bytes(shape.arch, "bf16", "", 0, Placement(), 4)["attention_workspace"]
    planned = parts["draft_workspace"] - on_cpu["draft_workspace"] - ring - slab - workspace
    assert taken["step_buffers"] == planned


# ---- its memory, and where there is none


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
def test_the_plan_counts_it(folder, kv_bits):
    engine = engine_of(folder, dataclasses.replace(OPTIONS, kv_bits=kv_bits))
    planned, ledger = engine.model.plan.ledger.components, engine.ledger()
    assert ledger["draft_weights"] == planned["draft_weights"]
    assert ledger["draft_kv_cache"] == planned["draft_kv_cache"]
    sampler = planned["sampler"] - ledger["sampler"]  # whose margin both have
    assert ledger["draft_workspace"] == planned["draft_workspace"] - sampler
    assert all(ledger[part] for part in draft_cost.COMPONENTS)
    from_shape = DraftShape.of_block(engine.model.plan.arch, "nf4").on_cpu(4)
    assert from_shape.weights == ledger["draft_weights"], "a plan without files has the same bytes"


def test_files_without_a_block_are_loaded_without_one_or_refused(folder, tmp_path):
    bare = without_block(tmp_path / "bare", folder)
    model, head = loads(bare, dataclasses.replace(OPTIONS, mtp="auto"))
    assert (head, model.plan.draft, model.no_mtp) == (None, None, "the files contain no MTP block")
    with pytest.raises(LocalqError, match="bare --draft mtp: the files contain no MTP block") as caught:
        loads(bare)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "--draft auto" in caught.value.next_step


def test_a_family_without_blocks_is_refused(tmp_path):
    with pytest.raises(LocalqError, match="the files contain no MTP block"):
        loads(make_checkpoint(tmp_path / "llama", dtype=torch.float32))


def test_a_block_of_another_make_is_left_out_with_the_reason(folder, tmp_path):
    bare = without_block(tmp_path / "odd", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.layers.1.mlp.up_proj.weight"] = torch.ones(3, 3)
    save_file(tensors, bare / "model.safetensors")
    model, head = loads(bare, dataclasses.replace(OPTIONS, mtp="auto"))
    assert head is None
    assert "do not belong to this architecture" in model.no_mtp


def test_what_is_left_out_of_the_files_names_the_block_only_where_it_is(folder):
    assert not any(MORE_TOKENS in each for each in loads(folder)[0].notes)
    assert any(MORE_TOKENS in each for each in loads(folder, dataclasses.replace(OPTIONS, mtp=""))[0].notes)


def test_without_drafts_no_block_is_planned_or_loaded(folder):
    model, head = loads(folder, dataclasses.replace(OPTIONS, draft_tokens=0))
    assert (model.plan.draft, head) == (None, None)
    assert not any(model.plan.ledger.components[part] for part in draft_cost.COMPONENTS)


def test_a_block_in_fp8_is_read(folder, tmp_path):
    made = Path(shutil.copytree(folder, tmp_path / "fp8"))
    fp8_checkpoints.rewrite(made)
    stored = load_file(made / "model.safetensors")
    assert stored["mtp.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    exact = dict(loads(folder)[1].model.named_parameters())
    for name, found in loads(made)[1].model.named_parameters():
        torch.testing.assert_close(found, exact[name], rtol=0.07, atol=0.07 * float(exact[name].abs().max()))

"""The engine on a GPU: graphs repeat the eager step bit for bit, nothing is allocated, memory is accounted for."""

from __future__ import annotations

import random

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.device import DeviceChoice
from localq.engine.load.load import LoadedModel, free_memory, load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.formats import nf4
from localq.formats.dense_checkpoint import dequantized
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.footprint import MIB
from localq.planner.load_options import LoadOptions
from localq.quantize.by_tensor import convert
from localq.quantize.request import TensorwiseRequest
from localq.sampling import Sampling
from tests.support.engine.engine_runs import GREEDY, bare_device, ids_of, prompt_of
from tests.support.models.tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.cuda
CONTEXT = 1500
SAMPLED = Sampling(temperature=0.9, top_k=60, top_p=0.97, min_p=0.001, repeat_penalty=1.1, seed=9)


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    """A float32 llama with room for long prompts."""
    folder = tmp_path_factory.mktemp("long")
    return make_checkpoint(folder, dtype=torch.float32, initializer_range=0.15, max_position_embeddings=CONTEXT)


def on_gpu(folder, dtype: str = "bfloat16", opened=open_checkpoint, **options) -> LoadedModel:
    files = open_model(folder)
    gpu = DeviceChoice(torch.device("cuda", 0))
    return load(files, LoadOptions(device="cuda", dtype=dtype, **options), pick=lambda word: gpu, opened=opened)


def assert_same_cache(one: Engine, other: Engine) -> None:
    used = one.cached_tokens
    assert used == other.cached_tokens
    for mine, theirs in zip(one.model.cache.keys, other.model.cache.keys, strict=True):
        assert torch.equal(mine[:, :used], theirs[:, :used])
    for mine, theirs in zip(one.model.cache.values, other.model.cache.values, strict=True):
        assert torch.equal(mine[:, :used], theirs[:, :used])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_graph_equals_eager_bit_for_bit(long_checkpoint, dtype):
    graphs = Engine(on_gpu(long_checkpoint, dtype=dtype))
    eager = Engine(on_gpu(long_checkpoint, dtype=dtype), use_graphs=False)
    assert graphs.graphs
    assert not eager.graphs
    prompt = prompt_of(190)
    for sampling in (GREEDY, SAMPLED):
        assert ids_of(graphs, prompt, sampling, max_tokens=400) == ids_of(eager, prompt, sampling, max_tokens=400)
        assert_same_cache(graphs, eager)


def test_greedy_and_sampled_replies_of_any_length_take_turns(long_checkpoint):
    graphs = Engine(on_gpu(long_checkpoint))
    eager = Engine(on_gpu(long_checkpoint), use_graphs=False)
    draw = random.Random(4)
    for _ in range(30):
        prompt = prompt_of(draw.randint(1, CONTEXT - 10), seed=draw.randint(0, 3))
        sampling, count = draw.choice([GREEDY, SAMPLED]), draw.randint(1, 40)
        assert ids_of(graphs, prompt, sampling, max_tokens=count) == ids_of(eager, prompt, sampling, max_tokens=count)
        assert_same_cache(graphs, eager)


def test_float32_runs_without_graphs_and_says_so(long_checkpoint):
    engine = Engine(on_gpu(long_checkpoint, dtype="float32"))
    assert not engine.graphs
    assert "float32" in engine.notes[-1]
    assert Engine(on_gpu(long_checkpoint)).notes == on_gpu(long_checkpoint).notes


def test_greedy_equals_the_cpu(long_checkpoint):
    here = Engine(load(open_model(long_checkpoint), LoadOptions(device="cpu", dtype="float32")))
    there = Engine(on_gpu(long_checkpoint, dtype="float32"))
    for length in (1, 100, 1200):
        prompt = prompt_of(length, seed=length)
        assert ids_of(there, prompt, max_tokens=64) == ids_of(here, prompt, max_tokens=64)


def test_sampled_equals_the_cpu(long_checkpoint):
    here = Engine(load(open_model(long_checkpoint), LoadOptions(device="cpu", dtype="float32")))
    there = Engine(on_gpu(long_checkpoint, dtype="float32"))
    prompt = prompt_of(50)
    assert ids_of(there, prompt, SAMPLED, max_tokens=64) == ids_of(here, prompt, SAMPLED, max_tokens=64)


def test_greedy_replies_are_the_same_bytes_run_after_run(long_checkpoint):
    """Anew, and again to the cache of the same prompt: its last token is then a pass of one, not of 60, which rounds
    otherwise, so the two need not agree."""
    engine, prompt = Engine(on_gpu(long_checkpoint)), prompt_of(60)
    anew, again = set(), set()
    for _ in range(20):
        ids_of(engine, [prompt[0] ^ 1], max_tokens=1)  # shares nothing with the prompt
        anew.add(tuple(ids_of(engine, prompt, max_tokens=512)))
        again.add(tuple(ids_of(engine, prompt, max_tokens=512)))
    assert (len(anew), len(again)) == (1, 1)


@pytest.mark.parametrize(
    ("position", "keep", "at", "left"), [(100, False, 100, 0), (100, True, 100, 100), (None, True, 109, 109)]
)
def test_a_profile_keeps_or_forgets_the_conversation_and_does_no_harm(long_checkpoint, position, keep, at, left):
    engine, prompt = Engine(on_gpu(long_checkpoint)), prompt_of(90)
    anew, again = (ids_of(engine, prompt, max_tokens=20) for _ in range(2))
    kept = [buffer[:, :left].clone() for buffer in (*engine.model.cache.keys, *engine.model.cache.values)]
    found = engine.profile_step(position=position, keep=keep)
    assert (found.position, engine.cached_tokens) == (at, left)
    for buffer, before in zip((*engine.model.cache.keys, *engine.model.cache.values), kept, strict=True):
        assert torch.equal(buffer[:, :left], before)
        assert not buffer[:, left:].any()
    assert {row.kernel: row.calls for row in found.rows}["attention"] == engine.model.model.config.layers
    assert ids_of(engine, prompt, max_tokens=20) == (again if keep else anew)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_decoding_allocates_nothing(long_checkpoint, sampling):
    engine = Engine(on_gpu(long_checkpoint))
    ids_of(engine, prompt_of(20), sampling, max_tokens=3)
    seen, free = [], []
    for step in engine.generate(prompt_of(180), sampling, max_tokens=300):
        if step.ids:
            seen.append(torch.cuda.memory_stats()["allocation.all.allocated"])
            free.append(torch.cuda.mem_get_info()[0])
    assert len(seen) == 300
    assert len(set(seen)) == 1
    assert len(set(free)) == 1


def test_prefill_after_loading_takes_no_more_of_the_card(long_checkpoint):
    engine = Engine(on_gpu(long_checkpoint))
    reserved = torch.cuda.memory_reserved()
    for length in (CONTEXT, 1, 7, 255, 1024, 1027, CONTEXT - 3):
        ids_of(engine, prompt_of(length, seed=length), SAMPLED, max_tokens=1)
        assert torch.cuda.memory_reserved() == reserved


def test_stop_ids_and_cancel_drop_the_step_that_runs_ahead(long_checkpoint):
    engine = Engine(on_gpu(long_checkpoint))
    prompt = prompt_of(40)
    free = ids_of(engine, prompt, max_tokens=30)
    stopped = ids_of(engine, prompt, stop_ids=frozenset({free[7]}), max_tokens=30)
    assert stopped == free[: free.index(free[7])]
    assert engine.cached_tokens == len(prompt) + len(stopped)
    assert ids_of(engine, prompt, max_tokens=30) == free


def test_non_finite_logits_do_not_reach_the_next_reply(long_checkpoint):
    engine = Engine(on_gpu(long_checkpoint))
    prompt = prompt_of(30)
    expected = ids_of(engine, prompt, max_tokens=12)
    row = engine.model.model.embed_tokens.weight.data[expected[5]]
    healthy = row.clone()
    row.fill_(float("nan"))
    with pytest.raises(LocalqError, match="non-finite logits at token"):
        ids_of(engine, prompt, max_tokens=12)
    row.copy_(healthy)
    assert ids_of(engine, prompt, max_tokens=12) == expected


def test_a_budget_that_is_too_small_is_refused_before_loading(long_checkpoint):
    with pytest.raises(LocalqError, match="needs") as caught:
        on_gpu(long_checkpoint, vram_bytes=100 * MIB)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    free_memory()
    budget = torch.cuda.memory_reserved() + 2000 * MIB  # tests before this one may hold memory in this process
    engine = Engine(on_gpu(long_checkpoint, vram_bytes=budget))
    assert torch.cuda.memory_reserved() < budget
    assert len(ids_of(engine, prompt_of(5), max_tokens=5)) == 5


def test_memory_comes_back_after_unloading(long_checkpoint):
    engine = Engine(on_gpu(long_checkpoint))  # the first one loads kernels and workspaces, which stay
    del engine
    free_memory()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(10):
        engine = Engine(on_gpu(long_checkpoint))
        ids_of(engine, prompt_of(5), max_tokens=5)
        del engine
        free_memory()
    assert before - torch.cuda.mem_get_info()[0] < 64 * MIB


def test_ledger_is_what_the_allocator_holds(long_checkpoint):
    bare_device()
    before = torch.cuda.memory_reserved()
    engine = Engine(on_gpu(long_checkpoint))
    parts = engine.ledger()
    assert parts.pop("graphs") >= 0  # this and the context are the driver's, not the allocator's
    assert parts.pop("cuda_context") > 0
    assert set(parts) >= {"weights", "kv_cache", "sampler", "step_buffers", "attention_workspace", "scratch"}
    assert all(count > 0 for count in parts.values())
    # every block of the allocator is rounded up to 2 MiB, and small tensors share some
    assert torch.cuda.memory_reserved() - before == pytest.approx(sum(parts.values()), abs=24 * MIB)


@pytest.fixture(scope="module")
def nf4_checkpoint(long_checkpoint, tmp_path_factory):
    """The same weights, bfloat16, with every block Linear in NF4."""
    out = tmp_path_factory.mktemp("nf4")
    convert(TensorwiseRequest(open_model(long_checkpoint), "nf4", out, force=True))
    return out


def logits_of(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    """f32 [T, vocab] on the CPU: a prefill pass of all but the last id, which is then decoded."""
    device = model.device
    with torch.inference_mode():
        head, last = torch.tensor(ids[:-1], device=device), torch.tensor(ids[-1:], device=device)
        positions = torch.arange(len(ids), device=device)
        first = model.model(head, positions[:-1], model.cache, len(ids) - 1, last_only=False)
        return torch.cat((first, model.model(last, positions[-1:], model.cache, len(ids)))).cpu()


def test_nf4_is_as_near_to_the_reference_as_dense_weights_of_the_same_type(nf4_checkpoint):
    ids = prompt_of(45)
    exact = logits_of(load(open_model(nf4_checkpoint), LoadOptions(device="cpu", dtype="float32")), ids)
    packed = on_gpu(nf4_checkpoint, dtype="bfloat16")
    assert any(isinstance(module, nf4.Linear) for module in packed.model.modules())
    got = logits_of(packed, ids)
    plain = dequantized(open_checkpoint(open_model(nf4_checkpoint)), packed.device, packed.dtype)
    dense = logits_of(on_gpu(nf4_checkpoint, dtype="bfloat16", opened=lambda files: plain), ids)
    assert (got - exact).abs().max() <= 2 * (dense - exact).abs().max() + 1e-6 * exact.abs().max()


def test_nf4_graph_equals_eager_bit_for_bit(nf4_checkpoint):
    graphs = Engine(on_gpu(nf4_checkpoint, dtype="bfloat16"))
    eager = Engine(on_gpu(nf4_checkpoint, dtype="bfloat16"), use_graphs=False)
    prompt = prompt_of(100)
    assert ids_of(graphs, prompt, max_tokens=200) == ids_of(eager, prompt, max_tokens=200)
    assert_same_cache(graphs, eager)

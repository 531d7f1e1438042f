"""Conversations with a model whose windows slide: replies, prefixes, snapshots and scores of texts beyond a window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.engine.cache import KVCache
from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.engine.scoring import Decode, Prefill
from localq.errors import LocalqError
from localq.files.layer_caches import KeysAndValues
from localq.files.model_folder import open_model
from localq.planner.footprint import CPU_CHUNK
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import greedy_of, ids_of, prompt_of, steps_of
from tests.support.models.tiny_checkpoints import make_checkpoint

WINDOW, WEIGHTS = 16, "w" * 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("gemma3"), "gemma3_text", dtype=torch.float32, initializer_range=0.15,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def windowed(folder) -> LoadedModel:
    return load(open_model(folder), LoadOptions(device="cpu", dtype="float32"))


def engine_of(loaded: LoadedModel, chunk: int | None, bits: int | str = 16) -> Engine:
    """With a cache whose windows hold passes of `chunk` tokens; None: every position."""
    cache = KVCache(loaded.cache.layout, loaded.ctx, loaded.dtype, "cpu", bits, chunk)
    return Engine(replace(loaded, cache=cache, kv_bits=bits), chunk=chunk or 7)


@pytest.mark.parametrize("bits", [16, 8, "k8v4", 4])
def test_a_load_on_the_cpu_slides_and_plans_what_it_allocates(folder, bits):
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="float32", kv_bits=bits))
    kept = [loaded.cache.layer(index).capacity for index in range(len(loaded.cache.layout))]
    assert kept == [WINDOW + CPU_CHUNK if each.window else loaded.ctx for each in loaded.cache.layout]
    assert WINDOW + CPU_CHUNK in kept
    assert loaded.plan.ledger.components["kv_cache"] == loaded.cache.bytes() == loaded.ledger["kv_cache"]


@pytest.mark.parametrize("bits", [16, 8, "k8v4", 4])
def test_layers_that_differ_in_their_heads_are_planned_to_the_byte(tmp_path, bits):
    folder = make_checkpoint(
        tmp_path, "gemma4_text", dtype=torch.float32, num_hidden_layers=4, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=24,
        vocab_size_per_layer_input=320,
    )  # fmt: skip
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="float32", kv_bits=bits))
    widths = [each.width for each in loaded.cache.layout if isinstance(each, KeysAndValues)]
    assert len(widths) == len(loaded.cache.kv_layers) == 2
    assert widths[0] > widths[1]  # that of the window
    assert loaded.plan.ledger.components["kv_cache"] == loaded.cache.bytes() == loaded.ledger["kv_cache"]
    prompt = prompt_of(3 * CPU_CHUNK)
    assert ids_of(Engine(loaded), prompt, max_tokens=20) == ids_of(engine_of(loaded, None, bits), prompt, max_tokens=20)


def test_replies_are_those_of_transformers(folder, windowed):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for length in (5, 3 * CPU_CHUNK + 5):
        prompt = prompt_of(length, seed=length)
        assert ids_of(Engine(windowed), prompt, max_tokens=40) == greedy_of(reference, prompt, 40)
    assert windowed.cache.view(WINDOW, 400)[0] > CPU_CHUNK


@pytest.mark.parametrize("bits", [16, 8, "k8v4", 4])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_replies_are_those_of_a_cache_that_keeps_everything(windowed, chunk, bits):
    prompt = prompt_of(3 * (WINDOW + chunk))
    slid, whole = engine_of(windowed, chunk, bits), engine_of(windowed, None, bits)
    whole.chunk = chunk
    assert ids_of(slid, prompt, max_tokens=60) == ids_of(whole, prompt, max_tokens=60)


def test_a_prompt_goes_back_as_far_as_the_window_reaches(windowed):
    engine, chunk = engine_of(windowed, 64), 64
    prompt = prompt_of(200)
    ids_of(engine, prompt, max_tokens=9)
    near = [*prompt[:-20], *prompt_of(30, seed=1)]
    steps = steps_of(engine, near, max_tokens=12)
    assert steps[-1].stats.cached_tokens == 180
    far = [*prompt[:60], *prompt_of(90, seed=2)]
    again = steps_of(engine, far, max_tokens=12)
    assert again[-1].stats.cached_tokens == 0
    assert again[-1].stats.prefilled_tokens == len(far)
    for tried, found in ((near, steps), (far, again)):
        assert [id for step in found for id in step.ids] == ids_of(engine_of(windowed, chunk), tried, max_tokens=12)


def test_an_error_in_a_pass_leaves_what_was_cached(windowed, monkeypatch):
    engine, prompt = engine_of(windowed, 7), prompt_of(60)
    ids_of(engine, prompt, max_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.model.layers[1], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ids_of(engine, [*prompt, *prompt_of(30, seed=4)], max_tokens=4)
    longer = [*prompt, *prompt_of(12, seed=3)]
    steps = steps_of(engine, longer, max_tokens=12)
    assert steps[-1].stats.cached_tokens == 60
    assert [id for step in steps for id in step.ids] == ids_of(engine_of(windowed, 7), longer, max_tokens=12)


@pytest.mark.parametrize("bits", [16, 8, "k8v4", 4])
@pytest.mark.parametrize("chunk", [7, 500])
def test_a_snapshot_holds_windows_and_goes_on_from_them(windowed, tmp_path, bits, chunk):
    engine, prompt = engine_of(windowed, 7, bits), prompt_of(90)
    follow_up = [*prompt, *ids_of(engine, prompt, max_tokens=9), *prompt_of(11, seed=2)]
    size = engine.save_cache(tmp_path / "7.kv", WEIGHTS)
    expected = ids_of(engine, follow_up, max_tokens=20)
    later = engine_of(windowed, chunk, bits)
    ids_of(later, prompt_of(70, seed=5), max_tokens=2)  # another conversation before
    assert later.restore_cache(tmp_path / "7.kv", WEIGHTS) == 90 + 9 - 1
    later.chunk = 7
    steps = steps_of(later, follow_up, max_tokens=20)
    assert steps[-1].stats.cached_tokens == 90 + 9 - 1
    assert [id for step in steps for id in step.ids] == expected
    whole = engine_of(windowed, None, bits)
    ids_of(whole, prompt, max_tokens=9)
    assert size < whole.save_cache(tmp_path / "8.kv", WEIGHTS)
    with pytest.raises(LocalqError, match="a KV cache of a different shape"):
        later.restore_cache(tmp_path / "8.kv", WEIGHTS)


def test_texts_of_any_length_are_scored(windowed):
    ids = prompt_of(400, seed=6)
    cache = KVCache(windowed.cache.layout, windowed.ctx, windowed.dtype, "cpu")
    with torch.inference_mode():
        expected = windowed.model(torch.tensor(ids), torch.arange(400), cache, 400, last_only=False)
    for _ in range(2):
        pieces = [
            Prefill(windowed).logits(ids[first:stop], first) for first, stop in ((0, 310), (310, 311), (311, 400))
        ]
        torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-4, atol=1e-4)
    single = Decode(windowed)
    for _ in range(2):
        torch.testing.assert_close(single.logits(ids[:190], 0), expected[:190], rtol=1e-4, atol=1e-4)

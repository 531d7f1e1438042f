"""Models with windows, in a cache whose windows slide: texts several times longer than a window and a pass."""

from __future__ import annotations

import functools

import pytest
import torch

from localq.engine.cache import KVCache
from localq.files import layer_caches
from localq.files.layer_caches import KeysAndValues
from localq.models import ARCHITECTURES, attention, decoder
from tests.support.models import tiny_models
from tests.support.models.tiny_case import SHAPE
from tests.support.models.tiny_cases import BY_NAME
from tests.support.models.tiny_models import reference

TOKENS = 330
TOLERANCE = 3e-5  # of the largest logit: in some texts, queries that grow make small differences larger


def _config(name: str):
    case = BY_NAME[name]
    return ARCHITECTURES[case.config["model_type"]].Config.from_dict(case.config)


ALL_WINDOWED = [name for name in BY_NAME if 0 < max(_config(name).windows) < 20]
# one of each family, and those with a part of attention that others lack
WINDOWED = sorted({
    *{BY_NAME[name].config["model_type"]: name for name in reversed(ALL_WINDOWED) if "longrope" not in name}.values(),
    *("gemma2", "gpt-oss-sinks"),
})  # fmt: skip
# tokens of the longest pass -> those of the text, and of its first passes; the rest is in passes of the longest
PASSES = {1: (60, []), 7: (100, [7, 7, 3, 7, 1, 1, 7, 2, 5, *[1] * 9]), 64: (TOKENS, [64, 1, 64, 37, 1, 1, 64])}


def test_every_family_with_windows_is_here():
    windowed = {BY_NAME[name].config["model_type"] for name in ALL_WINDOWED}
    assert (
        {BY_NAME[name].config["model_type"] for name in WINDOWED} == windowed >= {"gemma3_text", "gpt_oss", "mistral"}
    )


@functools.cache
def _model(name: str, dtype: torch.dtype = torch.float32):
    model = tiny_models.built(name, dtype)
    model.make_tables(TOKENS, "cpu")
    return model


def _ids() -> torch.Tensor:
    return torch.randint(3, SHAPE["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(8))


@functools.cache
def _expected(name: str) -> torch.Tensor:
    with torch.no_grad():
        return reference(BY_NAME[name])(_ids()[None], use_cache=False).logits[0].float()


def _cache(model, chunk: int | None, bits: int | str = 16) -> KVCache:
    return KVCache(model.cache_layout(), TOKENS, model.norm.weight.dtype, "cpu", bits, chunk)


@torch.inference_mode()
def _logits(model, cache: KVCache, chunk: int, live=lambda stop: stop) -> torch.Tensor:
    """Those of a text, with its passes."""
    tokens, counts = PASSES[chunk]
    ids, parts, start = _ids(), [], 0
    for count in (*counts, *[chunk] * tokens):
        stop = min(start + count, tokens)
        if stop > start:
            cache.make_room(start, stop - start)
            parts.append(model(ids[start:stop], torch.arange(start, stop), cache, live(stop), last_only=False))
            start = stop
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", PASSES)
@pytest.mark.parametrize("name", WINDOWED)
def test_logits_are_those_of_transformers_and_of_a_cache_that_keeps_everything(name, chunk):
    model = _model(name)
    cache = _cache(model, chunk)
    got, tokens = _logits(model, cache, chunk), PASSES[chunk][0]
    expected = _expected(name)[:tokens]
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE * expected.abs().max())
    assert torch.equal(got, _logits(model, _cache(model, None), chunk)), "the same arithmetic, the same bits"
    own = {index: each for index, each in enumerate(cache.layout) if isinstance(each, KeysAndValues)}
    windows = {each.window: each for each in own.values() if each.window}
    for index, kept in own.items():
        assert cache.layer(index).capacity == (kept.window + chunk if kept.window else TOKENS)
    assert windows
    assert all(tokens > 4 * (window + chunk) for window in windows)
    assert all(cache.view(window, tokens)[0] > tokens // 2 for window in windows)


@pytest.mark.parametrize("bits", [8, "k8v4", 4])
@pytest.mark.parametrize("chunk", PASSES)
def test_a_quantized_cache_slides_the_same_bytes(chunk, bits):
    name = "gemma3-text"
    config = {**BY_NAME[name].config, "head_dim": 16, "max_position_embeddings": TOKENS}
    family = ARCHITECTURES["gemma3_text"]
    torch.manual_seed(1)
    model = family.Model(family.Config.from_dict(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    model.make_tables(TOKENS, "cpu")
    cache, whole = _cache(model, chunk, bits), _cache(model, None, bits)
    assert torch.equal(_logits(model, cache, chunk), _logits(model, whole, chunk))
    assert cache.bytes() == KVCache.bytes_for(cache.layout, TOKENS, torch.float32, bits, chunk) < whole.bytes()
    assert layer_caches.most_copied(cache.layout, TOKENS, chunk) == 2 * 16 * TOKENS


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss-sinks", "mistral-window"])
def test_masks_where_the_host_does_not_know_the_position(name, monkeypatch):
    """The path of a GPU: `live` is a bucket, masks over slots hide the rest."""
    model = _model(name)
    expected = _expected(name)
    monkeypatch.setattr(decoder, "host_start", lambda positions: None)
    monkeypatch.setattr(attention, "SCORE_BYTES", 6 * TOKENS * 4 * 5)
    got = _logits(model, _cache(model, 7), 7, live=lambda stop: -(-stop // 16) * 16)
    torch.testing.assert_close(got, expected[: len(got)], rtol=0, atol=TOLERANCE * expected.abs().max())


def test_bf16_slides_the_same_bits():
    model = _model("gemma3-text", torch.bfloat16)
    assert torch.equal(_logits(model, _cache(model, 7), 7), _logits(model, _cache(model, None), 7))

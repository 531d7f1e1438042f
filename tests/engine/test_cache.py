"""The static KV cache: what goes where, what comes back, and how many bytes it is."""

from __future__ import annotations

import torch

from localq.engine.cache import KVCache

LAYOUT = [(3, 5), (2, 7)]  # (kv_heads, head_dim) per layer


def _tokens(count: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    heads, width = LAYOUT[layer]
    return torch.randn(count, heads, width), torch.randn(count, heads, width)


def test_what_was_stored_comes_back_in_slot_order():
    cache = KVCache(LAYOUT, 11, torch.float32, "cpu")
    k, v = _tokens(6, 1)
    cache.update(1, k[:4], v[:4], torch.arange(4), 4)
    keys, values = cache.update(1, k[4:], v[4:], torch.tensor([4, 5]), 6)
    assert keys.shape == (2, 6, 7)
    assert torch.equal(keys, k.transpose(0, 1))
    assert torch.equal(values, v.transpose(0, 1))
    assert not cache.keys[0].any(), "another layer was written"


def test_results_are_views_and_a_longer_live_shows_the_zeros_behind():
    cache = KVCache(LAYOUT, 11, torch.float32, "cpu")
    k, v = _tokens(2, 0)
    keys, values = cache.update(0, k, v, torch.arange(2), 9)
    assert keys.shape == values.shape == (3, 9, 5)
    assert keys.data_ptr() == cache.keys[0].data_ptr()
    assert not keys[:, 2:].any()


def test_a_shorter_conversation_overwrites_in_place():
    cache = KVCache(LAYOUT, 11, torch.float32, "cpu")
    cache.update(0, *_tokens(8, 0), torch.arange(8), 8)
    k, v = _tokens(2, 0)
    keys, _ = cache.update(0, k, v, torch.tensor([3, 4]), 5)
    assert torch.equal(keys[:, 3:5], k.transpose(0, 1))


def test_clear_removes_values_that_are_not_finite():
    cache = KVCache(LAYOUT, 11, torch.bfloat16, "cpu")
    k, v = _tokens(1, 0)
    cache.update(0, k.bfloat16() * torch.nan, v.bfloat16() * torch.inf, torch.tensor([10]), 11)
    cache.clear()
    assert not any(buffer.any() for buffer in (*cache.keys, *cache.values))


def test_bytes_are_those_of_the_buffers():
    cache = KVCache(LAYOUT, 11, torch.bfloat16, "cpu")
    assert cache.bytes() == KVCache.bytes_for(LAYOUT, 11, torch.bfloat16) == 2 * (3 * 5 + 2 * 7) * 11 * 2

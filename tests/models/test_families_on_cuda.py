"""The families on a GPU: prefill in buckets and decode as one captured graph give the logits of transformers."""

from __future__ import annotations

import pytest
import torch

from localq.engine.cache import KVCache
from localq.models.attention import SCORE_BYTES, attend, visible
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import DENSE
from tests.support.models.tiny_models import CONTEXT, PREFILL, TOKENS, reference_logits

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@torch.inference_mode()
def logits_by_graph(model, ids):
    """f32 [TOKENS, vocab]; every decode step replays the graph of the bucket that covers the whole context."""
    cache = KVCache(model.cache_layout(), CONTEXT, model.norm.weight.dtype, "cuda")
    first, second = PREFILL
    prompt = first + second
    every = torch.arange(TOKENS, device="cuda")
    token, position = ids[:1].clone(), every[:1].clone()
    model(token, position, cache, CONTEXT)  # libraries allocate their workspaces before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, position, cache, CONTEXT)
    cache.clear()  # that pass has advanced recurrent states
    rows = [model(ids[:first], every[:first], cache, first, last_only=False)]
    rows.append(model(ids[first:prompt], every[first:prompt], cache, 32, last_only=False))
    for step in range(prompt, TOKENS):
        token.copy_(ids[step : step + 1])
        position.copy_(every[step : step + 1])
        graph.replay()
        rows.append(logits.clone())
    return torch.cat(rows).cpu()


@pytest.mark.parametrize("name", [*DENSE, "gemma4-shared", "gemma4-inputs", "gemma4-small"])
def test_prefill_in_buckets_and_a_captured_graph_give_the_logits_of_transformers(name):
    model = tiny_models.built(name).to("cuda")
    model.make_tables(CONTEXT, "cuda")
    logits = logits_by_graph(model, tiny_models.token_ids().to("cuda"))
    torch.testing.assert_close(logits, reference_logits(name), rtol=0, atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "live", "window"), [(300, 300, 0), (300, 300, 128), (77, 1000, 0), (77, 1000, 128)])
def test_a_prefill_pass_with_sinks_is_near_to_f64(tokens, live, window, dtype):
    """From the start of a text and behind one, in a window and not; the shape of gpt-oss."""
    generator, heads, kv_heads, width = torch.Generator().manual_seed(tokens + window), 64, 8, 64
    q = torch.randn(tokens, heads, width, generator=generator).to(dtype)
    keys, values = torch.randn(2, kv_heads, live, width, generator=generator).to(dtype)
    keys[:, :, 5] *= 6
    sinks = (2 * torch.randn(heads, generator=generator) + 1).to(dtype)
    positions = torch.arange(live - tokens, live)

    def attended(device, wide, start):
        span = visible(positions.to(device), start, torch.arange(live, device=device), live, window, wide)
        k, v = (each[:, span.first : span.stop].to(device, wide) for each in (keys, values))
        return attend(q.to(device, wide), k, v, span, 0.125, 0.0, sinks.to(device, wide)).cpu().double()

    exact = attended("cpu", torch.float64, live - tokens)
    naive = (attended("cpu", dtype, live - tokens) - exact).abs().max()
    for start in (live - tokens, None):
        error = (attended("cuda", dtype, start) - exact).abs().max()
        assert error <= 2 * naive + 1e-6 * exact.abs().max(), f"off by {error:.3g}, naive {naive:.3g}"


@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_prefill_memory_does_not_grow_with_heads_times_context(softcap):
    tokens, live, heads, kv_heads, width = 1024, 32768, 64, 8, 128
    q = torch.randn(tokens, heads, width, dtype=torch.bfloat16, device="cuda")
    keys, values = torch.randn(2, kv_heads, live, width, dtype=torch.bfloat16, device="cuda")
    positions = torch.arange(live - tokens, live, device="cuda")
    span = visible(positions, None, torch.arange(live, device="cuda"), live, 0, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(q, keys, values, span, width**-0.5, softcap)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < 8 * SCORE_BYTES  # the f32 scores alone would be 8 GiB

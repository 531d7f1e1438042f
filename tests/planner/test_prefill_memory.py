"""What a prefill pass holds is what the plan has for it: counted on the operations of real shapes, without the data."""

from __future__ import annotations

import pytest
import torch

from localq.bench.synthetic.checkpoint import config_of, with_layers
from localq.engine.cache import KVCache
from localq.files import catalog
from localq.files.architecture import Architecture
from localq.kernels import delta_net
from localq.models import architecture, attention
from localq.models.gated_delta_net import GatedDeltaNet
from localq.planner import costs, footprint
from localq.planner.placement import Placement
from tests.support.engine.live_memory import Block, LiveMemory

ROUTED = {32: 4, 128: 8, 256: 8, 8: 2}  # experts of a layer -> those of a token
ROWS, CONTEXT = footprint.PREFILL_CHUNK, 3200
PASSES = ((0, ROWS), (CONTEXT - ROWS, ROWS), (0, 700), (700, 333), (1033, ROWS), (0, 9), (9, ROWS), (0, ROWS))
SHAPES = (
    *("llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "smollm2-135m", "phi-3-medium", "phi-4-mini"),
    *("gemma-2-9b", "gemma-3-1b", "gemma-3-12b", "gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b"),
    *("qwen3.8-27b", "qwen3.6-35b-a3b", "qwen3.5-0.8b"),
)


def planned(arch: Architecture, chunk: int | None, context: int = CONTEXT) -> int:
    """Bytes that the engine reserves for a pass of a 16-bit model (`Engine._reserve`)."""
    fixed = footprint.fixed_bytes(arch, "bf16", "", None, Placement(), 2)["scratch"]
    return fixed - footprint.SPARE_BYTES + costs.growths(arch, Placement(), 2, chunk)["scratch"].bytes(context)


def fused_attention(q, k, v, attn_mask=None, is_causal=False, scale=None):
    """The memory of the GPU's: the result, whose heads lie inside the tokens."""
    batch, heads, tokens, width = q.shape
    assert attn_mask is None or attn_mask.stride(0) % 8 == 0  # else torch copies it
    return q.new_empty(batch, tokens, heads, width).transpose(1, 2)


def all_alike(chosen, minlength):
    """As `bincount`, where all tokens go through the first experts: the most that one can hold."""
    active = ROUTED[minlength]
    return torch.tensor([chosen.numel() // active] * active + [0] * (minlength - active))


def with_sinks(q, keys, values, span, scale, sinks):
    """As `fused_attention`, with what a sink takes of it."""
    return fused_attention(q, keys, values, span.bias, span.causal).mul_(q.new_empty(*q.shape[:3], 1))


@pytest.fixture
def traced(monkeypatch):
    """Name -> what passes over the first layers hold: three, or, of hybrids, four, so that one has attention."""
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused_attention)
    monkeypatch.setattr(attention, "_with_sinks", with_sinks)
    monkeypatch.setattr(torch.Tensor, "bincount", all_alike)

    def trace(arch: Architecture, chunk: int | None, context: int = CONTEXT) -> LiveMemory:
        family = architecture(config := with_layers(config_of(arch), 4 if arch.recurrent_layers else 3))
        with torch.device("meta"):
            model = family.Model(family.Config.from_dict(config)).half().requires_grad_(False)
        model.make_tables(context, "meta")
        cache = KVCache(model.cache_layout(), context, torch.float16, "meta", chunk=chunk)
        held = LiveMemory()
        with torch.inference_mode(), held:
            for first, rows in (*PASSES, (context - ROWS, ROWS)):
                ids, positions = (torch.zeros(rows, dtype=torch.int64, device="meta") for _ in range(2))
                cache.make_room(first, rows)
                model(ids, positions, cache, first + rows)
        return held

    return trace


@pytest.mark.parametrize(
    ("name", "chunk"),
    [(name, chunk) for name in SHAPES for chunk in (ROWS, None) if chunk or catalog.find(name).arch.window_layers],
)
def test_passes_fit_into_what_is_reserved_and_fill_it(traced, name, chunk):
    arch = catalog.find(name).arch
    held, reserved = traced(arch, chunk), planned(arch, chunk)
    assert held.peak <= reserved
    assert reserved <= 1.25 * held.peak + 8 * 2**20
    block = Block(reserved)
    block.play(held.events)
    assert block.missed == 0


@pytest.mark.parametrize("name", ["qwen3.8-27b", "qwen3.6-35b-a3b", "qwen3.5-9b", "qwen3.5-4b", "qwen3.5-0.8b"])
def test_the_kernels_of_delta_nets_fit_into_what_is_reserved(traced, name, monkeypatch):
    """As above, where the kernels take what torch takes elsewhere; the launch itself does nothing here."""
    launched = []
    module = type("Module", (), {"delta_prefill": staticmethod(lambda **given: launched.append(given["chunks"]))})
    monkeypatch.setattr(delta_net.kernels, "module", lambda: module)
    monkeypatch.setattr(delta_net, "check_cuda", lambda *_: None)
    monkeypatch.setattr(delta_net, "place", lambda _: {"device": 0, "stream": 0})
    monkeypatch.setattr(GatedDeltaNet, "has_kernel", lambda net, x: True)
    arch = catalog.find(name).arch
    held, reserved = traced(arch, ROWS), planned(arch, ROWS)
    assert len(launched) == 3 * (len(PASSES) + 1)
    assert held.peak <= reserved
    block = Block(reserved)
    block.play(held.events)
    assert block.missed == 0


@pytest.mark.parametrize("context", [4096, 32_768, 262_144])
@pytest.mark.parametrize("name", ["qwen3.8-27b", "qwen3.6-35b-a3b", "muse-glimmer-30b", "gemma-3-12b"])
def test_the_last_pass_of_a_long_context_fits_as_that_of_a_short_one(traced, name, context):
    arch = catalog.find(name).arch
    context = min(context, arch.max_context)
    held, reserved = traced(arch, ROWS, context), planned(arch, ROWS, context)
    assert held.peak <= reserved
    block = Block(reserved)
    block.play(held.events)
    assert block.missed == 0


def test_weights_that_prefill_dequantizes_are_bounded():
    assert footprint.slab_bytes(14_336 * 4096, 2) == 14_336 * 8192
    for name in ("llama-3.3-70b", "gemma-3-27b", "qwen2.5-72b"):
        arch = catalog.find(name).arch
        largest = max(each.rows * each.columns for each in arch.linears)
        assert footprint.slab_bytes(largest, 2) <= 256 * 2**20


def test_the_block_of_the_simulation():
    mib = 2**20
    block = Block(20 * mib)
    block.play([(1, 8 * mib), (2, 4 * mib), (3, 8 * mib), (1, -8 * mib), (2, -4 * mib), (4, 12 * mib), (5, mib)])
    assert block.missed == 0
    block.play([(3, -8 * mib), (6, 9 * mib)])
    assert block.missed == 9 * mib

"""What a prefill pass holds is what the plan has for it: counted on the operations of real shapes, without the data."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from localq.bench.synthetic.checkpoint import config_of, with_layers
from localq.engine.cache import KVCache
from localq.engine.load import grouped_experts
from localq.files import catalog
from localq.files.architecture import Architecture
from localq.formats.experts import grouped
from localq.kernels import delta_net
from localq.models import architecture, attention
from localq.models.gated_delta_net import GatedDeltaNet
from localq.planner import footprint, growth, slabs
from localq.planner.placement import Placement
from tests.support.engine.live_memory import Block, LiveMemory

ROUTED = {32: 4, 128: 8, 256: 8, 8: 2, 127: 6}  # experts of a layer -> those of a token
ROWS, CONTEXT = footprint.PREFILL_CHUNK, 3200
PASSES = ((0, ROWS), (CONTEXT - ROWS, ROWS), (0, 700), (700, 333), (1033, ROWS), (0, 9), (9, ROWS), (0, ROWS))
SHAPES = (
    *("llama-3.1-8b", "llama-3.3-70b", "qwen3-8b", "smollm2-135m", "phi-3-medium", "phi-4-mini"),
    *("gemma-2-9b", "gemma-3-1b", "gemma-3-12b", "gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b"),
    *(
        "qwen3.8-27b",
        "qwen3.6-35b-a3b",
        "qwen3.5-0.8b",
        "gemma-4-31b",
        "gemma-4-12b",
        "gemma-4-26b-a4b",
        "olmo-3-7b",
        "olmo-3.1-32b",
        "granite-3.3-8b",
        "lfm2-1.2b",
        "lfm2.5-8b-a1b",
    ),
)


def planned(arch: Architecture, chunk: int | None, context: int = CONTEXT) -> int:
    """Bytes that the engine reserves for a pass of a 16-bit model (`Engine._reserve`)."""
    fixed = footprint.fixed_bytes(arch, "bf16", "", None, Placement(), 2)["scratch"]
    return fixed - footprint.SPARE_BYTES + growth.growths(arch, Placement(), 2, chunk)["scratch"].bytes(context)


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
    launches = {name: lambda **given: None for name in ("experts_sort", "experts_gemm", "experts_sum")}
    monkeypatch.setattr(grouped.kernels, "module", lambda: SimpleNamespace(**launches))
    monkeypatch.setattr(grouped, "check_cuda", lambda *_: None)
    monkeypatch.setattr(grouped, "place", lambda _: {"device": 0, "stream": 0})

    def trace(
        arch: Architecture, chunk: int | None, context: int = CONTEXT, passes=PASSES, in_groups: bool = False
    ) -> LiveMemory:
        family = architecture(config := with_layers(config_of(arch), 4 if arch.recurrent_layers else 3))
        with torch.device("meta"):
            model = family.Model(family.Config.from_dict(config)).half().requires_grad_(False)
        model.make_tables(context, "meta")
        if in_groups:
            grouped_experts.install(model, torch.float16)
        cache = KVCache(model.cache_layout(), context, torch.float16, "meta", chunk=chunk)
        held = LiveMemory()
        with torch.inference_mode(), held:
            for first, rows in (*passes, (context - ROWS, ROWS)):
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
    ways, reserved = [traced(arch, chunk)], planned(arch, chunk)
    if arch.experts:
        ways.append(traced(arch, chunk, in_groups=True))
    assert max(held.peak for held in ways) <= reserved <= 1.25 * max(held.peak for held in ways) + 8 * 2**20
    for held in ways:
        block = Block(reserved)
        block.play(held.events)
        assert block.missed == 0


@pytest.mark.parametrize("name", ["gemma-4-e4b", "gemma-4-e2b"])
def test_what_layers_add_per_token_is_reserved(traced, name):
    arch = replace(catalog.find(name).arch, layers=3, window_layers=2, shared_layers=0, wide_shared_layers=False)
    held, reserved = traced(arch, ROWS), planned(arch, ROWS)
    assert held.peak <= reserved <= 1.25 * held.peak + 8 * 2**20
    block = Block(reserved)
    block.play(held.events)
    assert block.missed == 0


DENSE_NEMOTRON = {
    "hidden": 4480, "heads": 40, "kv_heads": 8, "intermediate": 15_680, "delta_value_heads": 128, "delta_value_dim": 80,
    "experts": 0, "experts_active": 0, "dense_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize("chunk", [ROWS, None])
def test_layers_with_other_numbers_of_heads_fit_into_what_is_reserved(traced, chunk):
    arch = replace(catalog.find("laguna-xs-2.1").arch, layers=3, window_layers=2, experts=127, experts_active=6)
    held, reserved = traced(arch, chunk), planned(arch, chunk)
    assert held.peak <= reserved <= 1.25 * held.peak + 8 * 2**20
    block = Block(reserved)
    block.play(held.events)
    assert block.missed == 0


PARALLEL = {
    "published": {},
    "shared": {"num_shared_experts": 4, "intermediate_size": 3072, "num_experts": 127, "num_experts_per_tok": 6},
    "wide_shared": {"num_shared_experts": 8, "intermediate_size": 3072},
    "dense": {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2},
    "prefix": {"first_k_dense_replace": 1, "intermediate_size": 1536, "prefix_dense_intermediate_size": 9216,
               "num_experts": 127, "num_experts_per_tok": 6, "num_shared_experts": 1, "hidden_size": 3072,
               "num_attention_heads": 32, "num_key_value_heads": 4},
    "wide_heads": {"intermediate_size": 256, "num_experts": 127, "num_experts_per_tok": 6, "hidden_size": 2048},
}  # fmt: skip


@pytest.mark.parametrize("chunk", [ROWS, None])
@pytest.mark.parametrize("fields", PARALLEL.values(), ids=PARALLEL)
def test_parallel_blocks_fit_into_what_is_reserved(traced, fields, chunk):
    stated = {"model_type": "cohere2_moe", "num_hidden_layers": 3, "num_key_value_heads": 8, "sliding_window": 512}
    arch = Architecture.from_config({**stated, **fields})
    ways, reserved = [traced(arch, chunk)], planned(arch, chunk)
    if arch.experts:
        ways.append(traced(arch, chunk, in_groups=True))
    peak = max(held.peak for held in ways)
    assert peak <= reserved <= 1.25 * peak + 8 * 2**20
    for held in ways:
        block = Block(reserved)
        block.play(held.events)
        assert block.missed == 0


LATENTS = {
    "published": {},
    "mixture": {"n_routed_experts": 127, "num_experts_per_tok": 6, "moe_intermediate_size": 512},
    "plain_queries": {"q_lora_rank": None, "n_routed_experts": 127, "num_experts_per_tok": 6, "n_shared_experts": 3},
    "dense": {"mlp_layer_types": ["dense"] * 3, "intermediate_size": 5120},
    "many_heads": {"num_attention_heads": 48, "num_key_value_heads": 48, "kv_lora_rank": 256, "v_head_dim": 128,
                   "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "mlp_layer_types": ["dense"] * 3},
    "few_heads": {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 4096, "q_lora_rank": 1536,
                  "mlp_layer_types": ["dense"] * 3},
}  # fmt: skip


@pytest.mark.parametrize("fields", LATENTS.values(), ids=LATENTS)
def test_latent_attention_fits_into_what_is_reserved(traced, fields):
    stated = {"model_type": "glm4_moe_lite", "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2}
    arch = Architecture.from_config({**stated, **fields})
    ways, reserved = [traced(arch, ROWS)], planned(arch, ROWS)
    if arch.experts:
        ways.append(traced(arch, ROWS, in_groups=True))
    peak = max(held.peak for held in ways)
    assert peak <= reserved <= 1.25 * peak + 8 * 2**20
    for held in ways:
        block = Block(reserved)
        block.play(held.events)
        assert block.missed == 0


@pytest.mark.parametrize("name", ["granite-4.0-h-tiny", "granite-4.0-h-micro"])
def test_a_layer_of_mamba_and_one_of_attention_fit_into_what_is_reserved(traced, name):
    arch = replace(catalog.find(name).arch, layers=4, recurrent_layers=3)
    arch = replace(arch, experts=127, experts_active=6) if arch.experts else arch
    held, reserved = traced(arch, ROWS), planned(arch, ROWS)
    assert held.peak <= reserved <= 1.25 * held.peak + 8 * 2**20
    block = Block(reserved)
    block.play(held.events)
    assert block.missed == 0


@pytest.mark.parametrize("layers", [{}, {"experts": 127}, DENSE_NEMOTRON], ids=["mamba", "mixture", "dense"])
def test_layers_of_one_part_fit_into_what_is_reserved(traced, layers):
    fields = {"attention_layers": 1, **layers} if layers else {"attention_layers": 0, "experts": 0, "experts_active": 0}
    arch = replace(catalog.find("nemotron-3-nano").arch, recurrent_layers=1, **fields)
    arch = replace(arch, layers=arch.recurrent_layers + arch.attention_layers + arch.dense_layers + bool(arch.experts))
    held, reserved = traced(arch, ROWS), planned(arch, ROWS)
    assert held.peak <= reserved <= 1.25 * held.peak + 8 * 2**20
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
    held, reserved = traced(arch, ROWS, context, passes=((0, ROWS), (700, 333))), planned(arch, ROWS, context)
    assert held.peak <= reserved
    block = Block(reserved)
    block.play(held.events)
    assert block.missed == 0


def test_weights_that_prefill_dequantizes_are_bounded():
    assert slabs.slab_bytes(14_336 * 4096, 2) == 14_336 * 8192
    for name in ("llama-3.3-70b", "gemma-3-27b", "qwen2.5-72b"):
        arch = catalog.find(name).arch
        largest = max(each.rows * each.columns for each in arch.linears)
        assert slabs.slab_bytes(largest, 2) <= 256 * 2**20


def test_the_block_of_the_simulation():
    mib = 2**20
    block = Block(20 * mib)
    block.play([(1, 8 * mib), (2, 4 * mib), (3, 8 * mib), (1, -8 * mib), (2, -4 * mib), (4, 12 * mib), (5, mib)])
    assert block.missed == 0
    block.play([(3, -8 * mib), (6, 9 * mib)])
    assert block.missed == 9 * mib

"""Memory of drafts over recurrent layers: what the cache keeps of drafted tokens, to the byte, where there are any."""

from __future__ import annotations

import pytest
import torch

from localq.engine.cache import KVCache
from localq.files import catalog
from localq.files.architecture import Architecture
from localq.planner import plan
from localq.planner.placement import Wishes

ROWS = {0: 1, 1: 2, 3: 4, 7: 8}
GPU = 200 * 2**30


def shape(name: str) -> Architecture:
    return catalog.resolve(name).entry.arch


def components(name: str, budget: int | None, drafted: int) -> dict[str, int]:
    made = plan.assess(shape(name), "nf4", budget, wishes=Wishes(4096, draft_tokens=drafted))
    assert made.rows == ROWS[drafted]
    return made.ledger.components


@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.6-35b-a3b", "qwen3.8-27b"])
@pytest.mark.parametrize("drafted", ROWS)
def test_the_cpu_counts_what_the_cache_allocates(name, drafted):
    arch = shape(name)
    cache = KVCache(arch.layer_caches, 4096, torch.bfloat16, "meta", rows=ROWS[drafted])
    assert components(name, None, drafted)["kv_cache"] == cache.bytes()
    more = (ROWS[drafted] - 1) * arch.recurrent_layers * (2 * arch.delta_channels + 8 * arch.delta_value_heads)
    assert components(name, None, drafted)["kv_cache"] - components(name, None, 0)["kv_cache"] == more < 2**23


def test_a_gpu_counts_drafts_their_buffers_and_graphs():
    plain, drafting = (components("qwen3.5-9b", GPU, drafted) for drafted in (0, 7))
    arch = shape("qwen3.5-9b")
    kept = 7 * (2 * arch.delta_channels + 8 * arch.delta_value_heads) * arch.recurrent_layers
    assert drafting["kv_cache"] - plain["kv_cache"] == kept
    assert drafting["step_buffers"] > plain["step_buffers"]
    assert drafting["graphs"] > 3 * plain["graphs"] // 2


def test_models_without_recurrent_layers_are_verified_anywhere():
    assert plan.assess(shape("qwen3-8b"), "nf4", GPU, wishes=Wishes(4096, draft_tokens=7)).rows == 8

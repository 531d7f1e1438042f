"""What Gemma 4 adds to the fused step, with the kernels' work done by torch; logits are compared in `test_fused.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from localq.engine.cache import KVCache
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.engine.sampler import SamplerState
from localq.engine.step import fused
from localq.engine.step.fused import OPERATIONS, FusedStep
from localq.engine.step.rows import StepBuffers
from localq.engine.step.state import StepState
from localq.files.architecture import Architecture
from localq.files.model_folder import open_model
from localq.kernels import attention
from localq.models import ARCHITECTURES
from localq.planner import footprint
from localq.planner.load_options import LoadOptions
from localq.planner.placement import Placement
from tests.support.engine import step_stand_ins
from tests.support.engine.engine_runs import ids_of, prompt_of
from tests.support.engine.fused_models import GEMMA4, GEMMA4_CASES, GEMMA4_CHECKPOINTS, config_of
from tests.support.engine.fused_steps import fused_step
from tests.support.engine.lossless import Oracle
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.models.tiny_models import CONTEXT

NAMES = [
    "gemma4", "gemma4-unified", "gemma4-values", "gemma4-shared", "gemma4-inputs", "gemma4-small", "gemma4-experts",
]  # fmt: skip


def steps_of(model, rows: tuple[int, ...]) -> tuple[StepBuffers, list[FusedStep]]:
    cpu = torch.device("cpu")
    cache = KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu")
    state, buffers = StepState(SamplerState(model.config.vocab_size, CONTEXT, cpu), cpu), StepBuffers(rows[-1])
    return buffers, [FusedStep(model, cache, state, each, buffers) for each in rows]


@pytest.mark.parametrize("rows", [(1,), (1, 2), (1, 2, 4, 8)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_buffers_are_those_of_the_plan_to_the_byte(name, rows, monkeypatch):
    step_stand_ins.install(monkeypatch)
    buffers, steps = steps_of(tiny_models.ours(name), rows)
    arch = Architecture.from_config(BY_NAME[name].config)
    planned = footprint.fixed_bytes(arch, "bf16", "", None, Placement(rows=rows[-1]), 4)["step_buffers"]
    assert buffers.bytes() + sum(each.own_bytes() for each in steps) == planned


@pytest.mark.parametrize(
    ("name", "first", "layer", "shared"),
    [
        ("gemma4", [], ["norm"], None),
        ("gemma4-values", [], ["norm"], None),
        ("gemma4-shared", [], ["norm"], 3),
        ("gemma4-experts", [], ["norm"], None),
        (
            "gemma4-small",
            ["embed", "embed", "embed", "norm", "embed"],
            ["gate_up", "gate_up", "down", "norm", "norm"],
            4,
        ),
    ],
)
def test_launches_of_a_layer(name, first, layer, shared, monkeypatch):
    step_stand_ins.install(monkeypatch)
    model = tiny_models.ours(name)
    operations = [
        launch.operation
        for launch in fused_step(model, KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu")).launches(True)
    ]
    expected = ["embed", *first]
    for index in range(model.config.layers):
        values = [] if shared is not None and index >= shared else ["norm"]
        beside = ["norm", "router", "router", "gate_up", "down", "norm"] if model.config.experts else []
        expected += ["qkv", *values, "attention", "o", "norm", "gate_up", "down", *beside, "norm", *layer]
    assert operations == [*expected, "head", "sample"]
    assert set(operations) <= set(OPERATIONS)


def test_keys_and_values_that_layers_share_are_written_again_as_they_were(monkeypatch):
    step_stand_ins.install(monkeypatch)
    model = tiny_models.ours("gemma4-shared")
    cache = KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu")
    step, seen = fused_step(model, cache), []
    for launch in step.launches(greedy=True):
        launch.run()
        if launch.operation == "attention":
            seen.append([part.clone() for part in (*cache.keys, *cache.values)])
    sharing = model.config.layers - len(cache.keys)
    assert sharing == 3
    for later in seen[-sharing:]:
        assert all(map(torch.equal, later, seen[-sharing - 1]))


def built(name: str, **changes):
    """On the CPU in bfloat16, of shapes that kernels take."""
    module = ARCHITECTURES[BY_NAME[name].config["model_type"]]
    return module.Model(config_of(name, {**GEMMA4_CASES.get(name, GEMMA4), **changes})).to(torch.bfloat16)


@pytest.mark.parametrize("name", GEMMA4_CASES)
def test_kernels_compute_a_step(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    assert fused.why_not(built(name)) == ""


def test_what_no_kernel_computes_is_named(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    wide = built("gemma4", global_head_dim=512)
    assert fused.why_not(wide) == ""
    assert fused.why_not(wide, 8) == "no attention kernel supports head_dim 512 with a KV cache below 16 bits"
    assert "supports head_dim 520 " in fused.why_not(built("gemma4", global_head_dim=520))
    assert fused.why_not(built("gemma4", global_head_dim=128), 8) == ""
    assert "layer inputs with 10 columns" in fused.why_not(built("gemma4-inputs", hidden_size_per_layer_input=10))
    refused = "no kernel supports experts with these biases and gates in this format"
    assert fused.why_not(built("gemma4-experts", hidden_activation="gelu")) == refused


def test_tables_in_pageable_memory_are_left_to_the_modules():
    model = built("gemma4-inputs")
    assert fused.why_not(model) == "the table of layer inputs is in pageable host memory"
    del model.embed_tokens_per_layer
    model.embed_tokens_per_layer = SimpleNamespace(weight=SimpleNamespace(is_cuda=True))
    assert fused.why_not(model) == "the embedding table is in pageable host memory"


@pytest.mark.parametrize("kind", GEMMA4_CHECKPOINTS)
def test_replies_of_the_launches_with_drafts_are_those_of_the_modules(kind, tmp_path, monkeypatch):
    """Past a window and a pass, so that windows slide."""
    folder = make_checkpoint(tmp_path, "gemma4_text", initializer_range=0.1, **GEMMA4_CHECKPOINTS[kind])
    options = LoadOptions(device="cpu", dtype="float32", ctx=256, draft_tokens=7)
    prompt, ways = prompt_of(20), []
    for fused_rows in (0, 7):
        engine = Engine(load(open_model(folder), options), draft_tokens=fused_rows)
        if fused_rows:
            step_stand_ins.install(monkeypatch)
            engine._steps.fuse()
            engine._drafter = Oracle(ways[0], seed=1)
        ways.append(ids_of(engine, prompt, max_tokens=180, draft_tokens=fused_rows))
    assert len(ways[0]) > 150
    assert ways[0] == ways[1]


def test_workspaces_of_two_head_sizes_lie_in_one_memory(monkeypatch):
    sizes = {"attention_splits": lambda kv_heads, device: 64 // kv_heads,
             "attention_partials": lambda heads, kv_heads, head_dim, splits: heads * head_dim * splits}  # fmt: skip
    monkeypatch.setattr(attention.kernels, "module", lambda: SimpleNamespace(**sizes))
    found = attention.workspaces([(8, 4, 256), (8, 1, 512)], torch.device("cpu"), 2)
    narrow, wide = found[8, 4, 256], found[8, 1, 512]
    assert narrow.partials is wide.partials
    assert narrow.arrived is wide.arrived
    assert narrow.arrived.numel() == 2 * 16 * 4
    assert wide.partials.numel() == 2 * 8 * 512 * 32
    assert (narrow.splits, wide.splits) == (16, 64)

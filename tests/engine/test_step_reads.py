"""The roof that a chat shows counts the cache as the launches of a step do, in every family, windows and all."""

from __future__ import annotations

import pytest
import step_stand_ins
import tiny_models
import torch
from tiny_models import BY_NAME, CONTEXT

from localq import roofline
from localq.architecture import Architecture
from localq.engine.cache import KVCache
from localq.engine.decode import StepState
from localq.engine.fused import FusedStep
from localq.engine.sampler import SamplerState
from localq.engine.weights import weight_bytes


@pytest.mark.parametrize("name", BY_NAME)
def test_every_position_costs_what_attention_reads_of_it(name, monkeypatch):
    step_stand_ins.install(monkeypatch)
    model = tiny_models.ours(name)
    cache = KVCache(model.kv_layout(), CONTEXT, torch.float32, "cpu")
    state = StepState(SamplerState(model.config.vocab_size, CONTEXT, torch.device("cpu")), torch.device("cpu"))
    launches = FusedStep(model, cache, state).launches(greedy=True)
    reads = roofline.reads(Architecture.from_config(BY_NAME[name].config), weight_bytes(model), 32)
    moved = [sum(launch.bytes(live) for launch in launches) for live in range(CONTEXT + 1)]
    assert [each - moved[0] for each in moved] == [reads.at(live) - reads.at(0) for live in range(CONTEXT + 1)]
    assert reads.at(0) < moved[0]  # which counts what the launches say to each other besides

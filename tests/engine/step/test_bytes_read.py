"""The roof that a chat shows counts the cache as the launches of a step do, in every family, windows and all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from localq.engine.cache import KVCache
from localq.engine.load.stacks import idle_bytes
from localq.engine.load.weights import weight_bytes
from localq.engine.sampler import SamplerState
from localq.engine.step.fused import FusedStep
from localq.engine.step.state import StepState
from localq.files import catalog
from localq.files.architecture import Architecture
from localq.planner.speed import roofline
from localq.worker import backend
from tests.support.engine import step_stand_ins
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME, FUSED
from tests.support.models.tiny_models import CONTEXT


@pytest.mark.parametrize("name", FUSED)
def test_every_position_costs_what_attention_reads_of_it(name, monkeypatch):
    step_stand_ins.install(monkeypatch)
    model = tiny_models.ours(name)
    cache = KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu")
    state = StepState(SamplerState(model.config.vocab_size, CONTEXT, torch.device("cpu")), torch.device("cpu"))
    launches = FusedStep(model, cache, state).launches(greedy=True)
    arch = Architecture.from_config(BY_NAME[name].config)
    reads = roofline.reads(arch, weight_bytes(model), 32, idle_bytes(model))
    moved = [sum(launch.bytes(live) for launch in launches) for live in range(CONTEXT + 1)]
    assert [each - moved[0] for each in moved] == [reads.at(live) - reads.at(0) for live in range(CONTEXT + 1)]
    assert reads.at(0) < moved[0]  # which counts what the launches say to each other besides


@pytest.mark.parametrize(("dtype", "kv_bits", "bits"), [
    (torch.float16, 16, 16), (torch.float32, 16, 32), (torch.bfloat16, 8, 8), (torch.float16, 4, 4),
    (torch.bfloat16, "k8v4", "k8v4"),
])  # fmt: skip
def test_what_the_engine_says_of_a_loaded_model(dtype, kv_bits, bits):
    arch = catalog.find("llama-3.1-8b").arch
    ledger = {"weights": 4_000, "embedding": 500, "head": 0}
    model = SimpleNamespace(
        dtype=dtype, kv_bits=kv_bits, device=torch.device("cuda", 0), plan=SimpleNamespace(arch=arch),
        model=torch.nn.Module(),
    )  # fmt: skip
    told = backend._reads(model, ledger)
    assert roofline.Reads(**told) == roofline.reads(arch, ledger, bits)
    assert told["slot"] == arch.kv_bytes_per_token(bits)
    model.plan.arch = None
    assert backend._reads(model, ledger) == {}
    model.plan.arch, model.device = arch, torch.device("cpu")
    assert backend._reads(model, ledger) == {}

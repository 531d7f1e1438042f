"""The launches of a fused step one token at a time, by stand-ins for the kernels, and a small decoder for them."""

from __future__ import annotations

from typing import Any

import torch

from localq.engine.cache import KVCache
from localq.engine.sampler import SamplerState
from localq.engine.step.fused import FusedStep
from localq.engine.step.state import StepState
from localq.models import ARCHITECTURES
from localq.models.decoder import Decoder
from tests.support.models import tiny_cases, tiny_models
from tests.support.models.tiny_models import CONTEXT, PREFILL, TOKENS


def small_qwen3(**changes: Any) -> Decoder:
    """With random weights; widths of 64 and 112, or as `changes` say."""
    return _small("qwen3", "qwen3", changes)


def small_qwen3_moe(**changes: Any) -> Decoder:
    """The same with experts of a width of 96."""
    return _small("qwen3_moe", "qwen3-moe", {"moe_intermediate_size": 96, **changes})


def _small(architecture: str, name: str, changes: dict[str, Any]) -> Decoder:
    widths = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 16, **changes}
    module = ARCHITECTURES[architecture]
    model: Decoder = module.Model(module.Config.from_dict({**tiny_cases.BY_NAME[name].config, **widths}))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        around = 1.0 if "norm" in name else 0.0
        parameter.data = around + 0.3 * torch.randn(parameter.shape, generator=generator)
    model.make_tables(CONTEXT, "cpu")
    return model.eval()


def fused_step(model: Decoder, cache: KVCache) -> FusedStep:
    """On the CPU."""
    device = torch.device("cpu")
    return FusedStep(model, cache, StepState(SamplerState(model.config.vocab_size, CONTEXT, device), device))


def operations(model: Decoder) -> list[str]:
    """What the launches of a step do, in order; each moves bytes."""
    step = fused_step(model, KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu"))
    assert all(launch.bytes(9) > 0 for launch in step.launches(greedy=True))
    return [launch.operation for launch in step.launches(greedy=True)]


def logits_of_launches(model: Decoder) -> torch.Tensor:
    """f32 [TOKENS - prompt, vocab]: a prefill by the modules, then every token through the launches."""
    ids, prompt = tiny_models.token_ids(), sum(PREFILL)
    cache = KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu")
    model(ids[:prompt], torch.arange(prompt), cache, prompt)
    step, rows = fused_step(model, cache), []
    for position in range(prompt, TOKENS):
        step.state.token.copy_(ids[position : position + 1])
        step.state.position.fill_(position)
        step.run(greedy=True)
        rows.append(step.logits[0].clone())
    return torch.stack(rows)

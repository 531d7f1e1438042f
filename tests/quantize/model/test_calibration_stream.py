"""The parts of a block, whatever the family, make the block; both streams are kept apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from localq.models.decoder import Decoder
from localq.models.layers import PlainLinear
from localq.quantize.model import calibration_stream
from localq.quantize.model.calibration_stream import NoCache, Streams
from localq.quantize.model.matrix_groups import groups_of
from tests.support.models.tiny_cases import DENSE
from tests.support.models.tiny_models import ours, reference_logits, token_ids

CPU = torch.device("cpu")
every_case = pytest.mark.parametrize("name", DENSE)
ROUNDING = 2e-6  # the same products of f32, added up in the same order but for blocks of rows


def embedded(model: Decoder) -> Tensor:
    return model.embed(token_ids()).detach()


def streams_of(model: Decoder) -> Streams:
    return Streams(model, [embedded(model)], CPU)


@every_case
def test_parts_of_a_block_joined_are_the_block(name):
    model = ours(name)
    with torch.inference_mode():
        found, x = streams_of(model), embedded(model)
        for block in model.layers:
            expected = block(x, found.step)
            between = calibration_stream.after_attention(block, x, found.step)
            got = calibration_stream.after_mlp(block, between)
            torch.testing.assert_close(got, expected, rtol=0, atol=ROUNDING * float(expected.abs().max()))
            x = expected


@every_case
def test_the_streams_end_in_the_logits_of_transformers(name):
    """All layers, without a cache: windows, soft caps and positions are those of a pass of the model."""
    model = ours(name)
    with torch.inference_mode():
        found = streams_of(model)
        for block in model.layers:
            found.advance(partial(_through, block=block, streams=found), partial(_through, block=block, streams=found))
        table = model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
        logits = F.linear(model.norm(found.x[0]), table)
        if cap := model.config.final_softcap:
            logits = torch.tanh(logits / cap) * cap
    assert found.drift() == 0
    torch.testing.assert_close(logits, reference_logits(name), rtol=0, atol=1e-4)  # as tests/models/test_families.py


def _through(x: Tensor, block, streams: Streams) -> Tensor:
    return calibration_stream.after_mlp(block, calibration_stream.after_attention(block, x, streams.step))


@every_case
def test_inputs_of_the_groups_are_what_their_linears_read(name):
    """Caught on their way in a pass of the block."""
    model = ours(name)
    block, found = model.layers[0], streams_of(model)
    caught: dict[str, Tensor] = {}
    x = embedded(model)
    handles = [
        block.get_submodule(module).register_forward_pre_hook(partial(_note, caught, module))
        for group in groups_of(block)
        for module in group.names
    ]
    with torch.inference_mode():
        block(x, found.step)
        for handle in handles:
            handle.remove()
        between = calibration_stream.after_attention(block, x, found.step)
        for group in groups_of(block):
            got = group.x(block, x if group.number < 2 else between, found.step)
            for module in group.names:
                torch.testing.assert_close(got, caught[module], rtol=0, atol=ROUNDING * float(got.abs().max()))
    linears = [module for module in block.modules() if isinstance(module, torch.nn.Linear)]
    assert len(caught) == sum(not isinstance(module, PlainLinear) for module in linears)


def _note(caught: dict[str, Tensor], name: str, module: object, arguments: tuple[Tensor]) -> None:
    caught[name] = arguments[0].clone()


@pytest.mark.parametrize(
    "part",
    [
        calibration_stream.output_projection_input,
        lambda block, x, step: calibration_stream.down_projection_input(block, x),
    ],
)
def test_what_is_left_out_for_a_moment_is_put_back(part: Callable[..., Tensor], monkeypatch):
    model = ours("llama-biases")
    block, found = model.layers[1], streams_of(model)
    linears = block.self_attn.o_proj, block.mlp.down_proj
    part(block, embedded(model), found.step)
    assert (block.self_attn.o_proj, block.mlp.down_proj) == linears
    with pytest.raises(RuntimeError):
        part(block, torch.zeros(55, 3), found.step)
    assert (block.self_attn.o_proj, block.mlp.down_proj) == linears


def test_both_streams_go_their_own_ways():
    model = ours("qwen3")
    begin = [embedded(model), 2 * embedded(model)]
    found = Streams(model, [each.clone() for each in begin], CPU)
    assert found.drift() == 0
    found.advance(lambda x: 0.9 * x, lambda full: full + 0)
    for x, full, first in zip(found.x, found.full, begin, strict=True):
        torch.testing.assert_close(x, 0.9 * first)
        assert torch.equal(full, first)
    assert found.drift() == pytest.approx(0.01, rel=1e-5)


def test_streams_of_16_bits_stay_so():
    model = ours("qwen3")
    found = Streams(model, [embedded(model).bfloat16()], CPU)
    found.advance(lambda x: x.float() * 1.5, lambda full: full.float())
    assert found.x[0].dtype == found.full[0].dtype == torch.bfloat16


def test_no_cache_hands_on_what_it_gets():
    k, v = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    keys, values = NoCache().update(0, k, v, torch.arange(5), 5)
    assert torch.equal(keys, k.transpose(0, 1))
    assert torch.equal(values, v.transpose(0, 1))

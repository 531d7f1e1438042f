"""Rotations are rotations, and a model that was turned computes what it did."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.formats.codebooks import rotation
from localq.models.decoder import Decoder
from localq.quantize.model import fold
from localq.quantize.model.calibration_stream import NoCache
from tests.support.models.tiny_cases import DENSE
from tests.support.models.tiny_models import CONTEXT, built, ours, token_ids

F64 = torch.float64


@pytest.mark.parametrize("width", [1, 3, 14, 64, 576, 640, 896, 1152, 1536])
def test_rotations_are_orthogonal(width):
    turn = fold.random_rotation(width, 5)
    assert turn.dtype == F64
    assert (turn @ turn.T - torch.eye(width, dtype=F64)).abs().max() < 2**-52 * 16 * width**0.5


@pytest.mark.parametrize("width", [576, 640, 896])
def test_rotations_spread_an_outlier_over_all_that_a_block_reaches(width):
    """Every row has a Hadamard matrix as its factor: the power of two in the width divides its largest share."""
    turn, power = fold.random_rotation(width, 5), width & -width
    assert turn.abs().max() <= power**-0.5 + 1e-12
    assert (turn.view(width, width // power, power).abs().std(2) < 1e-12).all()


def test_seeds_decide():
    one, same, other = (fold.random_rotation(72, seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    signs = [fold.minus_signs(192, seed) for seed in (1, 1, 2)]
    assert torch.equal(signs[0], signs[1])
    assert not torch.equal(signs[0], signs[2])
    assert signs[0].shape == (24,)
    assert set(rotation.factors_of(signs[0]).tolist()) == {-1.0, 1.0}


SANDWICHED = ("gemma", "muse_glimmer", "olmo", "exaone4")  # norms behind attention and MLP
FOLDABLE = [name for name, case in DENSE.items() if not case.config["model_type"].startswith(SANDWICHED)]


def test_norms_behind_parts_of_a_block_forbid_turning_the_stream():
    assert [name for name in DENSE if fold.can_rotate_stream(ours(name))] == FOLDABLE


def logits_of(model: Decoder, table: Tensor, head: Tensor) -> Tensor:
    """f64 [T, vocab] of the text; `head` behind the last norm."""
    step = model.begin(torch.arange(len(token_ids())), NoCache(model.cache_layout()), len(token_ids()))
    x = table[token_ids()] * model.embed_scale
    for block in model.layers:
        x = block(x, step)
    return F.linear(model.norm(x), head)


def doubled(name: str) -> Decoder:
    """Its own copy, in f64."""
    model = copy.deepcopy(built(name)).double()
    model.make_tables(CONTEXT, "cpu")
    return model


@pytest.mark.parametrize("name", FOLDABLE)
def test_a_turned_model_has_the_same_logits(name):
    """In f64 but for the turned weights, which are rounded to f32: 2^-24 each, through five layers."""
    model = doubled(name)
    table = model.embed_tokens.weight.data
    head = table if model.lm_head is None else model.lm_head.weight.data
    with torch.inference_mode():
        expected = logits_of(model, table, head)
        before = copy.deepcopy(model.layers)
        turn = fold.random_rotation(model.config.hidden, 9)
        for index, block in enumerate(model.layers):
            fold.fold_block(block, turn, index)
        scale = model.norm.factor.clone()
        model.norm.weight.data = torch.full_like(model.norm.weight, model.norm.neutral)
        model.norm.finish()
        turned_head = fold.rotate_rows(head * (scale / model.norm.factor), turn).double()
        got = logits_of(model, fold.rotate_rows(table, turn).double(), turned_head)
    assert expected.std() > 0.5
    assert (got - expected).norm() <= 2**-24 * 40 * expected.norm()
    for one, other in zip(_weights(before), _weights(model.layers), strict=True):
        assert not torch.equal(one, other)


@pytest.mark.parametrize("name", [name for name in DENSE if name not in FOLDABLE])
def test_values_are_turned_where_the_stream_is_not(name):
    model = ours(name)
    block, x = copy.deepcopy(model.layers[1]), model.embed(token_ids()).detach()
    step = model.begin(torch.arange(len(x)), NoCache(), len(x))
    with torch.inference_mode():
        expected, others = block(x, step), block.mlp.down_proj.weight.clone()
        out, value = block.self_attn.o_proj.weight.clone(), block.self_attn.v_proj.weight.clone()
        fold.fold_block(block, None, 4)
        got = block(x, step)
    assert (got - expected).norm() <= 2**-24 * 100 * expected.norm()  # all in f32
    assert torch.equal(block.mlp.down_proj.weight, others)
    # A gate behind the values would multiply other ones.
    assert torch.equal(block.self_attn.o_proj.weight, out) == block.self_attn.is_gated
    assert torch.equal(block.self_attn.v_proj.weight, value) == block.self_attn.is_gated


def _weights(layers: nn.ModuleList) -> list[Tensor]:
    return [module.weight for module in layers.modules() if isinstance(module, nn.Linear)]


def test_only_plain_linears_are_turned():
    assert isinstance(fold.plain_linear(nn.Linear(2, 3)), nn.Linear)
    with pytest.raises(TypeError, match="Embedding"):
        fold.plain_linear(nn.Embedding(2, 3))

"""Mamba-2: chunks against the recurrence, passes of any length against transformers, states copied or replayed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from localq.engine.cache import KVCache
from localq.errors import LocalqError
from localq.files import mamba_memory
from localq.files.layer_caches import RecurrentState
from localq.models import ARCHITECTURES
from localq.models.layers import DraftedInputs, empty_state
from localq.models.mamba2 import GatedRMSNorm, Mamba2, MambaShape, chunk, token
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME
from tests.support.models.tiny_models import logits_of_passes

NAME = "nemotron-h"
LONG = 2 * mamba_memory.CHUNK + 50
SHAPE = MambaShape(heads=6, head_dim=5, groups=2, state=7, kernel=4, norm_groups=3)


def _operands(tokens, decay=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    queries, keys = (torch.randn(tokens, 2, 7, generator=generator) for _ in range(2))
    values = torch.randn(tokens, 6, 5, generator=generator)
    rates = -decay * torch.rand(tokens, 6, generator=generator)
    return [each.to(dtype) for each in (queries, keys, values, rates, torch.randn(6, 7, 5, generator=generator))]


@pytest.mark.parametrize("tokens", [1, 2, 31, 128])
@pytest.mark.parametrize("decay", [0.0, 0.1, 100.0])
def test_a_chunk_is_the_rule_token_by_token(tokens, decay):
    *operands, matrix = _operands(tokens, decay)
    expected = matrix.clone()
    rows = [token(*(each[at : at + 1] for each in operands), expected) for at in range(tokens)]
    torch.testing.assert_close(chunk(*operands, matrix), torch.cat(rows), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(matrix, expected, rtol=1e-4, atol=1e-4)


def test_the_rule_is_what_its_equations_say():
    queries, keys, values, rates, matrix = _operands(1, dtype=torch.float64)
    before = matrix.clone()
    out = token(queries, keys, values, rates, matrix)
    for head in range(6):
        after = rates[0, head].exp() * before[head] + torch.outer(keys[0, head // 3], values[0, head])
        torch.testing.assert_close(matrix[head], after)
        torch.testing.assert_close(out[0, head], after.T @ queries[0, head // 3])


def test_the_norm_is_of_groups_and_behind_the_gate():
    norm = GatedRMSNorm(12, 3, 1e-5)
    x, gate, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 12), (2, 12), (12,)))
    norm.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
    gated = (x * gate / (1 + torch.exp(-gate))).view(2, 3, 4)
    expected = (gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(2, 12) * weight
    torch.testing.assert_close(norm.gated(x.float(), gate.float()), expected.float(), rtol=1e-4, atol=1e-5)


def test_heads_that_groups_cannot_share_are_refused():
    with pytest.raises(LocalqError, match="4 does not divide the number of Mamba heads, 6"):
        MambaShape(6, 5, 4, 7, 4, 1)


@pytest.fixture(scope="module")
def long_text():
    ids = torch.randint(3, 131, (LONG,), generator=torch.Generator().manual_seed(7))
    model = tiny_models.built(NAME)
    model.make_tables(LONG, "cpu")
    with torch.no_grad():
        return ids, model, tiny_models.reference(BY_NAME[NAME])(ids[None], use_cache=False).logits[0]


def _cache(model):
    return KVCache(model.cache_layout(), LONG, torch.float32, "cpu")


@pytest.mark.parametrize("passes", [(LONG - 8,), (127, 128, 3), (129, 1, 130), (2, 5)], ids=lambda each: str(each[0]))
def test_passes_of_any_length_and_cached_steps_give_the_logits_of_transformers(long_text, passes):
    ids, model, expected = long_text
    passes = (*passes, *(1,) * 8)
    logits = logits_of_passes(model, ids, _cache(model), 0, passes)
    torch.testing.assert_close(logits, expected[: sum(passes)], rtol=0, atol=1e-4)


def test_a_copied_state_gives_the_same_bits_again(long_text):
    ids, model, _ = long_text
    cache = _cache(model)
    logits_of_passes(model, ids, cache, 0, (70, 1, 1))
    states = [layer for layer, kept in enumerate(cache.layout) if isinstance(kept, RecurrentState)]
    copies = {layer: [part.clone() for part in cache.state(layer)] for layer in states}
    first = logits_of_passes(model, ids, cache, 72, (66, 1, 1))
    assert all(not cache.state(layer).matrix.equal(copies[layer][0]) for layer in states), "the state has moved on"
    for layer, parts in copies.items():
        for part, kept in zip(cache.state(layer), parts, strict=True):
            part.copy_(kept)
    assert logits_of_passes(model, ids, cache, 72, (66, 1, 1)).equal(first)


def _layer():
    layer = Mamba2(SHAPE, 8, 0, 1e-5)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return layer.requires_grad_(False), torch.randn(5, 8, generator=generator)


def _step(state, drafted=None):
    cache = SimpleNamespace(state=lambda layer: state, drafted=lambda layer: drafted)
    return SimpleNamespace(cache=cache)


@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_drafted_tokens_change_the_state_once_they_are_replayed(accepted):
    layer, x = _layer()
    kept = SHAPE.cache
    state, plain = (empty_state(kept, torch.float32, "cpu") for _ in range(2))
    drafted = DraftedInputs(torch.zeros(4, kept.channels), *(torch.zeros(4, kept.heads) for _ in range(2)))
    looked = layer(x, _step(state, drafted))
    alone = torch.cat([layer(row[None], _step(plain)) for row in x[:1]])
    torch.testing.assert_close(tuple(state), tuple(plain), msg="it moves on by one token")
    torch.testing.assert_close(looked[:1], alone)
    layer.replay(drafted, accepted, state)
    rows = [layer(row[None], _step(plain)) for row in x[1 : 1 + accepted]]
    torch.testing.assert_close(tuple(state), tuple(plain))
    if rows:
        torch.testing.assert_close(looked[1 : 1 + accepted], torch.cat(rows))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("the bias of the convolution", lambda layer: layer.conv1d.bias.zero_()),
        ("what passes the heads by", lambda layer: layer.D.zero_()),
        ("the bias of the steps", lambda layer: layer.dt_bias.zero_()),
        ("the groups of the norm", lambda layer: setattr(layer.norm, "groups", 1)),
    ],
)
def test_every_part_is_seen_in_the_logits(long_text, part, change):
    ids, model, expected = long_text
    with torch.no_grad():
        for block in model.layers:
            if hasattr(block, "mamba"):
                change(block.mamba)
    try:
        found = logits_of_passes(model, ids[:40], _cache(model), 0, (40,))
    finally:
        fresh = dict(tiny_models.ours(NAME).named_parameters())
        for name, parameter in model.named_parameters():
            parameter.data.copy_(fresh[name])
        for block in model.layers:
            if hasattr(block, "mamba"):
                block.mamba.norm.groups = 2
    assert (found - expected[:40]).abs().max() > 1e-2


@pytest.mark.parametrize("key", ["moe_latent_size", "sliding_window", "use_bias", "tie_word_embeddings"])
def test_what_no_published_model_has_is_refused_by_name(key):
    config = {**BY_NAME[NAME].config, key: 8 if key.endswith(("size", "window")) else True}
    with pytest.raises(LocalqError, match=key):
        ARCHITECTURES["nemotron_h"].Config.from_dict(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hybrid_override_pattern": "MX*", "layers_block_type": None}, "unknown layer type: 'X'"),
        ({"layers_block_type": ["mamba", 3]}, "unknown layer type: '3'"),
        ({"layers_block_type": []}, "must list 1 to 256 layer names"),
        ({"layers_block_type": None}, "must list 1 to 256 layer names"),
        ({"n_groups": 4}, "4 does not divide the number of Mamba heads"),
        ({"num_experts_per_tok": 7}, "7 experts per token are requested"),
        ({"n_group": 4}, "4 groups"),
        (
            {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3},
            "3 of 6 experts cannot come from 1 of 3 groups",
        ),
        ({"n_group": 6, "topk_group": 6}, "fewer than two per group"),
        ({"ssm_state_size": 0}, "not between 1 and 1024"),
        ({"conv_kernel": 1000}, "not between 1 and 64"),
    ],
)
def test_values_that_no_model_can_have_are_refused(fields, words):
    with pytest.raises(LocalqError, match=words):
        ARCHITECTURES["nemotron_h"].Config.from_dict({**BY_NAME[NAME].config, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mamba_conv_bias": False}, "mamba_conv_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["mamba", "moe", "mamba", "mamba", "mamba"]}, "unknown layer type: 'moe'"),
        ({"layer_types": ["mamba"]}, "layer_types is not a list of 5 names"),
        ({"mamba_d_head": 25}, "does not equal mamba_expand times hidden_size"),
        ({"mamba_d_head": "wide"}, "mamba_d_head has an invalid value: wide"),
        ({"mamba_d_state": 5000}, "not between 1 and 1024"),
        ({"num_experts_per_tok": 6}, "6 experts per token are requested"),
        ({"residual_multiplier": 0}, "residual_multiplier"),
    ],
)
def test_values_of_a_granite_that_no_model_has_are_refused(fields, words):
    with pytest.raises(LocalqError, match=words):
        ARCHITECTURES["granitemoehybrid"].Config.from_dict({**BY_NAME["granite-hybrid"].config, **fields})

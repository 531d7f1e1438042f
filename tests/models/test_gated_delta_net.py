"""Gated delta nets and gated attention: against transformers in passes of any length, from a copied state, and with
what sets them apart left out."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from localq.engine.cache import KVCache
from localq.errors import LocalqError
from localq.files import delta_memory
from localq.files.layer_caches import RecurrentState
from localq.models import ARCHITECTURES, experts, gated_delta_net, qwen3_5
from localq.models.attention import Projected
from localq.models.gated_delta_net import chunks, token
from localq.models.layers import DraftedInputs, OffsetRMSNorm, empty_state
from tests.support.engine.live_memory import LiveMemory
from tests.support.kernels import reference_kernels
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME
from tests.support.models.tiny_models import logits_in_steps, logits_of_passes, reference_logits

TOLERANCE = 1e-4  # as in test_families
STEPS = 32
NAMES = ("qwen3.5", "qwen3.5-moe")
LONG = 1024 + 65 + STEPS


@pytest.fixture(scope="module")
def long_text():
    ids = torch.randint(3, 131, (LONG,), generator=torch.Generator().manual_seed(7))
    found = {}
    for name in NAMES:
        reference = tiny_models.reference(BY_NAME[name])
        model = tiny_models.built(name)
        model.make_tables(LONG, "cpu")
        with torch.no_grad():
            found[name] = (model, reference(ids[None], use_cache=False).logits[0])
    return ids, found


def _cache(model):
    return KVCache(model.cache_layout(), LONG, torch.float32, "cpu")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "passes", [(1,) * 20, (63, 63), (64, 64, 64), (65, 65), (3, 2, 5), (1024, 65)], ids=lambda each: str(each[0])
)
def test_passes_of_any_length_and_cached_steps_give_the_logits_of_transformers(long_text, name, passes):
    ids, found = long_text
    model, expected = found[name]
    passes = (*passes, *(1,) * STEPS)
    logits = logits_of_passes(model, ids, _cache(model), 0, passes)
    torch.testing.assert_close(logits, expected[: sum(passes)], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_state_gives_the_same_bits_again(long_text, name):
    ids, found = long_text
    model, _ = found[name]
    cache = _cache(model)
    logits_of_passes(model, ids, cache, 0, (70, 1, 1))
    states = [layer for layer, kept in enumerate(cache.layout) if isinstance(kept, RecurrentState)]
    copies = {layer: [part.clone() for part in cache.state(layer)] for layer in states}
    first = logits_of_passes(model, ids, cache, 72, (66, 1, 1))
    after = {layer: [part.clone() for part in cache.state(layer)] for layer in states}
    assert all(not part.equal(copies[layer][0]) for layer, (part, _) in after.items()), "the state has moved on"
    for layer, parts in copies.items():
        for part, kept in zip(cache.state(layer), parts, strict=True):
            part.copy_(kept)
    assert logits_of_passes(model, ids, cache, 72, (66, 1, 1)).equal(first)
    assert all(part.equal(now) for layer in states for part, now in zip(after[layer], cache.state(layer), strict=True))


def _operands(tokens, heads=2, shared=3, key_dim=8, value_dim=5, decay=1.0):
    generator = torch.Generator().manual_seed(tokens)
    q, k = (gated_delta_net.unit(torch.randn(tokens, heads, key_dim, generator=generator)) for _ in range(2))
    v = torch.randn(tokens, heads * shared, value_dim, generator=generator)
    rates = torch.rand(2, tokens, heads * shared, generator=generator)
    return q, k, v, -decay * rates[0], rates[1], torch.randn(heads * shared, key_dim, value_dim, generator=generator)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [0.0, 0.1, 100.0])
def test_chunks_are_the_rule_token_by_token(tokens, decay):
    *operands, matrix = _operands(tokens, decay=decay)
    expected = matrix.clone()
    rows = [token(*(each[at : at + 1] for each in operands), expected) for at in range(tokens)]
    torch.testing.assert_close(chunks(*operands, matrix), torch.cat(rows), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(matrix, expected, rtol=1e-4, atol=1e-5)


def test_gradients_go_through_chunks():
    """As through the equations, token by token; fine-tuning needs them."""
    *leaves, matrix = (each.double() for each in _operands(70))
    leaves = [each.requires_grad_() for each in leaves]
    q, k, v, decay, beta = leaves
    state, rows = matrix.clone(), []
    for at in range(70):
        keys, queries = k[at].repeat_interleave(3, 0), q[at].repeat_interleave(3, 0)
        state = decay[at].exp()[:, None, None] * state
        held = torch.einsum("hkv,hk->hv", state, keys)
        state = state + torch.einsum("hk,hv->hkv", keys, beta[at, :, None] * (v[at] - held))
        rows.append(torch.einsum("hkv,hk->hv", state, queries))
    slope = torch.randn(70, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(torch.stack(rows), leaves, slope)
    found = torch.autograd.grad(chunks(*leaves, matrix), leaves, slope)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_rule_is_what_its_equations_say():
    q, k, v, decay, beta, matrix = (each.double() for each in _operands(1))
    expected = matrix.clone()
    out = token(q, k, v, decay, beta, matrix)
    for head in range(6):
        before = decay[0, head].exp() * expected[head]
        key, query = k[0, head // 3], q[0, head // 3]
        after = before + torch.outer(key, beta[0, head] * (v[0, head] - before.T @ key))
        torch.testing.assert_close(matrix[head], after)
        torch.testing.assert_close(out[0, head], after.T @ query)


def test_heads_go_in_groups_that_bound_the_memory(monkeypatch):
    name = "qwen3.5"
    whole = logits_in_steps(tiny_models.ours(name))
    groups = []
    original = chunks

    def counted(q, *others):
        groups.append(q.shape[1])
        return original(q, *others)

    monkeypatch.setattr(gated_delta_net, "chunks", counted)
    monkeypatch.setattr(delta_memory, "GROUP_BYTES", 1)
    torch.testing.assert_close(logits_in_steps(tiny_models.ours(name)), whole, rtol=0, atol=1e-5)
    assert set(groups) == {1}


@pytest.mark.parametrize(("heads", "shared"), [(4, 3), (8, 1), (16, 2)])
def test_the_temporaries_of_a_group_stay_within_their_estimate(heads, shared):
    tokens, shape = 1000, gated_delta_net.DeltaShape(heads, heads * shared, 128, 128, 4)
    with torch.device("meta"):
        net = gated_delta_net.GatedDeltaNet(shape, 64, 0, 1e-6).half().requires_grad_(False)
        x = torch.zeros(tokens, 64, dtype=torch.float16)
    held = LiveMemory()
    state = empty_state(shape.cache, torch.float16, "meta")
    with torch.inference_mode(), held:
        net.read(x, state)
    outside = 2 * tokens * (shape.channels + shape.value_heads * 128) + 4 * tokens * 2 * shape.value_heads
    planned = delta_memory.rule_bytes(tokens, heads, shared, 128, 128)
    assert 0.8 < (held.peak - outside) / planned <= 1.0


@pytest.mark.parametrize("shared", [1, 3])
def test_a_layer_gives_the_kernels_what_it_gives_torch(shared, monkeypatch):
    """In place of the kernels: their reference, token by token in fp64."""
    shape, dtype = gated_delta_net.DeltaShape(2, 2 * shared, 128, 128, 4), torch.bfloat16
    net, generator = gated_delta_net.GatedDeltaNet(shape, 64, 0, 1e-6), torch.Generator().manual_seed(0)
    for part in net.parameters():
        part.data.copy_(
            torch.randn(part.shape, generator=generator) * (part.shape[-1] ** -0.5 if part.dim() > 1 else 1)
        )
    net = net.to(dtype).requires_grad_(False)
    states = [empty_state(shape.cache, dtype, "cpu") for _ in range(2)]
    monkeypatch.setattr(gated_delta_net.delta_net, "delta_prefill", reference_kernels.delta_prefilled)
    with torch.inference_mode():
        for tokens in (5, 2, 70):
            x = torch.randn(tokens, 64, generator=generator).to(dtype)
            assert not net.has_kernel(x)
            expected = net(x, _pass_over(states[0]))
            with monkeypatch.context() as patch:
                patch.setattr(gated_delta_net.GatedDeltaNet, "has_kernel", lambda net, x: True)
                patch.setattr(gated_delta_net.GatedDeltaNet, "read", None)
                found = net(x, _pass_over(states[1]))
            torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
            assert torch.equal(states[0].columns, states[1].columns)
            torch.testing.assert_close(states[0].matrix, states[1].matrix, rtol=2**-6, atol=2**-8)


# ---- what a wrong implementation does


def _halves(self, x):
    """q_proj as all of q, then all of the gates."""
    q, gate = self.q_proj(x).chunk(2, -1)
    return Projected(q, self.k_proj(x), self.v_proj(x), gate)


def _no_gate(self, x):
    q, _ = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
    return Projected(q, self.k_proj(x), self.v_proj(x))


def _other_heads(q, k, v, decay, beta, matrix):
    """Value head j reads key head j mod H."""
    heads, shared = k.shape[1], v.shape[1] // k.shape[1]
    order = torch.arange(heads * shared).view(shared, heads).T.flatten()
    state = matrix[order].clone()
    out = chunks(q, k, v[:, order], decay[:, order], beta[:, order], state)
    matrix[order] = state
    return out[:, order.argsort()]


def _activated_columns(self, inputs, channels):
    """The convolution's memory holds what it has already activated."""
    return F.silu(original_convolution(self, F.silu(inputs), channels))


def _kept_rates(self, x):
    """g without softplus's bias."""
    decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float())
    return decay, torch.sigmoid(self.in_proj_b(x)).float()


original_convolution = gated_delta_net.ShortConvolution.forward
PATCHES = {
    "q_proj in halves": (qwen3_5.GatedAttention, "project", _halves),
    "no gate of attention": (qwen3_5.GatedAttention, "project", _no_gate),
    "other key heads": (gated_delta_net, "chunks", _other_heads),
    "activated columns": (gated_delta_net.ShortConvolution, "forward", _activated_columns),
    "no bias of the rates": (gated_delta_net.GatedDeltaNet, "rates", _kept_rates),
    "q and k of any length": (gated_delta_net, "unit", lambda x: x),
    "no shared expert": (experts.SharedExpertMixture, "forward", experts.Mixture.forward),
    "a shared expert without its gate": (
        experts.SharedExpertMixture,
        "forward",
        lambda self, x: experts.Mixture.forward(self, x) + self.shared_expert(x),
    ),
}


@pytest.mark.parametrize("wrong", PATCHES)
def test_what_is_left_out_shows_in_the_logits(wrong, monkeypatch):
    name = "qwen3.5-moe"
    monkeypatch.setattr(*PATCHES[wrong])
    difference = (logits_in_steps(tiny_models.built(name)) - reference_logits(name)).abs().max()
    assert difference > 100 * TOLERANCE


@pytest.mark.parametrize("wrong", ["delta nets", "everywhere else"])
def test_only_the_norm_of_delta_nets_multiplies_by_its_weight(wrong):
    name = "qwen3.5"
    model = copy.deepcopy(tiny_models.ours(name))
    for module in model.modules():
        if isinstance(module, gated_delta_net.GatedDeltaNet) and wrong == "delta nets":
            module.norm = _offset(module.norm)
        elif isinstance(module, OffsetRMSNorm) and wrong == "everywhere else":
            module.scale = module.weight.detach().float()
    assert (logits_in_steps(model) - reference_logits(name)).abs().max() > 100 * TOLERANCE


def _offset(norm):
    changed = OffsetRMSNorm(norm.weight.numel(), norm.eps)
    changed.weight = nn.Parameter(norm.weight.detach().clone())
    changed.finish()
    return changed


def test_a_state_that_is_left_where_it_was_shows():
    name = "qwen3.5"
    model = tiny_models.built(name)
    for module in model.modules():
        if isinstance(module, gated_delta_net.GatedDeltaNet):
            module.read = _forgetful(module.read)
    assert (logits_in_steps(model) - reference_logits(name)).abs().max() > 100 * TOLERANCE


def _forgetful(read):
    return lambda x, state: read(x, type(state)(*(part.clone() for part in state)))


# ---- names and facts


def test_keys_of_all_wrappers_name_the_same_parameters():
    rename = qwen3_5.rename
    for key, name in (
        ("layers.0.linear_attn.A_log", "layers.0.linear_attn.A_log"),
        ("layers.3.self_attn.q_proj.weight", "layers.3.self_attn.q_proj.weight"),
        ("layers.0.mlp.gate.weight", "layers.0.mlp.router.weight"),
        ("layers.0.mlp.shared_expert_gate.weight", "layers.0.mlp.shared_expert_gate.weight"),
        ("layers.0.mlp.shared_expert.gate_proj.weight", "layers.0.mlp.shared_expert.gate_proj.weight"),
        ("layers.0.mlp.experts.7.gate_proj.weight", "layers.0.mlp.experts.7.gate_proj.weight"),
        ("embed_tokens.weight", "embed_tokens.weight"),
        ("norm.weight", "norm.weight"),
    ):
        for prefix in ("model.", "model.language_model.", "language_model.model.", "language_model.", ""):
            assert rename(prefix + key) == name
    for prefix in ("", "language_model.", "model.language_model."):
        assert rename(f"{prefix}lm_head.weight") == "lm_head.weight"
    for key in ("model.visual.blocks.0.attn.qkv.weight", "visual.merger.norm.bias", "mtp.fc.weight"):
        assert rename(key) is None
    assert rename("model.language_model.rotary_emb.inv_freq") is None


def test_an_old_and_a_new_config_give_the_same_facts():
    case = BY_NAME["qwen3.5-vision"]
    text = copy.deepcopy(case.config["text_config"])
    flat = {**text, "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20, "beta_fast": 3.0}
    older = {**flat, "rope_parameters": None, "rope_scaling": yarn}
    read = ARCHITECTURES["qwen3_5"].Config.from_dict
    assert read(older) == replace(read(case.config))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"rope_parameters": {"rope_theta": 100.0, "mrope_section": [11, 11]}}, "mrope_section"),
        ({"rope_parameters": {"rope_theta": 100.0, "rope_type": "mrope"}}, "rope_type"),
        ({"num_experts": 4}, "num_experts"),
    ],
)
def test_what_is_not_known_is_refused_by_name(fields, what):
    config = {**BY_NAME["qwen3.5"].config, **fields}
    with pytest.raises(LocalqError, match=what):
        ARCHITECTURES["qwen3_5_text"].Config.from_dict(config)


@pytest.mark.parametrize("fields", [{"mlp_only_layers": [1]}, {"n_shared_experts": 2}, {"num_experts_per_tok": 6}])
def test_mixtures_that_are_not_known_are_refused_by_name(fields):
    config = {**BY_NAME["qwen3.5-moe"].config, **fields}
    with pytest.raises(LocalqError, match=next(iter(fields))):
        ARCHITECTURES["qwen3_5_moe_text"].Config.from_dict(config)


def test_null_is_the_default():
    config = BY_NAME["qwen3.5-moe"].config
    read = ARCHITECTURES["qwen3_5_moe_text"].Config.from_dict
    nothing = {"layer_types": None, "mlp_only_layers": [], "attn_output_gate": None, "hidden_act": None}
    assert read({**config, **nothing, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}) == read(config)


def _pass_over(state):
    cache = SimpleNamespace(state=lambda layer: state, drafted=lambda layer: None)
    return SimpleNamespace(cache=cache)


# ---- drafted tokens


def _exact_net() -> tuple[gated_delta_net.GatedDeltaNet, RecurrentState]:
    """A net whose projections are exact in f32, however many rows are multiplied at once."""
    shape = gated_delta_net.DeltaShape(2, 6, 8, 5, 4)
    net = gated_delta_net.GatedDeltaNet(shape, 16, 0, 1e-6)
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        parameter.data = torch.randint(-3, 4, parameter.shape, generator=generator) / 4
    return net, shape.cache


def _exact_tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, (count, 16), generator=torch.Generator().manual_seed(seed)) / 4


@pytest.mark.parametrize("accepted", range(8))
@torch.inference_mode()
def test_accepted_drafts_are_replayed_to_the_bits_of_single_tokens(accepted):
    net, kept = _exact_net()
    state, plain = (empty_state(kept, torch.float32, "cpu") for _ in range(2))
    drafted = DraftedInputs(torch.full((7, kept.channels), torch.nan), *torch.full((2, 7, kept.heads), torch.nan))
    for seed in range(4):  # steps behind each other
        x = _exact_tokens(8, seed)
        read = net.verify(x, state, drafted)
        for row in range(accepted + 1):
            assert net.read(x[row : row + 1], plain).equal(read[row : row + 1])
            if row == 0:
                assert all(ours.equal(theirs) for ours, theirs in zip(state, plain, strict=True))
        net.replay(drafted, accepted, state)
        assert all(ours.equal(theirs) for ours, theirs in zip(state, plain, strict=True))


@torch.inference_mode()
def test_a_step_with_fewer_drafts_than_the_cache_keeps():
    net, kept = _exact_net()
    state, plain = (empty_state(kept, torch.float32, "cpu") for _ in range(2))
    drafted = DraftedInputs(torch.zeros(7, kept.channels), *torch.zeros(2, 7, kept.heads))
    x = _exact_tokens(3, 9)
    read = net.verify(x, state, drafted)
    assert read.equal(torch.cat([net.read(x[row : row + 1], plain) for row in range(3)]))
    assert not drafted.inputs[2:].any()

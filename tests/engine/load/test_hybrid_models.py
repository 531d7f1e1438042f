"""Whole hybrids as they are published: in every wrapper, with experts in one tensor, in NF4 with parts in 16 bit."""

from __future__ import annotations

import pytest
import torch

from localq.engine.cache import KVCache
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.files.architecture import Architecture
from localq.files.extra_tensors import MORE_TOKENS, TOWERS
from localq.files.model_folder import open_model
from localq.models.gated_delta_net import GatedDeltaNet
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import greedy_of, ids_of, prompt_of
from tests.support.engine.packed_models import packed_model
from tests.support.formats import expert_checkpoints, hybrid_checkpoints
from tests.support.formats.expert_checkpoints import logits, read
from tests.support.formats.hybrid_checkpoints import KINDS, PREFIXES, in_nf4, wrapped

CPU = LoadOptions(device="cpu", dtype="float32")
IDS = tuple(prompt_of(80, seed=3))
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    return {kind: hybrid_checkpoints.source(folder / kind, kind) for kind in KINDS}


def in_steps(model, ctx=512):
    """f32 [T, vocab] of a prompt in two pieces and cached steps."""
    cache = KVCache(model.cache_layout(), ctx, torch.float32, "cpu")
    parts, start = [], 0
    with torch.inference_mode():
        for count in (65, 3, *(1,) * 12):
            stop = start + count
            ids, positions = torch.tensor(IDS[start:stop]), torch.arange(start, stop)
            parts.append(model(ids, positions, cache, stop, last_only=False))
            start = stop
    return torch.cat(parts)


@every_kind
@pytest.mark.parametrize("prefix", ["", *PREFIXES])
def test_every_wrapper_gives_the_logits_of_transformers(kind, prefix, sources, tmp_path):
    expected = logits(sources[kind], IDS)
    assert expected.std() > 0.5, "the comparison needs logits that differ"
    folder = wrapped(tmp_path / "wrapped", sources[kind], prefix) if prefix else sources[kind]
    loaded = load(open_model(folder), CPU)
    torch.testing.assert_close(in_steps(loaded.model), expected, rtol=0, atol=1e-4)
    assert loaded.format == "bf16"
    assert loaded.plan.ledger.components["weights"] == loaded.ledger["weights"]
    assert Architecture.from_config(open_model(folder).config).layer_caches == loaded.model.cache_layout()
    notes = [line for line in loaded.notes if "not needed for text" in line]
    assert bool(notes) == bool(prefix)
    assert all(f"{TOWERS} (2 tensors)" in line and MORE_TOKENS in line for line in notes)


def test_experts_in_one_tensor_give_the_same(sources, tmp_path):
    plain = expert_checkpoints.fused(tmp_path / "fused", sources["qwen3_5_moe"])
    assert any(name.endswith("experts.gate_up_proj") and each.dim() == 3 for name, each in read(plain).items())
    for folder in (plain, wrapped(tmp_path / "wrapped", plain, PREFIXES[0])):
        loaded = load(open_model(folder), CPU)
        torch.testing.assert_close(in_steps(loaded.model), logits(sources["qwen3_5_moe"], IDS), rtol=0, atol=1e-4)


SKIPPED = {
    "rates and gates": lambda name: name.endswith(("in_proj_a.weight", "in_proj_b.weight", "gate.weight")),
    "delta nets": lambda name: ".linear_attn." in name or name.endswith("gate.weight"),
    "some layers": lambda name: ".layers.0." in name or ".layers.1.self_attn." in name,
    "nothing": lambda name: False,
}


@every_kind
@pytest.mark.parametrize("skipped", SKIPPED)
def test_modules_in_16_bit_beside_nf4(kind, skipped, sources, tmp_path):
    packed, plain = in_nf4(tmp_path, sources[kind], SKIPPED[skipped])
    folder = wrapped(tmp_path / "wrapped", packed, PREFIXES[0])
    loaded = load(open_model(folder), CPU)
    assert loaded.format == "nf4"
    torch.testing.assert_close(in_steps(loaded.model), logits(plain, IDS), rtol=0, atol=1e-4)


@every_kind
@pytest.mark.parametrize("skipped", ["rates and gates", "nothing"])
def test_as_on_a_gpu_every_tensor_has_its_place(kind, skipped, sources, tmp_path):
    packed, plain = in_nf4(tmp_path, sources[kind], SKIPPED[skipped])
    model, sizes, places = packed_model(open_model(wrapped(tmp_path / "wrapped", packed, PREFIXES[1])))
    with pytest.raises(ValueError, match="0 bytes are left"):
        places.block(torch.ones(1))
    assert sum(sizes) > 0
    if kind == "qwen3_5_moe":  # only kernels read packed experts
        return
    expected = logits(plain, IDS)
    torch.testing.assert_close(in_steps(model), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_rates_stay_as_exact_as_the_file_has_them(sources, tmp_path):
    held = read(sources["qwen3_5"])
    held |= {name: each.float() + 1e-4 for name, each in held.items() if name.endswith(".A_log")}
    folder = expert_checkpoints.write(tmp_path / "f32", held, sources["qwen3_5"])
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="bfloat16"))
    nets = {name: each for name, each in loaded.model.named_modules() if isinstance(each, GatedDeltaNet)}
    assert len(nets) == 2
    for name, net in nets.items():
        assert net.A_log.dtype == torch.float32
        assert net.A_log.equal(held[f"model.{name}.A_log"])
        assert net.dt_bias.dtype == torch.bfloat16
    assert loaded.plan.ledger.components["weights"] == loaded.ledger["weights"]


@every_kind
def test_a_reply_is_that_of_transformers_and_so_is_a_second(kind, sources):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(sources[kind], dtype=torch.float32).eval()
    engine = Engine(load(open_model(sources[kind]), CPU))
    for seed, length in ((1, 70), (2, 9), (1, 70)):
        prompt = prompt_of(length, seed)
        assert ids_of(engine, prompt, max_tokens=12) == greedy_of(reference, prompt, 12)

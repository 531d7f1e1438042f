"""Experts of a prompt by the launches of `grouped_experts`, against the modules that compute them expert by expert."""

from __future__ import annotations

import pytest
import torch

from localq.engine.load import grouped_experts
from localq.engine.load.grouped_experts import DequantizedExperts, StoredExperts
from localq.formats import FORMATS
from localq.formats.codebooks import vq2
from localq.formats.expert_linears import LinearStack
from localq.formats.linear import SlabLinear, SlabStack
from localq.models.experts import Experts
from localq.models.gpt_oss import ClampedExperts
from localq.models.gpt_oss import Config as GptOssConfig
from tests.support.kernels import reference_kernels

COUNT, ACTIVE, HIDDEN, WIDTH = 6, 2, 128, 64
STACKED = {"mxfp4": StoredExperts, "nf4": StoredExperts, "gptq": DequantizedExperts, "squeezellm": DequantizedExperts}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    torch.manual_seed(0)
    reference_kernels.install(monkeypatch)
    monkeypatch.setattr(grouped_experts.rotation_kernel, "hadamard", lambda x, signs, out: out.copy_(rotated(x, signs)))


def rotated(x, signs):
    from localq.formats.codebooks import rotation

    return rotation.rotate(x, signs)


def experts_of(family: type[Experts] = Experts) -> Experts:
    config = GptOssConfig(
        vocab_size=8, hidden=HIDDEN, layers=1, heads=1, kv_heads=1, head_dim=8, intermediate=WIDTH, max_context=8,
        eps=1e-5, tied=True, activation="silu", attention_scale=1.0, ropes=(None,), windows=(0,), experts=COUNT,
        experts_active=ACTIVE, expert_width=WIDTH,
    )  # fmt: skip
    experts = (Experts(config, bias=False) if family is Experts else family(config)).half().requires_grad_(False)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.05)
    return experts


def slabs(format: str, rows: int, columns: int, seed: int) -> SlabStack:
    return SlabStack(FORMATS[format].Linear(FORMATS[format].sample((COUNT * rows, columns), seed)), COUNT)


def codebooks(rows: list[int], columns: int, *, signs: bool) -> LinearStack:
    def linear(seed: int, out: int) -> SlabLinear:
        made = vq2.Linear(vq2.sample((out, columns), seed))
        made.signs = (torch.arange(columns // 8) % 251).to(torch.uint8) if signs else None
        return made

    return LinearStack([[linear(9 * expert + part, out) for part, out in enumerate(rows)] for expert in range(COUNT)])


def assert_same(experts: Experts, tokens: int = 23) -> grouped_experts.GroupedMixture:
    x, logits = torch.randn(tokens, HIDDEN).half(), torch.randn(tokens, COUNT)
    logits[:, 3] = -9.0  # never chosen
    weights, chosen = logits.softmax(-1).topk(ACTIVE, -1)
    expected = experts(x, weights, chosen)
    found = grouped_experts.of(experts, torch.float16)
    assert found is not None
    got = found(x, weights, chosen)
    assert expected.float().std() > 0
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=4e-3 * float(expected.float().abs().max()))
    return found


@pytest.mark.parametrize("family", [Experts, ClampedExperts], ids=lambda family: family.__name__)
def test_weights_in_16_bit(family):
    found = assert_same(experts_of(family))
    assert isinstance(found.gate_up, StoredExperts)


@pytest.mark.parametrize("format", STACKED)
def test_stacks_of_quantized_formats(format):
    experts = experts_of()
    del experts.gate_up_proj, experts.down_proj
    experts.gate_up_proj, experts.down_proj = slabs(format, 2 * WIDTH, HIDDEN, 1), slabs(format, HIDDEN, WIDTH, 2)
    found = assert_same(experts)
    assert isinstance(found.gate_up, STACKED[format])
    assert isinstance(found.down, STACKED[format])


@pytest.mark.parametrize("room", [1, 4], ids="{} experts".format)
@pytest.mark.parametrize("signs", [False, True], ids=["plain", "rotated"])
def test_codebooks_a_few_experts_at_a_time(signs, room):
    experts = experts_of()
    del experts.gate_up_proj, experts.down_proj
    experts.gate_up_proj = codebooks([WIDTH, WIDTH], HIDDEN, signs=False)
    experts.down_proj = codebooks([HIDDEN], WIDTH, signs=signs)
    for linear in (*experts.gate_up_proj.linears, *experts.down_proj.linears):
        linear.scratch = torch.empty(room * 2 * WIDTH * HIDDEN * 2, dtype=torch.uint8)
    assert_same(experts)


def test_experts_that_rotate_their_inputs_each_in_its_own_way_stay_with_the_modules():
    experts = experts_of()
    del experts.gate_up_proj, experts.down_proj
    experts.gate_up_proj = codebooks([WIDTH, WIDTH], HIDDEN, signs=True)
    experts.down_proj = codebooks([HIDDEN], WIDTH, signs=False)
    assert grouped_experts.of(experts, torch.float16) is None


def test_a_model_computes_its_experts_with_them_once_installed():
    experts = experts_of()
    model = torch.nn.ModuleList([experts])
    x, weights, chosen = torch.randn(5, HIDDEN).half(), torch.rand(5, ACTIVE), torch.randint(COUNT, (5, ACTIVE))
    expected = experts(x, weights, chosen)
    grouped_experts.install(model, torch.float16)
    assert isinstance(experts.grouped, grouped_experts.GroupedMixture)
    torch.testing.assert_close(experts(x, weights, chosen), expected, rtol=1e-2, atol=1e-3)

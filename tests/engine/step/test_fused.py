"""The list of launches, with the kernels' work done by torch: every family must give the logits of its modules.

What the kernels themselves compute is checked on a GPU (`test_fused_on_cuda.py`, `tests/kernels`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from localq.engine.cache import KVCache
from localq.engine.sampler import SamplerState
from localq.engine.step import fused
from localq.engine.step.fused import OPERATIONS, FusedStep
from localq.engine.step.operands import dense_operand, fusable, operand, product
from localq.engine.step.rows import StepBuffers
from localq.engine.step.state import StepState
from localq.files.architecture import Architecture
from localq.formats import mxfp4, nf4, vptq
from localq.formats.codebooks import aqlm
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from localq.formats.nf4 import tiles as nf4_tiles
from localq.formats.nf4.kernel import Nf4Operand
from localq.kernels import delta_net
from localq.kernels.dense import DenseOperand
from localq.kernels.operand import share_tables
from localq.models.attention import Attention
from localq.planner import footprint
from localq.planner.placement import Placement
from localq.tui.instruments import kernel_bars
from tests.support.engine import step_stand_ins
from tests.support.kernels.gather_operands import aqlm_packed, vptq_packed
from tests.support.kernels.nf4_operands import operands
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME, FUSED
from tests.support.models.tiny_models import CONTEXT, PREFILL, TOKENS


def fused_step(model, cache) -> FusedStep:
    device = torch.device("cpu")
    return FusedStep(model, cache, StepState(SamplerState(model.config.vocab_size, CONTEXT, device), device))


def capped(logits, cap):
    return torch.tanh(logits / cap) * cap if cap else logits


def logits_of_launches(model) -> torch.Tensor:
    """f32 [TOKENS - prompt, vocab]: a prefill by the modules, then every token through the launches."""
    ids, prompt = tiny_models.token_ids(), sum(PREFILL)
    cache = KVCache(model.cache_layout(), CONTEXT, model.norm.weight.dtype, "cpu")
    model(ids[:prompt], torch.arange(prompt), cache, prompt)
    step, rows = fused_step(model, cache), []
    for position in range(prompt, TOKENS):
        step.state.token.copy_(ids[position : position + 1])
        step.state.position.fill_(position)
        step.run(greedy=True)
        rows.append(capped(step.logits[0].clone(), step.softcap))
        assert int(step.state.position) == position + 1
        assert int(step.state.chosen) == int(rows[-1].argmax())
        assert int(step.state.token) == int(step.state.chosen)
    return torch.stack(rows)


@pytest.mark.parametrize("name", FUSED)
def test_launches_give_the_logits_of_the_modules(name, monkeypatch):
    step_stand_ins.install(monkeypatch)
    model = tiny_models.ours(name)
    with torch.inference_mode():
        logits = logits_of_launches(model)
        expected = tiny_models.logits_in_steps(model)[sum(PREFILL) :]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("name", FUSED)
def test_several_rows_give_the_logits_of_the_modules(name, rows, monkeypatch):
    step_stand_ins.install(monkeypatch)
    model, ids, found = tiny_models.ours(name), tiny_models.token_ids(), []
    cache, device = KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu", 16, 16, 8), torch.device("cpu")
    state = StepState(SamplerState(model.config.vocab_size, CONTEXT, device), device)
    buffers = StepBuffers(8)
    step = FusedStep(model, cache, state, rows, buffers)
    step.forget_drafts()
    first = sum(PREFILL) if cache.states else 0  # a state of zeros magnifies the roundings of the first tokens
    with torch.inference_mode():
        if first:
            model(ids[:first], torch.arange(first), cache, first)
        for position in range(first, TOKENS - rows + 1, rows):
            cache.make_room(position, rows)
            state.tokens[:rows] = ids[position : position + rows]
            state.position.fill_(position)
            step.forward()
            found.append(capped(step.logits.clone(), step.softcap))
        expected = tiny_models.logits_in_steps(model)[first:]
    logits = torch.cat(found)
    torch.testing.assert_close(logits, expected[: len(logits)], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["gemma2", "gemma3-text", "gpt-oss-sinks", "mistral-window"])
def test_launches_find_their_slots_in_windows_that_slide(name, monkeypatch):
    step_stand_ins.install(monkeypatch)
    model, ids, rows = tiny_models.ours(name), tiny_models.token_ids(), []
    cache = KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu", chunk=5)
    step = fused_step(model, cache)
    with torch.inference_mode():
        for position in range(TOKENS):
            cache.make_room(position, 1)
            step.state.token.copy_(ids[position : position + 1])
            step.state.position.fill_(position)
            step.run(greedy=True)
            rows.append(capped(step.logits[0].clone(), step.softcap))
        expected = tiny_models.logits_in_steps(model)
    assert all(cache.view(window, TOKENS)[0] > 30 for window in model.windows if window)
    torch.testing.assert_close(torch.stack(rows), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "per_layer"),
    [
        ("qwen3", ["qkv", "attention", "o", "gate_up", "down"]),
        ("phi3-window", ["qkv", "attention", "o", "gate_up", "down"]),
        ("gemma2", ["qkv", "attention", "o", "norm", "gate_up", "down", "norm"]),
        ("gpt-oss-sinks", ["qkv", "attention", "o", "router", "gate_up", "down"]),
        ("granite", ["qkv", "attention", "o", "gate_up", "down"]),
        ("exaone4", ["qkv", "attention", "o", "norm", "gate_up", "down", "norm"]),
        ("olmo3", ["qkv", "norm", "norm", "attention", "o", "norm", "gate_up", "down", "norm"]),
    ],
)
def test_a_step_is_five_launches_a_layer_to_nine(name, per_layer, monkeypatch):
    step_stand_ins.install(monkeypatch)
    model = tiny_models.ours(name)
    step = fused_step(model, KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu"))
    operations = [launch.operation for launch in step.launches(greedy=True)]
    assert operations == ["embed", *per_layer * model.config.layers, "head", "sample"]
    assert all(len(name) < kernel_bars.NAME for name in OPERATIONS), "they have a column of their own on the screen"
    assert set(operations) <= set(OPERATIONS)


@pytest.mark.parametrize(("name", "before"), [("qwen3.5", ["down", "qkv"]), ("muse-glimmer", ["qkv", "qkv"])])
def test_a_gate_costs_attention_no_launch_but_the_product_of_its_own_matrix(name, before, monkeypatch):
    step_stand_ins.install(monkeypatch)
    model = tiny_models.ours(name)
    step = fused_step(model, KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu"))
    operations = [launch.operation for launch in step.launches(greedy=True)]
    places = [index for index, each in enumerate(operations) if each == "attention"]
    gated = [block.mixer() for block in model.layers if isinstance(block.mixer(), Attention)]
    assert len(places) == len(gated) > 0
    assert all([*before, "attention", "o"] == operations[index - 2 : index + 2] for index in places)
    assert all(part.is_gated for part in gated)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nemotron-h", "Mamba-2 layers"), ("nemotron-h-dense", "Mamba-2 layers"),
        ("granite-hybrid", "Mamba-2 layers and multipliers"), ("granite-turning", "Mamba-2 layers and multipliers"),
        ("laguna", "per-head gates"), ("cohere2-moe", "parallel blocks"),
        ("glm4-lite", "latent attention"),
    ],
)  # fmt: skip
def test_families_without_kernels_name_what_is_missing(name, what):
    assert fused.why_not(tiny_models.built(name, torch.bfloat16)) == f"no kernel supports {what}"


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma2", "muse-glimmer", "qwen3.5", "qwen3.5-moe", "lfm2-conv", "lfm2-moe", "olmo3", "granite"]
)
def test_buffers_are_those_of_the_plan_to_the_byte(name, monkeypatch):
    step_stand_ins.install(monkeypatch)
    monkeypatch.setattr(delta_net, "DIM", 18)  # columns of a value head, which the kernel fixes
    model = tiny_models.ours(name)
    step = fused_step(model, KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu"))
    arch = Architecture.from_config(BY_NAME[name].config)
    assert step.bytes() == footprint.fixed_bytes(arch, "bf16", "", None, Placement(), 4)["step_buffers"]


BUFFERS = [
    "qwen3",
    "gemma2",
    "muse-glimmer",
    "gpt-oss-sinks",
    "qwen3.5",
    "qwen3.5-moe",
    "lfm2-conv",
    "lfm2-moe",
    "olmo3",
]


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_steps_of_several_rows_are_those_of_the_plan_to_the_byte(name, monkeypatch):
    step_stand_ins.install(monkeypatch)
    monkeypatch.setattr(delta_net, "DIM", 18)  # columns of a value head, which the kernel fixes
    model, cpu = tiny_models.ours(name), torch.device("cpu")
    cache = KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu")
    state = StepState(SamplerState(model.config.vocab_size, CONTEXT, cpu), cpu)
    buffers = StepBuffers(8)
    steps = [FusedStep(model, cache, state, rows, buffers) for rows in (1, 2, 4, 8)]
    if cache.states:
        steps.append(FusedStep(model, cache, state, 1, buffers, replays=True))
    arch = Architecture.from_config(BY_NAME[name].config)
    planned = footprint.fixed_bytes(arch, "bf16", "", None, Placement(rows=8), 4)["step_buffers"]
    assert buffers.bytes() + sum(each.own_bytes() for each in steps) == planned


def test_bytes_of_the_launches_are_all_weights_once_and_the_cache(monkeypatch):
    step_stand_ins.install(monkeypatch)
    model = tiny_models.ours("qwen3")  # tied: the table is the head
    cache = KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu")
    launches = fused_step(model, cache).launches(greedy=True)
    products = [launch for launch in launches if launch.operation in ("qkv", "o", "gate_up", "down", "head")]
    moved = sum(launch.bytes(1) for launch in products)
    weights = sum(parameter.nbytes for name, parameter in model.named_parameters() if "q_norm" not in name)
    weights -= sum(parameter.nbytes for name, parameter in model.named_parameters() if "k_norm" in name)
    config = model.config
    activations = config.layers * (6 * config.hidden + 2 * config.intermediate)  # x thrice, out and residual twice
    activations += config.layers * (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    activations += config.hidden + config.vocab_size
    assert moved == weights + 4 * activations


def test_gate_and_up_of_one_matrix_that_cannot_be_cut(monkeypatch):
    step_stand_ins.install(monkeypatch)
    monkeypatch.setattr(DenseOperand, "halves", lambda whole: None)
    model = tiny_models.ours("phi3-window")
    with torch.inference_mode():
        logits = logits_of_launches(model)
        expected = tiny_models.logits_in_steps(model)[sum(PREFILL) :]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


def test_a_model_without_kernels_says_what_is_missing():
    assert "float32" in fused.why_not(tiny_models.ours("qwen3"))


def test_halves_of_plain_weights_are_views():
    linear = nn.Linear(8, 6)
    first, second = dense_operand(linear.weight, linear.bias).halves()
    assert torch.equal(torch.cat((first.weight, second.weight)), linear.weight)
    assert torch.equal(torch.cat((first.bias, second.bias)), linear.bias)
    assert second.weight.data_ptr() == linear.weight[3:].data_ptr()
    assert fusable([first, second])
    assert dense_operand(nn.Linear(8, 5).weight).halves() is None


def nf4_operand(shape: tuple[int, int], nested: bool = True) -> Nf4Operand:
    """A matrix of NF4 in the tiled order."""
    packed = operands(shape, nested).packed
    codes, absmax = nf4_tiles.tile(packed.codes, packed.absmax, shape)
    offset = 0.0 if packed.offset is None else float(packed.offset)
    scales = (absmax, packed.nested_absmax, packed.nested_map)
    return Nf4Operand(codes, *scales, offset, nf4.CODE_MAP, *shape, tiled=True)


def weights_of(matrix: Nf4Operand) -> torch.Tensor:
    shape = (matrix.out_features, matrix.in_features)
    codes, absmax = nf4_tiles.untile(matrix.codes, matrix.absmax, shape)
    offset = None if matrix.nested_absmax is None else torch.tensor(matrix.offset)
    codes = codes.reshape(shape[0], -1)
    packed = nf4.Packed(codes, absmax, matrix.nested_absmax, matrix.nested_map, offset, shape, torch.float16)
    return nf4.dequantize(packed, torch.float32)


@pytest.mark.parametrize(("shape", "nested"), [((128, 256), True), ((64, 1024), True), ((96, 192), False)])
def test_halves_of_tiled_nf4_are_the_halves_of_its_rows(shape, nested):
    whole = nf4_operand(shape, nested)
    first, second = whole.halves()
    joined = torch.cat((weights_of(first), weights_of(second)))
    assert torch.equal(joined, weights_of(whole))
    assert first.bytes() + second.bytes() == whole.bytes()


def test_nf4_of_one_launch_reads_one_set_of_tables():
    pair = [nf4_operand((64, 128)), nf4_operand((32, 128))]
    pair[1] = replace(pair[1], code_map=nf4.CODE_MAP.clone())
    assert not fusable(pair)
    assert fusable(share_tables(pair))
    other = replace(pair[1], nested_map=pair[1].nested_map + 1)
    assert not fusable(share_tables([pair[0], other]))
    row_wise = replace(pair[1], tiled=False)
    assert not fusable(share_tables([pair[0], row_wise]))
    assert not fusable([pair[0], dense_operand(torch.empty(32, 128))])


@pytest.mark.parametrize("shape", [(80, 512), (64, 192)], ids=["inside a tile", "inside a nested block"])
def test_nf4_that_cannot_be_cut_in_half_is_left_whole(shape):
    assert nf4_operand(shape).halves() is None


def test_what_is_gathered_is_an_operand_of_its_own_kind():
    gathered = [aqlm.Linear(aqlm_packed((40, 64), torch.float16, seed, (1, 512, 1, 8))) for seed in (1, 2)]
    permuted = [vptq.Linear(vptq_packed((40, 64), torch.float16, seed, (8, 64, 16))) for seed in (1, 2)]
    for linears in (gathered, permuted):
        pair = [operand(linear) for linear in linears]
        assert fusable(pair)
        assert pair[0].halves() is None
        assert pair[0].bytes() == sum(each.nbytes for each in linears[0].buffers())
        assert not pair[0].readable(torch.float16)  # on the CPU
    assert not fusable([operand(gathered[0]), operand(permuted[0])])
    other = operand(aqlm.Linear(aqlm_packed((40, 64), torch.float16, 1, (1, 1024, 1, 8))))
    assert not fusable([operand(gathered[0]), other])
    other = operand(vptq.Linear(vptq_packed((40, 64), torch.float16, 1, (8, 64, 0))))
    assert not fusable([operand(permuted[0]), other])


def test_linears_in_mxfp4_go_into_one_launch(monkeypatch):
    linears = [mxfp4.Linear(mxfp4.quantize(torch.randn(out, 128)), torch.randn(out)) for out in (40, 24)]
    pair = [operand(linear) for linear in linears]
    assert fusable(pair)
    assert not fusable([pair[0], dense_operand(torch.empty(40, 128))])
    assert [each.bytes() for each in pair] == [out * 128 * 17 // 32 + 4 * out for out in (40, 24)]
    assert operand(mxfp4.Linear(mxfp4.quantize(torch.randn(8, 96)))) is None  # no whole 64 columns
    asked = []
    monkeypatch.setattr(mxfp4_kernel, "mxfp4_gemv", lambda x, operands, **around: asked.append(operands))
    product(torch.zeros(1, 128), pair, out=torch.empty(1, 64))
    assert [each.codes.shape for each in asked[0]] == [(40, 64), (24, 64)]
    assert [each.bias for each in asked[0]] == [linear.bias for linear in linears]


def test_codebooks_are_read_beside_x_of_their_type(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    for linear in (
        aqlm.Linear(aqlm_packed((40, 64), torch.bfloat16, 1, (1, 512, 1, 8))),
        vptq.Linear(vptq_packed((40, 64), torch.bfloat16, 1, (8, 64, 0))),
    ):
        assert operand(linear).readable(torch.bfloat16)
        assert not operand(linear).readable(torch.float16)


def test_layouts_that_no_kernel_gathers_are_no_operands():
    assert operand(aqlm.Linear(aqlm_packed((40, 64), torch.float16, 1, (3, 512, 1, 8)))) is None
    assert operand(vptq.Linear(vptq_packed((40, 64), torch.float16, 1, (12, 64, 0)))) is None
    assert operand(vptq.Linear(vptq_packed((40, 68), torch.float16, 1, (8, 64, 0), outliers=(4, 4, 16)))) is None


def test_other_modules_are_no_operands():
    assert operand(nn.Conv1d(4, 4, 1)) is None
    assert not operand(nn.Linear(8, 4)).readable()  # on the CPU, in float32


def test_bytes_of_a_mixture_are_those_of_the_chosen_experts(monkeypatch):
    step_stand_ins.install(monkeypatch)
    model = tiny_models.ours("gpt-oss-sinks")
    step = fused_step(model, KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu"))
    moved = dict.fromkeys(("router", "gate_up", "down"), 0)
    for launch in step.launches(greedy=True):
        if launch.operation in moved:
            moved[launch.operation] += launch.bytes(1)
    config, mixture = model.config, model.layers[0].mlp
    experts, active, width = mixture.experts, config.experts_active, config.expert_width
    norm = hidden = 4 * config.hidden
    share = lambda tensor: tensor.nbytes * active // config.experts  # noqa: E731
    assert moved["router"] == config.layers * (sum(each.nbytes for each in mixture.router.parameters()) + norm + hidden)
    opened = share(experts.gate_up_proj) + share(experts.gate_up_proj_bias) + norm + hidden + 4 * active * width
    assert moved["gate_up"] == config.layers * opened
    closed = share(experts.down_proj) + share(experts.down_proj_bias) + 4 * active * width + 2 * hidden
    assert moved["down"] == config.layers * closed


def test_experts_that_no_kernel_reads_are_named():
    mixture = tiny_models.ours("gpt-oss-sinks", torch.bfloat16).layers[0].mlp
    assert "[5, 72, 92]" in fused.why_no_experts(mixture, torch.bfloat16)  # 92 columns are no whole 16-byte loads
    assert "torch.float16" in fused.why_no_experts(mixture, torch.float16)
    wanted, mixture.router.active = mixture.router.active, 17
    try:
        assert "17 of 5 experts per token" in fused.why_no_experts(mixture, torch.bfloat16)
    finally:
        mixture.router.active = wanted

"""Mixtures in 2 bits: the tokens of an expert that is seldom visited, and whole models against transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localq import kernels
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.formats import FORMATS, owner
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import ARCHITECTURES
from localq.models.unstacked_experts import unstack
from localq.quantize import by_layer, memory
from localq.quantize.model import expert_tokens
from localq.quantize.settings import ConversionSettings, Effort, Tuning
from tests.support.formats.expert_checkpoints import fused, logits, read, source, write
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests
from tests.support.quantize.vq2_conversions import QUICK, converted, loaded, request, windows
from tests.support.quantize.vq2_conversions import logits as of_window

needs_search = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")
KINDS = ("mixtral", "qwen3_moe")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {kind: source(folder / kind, kind) for kind in KINDS}


# ---- which tokens an expert is quantized on


def test_an_expert_has_its_tokens_and_borrows_evenly_where_they_are_few():
    chosen = [torch.tensor([[0, 1]] * 20), torch.tensor([[2, 1]] * 20)]
    for least, own, borrowed in ((0, (20, 0), (0, 0)), (20, (20, 0), (0, 0)), (24, (20, 0), (0, 4)),
                                 (99, (20, 0), (0, 20))):  # fmt: skip
        found = expert_tokens.tokens_of(chosen, 0, least)
        assert tuple(len(mine) for mine, _ in found) == own
        assert tuple(len(lent) for _, lent in found) == borrowed
    (_, first), (_, second) = expert_tokens.tokens_of(chosen, 0, 24)
    assert second.tolist() == [0, 5, 10, 15]
    never = expert_tokens.tokens_of(chosen, 7, 8)
    assert [lent.tolist() for _, lent in never] == [[0, 5, 10, 15], [0, 5, 10, 15]]
    assert len(first) == 0


def test_what_is_borrowed_counts_a_quarter(sources):
    files = open_model(sources["qwen3_moe"])
    model = ARCHITECTURES["qwen3_moe"].Model(ARCHITECTURES["qwen3_moe"].Config.from_dict(files.config))
    block = unstack(model.layers[0]).to_empty(device="cpu")
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter.requires_grad_(False), std=0.1)
    full, x = torch.randn(6, 128), torch.randn(6, 128)

    class Held:
        device = torch.device("cpu")

    streams = Held()
    streams.x, streams.full = [x], [full]
    chosen = [torch.tensor([[0, 1, 2], [0, 3, 4], [1, 2, 3], [1, 2, 4], [0, 1, 3], [4, 2, 3]])]
    got = expert_tokens.gather(block, block, 0, False, chosen, streams, 128)
    normed = block.norms().before_mlp(x)
    own, others = normed[[0, 1, 4]], normed[[2, 3, 5]]
    torch.testing.assert_close(got._moments, own.T @ own + others.T @ others / 4, rtol=0, atol=1e-5)
    assert got.tokens == 6
    one, inputs = block.mlp.expert(0), torch.cat((own, 0.5 * others))
    gated = (one.activation(one.gate_proj(normed)) * one.up_proj(normed))[[0, 1, 4, 2, 3, 5]]
    gated[3:] *= 0.5
    down = expert_tokens.gather(block, block, 0, True, chosen, streams, 64)
    torch.testing.assert_close(down._moments, gated.T @ gated, rtol=0, atol=1e-5)
    assert len(inputs) == len(gated)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_with_linears_of_its_own_is_the_mixture(kind, sources):
    model = loaded(sources[kind]).model
    block = model.layers[0]
    x = torch.randn(9, 128)
    expected = block.mlp(x)
    opened = unstack(copy.deepcopy(block))
    of, width = block.mlp.experts, block.mlp.experts.width
    opened.mlp.router = block.mlp.router
    for number in range(of.count):
        one = opened.mlp.expert(number)
        one.gate_proj.weight = torch.nn.Parameter(of.gate_up_proj[number, :width])
        one.up_proj.weight = torch.nn.Parameter(of.gate_up_proj[number, width:])
        one.down_proj.weight = torch.nn.Parameter(of.down_proj[number])
    torch.testing.assert_close(opened.mlp(x), expected, rtol=0, atol=1e-5)


def test_what_a_mixture_takes_of_the_device_is_counted_by_its_first_expert(sources):
    files = open_model(sources["mixtral"])
    with torch.device("meta"):
        model = ARCHITECTURES["mixtral"].Model(ARCHITECTURES["mixtral"].Config.from_dict(files.config))
    settings = ConversionSettings(Effort(), (), on_host=True)
    found = memory.count(unstack(model.layers[0]), 128, 64, settings, device="cpu", rotated=True)
    groups = {stage.removeprefix("codes of ") for stage in found.stages if stage.startswith("codes of ")}
    assert groups == {"self_attn.q_proj", "self_attn.o_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.down_proj"}
    all_experts = 4 * 3 * 128 * 192
    assert found.stages["a forward pass"] == 2 * 4 * all_experts + 4 * 64 * (4 * 128 + 2 * 192)


# ---- whole models


def plain(folder: Path, out: Path) -> Path:
    """The model of `out` with the weights that it stands for, in float32."""
    held: dict[str, Tensor] = {}
    with open_checkpoint(open_model(out)) as checkpoint:
        tensors = checkpoint.tensors
        owned: set[str] = set()
        for key in tensors:
            if (found := owner(tensors, key)) is None:
                continue
            format, prefix = found
            module = FORMATS[format]
            packed = module.from_checkpoint(checkpoint, prefix)
            held[f"{prefix}.weight"] = module.dequantize(packed, torch.float32)
            owned |= {prefix + suffix for suffix in module.suffixes}
        rest = [key for key in tensors if key not in owned and not key.endswith((".codebook", ".weight.absmax"))]
        held |= {key: checkpoint.read(key).float() for key in rest if key not in held and ".weight." not in key}
    return write(folder, held, out, quantization_config=None, dtype="float32")


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@needs_search
@pytest.mark.parametrize(("kind", "format"), [("mixtral", "vq2"), ("qwen3_moe", "aqlm2x8"), ("qwen3_moe", "vq2")])
def test_a_mixture_in_two_bits_gives_the_logits_of_transformers(kind, format, sources, tmp_path):
    out = converted(sources[kind], tmp_path / "out", format=format)
    ids = windows()[0]
    got = of_window(loaded(out), ids)
    torch.testing.assert_close(got, logits(plain(tmp_path / "plain", out), tuple(ids)), rtol=0, atol=2e-3)
    assert relative(got, of_window(loaded(sources[kind]), ids)) < 0.75  # 1.4 where a rotation is not taken back


@needs_search
def test_a_mixture_as_transformers_5_holds_it_is_the_same_mixture(sources, tmp_path):
    """Its experts are one tensor; what is written has the names that are published."""
    one = converted(sources["mixtral"], tmp_path / "one")
    other = converted(fused(tmp_path / "fused", sources["mixtral"]), tmp_path / "other")
    ours, theirs = read(one), read(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@needs_search
def test_dense_layers_among_them_and_a_kill_change_nothing(tmp_path, monkeypatch):
    """The down projection of a dense layer is wider than that of an expert; fine-tuning goes through the router."""
    model = make_checkpoint(tmp_path / "m", "qwen3_moe", num_hidden_layers=3)
    settings = {"tuning": Tuning(steps=2, sequences=2), "windows": windows(3)}
    whole = converted(model, tmp_path / "whole", **settings)
    write, written = by_layer.ShardWriter.write, []

    def killed(self, planned, tensors):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(planned.name)
        write(self, planned, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(by_layer.ShardWriter, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            converted(model, tmp_path / "cut", **settings)
    assert digests(converted(model, tmp_path / "cut", **settings)) == digests(whole)
    assert of_window(loaded(whole), windows()[0]).isfinite().all()


@needs_search
def test_experts_that_the_text_never_visits_are_quantized_on_what_it_sends_elsewhere(sources, tmp_path, monkeypatch):
    """The text is told to go to the first two of four experts; the model that is made uses all of them."""
    monkeypatch.setattr(
        expert_tokens, "choices", lambda made, streams: [torch.tensor([[0, 1]] * len(x)) for x in streams.x]
    )
    out = converted(sources["mixtral"], tmp_path / "out")
    ids = windows()[0]
    assert relative(of_window(loaded(out), ids), of_window(loaded(sources["mixtral"]), ids)) < 0.75


@needs_search
def test_bits_are_not_mixed_among_experts(sources, tmp_path):
    with pytest.raises(LocalqError, match="a mixture-of-experts model must use the same bit width") as caught:
        by_layer.convert(request(sources["mixtral"], tmp_path / "out", bits=2.3, effort=QUICK))
    assert caught.value.exit_code == ExitCode.USAGE
    assert not (tmp_path / "out").exists()


def test_experts_whose_gate_and_up_alternate_are_refused(tmp_path):
    oss = make_checkpoint(tmp_path / "m", "gpt_oss")
    if not kernels.host_available():
        pytest.skip("refused for the missing search")
    with pytest.raises(LocalqError, match="do not support the biases and interleaved"):
        converted(oss, tmp_path / "out")

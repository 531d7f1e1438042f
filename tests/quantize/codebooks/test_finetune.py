"""Fine-tuning of a layer: gradients against finite differences, a loss that falls, and what may not change."""

from __future__ import annotations

import copy

import pytest
import torch

from localq.formats.codebooks.search_kernel import Codebook
from localq.formats.codebooks.vq2 import dequantize
from localq.models.decoder import Block
from localq.models.unstacked_experts import unstack
from localq.quantize.codebooks import finetune
from localq.quantize.codebooks.finetune import TrainableLayer, TuningText, tune
from localq.quantize.codebooks.layer import set_weights
from localq.quantize.codebooks.refine import adjoint
from localq.quantize.model import calibration_stream
from localq.quantize.settings import Tuning
from tests.support.quantize.tiny_layers import packed_block, tiny_decoder

CPU = torch.device("cpu")


def layer(model_type: str) -> tuple[Block, calibration_stream.Streams]:
    model = tiny_decoder(model_type)
    texts = [torch.randn(21, model.config.hidden, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    return model.layers[0], calibration_stream.Streams(model, texts, CPU)


def behind(block: Block, x: torch.Tensor, streams: calibration_stream.Streams) -> torch.Tensor:
    return calibration_stream.after_mlp(block, calibration_stream.after_attention(block, x, streams.step))


def test_weights_are_those_of_the_format_before_the_first_step():
    block, _ = layer("llama")
    packed = packed_block(block, 1)
    weights = TrainableLayer(packed, block, CPU).weights()
    for name, each in packed.items():
        torch.testing.assert_close(weights[f"{name}.weight"], dequantize(each, torch.float32), rtol=1e-6, atol=1e-7)
    assert set(weights) == {name for name, _ in block.named_parameters()}


def test_gradients_of_codebook_and_rotation_are_adjoint_to_the_weights():
    """<d W(C) / d C [D], G> = <D, gradient>, for the map is linear in C."""
    block, _ = layer("llama")
    packed = packed_block(block, 2)
    trained = TrainableLayer(packed, block, CPU)
    direction = torch.randn(256, 16)
    last = len(trained.books) - 1  # that of the rotated matrix
    pulled = torch.randn(packed["mlp.down_proj"].shape)
    (trained.weights()["mlp.down_proj.weight"] * pulled).sum().backward()
    gradient = trained.books[last].grad
    with torch.no_grad():
        before = trained.weights()["mlp.down_proj.weight"]
        trained.books[last] += direction
        change = trained.weights()["mlp.down_proj.weight"] - before
    expected = (change.double() * pulled).sum()
    torch.testing.assert_close((direction.double() * gradient).sum(), expected, rtol=1e-4, atol=1e-4 * change.norm())


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gemma2", "qwen2"])
def test_the_loss_falls_and_the_codes_stay(model_type):
    block, streams = layer(model_type)
    packed = packed_block(block, 3)
    made = copy.deepcopy(block)
    for name, each in packed.items():
        set_weights(made, name, each, CPU)
    with torch.no_grad():
        aims = [behind(block, x, streams) for x in streams.x]
        lost = sum(
            float((behind(made, x, streams) - aim).square().sum()) for x, aim in zip(streams.x, aims, strict=True)
        )
    tuning = Tuning(steps=30, sequences=3, codebooks=1e-2, scales=1e-2, norms=1e-3)
    kept = {name: [codes.clone() for codes, _ in each.books] for name, each in packed.items()}
    results = [
        tune(made, packed, TuningText(len(aims), lambda i: (streams.x[i], aims[i]), streams.step), tuning, 4, CPU)
        for _ in range(2)
    ]
    (first, others, loss), (again, _, same) = results
    assert loss == same
    assert loss * sum(float(aim.square().sum()) for aim in aims) < 0.9 * lost
    for name, each in first.items():
        assert torch.equal(each.books[0][0], kept[name][0])
        assert torch.equal(each.books[0][1], again[name].books[0][1])
        assert torch.equal(each.scales, again[name].scales)
    assert first["self_attn.o_proj"].books[0][1] is not packed["self_attn.o_proj"].books[0][1]
    assert {name.rpartition(".")[2] for name in others} <= {"weight", "bias"}


def test_what_norms_derive_from_their_weights_is_left_alone():
    block, _ = layer("gemma2")
    trained = TrainableLayer(packed_block(block, 5), block, CPU)
    assert not [name for name in trained.kept if name.endswith("layernorm.weight")]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen2", "mixtral"])
def test_products_in_16_bit_change_loss_and_gradients_by_their_rounding(model_type, monkeypatch):
    """As a GPU trains: bfloat16 rounds 2^-9 of a number, and some ten numbers follow from each other in a layer."""
    block, streams = layer(model_type)
    block = unstack(block) if model_type == "mixtral" else block
    batch = [(x, 0.9 * x) for x in streams.x]
    losses, found = [], []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(finetune, "product_dtype", lambda device, dtype=dtype: dtype)
        trained = TrainableLayer(packed_block(block, 6), block, CPU)
        assert {weight.dtype for name, weight in trained.weights().items() if "_proj.weight" in name} == {dtype}
        losses.append(finetune._step(block, trained, batch, streams.step))
        found.append([each.grad for each in trained.parameters() if each.grad is not None])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=10 * 2**-9)
    for wide, narrow in zip(*found, strict=True):
        assert wide.dtype == narrow.dtype == torch.float32
        assert (wide - narrow).norm() <= 10 * 2**-9 * wide.norm()


def test_a_codeword_that_no_code_names_gets_no_gradient():
    codes = torch.zeros(3, 8, dtype=torch.uint8)
    total = adjoint(torch.ones(3, 32), [codes], [Codebook(4, torch.zeros(256, 16))])[0]
    assert float(total[1:].abs().sum()) == 0
    assert total[0, 0] == 24

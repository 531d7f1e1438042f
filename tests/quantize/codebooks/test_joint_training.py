"""All layers trained together: gradients against those of one graph, a divergence that falls, and going on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from localq.errors import ExitCode, LocalqError
from localq.models.decoder import Decoder
from localq.quantize.codebooks import joint_training
from localq.quantize.codebooks.finetune import TrainableLayer
from localq.quantize.model import calibration_stream, sensitivity
from localq.quantize.model.sensitivity import Ending, make_ending
from localq.quantize.output.resume_files import ResumeFiles
from localq.quantize.settings import Tuning
from tests.support.quantize.tiny_layers import packed_block, tiny_decoder

CPU = torch.device("cpu")
COUNT, TOKENS = 7, 19
RATES = (1e-2, 1e-2, 1e-3)


def ending(model: Decoder) -> Ending:
    head = model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
    return make_ending(model, model.norm.weight, head.detach() * 4, CPU)


def model_and_texts(model_type: str) -> tuple[Decoder, list[joint_training.Layer], joint_training.Sequences]:
    """Two layers, matrices that have nothing to do with theirs, and texts with what the model makes of them."""
    model = tiny_decoder(model_type)
    layers = [(block, packed_block(block, seed)) for seed, block in enumerate(model.layers)]
    rows = [torch.randn(TOKENS, model.config.hidden, generator=torch.Generator().manual_seed(i)) for i in range(COUNT)]
    streams = calibration_stream.Streams(model, rows, CPU)
    with torch.no_grad():
        for block in model.layers:
            streams.advance(lambda x: x, lambda full, block=block: block(full, streams.step))
    return model, layers, joint_training.Sequences(COUNT, lambda i: rows[i], lambda i: streams.full[i], streams.step)


def direct(model: Decoder, trained: list[TrainableLayer], texts: joint_training.Sequences, chosen: list[int]) -> Tensor:
    """The mean divergence of some texts, as one graph."""
    losses = []
    for number in chosen:
        x = texts.first(number)
        for block, each in zip(model.layers, trained, strict=True):
            x = torch.func.functional_call(block, each.weights(), (x.clone(), texts.step))
        wanted, said = (
            torch.log_softmax(sensitivity.logits(ending(model), rows), -1) for rows in (texts.aim(number), x)
        )
        losses.append(F.kl_div(said, wanted, reduction="sum", log_target=True) / TOKENS)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen2"])
def test_gradients_layer_by_layer_are_those_of_one_graph(model_type: str) -> None:
    model, layers, texts = model_and_texts(model_type)
    chosen = [4, 0, 5]
    apart, joined = ([TrainableLayer(packed, block, CPU, lent=True) for block, packed in layers] for _ in range(2))
    loss = joint_training._step(list(model.layers), apart, texts, ending(model), chosen)
    expected = direct(model, joined, texts, chosen)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for one, other in zip(apart, joined, strict=True):
        for value, twin in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(value.grad, twin.grad, rtol=1e-3, atol=1e-5 * float(twin.grad.abs().max()))


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_the_divergence_and_its_slope_whatever_is_computed_at_once(cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against f64, by the definition: sum of p (log p - log q)."""
    norm, head, _ = ending(tiny_decoder("llama"))
    some = norm, head, cap
    x, aim = torch.randn(2, 23, 64, generator=torch.Generator().manual_seed(2)).unbind()
    for value in (2**26, 4 * 40 * 5, 1):  # bytes of logits: all, five rows, one
        monkeypatch.setattr(joint_training, "HEAD_BYTES", value)
        loss, slope = joint_training._divergence(some, x, aim, 3)
        leaf = x.double().requires_grad_()
        wide = norm.double(), head.double(), cap
        p, q = (torch.softmax(sensitivity.logits(wide, rows), -1) for rows in (aim.double(), leaf))
        expected = (p * (p.log() - q.log())).sum() / (23 * 3)
        (gradient,) = torch.autograd.grad(expected, leaf)
        norm.float()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-4)
        torch.testing.assert_close(slope.double(), gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_the_divergence_falls_the_codes_stay_and_a_stopped_training_goes_on(model_type: str, tmp_path) -> None:
    model, layers, texts = model_and_texts(model_type)
    tuning = Tuning(34, 3, *RATES)

    def trained(name: str, stop: int = 99) -> joint_training.TrainingResult:
        (tmp_path / name).mkdir(exist_ok=True)

        def on_step(done: int, total: int) -> None:
            assert total == tuning.steps
            if done == stop:
                raise KeyboardInterrupt

        return joint_training.train(
            layers, texts, ending(model), tuning, 3, ResumeFiles(tmp_path / name, {"job": 1}), on_step
        )

    finished = trained("whole")
    assert finished.after < 0.8 * finished.before
    assert str(finished).startswith("joint training: ")
    for (_, packed), (made, _) in zip(layers, finished.layers, strict=True):
        for name, each in made.items():
            assert torch.equal(each.books[0][0], packed[name].books[0][0])
            assert not torch.equal(each.books[0][1], packed[name].books[0][1])
    for stop in (3, joint_training.KEPT_EVERY, 2 * joint_training.KEPT_EVERY + 4):
        with pytest.raises(KeyboardInterrupt):
            trained("stopped", stop)
    again = trained("stopped")
    assert (again.before, again.after, again.losses) == (finished.before, finished.after, finished.losses)
    for (made, others), (twin, twins) in zip(finished.layers, again.layers, strict=True):
        for name, each in made.items():
            assert torch.equal(each.books[0][1], twin[name].books[0][1])
            assert torch.equal(each.scales, twin[name].scales)
        assert all(torch.equal(value, twins[name]) for name, value in others.items())


def test_every_text_is_read_before_one_is_read_again() -> None:
    seen = [number for step in range(7) for number in joint_training._choose_sequences(COUNT, 3, 5, step)]
    for begin in range(0, 3 * COUNT, COUNT):
        assert sorted(seen[begin : begin + COUNT]) == list(range(COUNT))
    assert seen[:COUNT] != seen[COUNT : 2 * COUNT]
    assert sorted(joint_training._choose_sequences(2, 4, 5, 1)) == [0, 1]  # fewer texts than a step would have


def test_what_would_end_further_away_is_left_as_it_was(tmp_path) -> None:
    model, layers, texts = model_and_texts("llama")
    found = joint_training.train(
        layers, texts, ending(model), Tuning(2, 3, 9.0, 9.0, 9.0), 3, ResumeFiles(tmp_path, {}), lambda *_: None
    )
    assert found.after > found.before
    assert "did not help" in str(found)
    for (_, packed), (made, _) in zip(layers, found.layers, strict=True):
        for name, each in made.items():
            assert torch.equal(each.books[0][1], packed[name].books[0][1])
            assert torch.equal(each.scales, packed[name].scales)


def test_values_that_are_no_numbers_or_too_large_end_it(tmp_path) -> None:
    model, layers, texts = model_and_texts("llama")
    kept = ResumeFiles(tmp_path, {})
    for factor, dtype, code in (
        (float("nan"), torch.bfloat16, ExitCode.BAD_FILE),
        (1e7, torch.float16, ExitCode.USAGE),
    ):
        broken = replace(texts, first=lambda i, factor=factor: texts.first(i) * factor, dtype=dtype, name="tiny")
        with pytest.raises(LocalqError, match="layer 0 produces") as caught:
            joint_training.train(layers, broken, ending(model), Tuning(2, 3), 3, kept, lambda *_: None)
        assert (caught.value.exit_code, caught.value.what) == (code, "tiny")
    assert not list(tmp_path.iterdir())

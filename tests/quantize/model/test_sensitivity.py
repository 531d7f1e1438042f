"""The price of errors, set against what errors of each group really cost at the end of a model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localq.files.model_folder import open_model
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import ARCHITECTURES
from localq.quantize.model import sensitivity
from localq.quantize.model.calibration_stream import Streams
from localq.quantize.model.fold import plain_linear
from localq.quantize.model.matrix_groups import groups_of
from localq.quantize.model.source import SourceModel
from localq.quantize.output.sensitivity_log import SensitivityLog
from localq.quantize.settings import ConversionSettings
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.vq2_conversions import QUICK, ended, loaded, windows

NOISE, DRAWS = 0.02, 6


@pytest.fixture(scope="module", params=["llama", "gemma2", "phi3"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Tensor]:
    """Of every group of a model: the price, without feedback, and the KL that noise in its weights makes."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("source") / "m"
    make_checkpoint(folder, request.param, dtype=torch.float32, initializer_range=0.12)
    files = open_model(folder)
    text = windows(12)
    with open_checkpoint(files) as checkpoint, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "_left_by_feedback", lambda metric, damping: float(metric.trace()))
        patch.setattr(sensitivity, "TRACED", 12)
        model = SourceModel(files, checkpoint, ARCHITECTURES[request.param], torch.device("cpu"), seed=0)
        model.model.make_tables(64, "cpu")
        settings = ConversionSettings(QUICK, (), rotate="down" if model.rotated else "all")
        rows = [each * model.model.embed_scale for each in model.embeddings(text)]
        trail = SensitivityLog(tmp_path_factory.mktemp("trail"), {})
        prices = sensitivity.sensitivities(model, lambda: rows, torch.device("cpu"), settings, trail, lambda left: None)
        costs = _costs(model, Streams(model.model, rows, torch.device("cpu")), folder)
    return torch.tensor(prices).flatten() * NOISE**2, torch.tensor(costs)


def _costs(model: SourceModel, streams: Streams, folder: Path) -> list[float]:
    """KL by noise of NOISE times each row's deviation, in one group after the other."""
    blocks, generator = [model.block(index) for index in range(model.layers)], torch.Generator().manual_seed(1)
    (norm, head), judge = model.ending(), loaded(folder)
    judge.model.norm.weight = torch.nn.Parameter(norm)
    judge.model.norm.finish()
    if model.rotated:
        judge.model.lm_head = torch.nn.Linear(*head.T.shape, bias=False)
        judge.model.lm_head.weight = torch.nn.Parameter(head)

    def predicted(used: list[torch.nn.Module]) -> Tensor:
        found = []
        for x in streams.x:
            for block in used:
                x = block(x.clone(), streams.step)
            found.append(torch.log_softmax(ended(judge, x).double(), -1))
        return torch.cat(found)

    exact, costs = predicted(blocks), []
    for index, block in enumerate(blocks):
        for group in groups_of(block):
            total = 0.0
            for _ in range(DRAWS):
                noisy = copy.deepcopy(block)
                for name in group.names:
                    weight = plain_linear(noisy.get_submodule(name)).weight
                    deviation = weight.square().mean(1, keepdim=True).sqrt()
                    weight.data += NOISE * deviation * torch.randn(weight.shape, generator=generator)
                got = predicted([*blocks[:index], noisy, *blocks[index + 1 :]])
                total += float((exact.exp() * (exact - got)).sum(1).mean())
            costs.append(total / DRAWS)
    return costs


def test_prices_are_what_noise_costs(measured: tuple[Tensor, Tensor]) -> None:
    prices, costs = measured
    ratio = costs / prices
    print(ratio)
    assert ((ratio > 0.5) & (ratio < 2)).all()


def test_prices_put_groups_in_order(measured: tuple[Tensor, Tensor]) -> None:
    prices, costs = (each.argsort().argsort().double() for each in measured)
    assert torch.corrcoef(torch.stack((prices, costs)))[0, 1] > 0.9


def test_feedback_leaves_less_than_the_trace_and_nothing_of_what_is_known() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    metric = x.T @ x / 500
    upper = torch.linalg.cholesky(metric.double().flip(0, 1)).flip(0, 1)
    assert torch.allclose(upper @ upper.T, metric.double())  # H = V V^T
    assert sensitivity._left_by_feedback(metric, 0.0) == pytest.approx(float(upper.diagonal().square().sum()))
    assert sensitivity._left_by_feedback(metric, 0.0) < float(metric.trace())
    broken = -torch.eye(4)
    assert sensitivity._left_by_feedback(broken, 0.0) == -4  # no factor: the trace


def test_windows_come_from_all_over_the_text() -> None:
    assert sensitivity.spread_indices(5) == [0, 1, 2, 3, 4]
    assert sensitivity.spread_indices(10, 4) == [0, 2, 5, 7]

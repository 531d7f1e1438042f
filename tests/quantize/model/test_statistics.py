"""Second moments, goals and factors against f64 solutions of the problems that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.quantize.model import statistics
from localq.quantize.model.statistics import Statistics, damp, factor

CPU = torch.device("cpu")
TOKENS, COLUMNS, OUT = 150, 24, 10


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """x, full [TOKENS, COLUMNS], which have drifted apart, and owed [TOKENS, OUT]."""
    x = normal(TOKENS, COLUMNS) @ normal(COLUMNS, COLUMNS, seed=1) * 0.4
    return x, x + 0.2 * normal(TOKENS, COLUMNS, seed=2) + 0.05 * x.roll(1, 1), 0.3 * normal(TOKENS, OUT, seed=3)


def gathered(parts: int, residual: int = 0) -> Statistics:
    found = Statistics(COLUMNS, residual, CPU)
    for x, full, owed in zip(*(each.chunk(parts) for each in inputs()), strict=True):
        found.add(x, full, owed if residual else None)
    return found


def metric_of(found: Statistics) -> Tensor:
    return found.finish(torch.zeros(OUT, COLUMNS), 0.03)


@pytest.mark.parametrize("residual", [0, OUT], ids=["a reader", "a writer of the stream"])
@pytest.mark.parametrize("damping", [1e-4, 0.3])
def test_the_goal_is_the_least_squares_solution(residual, damping):
    """min over C of |x C^T - ((full - x) W^T + owed)|^2 + ridge |C|^2, by f64 lstsq; the goal is W + C."""
    weight, found = normal(OUT, COLUMNS, seed=7), gathered(3, residual)
    goal = weight.clone()
    metric = found.finish(goal, damping)
    x, full, owed = (each.double() for each in inputs())
    wanted = (full - x) @ weight.double().T + (owed if residual else 0)
    ridge = (TOKENS * damping * metric.double().diagonal().mean()).sqrt() * torch.eye(COLUMNS, dtype=torch.float64)
    change = torch.linalg.lstsq(torch.cat((x, ridge)), torch.cat((wanted, torch.zeros(COLUMNS, OUT)))).solution.T
    # f32 sums over tokens, then a solution by a matrix of this condition
    condition = float(torch.linalg.cond(damp(metric, damping).double()))
    bound = 2**-24 * TOKENS**0.5 * condition
    assert bound < 0.05
    assert (goal.double() - weight - change).norm() <= bound * change.norm()


def test_matrices_of_a_group_get_their_goals_one_by_one():
    found = gathered(2)
    weights = normal(4, COLUMNS, seed=8), normal(9, COLUMNS, seed=9)
    both, alone = torch.cat(weights), [weight.clone() for weight in weights]
    found.finish(both, 0.03)
    for goal, weight in zip(both.split([4, 9]), alone, strict=True):
        gathered(2).finish(weight, 0.03)
        torch.testing.assert_close(goal, weight, rtol=1e-5, atol=1e-6)


def test_without_drift_the_goal_is_the_matrix():
    x, weight = inputs()[0], normal(OUT, COLUMNS, seed=7)
    found = Statistics(COLUMNS, 0, CPU)
    found.add(x, x)
    goal = weight.clone()
    found.finish(goal, 0.03)
    assert torch.equal(goal, weight)


def test_the_metric_is_the_mean_square_of_outputs():
    error, metric, x = normal(OUT, COLUMNS, seed=6).double(), metric_of(gathered(4)), inputs()[0].double()
    assert torch.equal(metric, metric.T)
    expected = (x @ error.T).square().sum() / TOKENS
    torch.testing.assert_close(torch.trace(error @ metric.double() @ error.T), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("step", [2, 4, 8])
def test_the_factor_multiplies_to_the_metric(step):
    metric = metric_of(gathered(1))
    found = factor(metric, step)
    upper = torch.linalg.inv(found.feedback.double())
    condition = float(torch.linalg.cond(metric.double())) ** 0.5
    bound = 2**-24 * condition * COLUMNS**0.5
    assert torch.equal(found.feedback, found.feedback.triu())
    assert (upper @ upper.T - metric.double()).norm() <= 4 * bound * metric.norm()
    assert found.white.shape == (COLUMNS // step, step, step)
    for number, block in enumerate(found.white.double()):
        at = slice(number * step, (number + 1) * step)
        assert (block - upper[at, at]).norm() <= 4 * bound * upper.norm()
        assert torch.equal(block, block.triu())


def test_wide_matrices_are_factored_in_f32(monkeypatch):
    metric = damp(metric_of(gathered(1)), 0.01)
    exact = factor(metric, 4)
    monkeypatch.setattr(statistics, "F64_COLUMNS", COLUMNS - 1)
    found = factor(metric, 4)
    assert found.feedback.dtype == torch.float32
    bound = 2**-24 * float(torch.linalg.cond(metric.double())) * COLUMNS
    assert 0 < (found.feedback - exact.feedback).norm() <= bound * exact.feedback.norm()


def test_damping_adds_a_part_of_the_mean_diagonal():
    metric = torch.tensor([[3.0, 1.0], [1.0, 5.0]])
    assert damp(metric, 0.25).tolist() == [[4.0, 1.0], [1.0, 6.0]]


def test_fewer_tokens_than_columns_do():
    """A metric of rank 5: damped it has its factor; as it is, one of a metric next to it."""
    x = normal(5, COLUMNS)
    metric = x.T @ x / 5
    for given, off in ((damp(metric, 0.01), 1e-4), (metric, 2e-4 * COLUMNS**0.5)):
        found = factor(given, 4)
        assert torch.isfinite(found.feedback).all()
        upper = torch.linalg.inv(found.feedback.double())
        assert (upper @ upper.T - given.double()).norm() <= off * given.norm()
    found = Statistics(COLUMNS, 0, CPU)
    found.add(x, x + 0.1 * normal(5, COLUMNS, seed=4))
    goal = normal(OUT, COLUMNS, seed=7)
    found.finish(goal, 0.03)
    assert torch.isfinite(goal).all()


def test_inputs_of_zeros_leave_the_matrix_and_the_plain_metric():
    found, weight = Statistics(COLUMNS, OUT, CPU), normal(OUT, COLUMNS, seed=7)
    found.add(torch.zeros(9, COLUMNS), normal(9, COLUMNS), normal(9, OUT))
    goal = weight.clone()
    metric = found.finish(goal, 0.03)
    assert torch.equal(goal, weight)
    assert torch.equal(factor(damp(metric, 0.03), 4).feedback, torch.eye(COLUMNS))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_has_no_factor(value):
    metric = torch.eye(8)
    metric[3, 3] = value
    with pytest.raises(LocalqError, match="non-finite") as caught:
        factor(metric, 4)
    assert caught.value.exit_code == ExitCode.BAD_FILE

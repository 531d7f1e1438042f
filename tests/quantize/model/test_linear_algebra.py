"""Panels give what one call would: factors, solutions and inverses in place, held against f64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localq.quantize.model import linear_algebra

SIZE = 53
panels = pytest.mark.parametrize("panel", [7, 16, 53, 64])


@pytest.fixture(autouse=True)
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_algebra, "PANEL", request.node.callspec.params["panel"])


def positive(dtype: torch.dtype) -> Tensor:
    noise = torch.randn(3 * SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise *= torch.linspace(0.2, 2, SIZE)
    return (noise.T @ noise / len(noise)).to(dtype)


def factored(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The matrix and its factor."""
    matrix = positive(dtype)
    upper = matrix.clone()
    assert linear_algebra.factor_(upper)
    return matrix, upper


def bound(matrix: Tensor) -> float:
    """Rounding of a backward stable method, relative to a solution."""
    return SIZE * torch.finfo(matrix.dtype).eps * float(torch.linalg.cond(matrix.double()))


@panels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_factor_is_upper_and_gives_the_matrix_back(panel, dtype):
    matrix, upper = factored(dtype)
    assert torch.equal(upper, upper.triu())
    assert (upper.diagonal() > 0).all()
    error = (upper.double() @ upper.double().T - matrix.double()).norm()
    assert error <= SIZE * torch.finfo(dtype).eps * matrix.norm()


@panels
def test_only_the_upper_triangle_is_read(panel):
    matrix = positive(torch.float64)
    other = matrix.triu() + torch.full_like(matrix, 1e3).tril(-1)
    assert linear_algebra.factor_(matrix)
    assert linear_algebra.factor_(other)
    # blocks on the diagonal are finished together: below them lie sums of what was there
    assert torch.equal(matrix, other)


@panels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solutions_and_inverses(panel, dtype):
    matrix, upper = factored(dtype)
    rows = torch.randn(19, SIZE, generator=torch.Generator().manual_seed(2), dtype=dtype)
    exact, found = torch.linalg.solve(matrix.double(), rows.double(), left=False), rows.clone()
    linear_algebra.solve_(upper, found)
    assert (found.double() - exact).norm() <= bound(matrix) * exact.norm()
    inverse = upper.clone()
    linear_algebra.invert_(inverse)
    assert torch.equal(inverse, inverse.triu())
    exact = torch.linalg.inv(upper.double())
    assert (inverse.double() - exact).norm() <= bound(matrix) * exact.norm()


@panels
def test_what_is_not_positive_definite_is_said(panel):
    matrix = positive(torch.float64)
    matrix[3, 3] = -1
    assert not linear_algebra.factor_(matrix)


@panels
def test_a_matrix_and_its_transpose(panel):
    matrix = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    found = matrix.clone()
    linear_algebra.mean_transpose_(found, 6)
    assert torch.equal(found, (matrix + matrix.T) / 6)

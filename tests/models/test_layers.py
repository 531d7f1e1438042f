"""Products of the CPU path."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from localq.models.layers import Linear, product


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "columns"), [(7, 33), (512, 896), (64, 16_384)])
def test_a_product_in_bfloat16_sums_in_f32(rows: int, bias: bool, out: int, columns: int) -> None:
    """To half an ulp of the largest term: with sums in bfloat16 the error at 16,384 columns is fifty times that."""
    torch.manual_seed(out)
    x, weight = torch.randn(rows, columns).bfloat16(), torch.randn(out, columns).bfloat16()
    added = torch.randn(out).bfloat16() if bias else None
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    error = (product(x, weight, added).double() - exact).abs()
    sums = 2.0**-8 * exact.abs()  # the result rounded once
    assert (error <= sums + 2.0**-22 * (x.double().abs() @ weight.double().abs().mT) + 2.0**-8).all()


def test_rows_of_a_float32_model_are_the_linear_s() -> None:
    torch.manual_seed(0)
    linear = Linear(48, 24)
    x = torch.randn(1, 48)
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))

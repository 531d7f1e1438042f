"""Binary codes on a metric: what they cost, beside exhaustive search and the ways that know less."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localq.errors import ExitCode, LocalqError
from localq.formats import bcq
from localq.quantize.binary import matrix as binary_matrix
from localq.quantize.model.statistics import damp


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def metric_of(columns: int, seed: int = 1) -> Tensor:
    """Of inputs with columns of different size that depend on each other."""
    x = normal(256, 9, seed=seed) @ normal(9, columns, seed=seed + 1) + normal(256, columns, seed=seed + 2)
    x *= torch.exp2(normal(columns, seed=seed + 3))
    return x.T @ x / 256


def loss(weight: Tensor, packed: bcq.Packed, metric: Tensor) -> Tensor:
    """f64 [rows]: of the damped metric, which is what is lessened."""
    error = weight.double() - bcq.dequantize(packed, torch.float32).double()
    return ((error @ damp(metric, binary_matrix.DAMPING).double()) * error).sum(1)


@pytest.mark.parametrize("scheme", ["q2g32", "q3g64z", "q1row", "q4g128"])
def test_it_loses_less_than_ways_that_know_less(scheme: str) -> None:
    """Groups with a rest; each turn lessens the loss, and feedback alone is worth more than no text."""
    weight, metric, maker = normal(21, 168), metric_of(168), bcq.of_scheme(scheme)
    before = metric.clone()
    alone = loss(weight, maker.quantize(weight), metric).sum()
    lost = [
        loss(weight, binary_matrix.encode(weight, metric, maker, turns).packed, metric).sum() for turns in (0, 1, 2)
    ]
    assert lost[0] < 0.8 * alone
    assert lost[2] < lost[1] < lost[0]
    third = loss(weight, binary_matrix.encode(weight, metric, maker, 3).packed, metric).sum()
    assert 0.97 * lost[2] < third <= lost[2]
    assert torch.equal(metric, before)
    made = binary_matrix.encode(weight, metric, maker)
    described = {f"P{suffix}": form for suffix, form in maker.layout(21, 168).items()}
    tensors = bcq.to_tensors(made.packed, "P")
    assert {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()} == described
    error = weight - bcq.dequantize(made.packed, torch.float32)
    expected = ((error @ metric) * error).sum() / ((weight @ metric) * weight).sum()
    assert made.loss == pytest.approx(float(expected), rel=1e-4)


def test_turns_end_where_no_sign_and_no_scale_can_be_changed_for_the_better() -> None:
    """Every other number of every weight is tried, and for all signs the exact least squares of a group."""
    weight, metric = normal(3, 40, seed=7), metric_of(40)
    packed = binary_matrix.encode(weight, metric, bcq.of_scheme("q2g32"), 60).packed
    least = loss(weight, packed, metric)
    heavy, dense = damp(metric, binary_matrix.DAMPING).double(), bcq.dequantize(packed, torch.float32).double()
    for row, column in itertools.product(range(3), range(40)):
        scales = packed.scales[row, :, column // 32].double()
        for signs in itertools.product((-1.0, 1.0), repeat=2):
            error = weight[row].double() - dense[row]
            error[column] = weight[row, column].double() - torch.tensor(signs, dtype=torch.float64) @ scales
            assert error @ heavy @ error >= least[row] * (1 - 1e-4)
    for row, group in itertools.product(range(3), (slice(0, 32), slice(32, 40))):
        bits = torch.stack([packed.codes[row, plane].repeat_interleave(8) for plane in range(2)])
        signs = (bits >> (torch.arange(40) % 8) & 1).double()[:, group] * 2 - 1
        own = signs @ heavy[group, group] @ signs.T
        step = torch.linalg.pinv(own) @ (signs @ heavy[group] @ (weight[row].double() - dense[row]))
        gain = step @ own @ step
        assert gain <= 5e-3 * least[row]  # scales are rounded to f16


def test_without_dependence_and_weights_it_is_the_plain_way_or_better() -> None:
    """Of the unit metric feedback changes nothing; turns go on where the plain way ends."""
    weight, maker = normal(17, 96, seed=3), bcq.of_scheme("q3g32")
    metric = torch.eye(96)
    plain = loss(weight, maker.quantize(weight), metric)
    fed = loss(weight, binary_matrix.encode(weight, metric, maker, 0).packed, metric)
    turned = loss(weight, binary_matrix.encode(weight, metric, maker, 12).packed, metric)
    assert fed.sum() < 1.05 * plain.sum()  # fewer turns of the solver
    assert turned.sum() < 1.01 * plain.sum()
    assert (turned <= fed * (1 + 1e-3)).all()


def test_rows_are_independent_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of other sizes the same, but for the order in which products are added."""
    weight, metric, maker = normal(13, 72, seed=5), metric_of(72), bcq.of_scheme("q2g64z")
    whole = binary_matrix.encode(weight, metric, maker)
    monkeypatch.setattr(binary_matrix, "FINER", 2**26 // (5 * 72))
    assert [each.stop - each.start for each in binary_matrix._pieces(13, 72)] != [13]
    parts = binary_matrix.encode(weight, metric, maker)
    assert parts.loss == pytest.approx(whole.loss, rel=0.02)


def test_inputs_that_are_never_there() -> None:
    """Columns that the text never reaches are stored all the same, and near to what they were."""
    weight, metric = normal(5, 64, seed=2), metric_of(64)
    metric[8:16], metric[:, 8:16] = 0, 0
    left = bcq.dequantize(binary_matrix.encode(weight, metric, bcq.of_scheme("q4g32")).packed, torch.float32) - weight
    assert left[:, 8:16].abs().max() < weight.abs().max()
    zero = binary_matrix.encode(weight, torch.zeros(64, 64), bcq.of_scheme("q4g32"))
    assert torch.isfinite(bcq.dequantize(zero.packed, torch.float32)).all()


def test_a_metric_that_is_not_finite() -> None:
    metric = metric_of(32)
    metric[3, 3] = torch.inf
    with pytest.raises(LocalqError, match="non-finite") as caught:
        binary_matrix.encode(normal(4, 32), metric, bcq.of_scheme("q2g32"))
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_a_column_takes_few_operations() -> None:
    """Columns come one after the other, so on a GPU their time is that of launches: five for each of three passes.

    Counted are also the views that name a column, some two for each of the five.
    """
    counts = []
    for columns in (64, 192):
        with Counted() as counted:
            binary_matrix.encode(normal(5, columns), metric_of(columns), bcq.of_scheme("q2row"))
        counts.append(counted.operations)
    assert counts[1] - counts[0] < 128 * 3 * 18


class Counted(TorchDispatchMode):
    """How many operations are called."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **kwargs or {})

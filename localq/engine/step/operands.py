"""The linears of a decode step as operands of matrix-vector products, whatever the format of their weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from localq.engine.step.launch import Launch
from localq.formats.linear import PackedLinear
from localq.kernels import gemv
from localq.kernels.dense import DenseOperand
from localq.kernels.operand import Operand


def operand(module: nn.Module) -> Operand | None:
    """`module` as an operand; None for a kind of module, or a layout, that has no kernel."""
    if isinstance(module, PackedLinear):
        return module.operand()
    return dense_operand(module.weight, module.bias) if isinstance(module, nn.Linear) else None


def known(found: Operand | None) -> Operand:
    """Return `found`, which `why_not` has checked to be an operand."""
    assert found is not None
    return found


def dense_operand(weight: Tensor, bias: Tensor | None = None) -> DenseOperand:
    """A matrix [out, in] of plain weights as an operand."""
    return DenseOperand(weight.detach(), bias=None if bias is None else bias.detach())


def fusable(operands: Sequence[Operand]) -> bool:
    """Return whether one launch takes them all: few enough, of one format, in one order, with the same tables and x."""
    return len(operands) <= gemv.SEGMENTS and len({(type(each), *each.key) for each in operands}) == 1


def product(
    x: Tensor,
    operands: Sequence[Operand],
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor,
) -> None:
    """out = residual + norm(x) W^T + bias, the results of `operands` behind each other; x T [rows <= 8, in].

    With `activation` there are two and out = activation(first) * second. One launch where they are `fusable`, else one
    for each run of neighbours that are, for one row and without an activation or a residual. Operands with signs rotate
    x, and take one row.
    out [rows, sum of outs] in T or float32.
    """
    if fusable(operands):
        operands[0].launch(x, operands, norm=norm, residual=residual, activation=activation, out=out)
        return
    if x.shape[0] != 1 or activation is not None or residual is not None:
        raise ValueError("product: operands of different formats take one row, no activation and no residual")
    start = 0
    for run in runs(operands):
        width = sum(each.out_features for each in run)
        run[0].launch(x, run, norm=norm, out=out[:, start : start + width])
        start += width


def runs(operands: Sequence[Operand]) -> list[list[Operand]]:
    """Neighbours that one launch takes, together: q and k of one type of blocks before v of another."""
    found: list[list[Operand]] = []
    for each in operands:
        if found and fusable([*found[-1], each]):
            found[-1].append(each)
        else:
            found.append([each])
    return found


def product_launch(
    operation: str,
    x: Tensor,
    operands: Sequence[Operand],
    out: Tensor,
    *,
    norm: gemv.Norm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Launch:
    """`product` as a part of a step."""
    moved = bytes_read(operands) + x.nbytes + out.nbytes
    moved += (0 if norm is None else norm.weight.nbytes) + (0 if residual is None else residual.nbytes)

    def run() -> None:
        product(x, operands, norm=norm, residual=residual, activation=activation, out=out)

    return Launch(operation, run, lambda live: moved)


def bytes_read(operands: Sequence[Operand]) -> int:
    """Bytes that their product reads; what several of them read in one place counts once."""
    tables = {table.data_ptr(): table.nbytes for each in operands if (table := each.around_x) is not None}
    return sum(each.bytes() for each in operands) + sum(tables.values())

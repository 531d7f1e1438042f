"""Steps of several tokens by `delta_verify` beside the same tokens by `delta_decode`: the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.selftest.delta_rows import RowInputs, RowsCase
from localq.kernels import delta_net
from localq.kernels.delta_net import DeltaWorkspace


def _decoded(case: RowsCase, tokens: RowInputs, columns: Tensor, matrix: Tensor, workspace: DeltaWorkspace) -> Tensor:
    """`delta_decode` of one token, with a state of its own; copies are launched first, which wait."""
    of = case.step
    return delta_net.delta_decode(
        tokens.inputs.clone(), tokens.gates.clone(), tokens.x, of.norm, of.write, of.decay, of.token.weights, columns,
        matrix, workspace,
    )  # fmt: skip


class Plain:
    """The same tokens by `delta_decode`, one after the other."""

    def __init__(self, case: RowsCase) -> None:
        self.case, self.workspace = case, case.step.workspace()
        self.columns, self.matrix = (part.clone() for part in case.state)

    def out(self, token: RowInputs) -> torch.Tensor:
        return _decoded(self.case, token, self.columns, self.matrix, self.workspace)

    def assert_state_is_equal(self) -> None:
        columns, matrix = self.case.state
        assert torch.equal(columns, self.columns)
        assert torch.equal(matrix, self.matrix)


def assert_bits_of_single_steps(case: RowsCase, plan: list[tuple[int, int]]) -> None:
    """Launches of `plan`, each with its rows and how many of them are accepted; rejected ones are other tokens."""
    plain, generator = Plain(case), torch.Generator().manual_seed(5)
    for rows, accepted in plan:
        tokens = case.draw(rows, generator)
        found = case.verify(tokens)
        for row in range(accepted):
            assert torch.equal(found[row : row + 1], plain.out(tokens[row : row + 1])), (rows, accepted, row)
            if row == 0:
                plain.assert_state_is_equal()
        assert found.isfinite().all()
        assert not case.workspace.arrived.any()
        case.position += accepted
    case.replay(int(case.position))
    plain.assert_state_is_equal()

"""The reference of `delta_verify`: random steps of several tokens of a gated delta net, and their results in f64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localq.engine.selftest import delta_nets
from localq.engine.selftest.delta_nets import DeltaCase, StepCase
from localq.kernels import delta_net
from localq.kernels.delta_net import DIM, MOST_ROWS, DeltaWorkspace, Drafted


@dataclass
class RowsCase:
    """A state and what a layer has, and space for drafted tokens; `step` without its token's operands."""

    step: StepCase
    drafted: Drafted
    workspace: DeltaWorkspace
    position: Tensor

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """Columns and matrix, which launches move on."""
        return self.step.token.columns, self.step.token.matrix

    def draw(self, count: int, generator: torch.Generator) -> RowInputs:
        """Return operands of `count` random tokens; inputs and gates are rows of one stride."""
        weights, dtype, device = self.step.token.weights, self.step.x.dtype, self.step.x.device
        sizes = [weights.channels, weights.value_heads * DIM]
        both = torch.randn(count, sum(sizes), generator=generator).to(dtype).to(device)
        x = (torch.randn(count, self.step.x.shape[1], generator=generator) * 3).to(dtype).to(device)
        return RowInputs(both[:, : sizes[0]], both[:, sizes[0] :], x)

    def run(self, tokens: RowInputs, out: Tensor | None = None) -> Tensor:
        """Run the kernel at `position`."""
        of = self.step
        return delta_net.delta_verify(
            tokens.inputs, tokens.gates, tokens.x, of.norm, of.write, of.decay, of.token.weights, *self.state,
            self.drafted, self.position, self.workspace, out,
        )  # fmt: skip

    def verify(self, tokens: RowInputs) -> Tensor:
        """Run the kernel at `position`; the first drafted token is behind it then."""
        out = self.run(tokens)
        self.workspace.first_drafted.copy_(self.position + 1)
        return out

    def clone(self) -> RowsCase:
        """Return a case with rows, a state and drafted tokens of its own, beside the same weights and workspace."""
        inputs, decay, beta = (part.clone() for part in self.drafted)
        return RowsCase(self.step.clone(), (inputs, decay, beta), self.workspace, self.position)

    def replay(self, accepted: int) -> None:
        """Run the kernel without tokens, up to the position `accepted`."""
        self.workspace.accepted.fill_(accepted)
        delta_net.delta_replay(self.step.token.weights, *self.state, self.drafted, self.workspace)

    def expected(self, tokens: RowInputs) -> tuple[Tensor, Tensor, Tensor]:
        """(out, columns, matrix) after all `tokens` from the present state, as of `delta_nets.expected`."""
        of = self.step.token
        token = DeltaCase(of.weights, tokens.inputs, tokens.gates, of.write, of.decay, of.columns, of.matrix)
        return StepCase(token, tokens.x, self.step.norm, self.step.write, self.step.decay).expected()

    def to(self, device: torch.device) -> RowsCase:
        """Return a copy on another device, or the same where it is there; with the same workspace."""
        inputs, decay, beta = (part.to(device) for part in self.drafted)
        return RowsCase(self.step.to(device), (inputs, decay, beta), self.workspace, self.position)


@dataclass
class RowInputs:
    """Operands of tokens, a row each."""

    inputs: Tensor
    gates: Tensor
    x: Tensor

    def __getitem__(self, rows: slice) -> RowInputs:
        return RowInputs(self.inputs[rows], self.gates[rows], self.x[rows])

    def to(self, device: torch.device) -> RowInputs:
        """Return them on another device."""
        return RowInputs(self.inputs.to(device), self.gates.to(device), self.x.to(device))


def draw_rows(
    key_heads: int, shared: int, dtype: torch.dtype, device: torch.device, seed: int = 0, hidden: int = 320
) -> RowsCase:
    """Return a case in the middle of a text, without drafted tokens; what is kept of them is not a number."""
    step = delta_nets.draw_step(key_heads, shared, dtype, device, seed, hidden)
    weights, kept = step.token.weights, MOST_ROWS - 1
    inputs = torch.full((kept, weights.channels), torch.nan, dtype=dtype, device=device)
    decay, beta = (torch.full((kept, weights.value_heads), torch.nan, device=device) for _ in range(2))
    workspace = DeltaWorkspace(key_heads, weights.value_heads, device, MOST_ROWS)
    position = torch.full((1,), 40, dtype=torch.int64, device=device)
    workspace.first_drafted.fill_(2**62)
    return RowsCase(step, (inputs, decay, beta), workspace, position)

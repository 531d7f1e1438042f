"""A mixture of experts with separate linears per expert, for code that works matrix by matrix (the quantizer)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localq.models.decoder import Block
from localq.models.experts import Mixture, Router, SharedExpertMixture
from localq.models.layers import GatedMLP


class UnstackedMixture(nn.Module):
    """A `Mixture` with separate linears per expert."""

    def __init__(self, router: Router, hidden: int, width: int, count: int) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(GatedMLP(hidden, width, "silu", bias=False) for _ in range(count))

    def expert(self, number: int) -> GatedMLP:
        """Return an expert."""
        found = self.experts[number]
        assert isinstance(found, GatedMLP)
        return found

    def readers(self) -> tuple[nn.Linear, ...]:
        """Return the linears that read x: router, gates and ups."""
        each = [self.expert(number) for number in range(len(self.experts))]
        return (self.router, *(mlp.gate_proj for mlp in each), *(mlp.up_proj for mlp in each))

    def writers(self) -> tuple[nn.Linear, ...]:
        """Return the linears that write the result: the down projections."""
        return tuple(self.expert(number).down_proj for number in range(len(self.experts)))

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]; as `models.experts.Experts`, in f32."""
        weights, chosen = self.router.route(x)
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in range(len(self.experts)):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            if len(tokens):
                y = y.index_add(0, tokens, self.expert(number)(x[tokens]) * weights[tokens, place][:, None])
        return y.to(x.dtype)


class UnstackedSharedMixture(UnstackedMixture):
    """A `SharedExpertMixture` with separate linears per expert."""

    def __init__(self, of: SharedExpertMixture) -> None:
        super().__init__(of.router, of.router.in_features, of.experts.width, of.experts.count)
        assert isinstance(of.shared_expert, GatedMLP)  # only a load for a GPU puts it behind the others
        self.shared_expert, self.shared_expert_gate = of.shared_expert, of.shared_expert_gate

    def readers(self) -> tuple[nn.Linear, ...]:
        """Return the linears that read x: router and gate, gates and ups."""
        shared = self.shared_expert
        return (*super().readers(), self.shared_expert_gate, shared.gate_proj, shared.up_proj)

    def writers(self) -> tuple[nn.Linear, ...]:
        """Return the linears that write the result: the down projections."""
        return (*super().writers(), self.shared_expert.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        out: Tensor = super().forward(x) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out


def unstack(block: Block) -> Block:
    """Replace the mixture of `block`, if any, by an `UnstackedMixture` on the meta device; returns `block`."""
    part: nn.Module = block.mlp
    if isinstance(part, Mixture):
        with torch.device("meta"):
            of = part.experts
            opened = (
                UnstackedSharedMixture(part)
                if isinstance(part, SharedExpertMixture)
                else UnstackedMixture(part.router, part.router.in_features, of.width, of.count)
            )
        block.mlp = opened  # type: ignore[assignment]  # users of an MLP check its class
    return block

"""A mixture of experts with linears of each expert, for what works on one matrix after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localq.models.decoder import Block
from localq.models.experts import Mixture, Router
from localq.models.layers import GatedMLP


class UnstackedMixture(nn.Module):
    """A `Mixture` whose experts have linears of their own."""

    def __init__(self, router: Router, hidden: int, width: int, count: int) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(GatedMLP(hidden, width, "silu", bias=False) for _ in range(count))

    def expert(self, number: int) -> GatedMLP:
        """One of them."""
        found = self.experts[number]
        assert isinstance(found, GatedMLP)
        return found

    def readers(self) -> tuple[nn.Linear, ...]:
        """What reads x: the router, gates and ups."""
        each = [self.expert(number) for number in range(len(self.experts))]
        return (self.router, *(mlp.gate_proj for mlp in each), *(mlp.up_proj for mlp in each))

    def writers(self) -> tuple[nn.Linear, ...]:
        """What the result is made of."""
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


def unstack(block: Block) -> Block:
    """`block`, whose mixture, if it has one, is an `UnstackedMixture` from now on; without data."""
    part: nn.Module = block.mlp
    if isinstance(part, Mixture):
        with torch.device("meta"):
            of = part.experts
            opened = UnstackedMixture(part.router, part.router.in_features, of.width, of.count)
        block.mlp = opened  # type: ignore[assignment]  # what works on an MLP asks first what it is
    return block

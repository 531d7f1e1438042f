"""The launches of mixtures in a decode step: router, gate and up of the chosen experts, down with their weighted sum.

    router    x -> norm -> logits -> the chosen experts and their weights, which stay on the device
    gate_up   x -> norm -> gated(gate, up) of every chosen expert
    down      + residual; of vq2 what goes into it is rotated first, by the same launch

A graph of them stays the same whatever is chosen. Their bytes are those of the chosen experts alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localq.engine.step.launch import Launch
from localq.formats import mxfp4, nf4
from localq.formats.expert_linears import LinearStack
from localq.formats.experts import kernel as expert_kernel
from localq.formats.experts import stacks
from localq.formats.linear import SlabStack
from localq.kernels.gemv import Norm
from localq.models.config import DecoderConfig
from localq.models.experts import Experts, Mixture, PackedStack


def stack_of(part: nn.Parameter | PackedStack) -> stacks.Stack | None:
    """The matrices of a layer's experts as the kernels take them; None for a format that has no kernel."""
    if isinstance(part, Tensor):
        return part.detach()
    if isinstance(part, LinearStack):
        return part.stack
    if not isinstance(part, SlabStack):
        return None
    if isinstance(part.tall, mxfp4.Linear):
        blocks = part.tall.codes.view(part.count, part.out_features, -1, mxfp4.BLOCK // 2)
        return stacks.Mxfp4Stack(blocks, part.tall.scales.view(blocks.shape[:3]))
    return stacks.Nf4Stack(part.tall.operand(), part.count) if isinstance(part.tall, nf4.Linear) else None


def why_not(mixture: Mixture, dtype: torch.dtype) -> str:
    """Why the kernels cannot run it (whose weights are in place) beside x of `dtype`; empty when they can."""
    router, experts = mixture.router, mixture.experts
    if experts.count > expert_kernel.MOST_EXPERTS or router.active > expert_kernel.MOST_CHOSEN:
        most = f"at most {expert_kernel.MOST_CHOSEN} of {expert_kernel.MOST_EXPERTS}"
        return f"no kernel supports {router.active} of {experts.count} experts per token ({most})"
    for part in (experts.gate_up_proj, experts.down_proj):
        if (stack := stack_of(part)) is None:
            return "no kernel supports experts in this format"
        try:
            stacks.check_stack("experts", stack, dtype, router.weight.device)
        except ValueError as error:
            return f"no kernel supports these {error}"
        if part is experts.down_proj and not expert_kernel.has_room(stack, router.active):
            columns = stacks.shape_of(stack)[2]
            return f"{router.active} experts of {columns} columns exceed the input buffer of every kernel"
    return _why_not_turned(experts)


def _why_not_turned(experts: Experts) -> str:
    """The experts of a layer share what goes into gate and up, and how it is rotated before down."""
    opened, closed = (_signs(part) for part in (experts.gate_up_proj, experts.down_proj))
    if opened != (None, True):
        return "no kernel rotates the inputs of the experts' gate and up matrices"
    return "" if closed[1] else "no kernel applies a separate rotation to each expert's input"


def _signs(part: nn.Parameter | PackedStack) -> tuple[Tensor | None, bool]:
    return part.signs() if isinstance(part, LinearStack) else (None, True)


class ExpertLaunches:
    """What the mixtures of all layers share: buffers, allocated at once, and how their launches are made."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.weights = torch.zeros(config.experts_active, dtype=torch.float32, device=device)
        self.chosen = torch.zeros(config.experts_active, dtype=torch.int32, device=device)
        self.workspace = expert_kernel.router_workspace(config.experts, device)
        self.gated = torch.zeros(config.experts_active, config.expert_width, dtype=dtype, device=device)

    def bytes(self) -> int:
        """Device memory of the buffers."""
        return sum(each.nbytes for each in (self.weights, self.chosen, self.workspace, self.gated))

    def of(self, mixture: Mixture, x: Tensor, norm: Norm) -> list[Launch]:
        """x T [1, hidden] += mixture(norm(x))."""
        gated, routed, chosen, workspace = self.gated, self.weights, self.chosen, self.workspace
        router, experts = mixture.router, mixture.experts
        gate_up, down = stack_of(experts.gate_up_proj), stack_of(experts.down_proj)
        assert gate_up is not None  # `why_not` has asked
        assert down is not None
        signs, _ = _signs(experts.down_proj)
        of_router = (x, router.weight.detach(), _detached(router.bias), router.active)
        of_gate_up = (x, gate_up, _detached(experts.gate_up_proj_bias), chosen)
        of_down = (gated, down, _detached(experts.down_proj_bias), chosen, routed)

        def route() -> None:
            expert_kernel.router(
                *of_router, norm=norm, how=router.how, weights=routed, chosen=chosen, workspace=workspace
            )

        def open_() -> None:
            expert_kernel.experts_gate_up(
                *of_gate_up,
                norm=norm,
                gate=experts.gate,
                interleaved=experts.interleaved,
                out=gated,
                alpha=experts.alpha,
                limit=experts.limit,
            )

        def close() -> None:
            expert_kernel.experts_down(*of_down, residual=x, out=x, behind_gate_up=True, signs=signs)

        routing, opening, closing = _bytes(mixture, gate_up, down, x, norm)
        return [
            Launch("router", route, lambda live: routing),
            Launch("gate_up", open_, lambda live: opening),
            Launch("down", close, lambda live: closing),
        ]


def _bytes(mixture: Mixture, gate_up: stacks.Stack, down: stacks.Stack, x: Tensor, norm: Norm) -> tuple[int, int, int]:
    """What the three launches must move, biases and norms included."""
    router, experts, active = mixture.router, mixture.experts, mixture.router.active
    size = x.element_size()
    routing = expert_kernel.router_bytes(experts.count, x.shape[1], size) + norm.weight.nbytes
    routing += 0 if router.bias is None else router.bias.nbytes
    opening = expert_kernel.experts_gate_up_bytes(gate_up, active, size) + norm.weight.nbytes
    signs, _ = _signs(experts.down_proj)
    closing = expert_kernel.experts_down_bytes(down, active, size) + x.nbytes + (0 if signs is None else signs.nbytes)
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias)
    first, second = (0 if each is None else each.nbytes // experts.count * active for each in biases)
    return routing, opening + first, closing + second


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()

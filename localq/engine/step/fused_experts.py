"""The launches of mixtures in a decode step: router, gate and up of the chosen experts, down with their weighted sum.

    router    x -> norm -> logits -> the chosen experts and their weights, which stay on the device; where sigmoids
              weigh, a product and, in torch, the choice
    gate_up   x -> norm -> gated(gate, up) of every chosen expert
    down      + residual; of vq2 what goes into it is rotated first, by the same launch

If the loader could append a shared expert to the stacks (`load.shared_experts`), it is one more chosen expert.
Otherwise it is a separate MLP: the router still computes its gate, and its down projection, as a stack of one expert,
adds its output to x with that weight.

A graph of them stays the same whatever is chosen. Their bytes are those of the chosen experts alone.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from localq.engine.step.fused_norms import operand_of
from localq.engine.step.launch import Launch
from localq.engine.step.operands import dense_operand, known, operand, product_launch
from localq.formats import gguf, mxfp4, nf4
from localq.formats.codebooks.linear import VqLinear
from localq.formats.expert_linears import LinearStack, stack_of
from localq.formats.experts import kernel as expert_kernel
from localq.formats.experts import stacks
from localq.formats.linear import SlabStack
from localq.formats.table_stack import TableStack
from localq.kernels.gemv import Norm
from localq.models.config import DecoderConfig
from localq.models.decoder import Block, Decoder
from localq.models.experts import Experts, Mixture, PackedStack, SharedExpertMixture, SigmoidRouter, StackedExpert
from localq.models.gemma4 import ScaledRouter
from localq.models.layers import GatedMLP


def stack_of_one(linear: nn.Module, dtype: torch.dtype) -> stacks.Stack | None:
    """The matrix of a Linear without a bias as a stack of one; None if no kernel can read it."""
    found: stacks.Stack | None = None
    if getattr(linear, "bias", None) is not None:
        return None
    if isinstance(linear, VqLinear | gguf.Linear):
        found = LinearStack([[linear]]).stack
    elif isinstance(linear, mxfp4.Linear) or (isinstance(linear, nf4.Linear) and not linear.tiled):
        found = stack_of(SlabStack(linear, 1))
    elif isinstance(linear, nn.Linear):
        found = linear.weight.detach()[None]
    if found is None:
        return None
    try:
        stacks.check_stack("experts_down", found, dtype, stacks.device_of(found))
    except ValueError:
        return None
    return found if expert_kernel.has_room(found, 1) else None


def entries(mixture: Mixture) -> int:
    """Elements of the choice of `router`: the chosen experts, and a shared one."""
    return mixture.router.active + isinstance(mixture, SharedExpertMixture)


def multiplied(mixture: Mixture) -> int:
    """Experts in the launches of gate and up, and of down."""
    return entries(mixture) if _is_stacked(mixture) else mixture.router.active


def has_sigmoids(model: Decoder) -> bool:
    """Return whether some routers of the model use sigmoid weights."""
    return any(isinstance(each.router, SigmoidRouter) for each in _mixtures(model))


def has_two_types(model: Decoder) -> bool:
    """Return whether gate and up are in two types of GGUF blocks, which takes one more launch and buffer."""
    stacks = [stack_of(each.experts.gate_up_proj) for each in _mixtures(model)]
    return any(isinstance(stack, expert_kernel.GgufStack) and stack.has_two_types for stack in stacks)


def _mixtures(model: Decoder) -> list[Mixture]:
    parts = [cast(nn.Module, block.mlp) for block in model.layers if isinstance(block, Block)]
    return [part for part in parts if isinstance(part, Mixture)]


def _is_stacked(mixture: Mixture) -> bool:
    return isinstance(mixture, SharedExpertMixture) and isinstance(mixture.shared_expert, StackedExpert)


def why_not(mixture: Mixture, dtype: torch.dtype) -> str:
    """Return why the kernels cannot run `mixture` (whose weights are in place) on x of `dtype`; empty if they can."""
    router = mixture.router
    return why_not_chosen(
        mixture.experts, router.weight.device, dtype, router.active, entries(mixture), multiplied(mixture)
    )


def why_not_chosen(
    experts: Experts, device: torch.device, dtype: torch.dtype, active: int, entries: int, multiplied: int
) -> str:
    """Return why the kernels cannot run these experts, of which a token chooses `active`; empty if they can.

    entries, multiplied: with a shared expert, in the choice and in the launches.
    """
    if experts.count > expert_kernel.MOST_EXPERTS or entries > expert_kernel.MOST_CHOSEN:
        most = f"at most {expert_kernel.MOST_CHOSEN} of {expert_kernel.MOST_EXPERTS}"
        count = f"{active} of {experts.count} experts"
        if entries > active:
            count += " and a shared expert"
        return f"no kernel supports {count} per token ({most})"
    for part in (experts.gate_up_proj, experts.down_proj):
        if (stack := stack_of(part)) is None:
            return "no kernel supports experts in this format"
        try:
            stacks.check_stack("experts", stack, dtype, device)
        except ValueError as error:
            return f"no kernel supports these {error}"
        biases = experts.gate_up_proj_bias, experts.down_proj_bias
        plain = biases == (None, None) and not experts.interleaved
        knows = experts.gate in expert_kernel.gates_of(stack)
        if not knows or (isinstance(stack, TableStack) and not plain):
            return "no kernel supports experts with these biases and gates in this format"
        if part is experts.down_proj and not expert_kernel.has_room(stack, multiplied):
            columns = stacks.shape_of(stack)[2]
            return f"{multiplied} experts with {columns} columns each do not fit in any kernel's input buffer"
    return _why_not_turned(experts)


def _why_not_turned(experts: Experts) -> str:
    """Return why no kernel applies the rotations of `experts`; empty if one does.

    The experts of a layer share the input of gate and up, and the rotation before down.
    """
    opened, closed = (_signs(part) for part in (experts.gate_up_proj, experts.down_proj))
    if opened != (None, True):
        return "no kernel rotates the inputs of the experts' gate and up matrices"
    return "" if closed[1] else "no kernel applies a separate rotation to each expert's input"


def _signs(part: nn.Parameter | PackedStack) -> tuple[Tensor | None, bool]:
    return part.signs() if isinstance(part, LinearStack) else (None, True)


class ExpertLaunches:
    """Launches of the mixtures of all layers, and the buffers that they share, allocated at once.

    weights, chosen   of the chosen experts, followed by a shared one
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        shared: bool = False,
        sigmoid: bool = False,
        two_types: bool = False,
        scaled: bool = False,
    ) -> None:
        """shared: some mixture has a shared expert. sigmoid: routers are of that kind. two_types: gates and ups of some
        are in two types of blocks. scaled: a number of each expert multiplies its weight."""
        active = config.experts_active + shared
        self.weights = torch.zeros(active, dtype=torch.float32, device=device)
        self.chosen = torch.zeros(active, dtype=torch.int32, device=device)
        self.workspace = expert_kernel.router_workspace(config.experts, device)
        self.gated = torch.zeros(active, config.expert_width, dtype=dtype, device=device)
        self._gates = torch.zeros(self.gated.shape, dtype=torch.float32, device=device) if two_types else None
        self._first = torch.zeros(int(shared), dtype=torch.int32, device=device)  # the choice among one
        self._gate = torch.zeros(int(shared), dtype=dtype, device=device)
        self._logits = torch.zeros(1, config.experts if sigmoid else 0, dtype=torch.float32, device=device)
        self._scales = torch.zeros(active if scaled else 0, dtype=dtype, device=device)
        self._tables: list[Tensor] = []  # of stacks of one matrix in codebooks

    def bytes(self) -> int:
        """Device memory of the buffers."""
        buffers = [self.weights, self.chosen, self.workspace, self.gated, self._first, self._gate, self._logits]
        buffers += [self._scales, *self._tables]
        gates = 0 if self._gates is None else self._gates.nbytes
        return sum(each.nbytes for each in buffers) + gates

    def of(self, mixture: Mixture, x: Tensor, norm: Norm) -> list[Launch]:
        """x T [1, hidden] += mixture(norm(x)), without a shared expert that has matrices of its own."""
        count, chosen_count, workspace = multiplied(mixture), entries(mixture), self.workspace
        routed, chosen, router = self.weights[:chosen_count], self.chosen[:chosen_count], mixture.router
        of_router = (x, router.weight.detach(), _detached(router.bias), router.active)
        shared_gate = mixture.shared_expert_gate.weight.detach() if isinstance(mixture, SharedExpertMixture) else None

        def route() -> None:
            expert_kernel.router(
                *of_router,
                norm=norm,
                how=router.how,
                weights=routed,
                chosen=chosen,
                workspace=workspace,
                shared_gate=shared_gate,
            )

        def choose() -> None:
            assert isinstance(router, SigmoidRouter)
            found, places = router.choose(self._logits)
            routed.copy_(found[0])
            chosen.copy_(places[0])

        routing = expert_kernel.router_bytes(
            mixture.experts.count, x.shape[1], x.element_size(), shared=chosen_count > router.active
        )
        routing += norm.weight.nbytes + (0 if router.bias is None else router.bias.nbytes)
        routes = [Launch("router", route, lambda live: routing)]
        if isinstance(router, SigmoidRouter):
            scores = product_launch("router", x, [dense_operand(router.weight)], self._logits, norm=norm)
            routes = [scores, Launch("router", choose, lambda live: 2 * self._logits.nbytes)]
        return [*routes, *self._products(mixture.experts, count, x, norm, x, x)]

    def of_scaled(self, router: ScaledRouter, experts: Experts, x: Tensor, norm: Norm, out: Tensor) -> list[Launch]:
        """out T [1, hidden] = experts(norm(x)) of those that `router` chooses by x T [1, hidden]."""
        weight, own, workspace = router.proj.weight.detach(), operand_of(router.norm), self.workspace
        routed, chosen, scales = self.weights, self.chosen, self._scales
        of_expert = router.per_expert_scale.detach()

        def route() -> None:
            of_router = (x, weight, None, router.active)
            how = "softmax_of_chosen"
            expert_kernel.router(*of_router, norm=own, how=how, weights=routed, chosen=chosen, workspace=workspace)

        def scale() -> None:
            torch.index_select(of_expert, 0, chosen, out=scales)
            routed.mul_(scales)

        routing = expert_kernel.router_bytes(experts.count, x.shape[1], x.element_size()) + own.weight.nbytes
        return [
            Launch("router", route, lambda live: routing),
            Launch("router", scale, lambda live: 3 * scales.nbytes + 2 * routed.nbytes),
            *self._products(experts, router.active, x, norm, None, out),
        ]

    def _products(
        self, experts: Experts, count: int, x: Tensor, norm: Norm, residual: Tensor | None, out: Tensor
    ) -> list[Launch]:
        """out T [1, hidden] = residual + the first `count` chosen experts of norm(x), weighted."""
        gated, routed, chosen = self.gated[:count], self.weights[:count], self.chosen[:count]
        gate_up, down = stack_of(experts.gate_up_proj), stack_of(experts.down_proj)
        assert gate_up is not None  # `why_not` has asked
        assert down is not None
        signs, _ = _signs(experts.down_proj)
        gates = None if self._gates is None else self._gates[:count]
        of_gate_up = (x, gate_up, _detached(experts.gate_up_proj_bias), chosen)
        of_down = (gated, down, _detached(experts.down_proj_bias), chosen, routed)

        def open_() -> None:
            expert_kernel.experts_gate_up(
                *of_gate_up,
                norm=norm,
                gate=experts.gate,
                interleaved=experts.interleaved,
                out=gated,
                alpha=experts.alpha,
                limit=experts.limit,
                gates=gates,
            )

        def close() -> None:
            expert_kernel.experts_down(*of_down, residual=residual, out=out, behind_gate_up=True, signs=signs)

        size = x.element_size()
        opening = expert_kernel.experts_gate_up_bytes(gate_up, count, size) + norm.weight.nbytes
        closing = expert_kernel.experts_down_bytes(down, count, size) + (0 if signs is None else signs.nbytes)
        closing += 0 if residual is None else residual.nbytes
        biases = (experts.gate_up_proj_bias, experts.down_proj_bias)
        first, second = (0 if each is None else each.nbytes // experts.count * count for each in biases)
        return [
            Launch("gate_up", open_, lambda live: opening + first),
            Launch("down", close, lambda live: closing + second),
        ]

    def add_shared(self, mixture: SharedExpertMixture, gated: Tensor, branch: Tensor, x: Tensor) -> list[Launch]:
        """x T [1, hidden] += weight * (gated T [1, w] W^T), weight as `router` left it and W of the down of its MLP.

        branch T [1, hidden] holds the product where several launches are needed.
        """
        shared, weight = mixture.shared_expert, self.weights[mixture.router.active :]
        assert isinstance(shared, GatedMLP)
        stack = stack_of_one(shared.down_proj, x.dtype)
        if stack is not None:
            if isinstance(stack, TableStack):
                self._tables.append(stack.table)
            signs, first = getattr(shared.down_proj, "signs", None), self._first
            moved = expert_kernel.experts_down_bytes(stack, 1, x.element_size()) + x.nbytes
            moved += 0 if signs is None else signs.nbytes

            def close() -> None:
                expert_kernel.experts_down(gated, stack, None, first, weight, residual=x, out=x, signs=signs)

            return [Launch("down", close, lambda live: moved)]
        gate = self._gate
        return [
            product_launch("down", gated, [known(operand(shared.down_proj))], branch),
            Launch("down", lambda: gate.copy_(weight), lambda live: weight.nbytes + gate.nbytes),
            Launch("down", lambda: x.addcmul_(branch, gate), lambda live: 3 * x.nbytes),
        ]


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()

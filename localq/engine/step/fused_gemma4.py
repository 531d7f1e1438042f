"""Launches of a decode step that only Gemma 4 has.

    embed      behind the embedding: what every layer adds for the tokens of the step. Rows of the second table, and a
               projection of the embedding, normed, are added and scaled
    experts    beside the MLP: router, gate_up, down; norms behind both; then their sum through the norm behind the MLP
    output     behind the MLP: gate_up, act(gate) * what the layer adds, down, its norm; then times a number

Torch multiplies by numbers and gates: these are launches of a few elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from localq.engine.step.fused_experts import ExpertLaunches, why_not_chosen
from localq.engine.step.fused_norms import norm_launch, operand_of
from localq.engine.step.launch import Launch
from localq.engine.step.operands import known, operand
from localq.engine.step.rows import StepBuffers, products
from localq.kernels import attention, embed
from localq.kv_bits import MOST_CODED_COLUMNS, KvBits
from localq.models.gemma4 import Model, NormedAttention, ParallelExpertBlock, ScalarBlock
from localq.models.layers import ACTIVATIONS


def why_not(model: Model, bits: KvBits) -> str:
    """Return why a step cannot run what only this family has; empty if it can. bits: of the KV cache."""
    for block in model.layers:
        if isinstance(block, ParallelExpertBlock) and (reason := _why_no_experts(block)):
            return reason
        part = block.self_attn
        assert isinstance(part, NormedAttention)
        if bits != 16 and part.head_dim > MOST_CODED_COLUMNS:
            return f"no attention kernel supports head_dim {part.head_dim} with a KV cache below 16 bits"
        if reason := attention.why_not(part.heads, part.kv_heads, part.head_dim, attention.MOST_COLUMNS):
            return reason
    if model.input_width:
        table = model.embed_tokens_per_layer.weight
        if not (table.is_cuda or table.is_pinned()):
            return "the table of layer inputs is in pageable host memory"
        if model.input_width % 8:
            return f"no kernel supports layer inputs with {model.input_width} columns"
    return ""


def _why_no_experts(block: ParallelExpertBlock) -> str:
    router, weight = block.router, block.router.proj.weight
    active = router.active  # there is no shared expert
    return why_not_chosen(block.experts, weight.device, weight.dtype, active, active, active)


def more_products(model: Model) -> Iterator[nn.Module]:
    """The linears that are products of a step, beside those of attention and the MLP."""
    if model.input_width:
        yield model.per_layer_model_projection
        for block in model.layers:
            assert isinstance(block, ScalarBlock)
            yield from (block.per_layer_input_gate, block.per_layer_projection)


class GemmaLaunches:
    """Buffers shared by the layers of a step, and their launches.

    x, branch   T [rows, hidden]: the stream; what comes out of the down projection of an MLP
    """

    def __init__(
        self,
        model: Model,
        tokens: Tensor,
        x: Tensor,
        branch: Tensor,
        buffers: StepBuffers,
        experts: ExpertLaunches | None,
    ) -> None:
        """tokens: of the step, i64 [rows]."""
        self._model, self._tokens, self._x, self._branch, self._buffers = model, tokens, x, branch, buffers
        self._experts = experts
        if experts is not None:
            self._routed = self._take("routed", x.shape[1])
        if model.input_width:
            every = model.config.layers * model.input_width
            self._inputs, self._projected = self._take("layer_inputs", every), self._take("projected_inputs", every)
            self._gated = self._take("gated_inputs", model.input_width)

    def begin(self) -> list[Launch]:
        """Return the launches that make the inputs of all layers, T [rows, layers * width], from the embedding in x."""
        if not self._model.input_width:
            return []
        model, out, projected = self._model, self._inputs, self._projected
        table, scale = model.embed_tokens_per_layer.weight.detach(), model.layer_scale
        rows = len(out)
        shape, shrink = (-1, model.input_width), model.config.hidden**-0.5
        looked_up = embed.embed_bytes(rows, out.shape[1])
        return [
            Launch("embed", lambda: embed.embed(self._tokens, table, scale=scale, out=out), lambda live: looked_up),
            *self._products("embed", self._x, model.per_layer_model_projection, projected),
            Launch("embed", lambda: projected.mul_(shrink), lambda live: 2 * projected.nbytes),
            norm_launch(projected.view(shape), model.per_layer_projection_norm, out.view(shape)),
            Launch("embed", lambda: out.mul_(2.0**-0.5), lambda live: 2 * out.nbytes),
        ]

    def output(self, block: ScalarBlock) -> list[Launch]:
        """Return the launches behind the MLP: x becomes the output of `block`, from x and the MLP's result, branch."""
        x, scalar = self._x, block.layer_scalar.detach()
        beside = self._beside(block) if isinstance(block, ParallelExpertBlock) else []
        added = self._added(block) if self._model.input_width else []
        return [
            *beside,
            norm_launch(self._branch, block.post_feedforward_layernorm, x),
            *added,
            Launch("norm", lambda: x.mul_(scalar), lambda live: 2 * x.nbytes),
        ]

    def _beside(self, block: ParallelExpertBlock) -> list[Launch]:
        """branch = norm(branch) + norm(the experts of x). Row by row."""
        assert self._experts is not None
        norm = operand_of(block.pre_feedforward_layernorm_2)
        found = [norm_launch(self._branch, block.post_feedforward_layernorm_1)]
        for row in range(len(self._x)):
            x, out = self._x[row : row + 1], self._routed[row : row + 1]
            found += self._experts.of_scaled(block.router, block.experts, x, norm, out)
        return [*found, norm_launch(self._routed, block.post_feedforward_layernorm_2, self._branch)]

    def _added(self, block: ScalarBlock) -> list[Launch]:
        """x += what the layer adds, gated by x."""
        gated, width = self._gated, self._model.input_width
        given = self._inputs[:, block.layer * width : (block.layer + 1) * width]
        activate = ACTIVATIONS[self._model.config.activation]
        return [
            *self._products("gate_up", self._x, block.per_layer_input_gate, gated),
            Launch("gate_up", lambda: torch.mul(activate(gated), given, out=gated), lambda live: 3 * gated.nbytes),
            *self._products("down", gated, block.per_layer_projection, self._branch),
            norm_launch(self._branch, block.post_per_layer_input_norm, self._x),
        ]

    def _products(self, operation: str, x: Tensor, module: nn.Module, out: Tensor) -> list[Launch]:
        return products(operation, x, [known(operand(module))], out, self._buffers)

    def _take(self, name: str, width: int) -> Tensor:
        return self._buffers.take(name, len(self._x), width, self._x.dtype, self._x.device)

"""The launches of attention in a decode step, up to what its heads gather.

    gate       where a matrix of its own gives it
    qkv        x -> norm -> q, k, v behind each other
    norm       of q and of k over all heads together, or of values, where the family has these
    attention  norms of q and k, rotary, cache write, attention up to the position, times a gate's sigmoid

Torch multiplies queries by a number that grows with the position, before they are turned (ministral3, where the context
has positions that are not times one).

In Gemma 4 layers with and without a window have buffers of their own for q, k and v. A layer that reads the keys and
values of an earlier one computes queries alone: k, as it was before its norm, and v of this token still lie in the
buffer, and the kernel writes them to the cache once more, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.step.fused_norms import operand_of, value_norms, wide_norms
from localq.engine.step.launch import Launch
from localq.engine.step.operands import known, operand
from localq.engine.step.rows import StepBuffers, products, products_beside
from localq.engine.step.state import StepState
from localq.kernels import attention
from localq.kernels.gemv import Norm
from localq.kernels.operand import share_tables
from localq.models.attention import Attention
from localq.models.decoder import Block, Decoder
from localq.models.gemma4 import NormedAttention


class AttentionLaunches:
    """Buffers shared by the attention of all layers in a step of `rows` rows, and their launches."""

    def __init__(self, model: Decoder, state: StepState, buffers: StepBuffers, rows: int) -> None:
        config, self._dtype, self._device = model.config, model.norm.weight.dtype, state.token.device
        self._model, self._state, self._buffers, self.rows = model, state, buffers, rows
        mixers = [block.mixer() for block in model.layers if isinstance(block, Block)]
        self._parts = {index: each for index, each in enumerate(mixers) if isinstance(each, Attention)}
        parts = [*self._parts.values()]
        self._doubled = 2 if any(each.gate_in_q for each in parts) else 1
        shapes = [*dict.fromkeys((each.heads, each.kv_heads, each.head_dim) for each in parts)]
        shapes = shapes or [(config.heads, config.kv_heads, config.head_dim)]
        queries = max(heads * width for heads, _, width in shapes)
        self._gate = self._buffer("gate", queries if any(each.gate() is not None for each in parts) else 0)
        self._attended = self._buffer("attended", queries)
        self._workspaces = buffers.attention_workspaces(shapes, self._device)
        if not parts:
            self._buffer("qkv", self._doubled * queries + 2 * config.kv_heads * config.head_dim)
        self.scale: Tensor | None = None  # [rows, 1, 1], of the queries; None where it is 1

    def attended(self, part: Attention) -> Tensor:
        """Return the attention output of the heads of `part`, T [rows, heads * head_dim]."""
        return leading(self._attended, part.heads * part.head_dim)

    def workspace_bytes(self) -> int:
        """Device bytes of the workspaces, which lie in one memory."""
        return max(each.bytes() for each in self._workspaces.values())

    def begin(self) -> list[Launch]:
        """Return the launches that all layers share: the number that multiplies their queries."""
        scales, state, rows = self._model.query_scales, self._state, self.rows
        if scales is None or len(scales) <= self._model.config.query_period:
            return []
        scale = self._buffers.take("query_scale", rows, 1, scales.dtype, scales.device)

        def select() -> None:
            if rows > 1:
                state.place_rows(rows)
            positions = state.position if rows == 1 else state.positions[:rows]
            torch.index_select(scales, 0, positions, out=scale[:, 0])

        self.scale = scale[:, :, None]
        return [Launch("attention", select, lambda live: scale.nbytes)]

    def of(
        self, part: Attention, layer: attention.KVLayer, base: Tensor | None, x: Tensor, norm: Norm | None
    ) -> list[Launch]:
        """attended = what the heads of `part` gather for norm(x) T [rows, hidden].

        base: the position of the first slot, if the window slides.
        """
        qkv = self._qkv(part)
        width = qkv.shape[1] - 2 * part.kv_heads * part.head_dim
        heads = qkv.as_strided((self.rows, part.heads, width // part.heads), (qkv.shape[1], width // part.heads, 1))
        found: list[Launch] = []
        gate: Tensor | None = None
        own_gate = part.gate()
        if part.gate_in_q:
            gate = heads[..., part.head_dim :]
        if own_gate is not None:
            gate = self._gate.view(self.rows, part.heads, -1)
            found += products("qkv", x, [known(operand(own_gate))], self._gate, self._buffers, norm=norm)
        operands = share_tables([known(operand(module)) for module in part.inputs() if module is not own_gate])
        columns = sum(each.out_features for each in operands)
        found += products_beside("qkv", x, operands, qkv[:, :columns], self._buffers, norm)
        found += wide_norms(part, qkv)
        found += value_norms(part, qkv)
        queries = heads[..., : part.head_dim]
        if (scale := self.scale) is not None:
            assert not part.qk_norm  # which would undo it
            found.append(Launch("attention", lambda: queries.mul_(scale), lambda live: 2 * queries.nbytes))
        return [*found, self._attend(part, layer, base, qkv, queries.stride(1), gate)]

    def _attend(
        self,
        part: Attention,
        layer: attention.KVLayer,
        base: Tensor | None,
        qkv: Tensor,
        q_stride: int,
        gate: Tensor | None,
    ) -> Launch:
        rotary = None if part.rope_kind is None else self._model.rotary_tables[part.rope_kind]
        q_norm, k_norm = (operand_of(part.q_norm), self._key_norm(part)) if part.qk_norm else (None, None)
        sinks, out = None if part.sinks is None else part.sinks.detach(), self.attended(part)
        workspace = self._workspaces[part.heads, part.kv_heads, part.head_dim]

        def attend() -> None:
            attention.attention_decode(
                qkv,
                layer,
                self._state.position,
                heads=part.heads,
                rotary=rotary,
                q_norm=q_norm,
                k_norm=k_norm,
                scale=part.scale,
                softcap=part.softcap,
                window=part.window,
                workspace=workspace,
                sinks=sinks,
                base=base,
                q_stride=q_stride,
                gate=gate if gate is None or self.rows > 1 else gate[0],
                out=out,
            )

        def moved(live: int) -> int:
            return attention.attention_decode_bytes(
                layer, part.heads, min(live, part.window or live), gated=gate is not None, rows=self.rows
            )

        return Launch("attention", attend, moved)

    def _key_norm(self, part: Attention) -> Norm:
        """The norm of the keys of `part`, or of those that it shares."""
        if isinstance(part, NormedAttention) and part.source is not None:
            return operand_of(self._parts[part.source].k_norm)
        return operand_of(part.k_norm)

    def _qkv(self, part: Attention) -> Tensor:
        """q, k and v, with a gate behind q of every head where one matrix has both."""
        name = f"qkv.{part.window}" if isinstance(part, NormedAttention) else "qkv"
        return self._buffer(name, (self._doubled * part.heads + 2 * part.kv_heads) * part.head_dim)

    def _buffer(self, name: str, width: int) -> Tensor:
        return self._buffers.take(name, self.rows, width, self._dtype, self._device)


def leading(buffer: Tensor, width: int) -> Tensor:
    """[rows, width] in the memory of `buffer` [rows, more]."""
    rows = buffer.shape[0]
    return buffer.view(-1)[: rows * width].view(rows, width)

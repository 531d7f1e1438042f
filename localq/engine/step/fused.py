"""One decode step of any `Decoder` as a list of kernel launches on fixed buffers: no modules, no allocation.

    embed
    per layer   qkv        x -> norm -> q, k, v behind each other, and a gate where the family has one
                attention  norms of q and k, rotary, cache write, attention up to the position, times a gate's sigmoid
                o          + residual (or into a norm, where the family has one there, and then + residual)
                gate_up    x -> norm -> act(gate) * up
                down       + residual (as o)
                           of a mixture of experts: router, gate_up, down (`fused_experts.py`)
                           of a gated delta net instead of attention: qkv, delta, o (`fused_delta.py`)
    head        x -> norm -> logits f32
    sample      the soft cap of the logits, and the choice

The list is data: it is run eagerly, captured as a graph, and timed launch by launch (`profile.py`). The residual stream
x is updated in place, element by element. Torch computes what no kernel does: act(gate) * up where gate and up lie in
one matrix that cannot be cut into two (odd sizes of phi3 in NF4), or in two formats; and queries times a number that
grows with the position, before they are turned (ministral3, where the context has positions that are not times one).

Matrices that multiply a rotated x (vq2) rotate it themselves, behind the norm: one launch for all that share their
signs, which are all that read the same x in what `localq quantize` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from localq.engine.cache import KVCache
from localq.engine.step import fused_delta
from localq.engine.step.fused_delta import DeltaLaunches
from localq.engine.step.fused_experts import ExpertLaunches
from localq.engine.step.fused_experts import why_not as why_no_experts
from localq.engine.step.launch import Launch as Launch
from localq.engine.step.operands import dense_operand, fusable, known, operand, product_launch
from localq.engine.step.state import StepState
from localq.formats.linear import SlabLinear
from localq.kernels import attention, embed, rmsnorm, sampling
from localq.kernels.checks import HALF_TYPES
from localq.kernels.gemv import Norm
from localq.kernels.operand import Operand, share_tables
from localq.models.attention import Attention
from localq.models.decoder import Block, Decoder
from localq.models.experts import Mixture, SharedExpertMixture
from localq.models.gated_delta_net import GatedDeltaNet
from localq.models.layers import ACTIVATIONS, GatedMLP, RMSNorm

OPERATIONS = ("embed", "qkv", "attention", "delta", "o", "router", "gate_up", "down", "norm", "head", "sample")


def why_not(model: Decoder) -> str:
    """Why the kernels cannot run a step of `model` (whose weights are in place); empty when they can."""
    config, dtype = model.config, model.norm.weight.dtype
    if dtype not in HALF_TYPES:
        return f"no kernel supports {str(dtype).removeprefix('torch.')}"
    if reason := attention.why_not(config.heads, config.kv_heads, config.head_dim):
        return reason
    table = model.embed_tokens.weight
    if not (table.is_cuda or table.is_pinned()):
        return "the embedding table is in pageable host memory"
    if not _readable(head_operand(model), dtype):
        return "no kernel supports the format of the output head"
    for block in model.layers:
        assert isinstance(block, Block)
        mixer, part = block.mixer(), cast(nn.Module, block.mlp)
        if isinstance(mixer, GatedDeltaNet) and (reason := fused_delta.why_not(mixer.shape)):
            return reason
        if isinstance(part, Mixture) and (reason := why_no_experts(part, dtype)):
            return reason
        for module in _products(mixer, part):
            if not _readable(operand(module), dtype):
                return f"no kernel supports a Linear{_format_of(module)} with {module.in_features} columns"
    return ""


def _products(mixer: nn.Module, part: nn.Module) -> list[nn.Module]:
    """The linears of a block that are products of a step."""
    assert isinstance(mixer, Attention | GatedDeltaNet)
    found = [*mixer.inputs(), mixer.out_proj if isinstance(mixer, GatedDeltaNet) else mixer.o_proj]
    if isinstance(part, SharedExpertMixture):
        found.append(part.shared_expert_gate)  # the router reads it
        part = part.shared_expert
    return [*found, *part.inputs(), part.down_proj] if isinstance(part, GatedMLP) else found


def head_operand(model: Decoder) -> Operand | None:
    """The matrix that gives the logits: the head, or the embedding table where it is the head."""
    return dense_operand(model.embed_tokens.weight) if model.lm_head is None else operand(model.lm_head)


class FusedStep:
    """Built once per loaded model for which `why_not` is empty; allocates all its buffers at once.

    logits f32 [1, vocab] are those of the last step, before the soft cap of the model (`softcap`).
    """

    def __init__(self, model: Decoder, cache: KVCache, state: StepState) -> None:
        config, dtype, device = model.config, model.norm.weight.dtype, state.token.device
        self.state = state
        self.softcap = config.final_softcap
        self._activation = config.activation
        self._buffers: list[Tensor] = []
        self._x = self._buffer(config.hidden, dtype, device)
        self._branch = self._buffer(config.hidden, dtype, device)
        self._add_attention_buffers(model, dtype, device)
        dense = any(isinstance(block.mlp, GatedMLP) for block in model.layers)
        self._gated = self._buffer(config.intermediate if dense else 0, dtype, device)
        shared = any(isinstance(block.mlp, SharedExpertMixture) for block in model.layers)
        self._experts = ExpertLaunches(config, dtype, device, shared) if config.experts else None
        nets = [mixer for mixer in _mixers(model) if isinstance(mixer, GatedDeltaNet)]
        self._delta = DeltaLaunches(nets[0].shape, dtype, device) if nets else None
        self._shared: Tensor | None = None  # of shared experts that are not among the routed ones
        self._gate_up: Tensor | None = None  # only where they cannot be computed in one launch
        self.logits = self._buffer(config.vocab_size, torch.float32, device)
        self._workspace = attention.AttentionWorkspace(config.heads, config.kv_heads, config.head_dim, device)
        self._launches: list[Launch] = []
        self._add_embedding(model)
        self._query_scale = self._add_query_scale(model)
        for index, block in enumerate(model.layers):
            assert isinstance(block, Block)
            norms = block.norms()
            mixer, part = block.mixer(), cast(nn.Module, block.mlp)
            if isinstance(mixer, GatedDeltaNet):
                assert self._delta is not None
                self._launches += self._delta.of(mixer, self._x, _norm(norms.before_attention), cache.state(index))
                self._add_branch("o", self._delta.out, mixer.out_proj, norms.after_attention)
            else:
                assert isinstance(mixer, Attention)
                window = cache.window_of(index)
                base = None if window is None else window.base_on_device
                self._add_attention(model, mixer, cache.layer(index), base, norms.before_attention)
                self._add_branch("o", self._attended, mixer.o_proj, norms.after_attention)
            if isinstance(part, Mixture):
                self._add_mixture(part, norms.before_mlp)
                continue
            assert isinstance(part, GatedMLP)
            self._add_mlp(part, norms.before_mlp, self._gated)
            self._add_branch("down", self._gated, part.down_proj, norms.after_mlp)
        self._add_product("head", self._x, [known(head_operand(model))], self.logits, norm=_norm(model.norm))

    def run(self, greedy: bool) -> None:
        """Feed the token at its position and choose the next. No host synchronisation, no allocation."""
        self.forward()
        self.choose(greedy)

    def forward(self) -> None:
        """Feed the token at its position."""
        for launch in self._launches:
            launch.run()

    def choose(self, greedy: bool) -> None:
        """Choose the next token, after `forward`."""
        self.state.choose(self.logits[0], greedy, self.softcap)

    def launches(self, greedy: bool) -> list[Launch]:
        """The step in order."""
        moved = sampling.sample_bytes(self.logits.numel())
        return [*self._launches, Launch("sample", lambda: self.choose(greedy), lambda live: moved)]

    def bytes(self) -> int:
        """Device memory of the buffers (without the workspace of attention)."""
        parts = (self._experts, self._delta)
        return sum(buffer.nbytes for buffer in self._buffers) + sum(each.bytes() for each in parts if each is not None)

    def workspace_bytes(self) -> int:
        """Device bytes of the attention workspace."""
        return self._workspace.bytes()

    # ---- the list

    def _buffer(self, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._buffers.append(torch.zeros(1, width, dtype=dtype, device=device))
        return self._buffers[-1]

    def _add_attention_buffers(self, model: Decoder, dtype: torch.dtype, device: torch.device) -> None:
        """q, k and v, with a gate behind q of every head where one matrix has both; a gate from its own matrix; what
        the heads gather."""
        config, attentions = model.config, [each for each in _mixers(model) if isinstance(each, Attention)]
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        in_pairs = any(each.gate_in_q for each in attentions)
        apart = any(each.gate() is not None for each in attentions)
        self._qkv = self._buffer((2 if in_pairs else 1) * queries + 2 * keys, dtype, device)
        self._gate = self._buffer(queries if apart else 0, dtype, device)
        self._attended = self._buffer(queries, dtype, device)

    def _add_embedding(self, model: Decoder) -> None:
        table, token, scale, out = model.embed_tokens.weight.detach(), self.state.token, model.embed_scale, self._x
        moved = embed.embed_bytes(1, out.shape[1])
        self._launches.append(
            Launch("embed", lambda: embed.embed(token, table, scale=scale, out=out), lambda live: moved)
        )
        if (norm := model.embedding_norm()) is not None:
            factor, normed = _norm(norm), rmsnorm.rmsnorm_bytes(1, out.shape[1], offset=True)
            self._launches.append(Launch("norm", lambda: rmsnorm.rmsnorm(out, factor, out=out), lambda live: normed))

    def _add_query_scale(self, model: Decoder) -> Tensor | None:
        """[1, 1], what multiplies the queries of the step; None where that is 1 at all positions of the context."""
        scales, position = model.query_scales, self.state.position
        if scales is None or len(scales) <= model.config.query_period:
            return None
        scale = self._buffer(1, scales.dtype, scales.device)
        self._launches.append(
            Launch(
                "attention", lambda: torch.index_select(scales, 0, position, out=scale[0]), lambda live: scale.nbytes
            )
        )
        return scale

    def _add_attention(
        self, model: Decoder, part: Attention, layer: attention.KVLayer, base: Tensor | None, norm: RMSNorm
    ) -> None:
        """Add the launches of one layer. base: the position of its first slot, if its window slides."""
        own_gate, gate = part.gate(), None
        heads = self._qkv[0, : self._qkv.shape[1] - 2 * part.kv_heads * part.head_dim].view(part.heads, -1)
        queries = heads[:, : part.head_dim]
        if part.gate_in_q:
            gate = heads[:, part.head_dim :]
        if own_gate is not None:
            gate = self._gate.view(part.heads, -1)
            self._add_product("qkv", self._x, [known(operand(own_gate))], self._gate, norm=_norm(norm))
        operands = share_tables([known(operand(module)) for module in part.inputs() if module is not own_gate])
        self._add_product("qkv", self._x, operands, self._qkv, norm=_norm(norm))
        rotary = None if part.rope_kind is None else model.rotary_tables[part.rope_kind]
        q_norm, k_norm = (_norm(part.q_norm), _norm(part.k_norm)) if part.qk_norm else (None, None)
        sinks = None if part.sinks is None else part.sinks.detach()
        if (scale := self._query_scale) is not None:
            assert q_norm is None  # which would undo it
            self._launches.append(Launch("attention", lambda: queries.mul_(scale), lambda live: 2 * queries.nbytes))

        def attend() -> None:
            attention.attention_decode(
                self._qkv,
                layer,
                self.state.position,
                heads=part.heads,
                rotary=rotary,
                q_norm=q_norm,
                k_norm=k_norm,
                scale=part.scale,
                softcap=part.softcap,
                window=part.window,
                workspace=self._workspace,
                sinks=sinks,
                base=base,
                q_stride=queries.stride(0),
                gate=gate,
                out=self._attended,
            )

        def moved(live: int) -> int:
            return attention.attention_decode_bytes(
                layer, part.heads, min(live, part.window or live), gated=gate is not None
            )

        self._launches.append(Launch("attention", attend, moved))

    def _add_mixture(self, part: Mixture, norm: RMSNorm) -> None:
        """x of the stream += mixture(norm(x)); a shared expert reads x before it changes."""
        assert self._experts is not None
        routing, *routed = self._experts.of(part, self._x, _norm(norm))
        self._launches.append(routing)
        if not isinstance(part, SharedExpertMixture) or not isinstance(part.shared_expert, GatedMLP):
            self._launches += routed
            return
        shared = part.shared_expert
        if self._shared is None:
            self._shared = self._buffer(shared.down_proj.in_features, self._x.dtype, self._x.device)
        self._add_mlp(shared, norm, self._shared)
        self._launches += [*routed, *self._experts.add_shared(part, self._shared, self._branch, self._x)]

    def _add_mlp(self, part: GatedMLP, norm: RMSNorm, out: Tensor) -> None:
        """out = act(gate) * up."""
        operands = share_tables([known(operand(module)) for module in part.inputs()])
        pair = operands[0].halves() if len(operands) == 1 else operands
        if pair is not None and fusable(pair):
            self._add_product("gate_up", self._x, pair, out, norm=_norm(norm), activation=self._activation)
            return
        if self._gate_up is None:
            self._gate_up = self._buffer(2 * out.shape[1], self._x.dtype, self._x.device)
        both, activate = self._gate_up, ACTIVATIONS[self._activation]
        gate, up = both.chunk(2, -1)
        self._add_product("gate_up", self._x, operands, both, norm=_norm(norm))
        moved = both.nbytes + out.nbytes
        self._launches.append(Launch("gate_up", lambda: torch.mul(activate(gate), up, out=out), lambda live: moved))

    def _add_branch(self, operation: str, x: Tensor, module: nn.Module, norm: RMSNorm | None) -> None:
        """x of the stream += module(x), through `norm` where there is one."""
        operands, stream, branch = [known(operand(module))], self._x, self._branch
        if norm is None:
            self._add_product(operation, x, operands, stream, residual=stream)
            return
        self._add_product(operation, x, operands, branch)
        factor = _norm(norm)
        moved = rmsnorm.rmsnorm_bytes(1, stream.shape[1], residual=True, offset=factor.weight.dtype == torch.float32)
        self._launches.append(
            Launch(
                "norm",
                lambda: rmsnorm.rmsnorm(branch, factor, residual=stream, out=stream),
                lambda live: moved,
            )
        )

    def _add_product(
        self,
        operation: str,
        x: Tensor,
        operands: Sequence[Operand],
        out: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        activation: str | None = None,
    ) -> None:
        self._launches.append(
            product_launch(operation, x, operands, out, norm=norm, residual=residual, activation=activation)
        )


def _mixers(model: Decoder) -> list[nn.Module]:
    return [block.mixer() for block in model.layers if isinstance(block, Block)]


def _format_of(module: nn.Module) -> str:
    return f" in {module.format}" if isinstance(module, SlabLinear) else ""


def _readable(found: Operand | None, dtype: torch.dtype) -> bool:
    return found is not None and found.readable(dtype)


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.factor.detach(), norm.eps)

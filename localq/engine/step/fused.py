"""One decode step of any `Decoder` as a list of kernel launches on fixed buffers: no modules, no allocation.

    embed
    per layer   qkv        x -> norm -> q, k, v behind each other, and a gate where the family has one
                attention  norms of q and k, rotary, cache write, attention up to the position, times a gate's sigmoid
                           (in front of it: norms of q and of k over all heads together, where the family has these)
                o          + residual (or into a norm, where the family has one there, and then + residual)
                gate_up    x -> norm -> act(gate) * up
                down       + residual (as o)
                           of a mixture of experts: router, gate_up, down (`fused_experts.py`)
                           of a gated delta net instead of attention: qkv, delta, o (`fused_delta.py`)
                           of a short convolution: qkv, conv, o (`fused_convolution.py`)
                           of an MTP block: what joins its two inputs in place of embed (`fused_head.py`)
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
from localq.engine.step import fused_delta, fused_head
from localq.engine.step.fused_experts import ExpertLaunches, has_sigmoids, has_two_types
from localq.engine.step.fused_experts import why_not as why_no_experts
from localq.engine.step.fused_norms import known_norm, norm_launch, operand_of, wide_norms
from localq.engine.step.fused_recurrent import layer_launches, mixers, recurrent_launches
from localq.engine.step.launch import Launch as Launch
from localq.engine.step.operands import dense_operand, fusable, known, operand, product_launch
from localq.engine.step.rows import StepBuffers, row_products
from localq.engine.step.state import StepState
from localq.formats.linear import SlabLinear
from localq.kernels import attention, embed, sampling
from localq.kernels.checks import HALF_TYPES
from localq.kernels.gemv import Norm
from localq.kernels.operand import Operand, share_tables
from localq.models.attention import Attention
from localq.models.decoder import Block, Decoder
from localq.models.experts import Mixture, SharedExpertMixture
from localq.models.gated_delta_net import GatedDeltaNet
from localq.models.layers import ACTIVATIONS, GatedMLP, RecurrentMixer, RMSNorm
from localq.models.qwen3_5_mtp import MultiTokenPrediction

OPERATIONS = ("embed", "qkv", "attention", "delta", "conv", "o", "router", "gate_up", "down", "norm", "head", "sample")


def why_not(model: Decoder) -> str:
    """Return why the kernels cannot run a step of `model` (whose weights are in place); empty if they can."""
    config, dtype = model.config, model.norm.weight.dtype
    if model.no_kernel:
        return model.no_kernel
    if dtype not in HALF_TYPES:
        return f"no kernel supports {str(dtype).removeprefix('torch.')}"
    if reason := attention.why_not(config.heads, config.kv_heads, config.head_dim) or _no_attention(model):
        return reason
    table = model.embed_tokens.weight
    if not (table.is_cuda or table.is_pinned()):
        return "the embedding table is in pageable host memory"
    if isinstance(model, MultiTokenPrediction) and not _readable(operand(model.fc), dtype):
        return f"no kernel supports linear layers{_format_of(model.fc)} with {model.fc.in_features} columns"
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
                return f"no kernel supports linear layers{_format_of(module)} with {module.in_features} columns"
    return ""


def _no_attention(model: Decoder) -> str:
    """Return why no kernel computes the attention of some layer; empty if kernels compute all."""
    return next((each.no_kernel for each in mixers(model) if isinstance(each, Attention) and each.no_kernel), "")


def _products(mixer: nn.Module, part: nn.Module) -> list[nn.Module]:
    """The linears of a block that are products of a step."""
    assert isinstance(mixer, Attention | RecurrentMixer)
    found = [*mixer.inputs(), mixer.get_submodule(mixer.output)]
    if isinstance(part, SharedExpertMixture):
        found.append(part.shared_expert_gate)  # the router reads it
        part = part.shared_expert
    return [*found, *part.inputs(), part.down_proj] if isinstance(part, GatedMLP) else found


def head_operand(model: Decoder) -> Operand | None:
    """The matrix that gives the logits: the head, or the embedding table where it is the head."""
    return dense_operand(model.embed_tokens.weight) if model.lm_head is None else operand(model.lm_head)


class FusedStep:
    """Built once per loaded model for which `why_not` is empty; allocates all its buffers at once.

    rows     tokens that are fed: the input of the step and those drafted behind it (`StepState.tokens`)
    logits   f32 [rows, vocab], those of the last step, before the soft cap of the model (`softcap`)
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        state: StepState,
        rows: int = 1,
        buffers: StepBuffers | None = None,
        replays: bool = False,
    ) -> None:
        """buffers: shared by steps of several rows, of which one runs at a time. replays: a step of one row replays
        drafted tokens in recurrent layers."""
        config, dtype, device = model.config, model.norm.weight.dtype, state.token.device
        self.state, self.rows = state, rows
        self.softcap = config.final_softcap
        self._activation = config.activation
        self._buffers = buffers or StepBuffers(rows)
        self._x = self._buffer("x", config.hidden, dtype, device)
        self._branch = self._buffer("branch", config.hidden, dtype, device)
        self._add_attention_buffers(model, dtype, device)
        dense = any(isinstance(block.mlp, GatedMLP) for block in model.layers)
        self._gated = self._buffer("gated", config.intermediate if dense else 0, dtype, device)
        shared = any(isinstance(block.mlp, SharedExpertMixture) for block in model.layers)
        kinds = (shared, has_sigmoids(model), has_two_types(model))
        self._experts = ExpertLaunches(config, dtype, device, *kinds) if config.experts else None
        self._recurrent = recurrent_launches(model, dtype, state.position, self._buffers, rows, replays)
        self._shared: Tensor | None = None  # of shared experts that are not among the routed ones
        self._gate_up: Tensor | None = None  # only where they cannot be computed in one launch
        self.logits = self._buffer("logits", config.vocab_size, torch.float32, device)
        self._workspace = self._buffers.attention_workspace(config.heads, config.kv_heads, config.head_dim, device)
        self._launches: list[Launch] = []
        self._add_embedding(model)
        self._query_scale = self._add_query_scale(model)
        for index, block in enumerate(model.layers):
            assert isinstance(block, Block)
            norms = block.norms()
            mixer, part = block.mixer(), cast(nn.Module, block.mlp)
            if isinstance(mixer, RecurrentMixer):
                assert self._recurrent is not None
                kept = cache.state(index), cache.drafted_inputs[index]
                before = known_norm(norms.before_attention)
                self._launches += layer_launches(self._recurrent, mixer, self._x, before, *kept)
                self._add_branch("o", self._recurrent.out, mixer.out_proj, norms.after_attention)
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
        self._launches += fused_head.kept(model, state, self._x, self._branch)
        self._launches += self._recurrent.end() if self._recurrent is not None else []

    def run(self, greedy: bool) -> None:
        """Feed the token at its position and choose the next. No host synchronisation, no allocation."""
        self.forward()
        self.choose(greedy)

    def forward(self) -> None:
        """Feed the token at its position."""
        for launch in self._launches:
            launch.run()

    def choose(self, greedy: bool, count: int | None = None) -> None:
        """Choose the next token, or tokens, from the first `count` rows, after `forward`; None: from all."""
        self.state.follow(self.logits[:count], greedy, self.softcap)

    def launches(self, greedy: bool) -> list[Launch]:
        """The step in order."""
        moved = sampling.sample_bytes(self.logits.numel())
        return [*self._launches, Launch("sample", lambda: self.choose(greedy), lambda live: moved)]

    def bytes(self) -> int:
        """Device memory of the buffers (without the workspace of attention)."""
        return self._buffers.bytes() + self.own_bytes()

    def own_bytes(self) -> int:
        """Device memory of the buffers that no other step shares."""
        return 0 if self._experts is None else self._experts.bytes()

    def forget_drafts(self) -> None:
        """Let the next step replay no drafted tokens."""
        if self._recurrent is not None:
            self._recurrent.forget()

    def replay(self, count: int) -> None:
        """Move recurrent states on by the first `count` drafted tokens of the step before, without a step."""
        if self._recurrent is not None:
            self._recurrent.replay(count)

    def workspace_bytes(self) -> int:
        """Device bytes of the attention workspace."""
        return self._workspace.bytes()

    # ---- the list

    def _buffer(self, name: str, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._buffers.take(name, self.rows, width, dtype, device)

    def _add_attention_buffers(self, model: Decoder, dtype: torch.dtype, device: torch.device) -> None:
        """q, k and v, with a gate behind q of every head where one matrix has both; a gate from its own matrix; what
        the heads gather."""
        config, attentions = model.config, [each for each in mixers(model) if isinstance(each, Attention)]
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        in_pairs = any(each.gate_in_q for each in attentions)
        apart = any(each.gate() is not None for each in attentions)
        self._qkv = self._buffer("qkv", (2 if in_pairs else 1) * queries + 2 * keys, dtype, device)
        self._gate = self._buffer("gate", queries if apart else 0, dtype, device)
        self._attended = self._buffer("attended", queries, dtype, device)

    def _add_embedding(self, model: Decoder) -> None:
        if isinstance(model, MultiTokenPrediction):
            self._launches += fused_head.joined(model, self.state, self._buffers, self._x)
            return
        table, scale, out = model.embed_tokens.weight.detach(), model.embed_scale, self._x
        tokens = self.state.tokens[: self.rows]
        moved = embed.embed_bytes(self.rows, out.shape[1])
        self._launches.append(
            Launch("embed", lambda: embed.embed(tokens, table, scale=scale, out=out), lambda live: moved)
        )
        if (norm := model.embedding_norm()) is not None:
            self._launches.append(norm_launch(out, norm))

    def _add_query_scale(self, model: Decoder) -> Tensor | None:
        """[rows, 1, 1], what multiplies the queries of the step; None where that is 1 at all positions of the
        context."""
        scales, state, rows = model.query_scales, self.state, self.rows
        if scales is None or len(scales) <= model.config.query_period:
            return None
        scale = self._buffer("query_scale", 1, scales.dtype, scales.device)

        def select() -> None:
            if rows > 1:
                state.place_rows(rows)
            positions = state.position if rows == 1 else state.positions[:rows]
            torch.index_select(scales, 0, positions, out=scale[:, 0])

        self._launches.append(Launch("attention", select, lambda live: scale.nbytes))
        return scale[:, :, None]

    def _add_attention(
        self, model: Decoder, part: Attention, layer: attention.KVLayer, base: Tensor | None, norm: RMSNorm | None
    ) -> None:
        """Add the launches of one layer. base: the position of its first slot, if its window slides."""
        own_gate, gate = part.gate(), None
        width = self._qkv.shape[1] - 2 * part.kv_heads * part.head_dim
        heads = self._qkv.as_strided(
            (self.rows, part.heads, width // part.heads), (self._qkv.shape[1], width // part.heads, 1)
        )
        queries = heads[..., : part.head_dim]
        if part.gate_in_q:
            gate = heads[..., part.head_dim :]
        if own_gate is not None:
            gate = self._gate.view(self.rows, part.heads, -1)
            self._add_product("qkv", self._x, [known(operand(own_gate))], self._gate, norm=_norm(norm))
        operands = share_tables([known(operand(module)) for module in part.inputs() if module is not own_gate])
        self._add_product("qkv", self._x, operands, self._qkv, norm=_norm(norm))
        self._launches += wide_norms(part, self._qkv)
        rotary = None if part.rope_kind is None else model.rotary_tables[part.rope_kind]
        q_norm, k_norm = (operand_of(part.q_norm), operand_of(part.k_norm)) if part.qk_norm else (None, None)
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
                q_stride=queries.stride(1),
                gate=gate if gate is None or self.rows > 1 else gate[0],
                out=self._attended,
            )

        def moved(live: int) -> int:
            return attention.attention_decode_bytes(
                layer, part.heads, min(live, part.window or live), gated=gate is not None, rows=self.rows
            )

        self._launches.append(Launch("attention", attend, moved))

    def _add_mixture(self, part: Mixture, norm: RMSNorm | None) -> None:
        """x of the stream += mixture(norm(x)); a shared expert reads x before it changes. Row by row, but for the
        inputs of a shared expert."""
        assert self._experts is not None
        shared = part.shared_expert if isinstance(part, SharedExpertMixture) else None
        gated: Tensor | None = None
        if isinstance(shared, GatedMLP):
            if self._shared is None:
                self._shared = self._buffer("shared", shared.down_proj.in_features, self._x.dtype, self._x.device)
            gated = self._shared
        for row in range(self.rows):
            x, branch = self._x[row : row + 1], self._branch[row : row + 1]
            routing, *routed = self._experts.of(part, x, known_norm(norm))
            self._launches.append(routing)
            if gated is None:
                self._launches += routed
                continue
            assert isinstance(shared, GatedMLP)
            assert isinstance(part, SharedExpertMixture)
            if row == 0:  # behind the first router, in whose shadow it starts
                self._add_mlp(shared, norm, gated)
            self._launches += [*routed, *self._experts.add_shared(part, gated[row : row + 1], branch, x)]

    def _add_mlp(self, part: GatedMLP, norm: RMSNorm | None, out: Tensor) -> None:
        """out = act(gate) * up."""
        operands = share_tables([known(operand(module)) for module in part.inputs()])
        pair = operands[0].halves() if len(operands) == 1 else operands
        if pair is not None and fusable(pair):
            self._add_product("gate_up", self._x, pair, out, norm=_norm(norm), activation=self._activation)
            return
        if self._gate_up is None:
            self._gate_up = self._buffer("gate_up", 2 * out.shape[1], self._x.dtype, self._x.device)
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
        self._launches.append(norm_launch(branch, norm, stream))

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
        if self.rows > 1:
            self._launches += row_products(
                operation, x, operands, out, self._buffers, norm=norm, residual=residual, activation=activation
            )
            return
        self._launches.append(
            product_launch(operation, x, operands, out, norm=norm, residual=residual, activation=activation)
        )


def _format_of(module: nn.Module) -> str:
    return f" in {module.format}" if isinstance(module, SlabLinear) else ""


def _readable(found: Operand | None, dtype: torch.dtype) -> bool:
    return found is not None and found.readable(dtype)


def _norm(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else operand_of(norm)

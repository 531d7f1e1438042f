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
                           of Gemma 4: more behind embed and down (`fused_gemma4.py`)
    head        x -> norm -> logits f32
    sample      the soft cap of the logits, and the choice

The list is data: it is run eagerly, captured as a graph, and timed launch by launch (`profile.py`). The residual stream
x is updated in place, element by element. Torch computes what no kernel does: act(gate) * up where gate and up lie in
one matrix that cannot be cut into two (odd sizes of phi3 in NF4), or in two formats; and queries times a number that
grows with the position (`fused_attention.py`).

Matrices that multiply a rotated x (vq2) rotate it themselves, behind the norm: one launch for all that share their
signs, which are all that read the same x in what `localq quantize` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from localq.engine.cache import KVCache
from localq.engine.step import fused_delta, fused_gemma4, fused_head
from localq.engine.step.fused_attention import AttentionLaunches, leading
from localq.engine.step.fused_experts import ExpertLaunches, has_sigmoids, has_two_types
from localq.engine.step.fused_experts import why_not as why_no_experts
from localq.engine.step.fused_gemma4 import GemmaLaunches
from localq.engine.step.fused_norms import known_norm, norm_launch, operand_of
from localq.engine.step.fused_recurrent import layer_launches, mixers, recurrent_launches
from localq.engine.step.launch import Launch as Launch
from localq.engine.step.operands import dense_operand, fusable, known, operand
from localq.engine.step.rows import StepBuffers, products
from localq.engine.step.state import StepState
from localq.formats.linear import SlabLinear
from localq.kernels import attention, embed, sampling
from localq.kernels.checks import HALF_TYPES
from localq.kernels.gemv import Norm
from localq.kernels.operand import Operand, share_tables
from localq.kv_bits import KvBits
from localq.models import gemma4
from localq.models.attention import Attention
from localq.models.decoder import Block, Decoder
from localq.models.experts import Mixture, SharedExpertMixture
from localq.models.gated_delta_net import GatedDeltaNet
from localq.models.layers import ACTIVATIONS, GatedMLP, RecurrentMixer, RMSNorm
from localq.models.qwen3_5_mtp import MultiTokenPrediction

OPERATIONS = ("embed", "qkv", "attention", "delta", "conv", "o", "router", "gate_up", "down", "norm", "head", "sample")


def why_not(model: Decoder, bits: KvBits = 16) -> str:
    """Return why the kernels cannot run a step of `model` (whose weights are in place); empty if they can.

    bits: of the KV cache.
    """
    dtype = model.norm.weight.dtype
    if model.no_kernel:
        return model.no_kernel
    if dtype not in HALF_TYPES:
        return f"no kernel supports {str(dtype).removeprefix('torch.')}"
    if reason := fused_gemma4.why_not(model, bits) if isinstance(model, gemma4.Model) else _no_attention(model):
        return reason
    table = model.embed_tokens.weight
    if not (table.is_cuda or table.is_pinned()):
        return "the embedding table is in pageable host memory"
    if isinstance(model, MultiTokenPrediction) and (reason := _unreadable([model.fc], dtype)):
        return reason
    if not _readable(head_operand(model), dtype):
        return "no kernel supports the format of the output head"
    for block in model.layers:
        assert isinstance(block, Block)
        mixer, part = block.mixer(), cast(nn.Module, block.mlp)
        if isinstance(mixer, GatedDeltaNet) and (reason := fused_delta.why_not(mixer.shape)):
            return reason
        if isinstance(part, Mixture) and (reason := why_no_experts(part, dtype)):
            return reason
        if reason := _unreadable(_products(mixer, part), dtype):
            return reason
    return _unreadable(fused_gemma4.more_products(model), dtype) if isinstance(model, gemma4.Model) else ""


def _no_attention(model: Decoder) -> str:
    """Return why no kernel computes the attention of some layer; empty if kernels compute all."""
    config = model.config
    if reason := attention.why_not(config.heads, config.kv_heads, config.head_dim):
        return reason
    return next((each.no_kernel for each in mixers(model) if isinstance(each, Attention) and each.no_kernel), "")


def _unreadable(linears: Iterable[nn.Module], dtype: torch.dtype) -> str:
    """Return why no kernel multiplies one of `linears`; empty if kernels multiply all."""
    for module in linears:
        if not _readable(operand(module), dtype):
            return f"no kernel supports linear layers{_format_of(module)} with {module.in_features} columns"
    return ""


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
        self._attention = AttentionLaunches(model, state, self._buffers, rows)
        dense = [block.mlp.down_proj for block in model.layers if isinstance(block.mlp, GatedMLP)]
        self._gated = self._buffer("gated", max((each.in_features for each in dense), default=0), dtype, device)
        shared = any(isinstance(block.mlp, SharedExpertMixture) for block in model.layers)
        kinds = (shared, has_sigmoids(model), has_two_types(model), isinstance(model, gemma4.Model))
        self._experts = ExpertLaunches(config, dtype, device, *kinds) if config.experts else None
        self._recurrent = recurrent_launches(model, dtype, state.position, self._buffers, rows, replays)
        self._shared: Tensor | None = None  # of shared experts that are not among the routed ones
        self.logits = self._buffer("logits", config.vocab_size, torch.float32, device)
        self._launches: list[Launch] = []
        self._add_embedding(model)
        self._launches += self._attention.begin()
        self._gemma: GemmaLaunches | None = None
        if isinstance(model, gemma4.Model):
            around = (self._x, self._branch, self._buffers, self._experts)
            self._gemma = GemmaLaunches(model, state.tokens[:rows], *around)
            self._launches += self._gemma.begin()
        for index, block in enumerate(model.layers):
            assert isinstance(block, Block)
            self._add_mixer(block, cache, index)
            self._add_rest(block)
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
        return self._attention.workspace_bytes()

    # ---- the list

    def _buffer(self, name: str, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._buffers.take(name, self.rows, width, dtype, device)

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

    def _add_mixer(self, block: Block, cache: KVCache, index: int) -> None:
        """x of the stream += attention(norm(x)), or what mixes the tokens in its place."""
        norms, mixer = block.norms(), block.mixer()
        if isinstance(mixer, RecurrentMixer):
            assert self._recurrent is not None
            kept = cache.state(index), cache.drafted_inputs[index]
            before = known_norm(norms.before_attention)
            self._launches += layer_launches(self._recurrent, mixer, self._x, before, *kept)
            self._add_branch("o", self._recurrent.out, mixer.out_proj, norms.after_attention)
            return
        assert isinstance(mixer, Attention)
        window = cache.window_of(index)
        base = None if window is None else window.base_on_device
        read = self._x, _norm(norms.before_attention)
        self._launches += self._attention.of(mixer, cache.layer(index), base, *read)
        self._add_branch("o", self._attention.attended(mixer), mixer.o_proj, norms.after_attention)

    def _add_rest(self, block: Block) -> None:
        """x of the stream += mlp(norm(x)), and what a block has besides."""
        norms, part = block.norms(), cast(nn.Module, block.mlp)
        if isinstance(part, Mixture):
            self._add_mixture(part, norms.before_mlp)
            return
        assert isinstance(part, GatedMLP)
        gated = leading(self._gated, part.down_proj.in_features)
        self._add_mlp(part, norms.before_mlp, gated)
        if not isinstance(block, gemma4.ScalarBlock):
            self._add_branch("down", gated, part.down_proj, norms.after_mlp)
            return
        assert self._gemma is not None
        self._add_product("down", gated, [known(operand(part.down_proj))], self._branch)
        self._launches += self._gemma.output(block)

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
        both = self._buffer("gate_up", 2 * out.shape[1], self._x.dtype, self._x.device)
        activate = ACTIVATIONS[self._activation]
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
        self._launches += products(
            operation, x, operands, out, self._buffers, norm=norm, residual=residual, activation=activation
        )


def _format_of(module: nn.Module) -> str:
    return f" in {module.format}" if isinstance(module, SlabLinear) else ""


def _readable(found: Operand | None, dtype: torch.dtype) -> bool:
    return found is not None and found.readable(dtype)


def _norm(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else operand_of(norm)

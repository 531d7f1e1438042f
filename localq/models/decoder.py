"""The decoder of every family: embedding, blocks, norm, head. Families set its facts and replace its parts.

Life of a model: built on the meta device; every parameter replaced by a real tensor under the name that `rename`
gives, and linears replaced where the checkpoint is quantized; then `make_tables` once; then calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.files.layer_caches import KeysAndValues, LayerCache
from localq.models.attention import Attention, Pass, host_start, visible
from localq.models.config import DecoderConfig
from localq.models.layers import Cache, GatedMLP, Linear, RMSNorm, product
from localq.models.rope import LengthSwitch, query_scales

Tap = Callable[[Tensor, Tensor], None]


class Norms(NamedTuple):
    """The norms of a block by place: of what attention and the MLP read, and of what they add to the residual."""

    before_attention: RMSNorm | None
    after_attention: RMSNorm | None
    before_mlp: RMSNorm | None
    after_mlp: RMSNorm | None


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); a family may mix tokens otherwise than by attention (`mixer`)."""

    attention_class: type[Attention] = Attention
    mlp_class: type[GatedMLP] = GatedMLP
    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.add_mixer(config, layer)
        self.add_mlp(config, layer)
        self.input_layernorm = self.norm_class(config.hidden, config.eps)
        self.post_attention_layernorm = self.norm_class(config.hidden, config.eps)

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """Create what mixes the tokens in this `layer`."""
        self.self_attn = self.attention_class(config, layer, self.norm_class)

    def mixer(self) -> nn.Module:
        """Return what mixes the tokens: (x [T, hidden], step) -> [T, hidden]."""
        return self.self_attn

    def add_mlp(self, config: DecoderConfig, layer: int) -> None:
        """Create the MLP of this `layer`."""
        self.mlp = self.mlp_class(config.hidden, config.width_of(layer), config.activation, config.mlp_bias)

    def norms(self) -> Norms:
        """Return the norms before attention and before the MLP."""
        return Norms(self.input_layernorm, None, self.post_attention_layernorm, None)

    def forward(self, x: Tensor, step: Pass) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        x = x + self.mixer()(self.input_layernorm(x), step)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return self.block_output(out, step.layer_inputs)

    def block_output(self, x: Tensor, layer_inputs: Tensor | None = None) -> Tensor:
        """x [T, hidden], the stream after the MLP -> what the block returns; layer_inputs: of the pass."""
        return x


class Decoder(nn.Module):
    """A causal language model of one sequence. Parameters carry the names of transformers, less `model.`.

    A tied model has no `lm_head` parameter (`self.lm_head` is None, and the embedding is the head); a head put there
    later, quantized say, is used. `redundant` names checkpoint tensors that such a model leaves unread, and
    `transposed` parameters that files hold, where they are not quantized, with their last two dimensions exchanged,
    `in_f32` those that are f32 whatever the dtype of the model. `tap` is given the positions of a pass, int64 [T], and
    what the last norm gives there, [T, hidden].
    """

    block_class: type[Block] = Block
    embed_scale: float = 1.0  # multiplies the rows of the embedding
    no_calibration = ""  # why a text cannot pass through one layer at a time; empty where it can
    no_kernel = ""  # why no kernels compute a decode step; empty where they may

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        # Given a table: filling one with random numbers on `meta` imports torch's compiler, two seconds of every load.
        table = torch.empty(config.vocab_size, config.hidden)
        self.embed_tokens: nn.Embedding = nn.Embedding.from_pretrained(table, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList(self.block_class(config, layer) for layer in range(config.layers))
        self.norm = self.block_class.norm_class(config.hidden, config.eps)
        self.lm_head: nn.Module | None = None if config.tied else Linear(config.hidden, config.vocab_size, bias=False)
        self.redundant = frozenset({"lm_head.weight"}) if config.tied else frozenset()
        self.transposed: frozenset[str] = frozenset()
        self.in_f32: frozenset[str] = frozenset()
        self.windows = tuple(dict.fromkeys(config.windows))
        self.rotary_tables: list[Tensor] = []
        self.length_switches: dict[int, LengthSwitch] = {}  # index in `rotary_tables` -> its switch
        self.query_scales: Tensor | None = None  # [context]
        self.slots = torch.empty(0, dtype=torch.int64)
        self.tap: Tap | None = None

    def cache_layout(self) -> tuple[LayerCache, ...]:
        """Return what each layer keeps of a text, as `Architecture.layer_caches`."""
        windows = enumerate(self.config.windows)
        return tuple(KeysAndValues(*self.config.heads_of(layer), window) for layer, window in windows)

    def make_tables(self, context: int, device: torch.device | str) -> None:
        """Make the lookup tables of passes on `device`, for positions below `context`; call once, after the weights.

        cos and sin per kind of rotary embedding, and what multiplies queries, in the dtype of the weights, the slot
        numbers that masks compare with, and what norms derive from their weights: `table_bytes` in all. The rotary
        tables are those of a text of `context` tokens until `choose_length`.
        """
        device, dtype = torch.device(device), self.norm.weight.dtype
        self.rotary_tables = [rope.table(context, dtype, device) for rope in self.config.rope_kinds]
        self.length_switches = {
            index: LengthSwitch(rope, self.rotary_tables[index])
            for index, rope in enumerate(self.config.rope_kinds)
            if rope.switches_within(context)
        }
        if self.config.query_growth:
            scales = query_scales(self.config.query_growth, self.config.query_period, context, dtype)
            self.query_scales = scales.to(device)
        self.slots = torch.arange(context, device=device)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.finish()

    def choose_length(self, length: int) -> bool:
        """Adapt the rotary tables, in place, to a text of `length` tokens (`LengthSwitch`).

        Returns True if they have changed: keys that were cached before are then useless.
        """
        changed = [switch.choose(length) for switch in self.length_switches.values()]
        return any(changed)

    def same_tables_until(self, length: int) -> int | None:
        """The longest text that turns like one of `length` tokens; None: there is no limit."""
        longer = [each.original_context for each in self.length_switches.values() if each.original_context >= length]
        return min(longer, default=None)

    def rotary_rows(self, count: int) -> list[Tensor]:
        """The first rows of every rotary table, as they are for a text of `count` tokens [count, 2, rotary_dim]."""
        tables = enumerate(self.rotary_tables)
        return [
            self.length_switches[index].rows(count) if index in self.length_switches else table[:count].cpu()
            for index, table in tables
        ]

    def table_bytes(self, context: int, dtype: torch.dtype) -> int:
        """Return the bytes that `make_tables` allocates for `context` positions, and for norms."""
        rotary = sum(rope.table_bytes(context, dtype.itemsize) for rope in self.config.rope_kinds)
        norms = sum(module.derived_bytes() for module in self.modules() if isinstance(module, RMSNorm))
        scales = context * dtype.itemsize if self.config.query_growth else 0
        return rotary + scales + context * torch.int64.itemsize + norms

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, hidden], what the first block reads, on the device of the ids."""
        return self.scale_embedding(self.rows_of(ids))

    def embedding_norm(self) -> RMSNorm | None:
        """Return the norm of rows of the embedding, where the family has one."""
        return None

    def scale_embedding(self, rows: Tensor) -> Tensor:
        """Return rows [..., hidden] of the embedding as the first block reads them."""
        return rows if self.embed_scale == 1.0 else rows * self.embed_scale

    def rows_of(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> rows of the table [T, hidden], which may lie in pinned host memory."""
        return table_rows(self.embed_tokens.weight, ids)

    def layer_inputs(self, ids: Tensor, x: Tensor) -> Tensor | None:
        """ids int64 [T], x [T, hidden] of `embed` -> `Pass.layer_inputs`; None where the family has none."""
        return None

    def forward(self, ids: Tensor, positions: Tensor, cache: Cache, live: int, last_only: bool = True) -> Tensor:
        """ids, positions int64 [T] -> logits f32 [1, vocab] of the last token, or [T, vocab].

        `positions` are consecutive and below the context of `make_tables`; the keys and values of these tokens go
        into `cache`. `live` is how many cache slots attention looks at: more than the last position, and otherwise
        free; slots behind a query's own position are masked.
        """
        step = self.begin(positions, cache, live)
        x = self.embed(ids)
        step.layer_inputs = self.layer_inputs(ids, x)
        for block in self.layers:
            x = block(x, step)
        if self.tap is None:
            x = self.norm(x[-1:] if last_only else x)
        else:
            x = self.norm(x)
            self.tap(positions, x)
            x = x[-1:] if last_only else x
        head = self.lm_head
        logits: Tensor = (product(x, self.embed_tokens.weight) if head is None else head(x)).float()
        cap = self.config.final_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def begin(self, positions: Tensor, cache: Cache, live: int) -> Pass:
        """Return what all layers share of a pass over `positions`; arguments as of `forward`."""
        rotary = []
        for table in self.rotary_tables:
            turns = table.index_select(0, positions)  # [T, 2, rotary_dim]
            rotary.append((turns[:, :1], turns[:, 1:]))
        start = host_start(positions)
        dtype = self.norm.weight.dtype
        spans = {}
        for window in self.windows:
            base, slots = cache.view(window, live)  # a span is in slots
            shifted, begun = (positions - base if base else positions), (None if start is None else start - base)
            spans[window] = visible(shifted, begun, self.slots, slots, window, dtype)
        scales = None if self.query_scales is None else self.query_scales.index_select(0, positions).view(-1, 1, 1)
        return Pass(positions, live, cache, rotary, spans, scales)


def table_rows(table: Tensor, ids: Tensor) -> Tensor:
    """ids int64 [T] -> rows of `table` [rows, width], which may lie in pinned host memory."""
    if table.device == ids.device:
        return F.embedding(ids, table)
    if table.dtype != torch.float32 and table.shape[1] % 8 == 0:
        from localq.kernels import embed  # the compiled part: loaded where there is a GPU, for start-up cost

        return embed.embed(ids, table.detach())
    return table[ids.cpu()].to(ids.device)  # waits for the device

"""The sizes of a decoder, and what each of its layers has and keeps of a text. Torch-free.

Layers follow transformers' modelling files of the types in `model_types`, text part only. Matrices and weight counts
are those of `architecture`.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field

from localq.files.attention_shapes import AttentionShape, sources
from localq.files.layer_caches import EmptyCache, KeysAndValues, Latents, LayerCache, RecurrentState, SharedCache
from localq.files.layer_parts import ATTENTION, EXPERTS, MAMBA, MLP, spread
from localq.files.layer_patterns import recurrent_layers, upper_layers
from localq.files.model_types import MODEL_TYPES, Traits


@dataclass(frozen=True)
class Shape:
    """A decoder's shape. Sizes in elements, contexts in tokens.

    intermediate         width of the dense MLP; 0 if every layer has experts
    dense_layers         layers with a dense MLP in a model with experts
    vocab                rows of the embedding table
    tied                 the head is the embedding table
    max_context          positions that the model supports
    window               keys that a windowed layer attends to; 0 = no layer is windowed
    window_layers        number of windowed layers
    experts              per layer; 0 = dense
    experts_active       experts used per token
    expert_intermediate  width of one expert's MLP
    shared_intermediate  width of the MLP of an expert that every token goes through, beside the chosen ones; 0 = none
    rotary               columns of a head that turn; 0 = all
    window_heads         heads of windowed layers, where those have others; 0 = as of all
    kv_latent            columns of the latent from which all heads make their keys, but for the columns that turn, and
                         their values (`Traits.latents`); 0 = there is none
    query_latent         columns of the latent from which all heads make their queries; 0 = there is none
    value_dim            columns of a head's values, where keys and values are made from a latent
    global_kv_heads, global_head_dim   of layers without a window, where those have heads of their own; 0 = as of all
    keys_as_values       layers without a window make their values from the matrix of their keys
    shared_layers        the last layers, which read the keys and values of earlier ones and have none
    wide_shared_layers   their MLP is twice as wide
    input_width          of what every layer adds per token, from a second table of input_vocab rows; 0 = nothing
    unrotated            no layer has a rotary embedding
    recurrent_layers     layers with a gated delta net, a Mamba-2 or a short convolution instead of attention
    delta_key_heads, delta_value_heads, delta_key_dim, delta_value_dim   its heads, which share keys, and their widths;
                         of a Mamba-2 its groups and heads, the columns of the state, and those of a head
    delta_kernel         tokens that its convolution sees
    conv_kernel          tokens that a short convolution sees; 0 = there is none
    conv_bias            biases of short convolutions and of the matrices around them
    selection_bias       routers have a number per expert that counts in the choice only
    attention_layers     layers with attention, where a layer has one part (`Traits.one_part`); dense_layers are then
                         those with an MLP, and what remains has experts
    qkv_bias, output_bias, mlp_bias   biases of q, k and v; the attention output; the MLP projections
    stored_head          bytes of the output head in the format of the files, where they store it quantized and a GPU
                         keeps it so (GGUF); 0 = it is in 16 bit
    thinks               replies may begin with a thought, which takes context; not part of the shape, so shapes that
                         differ in it are equal
    mtp                  the published files have a block for multi-token prediction; nor part of the shape
    windowed             which layers are windowed, as config.json states it; (): those that are usual for the model
                         type and the number of windowed layers; nor part of the shape
    recurrent            as `windowed`, of the layers with a recurrence
    parts                as `windowed`, the part of every layer (`files.layer_parts`)
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    max_context: int
    window: int = 0
    window_layers: int = 0
    experts: int = 0
    experts_active: int = 0
    expert_intermediate: int = 0
    dense_layers: int = 0
    shared_intermediate: int = 0
    rotary: int = 0
    window_heads: int = 0
    kv_latent: int = 0
    query_latent: int = 0
    value_dim: int = 0
    global_kv_heads: int = 0
    global_head_dim: int = 0
    keys_as_values: bool = False
    shared_layers: int = 0
    wide_shared_layers: bool = False
    input_width: int = 0
    input_vocab: int = 0
    recurrent_layers: int = 0
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_kernel: int = 0
    conv_kernel: int = 0
    conv_bias: bool = False
    selection_bias: bool = False
    attention_layers: int = 0
    unrotated: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    stored_head: int = 0
    thinks: bool = field(default=False, compare=False)
    mtp: bool = field(default=False, compare=False)
    windowed: tuple[bool, ...] = field(default=(), compare=False)
    recurrent: tuple[bool, ...] = field(default=(), compare=False)
    parts: tuple[str, ...] = field(default=(), compare=False)

    @property
    def traits(self) -> Traits:
        """The traits of its model type."""
        return MODEL_TYPES[self.model_type]

    @functools.cached_property
    def attention_shapes(self) -> dict[AttentionShape, int]:
        """Each kind of attention, and how many layers have it, in order of first use."""
        return dict(Counter(each for each in self.attentions if each is not None))

    @functools.cached_property
    def attentions(self) -> tuple[AttentionShape | None, ...]:
        """The heads of every layer; None where something else is instead."""
        if self.traits.one_part:
            return tuple(self._attention(False, False) if each == ATTENTION else None for each in self.layer_parts)
        return tuple(
            None if is_recurrent else self._attention(windowed, layer >= self.layers - self.shared_layers)
            for layer, (windowed, is_recurrent) in enumerate(
                zip(self._windowed_layers(), self._recurrent_layers(), strict=True)
            )
        )

    def _attention(self, windowed: bool, is_shared: bool) -> AttentionShape:
        if self.kv_latent:  # queries are brought to the latents: these are the keys and values of one head
            return AttentionShape(self.heads, 1, self.kv_latent + self.rotary, keys=0, values=0)
        makes = 0 if is_shared else 1
        if windowed:
            heads = self.window_heads or self.heads
            return AttentionShape(heads, self.kv_heads, self.head_dim, self.window, makes, makes)
        kv_heads, head_dim = self.global_kv_heads or self.kv_heads, self.global_head_dim or self.head_dim
        return AttentionShape(self.heads, kv_heads, head_dim, 0, makes, 0 if self.keys_as_values else makes)

    @property
    def query_columns(self) -> int:
        """Columns of the queries of a token."""
        return self.heads * self.head_dim

    @property
    def query_rows(self) -> int:
        """Rows of the matrix that makes queries, and gates where attention has them."""
        return self.query_columns * (2 if self.traits.hybrid else 1)

    @property
    def delta_channels(self) -> int:
        """Columns of q, k and v of a gated delta net."""
        return 2 * self.delta_key_heads * self.delta_key_dim + self.delta_columns

    @property
    def delta_columns(self) -> int:
        """Columns of the output of the heads of a gated delta net."""
        return self.delta_value_heads * self.delta_value_dim

    @property
    def plain_layers(self) -> int:
        """Layers with a dense MLP, which may be beside experts."""
        if self.traits.one_part:
            return self.dense_layers
        return self.layers if self.traits.two_head_sizes else self.layers - self.expert_layers

    @property
    def wide_layers(self) -> int:
        """Layers whose MLP is twice as wide."""
        return self.shared_layers if self.wide_shared_layers else 0

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        if not self.experts:
            return 0
        others = self.recurrent_layers + self.attention_layers if self.traits.one_part else 0
        return self.layers - self.dense_layers - others

    @functools.cached_property
    def layer_parts(self) -> tuple[str, ...]:
        """The part of every layer of a model whose layers have one each: as stated, else spread evenly."""
        counts = {
            MAMBA: self.recurrent_layers, EXPERTS: self.expert_layers, ATTENTION: self.attention_layers,
            MLP: self.dense_layers,
        }  # fmt: skip
        return self.parts if Counter(self.parts) == Counter(counts) else spread(counts)

    @functools.cached_property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """The cache of each layer, as `models.decoder.Decoder.cache_layout`."""
        shape = (self.delta_value_heads, self.delta_key_dim, self.delta_value_dim)
        state = RecurrentState(*shape, self.delta_channels, self.delta_kernel - 1)
        if self.conv_kernel:
            state = RecurrentState(0, 0, 0, self.hidden, self.conv_kernel - 1)
        found: list[LayerCache] = [
            state if each is None else KeysAndValues(each.kv_heads, each.head_dim, each.window)
            for each in self.attentions
        ]
        if self.kv_latent:
            found = [Latents(self.kv_latent + self.rotary)] * self.layers
        if self.traits.one_part:
            mixes = (MAMBA, ATTENTION)
            found = [
                kept if part in mixes else EmptyCache() for part, kept in zip(self.layer_parts, found, strict=True)
            ]
        for layer, source in sources(self._windowed_layers(), self.shared_layers).items():
            found[layer] = SharedCache(source)
        return tuple(found)

    @functools.cached_property
    def cache_kinds(self) -> dict[LayerCache, int]:
        """Each kind of `layer_caches`, and how many layers are of it."""
        return dict(Counter(self.layer_caches))

    def _recurrent_layers(self) -> tuple[bool, ...]:
        """Return, per layer, whether it is recurrent: as stated, else in the usual order, else the lower ones."""
        for found in (self.recurrent, recurrent_layers({}, self.layers)):
            if len(found) == self.layers and sum(found) == self.recurrent_layers:
                return found
        return tuple(layer < self.recurrent_layers for layer in range(self.layers))

    def _windowed_layers(self) -> tuple[bool, ...]:
        """Return, per layer, whether it is windowed: as stated, else by the family's order, else the upper."""
        if not self.window or not self.window_layers:
            return (False,) * self.layers
        upper = {"max_window_layers": self.layers - self.window_layers}
        for found in (self.windowed, self.traits.windowed_layers(upper, self.layers)):
            if len(found) == self.layers and sum(found) == self.window_layers:
                return found
        return upper_layers(upper, self.layers)

    @property
    def layer_norms(self) -> int:
        """Norms of the stream in a layer."""
        return 4 if self.traits.four_norms else 1 if self.traits.one_part or self.traits.parallel else 2

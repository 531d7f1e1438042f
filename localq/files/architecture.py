"""The shape of a decoder and its weight counts. Torch-free.

Formats and bytes are not here (`format_sizes`, `localq.planner`). Counts follow the tensors of Hugging Face checkpoints
(transformers' modelling files of the types in `model_types`), text part only.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from localq.errors import bad_file
from localq.files.context_length import longest_context
from localq.files.layer_caches import KeysAndValues, LayerCache, RecurrentState, keys_and_values
from localq.files.model_types import (
    MODEL_TYPES,
    Traits,
    dense_layers,
    recurrent_layers,
    text_part,
    upper_layers,
    windows,
)
from localq.kv_bits import KvBits

INPUTS = (  # names of Linears that read the residual stream
    "q_proj", "k_proj", "v_proj", "qkv_proj", "in_proj_qkv", "in_proj_z",
    "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "lm_head",
)  # fmt: skip


@dataclass(frozen=True)
class Linears:
    """`count` matrices of one shape [rows, columns] = [out, in]; `expert`: a token uses only some of them."""

    name: str
    rows: int
    columns: int
    count: int
    expert: bool = False

    @property
    def parameters(self) -> int:
        """Weights of all `count` matrices."""
        return self.rows * self.columns * self.count


@dataclass(frozen=True)
class Architecture:
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
    recurrent_layers     layers with a gated delta net instead of attention
    delta_key_heads, delta_value_heads, delta_key_dim, delta_value_dim   its heads, which share keys, and their widths
    delta_kernel         tokens that its convolution sees
    qkv_bias, output_bias, mlp_bias   biases of q, k and v; the attention output; the MLP projections
    stored_head          bytes of the output head in the format of the files, where they store it quantized and a GPU
                         keeps it so (GGUF); 0 = it is in 16 bit
    thinks               replies may begin with a thought, which takes context; not part of the shape, so shapes that
                         differ in it are equal
    windowed             which layers are windowed, as config.json states it; (): those that are usual for the model
                         type and the number of windowed layers; nor part of the shape
    recurrent            as `windowed`, of the layers with a gated delta net
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
    recurrent_layers: int = 0
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_kernel: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    stored_head: int = 0
    thinks: bool = field(default=False, compare=False)
    windowed: tuple[bool, ...] = field(default=(), compare=False)
    recurrent: tuple[bool, ...] = field(default=(), compare=False)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Architecture:
        """From a Hugging Face config.json, flat or with `text_config`, of transformers 4 or 5.

        Raises LocalqError: exit 1 for a model type that is not in `model_types`, exit 8 for a missing field and for
        inconsistent numbers. `model_folder` checks the range of each number when it reads the file.
        """
        model_type, text = text_part(config)
        null = ("sliding_window", "num_key_value_heads")  # means none, and as many as heads, not the default
        stated = {key: value for key, value in text.items() if value is not None or key in null}
        try:
            return _check(_from_text_config(model_type, {**MODEL_TYPES[model_type].defaults, **stated}))
        except KeyError as error:
            raise bad_file("config.json", f"{error} is missing", "Download the model again.") from error

    @property
    def traits(self) -> Traits:
        """The traits of its model type."""
        return MODEL_TYPES[self.model_type]

    @functools.cached_property
    def linears(self) -> tuple[Linears, ...]:
        """The block matrices that formats may quantize (no embedding, head, norm or router), over all layers."""
        kv, layers = self.kv_heads * self.head_dim, self.layers - self.recurrent_layers
        if self.traits.fused:
            inputs: tuple[Linears, ...] = (Linears("qkv", self.query_columns + 2 * kv, self.hidden, layers),)
        else:
            name = "q and gate" if self.traits.hybrid else "q"
            inputs = (
                Linears(name, self.query_rows, self.hidden, layers),
                Linears("k and v", kv, self.hidden, 2 * layers),
            )
        output = Linears("attention output", self.hidden, self.query_columns, layers)
        if self.traits.attention_gate:
            inputs = (*inputs, Linears("attention gate", self.query_columns, self.hidden, layers))
        return (*inputs, output, *self._delta_nets(), *self._mlp())

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

    def _delta_nets(self) -> tuple[Linears, ...]:
        if not self.recurrent_layers:
            return ()
        return (
            Linears("delta qkv", self.delta_channels, self.hidden, self.recurrent_layers),
            Linears("delta gate", self.delta_columns, self.hidden, self.recurrent_layers),
            Linears("delta output", self.hidden, self.delta_columns, self.recurrent_layers),
        )

    def _mlp(self) -> tuple[Linears, ...]:
        experts = self._gated(self.expert_intermediate, self.expert_layers * self.experts, True)
        return (
            *experts,
            *self.shared_experts,
            *self._gated(self.intermediate, self.layers - self.expert_layers, False),
        )

    @property
    def shared_experts(self) -> tuple[Linears, ...]:
        """The matrices of the experts that every token goes through."""
        return self._gated(self.shared_intermediate, self.expert_layers if self.shared_intermediate else 0, False)

    def _gated(self, width: int, copies: int, expert: bool) -> tuple[Linears, ...]:
        down = Linears("down", self.hidden, width, copies, expert)
        if not copies:
            return ()
        if self.traits.fused:
            return Linears("gate and up", 2 * width, self.hidden, copies, expert), down
        return Linears("gate, up", width, self.hidden, 2 * copies, expert), down

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @functools.cached_property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """What each layer keeps of a text, as `models.decoder.Decoder.cache_layout`."""
        shape = (self.delta_value_heads, self.delta_key_dim, self.delta_value_dim)
        state = RecurrentState(*shape, self.delta_channels, self.delta_kernel - 1)
        return tuple(
            state if is_recurrent else KeysAndValues(self.kv_heads, self.head_dim, self.window if windowed else 0)
            for windowed, is_recurrent in zip(self._windowed_layers(), self._recurrent_layers(), strict=True)
        )

    @functools.cached_property
    def cache_kinds(self) -> dict[LayerCache, int]:
        """Each kind of `layer_caches`, and how many layers are of it."""
        return dict(Counter(self.layer_caches))

    def _recurrent_layers(self) -> tuple[bool, ...]:
        """Which layers have a gated delta net: as stated, else in the usual order, else the lower ones."""
        for found in (self.recurrent, recurrent_layers({}, self.layers)):
            if len(found) == self.layers and sum(found) == self.recurrent_layers:
                return found
        return tuple(layer < self.recurrent_layers for layer in range(self.layers))

    def _windowed_layers(self) -> tuple[bool, ...]:
        """Which layers are windowed: as stated, else in the family's usual order, else the upper ones."""
        if not self.window or not self.window_layers:
            return (False,) * self.layers
        upper = {"max_window_layers": self.layers - self.window_layers}
        for found in (self.windowed, self.traits.windowed_layers(upper, self.layers)):
            if len(found) == self.layers and sum(found) == self.window_layers:
                return found
        return upper_layers(upper, self.layers)

    def columns_of(self, name: str) -> int | None:
        """Columns of the Linears whose name in a checkpoint ends in `name` ("down_proj"); None if unknown."""
        if name == "o_proj":
            return self.query_columns
        if name == "out_proj":
            return self.delta_columns or None
        if name in ("down_proj", "w2"):
            return self.intermediate or self.expert_intermediate
        return self.hidden if name in INPUTS else None

    @property
    def linear_parameters(self) -> int:
        """Weights of `linears`."""
        return sum(each.parameters for each in self.linears)

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding table."""
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """Weights of the head; 0 if it is the embedding table."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def other_parameters(self) -> int:
        """Weights of norms, biases, routers and attention sinks, which every format keeps in 16 bit."""
        traits, kv, attention = self.traits, self.kv_heads * self.head_dim, self.layers - self.recurrent_layers
        layer = self.hidden * (4 if traits.four_norms else 2)
        of_attention = 2 * self.head_dim if traits.qk_norm else 0
        of_attention += self.query_rows + 2 * kv if self.qkv_bias else 0
        of_attention += self.hidden if self.output_bias else 0
        of_attention += self.heads if traits.sinks else 0
        others = of_attention * attention + self._delta_others() * self.recurrent_layers
        others += self.hidden * self.expert_layers if self.shared_intermediate else 0  # the shared expert's gate
        routers = self.expert_layers * self.experts * self.hidden
        if self.mlp_bias:
            width = self.expert_intermediate if self.experts else self.intermediate
            layer += max(self.experts, 1) * (2 * width + self.hidden)
            layer += self.experts  # the router's
        return layer * self.layers + others + routers + self.hidden

    def _delta_others(self) -> int:
        """Weights of a gated delta net that stay in 16 bit: rates, convolution, norm."""
        of_head = 2 * self.hidden + 2  # in_proj_a, in_proj_b; dt_bias, A_log
        return self.delta_value_heads * of_head + self.delta_channels * self.delta_kernel + self.delta_value_dim

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.linear_parameters + self.embedding_parameters + self.head_parameters + self.other_parameters

    @property
    def active_linear_parameters(self) -> int:
        """Weights of `linears` that one token uses."""
        idle = sum(each.parameters for each in self.linears if each.expert)
        return self.linear_parameters - (idle - idle * self.experts_active // self.experts if self.experts else 0)

    def kv_bytes_per_token(self, bits: KvBits = 16) -> int:
        """Bytes of the keys and values of one position over all layers."""
        return sum(each.slot_bytes(bits) for each in keys_and_values(self.layer_caches))


def _from_text_config(model_type: str, text: dict[str, Any]) -> Architecture:
    traits = MODEL_TYPES[model_type]
    layers, heads, hidden = text["num_hidden_layers"], text["num_attention_heads"], text["hidden_size"]
    counts = (text[name] for name in ("num_local_experts", "num_experts") if text.get(name) is not None)
    experts = next(counts, traits.experts) if traits.experts else 0
    dense = dense_layers(text, layers) if experts and traits.own_expert_width else 0
    experts = 0 if dense == layers else experts
    active = _first(text, "num_experts_per_tok", "experts_per_token") or 0
    # gpt-oss and mixtral call the width of an expert intermediate_size; qwen3_moe has both.
    named = "moe_intermediate_size" if traits.own_expert_width else "intermediate_size"
    expert_width = text.get(named) or text["intermediate_size"]
    attention_bias = bool(text.get("attention_bias", False))
    window, windowed = windows(model_type, text, layers)
    recurrent = recurrent_layers(text, layers) if traits.hybrid else ()
    delta = text if any(recurrent) else {}
    return Architecture(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        intermediate=0 if experts and not dense else text["intermediate_size"],
        vocab=text["vocab_size"],
        tied=bool(text.get("tie_word_embeddings", False)),
        max_context=longest_context({**text, "model_type": model_type}),
        window=window,
        window_layers=sum(windowed),
        windowed=windowed,
        experts=experts,
        experts_active=active if experts else 0,
        expert_intermediate=expert_width if experts else 0,
        dense_layers=dense if experts else 0,
        shared_intermediate=(text.get("shared_expert_intermediate_size") or 0) if experts and traits.hybrid else 0,
        rotary=_rotary(text) if traits.partial_rotary else 0,
        recurrent_layers=sum(recurrent),
        recurrent=recurrent,
        delta_key_heads=delta.get("linear_num_key_heads", 0),
        delta_value_heads=delta.get("linear_num_value_heads", 0),
        delta_key_dim=delta.get("linear_key_head_dim", 0),
        delta_value_dim=delta.get("linear_value_head_dim", 0),
        delta_kernel=delta.get("linear_conv_kernel_dim", 0),
        qkv_bias=attention_bias or traits.qkv_bias,
        output_bias=attention_bias,
        mlp_bias=bool(text.get("mlp_bias", False)) or traits.mlp_bias,
    )


def _rotary(text: dict[str, Any]) -> int:
    entry = text.get("rope_parameters") or text.get("rope_scaling")
    stated = entry.get("partial_rotary_factor") if isinstance(entry, dict) else None
    factor = text.get("partial_rotary_factor") if stated is None else stated
    return int(text["head_dim"] * factor) if isinstance(factor, float) and 0 < factor < 1 else 0


def _check(arch: Architecture) -> Architecture:
    """`arch`. Raises LocalqError (exit 8) for inconsistent numbers."""
    if arch.head_dim < 1 or arch.heads % arch.kv_heads:
        why = f"{arch.heads} heads, {arch.kv_heads} KV heads and {arch.hidden} columns are inconsistent"
        raise bad_file("config.json", why, "Download the model again.")
    if arch.recurrent_layers and arch.delta_value_heads % arch.delta_key_heads:
        of_heads = f"linear_num_key_heads ({arch.delta_key_heads})"
        why = f"linear_num_value_heads ({arch.delta_value_heads}) is not a multiple of {of_heads}"
        raise bad_file("config.json", why, "Download the model again.")
    if arch.experts_active > arch.experts:
        why = f"{arch.experts_active} experts per token are requested, but the model has only {arch.experts}"
        raise bad_file("config.json", why, "Download the model again.")
    return arch


def _first(fields: dict[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if name in fields), None)

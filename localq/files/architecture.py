"""The matrices of a decoder and its weight counts, by its sizes (`shape`). Torch-free.

Formats and bytes are not here (`format_sizes`, `localq.planner`). Counts follow the tensors of Hugging Face checkpoints
(transformers' modelling files of the types in `model_types`), text part only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from localq.errors import bad_file
from localq.files.architecture_fields import checked, fields_of
from localq.files.attention_shapes import AttentionShape
from localq.files.layer_caches import per_position
from localq.files.linears import INPUTS, Linears
from localq.files.model_types import MODEL_TYPES, text_part
from localq.files.shape import Shape
from localq.kv_bits import KvBits


@dataclass(frozen=True)
class Architecture(Shape):
    """A decoder by its sizes: its matrices, and how many weights it has."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Architecture:
        """From a Hugging Face config.json, flat or with `text_config`, of transformers 4 or 5.

        Raises LocalqError: exit 1 for a model type that is not in `model_types`, exit 8 for a missing field and for
        inconsistent numbers. `model_folder` checks the range of each number when it reads the file.
        """
        model_type, text = text_part(config)
        # null means none, and as many KV heads as heads, not the default
        null = ("sliding_window", "num_key_value_heads", "hidden_size_per_layer_input", "q_lora_rank")
        stated = {key: value for key, value in text.items() if value is not None or key in null}
        try:
            return cls(**checked(fields_of(model_type, {**MODEL_TYPES[model_type].defaults, **stated})))
        except KeyError as error:
            raise bad_file("config.json", f"{error} is missing", "Download the model again.") from error

    @functools.cached_property
    def linears(self) -> tuple[Linears, ...]:
        """The block matrices that formats may quantize (no embedding, head, norm or router), over all layers."""
        attention: dict[Linears, int] = {}  # of one layer -> layers
        for shape, layers in self.attention_shapes.items():
            for each in self._attention_linears(shape):
                attention[each] = attention.get(each, 0) + layers
        found = (replace(each, count=each.count * layers) for each, layers in attention.items() if each.count)
        return (*found, *self._delta_nets(), *self._convolutions(), *self._mlp())

    def _attention_linears(self, shape: AttentionShape) -> tuple[Linears, ...]:
        """The matrices of one layer of attention."""
        if self.kv_latent:
            return self._latent_linears()
        query, output = shape.query_width, Linears("attention output", self.hidden, shape.query_width, 1)
        if self.traits.fused:
            return Linears("qkv", query + 2 * shape.kv_width, self.hidden, 1), output
        inputs = (
            Linears("q and gate", 2 * query, self.hidden, 1)
            if self.traits.hybrid
            else Linears("q", query, self.hidden, 1),
            Linears("k and v", shape.kv_width, self.hidden, shape.keys + shape.values),
        )
        gate = (Linears("attention gate", query, self.hidden, 1),) if self.traits.attention_gate else ()
        return (*inputs, *gate, output)

    def _latent_linears(self) -> tuple[Linears, ...]:
        """The matrices of one layer of latent attention, without the one from latents to heads."""
        rows = self.query_columns
        from_latent = (
            Linears("q latent", self.query_latent, self.hidden, 1), Linears("q", rows, self.query_latent, 1),
        )  # fmt: skip
        return (
            *(from_latent if self.query_latent else (Linears("q", rows, self.hidden, 1),)),
            Linears("k and v latent", self.kv_latent + self.rotary, self.hidden, 1),
            Linears("attention output", self.hidden, self.heads * self.value_dim, 1),
        )

    def _convolutions(self) -> tuple[Linears, ...]:
        if not self.conv_kernel:
            return ()
        return (
            Linears("convolution inputs", 3 * self.hidden, self.hidden, self.recurrent_layers),
            Linears("convolution output", self.hidden, self.hidden, self.recurrent_layers),
        )

    def _delta_nets(self) -> tuple[Linears, ...]:
        if not self.recurrent_layers or self.conv_kernel:
            return ()
        if self.traits.mamba:  # its gate, what is convolved, and a rate per head
            rows = self.delta_columns + self.delta_channels + self.delta_value_heads
            return (
                Linears("mamba input", rows, self.hidden, self.recurrent_layers),
                Linears("mamba output", self.hidden, self.delta_columns, self.recurrent_layers),
            )
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
            *self._gated(self.intermediate, self.plain_layers - self.wide_layers, False),
            *self._gated(2 * self.intermediate, self.wide_layers, False),
        )

    @property
    def shared_experts(self) -> tuple[Linears, ...]:
        """The matrices of the experts that every token goes through."""
        return self._gated(self.shared_intermediate, self.expert_layers if self.shared_intermediate else 0, False)

    def _gated(self, width: int, copies: int, expert: bool) -> tuple[Linears, ...]:
        down = Linears("down", self.hidden, width, copies, expert)
        if not copies:
            return ()
        if self.traits.ungated_mlp:
            return Linears("up", width, self.hidden, copies, expert), down
        if self.traits.fused or (self.traits.fused_mlp and not expert):
            return Linears("gate and up", 2 * width, self.hidden, copies, expert), down
        return Linears("gate, up", width, self.hidden, 2 * copies, expert), down

    def columns_of(self, name: str, layer: int = 0) -> int | None:
        """Columns of the Linear of a layer whose name in a checkpoint ends in `name` ("down_proj"); None if unknown."""
        layer = min(layer, self.layers - 1)
        if self.kv_latent and name in ("q_b_proj", "kv_b_proj", "o_proj"):
            return {"q_b_proj": self.query_latent, "kv_b_proj": self.kv_latent}.get(name, self.heads * self.value_dim)
        if name == "o_proj":
            found = self.attentions[layer]
            return self.query_columns if found is None else found.query_width
        if name == "out_proj" and self.traits.short_convolution:  # of attention, too
            found = self.attentions[layer]
            return self.hidden if found is None else found.query_width
        if name == "out_proj":
            return self.delta_columns or None
        if name in ("down_proj", "w2"):
            is_wide = layer >= self.layers - self.wide_layers
            return self.intermediate * (2 if is_wide else 1) or self.expert_intermediate
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
    def input_table_parameters(self) -> int:
        """Weights of the table of what layers add per token."""
        return self.input_vocab * self.layers * self.input_width

    @property
    def head_parameters(self) -> int:
        """Weights of the head; 0 if it is the embedding table."""
        return 0 if self.tied else self.vocab * self.hidden

    @functools.cached_property
    def other_parameters(self) -> int:
        """Weights of norms, biases, routers and attention sinks, which every format keeps in 16 bit."""
        traits = self.traits
        layer = self.hidden * self.layer_norms + traits.two_head_sizes
        others = sum(self._attention_others(shape) * layers for shape, layers in self.attention_shapes.items())
        recurrent = self._convolution_others() if self.conv_kernel else self._delta_others()
        others += recurrent * self.recurrent_layers + self._input_others()
        if self.shared_intermediate and traits.hybrid:  # the shared expert's gate
            others += self.hidden * self.expert_layers
        routers = self.expert_layers * self.experts * (self.hidden + self.selection_bias)
        if traits.two_head_sizes:  # norms around both MLPs; scales of what the router reads, and of its experts
            routers += self.expert_layers * (4 * self.hidden + self.experts)
        if self.mlp_bias:
            width = self.expert_intermediate if self.experts else self.intermediate
            layer += max(self.experts, 1) * (2 * width + self.hidden)
            layer += self.experts  # the router's
        return layer * self.layers + others + routers + self.hidden

    @property
    def wide_parameters(self) -> int:
        """Weights of `other_parameters` that stay in f32: of routers, and the rates of Mamba-2."""
        routers = self.expert_layers * self.experts * (self.hidden + 1) if self.traits.sigmoid_router else 0
        return routers + (3 * self.delta_value_heads * self.recurrent_layers if self.traits.mamba else 0)

    def _input_others(self) -> int:
        """Weights of what layers add per token, without the table: projections, and norms."""
        if not self.input_width:
            return 0
        layer = self.hidden * (3 * self.input_width + 1)  # of the embedding; gate, projection and norm in the block
        return self.layers * layer + self.input_width

    def qk_norm_weights(self, shape: AttentionShape) -> int:
        """Weights of the norms of queries and keys of a layer."""
        if not self.traits.qk_norm:
            return 0
        if self.traits.wide_norms:
            return shape.query_width + shape.keys * shape.kv_width
        return (1 + shape.keys) * shape.head_dim

    def _attention_others(self, shape: AttentionShape) -> int:
        """Weights of a layer of attention that stay in 16 bit: norms, biases, sinks."""
        if self.kv_latent:
            return self._latent_others()
        found = self.qk_norm_weights(shape)
        if self.qkv_bias:
            found += (2 if self.traits.hybrid else 1) * shape.query_width
            found += (shape.keys + shape.values) * shape.kv_width
        found += self.hidden * shape.heads if self.traits.head_gates else 0
        return found + (self.hidden if self.output_bias else 0) + (self.heads if self.traits.sinks else 0)

    def _latent_others(self) -> int:
        """Weights of a layer of latent attention that stay in 16 bit: from latents to heads, norms, biases."""
        found = self.heads * (self.head_dim - self.rotary + self.value_dim) * self.kv_latent
        found += self.kv_latent + self.query_latent
        found += self.query_latent + self.kv_latent + self.rotary if self.qkv_bias else 0
        return found + (self.hidden if self.output_bias else 0)

    def _convolution_others(self) -> int:
        """Weights of a short convolution that stay in 16 bit: its own, and biases."""
        return self.hidden * (self.conv_kernel + (5 if self.conv_bias else 0))  # of 3, 1 and 1 parts

    def _delta_others(self) -> int:
        """Weights of a gated delta net, or a Mamba-2, that no format takes: rates, convolution, norm."""
        if self.traits.mamba:  # with dt_bias, A_log and D; the convolution has a bias, and the norm all columns
            return 3 * self.delta_value_heads + self.delta_channels * (self.delta_kernel + 1) + self.delta_columns
        of_head = 2 * self.hidden + 2  # in_proj_a, in_proj_b; dt_bias, A_log
        return self.delta_value_heads * of_head + self.delta_channels * self.delta_kernel + self.delta_value_dim

    @property
    def parameters(self) -> int:
        """All weights."""
        tables = self.embedding_parameters + self.input_table_parameters
        return self.linear_parameters + tables + self.head_parameters + self.other_parameters

    @property
    def active_linear_parameters(self) -> int:
        """Weights of `linears` that one token uses."""
        idle = sum(each.parameters for each in self.linears if each.expert)
        return self.linear_parameters - (idle - idle * self.experts_active // self.experts if self.experts else 0)

    def kv_bytes_per_token(self, bits: KvBits = 16) -> int:
        """Bytes of the keys and values, or latents, of one position over all layers."""
        return sum(each.slot_bytes(bits) for each in per_position(self.layer_caches))

"""The facts about a model's shape that planning needs, and the counts that follow from them. Torch-free.

Knows no format and no memory: bytes are the planner's. Counts follow the tensors of the Hugging Face checkpoints
(transformers' modelling files of the model types in `MODEL_TYPES`), text part only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localq import kv_bits
from localq.errors import LocalqError, bad_file
from localq.kv_bits import KvBits


def dense_layers(text: dict[str, Any], layers: int) -> int:
    """Layers without experts: those that are named, and all but every `decoder_sparse_step`-th.

    Raises LocalqError (exit 8).
    """
    named, step = text.get("mlp_only_layers", []), text.get("decoder_sparse_step", 1)
    if type(step) is not int or step < 1 or not isinstance(named, list) or any(type(each) is not int for each in named):
        why = f"mlp_only_layers {str(named)[:40]} and decoder_sparse_step {str(step)[:40]} name no layers"
        raise bad_file("config.json", why, "Fetch the model again.")
    return len({layer for layer in range(layers) if (layer + 1) % step} | ({*named} & {*range(layers)}))


def windows(model_type: str, text: dict[str, Any], layers: int) -> tuple[int, int]:
    """(window in tokens, windowed layers). transformers 5 lists `layer_types`; before, the family's rule holds.

    Raises LocalqError (exit 8).
    """
    window = text.get("sliding_window") or 0
    optional = model_type in ("qwen2", "qwen3", "qwen3_moe", "smollm3")  # a window is stated there, and inert
    if not window or (optional and not text.get("use_sliding_window", False)):
        return 0, 0
    if types := text.get("layer_types"):
        count = sum(kind == "sliding_attention" for kind in types)
    elif model_type in ("gemma2", "gpt_oss"):
        count = (layers + 1) // 2  # layers 0, 2, 4, ...
    elif model_type in ("gemma3", "gemma3_text"):
        pattern = text.get("sliding_window_pattern") or 6
        if type(pattern) is not int or pattern < 1:  # other families write letters here
            raise bad_file("config.json", f"sliding_window_pattern is {str(pattern)[:40]}", "Fetch the model again.")
        count = layers - layers // pattern
    elif model_type in ("qwen2", "qwen3"):
        count = max(layers - (text.get("max_window_layers") or 0), 0)
    elif model_type == "smollm3":  # the layers without a rotary embedding, for which its list has zeros
        turning, interval = text.get("no_rope_layers"), text.get("no_rope_layer_interval")
        every = interval if type(interval) is int and interval > 0 else 4
        count = turning.count(0) if isinstance(turning, list) else layers // every
    else:
        count = layers  # mistral, mixtral, phi3, qwen3_moe: every layer
    return (window, count) if count else (0, 0)


# model_type -> what sets its checkpoints apart from "llama": four norms a layer, q and k norms, fused projections,
# and biases that the family always has.
MODEL_TYPES: dict[str, frozenset[str]] = {
    "llama": frozenset(),
    "mistral": frozenset(),
    "mixtral": frozenset({"moe"}),
    "qwen2": frozenset({"qkv_bias"}),
    "qwen3": frozenset({"qk_norm"}),
    "qwen3_moe": frozenset({"qk_norm", "moe"}),
    "gemma2": frozenset({"four_norms"}),
    "gemma3": frozenset({"four_norms", "qk_norm"}),
    "gemma3_text": frozenset({"four_norms", "qk_norm"}),
    "phi3": frozenset({"fused"}),
    "smollm3": frozenset(),
    "gpt_oss": frozenset({"moe", "mlp_bias", "sinks"}),
}
# What config.json may leave out because it is the default of transformers' configuration class.
_GEMMA3 = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
    "max_position_embeddings": 131_072, "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096, "tie_word_embeddings": True},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "smollm3": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "attention_bias": True, "num_experts_per_tok": 4},
    "mixtral": {"num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
_EXPERTS = {"gpt_oss": 128, "mixtral": 8, "qwen3_moe": 128}  # where neither name of their count is there


@dataclass(frozen=True)
class Linears:
    """`count` matrices of one shape [rows, columns] = [out, in]; `expert` when only some are read per token."""

    name: str
    rows: int
    columns: int
    count: int
    expert: bool = False

    @property
    def parameters(self) -> int:
        """Weights in all of them."""
        return self.rows * self.columns * self.count


@dataclass(frozen=True)
class Architecture:
    """A decoder's shape. Sizes in elements, contexts in tokens.

    intermediate         width of the dense MLP; 0 where every layer has experts
    dense_layers         of a model with experts: those that have a dense MLP instead
    vocab                rows of the embedding table
    tied                 the head is the embedding table
    max_context          positions that the model was made for
    window               keys that a windowed layer looks at; 0 = no layer is windowed
    window_layers        how many layers are windowed
    experts              per layer; 0 = dense
    experts_active       experts that one token goes through
    expert_intermediate  width of one expert's MLP
    qkv_bias, output_bias, mlp_bias   biases of the q, k, v; the attention output; the MLP projections
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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Architecture:
        """From a Hugging Face config.json, flat or with `text_config`, of transformers 4 or 5.

        Raises LocalqError: exit 1 for a model type that is not in `MODEL_TYPES`, exit 8 for a missing field and for
        numbers that no model has together. Each number by itself is checked where the file is read (`modelfiles`).
        """
        outer = config.get("model_type")
        inner = config.get("text_config")
        if outer not in MODEL_TYPES:
            known, named = ", ".join(sorted(MODEL_TYPES)), repr(outer)[:80]
            raise LocalqError("config.json", f"the architecture {named} is not supported", f"Supported: {known}.")
        model_type = str(outer)
        text = inner if isinstance(inner, dict) else config
        tied = config.get("tie_word_embeddings")  # a wrapper's own word counts where its text part has none
        outside = {} if tied is None else {"tie_word_embeddings": tied}
        stated = {key: value for key, value in text.items() if value is not None}
        try:
            return _sound(_from_text_config(model_type, {**_DEFAULTS.get(model_type, {}), **outside, **stated}))
        except KeyError as error:
            raise bad_file("config.json", f"{error} is missing", "Fetch the model again.") from error

    @property
    def linears(self) -> tuple[Linears, ...]:
        """The block matrices that formats may quantize (no embedding, head, norm, router), over all layers."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if "fused" in MODEL_TYPES[self.model_type]:
            inputs: tuple[Linears, ...] = (Linears("qkv", q + 2 * kv, self.hidden, self.layers),)
        else:
            inputs = (Linears("q", q, self.hidden, self.layers), Linears("k and v", kv, self.hidden, 2 * self.layers))
        return (*inputs, Linears("attention output", self.hidden, q, self.layers), *self._mlp())

    def _mlp(self) -> tuple[Linears, ...]:
        experts = self._gated(self.expert_intermediate, self.expert_layers * self.experts, True)
        return (*experts, *self._gated(self.intermediate, self.layers - self.expert_layers, False))

    def _gated(self, width: int, copies: int, expert: bool) -> tuple[Linears, ...]:
        down = Linears("down", self.hidden, width, copies, expert)
        if not copies:
            return ()
        if "fused" in MODEL_TYPES[self.model_type]:
            return Linears("gate and up", 2 * width, self.hidden, copies, expert), down
        return Linears("gate, up", width, self.hidden, 2 * copies, expert), down

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is a mixture."""
        return self.layers - self.dense_layers if self.experts else 0

    def columns_of(self, name: str) -> int | None:
        """Columns of the Linear whose name in a checkpoint ends in `name` ("down_proj"); None for one not known."""
        if name == "o_proj":
            return self.heads * self.head_dim
        if name in ("down_proj", "w2"):
            return self.intermediate or self.expert_intermediate
        inputs = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3")
        return self.hidden if name in (*inputs, "lm_head") else None

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
        """Weights of the head; 0 where it is the embedding table."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def other_parameters(self) -> int:
        """Norms, biases, routers and attention sinks: kept in 16 bit by every format."""
        traits = MODEL_TYPES[self.model_type]
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (4 if "four_norms" in traits else 2)
        layer += 2 * self.head_dim if "qk_norm" in traits else 0
        layer += q + 2 * kv if self.qkv_bias else 0
        layer += self.hidden if self.output_bias else 0
        layer += self.heads if "sinks" in traits else 0
        routers = self.expert_layers * self.experts * self.hidden
        if self.mlp_bias:
            width = self.expert_intermediate if self.experts else self.intermediate
            layer += max(self.experts, 1) * (2 * width + self.hidden)
            layer += self.experts  # the router's
        return layer * self.layers + routers + self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.linear_parameters + self.embedding_parameters + self.head_parameters + self.other_parameters

    @property
    def active_linear_parameters(self) -> int:
        """Weights of `linears` that one token goes through."""
        idle = sum(each.parameters for each in self.linears if each.expert)
        return self.linear_parameters - (idle - idle * self.experts_active // self.experts if self.experts else 0)

    def kv_bytes_per_token(self, bits: KvBits = 16) -> int:
        """Bytes of keys and values that one position takes over all layers."""
        return self.layers * self.kv_heads * kv_bits.pair_bytes(self.head_dim, bits)


def _from_text_config(model_type: str, text: dict[str, Any]) -> Architecture:
    traits = MODEL_TYPES[model_type]
    layers, heads, hidden = text["num_hidden_layers"], text["num_attention_heads"], text["hidden_size"]
    counts = (text[name] for name in ("num_local_experts", "num_experts") if text.get(name) is not None)
    experts = next(counts, _EXPERTS[model_type]) if "moe" in traits else 0
    dense = dense_layers(text, layers) if experts and model_type == "qwen3_moe" else 0
    experts = 0 if dense == layers else experts
    active = _first(text, "num_experts_per_tok", "experts_per_token") or 0
    # gpt-oss and mixtral call the width of an expert intermediate_size; qwen3_moe has both.
    named = "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"
    expert_width = text.get(named) or text["intermediate_size"]
    attention_bias = bool(text.get("attention_bias", False))
    window, window_layers = windows(model_type, text, layers)
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
        max_context=text["max_position_embeddings"],
        window=window,
        window_layers=window_layers,
        experts=experts,
        experts_active=active if experts else 0,
        expert_intermediate=expert_width if experts else 0,
        dense_layers=dense if experts else 0,
        qkv_bias=attention_bias or "qkv_bias" in traits,
        output_bias=attention_bias,
        mlp_bias=bool(text.get("mlp_bias", False)) or "mlp_bias" in traits,
    )


def _sound(arch: Architecture) -> Architecture:
    """`arch`, whose numbers go together."""
    if arch.head_dim < 1 or arch.heads % arch.kv_heads:
        why = f"{arch.heads} heads, {arch.kv_heads} of them for keys and values, cannot share {arch.hidden} columns"
        raise bad_file("config.json", why, "Fetch the model again.")
    if arch.experts_active > arch.experts:
        why = f"a token goes through {arch.experts_active} of {arch.experts} experts"
        raise bad_file("config.json", why, "Fetch the model again.")
    return arch


def _first(fields: dict[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if name in fields), None)

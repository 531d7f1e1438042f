"""Differences between the stored values of a tensor and those of Hugging Face, as data.

llama.cpp's converter interleaves the rows of q and k of llama-like models for its rotary kernel, adds 1 to norms that
multiply by 1 + weight, and of gated delta nets stores -exp(A_log) and tiles the value heads: head 0 of every key head
first, then head 1 (convert_hf_to_gguf.py, since 2026 conversion/llama.py, gemma.py and qwen.py). Of Mamba-2 it stores
-exp(A_log) too. Numpy-free but `Order.indices`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

INTERLEAVED = frozenset(  # architectures, as in GGUF
    {"granite", "granitehybrid", "llama", "mistral3", "muse-glimmer", "smollm3"}
)
TILED = frozenset({"qwen35", "qwen35moe"})
MAMBA = frozenset({"granitehybrid", "nemotron_h", "nemotron_h_moe"})
_OFFSET_NORMS = {
    "gemma2": "norm.weight",
    "gemma3": "norm.weight",
    "muse-glimmer": "layernorm.weight",  # all but the last norm
    "qwen35": "norm.weight",
    "qwen35moe": "norm.weight",
}
_PLAIN_NORM = ".linear_attn.norm.weight"
# Of a gated delta net: tensors with a row per column of the value heads, those with one per head, and the others.
_OF_VALUES = (".in_proj_z.weight",)
_OF_HEADS = (".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")
_BEHIND_KEYS = (".in_proj_qkv.weight", ".conv1d.weight")  # rows of q and k, then those of the value heads


@dataclass(frozen=True)
class Order:
    """A permutation of an axis: positions [keep | outer, second, first, inner] stored as such, of which Hugging Face
    has [keep | outer, first, second, inner]. The first `keep` positions stay in place.
    """

    first: int
    second: int
    outer: int = 1
    inner: int = 1
    keep: int = 0

    @property
    def size(self) -> int:
        """Positions of the axis."""
        return self.keep + self.outer * self.first * self.second * self.inner

    def indices(self) -> NDArray[np.int64]:
        """int64 [size]: position i of Hugging Face is the stored position indices[i]."""
        import numpy as np  # start-up cost: headers need no numpy

        stored = np.arange(self.keep, self.size).reshape(self.outer, self.second, self.first, self.inner)
        return np.concatenate((np.arange(self.keep), stored.swapaxes(1, 2).ravel()))


@dataclass(frozen=True)
class StoredLayout:
    """Conversion of stored values to those of Hugging Face.

    rows, columns   order of the first and of the last axis; None where it is the same
    add             added to the values
    negated_exp     the values are -exp(x) of those of Hugging Face
    """

    rows: Order | None = None
    columns: Order | None = None
    add: float = 0.0
    negated_exp: bool = False


AS_STORED = StoredLayout()


def layout_of(architecture: str, config: dict[str, Any], name: str, rows: int) -> StoredLayout:
    """The layout of the tensor with this Hugging Face name.

    config: as of config.json; rows: size of the tensor's first axis. Raises ValueError for a number of rows that no
    such tensor has.
    """
    if architecture in INTERLEAVED and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
        heads = int(config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
        if rows % (2 * heads):
            raise ValueError(f"{rows} rows cannot be divided into {heads} heads")
        return StoredLayout(rows=Order(first=2, second=rows // (2 * heads), outer=heads))
    if architecture in TILED and ".linear_attn." in name and not name.endswith(_PLAIN_NORM):
        return _of_delta_net(config, name)
    if architecture in MAMBA:
        return StoredLayout(negated_exp=name.endswith(".A_log"))
    if name.endswith(_OFFSET_NORMS.get(architecture, ("norm.",))) and not name.endswith(_PLAIN_NORM):
        return StoredLayout(add=-1.0)
    return AS_STORED


def _of_delta_net(config: dict[str, Any], name: str) -> StoredLayout:
    keys, values = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    negated = name.endswith(".A_log")
    if keys == values:  # tiled and grouped are the same
        return StoredLayout(negated_exp=negated)
    heads, columns = Order(keys, values // keys), Order(keys, values // keys, inner=value_dim)
    if name.endswith(_OF_VALUES):
        return StoredLayout(rows=columns)
    if name.endswith(_OF_HEADS):
        return StoredLayout(rows=heads, negated_exp=negated)
    if name.endswith(_BEHIND_KEYS):
        return StoredLayout(rows=Order(keys, values // keys, inner=value_dim, keep=2 * keys * key_dim))
    return StoredLayout(columns=columns) if name.endswith(".out_proj.weight") else AS_STORED

"""Tensors of a checkpoint that generating text does not need. Torch-free.

Loading leaves them out, but for a block that drafts (`engine.load.draft_head`), which quantizing keeps, too.

Only known kinds: any other tensor without a place in the architecture may change what the model says, so loading
refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

VALUE_HEAD = "a reinforcement-learning value head"
CACHE_SCALES = "8-bit KV cache scales"
MORE_TOKENS = "multi-token prediction layers"
TOWERS = "vision and audio towers"
TABLES = "precomputed position and mask tables"

_PREFIX = r"(?:(?:model|language_model|text_model|transformer|pretrained_model)\.)*"
_KINDS = {
    VALUE_HEAD: re.compile(_PREFIX + r"(?:v_head|value_head)\..+"),
    CACHE_SCALES: re.compile(
        r".+\.(?:(?:[kvq]|kv|prob)_(?:scale|zero_point)|[kvq]_proj\.output_(?:scale|zero_point)|kv_cache_scaling_factor)"
    ),
    MORE_TOKENS: re.compile(_PREFIX + r"(?:mtp|mtp_layers|mtp_block|nextn)\..+"),
    TOWERS: re.compile(
        r"(?:(?:model|language_model)\.)*(?:visual|(?:vision|audio)_\w+|embed_(?:vision|audio)|multi_?modal_projector)\..+"
    ),
    TABLES: re.compile(r".+\.(?:rotary_emb\.(?:cos|sin)_cached|masked_bias)"),
}
_MTP_BLOCK = re.compile(_PREFIX + r"mtp\.")
_LAYER = re.compile(_PREFIX + r"layers\.(\d{1,6})\.(.+)")
# Parts that only a layer behind the last one has, where it predicts the token after the next.
_OF_MORE_TOKENS = re.compile(r"(?:eh_proj|enorm|hnorm|embed_tokens|shared_head|token_layernorm|hidden_layernorm)\..+")


def extra_tensors(names: Iterable[str], layers: object) -> dict[str, list[str]]:
    """Kind, in words for users -> names of such tensors, without empty kinds.

    layers: `num_hidden_layers` of config.json. A layer behind the last is left out only if it has the parts that
    predict more tokens: else config.json and the files disagree.
    """
    found: dict[str, list[str]] = {}
    behind: dict[int, list[str]] = {}
    predicting: set[int] = set()
    for name in names:
        kind = next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), None)
        layer = _LAYER.fullmatch(name)
        if layer is not None and type(layers) is int and int(layer[1]) >= layers:
            behind.setdefault(int(layer[1]), []).append(name)
            if _OF_MORE_TOKENS.fullmatch(layer[2]):
                predicting.add(int(layer[1]))
        elif kind is not None:
            found.setdefault(kind, []).append(name)
    if more := [name for layer in sorted(predicting) for name in behind[layer]]:
        found.setdefault(MORE_TOKENS, []).extend(more)
    return found


def is_of_tower(name: str) -> bool:
    """True for a tensor of a vision or audio tower, told by its name alone."""
    return _KINDS[TOWERS].fullmatch(name) is not None


def is_of_mtp_block(name: str) -> bool:
    """True for a tensor of the MTP block of a Qwen3.5 (`models.qwen3_5_mtp`), told by its name alone."""
    return _MTP_BLOCK.match(name) is not None


def is_beside_text(name: str) -> bool:
    """True for a tensor of a tower or of multi-token prediction, told by its name alone."""
    return any(_KINDS[kind].fullmatch(name) for kind in (TOWERS, MORE_TOKENS))


def note(found: dict[str, list[str]]) -> str:
    """One line that lists what `extra_tensors` found; empty without any."""
    return f"skipped (not needed for text): {kinds}" if (kinds := in_words(found)) else ""


def in_words(found: dict[str, list[str]]) -> str:
    """The kinds that `extra_tensors` found, and how many tensors each has; empty without any."""
    return ", ".join(f"{kind} ({len(names)} tensors)" for kind, names in found.items() if kind != TABLES)

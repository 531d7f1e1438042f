"""The parts of models whose layers have one each: a Mamba-2, attention, experts or an MLP. Torch-free.

After transformers' models/nemotron_h/configuration_nemotron_h.py. A config.json lists them by name, or, before
transformers 5, as a string of letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localq.errors import bad_file

MAMBA, ATTENTION, EXPERTS, MLP = "mamba", "attention", "experts", "mlp"
LETTERS = {"M": MAMBA, "*": ATTENTION, "E": EXPERTS, "-": MLP}
NAMES = {
    "linear_attention": MAMBA, "mamba": MAMBA, "full_attention": ATTENTION, "attention": ATTENTION, "moe": EXPERTS,
    "mlp": MLP,
}  # fmt: skip
LISTS, PATTERN = ("layers_block_type", "layer_types"), "hybrid_override_pattern"
MOST = 256  # layers
_SHOWN = 40  # characters of a file's text in a message


def layer_parts(text: Mapping[str, Any]) -> tuple[str, ...]:
    """The part of every layer, from the text part of a config.json. Raises LocalqError (exit 8)."""
    key = next((key for key in (*LISTS, PATTERN) if text.get(key) is not None), LISTS[0])
    stated, known = text.get(key), LETTERS if key == PATTERN else NAMES
    is_sequence = isinstance(stated, str if key == PATTERN else list)
    if not is_sequence or not stated or len(stated) > MOST:
        what = "letters" if key == PATTERN else "names"
        why = f"{key} is {str(stated)[:_SHOWN]}, but must list 1 to {MOST} layer {what}"
        raise bad_file("config.json", why, "Download the model again.")
    if unknown := [each for each in stated if not isinstance(each, str) or each not in known]:
        why = f"{key} has an unknown layer type: {str(unknown[0])[:_SHOWN]!r}"
        raise bad_file("config.json", why, "Download the model again.")
    return tuple(known[each] for each in stated)


def spread(counts: Mapping[str, int]) -> tuple[str, ...]:
    """So many layers of each part, spread evenly: an order for a model of which only the numbers are known."""
    layers, used = sum(counts.values()), dict.fromkeys(counts, 0)
    found = []
    for layer in range(layers):
        part = max(used, key=lambda each: counts[each] * (layer + 1) / layers - used[each])
        used[part] += 1
        found.append(part)
    return tuple(found)

"""What layers keep of a text: the same by the model and, without torch, by its shape."""

from __future__ import annotations

import pytest
import torch

from localq.bench.synthetic import checkpoint as synthetic
from localq.files import catalog
from localq.files.architecture import Architecture
from localq.files.layer_caches import SharedCache, keys_and_values
from localq.models import ARCHITECTURES, architecture
from tests.support.models.tiny_cases import BY_NAME
from tests.support.models.tiny_models import reference_config

ENTRIES = {entry.name: entry for entry in catalog.load_catalogue()}


def _layout(config):
    family = architecture(config)
    with torch.device("meta"):
        return family.Model(family.Config.from_dict(config)).cache_layout()


@pytest.mark.parametrize("name", BY_NAME)
def test_of_a_tiny_model_in_both_spellings(name):
    case = BY_NAME[name]
    for config in (case.config, reference_config(case).to_dict()):
        assert Architecture.from_config(config).layer_caches == _layout(config)


@pytest.mark.parametrize("name", ENTRIES)
def test_of_a_catalogued_model(name):
    arch = ENTRIES[name].arch
    config = synthetic.config_of(arch)
    if arch.model_type not in ARCHITECTURES:
        pytest.skip("not supported")
    assert arch.layer_caches == _layout(config)
    own = [arch.layer_caches[each.layer] if isinstance(each, SharedCache) else each for each in arch.layer_caches]
    assert sum(bool(kept.window) for kept in keys_and_values(own)) == arch.window_layers
    assert Architecture.from_config(config).layer_caches == arch.layer_caches


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral"},  # a window by default
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "use_sliding_window": True},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0},
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": None},
        {"model_type": "qwen3_moe", "use_sliding_window": True, "num_experts": 0},
        {"model_type": "gemma2", "layer_types": ["full_attention"] * 20 + ["sliding_attention"] * 10},
    ],
)
def test_defaults_and_unusual_orders(fields):
    shape = {"num_hidden_layers": 30, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    config = {**shape, "vocab_size": 64, "max_position_embeddings": 512, "num_key_value_heads": 2, **fields}
    assert Architecture.from_config(config).layer_caches == _layout(config)


def test_a_number_of_windowed_layers_that_no_pattern_gives():
    config = {"sliding_window": 16, **synthetic.config_of(ENTRIES["gemma-2-9b"].arch)}
    types = [kind for kind in ("full_attention", "sliding_attention") for _ in range(21)]
    arch = Architecture.from_config({**config, "layer_types": [*types[:-10], *["full_attention"] * 10]})
    assert sum(bool(kept.window) for kept in arch.layer_caches) == arch.window_layers == 11

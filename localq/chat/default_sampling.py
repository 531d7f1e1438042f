"""Default sampling of a model: its models.toml entry, else its generation_config.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from localq.errors import LocalqError
from localq.files import catalog
from localq.files.catalog_file import ModelEntry
from localq.sampling import Sampling, read_generation_config, samples, stated_values
from localq.settings import Origin

MODELS, MAKER = "models.toml", "generation_config.json"


def catalog_entry(model: str) -> ModelEntry | None:
    """The catalogue entry of a model name; None for paths and unknown names."""
    try:
        return catalog.resolve(model).entry
    except LocalqError:
        return None


def sampling(entry: ModelEntry | None, generation_config: dict[str, Any]) -> Sampling:
    """The model's default sampling."""
    known = entry.settings if entry is not None else {}
    own = {name: value for name, value in known.items() if name != "max_tokens"}
    return dataclasses.replace(Sampling.from_generation_config(generation_config), **own)


def notes(generation_config: dict[str, Any]) -> tuple[str, ...]:
    """Notes on values of generation_config.json that are not taken as they stand."""
    return read_generation_config(generation_config)[1]


def max_tokens(entry: ModelEntry | None) -> int | None:
    """The model's default `max_tokens`; None: the default length of an answer (`reply_limits`)."""
    return entry.settings.get("max_tokens") if entry is not None else None


def origins(entry: ModelEntry | None, generation_config: dict[str, Any] | None) -> dict[str, Origin]:
    """Defaults of all sampling settings and max_tokens, each with the file that sets it.

    generation_config   None: the model is not on this machine
    """
    config = generation_config or {}
    values = {**dataclasses.asdict(sampling(entry, config)), "max_tokens": max_tokens(entry)}
    stated = set(stated_values(config)[0])
    if samples(config):
        stated |= {"temperature", "top_k"}  # values that it omits have the defaults of transformers
    else:  # greedy: only the penalty has an effect
        stated &= {"repeat_penalty"}
    found = dict.fromkeys(values, "built-in") | dict.fromkeys(stated, MAKER)
    found |= dict.fromkeys(entry.settings if entry is not None else (), MODELS)
    return {name: Origin(value, found[name]) for name, value in values.items()}

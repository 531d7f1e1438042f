"""How a model's replies are made where nobody says otherwise: by its entry in models.toml, else by its maker."""

from __future__ import annotations

import dataclasses
from typing import Any

from localq.errors import LocalqError
from localq.files import catalog
from localq.files.catalog_file import ModelEntry
from localq.sampling import STATED, Sampling
from localq.settings import Origin

MODELS, MAKER = "models.toml", "generation_config.json"


def catalog_entry(model: str) -> ModelEntry | None:
    """The entry of a model by its name; None for paths, and for names that mean nothing any more."""
    try:
        return catalog.resolve(model).entry
    except LocalqError:
        return None


def sampling(entry: ModelEntry | None, generation_config: dict[str, Any]) -> Sampling:
    """The model's own sampling. Raises LocalqError (exit 8) as `Sampling.from_generation_config`."""
    known = entry.settings if entry is not None else {}
    own = {name: value for name, value in known.items() if name != "max_tokens"}
    return dataclasses.replace(Sampling.from_generation_config(generation_config), **own)


def max_tokens(entry: ModelEntry | None) -> int | None:
    """The model's own longest reply; None where it is as long as the context allows."""
    return entry.settings.get("max_tokens") if entry is not None else None


def origins(entry: ModelEntry | None, generation_config: dict[str, Any] | None) -> dict[str, Origin]:
    """Every setting of sampling, and max_tokens, with what decides it where the user does not.

    generation_config   None: the model is not on this machine, and what its maker says is not known
    """
    config = generation_config or {}
    values = {**dataclasses.asdict(sampling(entry, config)), "max_tokens": max_tokens(entry)}
    stated = {field for field, name in STATED.items() if config.get(name) is not None}
    if config.get("do_sample"):
        stated |= {"temperature", "top_k"}  # without figures of its own it means those of transformers
    else:  # the likeliest token is taken, and all but the penalty is of no account
        stated &= {"repeat_penalty"}
    found = dict.fromkeys(values, "built-in") | dict.fromkeys(stated, MAKER)
    found |= dict.fromkeys(entry.settings if entry is not None else (), MODELS)
    return {name: Origin(value, found[name]) for name, value in values.items()}

"""Damage to a 4-bit layer: a function that changes its tensors, by suffix, or its quantization_config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Damage = Callable[[dict[str, Tensor], dict[str, Any]], object]


def change(suffix: str, by: Callable[[Tensor], Tensor]) -> Damage:
    """The tensor of that suffix becomes what `by` makes of it."""
    return lambda made, config: made.__setitem__(suffix, by(made[suffix]))


def drop(suffix: str) -> Damage:
    """There is no tensor of that suffix."""
    return lambda made, config: made.pop(suffix)


def set_last(suffix: str, value: float) -> Damage:
    """The last element of the tensor of that suffix is `value`."""

    def with_last(found: Tensor) -> Tensor:
        found = found.clone()
        found.view(-1)[-1] = value
        return found

    return change(suffix, with_last)


def state(**fields: Any) -> Damage:
    """The quantization_config states these fields."""
    return lambda made, config: config.update(fields)

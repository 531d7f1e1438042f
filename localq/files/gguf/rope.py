"""The scaling of a .gguf file's rotary embedding, in the form of config.json. Torch-free and numpy-free."""

from __future__ import annotations

import math
import struct
from typing import Any

from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.gguf.binary import Container, RawTensor
from localq.files.gguf.facts import LARGEST, Facts, shortest_f32

_F32 = 0
_LLAMA3_ORIGINAL = 8192  # positions of Llama 3's pretraining, where the divisors leave it open
_LOW, _HIGH = 1.0, 4.0  # turns within them between which the divisors pass from all to nothing
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


def rope_scaling(facts: Facts, rotary: int) -> dict[str, Any] | None:
    """`rope_scaling` of config.json, None without. `rotary`: columns of a head that turn.

    Raises LocalqError: exit 8 where the file is malformed, 1 for a scaling that is not known.
    """
    kind = facts.values.get(f"{facts.architecture}.rope.scaling.type")
    long, short = (_factors(facts, f"rope_factors_{length}.weight", rotary) for length in ("long", "short"))
    if long and short:
        # Where the pretraining ended: phi3 states it for all files, others only here.
        original = facts.integer("rope.scaling.original_context_length", facts.integer("context_length"))
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": original,
        }
    divisors = _factors(facts, "rope_freqs.weight", rotary)
    if divisors:
        return _llama3(facts, rotary, divisors)
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        why = f"its RoPE scaling {str(kind)[:40]!r} is not supported"
        raise LocalqError(str(facts.container.path), why, "Use another file.")
    factor = facts.number("rope.scaling.factor")
    if kind == "yarn":
        original = facts.integer("rope.scaling.original_context_length")
        keys = {name: f"rope.scaling.{key}" for name, key in _YARN.items()}
        stated = {name: facts.number(key) for name, key in keys.items() if facts.full(key) in facts.values}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **stated}
    return {"rope_type": "linear", "factor": factor}


def _llama3(facts: Facts, rotary: int, stored: list[float]) -> dict[str, Any] | None:
    """GGUF stores what Llama 3's scaling divides each frequency by; the parameters are found again and checked.

    Only the ratios of the two borders to the original context show in the divisors, so the borders are taken to be
    those of all published models, 1 and 4.
    """
    factor = round(max(stored), 3)
    if all(divisor == 1.0 for divisor in stored):
        return None
    theta = facts.number("rope.freq_base", 10_000.0)
    wavelengths = [2 * math.pi * theta ** (2 * index / rotary) for index in range(len(stored))]
    original = _original_context(stored, wavelengths, factor)
    for divisor, wavelength in zip(stored, wavelengths, strict=True):
        keep = min(max((original / wavelength - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        expected = factor / (1.0 - keep + keep * factor) if factor >= 1.0 else math.nan
        if not math.isclose(divisor, expected, rel_tol=1e-4):
            why = "its rope_freqs.weight follows no scaling that is known"
            raise LocalqError(str(facts.container.path), why, "Use another file of this model.", ExitCode.FAILURE)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": original,
    }


def _original_context(divisors: list[float], wavelengths: list[float], factor: float) -> int:
    """Solved from the first divisor between 1 and `factor`."""
    for divisor, wavelength in zip(divisors, wavelengths, strict=True):
        if 1.0 < divisor < factor:
            keep = (factor / divisor - 1.0) / (factor - 1.0)
            return max(1, round(wavelength * (_LOW + keep * (_HIGH - _LOW))))
    return _LLAMA3_ORIGINAL


def _factors(facts: Facts, name: str, rotary: int) -> list[float] | None:
    """The f32 tensor `name`, one value per pair; older files have one for every block, all the same."""
    container = facts.container
    tensor = container.tensors.get(name) or container.tensors.get(f"blk.0.{name}")
    return None if tensor is None else _floats(container, tensor, rotary // 2)


def _floats(container: Container, tensor: RawTensor, count: int) -> list[float]:
    if tensor.type != _F32 or tensor.shape != (count,):
        why = f"a tensor of RoPE factors has shape {tensor.shape} and type {tensor.type}"
        raise bad_file(str(container.path), f"{why}, not {count} values of f32", "Download the file again.")
    with container.path.open("rb") as file:
        file.seek(tensor.offset)
        values = struct.unpack(f"<{count}f", file.read(4 * count))
    if not all(0 < value < LARGEST for value in values):  # NaN fails every comparison and so ends here too
        raise bad_file(str(container.path), "a RoPE factor is not a positive number", "Download the file again.")
    return [shortest_f32(value) for value in values]

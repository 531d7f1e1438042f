"""The RoPE scaling of a .gguf file, in the form of config.json. Torch-free and numpy-free."""

from __future__ import annotations

import math
from typing import Any

from localq.errors import ExitCode, LocalqError
from localq.files.gguf.facts import Facts

_LLAMA3_ORIGINAL = 8192  # context of Llama 3's pretraining, used where the divisors do not determine it
_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of all published Llama 3 models
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def rope_scaling(facts: Facts, rotary: int) -> dict[str, Any] | None:
    """`rope_scaling` of config.json, or None. `rotary`: columns of a head that are rotated.

    Raises LocalqError: exit 8 for a malformed file, 1 for an unsupported scaling.
    """
    kind = facts.values.get(f"{facts.architecture}.rope.scaling.type")
    long, short = (_factors(facts, f"rope_factors_{length}.weight", rotary) for length in ("long", "short"))
    if long and short:
        # The context of pretraining. Only phi3 files state it outside this scaling.
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
        why = f"the RoPE scaling type {str(kind)[:40]!r} is not supported"
        raise LocalqError(str(facts.container.path), why, "Use a different GGUF file for this model.")
    factor = facts.number("rope.scaling.factor")
    if kind == "yarn":
        original = facts.integer("rope.scaling.original_context_length")
        keys = {name: f"rope.scaling.{key}" for name, key in _YARN.items()}
        stated = {name: facts.number(key) for name, key in keys.items() if facts.full(key) in facts.values}
        if facts.get(_LOG_MULTIPLIER, (int, float)):
            # llama.cpp knows only `mscale_all_dim` and takes `mscale` as 1.
            stated |= {"mscale": 1.0, "mscale_all_dim": facts.number(_LOG_MULTIPLIER)}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **stated}
    return {"rope_type": "linear", "factor": factor}


def _llama3(facts: Facts, rotary: int, stored: list[float]) -> dict[str, Any] | None:
    """Parameters of Llama 3's scaling, recovered from the frequency divisors in GGUF, and checked.

    The divisors determine only the ratios of the two frequency factors to the original context, so the factors are
    assumed to be 1 and 4, as in all published models.
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
            why = "rope_freqs.weight does not match any known RoPE scaling"
            step = "Use a different GGUF file for this model."
            raise LocalqError(str(facts.container.path), why, step, ExitCode.FAILURE)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": original,
    }


def _original_context(divisors: list[float], wavelengths: list[float], factor: float) -> int:
    """The context of pretraining, from the first divisor between 1 and `factor`."""
    for divisor, wavelength in zip(divisors, wavelengths, strict=True):
        if 1.0 < divisor < factor:
            keep = (factor / divisor - 1.0) / (factor - 1.0)
            return max(1, round(wavelength * (_LOW + keep * (_HIGH - _LOW))))
    return _LLAMA3_ORIGINAL


def _factors(facts: Facts, name: str, rotary: int) -> list[float] | None:
    """The f32 tensor `name`, one value per pair of columns. Older files store equal copies, one per block."""
    tensors = facts.container.tensors
    stored = name if name in tensors else f"blk.0.{name}"
    return None if stored not in tensors else facts.floats(stored, tensors[stored], rotary // 2)

"""Sampling settings, and the levels of thinking. `engine/sampler.py` does the sampling.

Without torch, so that command line, catalogue and engine share one definition.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from localq.errors import usage_error

THINK_LEVELS = ("low", "medium", "high", "xhigh")  # of all models; `text.thinking_levels` finds those of one
THINK_CHOICES = ("auto", "on", "off", *THINK_LEVELS)
MOST_LOGPROBS = 20  # likeliest tokens reported beside each token, as in OpenAI's API
MOST_BIASES = 1024
LONGEST_MATCH = 50  # of a repetition, in tokens, as in text-generation-webui: bounds work and penalty of DRY


# Field -> a test of its value, and the allowed range in words.
LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0.0 <= value <= 100.0, "0 to 100"),
    "top_k": (lambda value: value >= 0, "0 or more"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "above 0 and at most 1"),
    "min_p": (lambda value: 0.0 <= value < 1.0, "at least 0 and below 1"),
    "repeat_penalty": (lambda value: 0.01 <= value <= 100.0, "0.01 to 100"),
    "dry_multiplier": (lambda value: 0.0 <= value <= 100.0, "0 to 100"),
    "dry_base": (lambda value: 1.0 <= value <= 10.0, "1 to 10"),
    "dry_allowed_length": (lambda value: 1 <= value <= LONGEST_MATCH, f"1 to {LONGEST_MATCH}"),
    "dry_penalty_last_n": (lambda value: value >= -1, "-1 (the whole context), 0 (off) or a positive number"),
    "xtc_probability": (lambda value: 0.0 <= value <= 1.0, "0 to 1"),
    "xtc_threshold": (lambda value: 0.0 < value <= 0.5, "above 0 and at most 0.5"),
    "seed": (lambda value: value is None or 0 <= value < 2**63, "0 to 2^63 - 1"),
}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, which act in a fixed order.

    Repetition penalty, DRY, temperature, top-k, top-p, min-p, XTC: llama.cpp's order, except that the temperature comes
    before the filters, as in transformers. A grammar acts before the temperature, so filters see allowed tokens only.

    repeat_penalty      divides positive and multiplies negative logits of tokens already seen (CTRL, section 4.1;
                        transformers `RepetitionPenaltyLogitsProcessor`); 1 = off
    dry_multiplier      DRY (text-generation-webui, pull request 5677): if the last n tokens also occur earlier, the
                        logit of each token that followed them there drops by multiplier * base^(n - allowed_length)
                        for n >= allowed_length; 0 = off
    dry_base            and
    dry_allowed_length  see above; n is counted up to `LONGEST_MATCH`
    dry_penalty_last_n  number of last tokens that DRY searches; -1 = the whole context, 0 = off (as in llama.cpp)
    temperature         0 = greedy
    top_k               0 = off
    top_p               1 = off
    min_p               0 = off; drops tokens below min_p * (probability of the most likely token)
    xtc_probability     XTC (text-generation-webui, pull request 6335): with this probability, drawn for every token,
                        of the tokens at or above xtc_threshold only the least likely is kept; acts last, on the
                        probabilities after the filters; 0 = off. No effect when greedy
    xtc_threshold       see above; at most 0.5, since no two tokens can both be above that
    seed                None = a new one for every reply
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1

    def __post_init__(self) -> None:
        for name, (holds, allowed) in LIMITS.items():
            if not holds(getattr(self, name)):  # NaN fails every comparison, so it is rejected too
                raise usage_error(name, f"{getattr(self, name)} is out of range", f"Allowed: {allowed}.")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def has_dry(self) -> bool:
        """True if DRY has an effect."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def has_xtc(self) -> bool:
        """True if XTC has an effect."""
        return self.xtc_probability > 0.0 and not self.greedy

    def greedy_warning(self, chosen: Collection[str]) -> str:
        """A warning about fields in `chosen` that have no effect at temperature 0; empty without one."""
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "xtc_probability": 0.0}
        names = [name for name in off if name in chosen and getattr(self, name) != off[name]]
        if not self.greedy or not names:
            return ""
        effect = "has no effect" if len(names) == 1 else "have no effect"
        return f"{', '.join(names)} {effect} at temperature 0 (greedy); set a temperature such as 0.7"

    def repeated_notice(self) -> str:
        """A notice that a prompt gets the same reply again; empty where it may get another."""
        if self.greedy:
            return "temperature 0 always gives the same reply; to vary replies, use /set temp 0.7"
        if self.seed is not None:
            return f"seed {self.seed} always gives the same reply; to vary replies, use /set seed none"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Plain form for messages and `--json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_generation_config(cls, config: dict[str, Any]) -> Sampling:
        """The model's defaults in `generation_config.json`, as `read_generation_config`."""
        return read_generation_config(config)[0]


@dataclass(frozen=True)
class LogitOptions:
    """Logit bias, penalties by count and log probabilities of a request; they act before `Sampling`.

    bias               (token id, number added to its logit) pairs
    presence_penalty   subtracted from the logit of every token that the reply contains
    frequency_penalty  subtracted from it once for each time
    logprobs           report the log probability of each token, and of this many of the likeliest; None: of none. They
                       are those of the model, before bias, penalties and temperature
    """

    bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", tuple([(id, value) for id, value in self.bias]))  # lists, out of JSON
        if len(self.bias) > MOST_BIASES:
            raise usage_error("logit_bias", f"too many tokens ({len(self.bias)})", f"Use at most {MOST_BIASES}.")
        if not all(type(id) is int and id >= 0 and -100.0 <= value <= 100.0 for id, value in self.bias):
            raise usage_error(
                "logit_bias", "a token or a value is out of range", "Use ids of tokens, and values from -100 to 100."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise usage_error(name, f"{getattr(self, name)} is out of range", "Allowed: -2 to 2.")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise usage_error("logprobs", f"{self.logprobs} is out of range", f"Allowed: 0 to {MOST_LOGPROBS}.")

    @property
    def idle(self) -> bool:
        """True if nothing is requested."""
        return not self.bias and self.logprobs is None and not self.has_penalties

    @property
    def has_penalties(self) -> bool:
        """True if a penalty has an effect."""
        return bool(self.presence_penalty or self.frequency_penalty)


# Fields that generation_config.json may set -> their name there.
STATED = {name: name for name in ("temperature", "top_k", "top_p", "min_p")} | {"repeat_penalty": "repetition_penalty"}


def read_generation_config(config: dict[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
    """The model's defaults in `generation_config.json`, and a note for each value that is not taken as it stands.

    Greedy unless `do_sample` is true. These are only defaults, so no value makes a model unusable: values that other
    engines read as off or greedy mean that here (top_k below 0, top_p 0), all others out of range are ignored.
    """
    stated, notes = stated_values(config)
    if not samples(config):
        stated = {field: value for field, value in stated.items() if field == "repeat_penalty"}
    else:  # transformers' class defaults when sampling
        stated = {"temperature": 1.0, "top_k": 50, **stated}
    return Sampling(**stated), notes


def stated_values(config: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Field -> valid value in `generation_config.json`, and the notes of `read_generation_config`."""
    found: dict[str, Any] = {}
    notes = []
    if (value := config.get("do_sample")) is not None and not (isinstance(value, int) and value in (0, 1)):
        notes.append(f"ignoring the model's default do_sample={str(value)[:40]} (must be true or false)")
    for field, name in STATED.items():
        if config.get(name) is None:
            continue
        value = config[name]
        read = _read(field, value)
        if read is not None:
            found[field] = read
        shown = f"the model's default {name}={str(value)[:40]}"
        if field == "top_p" and value == 0 and read is not None:
            found["temperature"] = 0.0
            notes.append(f"{shown} keeps only the most likely token (greedy)")
        elif field == "top_k" and read is not None and value < 0:
            notes.append(f"{shown} means off")
        elif read is None:
            notes.append(f"{shown} is ignored (allowed: {LIMITS[field][1]})")
    return found, tuple(notes)


def _read(field: str, value: object) -> Any:
    """The value of `field` in a generation_config.json; None for one that means nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if field == "top_k":
        if value != value or value in (math.inf, -math.inf) or int(value) != value:
            return None
        return max(int(value), 0)
    if field == "top_p" and value == 0:
        return 1.0
    return value if LIMITS[field][0](value) else None


def samples(config: dict[str, Any]) -> bool:
    """Return `do_sample` of a generation_config.json; False if it is absent or no truth value."""
    value = config.get("do_sample")
    return isinstance(value, int) and value in (0, 1) and bool(value)

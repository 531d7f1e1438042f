"""How the next token is chosen: the settings. The choosing itself is `engine/sampler.py`.

Torch-free, so that the command line, the catalogue and the engine process share one definition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from localq.errors import LocalqError, bad_file, usage_error

THINK_LEVELS = ("low", "medium", "high")
THINK_CHOICES = ("auto", "on", "off", *THINK_LEVELS)
LONGEST_MATCH = 50  # tokens of a repetition that DRY follows, as text-generation-webui does: bounds work and penalty


# Field -> what holds of its values, and that in words.
LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: 0.0 <= value <= 100.0, "from 0 to 100"),
    "top_k": (lambda value: value >= 0, "0 or more"),
    "top_p": (lambda value: 0.0 < value <= 1.0, "above 0, at most 1"),
    "min_p": (lambda value: 0.0 <= value < 1.0, "from 0, below 1"),
    "repeat_penalty": (lambda value: 0.01 <= value <= 100.0, "from 0.01 to 100"),
    "dry_multiplier": (lambda value: 0.0 <= value <= 100.0, "from 0 to 100"),
    "dry_base": (lambda value: 1.0 <= value <= 10.0, "from 1 to 10"),
    "dry_allowed_length": (lambda value: 1 <= value <= LONGEST_MATCH, f"from 1 to {LONGEST_MATCH}"),
    "dry_penalty_last_n": (lambda value: value >= -1, "-1 (the whole context), 0 (off) or more"),
    "xtc_probability": (lambda value: 0.0 <= value <= 1.0, "from 0 to 1"),
    "xtc_threshold": (lambda value: 0.0 < value <= 0.5, "above 0, at most 0.5"),
    "seed": (lambda value: value is None or 0 <= value < 2**63, "from 0 to 2^63 - 1"),
}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings in the order in which they act: repetition penalty, DRY, temperature, top-k, top-p, min-p, XTC.

    That is llama.cpp's order, but for the temperature, which transformers has before the filters. A grammar acts before
    the temperature too: filters count what it allows.

    repeat_penalty      divides positive and multiplies negative logits of tokens already seen (CTRL, section 4.1;
                        transformers `RepetitionPenaltyLogitsProcessor`); 1 = off
    dry_multiplier      DRY (text-generation-webui, pull request 5677): where the last n tokens stand earlier too, the
                        logit of each token that followed them there goes down by multiplier * base^(n - allowed_length)
                        if n is allowed_length or more; 0 = off
    dry_base            and
    dry_allowed_length  see above; n is counted up to `LONGEST_MATCH`
    dry_penalty_last_n  DRY looks at so many of the last tokens; -1 = at the whole context, 0 = off (as llama.cpp)
    temperature         0 = greedy
    top_k               0 = off
    top_p               1 = off
    min_p               0 = off; drops tokens below min_p * (probability of the likeliest token)
    xtc_probability     XTC (text-generation-webui, pull request 6335): with this probability, drawn for every token,
                        all tokens as likely as xtc_threshold or more are dropped but the least likely of them; acts
                        last, on the probabilities among what the filters kept; 0 = off. No effect where greedy
    xtc_threshold       see above; no two tokens can be likelier than 0.5
    seed                None = a fresh one for every reply
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
            if not holds(getattr(self, name)):  # NaN fails every comparison and so ends here too
                raise usage_error(name, f"{getattr(self, name)} is not allowed", f"Use a value {allowed}.")

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def dry(self) -> bool:
        """True when DRY has an effect."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def xtc(self) -> bool:
        """True when XTC has an effect."""
        return self.xtc_probability > 0.0 and not self.greedy

    def idle(self, chosen: Collection[str]) -> str:
        """What to tell of those of the fields `chosen` that have no effect because the likeliest token is taken."""
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "xtc_probability": 0.0}
        names = [name for name in off if name in chosen and getattr(self, name) != off[name]]
        if not self.greedy or not names:
            return ""
        why = "no effect while the temperature is 0, for the likeliest token is taken; one of 0.7 samples"
        return f"{', '.join(names)}: {why}"

    def to_dict(self) -> dict[str, Any]:
        """Plain form for messages and `--json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_generation_config(cls, config: dict[str, Any]) -> Sampling:
        """The model's own defaults (`generation_config.json`); `do_sample: false` or absent means greedy.

        Raises LocalqError (exit 8) for values that no sampling has.
        """
        stated = {field: config.get(name) for field, name in STATED.items()}
        for field, value in stated.items():
            allowed = (int,) if field == "top_k" else (int, float)
            if value is not None and type(value) not in allowed:
                raise _damaged(f"{STATED[field]} is {str(value)[:40]}, which is no such number")
        if not config.get("do_sample", False):
            stated = {"repeat_penalty": stated["repeat_penalty"] or 1.0}
        else:  # transformers' class defaults when sampling
            defaults = {"temperature": 1.0, "top_k": 50}
            stated = {field: defaults.get(field) if value is None else value for field, value in stated.items()}
        try:
            return cls(**{field: value for field, value in stated.items() if value is not None})
        except LocalqError as error:
            raise _damaged(f"{STATED[error.what]}: {error.why[:80]}") from error


# What a model's maker may state: field -> what transformers calls it.
STATED = {name: name for name in ("temperature", "top_k", "top_p", "min_p")} | {"repeat_penalty": "repetition_penalty"}


def _damaged(why: str) -> LocalqError:
    return bad_file("generation_config.json", why, "Correct the file, or fetch the model again.")

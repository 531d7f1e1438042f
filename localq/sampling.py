"""How the next token is chosen: the settings. The choosing itself is `engine/sampler.py`.

Torch-free, so that the command line, the catalogue and the engine process share one definition.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from localq.errors import usage_error


@dataclass(frozen=True)
class Sampling:
    """Sampling settings in the order in which they act: repetition penalty, temperature, top-k, top-p, min-p.

    repeat_penalty  divides positive and multiplies negative logits of tokens already seen (CTRL, section 4.1;
                    transformers `RepetitionPenaltyLogitsProcessor`); 1 = off
    temperature     0 = greedy
    top_k           0 = off
    top_p           1 = off
    min_p           0 = off; drops tokens below min_p * (probability of the likeliest token)
    seed            None = a fresh one for every reply
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        limits = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            ("min_p", 0.0 <= self.min_p < 1.0, "from 0, below 1"),
            ("repeat_penalty", 0.0 < self.repeat_penalty <= 100.0, "above 0, at most 100"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2^63 - 1"),
        )
        for name, holds, allowed in limits:
            if not holds:  # NaN fails every comparison and so ends here too
                raise usage_error(name, f"{getattr(self, name)} is not allowed", f"Use a value {allowed}.")

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain form for messages and `--json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_generation_config(cls, config: dict[str, Any]) -> Sampling:
        """The model's own defaults (`generation_config.json`); `do_sample: false` or absent means greedy."""
        if not config.get("do_sample", False):
            return cls(repeat_penalty=config.get("repetition_penalty") or 1.0)
        return cls(
            temperature=_or(config.get("temperature"), 1.0),
            top_k=_or(config.get("top_k"), 50),  # transformers' class default when sampling
            top_p=_or(config.get("top_p"), 1.0),
            min_p=_or(config.get("min_p"), 0.0),
            repeat_penalty=_or(config.get("repetition_penalty"), 1.0),
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value

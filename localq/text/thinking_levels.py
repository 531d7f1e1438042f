"""Levels of thinking that a chat template takes: found by rendering it, not by names of models.

A template that knows its levels refuses or ignores others (Qwen3.8: low, medium, xhigh); those it takes are its levels.
One that writes any word into the prompt (gpt-oss, Muse Glimmer) has the levels that are documented for its variable.
"""

from __future__ import annotations

import functools
from typing import Any

from localq.errors import ExitCode, LocalqError
from localq.sampling import THINK_LEVELS
from localq.text import template

SWITCH = "enable_thinking"
# Variable that turns thoughts on and off -> its values for both. Granite's; Seed-OSS's budget in tokens, where -1 is no
# limit. Their names are words of prompts as well, so that only rendering tells whether a template reads them.
_MORE_SWITCHES: dict[str, tuple[Any, Any]] = {"thinking": (True, False), "thinking_budget": (-1, 0)}
# Variable -> levels of the models that have it: OpenAI's harmony, and Muse Glimmer.
DOCUMENTED = {
    "reasoning_effort": ("low", "medium", "high"),
    "reasoning_strength": ("low", "medium", "high", "xhigh"),
}
_PROBE = ({"role": "user", "content": "How so?"},)
_SPECIAL = {"bos_token": "", "eos_token": ""}
_UNKNOWN = "utmost"  # a level of no model


def variable(text: str) -> str:
    """The variable of a chat template that sets the level, "" for none."""
    return next((name for name in DOCUMENTED if name in text), "")


@functools.lru_cache(maxsize=8)
def levels(text: str) -> tuple[str, ...]:
    """Levels that the template `text` takes, from little thinking to much; empty for one without.

    Raises LimitExceeded where a busy machine does not get it rendered.
    """
    name = variable(text)
    if not name or _rendered(text, {}) is None:  # a template that refuses any conversation has no level to find
        return DOCUMENTED.get(name, ())
    unknown = _rendered(text, {name: _UNKNOWN})
    if unknown is not None and _UNKNOWN in unknown:
        return DOCUMENTED[name]
    return tuple(level for level in THINK_LEVELS if _takes(text, name, level, unknown))


def listing(found: tuple[str, ...], word: str) -> str:
    """Levels in words: "low, medium and high", where `word` is "and"."""
    return f" {word} ".join(filter(None, (", ".join(found[:-1]), found[-1])))


def _takes(text: str, name: str, level: str, unknown: str | None) -> bool:
    """Return whether `level` is one: it renders unlike an unknown one (None: refused), or is named in quotes."""
    rendered = _rendered(text, {name: level})
    return rendered is not None and (rendered != unknown or f"'{level}'" in text or f'"{level}"' in text)


@functools.lru_cache(maxsize=8)
def switch(text: str) -> tuple[str, Any, Any] | None:
    """The variable that turns thoughts of the template `text` on and off, and its values for both; None for none."""
    if SWITCH in text:
        return SWITCH, True, False
    known = ((name, *values) for name, values in _MORE_SWITCHES.items() if name in text)
    return next(
        (each for each in known if _rendered(text, {each[0]: each[1]}) != _rendered(text, {each[0]: each[2]})), None
    )


@functools.lru_cache(maxsize=8)
def can_switch_off(text: str) -> bool:
    """Return whether the template `text` has a switch for thinking, and does not refuse to turn it off."""
    if (found := switch(text)) is None:
        return False
    name, on, off = found
    return _rendered(text, {name: on}) is None or _rendered(text, {name: off}) is not None


def _rendered(text: str, variables: dict[str, Any]) -> str | None:
    """The prompt with these variables and with thinking on, None where the template refuses them."""
    given = {SWITCH: True, **variables} if SWITCH in text else variables
    try:
        return template.render(text, _PROBE, _SPECIAL, **given)
    except LocalqError as error:
        if isinstance(error, template.LimitExceeded) and error.exit_code == ExitCode.FAILURE:
            raise  # a busy machine, which says nothing about the template
        return None

"""The settings: built-in defaults, then `config.toml`, a project's `localq.toml`, `LOCALQ_<NAME>` in the environment.

Flags win over all of these; the verbs see to that. Where a sampling setting or `max_tokens` is None here, models.toml
and the model's own `generation_config.json` decide (`model_defaults`). Unknown keys are refused, never ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import keymap, places, project_file
from localq import kv_bits as kv_form
from localq.errors import LocalqError, bad_file, usage_error
from localq.sampling import THINK_CHOICES, Sampling

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "xtc_probability", "xtc_threshold", "seed"),
)
CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv": ("auto", *map(str, kv_form.KV_BITS)),
    "embed": ("auto", "device", "host"),
    "head": ("auto", "16", "8", "nf4"),
    "think": THINK_CHOICES,
    "ui": ("auto", "plain", "tui"),
    "theme": (
        "textual-dark", "textual-light", "nord", "gruvbox", "catppuccin-mocha", "dracula", "tokyo-night",
        "monokai", "flexoki", "catppuccin-latte", "catppuccin-frappe", "catppuccin-macchiato",
        "solarized-light", "solarized-dark", "rose-pine", "rose-pine-moon", "rose-pine-dawn", "atom-one-dark",
        "atom-one-light", "ansi-dark", "ansi-light",
    ),
}  # fmt: skip
_NUMBER_OR_WORD = ("kv", "head", "vram", "reserve", "snapshots")  # a file may hold these as numbers


@dataclass(frozen=True)
class Settings:
    """Every key of `config.toml`, flat. The help texts are in `DESCRIPTIONS`."""

    model: str = "smollm2-135m"
    system: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    ctx: int | None = None
    vram: str | None = None
    reserve: str | None = None
    kv: str = "auto"
    embed: str = "auto"
    head: str = "auto"
    think: str = "auto"
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    offline: bool = False
    stats: bool = True
    markdown: bool = True
    save: bool = True
    snapshots: str = "4GiB"
    ui: str = "auto"
    theme: str = "textual-dark"
    keys: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                why = f"'{getattr(self, name):.80}' is not allowed"
                raise usage_error(name, why, f"Use one of {', '.join(allowed)}.")
        for name in ("ctx", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise usage_error(name, f"{value} is not allowed", "Use a number of tokens, 1 or more.")
        keymap.checked(self.keys)
        self.sampling(Sampling())  # the limits of the sampling settings are checked by Sampling itself

    def sampling(self, base: Sampling) -> Sampling:
        """`base` (the model's own defaults) with the settings given here laid over it."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        return dataclasses.replace(base, **given)

    @property
    def kv_bits(self) -> kv_form.KvBits | None:
        """What `kv` says, None = the planner decides."""
        return None if self.kv == "auto" else kv_form.parsed(self.kv)

    def replace(self, **flags: Any) -> Settings:
        """These settings with the flags that were given (not None) laid over them."""
        return dataclasses.replace(self, **{name: value for name, value in flags.items() if value is not None})


DESCRIPTIONS: dict[str, str] = {
    "model": "the model that `localq chat` and `localq run` take when none is named",
    "system": "system prompt",
    "device": "auto, cpu or cuda",
    "dtype": "auto, float32, bfloat16 or float16",
    "ctx": "context size in tokens, such as 8k; max or unset = the largest that fits",
    "vram": "most GPU memory to use, such as 24 or 12GiB, everything included; unset = what is free",
    "reserve": "GPU memory to leave free besides, such as 300MiB; unset = none",
    "kv": "bits of the KV cache: 16, 8, k8v4 (keys 8, values 4), 4, or auto = fewer where the context would not fit",
    "embed": "the embedding table on the device, in host memory, or auto = in host memory only where memory is short",
    "head": "the output head in 16 bit, 8 bit or nf4, or auto = reduced only where memory is short",
    "think": "whether, or how much, the model thinks: on, off, low, medium, high, or auto = as it was made",
    "max_tokens": "longest reply in tokens; unset = until the model stops or the context is full",
    "temperature": "0 = greedy; unset = the model's own",
    "top_k": "0 = off; unset = the model's own",
    "top_p": "1 = off; unset = the model's own",
    "min_p": "0 = off; unset = the model's own",
    "repeat_penalty": "1 = off; unset = the model's own",
    "dry_multiplier": "how hard DRY punishes going on with a repetition, such as 0.8; 0 or unset = off",
    "dry_base": "by what that grows with every further repeated token; unset = 1.75",
    "dry_allowed_length": "repeated tokens from which on DRY acts; unset = 2",
    "dry_penalty_last_n": "how many of the last tokens DRY looks at; 0 = off; -1 or unset = the whole context",
    "xtc_probability": "how often XTC drops the likeliest tokens, such as 0.5; 0 or unset = off; needs a temperature",
    "xtc_threshold": "XTC drops all tokens as likely as this but the least likely of them; unset = 0.1",
    "seed": "unset = a fresh one for every reply",
    "offline": "never touch the network",
    "stats": "print tokens, tok/s and time to first token after a reply (stderr)",
    "markdown": "draw replies as Markdown where they are printed at a terminal, by `localq run` and line by line",
    "save": "keep every conversation of `localq chat`, turn by turn, for --continue and --resume",
    "snapshots": "most disk, such as 4GiB, for what models have read of long conversations, so that these are taken up "
    "at once; off = none",
    "ui": "what `localq chat` opens at a terminal: auto = full screen where the terminal can, tui = even if "
    "it says that it cannot (TERM=dumb), plain = line by line",
    "theme": "colours of the full screen",
    "keys": "keys of the full screen, such as send=ctrl+s; newline=enter; F1 there shows the names",
}


@dataclass(frozen=True)
class Origin:
    """Where the value of a setting comes from: "built-in", "config.toml", the path of a project's file, or the name of
    an environment variable; of a model's own settings also "models.toml" or "generation_config.json"."""

    value: Any
    source: str


def origins(environment: Mapping[str, str] = os.environ) -> dict[str, Origin]:
    """Every setting with the place that decided it."""
    found = {name: Origin(value, "built-in") for name, value in vars(Settings()).items()}
    for name, value in read_config().items():
        found[name] = Origin(value, "config.toml")
    path, project = read_project(environment)
    for name, value in project.items():
        found[name] = Origin(value, str(path))
    for name in found:
        variable = f"LOCALQ_{name.upper()}"
        if variable in environment:
            found[name] = Origin(parse(name, environment[variable], variable), variable)
            with _naming(variable):
                Settings(**{name: found[name].value})  # within its limits
    return found


def load(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings in force before any flag."""
    return Settings(**{name: origin.value for name, origin in origins(environment).items()})


def read_config() -> dict[str, Any]:
    """The keys set in `config.toml`, checked; an absent file is an empty one."""
    return checked(file_text(), str(places.config_file()))


def read_project(environment: Mapping[str, str] = os.environ) -> tuple[Path | None, dict[str, Any]]:
    """The project's file that counts here, and what it sets; (None, {}) where there is none.

    Raises LocalqError: exit 2 for what it may not set, 8 for what is no TOML.
    """
    path = project_file.find(environment)
    if path is None:
        return None, {}
    may_set = functools.partial(project_file.check, path, SAMPLING)
    return path, checked(project_file.text(path), str(path), may_set)


def file_text() -> str:
    """`config.toml` as it is; empty where there is none. Raises LocalqError (exit 8) where it cannot be read."""
    path = places.config_file()
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(str(path), error) from error


def checked(text: str, where: str, may_set: Callable[[str, Any], None] = lambda name, value: None) -> dict[str, Any]:
    """The settings in the TOML `text`, of the file `where`, which `may_set` has a look at first.

    Raises LocalqError: exit 2 for a wrong one, 8 for no TOML.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, and nesting, are no TOMLDecodeError
        raise _unreadable(where, error) from error
    found: dict[str, Any] = {}
    with _naming(where):
        for name, value in table.items():
            check_name(name)
            may_set(name, value)
            found[name] = parse(name, value, where)
        Settings(**found)
    return found


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """An error says where the value stands."""
    try:
        yield
    except LocalqError as error:
        what = error.what if where in str(error) else f"{error.what} in {where}"
        raise LocalqError(what, error.why, error.next_step, error.exit_code) from None


def _unreadable(where: str, error: Exception) -> LocalqError:
    return bad_file(where, f"it cannot be read ({error})", "Mend it, or move it away.")


def check_name(name: str) -> None:
    """Raise a usage error for a setting that does not exist, naming the nearest that do."""
    if name not in DESCRIPTIONS:
        near = difflib.get_close_matches(name[:80], DESCRIPTIONS, n=3)
        meant = f"Did you mean {', '.join(near)}?" if near else f"Settings: {', '.join(DESCRIPTIONS)}."
        raise usage_error(name[:80], "there is no such setting", meant)


def parse(name: str, value: Any, where: str) -> Any:
    """`value` (from a file: typed; from the environment or the command line: text) in the type of setting `name`."""
    if name == "ctx" and value == "max":
        return None  # the largest that fits, as without it
    kind = str(Settings.__annotations__[name]).split(" |")[0]
    if kind == "bool":
        words = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
    elif kind == "str" and isinstance(value, str):
        return value
    elif kind == "dict[str, str]":
        if isinstance(value, str):  # of the environment or the command line
            value = dict(each.partition("=")[::2] for each in value.split(";") if each.strip())
            value = {name.strip(): keys.strip() for name, keys in value.items()}
        if isinstance(value, dict):
            return keymap.checked(value)
    elif name in _NUMBER_OR_WORD and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    elif kind in ("int", "float") and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value) if kind == "float" else parse_count(value)
        except (ValueError, OverflowError):  # the latter of an integer that no float holds
            pass
        else:
            return number
    expected = {
        "bool": "true or false", "str": "text", "int": "a whole number", "float": "a number", "dict[str, str]": "keys",
    }[kind]  # fmt: skip
    why, meaning = f"{value!r:.80} in {where} is not {expected}", DESCRIPTIONS[name]
    raise usage_error(name, why, f"{meaning[:1].upper()}{meaning[1:]}.")


def parse_count(value: int | float | str) -> int:
    """A whole number; text may end in k or K for 1024, as context sizes are meant: 8k is 8192, 25.6k is 26214.

    ValueError otherwise.
    """
    if isinstance(value, str):
        text = value.strip().lower()
        size = float(text[:-1]) * 1024 if text.endswith("k") else int(text)
        value = math.floor(size) if math.isfinite(size) else size
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{value} is not a whole number")
    return int(value)

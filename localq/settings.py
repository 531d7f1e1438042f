"""Settings: defaults, then `config.toml`, a project's `localq.toml`, `LOCALQ_<NAME>`.

Flags override all of these; the verbs apply them. Where a sampling setting or `max_tokens` is None here, models.toml
and the model's `generation_config.json` decide (`chat.default_sampling`). Unknown keys are errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import disk, drafts, keymap, kv_bits, mcp_settings, places, toml_files, wording
from localq.errors import LocalqError, usage_error
from localq.kv_bits import KvBits
from localq.sampling import THINK_CHOICES, Sampling

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "xtc_probability", "xtc_threshold", "seed"),
)
# What a project's file may set besides: not settings of the machine, of private data, of the disk.
PROJECT_MAY_SET = ("model", "system", "ctx", "kv", "head", "think", "think_budget", "max_tokens", "draft", "draft_max")
# With which an engine is loaded: one that has the same serves another front end.
OF_ENGINE = (
    *("device", "dtype", "ctx", "vram", "reserve", "desktop", "kv", "embed", "head", "draft", "draft_max"),
    "checkpoints",
)
OF_LOAD = ("ctx", "kv", "head", "draft", "draft_max")  # what a load is planned with; not saved with a conversation
MOST_PROJECT_BYTES = 2**18  # of a project's file: less than what takes seconds to parse
_CATALOGUE_NAME = re.compile(r"\w[\w.+:-]*(@[\w.+-]+)?")
CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv": ("auto", *map(str, kv_bits.KV_BITS)),
    "embed": ("auto", "device", "host"),
    "head": ("auto", "16", "8", "nf4"),
    "draft": drafts.CHOICES,
    "think": THINK_CHOICES,
    "preserve_thinking": ("auto", "on", "off"),
    "ui": ("auto", "plain", "tui"),
    "theme": (
        "textual-dark", "textual-light", "nord", "gruvbox", "catppuccin-mocha", "dracula", "tokyo-night", "monokai",
        "flexoki", "catppuccin-latte", "catppuccin-frappe", "catppuccin-macchiato", "solarized-light", "solarized-dark",
        "rose-pine", "rose-pine-moon", "rose-pine-dawn", "atom-one-dark", "atom-one-light", "ansi-dark", "ansi-light",
    ),
}  # fmt: skip
# config.toml may hold these as numbers
_NUMBER_OR_WORD = ("kv", "head", "vram", "reserve", "desktop", "snapshots", "checkpoints", "keep_alive")

_EXPECTED = {"bool": "true or false", "int": "a whole number", "float": "a number", "dict[str, str]": "a table"}
NO_LIMIT = 2**30  # of max_tokens and think_budget, "max": more than any context holds
_WITHOUT_LIMIT = ("max_tokens", "think_budget")


@dataclass(frozen=True)
class Settings:
    """All settings, which are the keys of `config.toml`; `DESCRIPTIONS` explains each."""

    model: str = "smollm2-135m"
    system: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    ctx: int | None = None
    vram: str | None = None
    reserve: str | None = None
    desktop: str | None = None
    kv: str = "auto"
    embed: str = "auto"
    head: str = "auto"
    think: str = "auto"
    think_budget: int | None = None
    preserve_thinking: str = "auto"
    max_tokens: int | None = None
    loop_guard: bool = True
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
    draft: str = drafts.AUTO
    draft_max: int = drafts.MOST
    offline: bool = False
    stats: bool = True
    markdown: bool = True
    save: bool = True
    snapshots: str = "4GiB"
    checkpoints: str = "auto"
    keep_alive: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    ui: str = "auto"
    theme: str = "textual-dark"
    mcp: dict[str, str] = dataclasses.field(default_factory=dict)
    mcp_rounds: int = mcp_settings.ROUNDS
    mcp_timeout: int = mcp_settings.TIMEOUT_S
    mcp_result: int = mcp_settings.RESULT
    keys: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        drafts.check(self.draft, self.draft_max)
        for name, allowed in CHOICES.items():
            if name != "draft" and getattr(self, name) not in allowed:
                why = f"'{getattr(self, name):.80}' is not a valid value"
                raise usage_error(name, why, f"Use one of {', '.join(allowed)}.")
        for name, least in (("ctx", 1), ("max_tokens", 1), ("think_budget", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                step = "Use at least 1 token." if least else "Use 0 (no thinking) or more."
                raise usage_error(name, f"{value} is too small", step)
        if not 0 <= self.port < 2**16:
            raise usage_error("port", f"{self.port} is out of range", "Use 0 (any free port) to 65535.")
        if self.keep_alive is not None:
            wording.parse_duration(self.keep_alive)
        mcp_settings.check(**{name: getattr(self, name) for name in mcp_settings.LIMITS})
        keymap.parse(self.keys)
        self.sampling(Sampling())  # Sampling checks its own limits

    def sampling(self, base: Sampling) -> Sampling:
        """`base` (the model's defaults), overridden by the settings given here."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        return dataclasses.replace(base, **given)

    @property
    def kv_bits(self) -> KvBits | None:
        """The value of `kv`; None = the planner decides."""
        return None if self.kv == "auto" else kv_bits.parse(self.kv)

    @property
    def draft_model(self) -> str | None:
        """The name of a draft model, if one drafts."""
        return drafts.model_name(self.draft)

    @property
    def takes_mtp(self) -> bool:
        """True if a model with an MTP block drafts with it."""
        return self.draft in drafts.OF_MTP

    @property
    def draft_tokens(self) -> int:
        """Tokens of a draft, at most; 0 where drafts are off."""
        return 0 if self.draft == drafts.OFF else self.draft_max

    def replace(self, **flags: Any) -> Settings:
        """These settings, overridden by the flags that are not None."""
        return dataclasses.replace(self, **{name: value for name, value in flags.items() if value is not None})


# Names of options that are not those of their settings.
OPTION_NAMES = {
    "m": "model", "s": "system", "c": "ctx", "ctx_size": "ctx", "cache_type": "kv", "n": "max_tokens",
    "temp": "temperature", "online": "offline", "v": "stats", "verbose": "stats",
}  # fmt: skip
DESCRIPTIONS: dict[str, str] = {
    "model": "default model for `localq chat` and `localq run`",
    "system": "system prompt",
    "device": "auto, cpu or cuda",
    "dtype": "auto, float32, bfloat16 or float16",
    "ctx": "context size in tokens, such as 8k; max or unset = the largest that fits",
    "vram": "limit on total GPU memory use, such as 24 or 12GiB; unset = all free memory",
    "reserve": "GPU memory to leave free, such as 300MiB; unset = none",
    "desktop": "GPU memory used by other programs on the card given with --vram, such as 1.2; unset = 700MB",
    "kv": "bits per KV cache value: 16, 8, 4, or k8v4 (8-bit keys, 4-bit values); auto = the most bits "
    "that leave room for 16k tokens (32k for thinking models)",
    "embed": "where to keep the embedding table: device or host; auto = host if the full context would otherwise "
    "not fit",
    "head": "precision of the output head: 16, 8 (bits) or nf4; auto = the highest that leaves room "
    "for 16k tokens (32k for thinking models)",
    "think": "thinking: on, off, low, medium, high, xhigh; auto = the model's default",
    "think_budget": "after this many tokens, stop thinking and answer; 0 = no thinking, unset or max = no limit",
    "preserve_thinking": "keep the thinking from earlier replies in the prompt: on or off; auto = the model's default",
    "max_tokens": "maximum reply length in tokens, including thinking; unset = 4096 answer tokens, max = no limit",
    "loop_guard": "stop a reply that keeps repeating the same block of text",
    "temperature": "sampling temperature; 0 = greedy, unset = the model's default",
    "top_k": "keep the K most likely tokens; 0 = off, unset = the model's default",
    "top_p": "keep the most likely tokens up to this probability mass; 1 = off, unset = the model's default",
    "min_p": "drop tokens below this fraction of the top token's probability; 0 = off, unset = the model's default",
    "repeat_penalty": "penalty on repeated tokens; 1 = off, unset = the model's default",
    "dry_multiplier": "DRY multiplier (penalty strength), such as 0.8; 0 or unset = off",
    "dry_base": "DRY penalty growth per repeated token (1-10, default 1.75)",
    "dry_allowed_length": "shortest repetition that DRY penalizes, in tokens (default 2)",
    "dry_penalty_last_n": "number of recent tokens that DRY searches for repetitions; 0 = off, -1 or unset = the "
    "whole context",
    "xtc_probability": "per-token XTC probability, such as 0.5; 0 or unset = off; requires a temperature above 0",
    "xtc_threshold": "XTC: of the tokens above this probability, keep only the least likely (default 0.1)",
    "seed": "random seed; unset = a new one for every reply",
    "draft": "source of draft tokens for speculative decoding, which never changes replies and is used only where "
    "faster: lookup = text found in the conversation or forced by the grammar; auto = lookup plus the model's MTP "
    "block, if it has one; mtp = lookup plus the MTP block, which must exist; NAME = lookup plus this small model, "
    "which must have the same tokenizer; off = no drafts",
    "draft_max": "maximum tokens per draft, 1 to 7",
    "offline": "never use the network",
    "stats": "after each reply, print the token count, tok/s and time to first token to stderr",
    "markdown": "render replies as Markdown in a terminal (`localq run` and line mode)",
    "save": "save `localq chat` conversations for --continue and --resume",
    "snapshots": "maximum disk space (such as 4GiB) for saved KV caches, which let long conversations resume quickly; "
    "off = none",
    "checkpoints": "RAM (such as 1GiB) for checkpoints that speed up undoing a turn in models with recurrent layers "
    "or sliding windows; off = none, auto = up to 8 checkpoints",
    "keep_alive": "how long to keep an idle model in memory, such as 10m; never = until `localq stop`. If this is set, "
    "`localq run` and `localq chat` load models in a background process, which later runs reuse",
    "host": "address that `localq serve` listens on; addresses other than loopback also need --key",
    "port": "port for `localq serve`; 0 = any free port",
    "ui": "interface of `localq chat`: auto = full-screen mode if possible, tui = always full-screen mode, "
    "plain = line mode",
    "theme": "colour theme for full-screen mode",
    "mcp": "MCP servers for --mcp NAME, such as files=npx -y FILE_SERVER /notes; search=http://localhost:8000/mcp",
    "mcp_rounds": "maximum rounds of tool calls in one reply, 1 to 100",
    "mcp_timeout": "time limit for a tool call in seconds, 1 to 3600",
    "mcp_result": "maximum length of a tool result passed to the model, in characters, 100 to 1,000,000",
    "keys": "key bindings for full-screen mode, such as send=ctrl+s; newline=enter (F1 or `localq help keys` shows the "
    "names)",
}


@dataclass(frozen=True)
class Origin:
    """A value and its source.

    source   "built-in", "config.toml", the path of a project's file, or the name of an environment variable; for
             defaults of a model also "models.toml" or "generation_config.json"
    """

    value: Any
    source: str

    @property
    def is_project(self) -> bool:
        """True if a project's file decides the value."""
        return Path(self.source).name == places.PROJECT_FILE


def origins(environment: Mapping[str, str] = os.environ) -> dict[str, Origin]:
    """Every setting with its value and source."""
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
            with _add_place(variable):
                Settings(**{name: found[name].value})  # checks its limits
    return found


def load(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings in force before any flag."""
    return of_origins(origins(environment))


def of_origins(found: Mapping[str, Origin]) -> Settings:
    """The settings with these values."""
    return Settings(**{name: origin.value for name, origin in found.items()})


def read_config() -> dict[str, Any]:
    """The settings in `config.toml`, checked; none if there is no file."""
    return parse_file(file_text(), str(places.config_file()))


def read_project(environment: Mapping[str, str] = os.environ) -> tuple[Path | None, dict[str, Any]]:
    """The project's file that applies here and its settings; (None, {}) without one.

    Raises LocalqError: exit 2 for a setting it may not set, 8 for invalid TOML.
    """
    path = places.project_file(environment)
    if path is None:
        return None, {}
    text = disk.read_text(path)
    if len(text.encode()) > MOST_PROJECT_BYTES:
        why = f"too large (limit: {MOST_PROJECT_BYTES / 1e6:.2f} MB)"
        raise usage_error(str(path), why, f"Shorten it, or ignore the file with {places.NO_PROJECT}=1.")
    return path, parse_file(text, str(path), functools.partial(_check_project, path))


def _check_project(path: Path, name: str, value: object) -> None:
    """Raise a usage error for a setting that the project's file `path` may not set, or a model outside the catalogue.

    The file may come from a clone or an archive, so its author is not trusted: it may set how replies are made, and no
    path, repository, program, network, disk or keys.
    """
    where, ignore = f"{name} in {path}", f"or ignore the file with {places.NO_PROJECT}=1."
    if name not in (*PROJECT_MAY_SET, *SAMPLING):
        why = "a project file cannot change this setting because it affects your machine, data or screen"
        raise usage_error(where, why, f"Set it with `localq config set {name} VALUE`, {ignore}")
    names_model = name == "model" or (name == "draft" and value not in CHOICES[name])
    if names_model and not _is_catalogue_name(value):
        why = "a project file can select only catalogue models"
        raise usage_error(where, why, f"Pass the model as an argument, add it to your models.toml, {ignore}")


def _is_catalogue_name(value: object) -> bool:
    """Return whether `value` can only be a catalogue name."""
    if not isinstance(value, str) or not _CATALOGUE_NAME.fullmatch(value):
        return False
    return not value.casefold().endswith(".gguf") and not Path(value).is_dir()


def file_text() -> str:
    """The text of `config.toml`; empty without a file. Raises as `toml_files.read`."""
    return toml_files.read(places.config_file()) or ""


def parse_file(text: str, where: str, may_set: Callable[[str, Any], None] = lambda name, value: None) -> dict[str, Any]:
    """The settings in the TOML `text` of the file `where`; `may_set` checks each first.

    Raises LocalqError: exit 2 for a wrong setting, 8 for invalid TOML.
    """
    found: dict[str, Any] = {}
    with _add_place(where):
        for name, value in toml_files.parse(text, where).items():
            check_name(name)
            may_set(name, value)
            found[name] = parse(name, value, where)
        Settings(**found)
    return found


@contextlib.contextmanager
def _add_place(where: str) -> Iterator[None]:
    """Add the place of the value to an error."""
    try:
        yield
    except LocalqError as error:
        what = error.what if where in str(error) else f"{error.what} in {where}"
        raise LocalqError(what, error.why, error.next_step, error.exit_code) from None


LIKE = 0.7  # of names that are suggested: at difflib's 0.6 "nothing" means "think"


def similar(name: str, known: Collection[str]) -> list[str]:
    """Settings among `known` that `name` may mean: the one that it names as an option, else those of similar names."""
    plain = name[:80].casefold().lstrip("-").replace("-", "_").removeprefix("no_")
    meant = OPTION_NAMES.get(plain, plain)
    return [meant] if meant in known else difflib.get_close_matches(plain, known, n=3, cutoff=LIKE)


def check_name(name: str) -> None:
    """Raise a usage error for an unknown setting, naming similar ones."""
    if name not in DESCRIPTIONS:
        near = similar(name, DESCRIPTIONS)
        meant = f"Did you mean {' or '.join(near)}?" if near else "To list all settings, run `localq config show`."
        raise usage_error(name[:24], "unknown setting", meant)


def parse(name: str, value: Any, where: str) -> Any:
    """`value` (typed in a file, text elsewhere) converted to the type of setting `name`."""
    if name == "ctx" and value == "max":
        return None  # the largest that fits, as without it
    if name in _WITHOUT_LIMIT and value == "max":
        return NO_LIMIT
    kind = str(Settings.__annotations__[name]).split(" |")[0]
    if kind == "bool":
        words = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
        if isinstance(value, bool) or (isinstance(value, str) and value.lower() in words):
            return value if isinstance(value, bool) else words[value.lower()]
    elif kind == "str" and isinstance(value, str):
        return value
    elif kind == "dict[str, str]":
        if isinstance(value, str):  # from the environment or the command line
            value = dict(each.partition("=")[::2] for each in value.split(";") if each.strip())
            value = {name.strip(): keys.strip() for name, keys in value.items()}
        if isinstance(value, dict):
            return keymap.parse(value) if name == "keys" else mcp_settings.parse(value)
    elif name in _NUMBER_OR_WORD and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    elif kind in ("int", "float") and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value) if kind == "float" else wording.parse_count(value)
        except (ValueError, OverflowError):  # OverflowError: an integer too large for a float
            pass
        else:
            return number
    why = f"{value!r:.80} in {where} is not {_EXPECTED.get(kind, 'text')}"
    raise usage_error(name, why, f"Meaning: {DESCRIPTIONS[name]}.")


def max_tokens_text(value: int | None) -> str:
    """`max_tokens` or `think_budget` as users write it: "max" without a limit, "None" where it is unset."""
    return "max" if value == NO_LIMIT else str(value)

"""Options that several verbs share, each defined once, and the settings that result from them."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq import settings
from localq.chat.attachments import system_text
from localq.errors import usage_error

if TYPE_CHECKING:
    from localq.text.grammar import Grammar

MIB = 2**20
LARGEST = 0  # of --ctx: "max", as large as fits, whatever the settings say


def _count(text: str) -> int:
    try:
        count = settings.parse_count(text)
    except ValueError:
        raise usage_error(text, "this is not a number of tokens", "Use something like 4096 or 8k.") from None
    if count < 1:
        raise usage_error(text, "this is too few", "Use a number of tokens, 1 or more.")
    return count


def _context(text: str) -> int:
    return LARGEST if text.strip().casefold() == "max" else _count(text)


def _use_token(context: typer.Context, value: str | None) -> None:
    """It is known to the hub's library from here on; the verb is given nothing that could be printed."""
    if value is not None and not context.resilient_parsing:
        from localq.cli import access_token  # only asked for here

        access_token.use(value)


def known_names(incomplete: str) -> list[str]:
    """Shell completion of a model: the catalogue's names that begin so. Files are the shell's own business."""
    from localq.files import catalog  # start-up cost: only verbs about models read the catalogue

    return [entry.name for entry in catalog.load_catalogue() if entry.name.startswith(incomplete)]


def _choices(name: str) -> Callable[[str], list[str]]:
    """Shell completion of the setting `name`."""
    return lambda incomplete: [value for value in settings.CHOICES[name] if value.startswith(incomplete)]


Model = Annotated[
    str | None,
    typer.Argument(help="A name, NAME@FORMAT, ORG/REPO, a folder or a .gguf file.", autocompletion=known_names),
]
ModelNamed = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="As the argument.", autocompletion=known_names)
]
Prompt = Annotated[
    str | None,
    typer.Option("--prompt", "-p", metavar="TEXT", help="Begin with this message; from a pipe it is the only one."),
]
System = Annotated[str | None, typer.Option("--system", "-s", help="System prompt; @FILE reads it from a file.")]
Context = Annotated[
    int | None,
    typer.Option("--ctx", "-c", "--ctx-size", parser=_context, metavar="TOKENS", help="Context size, such as 8k; max."),
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", parser=_count, metavar="TOKENS", help="Longest reply.")
]
Temperature = Annotated[float | None, typer.Option("--temperature", "--temp", help="0 = greedy.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the K likeliest tokens; 0 = off.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this mass; 1 = off.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Drop tokens below this share of the best; 0 = off.")]
RepeatPenalty = Annotated[float | None, typer.Option("--repeat-penalty", help="1 = off.")]
DryMultiplier = Annotated[
    float | None, typer.Option("--dry-multiplier", help="Punish going on with a repetition, such as 0.8; 0 = off.")
]
DryBase = Annotated[float | None, typer.Option("--dry-base", help="DRY: growth with every repeated token, 1.75.")]
DryAllowedLength = Annotated[
    int | None, typer.Option("--dry-allowed-length", help="DRY: acts from so many repeated tokens on, 2.")
]
XtcProbability = Annotated[
    float | None,
    typer.Option("--xtc-probability", help="How often to drop the likeliest tokens: 0 = never, 1 = always."),
]
XtcThreshold = Annotated[
    float | None, typer.Option("--xtc-threshold", help="XTC: drops all as likely as this but the least likely, 0.1.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same reply.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Vram = Annotated[str | None, typer.Option("--vram", metavar="SIZE", help="Use at most this much, such as 24 or 12GiB.")]
KvBits = Annotated[
    str | None,
    typer.Option(
        "--kv", "--cache-type", metavar="BITS", help="KV cache: auto, 16, 8, k8v4, 4.", autocompletion=_choices("kv")
    ),
]
Embed = Annotated[
    str | None,
    typer.Option(
        "--embed", metavar="PLACE", help="Embedding table: auto, device or host.", autocompletion=_choices("embed")
    ),
]
Head = Annotated[
    str | None,
    typer.Option("--head", metavar="FORM", help="Output head: auto, 16, 8 or nf4.", autocompletion=_choices("head")),
]
Format = Annotated[
    str | None, typer.Option("--format", metavar="FORMAT", help="Weights in this format: nf4, vq2, bf16, ...")
]
Reserve = Annotated[
    str | None, typer.Option("--reserve", metavar="SIZE", help="Leave so much of the GPU free besides, such as 300MiB.")
]
Force = Annotated[bool, typer.Option("--force", help="Try it even where the plan says that it does not fit.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "--estimate-only", help="Print the plan, fetch and load nothing.")]
Offline = Annotated[
    bool | None, typer.Option("--offline/--online", help="Never touch the network.", show_default=False)
]
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="@FILE|-|TOKEN", callback=_use_token, help="Access token; - asks for it."),
]
ShowStats = Annotated[
    bool | None,
    typer.Option("--stats/--no-stats", "--verbose", "-v", help="Speed after a reply.", show_default=False),
]
Markdown = Annotated[
    bool | None,
    typer.Option(
        "--markdown/--no-markdown", help="Draw replies at a terminal, or print as written.", show_default=False
    ),
]
Think = Annotated[
    str | None,
    typer.Option(
        "--think",
        metavar="[on|off|low|medium|high]",
        help="Whether the model thinks first, where it has the choice; --no-think is off.",
        autocompletion=_choices("think"),
    ),
]
ThinkOut = Annotated[str | None, typer.Option("--think-out", metavar="FILE", help="Thoughts go here, not to stderr.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End a reply before this text; may be repeated.")
]
JsonSchema = Annotated[
    str | None,
    typer.Option("--json-schema", metavar="SCHEMA|FILE", help="Answers are JSON of this schema; `json` = any JSON."),
]
GrammarText = Annotated[
    str | None, typer.Option("--grammar", metavar="GRAMMAR|FILE", help="Answers keep to this grammar (Lark or GBNF).")
]
Regex = Annotated[str | None, typer.Option("--regex", metavar="PATTERN", help="Answers match this pattern as a whole.")]
Continue = Annotated[bool, typer.Option("--continue", help="Go on with the last conversation.")]
Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="[ID|TITLE]", help="Go on with this one; without a value: choose from a list."),
]
Save = Annotated[
    bool | None, typer.Option("--save/--no-save", help="Keep the conversation on disk.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Plain = Annotated[bool, typer.Option("--plain", help="Line by line instead of full screen.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no statistics.")]


def checked_grammar(json_schema: str | None, grammar: str | None, regex: str | None) -> Grammar | None:
    """What answers keep to. Raises LocalqError (exit 2): more than one is given, a file cannot be read, or it is wrong.

    Warnings about it go to stderr.
    """
    given = {"--json-schema": json_schema, "--grammar": grammar, "--regex": regex}
    said = [(name, value) for name, value in given.items() if value is not None]
    if len(said) > 1:
        raise usage_error(said[1][0], f"it goes with no {said[0][0]}", "Give one of them.")
    if not said:
        return None
    from localq.cli.output import note
    from localq.text import grammar as grammars  # start-up cost: most runs have none

    makers = {"--json-schema": grammars.json_schema, "--grammar": grammars.grammar, "--regex": grammars.regex}
    name, value = said[0]
    wanted = makers[name](value)
    for warning in grammars.check(wanted):
        note(f"{wanted.called}: {warning}")
    return wanted


def among_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Of all that a verb was given, the flags that are settings. Raises as `prompt_files.system_text`."""
    names = [field.name for field in dataclasses.fields(settings.Settings) if field.name in given]
    return {name: system_text(given[name]) if name == "system" else given[name] for name in names}


def effective(**flags: Any) -> settings.Settings:
    """The settings in force: built-in < config.toml < project < environment < the flags that were given."""
    known = settings.load()
    if flags.get("ctx") == LARGEST:
        known, flags = dataclasses.replace(known, ctx=None), {**flags, "ctx": None}
    return known.replace(**flags)


def given(name: str, flag: Any) -> Any:
    """`flag`, or where it was not given LOCALQ_<NAME>: for verbs that take no account of config.toml there."""
    variable = f"LOCALQ_{name.upper()}"
    if flag is None and variable in os.environ:
        flag = settings.parse(name, os.environ[variable], variable)
    return None if flag == LARGEST and name == "ctx" else flag


def settled(flags: dict[str, Any], quiet: bool) -> settings.Settings:
    """`effective`, where replies are made: what a project's file decides is told, unless `quiet`."""
    found = effective(**flags)
    if not quiet:
        tell_project(flags)
    return found


def tell_project(flags: dict[str, Any]) -> None:
    """One line on stderr about what a project's file decides here, since the user may not have written it."""
    path, named = settings.read_project()
    decided = [name for name in named if flags.get(name) is None and f"LOCALQ_{name.upper()}" not in os.environ]
    if decided:
        from localq.cli.output import note  # start-up cost: as above

        note(f"({', '.join(decided)} as {path} says)")


def one_model(argument: str | None, option: str | None) -> str | None:
    """The model that is named one way or the other. Raises LocalqError (exit 2) where it is named both ways."""
    if argument is not None and option is not None:
        raise usage_error("--model", f"{argument} was given too", "Name one model.")
    return argument if option is None else option


@dataclasses.dataclass(frozen=True)
class Given:
    """A prompt as it came: the words of the user, and what was piped in, which anybody may have written."""

    words: str
    piped: str = ""

    @property
    def text(self) -> str:
        """All of it, what was piped in first."""
        return "\n\n".join(part for part in (self.piped, self.words) if part)


def prompt(words: list[str], verb: str, example: str) -> Given:
    """Stdin, unless it is a terminal, and the words of the command line (a single "-" stands for stdin alone)."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    given = Given("" if words == ["-"] else " ".join(words), piped)
    if not given.text.strip():
        raise usage_error(verb, "there is no prompt", f"Give one: {example}, or pipe it in.")
    return given

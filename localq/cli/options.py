"""Options that several verbs share, and the settings that result from them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from localq import settings, wording
from localq.chat.attachments import system_text
from localq.cli import help_page, piped_input
from localq.errors import usage_error

MIB = 2**20
MAX_CONTEXT = 0  # of --ctx: "max", as large as fits, whatever the settings say


def _count(text: str) -> int:
    try:
        count = wording.parse_count(text)
    except ValueError:
        raise usage_error(text[:40], "not a token count", "Use a number such as 4096 or 8k.") from None
    if count > settings.NO_LIMIT:
        why = f"too many tokens (limit: {settings.NO_LIMIT:,})"
        raise usage_error(text[:40], why, "Use `max` for as many as possible.")
    if count < 1:
        raise usage_error(text, "too few tokens", "Use 1 or more.")
    return count


def _max_tokens(text: str) -> int:
    return settings.NO_LIMIT if text.strip().casefold() == "max" else _count(text)


def _context(text: str) -> int:
    return MAX_CONTEXT if text.strip().casefold() == "max" else _count(text)


def _use_token(context: typer.Context, value: str | None) -> None:
    """Hand the token to the hub's library; the verb gets no value that it could print."""
    if value is not None and not context.resilient_parsing:
        from localq.cli import access_token  # only asked for here

        access_token.use(value)


def complete_names(incomplete: str) -> list[str]:
    """Complete a model name from the catalogue; the shell completes files."""
    from localq.files import catalog  # start-up cost: only verbs about models read the catalogue

    return [entry.name for entry in catalog.load_catalogue() if entry.name.startswith(incomplete)]


def _choices(name: str) -> Callable[[str], list[str]]:
    """Complete the values of the setting `name`."""
    return lambda incomplete: [value for value in settings.CHOICES[name] if value.startswith(incomplete)]


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Name, ORG/REPO[:TAG], folder or .gguf (see `localq help names`).",
        autocompletion=complete_names,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="Same as the MODEL argument.", autocompletion=complete_names,
        rich_help_panel=help_page.MODEL,
    ),
]  # fmt: skip
Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="FORMAT", help="Weight format, such as nf4, vq2 or bf16.", rich_help_panel=help_page.MODEL
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="Device to use: auto, cpu or cuda.", rich_help_panel=help_page.MODEL
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Load the model even if it does not fit.", rich_help_panel=help_page.MODEL),
]
Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Do not use the `localq serve` engine.", rich_help_panel=help_page.MODEL),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        "--estimate-only",
        help="Print the plan and exit.",
        rich_help_panel=help_page.MODEL,
    ),
]
Offline = Annotated[
    bool | None,
    typer.Option(
        "--offline/--online", help="Disable or enable network use.", show_default=False, rich_help_panel=help_page.MODEL
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="First message (the only one if output is piped).",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
System = Annotated[
    str | None,
    typer.Option(
        "--system", "-s", metavar="TEXT", help="System prompt, or @FILE to read it from FILE.",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
Think = Annotated[
    str | None,
    typer.Option(
        "--think", metavar="LEVEL", help="Thinking: on, off or a level (--no-think = off).",
        autocompletion=_choices("think"), rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
ThinkOut = Annotated[
    str | None,
    typer.Option(
        "--think-out", metavar="FILE", help="Write the thinking to FILE, not to stderr.",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
Continue = Annotated[
    bool,
    typer.Option("--continue", help="Resume the last conversation.", rich_help_panel=help_page.CONVERSATION),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="[ID|TITLE]", help="Resume a conversation (or pick one from a list).",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
Save = Annotated[
    bool | None,
    typer.Option(
        "--save/--no-save", help="Save the conversation to disk.", show_default=False,
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-n", parser=_max_tokens, metavar="TOKENS",
        help="Maximum tokens per reply; max = no limit.", rich_help_panel=help_page.SAMPLING,
    ),
]  # fmt: skip
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", "--temp", help="Sampling temperature; 0 = greedy.", rich_help_panel=help_page.SAMPLING
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", help="Keep the N most likely tokens; 0 = off.", rich_help_panel=help_page.SAMPLING),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help="Nucleus sampling probability mass; 1 = off.", rich_help_panel=help_page.SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Min-p sampling cutoff; 0 = off.", rich_help_panel=help_page.SAMPLING),
]
RepeatPenalty = Annotated[
    float | None,
    typer.Option("--repeat-penalty", help="Penalty for repeated tokens; 1 = off.", rich_help_panel=help_page.SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Random seed, for reproducible replies.", rich_help_panel=help_page.SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", help="Stop generating before TEXT (repeatable).", rich_help_panel=help_page.SAMPLING
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--ctx", "-c", "--ctx-size", parser=_context, metavar="TOKENS",
        help="Context size in tokens, such as 8k, or max.",
        rich_help_panel=help_page.MEMORY,
    ),
]  # fmt: skip
Vram = Annotated[
    str | None,
    typer.Option(
        "--vram", metavar="SIZE", help="GPU memory limit, such as 24 or 12GiB.", rich_help_panel=help_page.MEMORY
    ),
]
KvBits = Annotated[
    str | None,
    typer.Option(
        "--kv", "--cache-type", metavar="BITS", help="KV cache precision: auto, 16, 8, k8v4 or 4.",
        autocompletion=_choices("kv"), rich_help_panel=help_page.MEMORY,
    ),
]  # fmt: skip
Embed = Annotated[
    str | None,
    typer.Option(
        "--embed", metavar="PLACE", help="Embedding table location: auto, device or host.",
        autocompletion=_choices("embed"), rich_help_panel=help_page.MEMORY,
    ),
]  # fmt: skip
Head = Annotated[
    str | None,
    typer.Option(
        "--head", metavar="FORM", help="Output head precision: auto, 16, 8 or nf4.", autocompletion=_choices("head"),
        rich_help_panel=help_page.MEMORY,
    ),
]  # fmt: skip
Reserve = Annotated[
    str | None,
    typer.Option(
        "--reserve", metavar="SIZE", help="GPU memory to leave free, such as 300MiB.", rich_help_panel=help_page.MEMORY
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option(
        "--checkpoints", metavar="SIZE", help="RAM for checkpoints that speed up /undo.",
        rich_help_panel=help_page.MEMORY,
    ),
]  # fmt: skip
Desktop = Annotated[
    str | None,
    typer.Option(
        "--desktop", metavar="SIZE", help="VRAM used by the desktop (only with --vram).",
        rich_help_panel=help_page.MEMORY,
    ),
]  # fmt: skip
ShowStats = Annotated[
    bool | None,
    typer.Option(
        "--stats/--no-stats", "--verbose", "-v",
        help="Show statistics; `run` also shows loading steps.",
        show_default=False, rich_help_panel=help_page.OUTPUT,
    ),
]  # fmt: skip
Markdown = Annotated[
    bool | None,
    typer.Option(
        "--markdown/--no-markdown", help="Render Markdown in the terminal.", show_default=False,
        rich_help_panel=help_page.OUTPUT,
    ),
]  # fmt: skip
Plain = Annotated[
    bool,
    typer.Option("--plain", help="Use line mode; accept /commands on stdin.", rich_help_panel=help_page.OUTPUT),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Hide progress and statistics.", rich_help_panel=help_page.OUTPUT),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=help_page.OUTPUT)]
DryMultiplier = Annotated[
    float | None,
    typer.Option("--dry-multiplier", help="DRY multiplier, such as 0.8; 0 = off.", rich_help_panel=help_page.ADVANCED),
]
DryBase = Annotated[
    float | None,
    typer.Option("--dry-base", help="DRY penalty growth per token (default 1.75).", rich_help_panel=help_page.ADVANCED),
]
DryAllowedLength = Annotated[
    int | None,
    typer.Option(
        "--dry-allowed-length", help="Shortest repetition to penalize (default 2).",
        rich_help_panel=help_page.ADVANCED,
    ),
]  # fmt: skip
XtcProbability = Annotated[
    float | None,
    typer.Option(
        "--xtc-probability", help="XTC probability per token, such as 0.5; 0 = off.", rich_help_panel=help_page.ADVANCED
    ),
]
XtcThreshold = Annotated[
    float | None,
    typer.Option(
        "--xtc-threshold", help="XTC probability threshold (default 0.1).", rich_help_panel=help_page.ADVANCED
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Compute dtype: auto, float32, bfloat16, float16.",
        rich_help_panel=help_page.ADVANCED,
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="TOKEN", callback=_use_token, help="Hub access token, @FILE, or - to be prompted.",
        rich_help_panel=help_page.ADVANCED,
    ),
]  # fmt: skip


def setting_flags(given: dict[str, Any]) -> dict[str, Any]:
    """A verb's arguments that are settings, with `system` read from its file.

    Raises LocalqError (exit 2) for a file that cannot be read.
    """
    names = [field.name for field in dataclasses.fields(settings.Settings) if field.name in given]
    return {name: system_text(given[name]) if name == "system" else given[name] for name in names}


def load_settings(uses: Sequence[str] = (), **flags: Any) -> settings.Settings:
    """The settings in force: built-in < config.toml < project < environment < flags.

    uses   settings that the verb needs but has no flag for; those that a project's file sets are named on stderr
    """
    found, project = load_reply_settings(flags, say=False)
    note_project({name: origin for name, origin in project.items() if name in uses or name in flags})
    return found


def flag_or_environment(name: str, flag: Any) -> Any:
    """`flag`, else LOCALQ_<NAME>: for verbs that ignore config.toml for this setting."""
    variable = f"LOCALQ_{name.upper()}"
    if flag is None and variable in os.environ:
        flag = settings.parse(name, os.environ[variable], variable)
    return None if flag == MAX_CONTEXT and name == "ctx" else flag


def load_reply_settings(
    flags: dict[str, Any], say: bool = True
) -> tuple[settings.Settings, dict[str, settings.Origin]]:
    """The settings in force, and those of them that a project's file decides; say: `note_project` at once."""
    found = settings.origins()
    known, given = settings.of_origins(found), dict(flags)
    if given.get("ctx") == MAX_CONTEXT:
        known, given["ctx"] = dataclasses.replace(known, ctx=None), None
    project = {name: each for name, each in found.items() if each.is_project and flags.get(name) is None}
    if say:
        note_project(project)
    return known.replace(**given), project


def note_project(project: Mapping[str, settings.Origin]) -> None:
    """Name on stderr, --quiet or not, the settings of a project's file, which the user may not have written."""
    if project:
        from localq.cli.output import note  # start-up cost: as above

        note(f"({wording.project_summary({name: each.source for name, each in project.items()})})")


def single_model(argument: str | None, option: str | None) -> str | None:
    """The model, given as argument or as --model. Raises LocalqError (exit 2) where it is given twice."""
    if argument is not None and option is not None:
        raise usage_error("--model", f"cannot be combined with the MODEL argument, {argument}", "Use one or the other.")
    return argument if option is None else option


@dataclasses.dataclass(frozen=True)
class PromptText:
    """A prompt: the user's words, and piped text, whose origin is unknown."""

    words: str
    piped: str = ""

    @property
    def text(self) -> str:
        """Both, piped text first."""
        return "\n\n".join(part for part in (self.piped, self.words) if part)


def read_prompt(words: list[str], verb: str, example: str, required: bool = True) -> PromptText:
    """The prompt from piped stdin and the words of the command line ("-" alone: stdin only).

    required   raise LocalqError (exit 2) for an empty one
    """
    prompt = PromptText("" if words == ["-"] else " ".join(words), piped_input.read())
    if required and not prompt.text.strip():
        raise usage_error(verb, "no prompt given", f"Run `{example}`, or pipe in a prompt.")
    return prompt

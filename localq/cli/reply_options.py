"""Options of a reply that are not sampling: grammars, the loop guard, attached files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localq import settings, wording
from localq.cli import help_page
from localq.errors import ExitCode, LocalqError, usage_error

if TYPE_CHECKING:
    from localq.chat.tools.toolbox import Toolbox
    from localq.text.grammar import Grammar


def _budget(text: str) -> int:
    if text.strip().casefold() == "max":
        return settings.NO_LIMIT
    try:
        count = wording.parse_count(text)
    except ValueError:
        raise usage_error(text[:40], "not a token count", "Use a number such as 512 or 4k.") from None
    if not 0 <= count <= settings.NO_LIMIT:
        raise usage_error(text[:40], "out of range", "Use 0 (no thinking), a number of tokens, or max (no limit).")
    return count


def _drafts(incomplete: str) -> list[str]:
    return [value for value in settings.CHOICES["draft"] if value.startswith(incomplete)]


ThinkBudget = Annotated[
    int | None,
    typer.Option(
        "--think-budget", parser=_budget, metavar="TOKENS", help="Maximum thinking tokens; 0 = no thinking.",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="SOURCE", help="Draft source: auto, off, lookup, mtp or NAME.",
        autocompletion=_drafts, rich_help_panel=help_page.MODEL,
    ),
]  # fmt: skip
DraftMax = Annotated[
    int | None,
    typer.Option("--draft-max", metavar="K", help="Maximum tokens per draft, 1 to 7.", rich_help_panel=help_page.MODEL),
]
LoopGuard = Annotated[
    bool | None,
    typer.Option(
        "--loop-guard/--no-loop-guard", help="Stop replies that repeat themselves (default).", show_default=False,
        rich_help_panel=help_page.SAMPLING,
    ),
]  # fmt: skip
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--file", "-f", metavar="FILE", help="Attach a text file, as @FILE does (repeatable).",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema", metavar="SCHEMA", help="JSON schema or schema file; `json` = any JSON.",
        rich_help_panel=help_page.ANSWER,
    ),
]  # fmt: skip
GrammarText = Annotated[
    str | None,
    typer.Option(
        "--grammar",
        metavar="GRAMMAR",
        help="Lark or GBNF grammar, or a grammar file.",
        rich_help_panel=help_page.ANSWER,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(
        "--regex", metavar="PATTERN", help="Regex that the whole answer must match.", rich_help_panel=help_page.ANSWER
    ),
]


Mcp = Annotated[
    list[str] | None,
    typer.Option(
        "--mcp", metavar="SERVER", help="MCP server command or URL (repeatable).",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
McpAllow = Annotated[
    list[str] | None,
    typer.Option(
        "--mcp-allow", metavar="TOOL", help="Run TOOL without asking (repeatable).",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip


@contextlib.contextmanager
def open_toolbox(
    named: list[str] | None, allowed: list[str] | None, known: settings.Settings
) -> Iterator[Toolbox | None]:
    """The servers of --mcp, which start now and end with the context; None without the option.

    Raises LocalqError: exit 2 for a malformed command or address, exit 1 where the package `mcp` is missing.
    """
    if not named:
        if allowed:
            raise usage_error("--mcp-allow", "no MCP server was given", "Add one with --mcp.")
        yield None
        return
    from localq.chat.tools import servers, toolbox  # start-up cost: most chats have none

    parsed = servers.parse(named, known.mcp)
    servers.check_installed()
    limits = toolbox.ToolLimits(known.mcp_rounds, known.mcp_timeout, known.mcp_result)
    opened = toolbox.Toolbox(parsed, limits, tuple(allowed or ()))
    try:
        opened.start()
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def suggest_prompt(verb: str, named: bool) -> Iterator[None]:
    """Say in the error about an unknown model how a prompt is sent, which the user may have meant.

    named: the model is the first argument, not the value of --model
    """
    try:
        yield
    except LocalqError as error:
        if not named or error.exit_code != ExitCode.UNKNOWN_MODEL:
            raise
        step = f'{error.next_step} To send a prompt, use `localq {verb} -p "PROMPT"`.'.lstrip()
        raise LocalqError(error.what, error.why, step, error.exit_code) from None


def parse_grammar(json_schema: str | None, grammar: str | None, regex: str | None) -> Grammar | None:
    """The grammar that answers must follow; None without one. Its warnings go to stderr.

    Raises LocalqError (exit 2): two are given, a file cannot be read, or the grammar is wrong.
    """
    options = {"--json-schema": json_schema, "--grammar": grammar, "--regex": regex}
    given = [(name, value) for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise usage_error(given[1][0], f"cannot be combined with {given[0][0]}", "Use one or the other.")
    if not given:
        return None
    from localq.cli.output import note
    from localq.text import grammar as grammars  # start-up cost: most runs have none

    makers = {"--json-schema": grammars.json_schema, "--grammar": grammars.grammar, "--regex": grammars.regex}
    name, value = given[0]
    parsed = makers[name](value)
    for warning in grammars.check(parsed):
        note(f"{parsed.label}: {warning}")
    return parsed

"""Options of a reply that are not sampling: grammars, the loop guard, attached files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localq import settings
from localq.cli import help_page
from localq.errors import ExitCode, LocalqError, usage_error

if TYPE_CHECKING:
    from localq.text.grammar import Grammar


def _budget(text: str) -> int:
    if text.strip().casefold() == "max":
        return settings.NO_LIMIT
    try:
        count = settings.parse_count(text)
    except ValueError:
        raise usage_error(text[:40], "not a token count", "Use a number such as 512 or 4k.") from None
    if not 0 <= count <= settings.NO_LIMIT:
        raise usage_error(text[:40], "out of range", "Use 0 (no thinking), a number of tokens, or max (no limit).")
    return count


ThinkBudget = Annotated[
    int | None,
    typer.Option(
        "--think-budget", parser=_budget, metavar="TOKENS", help="Stop thinking after TOKENS; 0 = none.",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip
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
        "--file", "-f", metavar="FILE", help="Attach a text file, like @FILE; repeatable.",
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
        step = f'{error.next_step} To send a prompt: localq {verb} -p "PROMPT".'.lstrip()
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

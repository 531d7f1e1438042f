"""`localq help`: topics that belong to no single verb."""

from __future__ import annotations

from typing import Annotated

import typer

from localq.cli.output import print_json, stdout_table
from localq.errors import EXIT_CODE_MEANINGS, usage_error

TOPICS = ("exit-codes",)


def help(
    topic: Annotated[str, typer.Argument(help=f"One of: {', '.join(TOPICS)}.")] = "exit-codes",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain a topic: exit-codes."""
    if topic not in TOPICS:
        raise usage_error(
            topic, "there is no such help topic", f"Topics: {', '.join(TOPICS)}; verbs: localq VERB --help."
        )
    if json:
        print_json({"exit_codes": {str(int(code)): meaning for code, meaning in EXIT_CODE_MEANINGS.items()}})
        return
    stdout_table(["code", "meaning"], [[str(int(code)), meaning] for code, meaning in EXIT_CODE_MEANINGS.items()])

"""Options of a reply that are not sampling: the loop guard, and attached files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from localq.cli import help_page

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
        "--file", "-f", metavar="FILE", help="Attach a text file, as @FILE does; repeatable.",
        rich_help_panel=help_page.CONVERSATION,
    ),
]  # fmt: skip

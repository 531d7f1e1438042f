"""Options whose value may be left out: `--resume` chooses from a list, `--think` is "on". The parser knows none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

from localq import thinking


class Command(TyperCommand):
    """A verb with such options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`args` with the values that were left out."""
        return super().parse_args(ctx, list(_spelt_out(args)))


def _spelt_out(args: list[str]) -> Iterator[str]:
    """What follows `--` is left as it is. A word behind `--think` is its value only where it can be one."""
    options = args[: args.index("--")] if "--" in args else args
    for each, following in itertools.pairwise([*options, "-"]):
        if each == "--resume" and following.startswith("-"):
            yield "--resume="
        elif each == "--think" and following not in thinking.CHOICES:
            yield "--think=on"
        elif each == "--no-think":
            yield "--think=off"
        else:
            yield each
    yield from args[len(options) :]

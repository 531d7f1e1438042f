"""The list of verbs, and how they are loaded: the file of a verb is imported when the verb is used.

No verb pays for the start-up of another; only `localq --help`, which shows the first line of each, imports them all.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from localq.cli import completion, help_page
from localq.cli.option_values import accept_plain_values

# Panel of `localq --help` -> its verbs. Verb `x` is the function `x` (or the group of verbs `x`) of
# `localq/cli/verbs/x.py`.
GROUPS = {
    "Chat": ("chat", "tui", "run"),
    "Serve": ("serve", "ps", "stop"),
    "Models": ("pull", "ls", "show", "verify", "rm", "prune", "fit"),
    "Quantize and measure": ("quantize", "push", "bench", "eval"),
    "Setup": ("doctor", "config", "help"),
}
VERBS = tuple(verb for group in GROUPS.values() for verb in group)
ALIASES = {  # accepted, not listed
    "get": "pull", "download": "pull", "list": "ls", "info": "show", "remove": "rm", "recommend": "fit",
    "env": "doctor", "collect-env": "doctor",
}  # fmt: skip
_AS_JSON = ("env", "collect-env")  # these mean the verb with --json: the output goes into a bug report


class _Commands(Mapping[str, TyperCommand | TyperGroup]):
    """Verb -> its command. Iterating gives the names and imports nothing."""

    def __getitem__(self, name: str) -> TyperCommand | TyperGroup:
        verb = ALIASES.get(name, name)
        if name not in self:
            raise KeyError(name)
        module = importlib.import_module(f"localq.cli.verbs.{verb}")
        implementation = getattr(module, verb)
        if isinstance(implementation, typer.Typer):
            app = implementation
        else:
            app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            app.command(name=verb, cls=getattr(module, "Command", TyperCommand))(implementation)
        command = typer.main.get_command(app)
        assert isinstance(command, TyperCommand | TyperGroup)
        _prepare(command)
        command.rich_help_panel = next(group for group, verbs in GROUPS.items() if verb in verbs)
        if name in _AS_JSON:
            parse = command.parse_args
            command.parse_args = lambda context, args: parse(context, [*args, "--json"])  # type: ignore[method-assign, assignment]
        return command

    def get(self, name: str, default: Any = None) -> Any:
        """The command, or `default` for no verb: a KeyError of a verb's module is no unknown verb."""
        if name in self:
            return self[name]
        return default

    def __contains__(self, name: object) -> bool:
        return ALIASES.get(name, name) in VERBS if isinstance(name, str) else False

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


def _prepare(command: TyperCommand | TyperGroup) -> None:
    accept_plain_values(command)
    help_page.use(command)
    if isinstance(command, TyperGroup) and not isinstance(command.commands, _Commands):
        for each in command.commands.values():
            assert isinstance(each, TyperCommand)
            help_page.use(each)


class Verbs(TyperGroup):
    """The group of all verbs, for `typer.Typer(cls=Verbs)`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]  # the base class never writes to it after this
        _prepare(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with options that typer adds to the group after its construction."""
        completion.use(self.params)
        return super().parse_args(ctx, args)

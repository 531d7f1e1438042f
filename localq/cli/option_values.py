"""What the command line gives, taken without pydantic where there is nothing to check: text, and what nobody gave.

An option that is not given may be in the environment: `--think-out` as LOCALQ_THINK_OUT. Where there is a setting of
that name, the settings look there (`settings.py`).

Typer has pydantic check every value, an absent one too; importing it and building its checks are 0.1 s of every start,
as much as all of localq that answers a misspelt name. Numbers, parsers and what is missing are left to typer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

from localq import settings
from localq.sampling import THINK_CHOICES


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
        elif each == "--think" and following not in THINK_CHOICES:
            yield "--think=on"
        elif each == "--no-think":
            yield "--think=off"
        else:
            yield each
    yield from args[len(options) :]


Check = Callable[[Any, Any], Any]


def accept_plain_values(command: TyperCommand | TyperGroup) -> None:
    """Let the parameters of `command` take their values so, `--help` included.

    Instances are changed, because typer makes its parameters itself and knows no other class for them.
    """
    every = command.get_params

    def get_params(context: Any) -> Any:
        found = every(context)
        for parameter in found:
            _look_in_environment(parameter)
            if "process_value" not in vars(parameter):
                check = parameter.process_value
                parameter.process_value = functools.partial(_value, parameter, check)  # type: ignore[method-assign]
        return found

    command.get_params = get_params  # type: ignore[method-assign, assignment]


def _look_in_environment(parameter: Any) -> None:
    name = next((each for each in parameter.opts if each.startswith("--")), None)
    if name is None or parameter.envvar is not None or parameter.is_eager:
        return
    known = name.removeprefix("--").replace("-", "_")
    if known not in settings.DESCRIPTIONS:
        parameter.envvar, parameter.show_envvar = f"LOCALQ_{known.upper()}", False


def _value(parameter: Any, check: Check, context: Any, value: Any) -> Any:
    if value is None:
        if parameter.required:
            return check(context, value)
        value = () if parameter.multiple or parameter.nargs == -1 else None
    elif _is_plain(parameter, value):
        value = value if type(value) is str else list(value)
    else:
        return check(context, value)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _is_plain(parameter: Any, value: Any) -> bool:
    """It is text that is wanted as text."""
    described = parameter.type_descriptor
    if described.parameter_info.parser is not None:
        return False
    if described.annotation == list[str]:
        return type(value) in (list, tuple) and len(value) > 0 and all(type(each) is str for each in value)
    return described.annotation is str and type(value) is str

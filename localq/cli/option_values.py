"""Values of options: common ones bypass pydantic, LOCALQ_<OPTION> replaces absent ones.

`--think-out` is also LOCALQ_THINK_OUT. Options that are settings are read from the environment by `settings.py`.

Typer checks every value with pydantic, whose import costs 0.1 s of every start. Text, plain numbers and what a parser
accepts are converted here; other values, wrong ones among them, and missing required ones still go through typer.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from localq import places, settings
from localq.sampling import THINK_CHOICES

# Largest numbers of options. A larger number is a mistake: no context, text or patience holds more.
MOST_REPETITIONS, MOST_WINDOWS, MOST_TOKENS = 1_000, 100_000, 2**24
LARGEST_SEED = 2**63 - 1  # of torch
_NUMBERS = {  # in their usual spelling; typer accepts more
    int: re.compile(r"-?(0|[1-9][0-9]{0,14})"),
    float: re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?"),
}
_TAKES_PATH = re.compile(r"\b(FILE|FOLDER)\b")  # in the metavar of an option whose value is text


class Command(TyperCommand):
    """A verb with options whose value may be omitted: --think, --no-think, --resume."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args` with the omitted values filled in."""
        return super().parse_args(ctx, list(_fill_in(args)))


def _fill_in(args: list[str]) -> Iterator[str]:
    """Arguments with omitted values; a word after `--think` is its value only if it is valid."""
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
    """Let the parameters of `command` accept plain values without pydantic, `--help` included.

    Patches instances, because typer creates its parameters itself.
    """
    original = command.get_params

    def get_params(context: Any) -> Any:
        found = original(context)
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
    elif (converted := _converted(parameter, value)) is not None:
        value = converted
    else:
        return _expand(parameter, check(context, value))
    value = _expand(parameter, value)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


def _expand(parameter: Any, value: Any) -> Any:
    """`value` with ~ and ~USER replaced in paths: a shell leaves them in quotes, in --out=~/x and in variables."""
    if isinstance(value, list | tuple):
        return type(value)(_expand(parameter, each) for each in value)
    is_path = isinstance(value, Path) or (isinstance(value, str) and _TAKES_PATH.search(parameter.metavar or ""))
    return type(value)(places.expand(value, parameter.opts[0])) if is_path else value


def _is_plain(parameter: Any, value: Any) -> bool:
    """Return whether the value is text, and the parameter takes text."""
    described = parameter.type_descriptor
    if described.parameter_info.parser is not None:
        return False
    if described.annotation == list[str]:
        return type(value) in (list, tuple) and len(value) > 0 and all(type(each) is str for each in value)
    return described.annotation is str and type(value) is str


def _converted(parameter: Any, value: Any) -> Any:
    """The value of plain text by the parser or as the number that the parameter takes; None for anything else."""
    described = parameter.type_descriptor
    given = described.parameter_info
    if type(value) is not str or parameter.multiple or parameter.nargs != 1 or described.is_list:
        return None
    if given.parser is not None:
        try:
            return given.parser(value)
        except Exception:  # typer calls it again, and reports what it raises
            return None
    kind = described.annotation
    if kind not in _NUMBERS or given.clamp or not _NUMBERS[kind].fullmatch(value):
        return None
    number = kind(value)
    is_within = (given.min is None or number >= given.min) and (given.max is None or number <= given.max)
    return number if is_within else None

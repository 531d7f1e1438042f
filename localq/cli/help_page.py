"""The page of `--help`: options in panels, one line each, boxed at a terminal and plain elsewhere.

A panel is the `rich_help_panel` of an option. The page is drawn here and not by Rich, which takes as long to import as
the rest of `localq --help`.
"""

from __future__ import annotations

import functools
import textwrap
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

# In the order in which a page shows them; the options that few need come last.
MODEL, CONVERSATION, SAMPLING, ANSWER = "Model", "Conversation", "Sampling", "Answer format"
SERVER, CARD, TESTS, MODES, QUALITY = "Server", "Card", "Tests", "Modes", "Quality"
MEMORY, OUTPUT, ADVANCED = "Memory", "Output", "Advanced"
PANELS = (MODEL, SERVER, CARD, TESTS, MODES, CONVERSATION, SAMPLING, ANSWER, QUALITY, MEMORY, OUTPUT, ADVANCED)
_ARGUMENTS, _COMMANDS, _OPTIONS = "Arguments", "Commands", "Options"
_KINDS = {"int": "N", "float": "X", "str": "TEXT", "Path": "PATH", "PathlibPath": "PATH"}

Rows = list[tuple[str, str]]  # what to type, and what it does


def use(command: TyperCommand | TyperGroup) -> None:
    """Let `command`, and the commands in it, write their help as such a page."""
    command.collect_usage_pieces = functools.partial(_usage, command)  # type: ignore[method-assign]
    command.format_options = functools.partial(_write, command)  # type: ignore[method-assign]


def panels(command: Any, context: Any) -> dict[str, Rows]:
    """Panel -> its rows, in the order of the page."""
    is_group = isinstance(command, TyperGroup)
    found: dict[str, Rows] = {name: [] for name in (_ARGUMENTS, *PANELS, _OPTIONS)}
    for parameter in command.get_params(context):
        if getattr(parameter, "hidden", False):
            continue
        if isinstance(parameter, TyperArgument):
            found[_ARGUMENTS].append((_argument(parameter), _meaning(parameter)))
        else:
            panel = getattr(parameter, "rich_help_panel", None) or (_OPTIONS if is_group else OUTPUT)
            found[panel].append((_option(parameter), _meaning(parameter)))
    if is_group:
        for name in command.list_commands(context):
            each = command.get_command(context, name)
            assert each is not None
            panel = getattr(each, "rich_help_panel", None) or _COMMANDS
            found.setdefault(panel, []).append((name, (each.help or "").partition("\n")[0]))
        found[_OPTIONS] = found.pop(_OPTIONS)  # last
    if len(found[MEMORY]) == 1:  # --vram alone
        found[MODEL] += found.pop(MEMORY)
    return {panel: rows for panel, rows in found.items() if rows}


def _usage(command: Any, context: Any) -> list[str]:
    pieces = ["[OPTIONS]"]
    if isinstance(command, TyperGroup):
        return [*pieces, "COMMAND [ARGS]..."]
    for each in command.get_params(context):
        if isinstance(each, TyperArgument) and not each.hidden:
            pieces.append(_argument(each) if each.required else f"[{_argument(each)}]")
    return pieces


def _argument(argument: TyperArgument) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return f"{name}..." if argument.nargs == -1 and not name.endswith("...") else name


def _option(option: Any) -> str:
    """The short and the first long spelling, `--[no-]x` of a switch with two sides, and what follows."""
    short = next((each for each in option.opts if not each.startswith("--")), "")
    name = next((each for each in option.opts if each.startswith("--")), "")
    other = option.secondary_opts[0] if option.secondary_opts else ""
    if other == f"--no-{name[2:]}":
        name = f"--[no-]{name[2:]}"
    elif other:
        name = f"{name}/{other}"
    names = f"{short}, {name}" if short and name else short or f"    {name}"
    if not isinstance(option, TyperOption) or option.is_flag:
        return names
    return f"{names} {option.metavar or _KINDS.get(option.bare_type(), 'VALUE')}"


def _meaning(parameter: Any) -> str:
    text = parameter.help or ""
    if parameter.required:
        return f"{text} (required)"
    default = parameter.default
    if not parameter.show_default or default in (None, "", (), []) or isinstance(default, bool):
        return text
    return f"{text} (default {default})"


def _write(command: Any, context: Any, formatter: Any) -> None:
    """As typer's `format_options`."""
    found = panels(command, context)
    boxed = _takes_boxes()
    if boxed:
        formatter.write("\n")
    for panel, rows in found.items():
        alike = [each for each in found if (each in (*PANELS, _OPTIONS)) == (panel in (*PANELS, _OPTIONS))]
        left = max(len(name) for each in alike for name, _ in found[each])
        lines = [line for name, text in rows for line in _lines(name, text, left, formatter.width)]
        lines = _box(panel, lines, formatter.width + 2) if boxed else ["", f"{panel}:", *lines]
        formatter.write("\n".join(lines) + "\n")


def _lines(name: str, text: str, left: int, width: int) -> list[str]:
    broken = textwrap.wrap(text, max(20, width - left - 4), break_long_words=False, break_on_hyphens=False) or [""]
    first, *rest = broken
    return [f"  {name:<{left}}  {first}".rstrip(), *(f"  {'':<{left}}  {line}" for line in rest)]


def _box(title: str, lines: list[str], width: int) -> list[str]:
    top = f"╭─ {title} {'─' * (width - len(title) - 5)}╮"
    return [top, *(f"│{line[1:]:<{width - 2}}│" for line in lines), f"╰{'─' * (width - 2)}╯"]


def _takes_boxes() -> bool:
    """Return whether the output is a UTF-8 terminal: pipes, logs and screen readers get plain lines."""
    from localq.cli.output import is_rich_terminal, stdout  # it imports what the registry does without
    from localq.cli.stream_encoding import is_utf8

    return is_rich_terminal(stdout()) and is_utf8(stdout())

"""`--install-completion`: the shell's start file is only appended to, and the script is written beside and renamed.

typer's own installer empties the start file before it writes it again: a full disk, or a kill, would cost its content.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from localq import disk, places
from localq.cli.output import print_line
from localq.errors import ExitCode, LocalqError, usage_error

MOST_BYTES = 2**24  # of a start file
VARIABLE = "_LOCALQ_COMPLETE"
_OPTION, _STEP = "--install-completion", "To install it yourself, use the script from `localq --show-completion`."


@dataclass(frozen=True)
class _Shell:
    """Files in which a shell finds completions, relative to the home folder.

    lines: (a line of the start file, text in the file that makes it redundant); {script} is the quoted script path
    """

    script: str
    start_file: str = ""
    lines: tuple[tuple[str, str], ...] = ()


_ZSH_STYLE = "zstyle ':completion:*' menu select"
_ZSH_LOAD = "fpath+=~/.zfunc; autoload -Uz compinit; compinit"
SHELLS = {
    "bash": _Shell(".bash_completions/localq.sh", ".bashrc", (("source {script}", "source {script}"),)),
    "zsh": _Shell(".zfunc/_localq", ".zshrc", ((_ZSH_LOAD, _ZSH_LOAD), (_ZSH_STYLE, "zstyle"))),
    "fish": _Shell(".config/fish/completions/localq.fish"),
}


def is_asked() -> bool:
    """Return whether a shell requests completions: an error would then end up in the user's command line."""
    return os.environ.get(VARIABLE, "").startswith("complete_")


def use(parameters: list[Any]) -> None:
    """Let the option of typer call `install`."""
    for parameter in parameters:
        if _OPTION in parameter.opts:
            parameter.callback = _called


def _called(context: Any, parameter: Any, value: Any) -> Any:
    if not value or context.resilient_parsing:
        return value
    shell = str(getattr(value, "value", value)) if isinstance(value, str) else _detected()
    print_line(f"{shell} completion installed in {install(shell)}")
    print_line("Completion will take effect once you restart the terminal")
    raise typer.Exit(0)


def _detected() -> str:
    from typer._completion_shared import _get_shell_name  # start-up cost: rarely needed

    if (found := _get_shell_name()) is None:
        raise usage_error(_OPTION, "could not detect the shell", _STEP)
    return found


def install(shell: str) -> Path:
    """Install the completion for `shell`; returns the path of its script. Raises LocalqError (exit 2, 9)."""
    from typer._completion_shared import get_completion_script  # start-up cost, as above

    if shell not in SHELLS:
        raise usage_error(_OPTION, f"{shell} is not supported (supported shells: {', '.join(SHELLS)})", _STEP)
    found, home = SHELLS[shell], places.expand("~")
    script = home / found.script
    content = get_completion_script(prog_name="localq", complete_var=VARIABLE, shell=shell)
    with disk.disk_errors(script):
        disk.write_durably(script, f"{content}\n".encode())
    if found.start_file:
        quoted = "'" + str(script).replace("'", r"'\''") + "'"  # always, as typer wrote it
        _append(home / found.start_file, found.lines, quoted)
    return script


def _append(start_file: Path, lines: tuple[tuple[str, str], ...], script: str) -> None:
    """Append the lines that the file needs."""
    before = _content(start_file)
    wanted = [(line.format(script=script).encode(), unless.format(script=script).encode()) for line, unless in lines]
    needed = [line for line, unless in wanted if unless not in before]
    if needed:
        with disk.disk_errors(start_file):
            descriptor = disk.open_to_append(disk.resolve(start_file))  # a link leads to the file that the user keeps
            try:
                disk.write_all(descriptor, b"\n" + b"\n".join(needed) + b"\n")
            finally:
                os.close(descriptor)


def _content(start_file: Path) -> bytes:
    try:
        content = disk.read_regular(start_file, MOST_BYTES + 1)
    except FileNotFoundError:
        return b""
    except disk.NotRegularError:
        raise LocalqError(str(start_file), "not a regular file", _STEP, ExitCode.DISK) from None
    except OSError as error:
        raise disk.read_error(start_file, error) from error
    if len(content) > MOST_BYTES:
        raise usage_error(str(start_file), f"too large (limit: {MOST_BYTES / 1e6:.0f} MB)", _STEP)
    return content

"""Completion of commands after a slash, and of file names after an @."""

from __future__ import annotations

import os
import re
from pathlib import Path

from localq.chat import commands
from localq.sanitize import sanitize

MOST = 50  # completions in the list
LOOKED_AT = 5_000  # entries read of a folder
_WHAT = 23  # column of the help where descriptions begin


def command_usages() -> dict[str, tuple[str, str]]:
    """Command -> (usage, description), from the help of the commands."""
    found: dict[str, tuple[str, str]] = {}
    names: list[str] = []
    for line in commands.HELP.split("\n\n")[0].split("\n"):
        if line.startswith("/"):
            usage, what = (line[:_WHAT].strip(), line[_WHAT:]) if line[_WHAT - 1 : _WHAT] == " " else (line, "")
            names = re.findall(r"/[\w?]+", usage)
            found.update((name, (next(each for each in usage.split(", ") if name in each), what)) for name in names)
        else:  # a continued description
            found.update((name, (found[name][0], f"{found[name][1]} {line.strip()}".strip())) for name in names)
    return found


def command_help() -> dict[str, str]:
    """Command -> description; an alias names its command."""
    known = {name: what for name, (_, what) in command_usages().items()}
    return known | {alias: f"same as {name}" for alias, name in commands.ALIASES.items()}


def command_completions(word: str) -> list[tuple[str, str]]:
    """(command, description) of those that begin with `word`; empty for a whole command, so that Enter sends it."""
    known = command_help()
    return [] if word in known else [(name, what) for name, what in known.items() if name.startswith(word)][:MOST]


def file_completions(word: str) -> list[tuple[str, str]]:
    """("@path", kind) of files and folders that begin with `word` ("@..."). Reads the disk.

    Empty where `word` is a file, so that Enter sends it.
    """
    given = word[1:]
    folder, _, begun = given.rpartition("/")
    place = Path(folder or ("/" if given.startswith("/") else ".")).expanduser()
    found = []
    try:
        with os.scandir(place) as entries:
            for count, entry in enumerate(entries):
                if count == LOOKED_AT:
                    break
                name = entry.name
                hidden = name.startswith(".") and not begun.startswith(".")
                if name.startswith(begun) and not hidden and sanitize(name) == name and " " not in name:
                    path = f"@{folder}/{name}" if "/" in given else f"@{name}"
                    found.append((f"{path}/", "folder") if entry.is_dir() else (path, "file"))
    except (OSError, ValueError, RuntimeError):
        return []
    return [] if (word, "file") in found else sorted(found)[:MOST]

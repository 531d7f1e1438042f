"""The parts of README.md that are made from the code, so that no fact is stated twice.

A block stands between `<!-- NAME -->` and `<!-- /NAME -->`. Run this file to write them anew.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def help_text() -> str:
    """`localq --help` as printed at 100 columns."""
    run = subprocess.run(
        [sys.executable, "-m", "localq", "--help"], capture_output=True, text=True, check=True, cwd=ROOT,
        env={"COLUMNS": "100", "PATH": "", "TERM": "dumb", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return f"```\n{run.stdout.strip()}\n```"


def file_map() -> str:
    """One line per source file: the first sentence of its docstring."""
    rows = []
    for path in sorted((ROOT / "localq").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if docstring:
            first = " ".join(docstring.split("\n\n")[0].split())
            rows.append(f"| `{path.relative_to(ROOT)}` | {first} |")
    return "\n".join(["| file | what it is |", "| --- | --- |", *rows])


def exit_codes() -> str:
    """The table of exit codes."""
    from localq.errors import EXIT_CODE_MEANINGS

    rows = [f"| {int(code)} | {meaning} |" for code, meaning in EXIT_CODE_MEANINGS.items()]
    return "\n".join(["| code | meaning |", "| --- | --- |", *rows])


def keys() -> str:
    """The keys of the full screen."""
    from localq.tui.dialogs.help_screen import key_rows

    rows = [f"| {where} | {keys} | {what} | `{name}` |" for where, keys, what, name in key_rows({})]
    return "\n".join(["| where | keys | what they do | name |", "| --- | --- | --- | --- |", *rows])


BLOCKS: dict[str, Callable[[], str]] = {"help": help_text, "file-map": file_map, "exit-codes": exit_codes, "keys": keys}


def current(readme: str, name: str) -> str:
    """The text of block `name` as it stands in `readme`."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", readme, re.DOTALL)
    assert found, f"README.md has no block {name}"
    return found.group(1)


def main() -> None:
    """Write every block anew."""
    path = ROOT / "README.md"
    text = path.read_text()
    for name, make in BLOCKS.items():
        old = f"<!-- {name} -->\n{current(text, name)}\n<!-- /{name} -->"
        text = text.replace(old, f"<!-- {name} -->\n{make()}\n<!-- /{name} -->")
    path.write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()

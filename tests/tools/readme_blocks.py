"""The parts of documents that are made from code and data, so that no fact is stated twice.

A block stands between `<!-- NAME -->` and `<!-- /NAME -->`. Run this file to rewrite all of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.tools import results_tables

ROOT = Path(__file__).parents[2]
CUT = "[...]"
CARDS = ("RTX 4060", "RTX 3060", "RTX 4070", "RTX 4080", "RTX 3090", "RTX 4090", "RTX 5090")


def run(*arguments: str) -> str:
    """What localq prints, with nothing of this machine in it: no settings, no models, no terminal."""
    with tempfile.TemporaryDirectory() as home:
        places = {f"LOCALQ_{name}": f"{home}/{name.lower()}" for name in ("DATA", "CACHE")}
        bare = {
            "COLUMNS": "100", "PATH": "", "TERM": "dumb", "PYTHONPATH": str(ROOT), "HOME": home, "LANG": "C.UTF-8",
            "HF_HUB_CACHE": f"{home}/hub", "LOCALQ_NOPROJECT": "1", **places,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "localq", *arguments], capture_output=True, text=True, check=True, cwd=ROOT, env=bare
        )
        return done.stdout.strip().replace(f"{home}/data", "~/.local/share/localq")


def example(*arguments: str, lines: int | None = None) -> str:
    """A command and what it prints, of long tables the first lines."""
    shown = run(*arguments).splitlines()
    cut = [*shown[:lines], CUT] if lines and lines < len(shown) else shown
    return "\n".join(["```", f"$ localq {' '.join(arguments)}", *cut, "```"])


def cards() -> str:
    """For common cards: what `localq fit` puts first, and the largest model at 2 bits."""
    lines = [
        "| card | recommended model | context | tok/s | largest 2-bit model | context | tok/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for card in CARDS:
        found = json.loads(run("fit", "--gpu", card, "--json"))
        rows = [row for row in found["rows"] if row["fits"] and row["runs"] and not row["last"]]
        two_bits = [row for row in rows if row["bits_per_weight"] < 2.5]
        largest = max(two_bits, key=lambda row: row["weights_bytes"] / row["bits_per_weight"])
        cells = [f"{row['name']} | {row['ctx_max']:,} | {row['tok_s']:.0f}" for row in (rows[0], largest)]
        lines.append(f"| {card}, {found['vram_bytes'] / 2**30:.0f} GB | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def help_text() -> str:
    """`localq --help` as printed at 100 columns."""
    return f"```\n{run('--help')}\n```"


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


TABLES = list(results_tables.results()["tables"])

PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "dry-run": partial(example, "chat", "llama-3.3-70b", "--vram", "24", "--dry-run"),
        "fit": partial(example, "fit", "--vram", "24", lines=8),
        "cards": cards,
        "speed": results_tables.at_a_glance,
        "help": help_text,
        "exit-codes": exit_codes,
    },
    "localq/tui/README.md": {"keys": keys},
    "localq/bench/README.md": {
        **{name: partial(results_tables.table, name) for name in TABLES},
        "launches": results_tables.launches,
    },
}
BLOCKS = [(page, name) for page, blocks in PAGES.items() for name in blocks]
# What these print depends on the GPU of the machine: they are made, and compared, where there is none.
WITHOUT_GPU = {"dry-run", "fit", "cards"}


def has_gpu() -> bool:
    """An NVIDIA driver is there, as Makefile sees it."""
    return any(os.path.exists(each) for each in ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1"))


def current(page: str, name: str) -> str:
    """The text of block `name` as it stands in a page."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", (ROOT / page).read_text(), re.DOTALL)
    assert found, f"{page} has no block {name}"
    return found.group(1)


def main() -> None:
    """Rewrite every block."""
    for page, name in BLOCKS:
        if name in WITHOUT_GPU and has_gpu():
            print(f"{page}: {name} is leaving it unchanged: it is made on a machine without a GPU", file=sys.stderr)
            continue
        old, new = current(page, name), PAGES[page][name]()
        text = (ROOT / page).read_text()
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        (ROOT / page).write_text(text.replace(f"{begin}{old}{end}", f"{begin}{new}{end}"))


if __name__ == "__main__":
    main()

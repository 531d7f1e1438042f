"""The command line of the campaigns at a terminal: a number of events, a seed and a face; a report and an exit status.

A campaign is a function of a folder, a face, how many and a seed; it returns what it has seen, with all that was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cli.terminal_faces import FACES

PRINTED = 100  # of what was wrong


@dataclass
class Report:
    """wrong: what must not be."""

    wrong: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """What is printed of it."""
        return dict(vars(self))


def main(text: str | None, counted: str, count: int, campaign: Callable[..., Report], **switches: str) -> int:
    """Run `campaign` as told on the command line.

    text: what --help says. counted, count: the option that says how many, and its default. switches: of this campaign
    alone, name to help; they are passed on by name. Every fault goes to stderr, one JSON object to stdout.
    """
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument(f"--{counted}", dest="count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--face", choices=sorted(FACES), default="line")
    for name, help_text in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=help_text)
    given = parser.parse_args()
    chosen = {name: getattr(given, name) for name in switches}
    with tempfile.TemporaryDirectory() as home:
        report = campaign(Path(home), FACES[given.face](), given.count, given.seed, **chosen)
    for each in report.wrong[:PRINTED]:
        print(each, file=sys.stderr)
    print(json.dumps({"face": given.face, **report.figures(), "wrong": len(report.wrong)}))
    return 1 if report.wrong else 0

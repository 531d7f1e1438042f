"""The strings that users read are those of tests/data/strings, so that a review sees each change."""

from __future__ import annotations

import ast

import pytest

from tests.tools.user_strings import differences, strings


def test_strings_for_users_are_the_reviewed_ones() -> None:
    found = differences()
    shown = "\n".join(found[:40])
    assert not found, f"{len(found)} lines differ; to accept: python -m tests.tools.user_strings\n{shown}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('raise LocalqError("it", f"cannot read {path}", "Check it.")', ["cannot read {}", "Check it."]),
        ('Button("Stop", id="stop")', ["Stop"]),
        ('typer.Option("--json", help="Print.")', ["--json", "Print."]),
        ('"""A module of words."""\nNAME = "one"', []),
        ('raise ValueError("an internal error")', []),
        ('CSS = "Screen { align: center middle; }"', []),
        ('database.execute("SELECT id FROM sessions")', []),
    ],
)
def test_what_counts_as_a_string_for_users(source: str, expected: list[str]) -> None:
    assert list(strings(ast.parse(source), "")) == expected


def test_docstrings_of_verbs_are_help() -> None:
    source = '@config.command()\ndef edit():\n    """Edit the file."""\n\ndef _helper():\n    """Internal words."""\n'
    assert list(strings(ast.parse(source), "config")) == ["Edit the file."]

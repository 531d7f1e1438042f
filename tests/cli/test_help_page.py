"""Help pages: one screen each, options in panels, boxed at a terminal and plain in a pipe."""

from __future__ import annotations

import pytest
import typer

from localq.cli import help_page
from localq.cli.registry import VERBS, Verbs

SCREEN_LINES = 40
LONGER = {"chat": 72, "run": 69, "serve": 54, "bench": 62}  # verbs with more options than a screen has lines


def page(verb: str, monkeypatch: pytest.MonkeyPatch, columns: int = 80) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    command = Verbs(name="localq").commands[verb]
    context = command.context_class(command, info_name=f"localq {verb}", help_option_names=["-h", "--help"])
    return command.get_help(context).splitlines()


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_fits_a_screen(verb, monkeypatch):
    lines = page(verb, monkeypatch)
    assert len(lines) <= LONGER.get(verb, SCREEN_LINES)
    assert verb not in LONGER or len(lines) > SCREEN_LINES
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_has_a_panel_and_a_text(verb):
    command = Verbs(name="localq").commands[verb]
    found = help_page.panels(command, typer.Context(command))
    if len(command.params) > 8:
        assert {help_page.MEMORY, help_page.OUTPUT, help_page.ADVANCED} & set(found)
        assert list(found)[-1] == help_page.ADVANCED
    for rows in found.values():
        for name, text in rows:
            assert text.endswith((".", ")")), name


def test_panels_of_chat(monkeypatch):
    lines = page("chat", monkeypatch)
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "Arguments:", "Model:", "Conversation:", "Sampling:", "Answer format:", "Memory:", "Output:", "Advanced:",
    ]  # fmt: skip
    assert "  -c, --ctx TOKENS            Context size in tokens, such as 8k, or max." in lines
    assert "  -v, --[no-]stats            Show statistics; `run` also shows loading steps." in lines


@pytest.mark.parametrize("columns", [80, 60])
def test_at_a_terminal_a_panel_is_a_box(monkeypatch, columns):
    monkeypatch.setattr(help_page, "_takes_boxes", lambda: True)
    lines = page("quantize", monkeypatch, columns)
    boxed = [line for line in lines if line.startswith(("╭", "│", "╰"))]
    assert {len(line) for line in boxed} == {columns}
    assert boxed[0].startswith("╭─ Arguments ─")
    assert sum(line.startswith("╭") for line in boxed) == sum(line.startswith("╰") for line in boxed) > 3

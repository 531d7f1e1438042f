"""What a command line gives is the same with and without pydantic, and where typer refuses it is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer._click.exceptions import UsageError

from localq.cli import option_values, registry
from localq.errors import LocalqError

LINES = [
    "run", "run llama-3.1-8b a prompt of five words", "run --ctx 8k -n 5 --temp 0.7 --seed 3 -- -x", "run -q",
    "run --top-k 1 m --offline", "run --online", "run m -", "ls", "ls --json", "pull a b c --force --vram 24", "rm a",
    "fit --vram 24 --bandwidth 900 --all", "fit --gpu=", "show m", "bench -r 3 --kernels --against a --against b",
    "bench", "eval m n --window 64 --decode 5", "verify", "verify a", "help exit-codes", "chat m --reserve 1",
]  # fmt: skip
REFUSED = [
    "pull", "rm", "eval", "run --temp warm", "run --seed 1.5", "run --top-k", "fit --bandwidth 0", "bench -r 0",
    "eval m --window 3", "run --unknown", "show a b", "eval m --decode -1", "run --ctx none",
]  # fmt: skip


def parsed(line: str, monkeypatch: pytest.MonkeyPatch, plainly: bool) -> dict[str, Any]:
    verb, *arguments = line.split()
    with monkeypatch.context() as patch:
        if not plainly:
            patch.setattr(registry, "accept_plain_values", lambda command: None)
        command = registry._Commands()[verb]
    return command.make_context(verb, arguments).params


@pytest.mark.parametrize("line", LINES)
def test_values_are_those_that_typer_finds(line, monkeypatch):
    ours, typers = (parsed(line, monkeypatch, plainly) for plainly in (True, False))
    assert ours == typers
    assert {name: type(value) for name, value in ours.items()} == {name: type(value) for name, value in typers.items()}


@pytest.mark.parametrize("line", REFUSED)
def test_refusals_are_those_of_typer(line, monkeypatch):
    said = []
    for plainly in (True, False):
        with pytest.raises((UsageError, LocalqError)) as caught:
            parsed(line, monkeypatch, plainly)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


def test_a_callback_gets_what_was_not_given(monkeypatch):
    app, seen = typer.Typer(add_completion=False), []

    def noted(value: str | None) -> str:
        seen.append(value)
        return "from the callback"

    @app.command()
    def verb(word: str | None = typer.Option(None, callback=noted)) -> None:
        seen.append(word)

    command = typer.main.get_command(app)
    option_values.accept_plain_values(command)
    command([], standalone_mode=False)
    command(["--word", "x"], standalone_mode=False)
    assert seen == [None, "from the callback", "x", "from the callback"]


@pytest.mark.parametrize("line", ["ls", "fit --vram 24", "show llama-3.1-8b", "pull lama", "run lama hi", "verify"])
def test_it_is_not_imported(line, tmp_path):
    code = f"import sys\nfrom localq.cli import execute\nexecute({line.split()})\nprint('pydantic' in sys.modules)"
    environment = {"HF_HUB_CACHE": str(tmp_path), "LOCALQ_DATA": str(tmp_path), "PATH": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.splitlines()[-1] == "False", run.stderr


def path_options() -> list[tuple[str, str]]:
    """(verb, option) of all options that take a file or a folder."""
    found = []
    for verb in registry.VERBS:
        for parameter in registry._Commands()[verb].params:
            words = set(re.findall("[A-Z]+", parameter.metavar or ""))
            if parameter.opts[0].startswith("-") and words & {"FILE", "FOLDER", "PATH"}:
                found.append((verb, parameter.opts[0]))
    return found


def test_all_options_with_paths_are_found():
    expected = [("run", "--think-out"), ("quantize", "--out"), ("quantize", "--calibration"), ("eval", "--plot")]
    assert set(path_options()) >= {*expected, ("quantize", "--layers"), ("eval", "--text"), ("bench", "--plot")}


@pytest.mark.parametrize(("verb", "option"), path_options())
def test_a_tilde_in_a_path_is_the_home_folder(verb, option, monkeypatch, tmp_path):
    """Also where no shell has replaced it: quoted, after "=", in an environment variable."""
    needed = {"quantize": ["m"] if option == "--out" else ["m", "--out", "o"], "eval": ["m"]}.get(verb, [])
    name = option.removeprefix("--").replace("-", "_")
    monkeypatch.setenv("HOME", str(tmp_path))
    given = registry._Commands()[verb].make_context(verb, [*needed, f"{option}=~/made.png"]).params[name]
    assert [str(each) for each in (given if isinstance(given, list | tuple) else [given])] == [f"{tmp_path}/made.png"]
    monkeypatch.setenv(f"LOCALQ_{name.upper()}", "~/made.png")
    assert registry._Commands()[verb].make_context(verb, needed).params[name] == given
    with pytest.raises(LocalqError, match=f"^{option} ~nobody-of-that-name/x: there is no user"):
        registry._Commands()[verb].make_context(verb, [*needed, f"{option}=~nobody-of-that-name/x"])

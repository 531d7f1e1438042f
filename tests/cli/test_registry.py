"""Verbs load when they are asked for, and only then; shells complete verbs and model names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from localq import cli
from localq.cli import registry
from localq.cli.registry import ALIASES, VERBS

PROBE = """
import json, sys
from localq.cli import execute
code = execute(sys.argv[1:])
loaded = [name for name in sys.modules if name.startswith("localq.cli.verbs.")]
heavy = [name for name in ("torch", "transformers", "rich", "jinja2", "huggingface_hub") if name in sys.modules]
print(json.dumps({"code": code, "loaded": loaded, "heavy": heavy}))
"""


def localq(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": "/nonexistent", **variables}
    command = [sys.executable, "-m", "localq", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def probe(*arguments: str) -> dict[str, object]:
    command = [sys.executable, "-c", PROBE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "code"), [(("show", "lama-3"), 4), (("--version",), 0), (("config", "path"), 0), (("fitt",), 2)]
)
def test_a_verb_loads_no_other_verb_and_nothing_heavy(arguments, code):
    found = probe(*arguments)
    others = {f"localq.cli.verbs.{verb}" for verb in VERBS} - {f"localq.cli.verbs.{arguments[0]}"}
    assert (found["code"], others & set(found["loaded"]), found["heavy"]) == (code, set(), [])


def test_help_shows_the_first_line_of_every_verb_and_loads_nothing_heavy():
    shown = localq("--help").stdout
    for verb in VERBS:
        command = registry.Verbs(name="localq").commands[verb]
        assert command.help, verb
        assert f"  {verb} " in shown
        assert command.help[:30] in shown
    assert probe("--help")["heavy"] == []


@pytest.mark.parametrize(("alias", "verb"), ALIASES.items())
def test_an_alias_is_the_verb_and_is_not_listed(alias, verb):
    assert f"\n  {alias} " not in localq("--help").stdout
    both = [localq(name, "--help").stdout.split("\n", 1)[1] for name in (alias, verb)]
    assert both[0] == both[1] != ""


def test_a_misspelt_verb_gets_the_nearest():
    done = localq("quantise")
    assert done.returncode == 2
    assert "Did you mean 'quantize'?" in done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("localq qu", ["quantize"]),
        ("localq config un", ["unset"]),
        ("localq run smollm2-1", ["smollm2-135m", "smollm2-1.7b"]),
        ("localq pull smollm2-13", ["smollm2-135m"]),
        ("localq fit no-such-mod", []),
    ],
)
def test_bash_completes_verbs_and_models(line, expected):
    variables = {"_LOCALQ_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = localq(**variables)
    assert (done.stdout.split(), done.stderr) == (expected, "")


def test_completion_can_be_installed(tmp_path):
    done = localq("--show-completion", SHELL="/bin/bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 2  # without detection the shell must be named
    done = localq("--install-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0, done.stderr
    assert "_LOCALQ_COMPLETE" in (tmp_path / ".bash_completions" / "localq.sh").read_text()


@pytest.mark.parametrize("name", [*VERBS, *ALIASES])
@pytest.mark.parametrize("kind", [KeyError, LookupError, AttributeError])
def test_an_error_of_a_verbs_module_is_not_taken_for_an_unknown_verb(monkeypatch, capsys, name, kind):
    def fail(module: str) -> None:
        raise kind(module)

    monkeypatch.setattr(registry.importlib, "import_module", fail)
    assert cli.execute([name]) == 1
    shown = capsys.readouterr().err
    assert f"unexpected error ({kind.__name__})" in shown
    assert "No such command" not in shown

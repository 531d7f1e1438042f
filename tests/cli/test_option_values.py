"""What a command line gives is the same with and without pydantic, and where typer refuses it is refused."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer._click.exceptions import UsageError

from localq.cli import execute, option_values, registry
from localq.errors import ExitCode, LocalqError

LINES = [
    "run", "run llama-3.1-8b a prompt of five words", "run --ctx 8k -n 5 --temp 0.7 --seed 3 -- -x", "run -q",
    "run --top-k 1 m --offline", "run --online", "run m -", "ls", "ls --json", "pull a b c --force --vram 24", "rm a",
    "fit --vram 24 --bandwidth 900 --all", "fit --gpu=", "show m", "bench -r 3 --kernels --against a --against b",
    "run --temp 1 --top-k 0 --seed 0", "run --temp .5 --seed +7 --top-p 1e-1", "run --seed 007 --min-p 1_0.0",
    "run --dry-allowed-length 3 --temp=1.", "run --seed -1 --top-p 2", "run --seed 9999999999999999999",
    "bench", "eval m n --window 64 --decode 5",
    "verify", "verify a", "help exit-codes", "chat m --reserve 1",
]  # fmt: skip
REFUSED = [
    "pull", "rm", "eval", "run --temp warm", "run --seed 1.5", "run --top-k", "fit --bandwidth 0", "bench -r 0",
    "eval m --window 3", "run --unknown", "show a b", "eval m --decode -1", "run --ctx none", "run --seed=\u0663",
    "run --ctx 0", "bench -r 9999999",
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


@pytest.mark.parametrize("line", ["ls", "fit --vram 24", "show llama-3.1-8b", "pull lama", "verify",
                                  "run lama hi -n 5 --ctx 8k --temp 0.7 --seed 3"])  # fmt: skip
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
    arguments = {"quantize": ["m"] if option == "--out" else ["m", "--out", "o"], "eval": ["m"], "push": ["m", "me/m"]}
    needed = arguments.get(verb, [])
    name = option.removeprefix("--").replace("-", "_")
    monkeypatch.setenv("HOME", str(tmp_path))
    given = registry._Commands()[verb].make_context(verb, [*needed, f"{option}=~/made.png"]).params[name]
    assert [str(each) for each in (given if isinstance(given, list | tuple) else [given])] == [f"{tmp_path}/made.png"]
    monkeypatch.setenv(f"LOCALQ_{name.upper()}", "~/made.png")
    assert registry._Commands()[verb].make_context(verb, needed).params[name] == given
    with pytest.raises(LocalqError, match=f"^{option} ~nobody-of-that-name/x: there is no user"):
        registry._Commands()[verb].make_context(verb, [*needed, f"{option}=~nobody-of-that-name/x"])


# ---- numbers have limits

OTHERS = {"run": ["x"], "quantize": ["--out", "o"]}  # that a verb needs beside a model
TAKE_A_MODEL = ("run", "chat", "serve", "pull", "show", "quantize", "bench", "eval")
LARGE = ("1000000000", "1" + "0" * 18, "1" + "0" * 30, "9" * 400, "9" * 5000, "1e308", "1e400", "9" * 400 + "k", "-9")
# Options for which a large number has a meaning: seeds, limits of a plan, and a filter that keeps all tokens.
TAKEN = {"--seed": 2**63 - 1, "--ctx": 2**30, "--max-tokens": 2**30, "--top-k": None, "--vram": None, "--reserve": None,
         "--checkpoints": None, "--desktop": None, "--think-budget": 2**30}  # fmt: skip


def number_options() -> list[tuple[str, str]]:
    """(verb, option) of all options that take a number, a size or a list of counts."""
    found = []
    for verb in registry.VERBS:
        for parameter in registry._Commands()[verb].params:
            option = next((each for each in parameter.opts if each.startswith("-")), None)
            kind = str(parameter.type_descriptor.annotation) if option else ""
            is_number = "int" in kind or "float" in kind or parameter.metavar in ("TOKENS", "SIZE", "GB/S", "N")
            if option and (is_number or option in ("-p", "-n", "-d")) and parameter.name != "prompt_named":
                found.append((verb, option))
    return found


def test_all_options_with_numbers_are_found():
    wanted = [("bench", "-r"), ("bench", "-d"), ("eval", "--window"), ("quantize", "--windows"), ("run", "--top-k")]
    assert set(number_options()) >= {*wanted, ("run", "--ctx"), ("fit", "--bandwidth"), ("chat", "--max-tokens")}


@pytest.mark.parametrize(("verb", "option"), number_options())
def test_every_number_has_a_limit(verb, option, monkeypatch, tmp_path, capsys):
    for name in ("LOCALQ_DATA", "LOCALQ_CACHE", "HF_HUB_CACHE", "LOCALQ_CONFIG", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("LOCALQ_OFFLINE", "1")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for value in LARGE:
        words = [f"{option}={value}"] if option.startswith("--") else [option, value]
        model = ["no-such-model"] if verb in TAKE_A_MODEL else []
        code = execute([verb, *model, *OTHERS.get(verb, []), *words])
        err = capsys.readouterr().err
        assert "unexpected error" not in err, (value[:40], err)
        assert max(map(len, err.split("\n"))) < 500
        if code != ExitCode.USAGE:
            most = TAKEN[option]
            assert most is None or float(value) <= most, value[:40]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["-r", "1001"], "less than or equal to 1000"),
        (["-p", "16777217"], "2 tests of up to 16,777,218 tokens"),
        (["-d", ",".join(map(str, range(300)))], "600 tests"),
    ],
)
def test_a_benchmark_ends_within_a_lifetime(given, said, capsys):
    assert execute(["bench", "no-such-model", *given]) == ExitCode.USAGE
    assert said in capsys.readouterr().err

"""Verbs by other names, options in the environment, help topics, `config edit`, and the keys of the line chat."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pexpect
import pytest

from localq import keymap, settings, settings_file
from localq.chat import commands
from localq.cli import execute, output, progress, registry
from localq.cli.verbs.help import TOPICS
from localq.errors import ExitCode

ROOT = Path(__file__).parents[2]
PLACES = {"CONFIG", "MODELS", "DATA", "CACHE", "STATE", "NO_CUDA", "NOHISTORY"}


@pytest.fixture(autouse=True)
def own_config(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path / "config.toml"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_other_names_of_verbs(capsys):
    commands = registry.Verbs(name="localq").commands
    for name, verb in (("download", "pull"), ("recommend", "fit"), ("env", "doctor"), ("collect-env", "doctor")):
        assert commands[name].name == verb
    execute(["env"])
    line = capsys.readouterr().out
    assert json.loads(line)["schema"] == 1
    execute(["doctor"])
    assert not capsys.readouterr().out.startswith("{")  # the other name has left it as it was


def test_every_option_may_be_in_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("LOCALQ_JSON", "1")
    assert execute(["help", "exit-codes"]) == 0
    assert json.loads(capsys.readouterr().out)["exit_codes"]["0"] == "success"
    monkeypatch.setenv("LOCALQ_JSON", "perhaps")
    assert execute(["help"]) == ExitCode.USAGE
    seen = 0
    for verb in registry.VERBS:
        command = registry.Verbs(name="localq").commands[verb]
        for each in command.get_params(command.context_class(command)):
            named = next((option for option in each.opts if option.startswith("--")), None)
            if named is None or each.is_eager:
                continue
            variable = named.removeprefix("--").replace("-", "_")
            assert variable.upper() not in PLACES
            assert (each.envvar is None) == (variable in settings.DESCRIPTIONS), named
            seen += each.envvar is not None
    assert seen > 40


def test_help_tells_keys_and_variables(capsys):
    settings_file.write("keys", "help=f9")
    assert execute(["help", "keys"]) == 0
    told = capsys.readouterr().out
    assert all(f" {name} " in told for name in keymap.KEYS)
    assert "\nf9 " in told
    execute(["help", "keys", "--json"])
    assert json.loads(capsys.readouterr().out)["screen"]["help"]["keys"] == "f9"
    execute(["help", "environment"])
    told = capsys.readouterr().out
    for name in ("HF_ENDPOINT", "NO_COLOR", "CUDA_DEVICE_ORDER", "SSL_CERT_FILE", "DO_NOT_TRACK"):
        assert name in told
    assert execute(["help", "no-topic"]) == ExitCode.USAGE


def test_help_alone_lists_every_verb_and_topic(capsys):
    told = body_of(capsys, "help", "--json")
    assert tuple(told["verbs"]) == registry.VERBS
    assert all(told["verbs"].values())
    assert tuple(told["topics"]) == tuple(TOPICS)
    assert execute(["help"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    assert [name for name, _ in rows] == ["verb", *registry.VERBS, "topic", *TOPICS, "WORD"]
    for topic in TOPICS:  # each is one that `localq help` takes
        assert execute(["help", topic]) == 0


def test_help_tells_the_commands_of_a_chat(capsys):
    told = body_of(capsys, "help", "commands", "--json")["commands"]
    assert {usage.split()[0] for usage in told} == {*commands.COMMANDS, "/exit"}
    assert told["/export md|json [FILE]"] == "write the conversation to FILE, or print it"
    assert told["/show prompt|template|info|params"].startswith("show the prompt text")
    assert execute(["help", "commands"]) == 0
    assert "/think [on|off|LEVEL]" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["chat", "download", "config"])
def test_help_of_a_verb_is_that_of_the_verb(capsys, name):
    assert execute([name, "--help"]) == 0
    wanted = capsys.readouterr().out
    assert execute(["help", name]) == 0
    assert capsys.readouterr().out == wanted
    assert wanted.startswith(f"Usage: localq {name} ")


def test_at_a_terminal_a_table_is_as_wide_as_that_and_elsewhere_a_row_is_a_line(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    assert execute(["help", "environment"]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(sys, "__stdout__", Terminal())
    assert execute(["help", "environment"]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 70 < max(map(len, whole.splitlines()))
    assert told.split() == whole.split()


def test_where_a_model_comes_from_fits_the_terminal_too(monkeypatch, capsys, no_own_models):
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(sys, "__stdout__", Terminal())
    assert execute(["show", "smollm2-135m"]) == 0
    told = capsys.readouterr().out.split("\n\n")[-1]
    assert max(map(len, told.splitlines())) <= 90
    assert "\n    not verified\n" in told


def test_help_finds_options_and_settings_by_a_word(capsys):
    assert execute(["help", "VRAM"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["verb", "option"]
    assert {("chat", "--vram"), ("pull", "--vram"), ("bench", "--vram"), ("config", "vram")} <= set(map(tuple, rows))
    found = body_of(capsys, "help", "repetition", "--json")["found"]  # a word of what they do
    assert ("run", "--dry-allowed-length") in {(each["verb"], each["option"]) for each in found}
    assert execute(["help", "no-such-word-anywhere"]) == ExitCode.USAGE


def test_config_edit_takes_what_is_right_and_leaves_the_file_else(own_config, monkeypatch, capsys, tmp_path):
    script = tmp_path / "editor.sh"
    script.write_text('#!/bin/sh\ncat "$0.new" > "$1"\n')
    script.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(script))
    monkeypatch.setattr(sys, "stdin", Terminal())
    (tmp_path / "editor.sh.new").write_text("# mine\ntop_k = 7\n")
    assert execute(["config", "edit"]) == 0
    assert capsys.readouterr().out == f"1 settings in {own_config}\n"
    assert own_config.read_text() == "# mine\ntop_k = 7\n"
    for wrong, code in (("top_q = 7", 2), ("top_k = 'x'", 2), ("top_k = ", 8), ("# mine\ntop_k = 7\n", 2)):
        (tmp_path / "editor.sh.new").write_text(wrong)
        assert execute(["config", "edit"]) == code
        assert own_config.read_text() == "# mine\ntop_k = 7\n"
    monkeypatch.delenv("VISUAL")
    monkeypatch.delenv("EDITOR", raising=False)
    assert execute(["config", "edit"]) == 2
    assert "config set NAME VALUE" in capsys.readouterr().err


def body_of(capsys, *arguments: str) -> dict:
    assert execute(list(arguments)) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_every_verb_of_config_has_json(own_config, capsys):
    assert body_of(capsys, "config", "set", "ctx", "12k", "--json") == {"schema": 1, "name": "ctx", "value": 12_288}
    found = {"schema": 1, "name": "ctx", "value": 12_288, "origin": "config.toml"}
    assert body_of(capsys, "config", "get", "ctx", "--json") == found
    assert body_of(capsys, "config", "path", "--json") == {"schema": 1, "path": str(own_config)}
    assert body_of(capsys, "config", "unset", "ctx", "--json") == {"schema": 1, "name": "ctx", "value": None}
    assert settings.read_config() == {}


def test_ctx_max_is_the_largest_that_fits_whatever_the_settings_say(monkeypatch, capsys):
    settings_file.write("ctx", "2k")
    asked = ("run", "smollm2-135m", "--device", "cpu", "--dry-run", "--json")
    assert body_of(capsys, *asked)["ctx"] == 2048
    assert body_of(capsys, *asked, "--ctx", "1.5k")["ctx"] == 1536
    assert body_of(capsys, *asked, "--ctx", "max")["ctx"] == 8192
    monkeypatch.setenv("LOCALQ_CTX", "max")
    assert body_of(capsys, *asked)["ctx"] == 8192
    monkeypatch.delenv("LOCALQ_CTX")
    assert execute(["config", "set", "ctx", "max"]) == 0
    assert settings.load({}).ctx is None
    for wrong in ("maximum", "nank", "infk", "2.5", "-1k", ""):
        assert execute(["run", "smollm2-135m", "--ctx", wrong, "--dry-run"]) == ExitCode.USAGE


def test_fit_takes_card_and_context_from_the_environment_too(monkeypatch, capsys):
    flags = body_of(capsys, "fit", "phi-4", "--vram", "12", "--ctx", "3k", "--json")
    settings_file.write("ctx", "1k")  # of chats: not of a card that one asks about
    monkeypatch.setenv("LOCALQ_VRAM", "12")
    monkeypatch.setenv("LOCALQ_CTX", "3k")
    assert body_of(capsys, "fit", "phi-4", "--json") == flags
    monkeypatch.setenv("LOCALQ_VRAM", "8")
    assert body_of(capsys, "fit", "phi-4", "--vram", "12", "--json") == flags


def test_chat_has_json_of_a_plan_alone(capsys):
    plan = body_of(capsys, "chat", "smollm2-135m", "--device", "cpu", "--dry-run", "--json")
    assert (plan["name"], plan["fits"]) == ("smollm2-135m", True)
    assert execute(["chat", "smollm2-135m", "--json"]) == ExitCode.USAGE
    assert "localq run MODEL PROMPT --json" in capsys.readouterr().err


def test_colour_and_bars_by_the_variables_that_others_honour(monkeypatch):
    for name in ("NO_COLOR", "CLICOLOR_FORCE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert (output.takes_colour(Terminal()), output.takes_colour(io.StringIO())) == (True, False)
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    assert output.takes_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.takes_colour(Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with progress.fetch_bar("tiny", quiet=False) as show:
        show("a file", 1, 2)
    assert sys.stderr.getvalue() == ""


READ = (
    "from localq.cli.line.line_input import Reader; read = Reader(False)\nwhile True: print('<' + repr(read()) + '>')"
)


def test_shift_enter_and_tab_at_a_terminal(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": str(ROOT)}
    child = pexpect.spawn(
        sys.executable, ["-c", READ], cwd=str(tmp_path), env=environment, encoding="utf-8", timeout=30,
        dimensions=(24, 100),
    )  # fmt: skip
    try:
        for keys, shown, message in (
            ("one\x1b[13;2utwo", "two", "one\ntwo"),
            ("one\x1b[27;2;13~two", "two", "one\ntwo"),
            ("/comp\t", "act", "/compact"),
            ("see @no\t", "tes.txt", "see @notes.txt"),
        ):
            child.expect(">>>")
            child.send(keys)
            child.expect_exact(shown)
            child.send("\r")
            child.expect_exact(f"<{message!r}>")
    finally:
        child.close(force=True)


def test_short_names_of_options_are_those_that_fingers_know(capsys):
    known = {"run": "-m -s -c -n -v -q -x", "chat": "-m -p -s -c -n -v -q", "rm": "-y", "bench": "-p -n -d -r -o"}
    for verb, options in known.items():
        assert execute([verb, "--help"]) == 0
        told = capsys.readouterr().out
        assert all(f" {each}," in told for each in options.split()), verb


def test_a_name_or_short_form_of_an_option_leads_to_its_setting(capsys):
    seen = set()
    for verb in ("chat", "run", "fit", "bench", "eval", "pull"):
        command = registry.Verbs(name="localq").commands[verb]
        for each in command.get_params(command.context_class(command)):
            spellings = [*each.opts, *each.secondary_opts]
            names = [option.lstrip("-").replace("-", "_") for option in spellings]
            meant = next((name for name in names if name in settings.DESCRIPTIONS), None)
            if meant is None:
                continue
            for name in names:
                if name not in settings.DESCRIPTIONS:
                    assert execute(["config", "set", "--", name, "1"]) == ExitCode.USAGE
                    assert f"Did you mean {meant}?" in capsys.readouterr().err, (verb, name)
                    seen.add(name)
    assert {"temp", "n", "ctx_size", "no_save"} <= seen
    assert set(settings.OPTION_NAMES) <= seen  # none that is no option any more
    for name in ("--temp", "top-k", "-n"):
        assert settings.similar(name, settings.DESCRIPTIONS) in (["temperature"], ["top_k"], ["max_tokens"])

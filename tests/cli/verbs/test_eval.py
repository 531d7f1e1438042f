"""`localq eval` as a user calls it: output, texts, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from localq import cli
from localq.bench.quality import evaluation
from tests.support.models.tiny_checkpoints import make_checkpoint

TEXT = str(Path(__file__).parents[3] / "LICENSE")
SHORT = ("--device", "cpu", "--text", TEXT, "--window", "64", "--max-windows", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("eval"), initializer_range=0.15))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch, tmp_path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))


def test_json_is_one_line(model, capsys):
    assert cli.execute(["eval", model, *SHORT, "--against", "reference", "--decode", "5", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    body = json.loads(shown.out)
    assert next(iter(body)) == "schema"
    assert body["schema"] == 1
    wanted = {"perplexity", "perplexity_llamacpp", "kl", "top1", "bits_per_weight", "window", "n_windows"}
    assert wanted <= set(body)
    assert (body["window"], body["n_windows"], body["text"]) == (64, 2, TEXT)
    assert body["model"] == model
    assert "\x1b" not in shown.err


def test_people_get_a_table(model, capsys):
    assert cli.execute(["eval", model, *SHORT, "--against", model, "--decode", "5"]) == 0
    shown = capsys.readouterr().out
    for part in ("perplexity", "llama.cpp", "KL from the reference", "KL of decode", "bits per weight", "2 windows"):
        assert part in shown
    assert "\x1b" not in shown


def test_tasks_are_a_row_and_their_replies_are_in_the_json(model, capsys):
    assert cli.execute(["eval", model, *SHORT, "--tasks", "1"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tasks solved"))
    assert row.split() == ["tasks", "solved", "0", "of", "3", "code", "0,", "arithmetic", "0,", "fact", "0"]
    assert cli.execute(["eval", model, *SHORT, "--tasks", "1", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)["tasks"]
    assert [each["kind"] for each in body["replies"]] == ["code", "arithmetic", "fact"]
    assert cli.execute(["eval", model, *SHORT, "--tasks", "41"]) == 2


def test_several_models_are_a_table_and_a_plot(model, capsys):
    assert cli.execute(["eval", model, model, *SHORT, "--against", "reference", "--plot", "-"]) == 0
    shown = capsys.readouterr()
    header, *rows = shown.out.splitlines()
    assert header.split()[:2] == ["model", "format"]
    assert header.rstrip().endswith("top-1")
    assert len(rows) == 2
    assert all(row.endswith("100.00%") for row in rows)
    assert "|AB" in shown.err
    assert cli.execute(["eval", model, model, *SHORT, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["schema"], len(body["models"]), body["failed"]) == (1, 2, [])
    assert body["models"][0]["weights_bytes"] == body["models"][1]["weights_bytes"]


def test_one_of_several_that_fails_is_told_behind_the_rest(model, tmp_path, capsys):
    wider = str(make_checkpoint(tmp_path / "wider", vocab_size=384))
    assert cli.execute(["eval", model, wider, *SHORT]) == 2
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert "the vocabulary of" in shown.err


def test_a_reply_can_be_timed(model, capsys):
    assert cli.execute(["eval", model, *SHORT, "--speed"]) == 0
    shown = capsys.readouterr().out
    assert "tg128" in shown
    assert "peak memory" in shown


def test_the_text_may_come_through_a_pipe(model, monkeypatch, capsys):
    with open(TEXT, "rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read())))
    assert cli.execute(["eval", model, *SHORT, "--text", "-", "--json"]) == 0
    piped = json.loads(capsys.readouterr().out)
    assert piped["text"] == "stdin"
    assert cli.execute(["eval", model, *SHORT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] == piped["perplexity"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--text", "/nonexistent/text"], 2, "/nonexistent/text"),
        (["--text", "/"], 2, "cannot be read"),
        (["--text", "/dev/null"], 2, "the text is empty"),
        (["--window", "3"], 2, ""),
        (["--window", "100000"], 2, "100000"),
        (["--max-windows", "0"], 2, ""),
        (["--decode", "64"], 2, "--decode"),
        (["--kv", "5"], 2, "kv"),
        (["-c", "10"], 2, "--ctx"),
        (["--plot", "picture.jpg"], 2, "not a PNG file name"),
        (["--against", "nosuchmodel"], 4, "nosuchmodel"),
    ],
)
def test_wrong_use_ends_with_its_code(model, arguments, code, said, capsys):
    assert cli.execute(["eval", model, *SHORT, *arguments]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err


def test_an_unknown_model(capsys):
    assert cli.execute(["eval", "nosuchmodel"]) == 4
    assert "nosuchmodel" in capsys.readouterr().err


def test_ctrl_c_while_it_judges_ends_with_130(model, monkeypatch, capsys):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "score", interrupted)
    assert cli.execute(["eval", model, *SHORT, "--json"]) == 130
    assert capsys.readouterr().out == ""


def test_help_loads_no_torch():
    code = "import sys; from localq import cli; cli.execute(['eval', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--max-windows" in done.stdout


def test_what_stays_free_and_force_reach_the_load_but_never_the_reference(model, monkeypatch, capsys):
    seen = []

    def noted(files, options, *more, **named):
        seen.append(options)
        return load(files, options, *more, **named)

    load = evaluation.load
    monkeypatch.setattr(evaluation, "load", noted)
    memory = ("--reserve", "300MiB", "--force", "--against", "reference")
    assert cli.execute(["eval", model, *SHORT, *memory, "--json"]) == 0
    assert [(each.reserve_bytes, each.force) for each in seen] == [(300 * 2**20, True), (300 * 2**20, False)]
    assert cli.execute(["eval", model, *SHORT, "--reserve", "some"]) == 2
    capsys.readouterr()

"""`localq bench` as a user calls it: options, formats, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tiny_checkpoints import make_checkpoint

from localq import cli, driver
from localq.bench import choose


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("bench"), initializer_range=0.15))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch, tmp_path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))


SHORT = ("--device", "cpu", "-p", "8", "-n", "4", "-r", "1", "--no-baseline")


def test_json_is_one_line_and_the_headline_goes_to_stderr(model, capsys):
    assert cli.execute(["bench", model, *SHORT, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1
    body = json.loads(shown.out)
    assert body["schema"] == 1
    assert [row["test"] for row in body["rows"]] == ["pp8", "tg4"]
    assert "tok/s at tg4" in shown.err


@pytest.mark.parametrize("format", ["table", "md", "csv", "jsonl"])
def test_the_last_line_is_json_in_every_format(model, format, capsys):
    assert cli.execute(["bench", model, *SHORT, "-o", format, "-d", "0,5", "--plot", "-"]) == 0
    shown = capsys.readouterr()
    body = json.loads(shown.out.splitlines()[-1])
    assert [row["test"] for row in body["rows"]] == ["pp8", "tg4", "pp8 @ d5", "tg4 @ d5"]
    assert "\x1b" not in shown.out
    assert "localq tg4" in shown.err  # the plot


def test_the_comparison_may_be_chosen_without_the_rest(model, capsys):
    assert cli.execute(["bench", model, *SHORT, "--against", "transformers", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert list(body["speedups"]["tg4"]) == ["transformers"]
    assert cli.execute(["bench", model, *SHORT[:-1], "--against", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speedups"]["tg4"] == {}


def test_random_weights_of_a_catalogued_shape(monkeypatch, capsys):
    monkeypatch.setattr(driver, "probe_driver", lambda: driver.Driver(present=False))
    assert cli.execute(["bench", "smollm2-135m", "--synthetic", *SHORT[2:], "--ctx", "64", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["model"] == "smollm2-135m@nf4 (random weights)"
    assert "running on the CPU" in " ".join(json.loads(shown.out)["notes"])


def test_a_bare_bench_measures_what_is_chosen_and_says_so(model, monkeypatch, capsys):
    chosen = choose.Choice("tiny", path=model, note="a note about the choice")
    monkeypatch.setattr(choose, "bare", lambda ctx, device, vram, synthetic: chosen)
    assert cli.execute(["bench", *SHORT, "--json"]) == 0
    shown = capsys.readouterr()
    assert "a note about the choice" in shown.err
    assert json.loads(shown.out)["rows"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-o", "xml"], 2, "xml"),
        (["--kernels", "--profile"], 2, "two benchmarks"),
        (["--kernels", "-o", "csv"], 2, "csv"),
        (["--kernels", "--synthetic"], 2, "random weights anyway"),
        (["-p", "some"], 2, "-p"),
        (["-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["-r", "0"], 2, ""),
        (["--against", "ollama"], 2, "ollama"),
        (["--plot", "picture.gif"], 2, "PNG"),
        (["--kv", "5"], 2, "kv"),
        (["-c", "4"], 2, "--ctx"),
        (["--profile", "--device", "cpu"], 7, "profile"),
    ],
)
def test_wrong_use_ends_with_its_code_before_long(model, arguments, code, said, capsys):
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert cli.execute(["bench", model, "-p", "8", "-n", "4", *device, *arguments]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err


def test_unknown_names(capsys):
    assert cli.execute(["bench", "nosuchmodel"]) == 4
    assert cli.execute(["bench", "nosuchmodel", "--synthetic"]) == 4
    assert cli.execute(["bench", "llama-3.1-8b@aqlm", "--synthetic"]) == 2


def test_help_loads_no_torch():
    code = "import sys; from localq import cli; cli.execute(['bench', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "-n, --n-gen" in done.stdout or "--n-gen" in done.stdout

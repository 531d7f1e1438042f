"""`localq bench` as a user calls it: options, formats, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from localq import cli, driver
from localq.bench.kernels import kernel_bench
from localq.bench.models import choose, model_bench
from localq.bench.models.measure import EngineSubject
from localq.cli import progress
from localq.planner import prepare
from tests.support.models.tiny_checkpoints import make_checkpoint


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
    chosen = choose.BenchChoice("tiny", path=model, note="a note about the choice")
    monkeypatch.setattr(choose, "choose", lambda ctx, device, vram, synthetic, reserve: chosen)
    assert cli.execute(["bench", *SHORT, "--json"]) == 0
    shown = capsys.readouterr()
    assert "a note about the choice" in shown.err
    assert json.loads(shown.out)["rows"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-o", "xml"], 2, "xml"),
        (["--only", "nf4"], 2, "--only has no effect without --kernels"),
        (["--profile", "--only", "nf4"], 2, "--only has no effect with --profile"),
        (["--kernels", "--profile"], 2, "separate benchmarks"),
        (["--kernels", "-o", "csv"], 2, "csv"),
        (["--kernels", "--synthetic"], 2, "always uses random weights"),
        (["-p", "some"], 2, "-p"),
        (["-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["-r", "0"], 2, ""),
        (["--against", "ollama"], 2, "ollama"),
        (["--plot", "picture.gif"], 2, "PNG"),
        (["--kv", "5"], 2, "kv"),
        (["-c", "4"], 2, "--ctx"),
        (["--profile", "--device", "cpu"], 7, "profile"),
        (["--vram", "0"], 2, "too little"),
        (["--vram", "much"], 2, "not a memory size"),
        (["-n", "1"], 2, "too short"),
        (["--seed", "-1"], 2, ""),
        (["--profile", "--plot", "-"], 2, "--plot has no effect with --profile"),
        (["--profile", "--against", "none"], 2, "--against has no effect with --profile"),
        (["--crossover"], 2, "has no effect with --crossover"),
        (["--patched"], 2, "has no effect with --patched"),
        (["--kernels"], 2, "has no effect with --kernels"),
        (["--quantize"], 2, "-p has no effect with --quantize"),
    ],
)
def test_wrong_use_ends_with_its_code_before_long(model, arguments, code, said, capsys):
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert cli.execute(["bench", model, "-p", "8", "-n", "4", *device, *arguments]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err


@pytest.mark.parametrize("mode", ["--kernels", "--crossover", "--patched", "--bcq"])
def test_parts_need_a_gpu_and_say_so(mode, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "probe_driver", lambda: driver.Driver(present=False))
    assert cli.execute(["bench", mode, "--json", "--quiet"]) == 7
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"), [([], 2, "Specify a MODEL"), (["lama-70b"], 4, "lama-70b"), (["gpt-oss-20b"], 2, "")]
)
def test_quantizing_is_timed_for_a_model_that_it_can_be_done_with(arguments, code, said, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "check_can_make", lambda *asked: None)
    assert cli.execute(["bench", "--quantize", *arguments, "--device", "cpu"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err


def test_some_kernels_alone(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(kernel_bench, "run", lambda out, model, families, **rest: asked.append((model, families)) or {})
    assert cli.execute(["bench", "--kernels", "4096x4096", "--only", "gather, vq"]) == 0
    assert asked == [("4096x4096", ["gather", "vq"])]


def test_a_family_of_kernels_that_there_is_not_is_named_with_those_that_there_are(capsys):
    assert cli.execute(["bench", "--kernels", "--only", "nf4,nf5"]) == 2
    assert "--only: unknown kernel family 'nf5'" in capsys.readouterr().err
    cli.execute(["bench", "--help"])
    shown = capsys.readouterr().out
    assert [name for name in kernel_bench.FAMILIES if name not in shown] == []


def test_failures_of_kernels_come_after_the_json(monkeypatch, capsys):
    result = {"schema": 1, "rows": [], "failures": ["nf4_gemv is wrong"]}
    monkeypatch.setattr(kernel_bench, "run", lambda out, model, families, plot_to, on_case: result)
    assert cli.execute(["bench", "--kernels", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == result
    assert "1 measurements failed; first failure: nf4_gemv is wrong" in shown.err


@pytest.mark.parametrize("mode", ["--kernels", "--bcq"])
def test_kernels_are_given_the_bar_of_this_terminal(monkeypatch, mode):
    given = []
    monkeypatch.setattr(progress, "case_bar", lambda quiet: ("bar", quiet))
    monkeypatch.setattr(kernel_bench, "run", lambda *_, on_case, **__: given.append(on_case) or {})
    for words in ([mode], [mode, "-q"]):
        assert cli.execute(["bench", *words]) == 0
    assert given == [("bar", False), ("bar", True)]


def test_ctrl_c_ends_with_130_and_leaves_stdout_empty(model, monkeypatch, capsys):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineSubject, "run", interrupted)
    assert cli.execute(["bench", model, *SHORT]) == 130
    assert capsys.readouterr().out == ""


def test_a_closed_pipe_ends_with_141(model):
    command = f"{sys.executable} -m localq bench {model} {' '.join(SHORT)}; echo $? >&2"
    done = subprocess.run(
        f"({command}) | head -c 0", shell=True, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stderr.split()[-1] == "141"
    assert "Traceback" not in done.stderr


def test_nothing_but_notes_on_stderr_that_is_no_terminal(model, capsys):
    assert cli.execute(["bench", model, *SHORT, "--against", "transformers"]) == 0
    assert capsys.readouterr().err == ""


def test_the_name_is_the_one_that_was_asked_for(model, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "source_path", lambda name, say, show, offline: Path(model))
    assert cli.execute(["bench", "smollm2-135m@nf4", *SHORT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "smollm2-135m@nf4"


def test_unknown_names(capsys):
    assert cli.execute(["bench", "nosuchmodel"]) == 4
    assert cli.execute(["bench", "nosuchmodel", "--synthetic"]) == 4
    assert cli.execute(["bench", "gpt-oss-20b@aqlm", "--synthetic"]) == 2


def test_help_loads_no_torch():
    code = "import sys; from localq import cli; cli.execute(['bench', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "-n, --n-gen" in done.stdout or "--n-gen" in done.stdout


def test_what_stays_free_and_force_reach_the_load_but_never_the_baseline(model, monkeypatch, capsys):
    seen = []

    def noted(files, options, **more):
        seen.append(options)
        return load(files, options, **more)

    load = model_bench.load
    monkeypatch.setattr(model_bench, "load", noted)
    monkeypatch.setattr(model_bench, "is_plain", lambda model: False)  # so that 16 bit is timed beside it
    memory = ("--reserve", "300MiB", "--force", "--against", "none")
    assert cli.execute(["bench", model, *SHORT[:-1], *memory, "--json"]) == 0
    assert [(each.reserve_bytes, each.force) for each in seen] == [(300 * 2**20, True), (300 * 2**20, False)]
    assert cli.execute(["bench", model, *SHORT, "--reserve", "some"]) == 2
    assert cli.execute(["bench", "--kernels", "--force"]) == 2
    assert "no effect with --kernels" in capsys.readouterr().err

"""`localq bench --formats`: what is here, what is made, what is measured of it, and how it is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localq import cli, driver, places
from localq.bench.models import format_list, formats
from localq.bench.models import plan as bench_plan
from localq.bench.models.format_report import SIXTEEN
from localq.bench.models.report import BASELINE, OURS, BenchReport, BenchRow
from localq.errors import ExitCode, LocalqError
from localq.files import format_facts
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.planner.speed import local_measurements
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest

SHORT = ("--device", "cpu", "-p", "8", "-n", "4", "-r", "1")


@pytest.fixture(autouse=True)
def own(monkeypatch, tmp_path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(driver, "probe_driver", lambda: driver.Driver(present=False))
    monkeypatch.setattr(formats.model_bench, "read_bytes_per_s", lambda device: 1e10)
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"LOCALQ_{name}", str(tmp_path / name))


@pytest.fixture(scope="module")
def model(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With NF4 and binary codes beside it."""
    folder = tmp_path_factory.mktemp("formats") / "tiny"
    shutil.copytree(plain, folder)
    for format in ("nf4", "bcq"):
        by_tensor.convert(TensorwiseRequest(open_model(folder), format, folder.with_name(f"tiny@{format}")))
    return folder


CPU, PLAN = LoadOptions(device="cpu", dtype="float32"), bench_plan.make("8", "4", "0", 1)


def report_of(request) -> BenchReport:
    """As if it had been timed."""
    rows = tuple(BenchRow(OURS, "bf16", case, (50.0,), 50.0) for case in request.plan.cases)
    return BenchReport("m", rows, request.plan.headline, {"head": "16", "dtype": "bfloat16", "device": "a card"}, 1e12)


@pytest.fixture
def unmeasured(monkeypatch) -> None:
    """Nothing is timed and no weight is read."""
    monkeypatch.setattr(formats.model_bench, "run", lambda request, on_state: report_of(request))
    size = SimpleNamespace(bits_per_weight=4.0, weights_bytes=1000)
    monkeypatch.setattr(formats.bits, "size_of", lambda *rest: size)
    monkeypatch.setattr(formats.bits, "dense_bytes", lambda files: 4000)


def quiet(line: str) -> None:
    """Nobody listens."""


def found(model: Path) -> dict[str, format_list.Candidate]:
    return {each.format: each for each in format_list.find(str(model), quiet, None, True).candidates}


# ---- what is there


def test_what_is_made_is_found_by_its_name_and_the_rest_has_its_command(model):
    candidates = found(model)
    assert list(candidates) == format_list.names()
    assert candidates["nf4"].path == model.with_name("tiny@nf4")
    assert candidates["nf4"].reason == ""
    missing = candidates["mxfp4"]
    assert (missing.path, missing.reason) == (None, "not quantized yet")
    assert missing.command == f"localq quantize {model} --format mxfp4 --out {model}@mxfp4"
    assert (candidates["vptq"].reason, candidates["vptq"].command) == ("localq cannot quantize to this format", "")


def test_a_catalogued_model_has_published_and_made_formats(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(format_list.prepare, "model_path", lambda *rest: tmp_path)
    listed = format_list.find("llama-3.1-8b", quiet, None, True)
    candidates = {each.format: each for each in listed.candidates}
    assert listed.name == "llama-3.1-8b"
    assert candidates["nf4"].command == "localq pull llama-3.1-8b@nf4"
    assert candidates["nf4"].reason == "not downloaded"
    made = candidates["bcq"]
    assert made.folder == places.quantized_dir() / "llama-3.1-8b@bcq"
    assert "--format bcq" in made.command


def test_only_what_is_asked_for_is_made_and_its_time_is_remembered(model, monkeypatch, tmp_path):
    base = tmp_path / "own"
    shutil.copytree(model, base)
    made = []

    def quantize(name, source, format, out, on_progress=None, more=()):
        made.append((name, format, out))
        if format == "squeezellm":
            raise LocalqError(name, "no room", "Make some.", ExitCode.DISK)
        by_tensor.convert(TensorwiseRequest(open_model(source), format, out))

    monkeypatch.setattr(format_list.prepare, "quantize", quantize)
    listed = format_list.find(str(base), quiet, None, True)
    after = {
        each.format: each for each in format_list.make(listed, ("mxfp4", "squeezellm"), quiet, None, True).candidates
    }
    folder = base.with_name("own@mxfp4")
    assert made == [("own@mxfp4", "mxfp4", folder), ("own@squeezellm", "squeezellm", base.with_name("own@squeezellm"))]
    assert after["mxfp4"].path == folder
    assert after["mxfp4"].seconds == pytest.approx(local_measurements.quantizing(folder), abs=1e-3)
    assert "no room" in after["squeezellm"].reason
    assert after["nf4"].reason == "not quantized yet"
    again = found(base)["mxfp4"]
    assert (again.path, again.seconds) == (folder, local_measurements.quantizing(folder))


def test_a_folder_with_a_catalogued_name_is_made_of_itself(model, monkeypatch, tmp_path):
    base = tmp_path / "smollm2-135m"
    shutil.copytree(model, base)
    made = []
    monkeypatch.setattr(format_list.prepare, "quantize", lambda name, source, *rest: made.append((source, rest[1])))
    listed = format_list.find(str(base), quiet, None, True)
    assert listed.name == "smollm2-135m"
    monkeypatch.setattr(format_list.prepare, "model_path", lambda *rest: pytest.fail("the catalogue's was taken"))
    format_list.make(listed, ("nf4",), quiet, None, True)
    assert made == [(base, tmp_path / "smollm2-135m@nf4")]


def test_the_format_that_a_folder_is_in_has_a_line(model):
    base = model.with_name("tiny@nf4")
    candidates = found(base)
    assert (candidates["nf4"].path, candidates["nf4"].reason) == (base, "")
    assert candidates["bcq"].folder == base.with_name("tiny@nf4@bcq")


@pytest.mark.usefixtures("unmeasured")
def test_a_defect_while_one_format_is_made_ends_no_other(model, monkeypatch):
    def quantize(name, source, format, *rest):
        if format == "mxfp4":
            raise ValueError("a row\nis short")

    monkeypatch.setattr(format_list.prepare, "quantize", quantize)
    listed = format_list.find(str(model), quiet, None, True)
    listed = format_list.make(listed, ("mxfp4", "squeezellm"), quiet, None, True)
    after = {each.format: each for each in listed.candidates}
    assert (after["mxfp4"].reason, after["mxfp4"].failed) == ("ValueError: a row", True)
    assert after["squeezellm"].path is not None
    table = formats.run(formats.FormatsRequest("m", listed.base, (after["mxfp4"], after["nf4"]), CPU, PLAN), quiet)
    assert [line.tok_per_s is None for line in table.lines] == [False, True, False]
    assert table.failures == ("mxfp4: ValueError: a row",)


def test_what_cannot_be_made_is_a_wrong_use():
    assert format_list.to_make("") == ()
    assert format_list.to_make("all") == tuple(format_facts.writable())
    with pytest.raises(LocalqError, match="cannot quantize to 'awq'") as caught:
        format_list.to_make("nf4,awq")
    assert caught.value.exit_code == ExitCode.USAGE


# ---- measured


def test_every_format_has_a_line_with_size_speed_and_quality(model, capsys):
    arguments = ["bench", "--formats", str(model), *SHORT, "--max-windows", "1"]
    assert cli.execute([*arguments, "--plot", "-"]) == 0
    shown = capsys.readouterr()
    body = json.loads(shown.out.splitlines()[-1])
    rows = {row["format"]: row for row in body["rows"]}
    assert list(rows) == [SIXTEEN, *format_list.names()]
    assert (body["window"], body["n_windows"], body["dequantized"], body["synthetic"]) == (512, 1, True, False)
    plain, nf4, bcq = rows[SIXTEEN], rows["nf4"], rows["bcq"]
    assert plain["bits_per_weight"] == 16
    assert plain["weights_bytes"] > nf4["weights_bytes"] > bcq["weights_bytes"]
    assert (bcq["variant"], round(bcq["bits_per_weight"], 3)) == ("q3g128", 3.4)
    assert all(row["tok_per_s"] > 0 and row["prefill_tok_per_s"] > 0 for row in (plain, nf4, bcq))
    assert 0 < nf4["kl"] < bcq["kl"]
    assert 0 < bcq["top1"] < nf4["top1"] < 1
    assert plain["perplexity"] > 0
    assert plain["kl"] is None
    assert plain["speedup_over_fp16"] is None  # on the CPU all weights are dequantized
    assert rows["awq"]["tok_per_s"] is None
    assert "on the CPU, all formats are dequantized" in shown.out.splitlines()[0]
    assert "mxfp4: not measured: not quantized yet (localq quantize" in shown.out
    assert "1 window of 512 tokens" in shown.out
    assert "perplexity vs. weights in MB" in shown.err
    assert "bcq q3g128: " in shown.err


def test_a_format_that_is_damaged_is_a_line_and_no_end(model, tmp_path, capsys):
    base = tmp_path / "own"
    shutil.copytree(model, base)
    broken = by_tensor.convert(TensorwiseRequest(open_model(base), "nf4", tmp_path / "own@nf4"))
    (shard,) = broken.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert cli.execute(["bench", "--formats", str(base), *SHORT, "--max-windows", "0", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    rows = {row["format"]: row for row in body["rows"]}
    assert rows["nf4"]["tok_per_s"] is None
    assert rows["nf4"]["reason"]
    assert rows[SIXTEEN]["tok_per_s"] > 0
    assert (body["text"], rows[SIXTEEN]["perplexity"]) == (None, None)


def test_a_defect_of_one_format_is_told_behind_the_table(model, monkeypatch, capsys):
    timed = formats.model_bench.run

    def run(request, on_state):
        if "nf4" in request.files.name:
            raise RuntimeError("a kernel\nfailed")
        return timed(request, on_state)

    monkeypatch.setattr(formats.model_bench, "run", run)
    assert cli.execute(["bench", "--formats", str(model), *SHORT, "--max-windows", "0"]) == ExitCode.FAILURE
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["failures"] == ["nf4: RuntimeError: a kernel"]
    assert "1 format failed; first failure: nf4: RuntimeError: a kernel" in shown.err


def test_where_nothing_can_be_measured_the_first_reason_is_told(model, monkeypatch, capsys):
    def run(request, on_state):
        raise LocalqError(request.files.name, "it does not fit", "Take less.", ExitCode.DOES_NOT_FIT)

    monkeypatch.setattr(formats.model_bench, "run", run)
    assert cli.execute(["bench", "--formats", str(model), *SHORT]) == ExitCode.DOES_NOT_FIT
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "it does not fit" in shown.err


@pytest.mark.parametrize("error", [RuntimeError("a kernel\nfailed"), LocalqError("m", "no room", "Make some.")])
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.usefixtures("unmeasured")
def test_what_fails_while_quality_is_judged_leaves_the_speeds(model, monkeypatch, error, quantized):
    def run(request, on_progress):
        raise error

    monkeypatch.setattr(formats.evaluation, "run", run)
    candidates = (found(model)["nf4"],) if quantized else ()
    text = formats.EvaluationText(b"a text", "a text", 1)
    table = formats.run(formats.FormatsRequest("m", model, candidates, CPU, PLAN, text), quiet)
    assert {line.tok_per_s for line in table.lines} == {50.0}
    said = "RuntimeError: a kernel" if isinstance(error, RuntimeError) else "m: no room. Make some."
    assert {line.reason for line in table.lines} == {said}
    assert bool(table.failures) == isinstance(error, RuntimeError)


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_16_bit_is_timed_beside_the_first_format_that_runs(model, monkeypatch, fails):
    asked = []

    def run(request, on_state):
        asked.append((request.files.name, request.baseline))
        if fails and "nf4" in request.files.name:
            raise LocalqError(request.files.name, "it does not fit", "Take less.", ExitCode.DOES_NOT_FIT)
        rates = {OURS: (150.0, 2000.0)} | ({BASELINE: (50.0, 1000.0)} if request.baseline else {})
        rows = [
            BenchRow(name, "bf16", case, (rate,), rate, extrapolated=name == BASELINE, process_vram_bytes=2**30)
            for name, pair in rates.items()
            for case, rate in zip(request.plan.cases[::-1], pair, strict=True)
        ]
        return BenchReport("m", tuple(rows), request.plan.headline, {"head": "16", "device": "a card"}, 1e12)

    monkeypatch.setattr(formats.model_bench, "run", run)
    monkeypatch.setattr(formats.devices, "pick", lambda name: SimpleNamespace(device=torch.device("cuda")))
    listed = format_list.find(str(model), quiet, None, True)
    plan = bench_plan.make("8", "4", "0", 1)
    table = formats.run(formats.FormatsRequest("m", listed.base, listed.candidates, LoadOptions(), plan), quiet)
    assert asked == [("tiny@nf4", True), ("tiny@bcq", fails)]
    plain, bcq = table.lines[0], next(line for line in table.lines if line.format == "bcq")
    assert (plain.format, plain.variant, plain.tok_per_s, plain.extrapolated) == (SIXTEEN, "bf16", 50.0, True)
    assert (bcq.speedup_over_fp16, bcq.prefill_tok_per_s, bcq.memory_bytes) == (3.0, 2000.0, 2**30)
    ending = "the speed of bf16 in the same engine (50.0 tok/s at tg4, extrapolated)"
    assert table.first_line().endswith(f"bcq 3.00x {ending}" if fails else ending)
    assert table.conditions == {"head": "16", "device": "a card"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--formats"], "no model given"),
        (["--formats", "x", "--synthetic", "--make", "nf4"], "--make has no effect on random"),
        (["--formats", "x", "--synthetic", "--max-windows", "1"], "--max-windows has no effect on random"),
        (["--formats", "x", "-n", "0"], "at least one decode test"),
        (["--formats", "x", "--make", "fp8"], "cannot quantize to 'fp8'"),
        (["--formats", "--kernels"], "separate benchmarks"),
        (["--formats", "x", "--against", "none"], "--against has no effect with --formats"),
        (["--make", "nf4", "x"], "--make has no effect without --formats"),
        (["--kernels", "--make", "nf4"], "--make has no effect with --kernels"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_looked_for(arguments, said, capsys):
    assert cli.execute(["bench", *arguments]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


# ---- stopped, and random weights


@pytest.mark.parametrize("judging", [False, True])
@pytest.mark.usefixtures("unmeasured")
def test_ctrl_c_tells_what_was_measured_until_then(model, monkeypatch, capsys, judging):
    def run(request, on_state):
        if "bcq" in request.files.name and not judging:
            raise KeyboardInterrupt
        return report_of(request)

    def judge(request, on_progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(formats.model_bench, "run", run)
    monkeypatch.setattr(formats.evaluation, "run", judge)
    windows = "1" if judging else "0"
    assert cli.execute(["bench", "--formats", str(model), *SHORT, "--max-windows", windows]) == ExitCode.INTERRUPTED
    body = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert body["stopped"]
    rows = {row["format"]: row for row in body["rows"]}
    assert (rows[SIXTEEN]["tok_per_s"], rows["nf4"]["tok_per_s"], rows["bcq"]["tok_per_s"]) == (50.0, 50.0, None)
    assert rows["bcq"]["reason"] == formats.STOPPED
    assert rows["nf4"]["reason"] == (formats.STOPPED if judging else "")


def test_ctrl_c_before_anything_was_measured_is_no_table(model, monkeypatch, capsys):
    def run(request, on_state):
        raise KeyboardInterrupt

    monkeypatch.setattr(formats.model_bench, "run", run)
    assert cli.execute(["bench", "--formats", str(model), *SHORT, "--max-windows", "0"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().out == ""


def test_random_weights_of_a_catalogued_shape_in_every_format(monkeypatch, capsys):
    few = tuple(format_list.Candidate(name) for name in ("bcq", "vptq", "nf4"))
    monkeypatch.setattr(format_list, "random", lambda: few)
    opened = formats.sources.random

    def small(name, seed):
        files, made = opened(name, seed)
        if "vptq" in name:
            raise LocalqError(name, "not today", "Wait.")
        config = {**formats.sources.synthetic_checkpoint.with_layers(files.config, 1), "vocab_size": 320}
        return files.__class__(files.path, files.kind, config, files.name), made

    monkeypatch.setattr(formats.sources, "random", small)
    assert cli.execute(["bench", "--formats", "smollm2-135m", "--synthetic", *SHORT, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    rows = {row["format"]: row for row in body["rows"]}
    assert list(rows) == [SIXTEEN, "bcq", "vptq", "nf4"]
    assert body["synthetic"]
    assert "not today" in rows["vptq"]["reason"]
    assert rows["bcq"]["bits_per_weight"] == pytest.approx(3.375, abs=0.05)
    assert rows["nf4"]["bits_per_weight"] > 4.1
    assert rows[SIXTEEN]["weights_bytes"] > rows["nf4"]["weights_bytes"]
    assert rows["nf4"]["perplexity"] is None

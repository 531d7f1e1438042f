"""A whole run: like is compared with like, bytes are counted as they are, the report holds what was measured."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch

from localq.bench.models import bytes as model_bytes
from localq.bench.models import measure, model_bench, plan, report, rivals
from localq.bench.models.measure import EngineSubject, Run
from localq.bench.models.plan import BenchTest
from localq.bench.synthetic import sources
from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import ModelFiles, open_model
from localq.formats import nf4
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.quantize.by_tensor import convert
from localq.quantize.request import TensorwiseRequest
from tests.support.models.tiny_checkpoints import make_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and lose much where the machine is busy."""
    torch.set_num_threads(1)


def request(
    folder, tests: plan.BenchPlan, against: tuple[str, ...] = (), device: str = "cpu"
) -> model_bench.BenchRequest:
    files, opened = sources.from_files(folder)
    return model_bench.BenchRequest(files, opened, LoadOptions(device=device, dtype="float32"), tests, against)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "phi3"])
def test_same_tokens_as_transformers_and_one_json_line(tmp_path, model_type):
    folder = make_checkpoint(tmp_path, model_type, initializer_range=0.15, tie_word_embeddings=model_type != "llama")
    tests = plan.make("24", "8", "0,16", repetitions=2)
    said: list[str] = []
    measured = model_bench.run(request(folder, tests, ("transformers",)), said.append)
    out, err = io.StringIO(), io.StringIO()
    body = report.write(measured, "table", out, err)
    assert json.loads(out.getvalue().splitlines()[-1]) == body
    assert body["same_tokens"] == {"transformers": measure.CHECK_TOKENS}
    names = [case.name for case in tests.cases]
    assert [row["test"] for row in body["rows"] if row["engine"] == "localq"] == names
    assert [row["test"] for row in body["rows"] if row["engine"] == "transformers"] == [names[0], names[1], names[3]]
    decode = next(row for row in body["rows"] if row["test"] == "tg8")
    assert 0 < decode["share_of_roof"] < 1
    assert decode["tok_per_s_min"] <= decode["tok_per_s"] <= decode["tok_per_s_max"]
    assert decode["tok_per_s"] == pytest.approx(1e3 / decode["ms_per_token"], rel=0.01)
    assert body["conditions"]["seed"] == 0
    form = {"dtype": "float32", "kv_bits": 16, "head": "16", "embed": "device"}
    assert form.items() <= body["conditions"].items()
    assert body["ledger_bytes"]["weights"] == body["predicted_bytes"]["weights"]
    assert said.count("localq tg8") == 3  # a warm-up and two runs


def test_prefill_computes_all_of_its_tokens_and_none_of_the_depth(tmp_path):
    engine = Engine(load(open_model(make_checkpoint(tmp_path)), LoadOptions(device="cpu", dtype="float32", ctx=128)))
    subject = EngineSubject(engine, seed=0)
    for case in (BenchTest(40, 0, 0), BenchTest(40, 0, 30)):
        for repetition in (-1, 0, 1):
            assert subject.run(case, repetition).seconds > 0  # raises where a token was found in the cache
    run = subject.run(BenchTest(0, 8, 30), 0)
    assert isinstance(run, Run)
    assert len(run.ids) == 9  # the first comes from the prefill
    assert run.ids == subject.run(BenchTest(0, 8, 30), 1).ids


def test_bytes_are_those_of_the_tensors(tmp_path):
    hidden, vocab, ctx, length = 128, 320, 100, 50
    untied = load(open_model(make_checkpoint(tmp_path / "untied")), LoadOptions(device="cpu", dtype="float32", ctx=ctx))
    tied = load(
        open_model(make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)),
        LoadOptions(device="cpu", dtype="float32", ctx=ctx),
    )
    kv = 3 * 2 * 2 * 32 * 4 * length  # layers, k and v, heads, head_dim, bytes
    layer = hidden * (128 + 64 + 64 + 128) + 3 * hidden * 192 + 2 * hidden
    blocks = 3 * layer + hidden
    assert model_bytes.per_token(untied, length) == 4 * (blocks + vocab * hidden + hidden) + kv
    assert model_bytes.per_token(tied, length) == 4 * (blocks + vocab * hidden) + kv


def put_back_nf4(model: LoadedModel, files: ModelFiles) -> None:
    """The quantized modules, as on a GPU: the CPU dequantizes at load."""
    with open_checkpoint(files) as weights:
        for path, module in list(model.model.named_modules()):
            if isinstance(module, torch.nn.Linear) and nf4.is_quantized(weights.tensors, f"model.{path}"):
                parent, _, leaf = path.rpartition(".")
                packed = nf4.from_checkpoint(weights, f"model.{path}")
                setattr(model.model.get_submodule(parent), leaf, nf4.Linear(packed))


def test_a_hybrid_reads_and_writes_its_states(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_5_text")
    model = load(open_model(folder), LoadOptions(device="cpu", dtype="float32", ctx=100))
    states = 2 * 2 * 4 * (6 * 16 * 32 + (2 * 2 * 16 + 6 * 32) * 3)  # of two layers: matrix, and inputs
    assert model_bytes.kv(model, 50) == states + 50 * 2 * 2 * 32 * 4


def test_a_model_of_latents_reads_one_vector_per_position(tmp_path):
    folder = make_checkpoint(tmp_path, "glm4_moe_lite")
    model = load(open_model(folder), LoadOptions(device="cpu", dtype="float32", ctx=100))
    assert model_bytes.kv(model, 50) == 50 * 3 * (80 + 8) * 4


def test_bytes_of_nf4_are_codes_and_both_levels_of_scales_and_tables_once(tmp_path):
    hidden, vocab, length = 128, 320, 50
    folder = convert(TensorwiseRequest(open_model(make_checkpoint(tmp_path / "dense")), "nf4", tmp_path / "nf4"))
    files = open_model(folder)
    model = load(files, LoadOptions(device="cpu", dtype="float32", ctx=100, kv_bits=8))
    put_back_nf4(model, files)
    matrices = 0
    for out, columns in ((128, 128), (64, 128), (64, 128), (128, 128), (192, 128), (192, 128), (128, 192)):
        blocks = out * columns // 64
        matrices += out * columns // 2 + blocks + 4 * -(-blocks // 256) + 4  # codes, scales, their scales, the offset
    norms, tables = 4 * (3 * 2 + 1) * hidden, 4 * 256 + 4 * 16
    assert model_bytes.weights(model) == 3 * matrices + tables + norms + 4 * (vocab * hidden + hidden)
    slot = 2 * 2 * (32 + 2 * 2)  # k and v, heads, 32 codes and two scales of 16 bit (one is unused)
    assert model_bytes.per_token(model, length) == model_bytes.weights(model) + 3 * slot * length
    scratch = torch.empty(2**20, dtype=torch.uint8)
    before = model_bytes.weights(model)
    for module in model.model.modules():
        if isinstance(module, nf4.Linear):
            module.tile_().scratch = scratch  # of prefill: no step of decode reads it
    assert model_bytes.weights(model) == before


def test_a_windowed_layer_reads_its_window(tmp_path):
    folder = make_checkpoint(tmp_path, "gemma2")  # a window of 16 on layers 0 and 2 of 3
    model = load(open_model(folder), LoadOptions(device="cpu", dtype="float32", ctx=100))
    slot = 2 * 2 * 32 * 4
    assert model_bytes.kv(model, 50) == slot * (16 + 50 + 16)
    assert model_bytes.kv(model, 10) == slot * 30
    assert model_bytes.mean_length(BenchTest(0, 4, 10)) == (11 + 12 + 13 + 14) / 4
    assert model_bytes.mean_length(BenchTest(0, 3, 0)) == (2 + 3 + 4) / 3


def test_bitsandbytes_runs_on_our_codes(tmp_path):
    pytest.importorskip("bitsandbytes")
    folder = make_checkpoint(tmp_path / "dense", initializer_range=0.15)
    convert(TensorwiseRequest(open_model(folder), "nf4", tmp_path / "nf4"))
    files = open_model(tmp_path / "nf4")
    model = load(files, LoadOptions(device="cpu", dtype="float32", ctx=64))
    ids = measure.greedy_ids(Engine(model), 0)
    put_back_nf4(model, files)
    theirs = rivals.Transformers(rivals.bitsandbytes_model(model, files), 64, 0, static=False)
    got = theirs.generate(measure.prompt(measure.CHECK_PROMPT, model.vocab, 0), measure.CHECK_TOKENS)[1]
    assert measure.common_prefix(ids, got) == measure.CHECK_TOKENS


def test_a_rival_that_fails_is_a_note(tmp_path):
    def broken(model, files):
        raise RuntimeError("no compiler\nmore lines")

    bench = model_bench._ModelBench(
        request(make_checkpoint(tmp_path), plan.make("0", "8", "0")), CPU, 1e9, lambda text: None
    )
    assert bench._guard("transformers", lambda: broken(None, None)) == {}
    assert bench.notes == ["transformers not measured: RuntimeError: no compiler"]


@pytest.mark.parametrize("when", ["when it is made", "while it is timed"])
def test_transformers_failing_on_the_cpu_leaves_what_localq_measured(tmp_path, monkeypatch, when):
    def broken(self, case, repetition):
        raise ValueError("unknown architecture")

    if when == "when it is made":
        monkeypatch.setattr(rivals, "transformers_model", lambda model, files: broken(None, None, 0))
    else:
        monkeypatch.setattr(rivals.Transformers, "run", broken)
    asked = request(make_checkpoint(tmp_path, initializer_range=0.15), plan.make("8", "4", "0", 2), ("transformers",))
    measured = model_bench.run(asked, lambda text: None)
    assert [row.engine for row in measured.rows] == [report.OURS] * 2
    assert [len(row.samples) for row in measured.rows] == [2, 2]
    assert measured.notes == ("transformers not measured: ValueError: unknown architecture",)


def test_a_baseline_that_fails_leaves_what_was_measured_and_the_first_line_says_so(tmp_path, monkeypatch):
    def short_of_memory(self, dtype):
        raise LocalqError("model", "too large even in two cuts", "", ExitCode.DOES_NOT_FIT)

    monkeypatch.setattr(model_bench, "is_plain", lambda model: False)
    monkeypatch.setattr(model_bench._ModelBench, "in_16_bit", short_of_memory)
    asked = request(make_checkpoint(tmp_path), plan.make("0", "4", "0", 1))
    measured = model_bench.run(asked, lambda text: None)
    assert measured.rows[0].engine == report.OURS
    assert "16 bit not measured: model: too large even in two cuts" in measured.notes[0]
    assert "no comparison" in measured.first_line()
    assert "could not be measured" in measured.first_line()
    alone = model_bench.run(replace(asked, baseline=False), lambda text: None)
    assert "no fp16 baseline" in alone.first_line()


@pytest.mark.cuda
def test_a_small_synthetic_model_on_the_gpu(monkeypatch):
    files, opened = sources.random("smollm2-135m", seed=0)
    tests = plan.make("600", "32", "0", repetitions=2)
    asked = model_bench.BenchRequest(files, opened, LoadOptions(device="cuda"), tests)
    measured = model_bench.run(asked, lambda text: None)
    ours, dense = (measured.row(name, tests.headline) for name in (report.OURS, report.BASELINE))
    assert ours is not None
    assert dense is not None
    assert measured.same_tokens["eager"] == measure.CHECK_TOKENS
    assert ours.bytes_per_token < dense.bytes_per_token
    assert 0 < ours.share_of_roof < 1
    assert ours.peak_vram_bytes > measured.ledger_bytes["weights"]
    assert not dense.extrapolated

    full = model_bench.load

    def short_of_memory(each, options, **more):
        if each.text_config["num_hidden_layers"] == 30 and options.head == "16" and options.embed == "device":
            raise LocalqError("model", "too large", "", ExitCode.DOES_NOT_FIT)
        return full(each, options, **more)

    monkeypatch.setattr(model_bench, "load", short_of_memory)
    cut = model_bench.run(asked, lambda text: None).row(report.BASELINE, tests.headline)
    assert cut is not None
    assert cut.extrapolated
    assert cut.tok_per_s == pytest.approx(dense.tok_per_s, rel=0.25)

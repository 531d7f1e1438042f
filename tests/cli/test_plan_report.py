"""`chat --dry-run` and `run --dry-run`: the whole plan, and nothing fetched, loaded or started."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from localq import gpus
from localq.cli import execute
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts, packaged_model
from localq.files.hub import fetch as hub
from localq.planner import card as planner_card
from localq.planner import choose, making, ram, uncatalogued
from localq.planner import plan as memory_plan
from localq.planner.offers import Offer
from localq.planner.speed import cards
from localq.settings import Settings
from localq.worker.client import EngineClient

MIB = 2**20
CARD = gpus.Gpu(0, "NVIDIA GeForce RTX 3090", "GPU-a", (8, 6), 24_576 * MIB, 20_000 * MIB, (
    gpus.Process(7, 4000 * MIB, "firefox"),
))  # fmt: skip


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """The shipped catalogue, nothing on the disk, no GPU, and no engine to start."""
    for name, path in (("LOCALQ_MODELS", "none.toml"), ("LOCALQ_DATA", "data"), ("LOCALQ_CACHE", "cache"),
                       ("LOCALQ_CONFIG", "config.toml"), ("HF_HUB_CACHE", "hub")):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport(unavailable=("NVML: none",)))
    monkeypatch.setattr(planner_card, "measure_bandwidth", lambda: None)
    monkeypatch.setattr(EngineClient, "start", lambda self: pytest.fail("the engine was started"))
    monkeypatch.setattr(hub, "fetch", lambda *arguments, **options: pytest.fail("something was fetched"))
    monkeypatch.setattr(ram, "CGROUP", tmp_path)


def plan_of(capsys, *arguments: str, code: int = ExitCode.OK) -> dict:
    assert execute(["run", *arguments, "--dry-run", "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.mark.parametrize(
    ("model", "vram", "bits"),
    [
        ("qwen3.6-35b-a3b", 12, None),
        ("qwen3.6-35b-a3b", 16, "3"),
        ("qwen3.6-35b-a3b", 24, "4"),
        ("llama-3.3-70b", 24, "2.5"),
        ("llama-3.3-70b", 32, "3"),
    ],
)
def test_more_than_2_bits_are_named_where_they_leave_a_comfortable_context(capsys, model, vram, bits):
    assert execute(["chat", model, "--dry-run", "--vram", str(vram)]) in (ExitCode.OK, ExitCode.DOES_NOT_FIT)
    told = [line.split() for line in capsys.readouterr().out.splitlines() if "with --bits" in line]
    assert [line[2].rstrip(":") for line in told] == ([] if bits is None else [bits])
    assert all(int(line[3].replace(",", "")) >= 16_384 for line in told)


def test_the_70b_on_24_gb_says_everything(capsys):
    assert execute(["chat", "llama-3.3-70b", "--vram", "24", "--dry-run"]) == ExitCode.OK
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    titles = [line[:11].strip() for line in lines]
    wanted = {"model", "memory", "format", "source", "download", "embedding", "head", "KV cache", "context", "uses"}
    assert wanted | {"speed", "quality"} <= set(titles)
    by = dict(zip(titles, lines, strict=True))
    assert "vptq, 2.07 bits" in by["format"]
    assert "nf4 needs" in by["format"]
    assert "VPTQ-community/Meta-Llama-3.3-70B-Instruct-v8-k65536-0-woft at main" in by["source"]
    assert "21.9 GB" in by["download"]
    assert all(name in by["speed"] for name in ("RTX 4090", "RTX 3090"))
    assert "llama-3.3-70b@vq2: " in captured.out
    assert "tok/s (RTX 3090)" in by["or"]
    assert "localq quantize llama-3.3-70b@bf16 --format vq2 --out" in captured.out
    assert "H200" in captured.err
    assert "\x1b" not in captured.out


def test_json_is_one_line_and_says_what_the_planner_says(capsys):
    body = plan_of(capsys, "llama-3.3-70b", "--vram", "24")
    assert (body["schema"], body["name"], body["fits"]) == (1, "llama-3.3-70b@vptq", True)
    assert (body["desktop_bytes"], body["desktop_assumed"]) == (700_000_000, True)
    assert sum(body["ledger_bytes"].values()) <= body["budget_bytes"] == 24_564 * MIB - 700_000_000
    assert body["ctx_max_no_desktop"] >= body["ctx_max"] == body["ctx"] >= 16_384
    assert {"RTX 4090", "RTX 3090"} <= set(body["tok_s"])
    (other,) = body["alternatives"]
    assert (other["name"], other["path"]) == ("llama-3.3-70b@vq2", None)
    assert other["tok_s"]["RTX 3090"] > 2 * body["tok_s"]["RTX 3090"]  # what gathers is slower
    assert other["made_by"].startswith("localq quantize")
    assert [line["what"] for line in body["choices"]] == ["embedding", "head", "KV cache", "context"]


def test_a_model_that_is_quantized_here_is_told_with_time_and_disk(capsys):
    assert execute(["chat", "qwen3.6-35b-a3b", "--dry-run", "--vram", "24"]) == ExitCode.OK
    (source,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("source")]
    assert re.fullmatch(r"source +quantized here from Qwen/\S+ \(about \d+ min, 19\.\d GB on disk\)", source)


@pytest.mark.parametrize("size", sorted(cards.TYPICAL))
def test_a_card_by_its_size_in_gb_is_planned_for_and_timed_as_by_fit(capsys, size):
    model = "llama-3.1-8b" if size < 24 else "llama-3.3-70b"
    plain = plan_of(capsys, model, "--vram", str(size))
    assert plan_of(capsys, model, "--vram", f"{size}GB") == plain
    assert plain["tok_s"]
    assert execute(["fit", f"{model}@vq2", "--vram", str(size), "--json"]) == ExitCode.OK
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    told = {each["name"]: each["made_by"] for each in plain["alternatives"]}[f"{model}@vq2"]
    assert f"(about {making.duration(row['make_s'])} on an {cards.typical(size).name}, estimated)" in told


def test_everything_can_be_overridden(capsys):
    asked = ["--format", "vq2", "--kv", "8", "--ctx", "12k", "--embed", "host", "--head", "nf4", "--reserve", "1GiB"]
    body = plan_of(capsys, "llama-3.3-70b", "--vram", "24", *asked)
    assert (body["name"], body["why"]) == ("llama-3.3-70b@vq2", "as requested")
    assert (body["kv_bits"], body["ctx"], body["embed"], body["head"]) == (8, 12_288, "host", "nf4")
    assert body["budget_bytes"] == 24_564 * MIB - 700_000_000 - 2**30
    assert {line["why"] for line in body["choices"]} == {"as requested"}
    assert plan_of(capsys, "llama-3.3-70b@vq2", "--vram", "24")["name"] == "llama-3.3-70b@vq2"


def test_what_does_not_fit_is_refused_behind_its_plan_with_three_ways_out(capsys):
    assert execute(["chat", "qwen3-32b", "--vram", "12", "--dry-run"]) == ExitCode.DOES_NOT_FIT
    captured = capsys.readouterr()
    assert "format      nf4" in captured.out
    assert all(f"({number})" in captured.err for number in (1, 2, 3))
    assert "with a larger --vram" in captured.err
    assert plan_of(capsys, "qwen3-32b", "--vram", "12", code=ExitCode.DOES_NOT_FIT)["fits"] is False


def test_it_ends_as_the_command_would(capsys, monkeypatch):
    forced = plan_of(capsys, "qwen3-32b", "--vram", "12", "--force")
    assert forced["fits"] is False  # and is fetched and loaded all the same
    plan_of(capsys, "qwen3-32b", "--vram", "24", "--offline", code=ExitCode.NETWORK)
    plan_of(capsys, "qwen3-32b", "--vram", "12", "--offline", code=ExitCode.DOES_NOT_FIT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert execute(["chat", "qwen3-32b", "--vram", "24", "--dry-run"]) == ExitCode.NETWORK
    captured = capsys.readouterr()
    assert "19.2 GB" in captured.out
    assert "localq is in offline mode" in captured.err


def test_what_is_made_of_files_that_are_here_fetches_nothing(capsys, monkeypatch, tmp_path):
    assert plan_of(capsys, "qwen3-32b@vq2", "--vram", "24")["download_bytes"] == 65_524_246_528
    plan_of(capsys, "qwen3-32b@vq2", "--vram", "24", "--offline", code=ExitCode.NETWORK)
    base = catalog.find("qwen3-32b").source("bf16")
    monkeypatch.setattr(hub, "local_source", lambda source: tmp_path if source == base else None)
    body = plan_of(capsys, "qwen3-32b@vq2", "--vram", "24", "--offline")
    assert (body["path"], body["download_bytes"]) == (None, 0)
    assert execute(["chat", "qwen3-32b@vq2", "--vram", "24", "--dry-run"]) == ExitCode.OK
    assert "the source is on this machine" in capsys.readouterr().out
    assert plan_of(capsys, "qwen3-32b", "--vram", "24")["download_bytes"] > 0  # which is published, and not made


def test_a_model_of_an_installed_package_needs_no_network(capsys, monkeypatch, tmp_path):
    for found, size, code in ((tmp_path, 0, ExitCode.OK), (None, 98_362_432, ExitCode.NETWORK)):
        monkeypatch.setattr(packaged_model, "installed_path", lambda source, found=found: found)
        for name in ("smollm2-135m", "smollm2-135m@vq2"):  # made of it
            assert plan_of(capsys, name, "--vram", "8", "--offline", code=code)["download_bytes"] == size


def test_the_gpu_that_is_here_counts_without_a_size(capsys, monkeypatch):
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (CARD,)))
    body = plan_of(capsys, "qwen3-14b")
    assert body["budget_bytes"] == 20_000 * MIB
    assert list(body["tok_s"]) == ["NVIDIA GeForce RTX 3090"]
    assert execute(["chat", "qwen3-32b@bf16", "--dry-run"]) == ExitCode.DOES_NOT_FIT
    assert "by closing firefox (pid 7, 4,000 MiB)" in capsys.readouterr().err


def test_without_a_gpu_it_is_the_cpus_plan(capsys):
    body = plan_of(capsys, "smollm2-135m")
    assert (body["budget_bytes"], body["fits"], body["tok_s"], body["name"]) == (None, True, {}, "smollm2-135m")
    assert body["ctx_max"] == body["ctx_max_no_desktop"] == body["ctx"] == 8192


def test_the_cpus_plan_is_refused_where_the_ram_is_short(capsys, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=23 * 10**9))
    in_f32 = ("--dtype", "float32")
    body = plan_of(capsys, "qwen3-32b", *in_f32, code=ExitCode.DOES_NOT_FIT)
    assert (body["fits"], body["ram_bytes"], body["ctx_max"]) == (False, 23 * 10**9, 0)
    assert sum(body["ledger_bytes"].values()) > 131 * 10**9
    assert execute(["chat", "qwen3-32b", "--dry-run", *in_f32]) == ExitCode.DOES_NOT_FIT
    captured = capsys.readouterr()
    assert "23.0 GB of RAM free (no GPU; on the CPU in float32)" in captured.out
    assert "needs 131.9 GB of RAM in float32" in captured.err
    monkeypatch.setattr("sys.stdin", None)
    assert execute(["run", "qwen3-32b", "hi"]) == ExitCode.DOES_NOT_FIT  # before anything is fetched
    assert plan_of(capsys, "qwen3-4b", "--dtype", "bfloat16")["ctx"] == 8192


def test_the_desktop_of_a_card_that_is_not_here_is_assumed_and_said(capsys, monkeypatch):
    assert execute(["chat", "qwen3-8b", "--vram", "12", "--dry-run"]) == ExitCode.OK
    assert "12,282 MiB (--vram 12), less 668 MiB for the desktop (assumed; use --desktop 0" in capsys.readouterr().out
    for asked, held in (("0", 0), ("2", 2 * 2**30)):
        body = plan_of(capsys, "qwen3-8b", "--vram", "12", "--desktop", asked)
        assert (body["desktop_bytes"], body["desktop_assumed"]) == (held, False)
        assert body["budget_bytes"] == 12_282 * MIB - held
        assert body["ctx_max"] <= body["ctx_max_no_desktop"]
    monkeypatch.setenv("LOCALQ_DESKTOP", "0")
    assert plan_of(capsys, "qwen3-8b", "--vram", "12")["budget_bytes"] == 12_282 * MIB


def test_a_limit_on_the_card_that_is_here_is_planned_as_it_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (CARD,)))
    for vram, budget in (("12", 12_282 * MIB), ("22GiB", 20_000 * MIB), ("48", None)):
        body = plan_of(capsys, "qwen3-14b", "--vram", vram)
        assert body["budget_bytes"] == (budget or 49_128 * MIB - 700_000_000)
        assert body["desktop_assumed"] is (budget is None)
        assert body["desktop_bytes"] == (4576 * MIB if budget else 700_000_000)


def test_a_folder_has_a_plan_too(capsys, tmp_path):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    body = plan_of(capsys, str(tmp_path), "--vram", "8")
    assert (body["format"], body["ctx"], body["path"], body["alternatives"]) == ("bf16", 1024, str(tmp_path), [])


@pytest.mark.parametrize(("template", "tokens"), [
    ("{{ messages }}{% if enable_thinking %}{% endif %}", 32_768), ("{{ messages }} <think>", 32_768),
    ("{{ messages }}", 16_384), (None, 16_384),
])  # fmt: skip
def test_a_folder_whose_template_thinks_gets_room_for_thoughts(capsys, tmp_path, template, tokens):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    header = b'{"x":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    body = plan_of(capsys, str(tmp_path), "--vram", "17700MiB")  # 16-bit head and KV cache leave less
    assert (body["ctx"], body["kv_bits"] == 16 and body["head"] == "16") == (tokens, False)


def test_experts_run_on_a_gpu_in_every_format_and_where_they_were_not_measured_their_speed_is_not_guessed(capsys):
    for name, is_told in (
        ("mixtral-8x7b@aqlm", False),
        ("mixtral-8x7b@squeezellm", False),
        ("qwen3-30b-a3b@vq2", True),
    ):
        body = plan_of(capsys, name, "--vram", "24")
        assert body["runs"] is True
        assert bool(body["tok_s"]) == is_told


@pytest.mark.parametrize(("name", "refused"), [("gpt-oss-20b", True), ("mixtral-8x7b", False)])
def test_an_unlisted_mixture_is_refused_before_it_is_fetched(monkeypatch, name, refused):
    arch = catalog.find(name).arch
    offer = Offer("org/repo", arch, "gptq", "", None, unsupported=format_facts.why_unsupported(arch, "gptq"))
    monkeypatch.setattr(uncatalogued, "remote", lambda target, offline: offer)
    with pytest.raises(LocalqError, match="not in gptq") if refused else contextlib.nullcontext():
        choose.check_unlisted(catalog.resolve("org/repo"), None, Settings(device="cpu"), force=False)


@pytest.mark.parametrize(("card", "least"), [("24", 65_536), ("16", 16_384)])
def test_gpt_oss_has_a_plan_with_a_long_context_on_cards_of_24_and_16_gib(capsys, card, least):
    body = plan_of(capsys, "gpt-oss-20b", "--vram", card)
    assert body["runs"] is True
    assert body["ctx"] >= least


@pytest.mark.parametrize("arguments", [
    ["llama-3.1-8b", "--format", "vptq"], ["llama-3.1-8b@nf4", "--format", "vq2"], ["./x", "--format", "nf4"],
    ["llama-3.1-8b", "--reserve", "much"],
])  # fmt: skip
def test_wrong_use_is_one_line(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    Path("x").mkdir()
    assert execute(["chat", *arguments, "--vram", "24", "--dry-run"]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)


# ---- what a load does with it


def test_a_load_that_cannot_fit_is_refused_before_anything_is_fetched(capsys, monkeypatch):
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (CARD,)))
    monkeypatch.setattr("sys.stdin", None)
    assert execute(["run", "qwen3-32b@bf16", "hi"]) == ExitCode.DOES_NOT_FIT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "firefox" in captured.err


def test_a_small_card_takes_another_format_and_says_why(capsys, monkeypatch):
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (CARD,)))
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr(EngineClient, "start", lambda self: None)
    asked = []

    def fetch(source, *arguments, **options):
        asked.append(source.repo)
        raise memory_plan.usage_error("stop", "here")

    monkeypatch.setattr(hub, "fetch", fetch)
    assert execute(["run", "llama-3.3-70b", "hi"]) == ExitCode.USAGE
    assert asked == ["VPTQ-community/Meta-Llama-3.3-70B-Instruct-v8-k65536-0-woft"]
    assert "llama-3.3-70b@vptq: nf4 needs" in capsys.readouterr().err

"""`localq fit`: the table, the order, the ledger of one model, one line of JSON, and a machine without a GPU."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from localq import gpus
from localq.cli import execute
from localq.drafts import MOST
from localq.errors import ExitCode
from localq.files import catalog
from localq.files.catalog_file import read_families
from localq.planner import card as planner_card
from localq.planner import footprint, making, placement
from localq.planner import plan as memory_plan
from localq.planner.speed import cards

ROOT = Path(__file__).parents[3]
MIB = 2**20
ROW_KEYS = {
    "name", "format", "fits", "runs", "last", "bits_per_weight", "weights_bytes", "ctx_max", "ctx_max_no_desktop",
    "tok_s", "download_bytes", "quality", "reason", "family", "year", "score", "score_estimated",
    "stored_bits_per_weight", "quantized_here", "tok_s_full", "disk_bytes", "make_s",
}  # fmt: skip


def fake_gpu(monkeypatch, total: int | None, free: int = 0) -> None:
    """A driver with one card of `total` bytes and a second one of a tenth; None: no driver."""
    cards = [] if total is None else [(0, "GPU-aaaa", total, free), (1, "GPU-bbbb", total // 10, free // 10)]
    known = tuple(gpus.Gpu(index, "card", uuid, (8, 9), size, left, None) for index, uuid, size, left in cards)
    untold = () if cards else ("NVML: NVML Shared Library Not Found",)
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", known, untold))


@pytest.fixture(autouse=True)
def shipped_catalogue_only(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(planner_card, "measure_bandwidth", lambda: None)  # it would start a process


def fit_notes(capsys, *arguments: str) -> str:
    assert execute(["fit", *arguments]) == ExitCode.OK
    return capsys.readouterr().err


def fit_json(capsys, *arguments: str) -> dict:
    assert execute(["fit", "--json", *arguments]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_json_has_every_model_in_every_format(capsys):
    body = fit_json(capsys, "--vram", "24", "--desktop", "1.2")
    assert body["schema"] == 1
    assert body["vram_bytes"] == 24_564 * MIB
    assert body["desktop_bytes"] == int(1.2 * 2**30)
    assert all(set(row) == ROW_KEYS for row in body["rows"])
    rows = {(row["name"].partition("@")[0], row["format"]): row for row in body["rows"]}
    assert len(rows) == len(body["rows"])
    for entry in catalog.load_catalogue():
        for source in entry.sources:
            row = rows[entry.name, source.format]
            assert row["download_bytes"] == entry.source(source.format).bytes
    assert rows["smollm3-3b", "nf4"]["download_bytes"] == rows["smollm3-3b", "bf16"]["download_bytes"]  # made here


def test_rows_say_what_the_planner_says(capsys):
    budget = 24_564 * MIB
    for row in fit_json(capsys, "--vram", "24", "--desktop", "1000MiB")["rows"]:
        target = catalog.resolve(row["name"])
        source = target.source or target.entry.source(target.format)
        scheme = source.scheme if source else ""
        asked = {"scheme": scheme, "wishes": placement.Wishes(draft_tokens=MOST, mtp=True)}
        now = memory_plan.assess(target.entry.arch, row["format"], budget - 1000 * MIB, **asked)
        alone = memory_plan.assess(target.entry.arch, row["format"], budget, **asked)
        assert row["ctx_max_no_desktop"] >= row["ctx_max"]
        assert row["fits"] == now.fits
        assert row["ctx_max"] == (now.ctx if now.fits else 0)
        assert row["ctx_max_no_desktop"] == (alone.ctx if alone.fits else 0)
        assert row["weights_bytes"] == sum(footprint.weights_bytes(target.entry.arch, row["format"], scheme).values())
        assert row["reason"]  # every row says why it stands where it does
        assert ("perplexity" in row["reason"]) == row["fits"]
        assert ("perplexity not measured" in row["reason"]) == (row["fits"] and row["quality"] is None)


def test_what_is_asked_of_memory_is_planned_or_refused_row_by_row(capsys):
    plain = {row["name"]: row for row in fit_json(capsys, "--vram", "24")["rows"]}
    asked = {row["name"]: row for row in fit_json(capsys, "--vram", "24", "--kv", "4", "--head", "nf4")["rows"]}
    assert asked["qwen3-32b"]["ctx_max"] > 1.1 * plain["qwen3-32b"]["ctx_max"]
    narrow = [entry for entry in catalog.load_catalogue() if not placement.kv_storable(entry.arch)]
    for entry in narrow:
        assert "16 bits" in asked[entry.name]["reason"]
    (row,) = (
        each for each in fit_json(capsys, "llama-3.1-8b@nf4", "--vram", "8", "--head", "8", "--embed", "host")["rows"]
    )
    assert (row["head"], row["embed"]) == ("8", "host")
    (row,) = fit_json(capsys, "smollm2-135m@nf4", "--vram", "8", "--embed", "host", "--head", "16")["rows"]
    assert (row["fits"], row["ctx_max"]) == (False, 0)
    assert "is also its output head" in row["reason"]


@pytest.mark.parametrize(
    "arguments",
    [["--kv", "3"], ["--embed", "disk"], ["--head", "q4"], ["--ctx", "few"], ["--ctx", "0"], ["--vram", "0"]],
)
def test_wrong_values_are_usage_errors(arguments, capsys):
    assert execute(["fit", "--vram", "24", *arguments]) == ExitCode.USAGE
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def group_of(row: dict) -> int:
    if not row["fits"]:
        return 4
    return 3 if not row["runs"] else 2 if catalog.resolve(row["name"]).entry.base else 1 if row["last"] else 0


def test_the_order_is_what_an_owner_would_choose(capsys):
    """Score first; then bits, context and speed; formats that are slow, base models and what does not fit are last."""
    rows = fit_json(capsys, "--vram", "24")["rows"]
    groups = [group_of(row) for row in rows]
    assert groups == sorted(groups)
    assert {0, 1, 2, 4} == set(groups), "every entry runs in every format"
    names = [row["name"] for row in rows]
    best = [row for row in rows if group_of(row) == 0]
    assert best[0]["name"] == "qwen3.8-27b"
    assert names.index("gemma-3-27b") < names.index("qwen3-30b-a3b-2507@nf4")  # of a higher score, to be made here
    assert next(row["name"] for row in rows if row["family"] == "gemma") == "gemma-3-27b"
    order = ("qwen3.8-27b", "gemma-3-27b", "mistral-small-3.2-24b", "qwen3-32b", "mistral-small-24b", "phi-4",
             "llama-3.1-8b", "mistral-7b", "smollm2-135m")  # fmt: skip
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
    assert names.index("qwen3-32b") < names.index("qwen2.5-72b@vq2")  # 2 bits, and to be made here
    assert names.index("llama-3.1-8b") < names.index("llama-3-8b")  # 8,192 tokens at most
    by_name = {row["name"]: row for row in rows}
    assert by_name["llama-3.3-70b@vq2"]["score"] < by_name["llama-3.3-70b"]["score"] < 1320
    assert "quantized here from bf16" in by_name["llama-3.3-70b@vq2"]["reason"]
    assert names.index("llama-3.1-8b") < names.index("llama-3.1-8b@awq")  # the default format first


@pytest.mark.parametrize(
    ("vram", "first"),
    [
        ("8", "qwen3.5-9b@gguf"),
        ("12", "qwen3.5-9b@gguf"),
        ("16", "qwen3.8-27b"),
        ("24", "qwen3.8-27b"),
        ("24GB", "qwen3.8-27b"),
    ],
)
def test_one_line_stands_for_each_family(capsys, vram, first):
    assert execute(["fit", "--vram", vram]) == ExitCode.OK
    captured = capsys.readouterr()
    names = [line.split()[0] for line in captured.out.splitlines()[1:]]
    assert names[0] == first
    families = [catalog.resolve(name).entry.family for name in names]
    assert len(set(families)) == len(families) == len(read_families(ROOT / "models.toml"))
    assert "more models and formats fit (--all lists them)" in captured.err


def test_every_row_says_its_speed_when_full_and_what_it_takes_to_make_it(capsys):
    rows = {row["name"]: row for row in fit_json(capsys, "--vram", "24")["rows"]}
    for row in rows.values():
        assert (row["tok_s_full"] or 0) <= (row["tok_s"] or 0)
        assert (row["make_s"] is None) == (not row["quantized_here"])
    made = rows["llama-3.3-70b@vq2"]
    assert made["disk_bytes"] == made["download_bytes"] + made["weights_bytes"]
    assert made["make_s"] == pytest.approx(63 * 60, rel=0.02)  # on the RTX 4090 that is planned for
    assert fit_json(capsys, "llama-3.3-70b@vq2", "--gpu", "RTX 3090")["rows"][0]["make_s"] > 1.7 * made["make_s"]
    assert rows["qwen3-32b"]["disk_bytes"] == rows["qwen3-32b"]["download_bytes"]
    assert rows["smollm2-135m"]["stored_bits_per_weight"] == 5.0  # Q4_1
    assert rows["smollm2-135m"]["bits_per_weight"] == 5.0
    assert rows["smollm2-135m"]["reason"].endswith("; Q4_1")
    assert "quantized here from gguf (quantized twice)" in rows["smollm2-135m@nf4"]["reason"]
    assert "twice" not in rows["gpt-oss-20b@nf4"]["reason"]  # its experts keep their format


def test_a_card_of_another_maker_is_refused_with_the_reason(capsys):
    for name in ("RX 7900 XTX", "Arc A770", "GTX 1660"):
        assert execute(["fit", "--gpu", name]) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert "does not support" in said
        assert "compute capability 8.0 or higher" in said
    assert fit_json(capsys, "--gpu", "RTX 4060 Ti 8GB")["vram_bytes"] == 8188 * MIB
    assert fit_json(capsys, "--gpu", "RTX PRO 6000 Blackwell")["read_bytes_per_s"] == pytest.approx(1.65e12, rel=0.01)


def test_quality_is_told_where_it_was_measured(capsys):
    rows = {row["name"]: row["quality"] for row in fit_json(capsys, "smollm2-135m", "--vram", "8")["rows"]}
    assert rows["smollm2-135m@nf4"] == pytest.approx(1.232, abs=0.001)
    assert rows["smollm2-135m@vq2"] == pytest.approx(1.335, abs=0.001)
    assert {row["quality"] for row in fit_json(capsys, "llama-3.1-8b", "--vram", "8")["rows"]} == {None}


def test_memory_may_be_kept_free_and_a_format_asked_for(capsys):
    body = fit_json(capsys, "qwen3-32b", "--vram", "24", "--reserve", "1GiB", "--format", "nf4")
    (row,) = body["rows"]
    assert body["reserve_bytes"] == 2**30
    kept = memory_plan.assess(catalog.find("qwen3-32b").arch, "nf4", 24_564 * MIB - 2**30)
    assert row["ctx_max"] == row["ctx_max_no_desktop"] == kept.ctx
    assert {row["format"] for row in fit_json(capsys, "--vram", "24", "--format", "vptq")["rows"]} == {"vptq"}


def test_a_context_may_be_asked_for(capsys):
    rows = {row["name"]: row for row in fit_json(capsys, "--vram", "18", "--ctx", "40k")["rows"]}
    assert rows["qwen3-32b"]["fits"] is False
    assert "40,960 tokens of context" in rows["qwen3-32b"]["reason"]
    assert rows["qwen3-14b"]["fits"] is True
    assert rows["gemma-2-9b"]["fits"] is False  # made for 8,192


def test_the_table_has_one_row_for_a_family_and_all_for_all(capsys):
    assert execute(["fit", "--vram", "24"]) == ExitCode.OK
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split()[:5] == ["MODEL", "YEAR", "SCORE", "FORMAT", "BITS"]
    assert "DESKTOP" not in lines[0]  # it is assumed
    assert lines[1].split()[:5] == ["qwen3.8-27b", "2026", "~1416", "nf4", "4.13"]
    assert "TOK/S" in lines[0]
    assert "WHEN FULL" in lines[0]
    assert "perplexity has not been measured" in captured.err
    assert "24,564 MiB" in captured.err
    assert execute(["fit", "--vram", "24", "--desktop", "1.2", "--all"]) == ExitCode.OK
    captured = capsys.readouterr()
    assert "DESKTOP CLOSED" in captured.out.splitlines()[0]
    assert len(captured.out.splitlines()) > len(lines)
    assert "quantized here from bf16" in captured.out
    assert "slow: experts run one at a time" in captured.out


def test_the_order_that_is_said_is_the_order_that_is_shown(capsys):
    """The notes name each term of the order; with all of them counted, the rows of every group descend."""
    assert execute(["fit", "--vram", "24", "--all"]) == ExitCode.OK
    said = capsys.readouterr().err
    assert "LMArena text score (2026-01-16) minus an estimated quantization loss" in said
    terms = ("minus 20 points if the model must first be quantized here", "short context", "low speed",
             "KV cache or head", "non-default format",
             "slow formats, base models and models that do not fit come last")  # fmt: skip
    assert [term for term in terms if term not in said] == []
    assert "room only for the result and two source files" in said
    rows = fit_json(capsys, "--vram", "24")["rows"]
    free = [row for row in rows if group_of(row) == 0 and row["ctx_max"] >= 32_768 and row["tok_s"] >= 60]
    plain = [row["score"] - 20 * row["quantized_here"] for row in free]
    assert len(plain) > 20
    least = 3 + 12 + 4  # of the default, a 4-bit KV cache and an NF4 head: more than these the order does not differ by
    assert all(before >= after - least for before, after in itertools.pairwise(plain))


@pytest.mark.parametrize("size", sorted({card.gib for card in cards.CARDS} | {11}))
def test_a_size_that_cards_are_sold_by_means_such_a_card(capsys, size):
    plain = fit_json(capsys, "--vram", str(size))
    for said in (f"{size}GB", f"{size} gb", f"{size}.0GB", f"{size}G"):
        assert fit_json(capsys, "--vram", said) == plain
    assert plain["vram_bytes"] == fit_json(capsys, "--vram", f"{size}.0")["vram_bytes"]
    assert (plain["read_bytes_per_s"] is None) == (size not in cards.TYPICAL)
    assert plain["vram_bytes"] != size * 10**9


@pytest.mark.parametrize("size", ["24GiB", "25", "25GB", "21.5"])
def test_an_unknown_card_has_no_time_to_quantize(capsys, size):
    """Of a search; the time on the CPU of this machine, hundreds of hours, is not that of the card."""
    rows = fit_json(capsys, "--vram", size)["rows"]
    searched = [row for row in rows if row["format"] == "vq2" and row["quantized_here"]]
    assert len(searched) > 10
    ready = making.READY_S  # from layers that localq includes
    assert {row["make_s"] for row in searched} == {None, ready}
    assert execute(["fit", "--vram", size, "--format", "vq2", "--all"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert "TO MAKE" in lines[0]
    assert not any(re.search(r"\d\d\d h\b", line) for line in lines)


def test_no_card_quantizes_faster_than_the_one_that_was_timed(capsys):
    model = "llama-3.3-70b@vq2"
    times = {card: fit_json(capsys, model, "--gpu", card.name)["rows"][0]["make_s"] for card in cards.CARDS}
    timed = next(time for card, time in times.items() if card.name == "H100")
    assert timed == pytest.approx(1.04 * 3600, rel=0.01)  # `quantizing` of results.toml
    assert min(times.values()) == timed == next(time for card, time in times.items() if card.name == "H200")
    assert times[cards.find("RTX 3060")] > 3 * timed


def test_one_model_shows_its_ledger_in_every_format(capsys):
    assert execute(["fit", "llama-3.1-8b", "--vram", "8"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["nf4", "bf16", "aqlm", "awq", "vq2", "bcq", "squeezellm"]
    assert "KV CACHE" in lines[0]
    assert "needs" in lines[2]
    body = fit_json(capsys, "llama-3.1-8b", "--vram", "8")
    ledger = body["rows"][0]["ledger_bytes"]
    assert body["rows"][0]["kv_bits"] == 16
    assert body["rows"][0]["ctx"] * 128 * 1024 == ledger["kv_cache"]
    assert sum(ledger.values()) <= body["vram_bytes"]
    assert [row["format"] for row in fit_json(capsys, "llama-3.1-8b@nf4", "--vram", "8")["rows"]] == ["nf4"]


def test_a_cache_of_keys_in_8_and_values_in_4_bit_has_a_ledger(capsys):
    assert execute(["fit", "llama-3.1-8b@nf4", "--vram", "8", "--kv", "k8v4"]) == ExitCode.OK
    header, line = capsys.readouterr().out.splitlines()
    assert ("KV BITS" in header, "k8v4" in line) == (True, True)
    (row,) = fit_json(capsys, "llama-3.1-8b@nf4", "--vram", "8", "--kv", "k8v4")["rows"]
    a_layer = 2 * 8 * 128 * 2  # k and v in 16 bit, as prefill reads them
    assert (row["kv_bits"], row["ledger_bytes"]["kv_cache"]) == ("k8v4", row["ctx"] * (32 * 8 * (136 + 72) + a_layer))
    speeds = [fit_json(capsys, "llama-3.1-8b@nf4", "--vram", "8", "--kv", kv)["rows"][0]["tok_s"] for kv in "84"]
    assert min(speeds) <= row["tok_s"] <= max(speeds)


def test_a_folder_has_one_ledger(capsys, tmp_path):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
        "max_position_embeddings": 1024, "quantization_config": {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (row,) = fit_json(capsys, str(tmp_path), "--vram", "8")["rows"]
    assert (row["format"], row["fits"], row["ctx_max"]) == ("nf4", True, 1024)
    assert row["download_bytes"] is None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--vram", "lots"], ExitCode.USAGE),
        (["--vram", "0.2"], ExitCode.USAGE),
        (["--vram", "24", "--desktop", "-1"], ExitCode.USAGE),
        (["--vram", "24", "--ctx-size", "many"], ExitCode.USAGE),
        (["--vram", "24", "--reserve", "some"], ExitCode.USAGE),
        (["--vram", "24", "--format", "hqq"], ExitCode.USAGE),
        (["llama-3.1-8b", "--vram", "24", "--format", "vptq"], ExitCode.USAGE),
        (["--gpu", "Voodoo 2"], ExitCode.USAGE),
        (["--vram", "24", "--bandwidth", "0"], ExitCode.USAGE),
        (["--vram", "24", "--bandwidth", "inf", "--json"], ExitCode.USAGE),
        (["qwen3-8bb", "--vram", "24"], ExitCode.UNKNOWN_MODEL),
        (["someone/unheard-of", "--vram", "24", "--offline"], ExitCode.NETWORK),
    ],
)
def test_wrong_input_is_one_line_and_a_code(capsys, arguments, code):
    assert execute(["fit", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_the_card_in_this_machine_is_asked_when_none_is_named(capsys, monkeypatch):
    fake_gpu(monkeypatch, total=12_280 * MIB, free=11_000 * MIB)
    body = fit_json(capsys)
    assert (body["vram_bytes"], body["desktop_bytes"]) == (12_280 * MIB, 1280 * MIB)
    assert fit_json(capsys, "--desktop", "2")["desktop_bytes"] == 2 * 2**30
    monkeypatch.setenv("LOCALQ_DESKTOP", "1")
    assert fit_json(capsys)["desktop_bytes"] == 1280 * MIB  # measured
    assert fit_json(capsys, "--vram", "12")["desktop_bytes"] == 2**30
    monkeypatch.delenv("LOCALQ_DESKTOP")
    assert fit_json(capsys, "--vram", "12")["desktop_bytes"] == 700_000_000  # assumed, and said
    assert "less 668 MiB for the desktop (assumed; use --desktop 0" in fit_notes(capsys, "--vram", "12")
    assert "1,280 MiB used by other programs" in fit_notes(capsys)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb,0")
    assert fit_json(capsys)["vram_bytes"] == 1228 * MIB


def test_without_a_gpu_it_asks_for_the_memory(capsys, monkeypatch):
    fake_gpu(monkeypatch, total=None)
    assert execute(["fit"]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--vram 24" in captured.err


def test_it_loads_neither_torch_nor_a_network_client():
    code = (
        "import sys\nfrom localq.cli import execute\n"
        "assert execute(['fit', '--vram', '24']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'httpx', 'requests', 'localq.files.hub.fetch'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


def test_a_card_elsewhere_takes_the_setting_desktop(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    assert execute(["config", "set", "desktop", "2"]) == ExitCode.OK
    capsys.readouterr()
    assert fit_json(capsys, "--vram", "24")["desktop_bytes"] == 2 * 2**30
    assert fit_json(capsys, "--vram", "24", "--desktop", "1")["desktop_bytes"] == 2**30
    fake_gpu(monkeypatch, total=12_280 * MIB, free=11_000 * MIB)
    assert fit_json(capsys)["desktop_bytes"] == 1280 * MIB  # measured

"""`--vram`, `--kv`, `--embed`, `--head` and `--ctx`: from the command line to the message that the engine gets."""

from __future__ import annotations

import pytest

from localq import gpus
from localq.chat.open_model import load_request
from localq.cli import execute, options
from localq.drafts import MOST
from localq.errors import ExitCode, LocalqError
from localq.planner import choose
from localq.planner.footprint import MIB
from localq.planner.load_options import LoadOptions
from localq.worker import messages
from localq.worker.messages import Load


@pytest.fixture(autouse=True)
def no_own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.delenv("LOCALQ_DTYPE", raising=False)


def test_nothing_said_leaves_everything_to_the_planner():
    request = load_request("folder", "tiny", options.load_settings())
    assert request == Load("folder", LoadOptions("tiny", draft_tokens=MOST, mtp="auto"))
    assert (request.options.kv_bits, request.options.vram_bytes) == (None, None)
    assert (request.options.embed, request.options.head) == ("auto", "auto")


def test_flags_beat_the_environment_and_reach_the_engine(monkeypatch):
    monkeypatch.setenv("LOCALQ_KV", "8")
    monkeypatch.setenv("LOCALQ_VRAM", "8")
    settings = options.load_settings(vram="24", embed="host", head="nf4", ctx=4096)
    request = load_request("folder", "tiny", settings)
    assert request == Load(
        "folder",
        LoadOptions(
            "tiny",
            draft_tokens=MOST,
            mtp="auto",
            ctx=4096,
            kv_bits=8,
            vram_bytes=24_564 * MIB,
            embed="host",
            head="nf4",
        ),
    )
    assert messages.decode(messages.encode(request)) == request


def test_keys_and_values_in_different_bits_reach_the_engine(monkeypatch):
    monkeypatch.setenv("LOCALQ_KV", "k8v4")
    request = load_request("folder", "tiny", options.load_settings())
    assert request == Load("folder", LoadOptions("tiny", kv_bits="k8v4", draft_tokens=MOST, mtp="auto"))
    assert messages.decode(messages.encode(request)) == request


def test_what_stays_free_and_a_load_by_force_reach_the_engine(monkeypatch):
    monkeypatch.setenv("LOCALQ_RESERVE", "300MiB")
    assert load_request("folder", "tiny", options.load_settings(), True) == Load(
        "folder", LoadOptions("tiny", reserve_bytes=300 * MIB, force=True, draft_tokens=MOST, mtp="auto")
    )
    assert load_request("folder", "tiny", options.load_settings(reserve="1")).options.reserve_bytes == 2**30


def test_an_amount_that_is_none_is_a_usage_error():
    with pytest.raises(LocalqError, match="not a memory size") as caught:
        load_request("folder", "tiny", options.load_settings(vram="lots"))
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--kv", "5"], "auto, 16, 8, k8v4, 4"),
        (["--embed", "disk"], "auto, device, host"),
        (["--head", "q4"], "auto, 16, 8, nf4"),
        (["--ctx", "many"], "4096 or 8k"),
        (["--ctx-size", "0"], "1 or more"),
    ],
)
def test_wrong_values_are_one_line_and_exit_2(capsys, arguments, hint):
    assert execute(["chat", "smollm2-135m", *arguments]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert hint in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["chat", "run", "bench", "eval"])
def test_help_names_them(capsys, verb):
    assert execute([verb, "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert all(option in text for option in ("--vram", "--kv", "--embed", "--head", "--ctx", "--reserve", "--force"))
    assert verb in ("bench", "eval") or all(option in text for option in ("--format", "--dry-run"))


def test_what_stays_free_is_taken_from_what_is_free_and_not_from_the_budget(monkeypatch):
    card = gpus.Gpu(0, "card", "GPU-aaaa", (8, 9), 80 * 2**30, 30 * 2**30, None)
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (card,), ()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for vram, reserve, expected in (("24GiB", "1", 24), ("24GiB", "8", 22), (None, "1", 29), (None, "40", 0)):
        assert choose.budget_here(options.load_settings(vram=vram, reserve=reserve)) == expected * 2**30


def test_completion_offers_the_values():
    assert options._choices("kv")("") == ["auto", "16", "8", "k8v4", "4"]
    assert options._choices("head")("n") == ["nf4"]


def test_drafts_are_asked_for_and_can_be_turned_off(monkeypatch):
    assert load_request("folder", "tiny", options.load_settings(draft_max=3)).options.draft_tokens == 3
    monkeypatch.setenv("LOCALQ_DRAFT", "off")
    assert load_request("folder", "tiny", options.load_settings()).options == LoadOptions("tiny")

"""What takes more than 1 GB is asked about at a terminal; without one downloads start and quantizing needs --yes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import typer

from localq import gpus
from localq.chat import open_model
from localq.chat.open_options import OpenOptions
from localq.cli import agree, default_model, execute
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts
from localq.gpus import Gpu, NvmlReport
from localq.planner import open_cost, recommend
from localq.planner.consent import ConsentError, OpenCost
from localq.planner.ram import Ram
from localq.settings import Settings
from localq.tui.jobs.thread_messages import PostingWatcher
from tests.support.files import cached_models, fake_hub

MIB = 2**20


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """The shipped catalogue, an empty disk of 1 TB, 32 GiB of free RAM, no GPU, and a network that nothing may use."""
    for name in ("config", "data", "cache"):
        monkeypatch.setenv(f"LOCALQ_{name.upper()}", str(tmp_path / name))
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "probe", NvmlReport)
    monkeypatch.setattr("localq.disk.free_bytes", lambda folder: 10**12)
    monkeypatch.setattr("localq.planner.ram.free_ram", lambda dtype="auto": Ram(32 * 2**30, "float32"))


@pytest.fixture
def card(monkeypatch):
    """card(GiB, name): this machine's GPU, all of it free."""

    def put(gib: float, name: str) -> None:
        total = int(gib * 2**30)
        gpu = Gpu(0, name, "GPU-1", (8, 9), total, total, None)
        monkeypatch.setattr(gpus, "probe", lambda: NvmlReport("580", (gpu,)))

    return put


@pytest.fixture
def terminal(monkeypatch):
    """terminal(answer): a terminal whose user answers so (None: Enter); returns the questions."""
    questions: list[str] = []

    def put(answer: bool | None) -> list[str]:
        def confirm(text: str, default: bool, err: bool) -> bool:
            questions.append(text)
            return default if answer is None else answer

        for stream in ("stdin", "stderr"):
            monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
        monkeypatch.setattr(typer, "confirm", confirm)
        return questions

    return put


def cost_of(name: str) -> OpenCost:
    cost = open_cost.of(catalog.resolve(name), Settings())
    assert cost is not None
    return cost


def test_the_cost_of_a_download_and_of_a_quantization(card):
    card(24, "NVIDIA GeForce RTX 4090")
    cost = cost_of("qwen3-32b")
    assert (cost.download, cost.disk, cost.make_s, cost.is_large) == (19_211_507_712, 19_211_507_712, None, True)
    assert cost.title == "qwen3-32b: download 19.2 GB?"
    assert cost.lines()[0] == "download: 19.2 GB from unsloth/Qwen3-32B-bnb-4bit, about 26 min at 100 Mbit/s"
    made = cost_of("llama-3.3-70b@vq2")
    assert made.download == 141_107_412_992
    assert made.disk > made.download + 20e9
    assert made.make_s is not None
    assert made.title.startswith("llama-3.3-70b@vq2: download 141.1 GB and quantize (about ")
    assert made.alternative == "llama-3.3-70b@vptq (published, 21.9 GB to download)"
    assert [line.partition(":")[0] for line in made.lines()] == ["download", "quantize", "disk", "alternative"]
    assert not cost_of("qwen3-0.6b").is_large
    assert open_cost.of(catalog.resolve("qwen3-32b"), Settings(offline=True)) is None


@pytest.mark.parametrize("format", format_facts.writable())
def test_disk_for_quantizing_is_what_is_on_it_at_once(format, tmp_path):
    """A calibrated format reads the source file by file and keeps two; the others read all of it, which stays."""
    by_file = format_facts.writable()[format].made_from == "text"
    target = catalog.resolve("llama-3.3-70b@bf16")

    def cost(*, keep_source: bool) -> OpenCost:
        found = open_cost.of_quantizing(target, format, tmp_path / "out", Settings(), keep_source=keep_source)
        assert found is not None
        return found

    usual, kept = cost(keep_source=False), cost(keep_source=True)
    assert usual.download == kept.download == 141_107_412_992
    assert kept.disk > kept.download
    assert (usual.disk == kept.disk - kept.download + 10e9) == by_file
    assert (usual.disk == kept.disk) == (not by_file)
    assert len(usual.folders) == (1 if by_file else 2)


def test_what_is_here_costs_nothing():
    cached_models.put("unsloth/Qwen3-8B-bnb-4bit", fake_hub.model_files())
    assert open_cost.of(catalog.resolve("qwen3-8b"), Settings()) is None


def test_without_a_terminal_downloads_start_and_quantizing_needs_yes(capsys):
    assert agree.ask([cost_of("qwen3-32b")])
    with pytest.raises(LocalqError, match="Add --yes") as raised:
        agree.ask([cost_of("qwen3-8b@vq2")])
    assert raised.value.exit_code == ExitCode.USAGE
    assert agree.ask([cost_of("qwen3-8b@vq2")], named=True)  # the verb was asked to quantize
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("verb", [["chat", "--plain"], ["run"], ["pull"], ["bench"], ["eval"]])
def test_no_verb_quantizes_a_large_model_in_a_script_without_yes(capsys, monkeypatch, card, verb):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    card(24, "NVIDIA GeForce RTX 4090")
    prompt = ["hello"] if verb == ["run"] else []
    assert execute([*verb, "qwen3-8b@vq2", *prompt]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "localq would download 16.4 GB and quantize (about" in said
    assert "Add --yes" in said


@pytest.mark.parametrize(("answer", "started"), [(None, True), (True, True), (False, False)])
def test_a_download_is_asked_about_at_a_terminal(capsys, terminal, answer, started):
    questions = terminal(answer)
    assert agree.ask([cost_of("qwen3-32b")]) is started
    assert questions == ["qwen3-32b: download 19.2 GB?"]
    assert "disk: 19.2 GB in" in capsys.readouterr().err
    assert agree.ask([cost_of("qwen3-0.6b")])
    assert len(questions) == 1


def test_enter_does_not_begin_a_quantization(terminal):
    terminal(None)
    assert not agree.ask([cost_of("qwen3-8b@vq2")])


def test_a_user_who_declines_gets_nothing(capsys, terminal, card):
    card(24, "NVIDIA GeForce RTX 4090")
    questions = terminal(False)
    for verb in (["pull", "qwen3-8b"], ["chat", "--plain", "qwen3-8b"], ["run", "qwen3-8b", "hello"]):
        assert execute(verb) == ExitCode.FAILURE
        assert "not started" in capsys.readouterr().err
    assert len(questions) == 3
    assert execute(["pull", "qwen3-8b", "--yes"]) == ExitCode.NETWORK  # it began
    assert len(questions) == 3


def test_quantize_asks_with_the_time_it_takes(capsys, terminal, tmp_path):
    questions = terminal(False)
    out = str(tmp_path / "out")
    assert execute(["quantize", "qwen3-8b@bf16", "--format", "nf4", "--out", out]) == ExitCode.FAILURE
    assert questions == ["qwen3-8b@bf16 to nf4: download 16.4 GB and quantize (about 4 min)?"]
    assert not Path(out).exists()


def test_the_full_screen_asks_by_itself():
    posted: list[object] = []
    watcher = PostingWatcher(posted.append)
    with (
        pytest.raises(ConsentError) as raised,
        open_model.open_session("qwen3-4b-2507", Settings(), watcher, OpenOptions()),
    ):
        pytest.fail("it was opened")
    assert raised.value.cost.title == "qwen3-4b-2507: download 2.7 GB?"


# ---- no model is named


@pytest.mark.parametrize(
    ("gib", "name", "best"),
    [
        (8, "NVIDIA GeForce RTX 4060", "qwen3.5-9b@gguf"),
        (12, "NVIDIA GeForce RTX 4070", "qwen3.5-9b@gguf"),
        (16, "NVIDIA GeForce RTX 4080", "qwen3.8-27b"),
        (24, "NVIDIA GeForce RTX 4090", "qwen3.8-27b"),
        (32, "NVIDIA GeForce RTX 5090", "qwen3.8-27b"),
    ],
)
def test_the_best_published_model_for_a_card(card, gib, name, best):
    card(gib, name)
    found = recommend.best_to_fetch(Settings())
    assert found is not None
    assert found.name == best
    assert f"The best model for {name} is {best.partition('@')[0]} (" in found.why
    assert "tok/s" in found.why


def test_the_best_model_must_have_room_on_the_disk(card, monkeypatch):
    card(24, "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr("localq.disk.free_bytes", lambda folder: 5 * 10**9)
    found = recommend.best_to_fetch(Settings())
    assert found is not None
    assert found.name == "qwen3.5-4b@gguf"


def test_on_the_cpu_the_best_is_small_enough_to_be_read_in_time():
    found = recommend.best_to_fetch(Settings())
    assert found is not None
    assert catalog.find(found.name).arch.parameters < 2.5e9
    assert "this CPU" in found.why


def chosen(settings: Settings | None = None, *, named: bool = False, on_screen: bool = False) -> default_model.Opening:
    return default_model.choose(settings or Settings(), OpenOptions(), named=named, on_screen=on_screen)


def test_a_named_model_is_taken(monkeypatch):
    assert chosen(Settings(model="phi-4"), named=True).settings.model == "phi-4"
    monkeypatch.setenv("LOCALQ_MODEL", "phi-4")
    assert chosen(Settings(model="phi-4")).settings.model == "phi-4"


def test_the_best_model_on_the_disk_comes_first(card, capsys):
    card(24, "NVIDIA GeForce RTX 4090")
    cached_models.put("unsloth/Qwen3-8B-bnb-4bit", fake_hub.model_files())
    cached_models.put("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", fake_hub.model_files())
    opening = chosen()
    assert (opening.settings.model, opening.wanted.why) == ("qwen3-8b", "")
    assert "qwen3-8b is the best model on this machine" in capsys.readouterr().err


def test_without_a_model_one_question_says_size_time_and_place(card, terminal, capsys):
    card(24, "NVIDIA GeForce RTX 4090")
    questions = terminal(True)
    opening = chosen()
    assert (opening.settings.model, opening.wanted.agreed) == ("qwen3.8-27b", True)
    assert questions == ["qwen3.8-27b: download 19.4 GB?"]
    said = capsys.readouterr().err
    for words in ("There are no models on this machine yet", "at 100 Mbit/s", "disk: 19.4 GB in"):
        assert words in said
    terminal(False)
    assert chosen().settings.model == "smollm2-135m"
    assert "using smollm2-135m, the built-in model" in capsys.readouterr().err


def test_the_full_screen_gets_the_reason_for_its_question(card):
    card(24, "NVIDIA GeForce RTX 4090")
    opening = chosen(on_screen=True)
    assert opening.settings.model == "qwen3.8-27b"
    assert opening.wanted.why.startswith("There are no models on this machine yet")


def test_a_script_and_an_offline_machine_get_the_built_in_model(card, terminal):
    card(24, "NVIDIA GeForce RTX 4090")
    assert chosen().settings.model == "smollm2-135m"
    terminal(True)
    assert chosen(Settings(offline=True)).settings.model == "smollm2-135m"


def test_a_dry_run_plans_what_a_chat_would_open(card, terminal, monkeypatch):
    card(24, "NVIDIA GeForce RTX 4090")
    assert default_model.planned(Settings(), named=False) == (Settings(), None)  # a script: nobody can be asked
    opening = chosen(on_screen=True)
    planned = default_model.planned(Settings(), named=False, on_screen=True)
    assert planned == (opening.settings, opening.wanted.format)
    terminal(True)
    assert default_model.planned(Settings(), named=False)[0].model == chosen().settings.model == "qwen3.8-27b"
    assert default_model.planned(Settings(offline=True), named=False)[0].model == "smollm2-135m"
    here = recommend.Recommendation("qwen3-8b", "vq2", "it is here")
    monkeypatch.setattr(recommend, "best_here", lambda settings: here)
    settings, format = default_model.planned(Settings(), named=False)
    assert (settings.model, format) == ("qwen3-8b", "vq2") == (chosen().settings.model, chosen().wanted.format)
    assert default_model.planned(Settings(model="phi-4"), named=True) == (Settings(model="phi-4"), None)


@pytest.mark.parametrize("verb", ["chat", "run"])
def test_the_plan_has_the_format_of_the_best_model(card, capsys, monkeypatch, verb):
    card(24, "NVIDIA GeForce RTX 4090")
    here = recommend.Recommendation("qwen3-8b", "vq2", "it is here")
    monkeypatch.setattr(recommend, "best_here", lambda settings: here)
    for flags, format in (([], "vq2"), (["--format", "bf16"], "bf16")):
        execute([verb, "--dry-run", "--json", *flags])
        body = json.loads(capsys.readouterr().out)
        assert (body["name"].partition("@")[0], body["format"]) == ("qwen3-8b", format)

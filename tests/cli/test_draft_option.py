"""`--draft NAME`: told by the plan and by fit, checked and loaded by a run, measured by the bench."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from localq.chat import open_model
from localq.chat.open_options import OpenOptions
from localq.cli import execute
from localq.errors import ExitCode, LocalqError
from localq.planner import prepare
from localq.settings import Settings
from tests.support.engine.mtp_models import save_mtp
from tests.support.models.tiny_checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def no_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())


class NoEngine:
    """An engine process that is never asked."""

    def __init__(self, shared: object) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


class Watcher(open_model.Watcher):
    """Notes what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text):
        self.said.append(text)

    def agree(self, cost):
        raise AssertionError(cost)

    def fetching(self, name):
        return contextlib.nullcontext(lambda *report: None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 64, "num_hidden_layers": 1}
    other = make_checkpoint(folder / "other", **small)
    body = json.loads((other / "tokenizer.json").read_text())
    body["model"]["vocab"] |= {"th": 263, "an": 259}
    (other / "tokenizer.json").write_text(json.dumps(body))
    return {
        "large": make_checkpoint(folder / "large"), "small": make_checkpoint(folder / "small", **small),
        "other": other, "hybrid": make_checkpoint(folder / "hybrid", "qwen3_5_text"),
    }  # fmt: skip


def opened(models, monkeypatch, draft: str, watcher: Watcher):
    monkeypatch.setattr(open_model, "EngineClient", NoEngine)
    settings = Settings(draft=str(models[draft]), device="cpu")
    return open_model.open_session(str(models["large"]), settings, watcher, OpenOptions())


def test_opening_a_model_opens_its_draft_model(models, monkeypatch):
    watcher = Watcher()
    with opened(models, monkeypatch, "small", watcher) as found:
        options = found.session.request.options
        assert (options.draft_path, options.draft_name) == (str(models["small"]), "small")
        assert options.draft_tokens == 7
        assert found.session.generate_request([1], None).ask_draft_model
    assert not watcher.said


def test_a_model_that_is_no_smaller_is_taken_with_a_warning(models, monkeypatch):
    watcher = Watcher()
    with opened(models, monkeypatch, "large", watcher) as found:
        assert found.session.request.options.draft_path
    assert "is no smaller than" in watcher.said[0]


@pytest.mark.parametrize(("draft", "why"), [("other", "the tokenizer differs"), ("hybrid", "recurrent layers")])
def test_a_model_that_cannot_draft_is_refused(models, monkeypatch, draft, why):
    with pytest.raises(LocalqError, match=why) as caught, opened(models, monkeypatch, draft, Watcher()):
        pass
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_run_drafts_with_it(models, capsys):
    arguments = ["--device", "cpu", "--dtype", "float32", "--ctx", "256", "--max-tokens", "24", "--json", "-q"]
    texts = []
    for more in ([], ["--draft", str(models["large"])]):
        code = execute(["run", str(models["large"]), "hello there", *arguments, *more])
        assert code == ExitCode.OK
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0]["text"] == texts[1]["text"]
    assert texts[1]["stats"]["drafted_tokens"].get("model", 0) >= 1  # a trial: it takes as long as the model


def test_a_run_drafts_with_the_mtp_block_of_the_model(tmp_path, capsys):
    hybrid = str(save_mtp(tmp_path / "hybrid", "qwen3_5_text"))
    arguments = ["--device", "cpu", "--dtype", "float32", "--ctx", "256", "--max-tokens", "40", "--json", "-q"]
    texts = []
    for source in ("off", "mtp"):
        assert execute(["run", hybrid, "hello there", *arguments, "--draft", source]) == ExitCode.OK
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0]["text"] == texts[1]["text"]
    assert texts[0]["stats"]["drafted_tokens"] == {}
    assert texts[1]["stats"]["drafted_tokens"].get("mtp", 0) >= 1
    assert execute(["show", hybrid]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "MTP block" in shown
    assert "multi-token" not in shown


def test_a_model_without_an_mtp_block_is_refused_with_the_reason(models, monkeypatch, capsys):
    assert execute(["run", str(models["hybrid"]), "hi", "--draft", "mtp", "--device", "cpu"]) == ExitCode.USAGE
    assert "hybrid --draft mtp: the files contain no MTP block" in capsys.readouterr().err
    monkeypatch.setattr(prepare, "model_path", lambda *given, **named: pytest.fail("fetched"))
    assert execute(["run", "smollm2-135m", "hi", "--draft", "mtp"]) == ExitCode.USAGE
    assert "smollm2-135m --draft mtp: the model has no MTP block. Use --draft auto, or" in capsys.readouterr().err


def test_plans_name_the_mtp_block(capsys):
    assert execute(["chat", "qwen3.5-4b", "--device", "cpu", "--dry-run"]) in (ExitCode.OK, ExitCode.DOES_NOT_FIT)
    on_cpu = capsys.readouterr().out
    assert "\nMTP block" in on_cpu
    assert "draft weights" in on_cpu
    assert execute(["chat", "qwen3.5-4b", "--device", "cpu", "--dry-run", "--draft", "lookup"]) in (0, 3)
    assert "draft weights" not in capsys.readouterr().out
    assert execute(["chat", "qwen3.5-4b", "--vram", "24", "--dry-run"]) == ExitCode.OK
    assert "\nMTP block   used for drafting; to turn it off, use --draft lookup\n" in capsys.readouterr().out
    assert execute(["fit", "qwen3.5-4b", "--vram", "24"]) == ExitCode.OK
    assert "DRAFT WEIGHTS" in capsys.readouterr().out
    assert execute(["fit", "qwen3.5-4b", "--vram", "24", "--draft", "lookup"]) == ExitCode.OK
    assert "DRAFT WEIGHTS" not in capsys.readouterr().out


def test_the_plan_and_fit_name_it(capsys):
    draft = ["--draft", "llama-3.2-1b@nf4"]
    assert execute(["chat", "llama-3.1-8b", "--vram", "24", *draft, "--dry-run"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "\ndraft model llama-3.2-1b, nf4 (" in out
    assert "draft weights" in out
    assert execute(["fit", "llama-3.1-8b", "--vram", "24", "--draft", "llama-3.2-1b@nf4", "--json"]) == ExitCode.OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert execute(["fit", "llama-3.1-8b", "--vram", "24", "--json"]) == ExitCode.OK
    plain = json.loads(capsys.readouterr().out)["rows"]
    longer = [(row["ctx_max"], alone["ctx_max"]) for row, alone in zip(rows, plain, strict=True)]
    assert all(both <= alone for both, alone in longer)
    assert any(0 < both < alone for both, alone in longer)


@pytest.mark.parametrize(("name", "code"), [("medusa", 2), ("mtp", 2), ("nonsense", 4), ("qwen3.5-0.8b", 2)])
def test_a_wrong_name_fails_before_anything_is_fetched(monkeypatch, capsys, name, code):
    monkeypatch.setattr(prepare, "model_path", lambda *given, **named: pytest.fail("fetched"))
    assert execute(["run", "smollm2-135m", "hi", "--draft", name]) == code
    assert "draft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["--draft", "off", "--drafts"], "is not a model"), (["--draft", "smollm2-135m"], "no effect without --drafts")],
)
def test_the_bench_refuses_what_is_no_draft_model(models, capsys, arguments, why):
    assert execute(["bench", str(models["large"]), *arguments, "--device", "cpu"]) == ExitCode.USAGE
    assert why in capsys.readouterr().err

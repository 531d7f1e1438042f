"""How a model's replies are made where the user does not say: models.toml over generation_config.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types

import pytest

from localq import settings
from localq.chat import default_sampling, open_model
from localq.cli import execute
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, model_folder
from localq.sampling import Sampling
from localq.text import tokenizer
from localq.tui.dialogs import settings_form
from tests.support.chat.scripted_client import CharTokenizer

MAKER = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
ENTRY = """
[[model]]
name = "mine"
[model.settings]
{settings}
[model.arch]
model_type = "llama"
layers = 2
hidden = 64
heads = 4
kv_heads = 2
head_dim = 16
intermediate = 96
vocab = 300
tied = true
max_context = 512
[[model.source]]
format = "bf16"
repo = "me/mine"
revision = "main"
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    for name in ("MODELS", "CONFIG"):
        monkeypatch.setenv(f"LOCALQ_{name}", str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def with_settings(text: str) -> catalog.ModelEntry:
        (tmp_path / "models").write_text(ENTRY.format(settings=text))
        return catalog.find("mine")

    return with_settings


def test_the_entry_wins_over_the_maker_and_the_user_over_both(mine):
    entry = mine('temperature = 0.3\nmax_tokens = "1k"\n')
    own = default_sampling.sampling(entry, MAKER)
    assert own == Sampling(temperature=0.3, top_k=50, top_p=0.9, repeat_penalty=1.1)
    assert default_sampling.max_tokens(entry) == 1024
    assert settings.Settings(temperature=0.0).sampling(own).temperature == 0.0
    assert default_sampling.sampling(None, MAKER).temperature == 0.6
    assert default_sampling.max_tokens(None) is None


def test_the_origin_of_each_is_named(mine):
    found = default_sampling.origins(mine("top_p = 0.5"), MAKER)
    told = {name: (origin.value, origin.source) for name, origin in found.items() if origin.source != "built-in"}
    assert told == {
        "temperature": (0.6, "generation_config.json"),
        "top_k": (50, "generation_config.json"),
        "top_p": (0.5, "models.toml"),
        "repeat_penalty": (1.1, "generation_config.json"),
    }
    greedy = default_sampling.origins(None, {"temperature": 0.6, "repetition_penalty": 1.2})
    assert [name for name, each in greedy.items() if each.source != "built-in"] == ["repeat_penalty"]
    assert set(default_sampling.origins(None, None)) == {*settings.SAMPLING, "max_tokens"}


@pytest.mark.parametrize("text", ["temperature = -1", 'top_k = "x"', 'device = "cuda"', "max_tokens = 0", "seed = 1.5"])
def test_a_wrong_one_is_refused_by_its_key(mine, text):
    with pytest.raises(LocalqError, match=f"mine.settings.{text.split()[0]}") as caught:
        mine(text)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_config_show_of_a_model_names_every_winner(mine, tmp_path, capsys):
    mine("temperature = 0.3\ntop_p = 0.5")
    (tmp_path / "config").write_text("top_p = 0.8\n")
    assert execute(["config", "show", "mine", "--origin", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)["settings"]
    assert "not on this machine" in captured.err
    assert found["temperature"] == {"value": 0.3, "origin": "models.toml"}
    assert found["top_p"] == {"value": 0.8, "origin": "config.toml"}
    assert found["model"] == {"value": "mine", "origin": "argument"}
    assert found["min_p"] == {"value": 0.0, "origin": "built-in"}
    assert execute(["show", "mine"]) == 0
    assert "from models.toml  temperature 0.3, top_p 0.5\n" in capsys.readouterr().out
    assert execute(["config", "show", "smollm2-135n"]) == ExitCode.UNKNOWN_MODEL


class Client:
    """An engine that is not asked for anything."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class Watcher:
    """Who looks on."""

    def say(self, text: str) -> None: ...

    def fetching(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_a_chat_begins_with_them_and_the_settings_screen_goes_back_to_them(mine, tmp_path, monkeypatch):
    mine("temperature = 0.3\nmax_tokens = 7")
    files = types.SimpleNamespace(generation_config=MAKER)
    monkeypatch.setattr(open_model.prepare, "model_path", lambda *given, **named: tmp_path)
    monkeypatch.setattr(model_folder, "open_model", lambda path: files)
    monkeypatch.setattr(tokenizer.Tokenizer, "load", lambda files: CharTokenizer())
    monkeypatch.setattr(open_model, "EngineClient", Client)
    own = Sampling(temperature=0.3, top_k=50, top_p=0.9, repeat_penalty=1.1)
    with open_model.open_session("mine", settings.Settings(top_p=0.5, device="cpu"), Watcher()) as opened:
        assert opened.session.sampling == dataclasses.replace(own, top_p=0.5)
        assert opened.session.max_tokens == 7
        assert settings_form.own_defaults(opened.session) == own
    with open_model.open_session("mine", settings.Settings(max_tokens=9, device="cpu"), Watcher()) as opened:
        assert opened.session.max_tokens == 9

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


SAMPLED = Sampling(temperature=1.0, top_k=50)


@pytest.mark.parametrize(
    ("stated", "read", "note"),
    [
        ({"top_k": -1}, {"top_k": 0}, "top_k=-1 means off"),
        ({"top_k": 0}, {"top_k": 0}, None),
        ({"top_k": 40.0}, {"top_k": 40}, None),
        ({"top_k": 2.5}, {}, "top_k=2.5 is ignored (allowed: 0 or more)"),
        ({"top_k": [5]}, {}, "top_k=[5] is ignored"),
        ({"top_k": None, "top_p": None, "temperature": None}, {}, None),
        ({"top_p": 0.0}, {"temperature": 0.0}, "top_p=0.0 keeps only the most likely token (greedy)"),
        ({"top_p": 0, "temperature": 0.7}, {"temperature": 0.0}, "greedy"),
        ({"top_p": 1.0}, {"top_p": 1.0}, None),
        ({"top_p": 1.5}, {}, "top_p=1.5 is ignored"),
        ({"top_p": -0.5}, {}, "top_p=-0.5 is ignored"),
        ({"top_p": 10**400}, {}, "top_p=1000"),
        ({"min_p": 0}, {"min_p": 0}, None),
        ({"min_p": 1.0}, {}, "min_p=1.0 is ignored"),
        ({"min_p": True}, {}, "min_p=True is ignored"),
        ({"temperature": 0}, {"temperature": 0}, None),
        ({"temperature": "0.6"}, {}, "temperature=0.6 is ignored (allowed: "),
        ({"temperature": -1}, {}, "temperature=-1 is ignored"),
        ({"temperature": float("nan")}, {}, "temperature=nan is ignored"),
        ({"repetition_penalty": 0.0}, {}, "repetition_penalty=0.0 is ignored"),
        ({"repetition_penalty": {"a": 1}}, {}, "repetition_penalty={'a': 1} is ignored"),
        ({"typical_p": -7, "num_beams": "x"}, {}, None),
    ],
)
def test_no_default_of_the_maker_makes_a_sound_model_unusable(stated, read, note):
    config = {"do_sample": True, **stated}
    assert default_sampling.sampling(None, config) == dataclasses.replace(SAMPLED, **read)
    notes = default_sampling.notes(config)
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]
    sources = default_sampling.origins(None, config)
    penalty = sources["repeat_penalty"]
    assert (penalty.source, penalty.value) == ("built-in", 1.0)


@pytest.mark.parametrize(("stated", "sampled"), [(1, True), (0, False), ("true", False), (None, False), (2, False)])
def test_do_sample_in_other_spellings(stated, sampled):
    config = {"do_sample": stated, "temperature": 0.6}
    assert default_sampling.sampling(None, config).greedy is not sampled
    assert bool(default_sampling.notes(config)) is (stated in ("true", 2))


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

    def __init__(self, shared: object) -> None: ...
    def start(self) -> None: ...
    def close(self) -> None: ...


class Watcher:
    """Who looks on."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def agree(self, cost: object) -> bool:
        return True

    def fetching(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_a_chat_begins_with_them_and_the_settings_screen_goes_back_to_them(mine, tmp_path, monkeypatch):
    mine("temperature = 0.3\nmax_tokens = 7")
    files = types.SimpleNamespace(generation_config={**MAKER, "min_p": -1})
    monkeypatch.setattr(open_model.prepare, "model_path", lambda *given, **named: tmp_path)
    monkeypatch.setattr(model_folder, "open_model", lambda path: files)
    monkeypatch.setattr(tokenizer.Tokenizer, "load", lambda files: CharTokenizer())
    monkeypatch.setattr(open_model, "EngineClient", Client)
    own = Sampling(temperature=0.3, top_k=50, top_p=0.9, repeat_penalty=1.1)
    watcher = Watcher()
    with open_model.open_session("mine", settings.Settings(top_p=0.5, device="cpu"), watcher) as opened:
        assert opened.session.sampling == dataclasses.replace(own, top_p=0.5)
        assert opened.session.max_tokens == 7
        assert settings_form.own_defaults(opened.session) == own
        assert [line.partition(" (")[0] for line in watcher.said] == ["the model's default min_p=-1 is ignored"]
    with open_model.open_session("mine", settings.Settings(max_tokens=9, device="cpu"), Watcher()) as opened:
        assert opened.session.max_tokens == 9

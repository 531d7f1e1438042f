"""DRY and XTC on their way from flags, settings and saved conversations to the engine; what breaks a repetition."""

from __future__ import annotations

import dataclasses
import json
import sqlite3

import pytest

from localq.chat import commands, open_conversation, open_model
from localq.chat.history.record import ChatSettings
from localq.chat.history.store import ConversationStore
from localq.chat.reply import Reply
from localq.chat.session import ChatSession
from localq.cli import execute
from localq.cli.line.session import TerminalWatcher
from localq.errors import ExitCode
from localq.planner import prepare
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from localq.settings import DESCRIPTIONS, Settings
from localq.text.tokenizer import BREAKERS, Tokenizer
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.files import fake_hub
from tests.support.text import tiny_tokenizers

NEW = {
    "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 64, "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_config(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))


def test_what_has_no_effect_because_the_likeliest_token_is_taken_is_told():
    sampling = Sampling(top_p=0.9, xtc_probability=0.5)
    assert sampling.greedy_warning(["top_p", "top_k", "xtc_probability"]).startswith(
        "top_p, xtc_probability have no effect at temperature 0"
    )
    assert sampling.greedy_warning(["seed", "min_p", "dry_multiplier"]) == ""
    assert dataclasses.replace(sampling, temperature=0.1).greedy_warning(["top_p"]) == ""
    session = ChatSession(ScriptedClient(), Load("path", LoadOptions("tiny")), CharTokenizer())
    told = commands.COMMANDS["/set"](session, "xtc_probability 0.5", None)
    assert told.splitlines()[0] == "xtc_probability = 0.5"
    assert "no effect" in told.splitlines()[1]
    assert "\n" not in commands.COMMANDS["/set"](session, "temperature 0.7", None)
    assert "\n" not in commands.COMMANDS["/set"](session, "xtc_probability 0.4", None)


@pytest.mark.parametrize(("given", "told"), [({}, []), ({"top_k": 5, "temperature": 0.7}, []), ({"top_k": 5}, [1])])
def test_a_setting_without_effect_is_told_when_a_model_is_opened(tmp_path, monkeypatch, given, told):
    for name, content in fake_hub.model_files().items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(Tokenizer, "load", lambda files: CharTokenizer())
    monkeypatch.setattr(open_model.EngineClient, "start", lambda client: None)
    monkeypatch.setattr(prepare, "model_path", lambda *asked: tmp_path)
    watcher = TerminalWatcher(True)
    said: list[str] = []
    monkeypatch.setattr(watcher, "say", said.append)
    with open_model.open_session(str(tmp_path), Settings(device="cpu", **given), watcher):
        assert [1 for line in said if line.startswith("top_k has no effect")] == told


def test_every_sampling_setting_is_a_setting_and_can_be_set_in_a_chat():
    names = {field.name for field in dataclasses.fields(Sampling)}
    assert set(NEW) < names <= set(DESCRIPTIONS)
    session = ChatSession(ScriptedClient(), Load("path", LoadOptions("tiny")), CharTokenizer())
    for name, value in NEW.items():
        told = commands.COMMANDS["/set"](session, f"{name} {value}", None)
        assert told.splitlines()[0] == f"{name} = {value}"
    assert session.sampling == Sampling(**NEW)


@pytest.mark.parametrize("verb", [["run", "smollm2-135m", "hi"], ["chat", "smollm2-135m"]])
@pytest.mark.parametrize("name", [name for name in NEW if name != "dry_penalty_last_n"])
def test_flags_reach_the_limits_of_sampling(verb, name, capsys):
    flag = "--" + name.replace("_", "-")
    assert execute([*verb, flag, "1000"]) == ExitCode.USAGE
    assert name in capsys.readouterr().err


def test_they_are_kept_with_a_conversation(tmp_path):
    store = ConversationStore(tmp_path / "sessions.db")
    tokenizer = CharTokenizer()
    tokenizer.breaker_ids = frozenset({10})
    session = ChatSession(
        ScriptedClient(["yes"]), Load("path", LoadOptions("tiny")), tokenizer, Sampling(**NEW), store=store
    )
    list(session.ask("is it?"))
    record = store.find(None)
    assert record.settings.sampling == Sampling(**NEW)
    assert open_conversation.resumed_settings(record, Settings(), {"xtc_threshold": 0.3}).sampling(
        Sampling()
    ) == Sampling(**NEW | {"xtc_threshold": 0.3})


def test_a_conversation_saved_before_they_were_still_loads(tmp_path):
    path = tmp_path / "sessions.db"
    store = ConversationStore(path)
    session = ChatSession(ScriptedClient(["yes"]), Load("path", LoadOptions("tiny")), CharTokenizer(), store=store)
    list(session.ask("is it?"))
    old = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "repeat_penalty": 1.1, "seed": 3}
    with sqlite3.connect(path) as database:
        database.execute(
            "UPDATE sessions SET settings = ?", [json.dumps({"sampling": old, "max_tokens": 9, "stop": []})]
        )
    assert ConversationStore(path).find(None).settings == ChatSettings(Sampling(**old), 9)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(xtc_probability=0.5, temperature=1.0)])
def test_breakers_are_asked_for_only_where_dry_is_on(sampling):
    client = ScriptedClient(["a"], ["b"])
    tokenizer = CharTokenizer()  # which has none
    session = ChatSession(client, Load("path", LoadOptions("tiny")), tokenizer, sampling)
    assert isinstance(list(session.ask("x"))[-1], Reply)
    assert client.generated[-1].breaker_ids == []
    tokenizer.breaker_ids = frozenset({58, 10})
    session.sampling = dataclasses.replace(sampling, dry_multiplier=0.8)
    list(session.ask("y"))
    assert client.generated[-1].breaker_ids == [10, 58]


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "unigram"])
def test_breakers_are_all_tokens_with_a_breaker_in_them_and_the_special_ones(kind):
    backend = getattr(tiny_tokenizers, kind)()
    tokenizer = Tokenizer(backend, {}, None, frozenset())
    found = tokenizer.breaker_ids
    assert tokenizer.breaker_ids is found  # worked out once
    assert tokenizer.skipped_ids < found
    for text in ("a\nb", 'he said "no"', "at 10:45", "x ** 2"):
        ids = tokenizer.encode(text)
        breaking = "".join(backend.decode([id], skip_special_tokens=False) for id in ids if id in found)
        letters = backend.decode([id for id in ids if id not in found], skip_special_tokens=False)
        assert any(part in breaking for part in BREAKERS)
        assert not any(part in letters for part in BREAKERS)
    assert not found & set(tokenizer.encode("garden"))


def test_ids_that_the_model_does_not_have_are_no_breakers():
    backend = tiny_tokenizers.byte_level()
    every = Tokenizer(backend, {}, None, frozenset()).breaker_ids
    ordinary = sorted(every - Tokenizer(backend, {}, None, frozenset()).skipped_ids)
    cut = Tokenizer(backend, {}, None, frozenset(), rows=ordinary[-1])
    assert every - cut.breaker_ids == {ordinary[-1]}

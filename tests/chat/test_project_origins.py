"""What a project's file has decided is known as long as it counts: in the session, saved, resumed, exported."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import types

import pytest

from localq import settings
from localq.chat import commands, open_conversation
from localq.chat.history.record import ChatSettings, Record
from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import Start
from localq.sampling import Sampling
from localq.settings import SAMPLING, Origin, Settings
from tests.support.chat.scripted_client import session_over

PATH = "/clone/localq.toml"
# A value of each setting that a project may set, and another that the user sets afterwards
VALUES = {
    "model": ("planted", "other"), "system": ("PLANTED", "mine"), "ctx": (512, 1024), "kv": ("8", "4"),
    "head": ("8", "16"), "think": ("on", "off"), "max_tokens": (7, 8), "temperature": (0.5, 0.6), "top_k": (3, 4),
    "top_p": (0.5, 0.6), "min_p": (0.1, 0.2), "repeat_penalty": (1.1, 1.2), "dry_multiplier": (0.8, 0.9),
    "dry_base": (2.0, 3.0), "dry_allowed_length": (3, 4), "dry_penalty_last_n": (10, 20), "xtc_probability": (0.1, 0.2),
    "xtc_threshold": (0.2, 0.3), "seed": (3, 4), "think_budget": (64, 128),
    "draft": ("lookup", "off"), "draft_max": (3, 5),
}  # fmt: skip
OF_LOAD = {
    "ctx",
    "kv",
    "head",
    "draft",
    "draft_max",
}  # not of the conversation: they count as long as the model is open


def test_every_setting_of_a_project_is_tried():
    assert set(VALUES) == {*settings.PROJECT_MAY_SET, *SAMPLING}


@pytest.fixture
def store(tmp_path) -> ConversationStore:
    return ConversationStore(tmp_path / "sessions.db")


def chosen(place: int, *names: str) -> Settings:
    return Settings(**{name: VALUES[name][place] for name in names or VALUES})


def planted(*names: str) -> dict[str, Origin]:
    return {name: Origin(VALUES[name][0], PATH) for name in names or VALUES}


def started(store, settings: Settings, start: Start):
    """A session as `open_model` makes it with these settings."""
    session = session_over(["hi"], ["hi"], ["hi"], store=store)
    session.sampling, session.max_tokens = settings.sampling(Sampling()), settings.max_tokens
    session.system, session.think, session.think_budget = settings.system, settings.think, settings.think_budget
    session.record.model, session.draft, session.draft_max = settings.model, settings.draft, settings.draft_max
    start.attach(session)
    return session


def keep(session) -> None:
    session.conversation.add_user("hello", [])
    session.save()


def change(session, name: str, value: object) -> None:
    if name in SAMPLING:
        session.sampling = dataclasses.replace(session.sampling, **{name: value})
    else:
        setattr(session, name, value)


@pytest.mark.parametrize("name", sorted(set(VALUES) - OF_LOAD - {"model"}))
def test_a_setting_counts_until_it_is_changed(store, name):
    session = started(store, chosen(0), Start(store=store, origins=planted()))
    assert session.decided == dict.fromkeys(VALUES, PATH)
    change(session, name, VALUES[name][1])
    assert session.decided == dict.fromkeys(set(VALUES) - {name}, PATH)
    change(session, name, VALUES[name][0])
    assert name in session.decided


def test_another_model_is_the_users_choice():
    assert open_conversation.without_model(planted()) == planted(*(set(VALUES) - {"model"}))


@pytest.mark.parametrize("name", sorted(set(VALUES) - OF_LOAD))
def test_the_origin_is_saved_and_counts_in_another_folder(store, name):
    session = started(store, chosen(0, name), Start(store=store, origins=planted(name)))
    keep(session)
    record = store.find(None)
    assert record.settings.origins == {name: PATH}
    now = open_conversation.resumed_settings(record, Settings(), {})
    assert open_conversation.resumed_origins(record, now, {}) == planted(name)
    again = started(store, now, open_conversation.start(record, now, None, print, origins=planted(name)))
    assert again.decided == {name: PATH}
    changed = now.replace(**{name: VALUES[name][1]})  # a flag of the one who resumes it
    assert open_conversation.resumed_origins(record, changed, {}) == {}


def test_what_the_user_has_changed_is_not_saved_with_an_origin(store):
    session = started(store, chosen(0), Start(store=store, origins=planted()))
    session.system = "mine"
    keep(session)
    assert store.find(None).settings.origins == dict.fromkeys(set(VALUES) - OF_LOAD - {"system"}, PATH)


def test_of_this_folder_counts_only_what_the_conversation_has_not_saved(store):
    session = started(store, Settings(), Start(store=store))
    keep(session)
    record = store.find(None)
    settings = open_conversation.resumed_settings(record, chosen(0, "system", "top_k", "ctx"), {})
    assert open_conversation.resumed_origins(record, settings, planted("system", "top_k", "ctx")) == planted("ctx")


def test_origins_go_along_between_conversations(store):
    names = ("system", "top_k")
    session = started(store, chosen(0, *names), Start(store=store, origins=planted(*names)))
    keep(session)
    host = types.SimpleNamespace()
    assert commands.COMMANDS["/new"](session, "", host) == f"new conversation\n(system, top_k: set by {PATH})"
    assert session.decided == dict.fromkeys(names, PATH)
    session.system = "mine"
    change(session, "top_k", 9)
    keep(session)
    assert session.decided == {}
    assert f"(system, top_k: set by {PATH})" in commands.COMMANDS["/resume"](session, "1", host)
    assert session.decided == dict.fromkeys(names, PATH)
    assert PATH not in commands.COMMANDS["/resume"](session, "2", host)
    assert session.decided == {}


@pytest.mark.parametrize("is_saved", [True, False])
def test_commands_and_exports_name_the_origin(store, is_saved):
    store = store if is_saved else None
    session = started(store, chosen(0, "system", "top_k"), Start(store=store, origins=planted("system", "top_k")))
    keep(session)
    host = types.SimpleNamespace(show=lambda text, remark: f"{text}\n{remark}")
    assert commands.COMMANDS["/system"](session, "", host) == f"system prompt: PLANTED\n(system: set by {PATH})"
    assert f"(system: set by {PATH})" in commands.COMMANDS["/show"](session, "prompt", host)
    assert f"(system, top_k: set by {PATH})" in commands.COMMANDS["/show"](session, "params", host)
    assert f"(Set by {PATH})" in commands.COMMANDS["/export"](session, "md", host)
    exported = commands.COMMANDS["/export"](session, "json", host).rpartition("\n")[0]
    assert json.loads(exported)["settings"]["origins"] == {"system": PATH, "top_k": PATH}
    assert commands.COMMANDS["/system"](session, "mine", host) == "system prompt: mine"
    assert PATH not in commands.COMMANDS["/show"](session, "prompt", host)


def test_a_conversation_of_an_earlier_version_has_no_origins(store):
    session = started(store, Settings(), Start(store=store))
    keep(session)
    with sqlite3.connect(store.path) as db:
        (text,) = db.execute("SELECT settings FROM sessions").fetchone()
        body = json.loads(text)
        del body["origins"]
        db.execute("UPDATE sessions SET settings = ?", (json.dumps(body),))
    assert store.find(None).origins() == {}
    assert Record().origins() == {}
    assert ChatSettings.from_dict({**body, "origins": {"unknown": "x"}}).origins == {"unknown": "x"}

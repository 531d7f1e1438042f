"""Settings on a screen: applied at once to the running conversation, or not at all where one is wrong; kept on wish."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input, Select, Static, TextArea

from localq import settings
from localq.chat.session import ChatSession
from localq.planner.load_options import LoadOptions
from localq.sampling import LIMITS, Sampling
from localq.settings import Settings
from localq.tui.dialogs import settings_form
from localq.tui.dialogs.settings_screen import SettingsScreen
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.files import fake_hub
from tests.support.tui.tui_layout import assert_sound
from tests.support.tui.tui_pilot import drive, screen_text, until

Script = Callable[[Pilot[Any]], Awaitable[None]]
OWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40}


class Host(App[Any]):
    def __init__(self, session: ChatSession | None, chosen: Settings, decided: dict[str, str] | None = None) -> None:
        super().__init__()
        self.first, self.results = SettingsScreen(session, chosen, decided), list[Any]()

    def on_mount(self) -> None:
        self.push_screen(self.first, self.results.append)

    def set(self, name: str, text: str) -> None:
        field = self.first.query_one(f"#{name}")
        if isinstance(field, TextArea):
            field.text = text
        elif isinstance(field, Select | Input):
            field.value = text


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path / "config.toml"


@pytest.fixture
def session(tmp_path) -> ChatSession:
    folder = tmp_path / "model"
    folder.mkdir()
    files = {**fake_hub.model_files(), "generation_config.json": json.dumps(OWN).encode()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    own = Sampling.from_generation_config(OWN)
    return ChatSession(
        ScriptedClient(["hi"]), Load(str(folder), LoadOptions("tiny")), CharTokenizer(), own, 100, stop_strings=("###",)
    )


def driven(host: Host, script: Script, size: tuple[int, int] = (80, 24)) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "temperature" in screen_text(host))
        await script(pilot)

    drive(host, run, size=size)


def about(host: Host) -> str:
    return str(host.first.query_one("#about", Static).content)


def wrong(host: Host, name: str) -> str:
    shown = host.first.query_one(f"#wrong-{name}", Static)
    return str(shown.content) if shown.display else ""


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 12)])
def test_limits_and_the_models_own_values_are_told_and_all_can_be_reached(session, size):
    host = Host(session, Settings())

    async def script(pilot: Pilot[Any]) -> None:
        headings = [str(each.content) for each in host.first.query(".heading").results(Static)]
        assert headings == list(settings_form.NAMES)
        assert len(headings) == len(LIMITS) + 6
        start = "temperature: 0 to 100; sampling temperature; 0 = greedy, unset = the model's default"
        assert about(host) == f"{start}; model default: 0.6"
        assert host.first.query_one("#temperature", Input).value == ""
        assert host.first.query_one("#max_tokens", Input).value == "100"
        assert host.first.query_one("#stop", TextArea).text == "###"
        assert_sound(host.screen)
        for _ in range(len(LIMITS) + 5):
            await pilot.press("tab")
        assert host.focused is host.first.query_one("#ui")
        assert about(host).startswith("ui: interface of")
        host.set("top_p", "7")
        await pilot.pause()
        assert_sound(host.screen)

    driven(host, script, size)


def test_a_field_is_seen_with_its_heading_and_its_error(session):
    host = Host(session, Settings())

    async def script(pilot: Pilot[Any]) -> None:
        for key, times in (("tab", 9), ("shift+tab", 9)):
            for _ in range(times):
                name = host.focused.id
                assert host.screen.can_view_entire(host.focused), name
                assert host.screen.can_view_entire(host.first.query_one(f"#heading-{name}")), name
                await pilot.press(key)
                await pilot.pause()
        host.first.query_one("#seed").focus()
        await pilot.pause()
        await pilot.press("x")
        await until(pilot, lambda: "! 'x' in this field" in screen_text(host))

    driven(host, script)


def test_what_is_applied_counts_from_the_next_reply(session):
    host = Host(session, Settings())

    async def script(pilot: Pilot[Any]) -> None:
        assert isinstance(host.focused, Input)
        await pilot.press(*"1.2")
        host.set("seed", "7")
        host.set("max_tokens", "2k")
        host.set("think_budget", "0")
        host.set("stop", "END\n\\n\\nUser:")
        host.set("system", "Be kind.\nBe short.")
        host.set("theme", "nord")
        await pilot.pause()
        assert session.sampling.temperature == 0.6  # not yet
        await pilot.press("ctrl+s")
        await until(pilot, lambda: host.results)
        assert host.theme == "nord"

    driven(host, script)
    assert (session.sampling.temperature, session.sampling.top_p, session.sampling.seed) == (1.2, 0.9, 7)
    assert (session.max_tokens, session.stop_strings) == (2048, ("END", "\n\nUser:"))
    assert session.think_budget == 0
    assert session.system == "Be kind.\nBe short."
    assert host.results[0].theme == "nord"
    assert list(session.ask("hello"))[-1].text == "hi"
    assert session.client.generated[0].sampling.temperature == 1.2


def test_an_emptied_field_is_the_models_own_again(session):
    session.sampling, session.think_budget = Sampling(temperature=1.5, top_k=3, top_p=0.9), 512
    host = Host(session, Settings())

    async def script(pilot: Pilot[Any]) -> None:
        assert host.first.query_one("#temperature", Input).value == "1.5"
        assert host.first.query_one("#think_budget", Input).value == "512"
        host.set("temperature", "")
        host.set("max_tokens", "")
        host.set("think_budget", "")
        await pilot.click("#apply")
        await until(pilot, lambda: host.results)

    driven(host, script)
    assert (session.sampling.temperature, session.sampling.top_k, session.max_tokens) == (0.6, 3, None)
    assert session.think_budget is None


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("temperature", "101", "101.0 is out of range. Allowed: 0 to 100."),
        ("temperature", "warm", "'warm' in this field is not a number"),
        ("temperature", "nan", "nan is out of range"),
        ("top_p", "0", "0.0 is out of range. Allowed: above 0 and at most 1."),
        ("top_k", "1.5", "is not a whole number"),
        ("seed", "-1", "-1 is out of range"),
        ("max_tokens", "0", "0 is too small"),
        ("think_budget", "-1", "-1 is too small"),
        ("stop", "\n".join("abcdefghijklmnopq"), "too many stop strings (17)"),
    ],
)
def test_what_is_wrong_is_said_beside_it_and_nothing_is_applied(session, name, text, why):
    host, before = Host(session, Settings()), session.sampling

    async def script(pilot: Pilot[Any]) -> None:
        host.set("min_p", "0.1")
        host.set(name, text)
        await until(pilot, lambda: why in wrong(host, name))
        assert [each for each in settings_form.NAMES if wrong(host, each)] == [name]
        await pilot.press("ctrl+s")
        assert host.results == []
        assert f"Not applied: {name} is invalid" in screen_text(host)
        assert host.focused is host.first.query_one(f"#{name}")
        await pilot.press("f6")
        await pilot.press("escape")
        await until(pilot, lambda: host.results)

    driven(host, script)
    assert host.results == [None]
    assert session.sampling == before
    assert settings.read_config() == {}


@pytest.mark.parametrize("by_mouse", [True, False])
def test_saving_as_default_writes_what_differs(session, config, by_mouse):
    config.write_text("# mine\ntop_p = 0.9\nseed = 3 # lucky\n")
    host = Host(session, settings.load({}))

    async def script(pilot: Pilot[Any]) -> None:
        assert host.first.query_one("#top_p", Input).value == "0.9"  # chosen, though it is the model's own too
        host.set("temperature", "0.8")
        host.set("ui", "plain")
        await pilot.pause()
        await (pilot.click("#keep") if by_mouse else pilot.press("f6"))
        await until(pilot, lambda: "Saved temperature" in screen_text(host))
        await pilot.press("f6")
        await until(pilot, lambda: "No changes to save" in screen_text(host))
        await pilot.press("escape")
        await until(pilot, lambda: host.results)

    driven(host, script)
    # The session has no seed any more, and its top_k is the model's own.
    assert settings.read_config() == {"top_p": 0.9, "temperature": 0.8, "max_tokens": 100, "ui": "plain"}
    assert "# mine" in config.read_text()
    assert session.sampling.temperature == 0.8
    assert (host.results[0].temperature, host.results[0].seed) == (0.8, None)


def test_a_file_that_cannot_be_written_is_said(session, config):
    config.write_text("this is no = = toml")
    host = Host(session, Settings())

    async def script(pilot: Pilot[Any]) -> None:
        host.set("temperature", "0.8")
        await pilot.press("f6")
        await until(pilot, lambda: "cannot be read" in " ".join(screen_text(host).replace("│", " ").split()))
        assert host.results == []

    driven(host, script)


def test_its_keys_can_be_set_and_are_told_as_they_are(session):
    host = Host(session, Settings())
    host.set_keymap({"settings_apply": "f9"})

    async def script(pilot: Pilot[Any]) -> None:
        assert "Apply F9" in screen_text(host)
        host.set("temperature", "0.8")
        await pilot.press("ctrl+s")
        assert host.results == []
        await pilot.press("f9")
        await until(pilot, lambda: host.results)

    driven(host, script)
    assert session.sampling.temperature == 0.8


def test_without_a_model_there_are_the_users_own_values():
    host = Host(None, Settings(temperature=0.3, system="Sys\x1b[31mtem"))

    async def script(pilot: Pilot[Any]) -> None:
        assert host.first.query_one("#temperature", Input).value == "0.3"
        assert host.first.query_one("#system", TextArea).text == "Sys[31mtem"
        host.set("theme", "ansi-dark")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: host.results)

    driven(host, script)
    assert host.results[0].theme == "ansi-dark"


def test_what_a_project_has_decided_is_named_and_not_saved_for_other_folders(session, config):
    config.write_text('system = "mine"\ntop_k = 9\n')
    session.system, session.sampling = "PLANTED", Sampling(0.6, top_k=3, top_p=0.5)
    path = "/clone/localq.toml"
    host = Host(session, Settings(), dict.fromkeys(("system", "top_k", "top_p", "ctx"), path))

    async def script(pilot: Pilot[Any]) -> None:
        host.first.query_one("#system").focus()
        await until(pilot, lambda: about(host).endswith(f"; set by {path}"))
        host.first.query_one("#seed").focus()
        await until(pilot, lambda: about(host).startswith("seed") and "set by" not in about(host))
        host.set("seed", "7")
        host.set("top_p", "0.8")  # the user's own by now
        await pilot.press("f6")
        await until(
            pilot, lambda: "Saved top_p, seed, max_tokens" in str(host.first.query_one("#notice", Static).content)
        )
        assert "; not saved: system, top_k (set by localq.toml)" in str(host.first.query_one("#notice", Static).content)

    driven(host, script, size=(200, 60))
    assert settings.read_config() == {"system": "mine", "top_k": 9, "seed": 7, "top_p": 0.8, "max_tokens": 100}

"""Texts that say what is here and what to do next: the built-in model, a prompt taken for a model, a conversion."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from localq import gpus, places
from localq.chat.open_options import OpenOptions
from localq.cli import agree, default_model, execute
from localq.errors import ExitCode
from localq.files.local_models import LocalModel
from localq.files.model_folder import LOCK_NAME, STATE_NAME, UNFINISHED
from localq.planner import recommend
from localq.planner.consent import OpenCost
from localq.settings import Settings


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """No GPU, an empty cache and data folder, and a disk with room."""
    monkeypatch.setattr(gpus, "probe", gpus.NvmlReport)
    monkeypatch.setattr("localq.disk.free_bytes", lambda folder: 10**12)
    for name, folder in (("HF_HUB_CACHE", "hub"), ("LOCALQ_DATA", "data"), ("LOCALQ_CONFIG", "config.toml")):
        monkeypatch.setenv(name, str(tmp_path / folder))


def model(name: str, where: str, *, complete: bool = True) -> LocalModel:
    return LocalModel(name, "gguf", Path("/models") / name, 10**8, where, complete, 0.0)


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ([], "There are no models on this machine yet."),
        ([model("part", "hub", complete=False)], "There are no models on this machine yet."),
        (
            [model("smollm2-135m", "embedded")],
            "The only model on this machine is smollm2-135m, the small built-in one.",
        ),
        ([model("no-chat", "hub"), model("smollm2-135m", "embedded")], "No chat model on this machine"),
    ],
    ids=["none", "incomplete", "built-in", "unfit"],
)
def test_the_reason_for_a_download_is_what_is_on_the_disk(monkeypatch, here, said):
    monkeypatch.setattr(recommend.local_models, "list_local", lambda: here)
    found = recommend.best_to_fetch(Settings())
    assert found is not None
    assert found.why.startswith(said)
    assert "The best model for this CPU is" in found.why


def test_the_question_offers_the_built_in_model(monkeypatch, capsys):
    asked: list[OpenCost] = []

    def ask(costs: list[OpenCost]) -> bool:
        asked.extend(costs)
        return False

    monkeypatch.setattr(agree, "ask", ask)
    monkeypatch.setattr(default_model, "_may_fetch", lambda settings, on_screen: True)
    opening = default_model.choose(Settings(), OpenOptions(), named=False, on_screen=False)
    assert "alternative: smollm2-135m, the small built-in model (answer no to use it)" in asked[0].lines()
    assert opening.settings.model == "smollm2-135m"


@pytest.mark.parametrize("arguments", [["doctor"], ["ls"], ["verify"], ["show", "smollm2-135m"]])
def test_the_built_in_model_comes_with_localq(capsys, arguments):
    execute(arguments)
    said = " ".join("".join(capsys.readouterr()).split())
    assert "is built into localq" in said
    assert "pull smollm2-135m" not in said


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_a_prompt_taken_for_a_model_is_answered_with_how_to_send_one(monkeypatch, capsys, verb):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for more in ([], ["--dry-run"]):
        assert execute([verb, "what is a prime", *more]) == ExitCode.UNKNOWN_MODEL
        assert f'To send a prompt, use `localq {verb} -p "PROMPT"`.' in capsys.readouterr().err
        assert execute([verb, "-m", "what is a prime", *more]) == ExitCode.UNKNOWN_MODEL
        assert "To send a prompt" not in capsys.readouterr().err


@pytest.mark.parametrize("left", [STATE_NAME, LOCK_NAME, f"{STATE_NAME}.part"])
@pytest.mark.parametrize("arguments", [["show"], ["run", "-p", "hi", "-m"], ["chat", "--plain", "-p", "hi"]])
def test_an_unfinished_conversion_is_named_as_one(tmp_path, monkeypatch, capsys, left, arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert {STATE_NAME, LOCK_NAME} == set(UNFINISHED)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / left).write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert execute([*arguments, str(folder)]) == ExitCode.BAD_FILE
    said = capsys.readouterr().err
    assert "the conversion is unfinished. Run the same `localq quantize` command again" in said
    (folder / left).unlink()
    execute([*arguments, str(folder)])
    assert "config.json not found" in capsys.readouterr().err


def test_the_built_in_model_lies_where_these_tests_look(tmp_path):
    assert tmp_path in places.embedded_dir().parents

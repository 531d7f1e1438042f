"""Models of ollama and LM Studio on the command line: listed, planned, verified and chatted with, never changed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from localq import cli
from tests.support.files import foreign_stores
from tests.support.files.foreign_stores import add_lm_studio, add_manifest, add_ollama
from tests.support.files.real_model import smollm2
from tests.support.files.uncatalogued_models import gguf

OLLAMA, LM_STUDIO = "ollama/tiny:1b", "lm-studio/maker/Tiny-GGUF/tiny-Q4_0.gguf"


@pytest.fixture
def stores(tmp_path, monkeypatch):
    root = foreign_stores.use_home(tmp_path, monkeypatch)
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    add_ollama(root, "tiny/1b", gguf(300, 1000))
    add_lm_studio(tmp_path, LM_STUDIO.partition("/")[2], gguf(300, 2000))
    folders = (root, tmp_path / ".lmstudio")
    before = [foreign_stores.state(folder) for folder in folders]
    yield root
    assert [foreign_stores.state(folder) for folder in folders] == before


def localq(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert cli.execute(list(arguments)) == code, capsys.readouterr()
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_ls_says_whose_they_are(stores, capsys):
    found = json.loads(localq(capsys, "ls", "--json")[0])
    assert {each["name"]: each["where"] for each in found["models"]} == {OLLAMA: "ollama", LM_STUDIO: "lm-studio"}
    assert found["unreadable"] == []
    out, err = localq(capsys, "ls")
    assert OLLAMA in out
    assert LM_STUDIO in out
    assert err == ""


@pytest.mark.parametrize("name", [OLLAMA, LM_STUDIO])
def test_verbs_take_their_names(stores, capsys, name):
    facts = json.loads(localq(capsys, "show", name, "--json")[0])
    assert (facts["name"], facts["format"], facts["runs"]) == (name, "gguf", True)
    (row,) = json.loads(localq(capsys, "fit", name, "--vram", "4", "--json")[0])["rows"]
    assert (row["name"], row["fits"], row["download_bytes"]) == (name, True, None)
    plan = json.loads(localq(capsys, "chat", name, "--dry-run", "--vram", "4", "--json")[0])
    assert plan["path"] == facts["path"]
    (checked,) = json.loads(localq(capsys, "verify", name, "--json")[0])["models"]
    assert checked["right"]
    assert "in another program's store" in localq(capsys, "pull", name, code=2)[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [(OLLAMA, ["belongs to ollama", "`ollama rm tiny:1b`"]), (LM_STUDIO, ["belongs to LM Studio", "My Models"])],
)
def test_rm_refuses_and_prune_leaves_them(stores, capsys, name, words):
    err = localq(capsys, "rm", name, "--yes", code=2)[1]
    assert all(word in err for word in words)
    assert "nothing to remove" in localq(capsys, "prune", "--yes")[1]


def test_what_is_damaged_is_one_line(tmp_path, monkeypatch, capsys):
    root = foreign_stores.use_home(tmp_path, monkeypatch)
    add_manifest(root, "bad/1b", "{")
    add_ollama(root, "gone/1b", b"GGUF1").unlink()
    _, err = localq(capsys, "ls")
    lines = err.splitlines()
    assert [line.partition(": ")[0] for line in lines[:2]] == ["ollama/bad:1b", "ollama/gone:1b"]
    assert "not valid JSON" in lines[0]
    assert "is missing. Run `ollama pull gone:1b` to repair it." in lines[1]
    assert "Traceback" not in err
    unreadable = json.loads(localq(capsys, "ls", "--json")[0])["unreadable"]
    assert [each["name"] for each in unreadable] == ["ollama/bad:1b", "ollama/gone:1b"]


def test_an_answer_of_a_model_of_ollama(tmp_path, monkeypatch, capsys):
    root = foreign_stores.use_home(tmp_path, monkeypatch)
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    blob = add_ollama(root, "smollm2/135m", Path(smollm2()).read_bytes())
    before = foreign_stores.state(root)
    arguments = ("run", "ollama/smollm2:135m", "Say hello.", "--device", "cpu", "-n", "4", "--ctx", "256", "--json")
    answer = json.loads(localq(capsys, *arguments, "--temp", "0")[0])
    assert answer["model"] == "ollama/smollm2:135m"
    assert answer["text"]
    assert foreign_stores.state(root) == before
    assert blob.is_file()

"""`localq push` as a user meets it: what it sends, says and refuses; the model then loads from the hub as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from localq.cli import execute
from localq.errors import ExitCode
from localq.files.model_folder import open_model
from tests.support.files import hub_server, made_models
from tests.support.files.hub_server import TOKEN
from tests.support.files.made_models import BASE

REPO = "someone/tiny-llama-nf4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_models.make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
        server.store.writers = frozenset({TOKEN})
        server.add(BASE, {"LICENSE": b"The licence of the source.\n"}).card["license"] = "apache-2.0"
        yield server


def push(capsys, *arguments: object, code: int = 0) -> tuple[str, str]:
    ended = execute(["push", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert ended == code, err
    assert TOKEN not in out + err
    assert "\x1b" not in out + err
    assert "Traceback" not in err
    return out, err


def files_of(server, repo: str = REPO) -> dict[str, bytes]:
    found = server.repos[repo]
    return found.commits[found.refs["main"]]


def logits(folder: Path) -> torch.Tensor:
    from localq.engine.load import load
    from localq.planner.load_options import LoadOptions

    model = load.load_model(open_model(folder), LoadOptions(device="cpu"))
    return model.prefill(torch.arange(20))


def test_push(made, server, capsys):
    out, err = push(capsys, made, REPO, "--yes")
    print(out, err)
    print(files_of(server)["README.md"].decode())
    print((made / "localq.json").read_text())
    print(server.store.committed, [(r.method, r.path[:60], r.status) for r in server.requests])
    assert 0

"""`localq pull --dry-run`: files, bytes, whether they fit; exit codes of the pull itself, and nothing is fetched."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from localq import cli, disk
from localq.files import packaged_model
from localq.planner import consent, prepare
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO, TOKEN
from tests.support.files.uncatalogued_models import gguf, model


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        for name in ("CONFIG", "MODELS"):
            monkeypatch.setenv(f"LOCALQ_{name}", str(tmp_path / f"{name.lower()}.toml"))
        server.add(REPO, FILES)
        yield server


FILES = model()
del FILES["model.safetensors"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[dict]:
    capsys.readouterr()
    assert cli.execute(["pull", *arguments, "--dry-run", "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)["models"]


def test_it_lists_what_a_pull_then_fetches_to_the_byte(server, capsys, tmp_path):
    (told,) = plan(capsys, REPO, "--vram", "4")
    assert told["fetch_bytes"] == told["bytes"] == sum(each["fetch_bytes"] for each in told["files"])
    assert (told["fits"], told["commit"], told["refusal"]) == (True, fake_hub.COMMIT, None)
    assert "8,192 tokens of context" in told["verdict"]
    assert not (tmp_path / "hub").exists()
    assert not (tmp_path / "cache").exists()
    assert server.sent_of("model-00002-of-00002.safetensors") < 200_000  # its header alone

    assert cli.execute(["pull", REPO, "-q"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert {each["name"]: each["bytes"] for each in told["files"]} == {
        each.name: each.stat().st_size for each in folder.iterdir()
    }
    asked = len(server.requests)
    (again,) = plan(capsys, REPO, "--vram", "4")
    assert (again["bytes"], again["fetch_bytes"], again["fits"]) == (told["bytes"], 0, True)
    assert again["origin"].endswith(fake_hub.COMMIT)
    assert len(server.requests) == asked  # what is here asks nobody


def test_what_a_part_holds_already_is_not_counted(server, capsys, tmp_path):
    (told,) = plan(capsys, REPO)
    digest = hashlib.sha256(FILES["model-00002-of-00002.safetensors"]).hexdigest()  # which names a part
    parts = tmp_path / "cache" / "downloads"
    parts.mkdir(parents=True)
    (parts / f"{digest}.part").write_bytes(bytes(12_345))
    (less,) = plan(capsys, REPO)
    assert told["fetch_bytes"] - less["fetch_bytes"] == 12_345
    assert less["bytes"] == told["bytes"]


def test_what_does_not_fit_is_refused_behind_the_plan(server, capsys):
    (told,) = plan(capsys, REPO, "--vram", "520MiB", code=3)
    assert (told["fits"], told["refusal"]["exit_code"]) == (False, 3)
    (forced,) = plan(capsys, REPO, "--vram", "520MiB", "--force")
    assert (forced["fits"], forced["refusal"]) == (False, None)
    assert cli.execute(["pull", REPO, "--vram", "520MiB", "--estimate-only"]) == 3
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == f"{REPO}: {REPO} at {fake_hub.COMMIT}"
    assert lines[1].split() == ["FILE", "SIZE", "TO", "DOWNLOAD"]
    assert lines[-2].split()[0] == "total"
    assert "does not fit" in lines[-1]
    assert captured.err.startswith("localq: ")
    assert "\x1b" not in captured.out + captured.err


def test_a_full_disk_is_said_with_its_code(server, capsys, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1_000_000)
    (told,) = plan(capsys, REPO, "--vram", "4", code=9)
    assert told["refusal"]["exit_code"] == 9
    assert told["fits"] is True


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["maker/nothing"], 4), (["lama-3.1-8b"], 4), (["maker/gated"], 5), (["maker/fresh", "--offline"], 6),
        (["llama-3.1-8b", "--offline"], 6), (["maker/pickles"], 8), (["."], 2), ([REPO, "--revision", "v7"], 4),
    ],
)  # fmt: skip
def test_codes_are_those_of_the_pull(server, capsys, arguments, code):
    server.add("maker/gated", FILES, gated="auto")
    server.add("maker/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    for verb in (["pull", *arguments, "--dry-run"], ["pull", *arguments]):
        assert cli.execute(verb) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines()[-1].startswith("localq: ")
        assert TOKEN not in captured.err


def test_one_gguf_and_another_revision(server, capsys):
    later = "e" * 40
    server.add("maker/one", {"one.gguf": gguf(300), "README.md": b"x"})
    server.add("maker/one", {"one.gguf": gguf(500), "README.md": b"x"}, commit=later)
    (first,) = plan(capsys, "maker/one", "--revision", fake_hub.COMMIT, "--vram", "4")
    (second,) = plan(capsys, "maker/one", "--revision", "main", "--vram", "4")
    assert [[each["name"] for each in told["files"]] for told in (first, second)] == [["one.gguf"], ["one.gguf"]]
    assert (first["commit"], second["commit"]) == (fake_hub.COMMIT, later)
    assert second["bytes"] - first["bytes"] > 200 * 16
    assert first["fits"] is True


def test_what_is_made_here_names_its_base_and_the_time(server, capsys, monkeypatch):
    monkeypatch.setattr(packaged_model, "installed_path", lambda source: None)
    (embedded_one, made) = plan(capsys, "smollm2-135m", "smollm2-135m@nf4")
    assert embedded_one["fetch_bytes"] == embedded_one["bytes"] == made["fetch_bytes"] == 98_362_432
    assert embedded_one["made_here"] is None
    assert made["made_here"] == "to nf4 on this machine in about 1 min (estimated)"
    monkeypatch.setattr(prepare, "check_can_make", lambda format, source="": None)
    monkeypatch.setattr(packaged_model, "installed_path", lambda source: "here")
    (ready,) = plan(capsys, "smollm2-135m@vq2")
    assert "layers included with localq" in ready["made_here"]
    assert ready["fetch_bytes"] == 0
    assert server.requests == []


def test_another_revision_is_asked_about_like_the_first(server, capsys, monkeypatch):
    later = "e" * 40
    server.add("maker/one", {"one.gguf": gguf(300)})
    assert cli.execute(["pull", "maker/one", "-q", "--revision", fake_hub.COMMIT]) == 0
    server.add("maker/one", {"one.gguf": gguf(500)}, commit=later)
    questions: list[str] = []
    monkeypatch.setattr(consent, "LIMIT", 1000)
    monkeypatch.setattr("typer.confirm", lambda text, default, err: bool(questions.append(text)))
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    assert cli.execute(["pull", "maker/one", "--revision", later]) == 1
    assert "not started" in capsys.readouterr().err
    assert [each.partition(": download ")[0] for each in questions] == ["maker/one"]
    assert cli.execute(["pull", "maker/one", "-q", "--revision", fake_hub.COMMIT]) == 0  # it is here
    assert cli.execute(["pull", "maker/one", "-q", "--revision", later, "--yes"]) == 0
    assert len(questions) == 1

"""`localq push` as a user meets it: what it sends, says and refuses; the model then loads from the hub as it was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pexpect
import pytest
import torch

from localq import __version__, places
from localq.cli import execute
from localq.engine.load.load import load
from localq.errors import ExitCode
from localq.files import catalog, checked_files
from localq.files.model_folder import STATE_NAME, open_model
from localq.planner.load_options import LoadOptions
from tests.support.files import hub_server, made_models
from tests.support.files.hub_server import TOKEN
from tests.support.files.made_models import BASE

ROOT = Path(__file__).parents[3]
REPO = "someone/tiny-llama-nf4"
CARD = ROOT / "tests" / "data" / "push-card.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_models.make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return made_models.copy(made, tmp_path)


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
        monkeypatch.setenv("LOCALQ_STATE", str(tmp_path / "state"))
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


def held(server) -> dict[str, bytes]:
    found = server.repos[REPO]
    return found.commits[found.refs["main"]]


def writes(server) -> list[str]:
    return [each.path for each in server.requests if each.method in ("POST", "PUT")]


def logits(folder: Path) -> torch.Tensor:
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="float32"))
    with torch.inference_mode():
        return loaded.model(torch.arange(30), torch.arange(30), loaded.cache, 30, last_only=False)


def reply(model: str) -> str:
    """What the model says, by the command that the card names, on the CPU."""
    words = [sys.executable, "-m", "localq", "chat", model, "--device", "cpu", "--max-tokens", "4", "--temp", "0"]
    done = subprocess.run(words, input="abc\n", capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_comes_back_from_the_hub_as_it_was(made, server, capsys):
    out, err = push(capsys, made, REPO, "--yes")
    assert out == f"{server.url}/{REPO}\n"
    assert f"uploading {REPO}" in err
    assert f"To chat, run `localq chat {REPO}`." in err
    assert execute(["pull", REPO, "-q"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder != made
    assert torch.equal(logits(folder), logits(made))
    assert reply(REPO) == reply(str(made))
    assert execute(["verify", REPO]) == 0
    assert re.search(rf"{REPO} +right", capsys.readouterr().out)


def test_the_card(made, server, capsys):
    """The whole card; to accept a change, delete the file and run the test twice."""
    out, _ = push(capsys, made, REPO, "--dry-run")
    lines, card = out.split("\n\n---\n", 1)
    found = f"---\n{card}".replace(__version__, "VERSION")
    if not CARD.exists():
        CARD.write_text(found)
        pytest.fail("the file was written")
    assert found == CARD.read_text()
    assert f"repository  {REPO} (public, new)" in lines
    assert "licence     apache-2.0 (Apache License 2.0)" in lines
    assert re.search(r"model.safetensors +\d+\.\d kB  new", lines)
    assert writes(server) == []


def test_a_dry_run_needs_no_token_and_no_network(made, server, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert "new" in push(capsys, made, REPO, "--dry-run")[0]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = len(server.requests)
    out, _ = push(capsys, made, REPO, "--dry-run", "--license", "mit", "--json")
    body = json.loads(out)
    assert (body["base"], body["licence"], body["format"]) == (BASE, "mit", "nf4")
    assert body["card"].startswith("---\n")
    assert {each["name"] for each in body["files"]} >= {"model.safetensors", "README.md"}
    assert len(server.requests) == before
    assert "offline" in push(capsys, made, REPO, "--yes", code=ExitCode.NETWORK)[1]


def test_json_names_what_was_sent_and_a_second_run_sends_nothing(made, server, capsys):
    body = json.loads(push(capsys, made, REPO, "--yes", "--json", "-q")[0])
    assert body["commit"] == server.repos[REPO].refs["main"]
    assert body["address"] == f"{server.url}/{REPO}"
    assert body["bits_per_weight"] == pytest.approx(4.74, abs=0.01)
    assert all(each["send"] for each in body["files"])
    assert (body["replaced"], body["removed"]) == ([], [])
    before = len(writes(server))
    out, err = push(capsys, made, REPO)
    assert "already complete" in err
    assert out == f"{server.url}/{REPO}\n"
    assert len(writes(server)) == before


def test_without_a_terminal_it_is_not_sent_unasked(made, server, capsys):
    assert "--yes" in push(capsys, made, REPO, code=ExitCode.USAGE)[1]
    assert writes(server) == []


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "localq", "push", *map(str, arguments)]


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("y", 0)])
def test_a_terminal_is_asked_first(made, server, answer, code):
    words = command(made, REPO, "--private")
    child = pexpect.spawn(words[0], words[1:], encoding="utf-8", timeout=60, cwd=ROOT, dimensions=(40, 120))
    child.expect(r"repository  someone/tiny-llama-nf4 \(private, new\)")
    child.expect(r"Upload .* kB in \d+ files to someone/tiny-llama-nf4 \(private\)\?")
    assert writes(server) == []
    child.sendline(answer)
    child.expect("nothing uploaded" if code else "To chat, run")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == code
    assert (REPO in server.repos) == (code == 0)
    assert server.store.private == ({} if code else {REPO: True})
    assert bool(writes(server)) == (code == 0)


def test_ctrl_c_leaves_what_the_next_run_goes_on_with(made, server, tmp_path, capsys):
    server.store.put_may_end = threading.Event()
    process = subprocess.Popen(command(made, REPO, "--yes"), stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.store.put_came.wait(60), "the upload does not begin"
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    server.store.put_may_end.set()
    server.settle()
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert f"{REPO}: stopped; run the same command to resume" in err
    assert "Traceback" not in err
    assert TOKEN not in err
    assert server.store.committed == []
    push(capsys, made, REPO, "--yes")
    assert held(server)["model.safetensors"] == (made / "model.safetensors").read_bytes()


# ---- refusals


def test_a_forbidden_name_comes_before_the_token(made, server, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert "at most 96" in push(capsys, made, "someone/a--b", "--yes", code=ExitCode.USAGE)[1]


def test_no_token(made, server, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    _, err = push(capsys, made, REPO, "--yes", code=ExitCode.GATED)
    assert "needs an access token with write access" in err
    assert "hf auth login" in err


def test_a_token_that_may_not_write(made, server, capsys, monkeypatch):
    server.store.writers = frozenset()
    _, err = push(capsys, made, REPO, "--yes", code=ExitCode.GATED)
    assert "does not allow writing to someone" in err
    _, err = push(capsys, made, REPO, "--yes", "--token", "wrong", code=ExitCode.GATED)
    assert "rejected the access token" in err


def test_folders_that_are_no_finished_models(copy, server, capsys, tmp_path):
    _, err = push(capsys, tmp_path / "none", REPO, "--yes", code=ExitCode.UNKNOWN_MODEL)
    assert "no such folder" in err
    (copy / STATE_NAME).write_text("{}")
    assert "not finished" in push(capsys, copy, REPO, "--yes", code=ExitCode.BAD_FILE)[1]
    (copy / STATE_NAME).unlink()
    (copy / checked_files.SUMS_NAME).unlink()
    assert "not made by `localq quantize`" in push(capsys, copy, REPO, "--yes", code=ExitCode.USAGE)[1]
    assert writes(server) == []


def test_changed_and_missing_files(copy, server, capsys):
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace("{", "{ ", 1))
    _, err = push(capsys, copy, REPO, "--yes", code=ExitCode.BAD_FILE)
    assert "config.json is damaged: its hash does not match the recorded one" in err
    (copy / "config.json").write_text(config)
    (copy / "model.safetensors").rename(copy / "elsewhere.safetensors")
    push(capsys, copy, REPO, "--yes", code=ExitCode.BAD_FILE)
    assert writes(server) == []


@pytest.mark.parametrize("repo", ["name", "a/b/c", "-/x", "a b/c", "\x1b[31m/x"])
def test_names_that_are_no_repository(made, server, capsys, repo):
    assert "ORG/REPO" in push(capsys, made, repo, "--yes", code=ExitCode.USAGE)[1]


def test_a_model_by_the_name_that_ls_shows(made, server, capsys):
    folder = places.quantized_dir() / "tiny@nf4"
    folder.parent.mkdir(parents=True)
    made.rename(folder)
    try:
        push(capsys, "tiny@nf4", REPO, "--yes")
    finally:
        folder.rename(made)
    assert held(server)["config.json"] == (made / "config.json").read_bytes()


def test_a_repository_of_something_else(made, server, capsys):
    server.add(REPO, {"model.safetensors": b"other"})
    _, err = push(capsys, made, REPO, "--yes", code=ExitCode.USAGE)
    assert "the repository already has different content: model.safetensors" in err
    assert held(server) == {"model.safetensors": b"other"}
    push(capsys, made, REPO, "--yes", "--force")
    assert held(server)["model.safetensors"] == (made / "model.safetensors").read_bytes()


# ---- licences and what is known of a model


def test_an_unknown_licence_has_to_be_named(made, server, capsys):
    server.repos[BASE].card.clear()
    _, err = push(capsys, made, REPO, "--yes", code=ExitCode.USAGE)
    assert f"{BASE}: the licence of the source model is not known" in err
    assert "--license" in err
    push(capsys, made, REPO, "--yes", "--license", "My-Own")
    card = held(server)["README.md"].decode()
    assert 'license: other\nlicense_name: "my-own"' in card
    assert "Read its terms on the source model's page" in card


def test_notice_name_and_text_that_a_licence_requires(made, server, capsys):
    server.repos[BASE].card["license"] = "llama3.1"
    _, err = push(capsys, made, REPO, "--yes", code=ExitCode.USAGE)
    assert "requires a name that begins with Llama" in err
    assert "someone/Llama-tiny-llama-nf4" in err
    name = "someone/Llama-3.1-tiny"
    server.add(BASE, {"README.md": b"no licence here"}, commit="d" * 40)
    _, err = push(capsys, made, name, "--yes", code=ExitCode.USAGE)
    assert "requires including a copy of its text" in err
    server.add(BASE, {"LICENSE": b"Llama 3.1 text", "USE_POLICY.md": b"policy"}, commit="e" * 40)
    push(capsys, made, name, "--yes")
    found = server.repos[name]
    files = found.commits[found.refs["main"]]
    assert (files["LICENSE"], files["USE_POLICY.md"]) == (b"Llama 3.1 text", b"policy")
    notice, card = files["NOTICE"].decode(), files["README.md"].decode()
    assert notice.startswith("Llama 3.1 is licensed under the Llama 3.1 Community License")
    assert "The weights were changed: quantized to nf4 by localq." in notice
    assert 'license: "llama3.1"' in card
    assert "**Built with Llama**" in card
    push(capsys, made, name)  # nothing is missing


def test_a_model_without_a_record(copy, server, capsys):
    """Of an earlier version: nothing is known but what the files say."""
    sums = checked_files.recorded_sums(copy)
    del sums["localq.json"]
    (copy / "localq.json").unlink()
    (copy / checked_files.SUMS_NAME).write_text(checked_files.sums_text(sums))
    assert "is not known" in push(capsys, copy, REPO, "--yes", code=ExitCode.USAGE)[1]
    push(capsys, copy, REPO, "--yes", "--base", BASE)
    card = held(server)["README.md"].decode()
    assert f'base_model: "{BASE}"' in card
    assert "| command | not recorded |" in card
    assert "| calibration | not recorded |" in card


def test_what_a_record_says_cannot_escape(copy, server, capsys):
    hostile = "\x1b]52;c;eA==\x07`evil|](x)<script>\n---\u202e"
    made_models.change_record(copy, source=hostile, repo="", command=hostile, calibration=hostile, licence="mit")
    out, _ = push(capsys, copy, REPO, "--dry-run", "--base", BASE)
    assert "\x07" not in out
    push(capsys, copy, REPO, "--yes", "--license", "apache-2.0", "--base", BASE)
    card = held(server)["README.md"].decode()
    assert not set("\x1b\x07\u202e") & set(card)
    outside = re.sub(r"`[^`]*`", "", card).replace("\\<", "").replace("\\]", "")
    assert "<script" not in outside
    assert "](x)" not in outside
    assert card.count("\n---\n") == 1


def test_measurements_are_those_of_this_model(made, server, capsys, tmp_path):
    result = {
        "model": str(made), "n_windows": 12, "window": 2048, "text": "/home/someone/wiki.txt", "perplexity": 12.34567,
        "against": "reference", "perplexity_reference": 10.0, "kl": 0.0123, "top1": 0.9, "dtype": "bfloat16",
        "conditions": {"device": "NVIDIA H100", "localq": "0.1.0"},
    }  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    card = push(capsys, made, REPO, "--dry-run", "--measured", path)[0]
    assert "| perplexity | 12.3457 |" in card
    assert "| text | wiki.txt, 12 windows of 2048 tokens |" in card
    assert "/home" not in card
    assert "Not measured" not in card
    path.write_text(json.dumps({**result, "model": "another"}))
    _, err = push(capsys, made, REPO, "--dry-run", "--measured", path, code=ExitCode.USAGE)
    assert "these are measurements of another" in err
    path.write_text('{"models": []}')
    push(capsys, made, REPO, "--dry-run", "--measured", path, code=ExitCode.USAGE)


ENTRY = """
[[model]]
name = "tiny"
licence = "apache-2.0"
[model.arch]
model_type = "llama"
layers = 3
hidden = 128
heads = 4
kv_heads = 2
head_dim = 32
intermediate = 192
vocab = 320
tied = false
max_context = 512

[[model.source]]
format = "bf16"
repo = "publisher/tiny-llama"
"""


@pytest.mark.parametrize("format", ["nf4", "vq2"])
def test_a_catalogue_names_such_a_repository_in_place_of_making_the_model(made, server, capsys, monkeypatch, format):
    table = json.loads(push(capsys, made, REPO, "--yes", "--json", "-q")[0])["catalogue"]
    models = Path(os.environ["LOCALQ_CONFIG"]).with_name("models.toml")
    monkeypatch.setenv("LOCALQ_MODELS", str(models))

    def fit() -> dict:
        assert execute(["fit", f"tiny@{format}", "--vram", "8", "--json"]) == 0
        return next(row for row in json.loads(capsys.readouterr().out)["rows"] if row["name"] == f"tiny@{format}")

    models.write_text(ENTRY)
    assert fit()["quantized_here"]
    scheme = "" if format == "nf4" else 'scheme = "s4l16"\n'
    models.write_text(ENTRY + "\n" + table.replace('format = "nf4"\n', f'format = "{format}"\n{scheme}'))
    assert not fit()["quantized_here"]
    found = catalog.resolve(f"tiny@{format}")
    assert (found.source.repo, found.source.revision) == (REPO, server.repos[REPO].refs["main"])
    assert execute(["pull", f"tiny@{format}", "--dry-run", "--vram", "8"]) == 0
    assert REPO in capsys.readouterr().out
    if format == "nf4":
        assert execute(["pull", "tiny@nf4", "-q", "--vram", "8"]) == 0
        folder = Path(capsys.readouterr().out.strip())
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert size == found.source.bytes
        assert torch.equal(logits(folder), logits(made))

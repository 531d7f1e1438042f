"""The verbs around files, as a user meets them: streams, exit codes, JSON, questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from localq import places
from localq.files.hub import cache as hub_cache
from tests.support.files import cached_models, fake_hub
from tests.support.files.hub_configs import HUB
from tests.support.files.hub_server import REPO, TOKEN

ROOT = Path(__file__).parents[3]
FILES = fake_hub.model_files()


@pytest.fixture
def server(tmp_path, monkeypatch):
    with fake_hub.FakeHub() as server:
        server.add(REPO, FILES)
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "LOCALQ_OFFLINE", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))
        monkeypatch.setenv("LOCALQ_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
        yield server


def localq(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localq", *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, stdin=subprocess.DEVNULL, timeout=60
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert TOKEN not in result.stdout + result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    return result


def one_object(text: str) -> dict:
    assert text.count("\n") == 1
    body = json.loads(text)
    assert body["schema"] == 1
    return body


def put_embedded() -> Path:
    path = places.embedded_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF" * 250)
    return path


# ---- pull


def test_pull_prints_the_path_and_only_that(server):
    result = localq("pull", REPO)
    folder = hub_cache.repo_folder(REPO) / "snapshots" / fake_hub.COMMIT
    assert result.stdout == f"{folder}\n"
    assert f"downloading {REPO}" in result.stderr.splitlines()
    assert "downloaded and verified" in result.stderr
    asked = len(server.requests)
    again = localq("pull", REPO, "-q")
    assert (again.stdout, again.stderr) == (f"{folder}\n", "")
    assert len(server.requests) == asked


def test_pull_json_is_one_object_for_all_models(server):
    server.add("maker/other", {"other.gguf": b"GGUF!"})
    body = one_object(localq("pull", REPO, "maker/other", "--force", "--json").stdout)  # no sound .gguf
    assert [(each["name"], each["bytes"], each["fetched"]) for each in body["models"]] == [
        (REPO, sum(map(len, FILES.values())), True),
        ("maker/other", 5, True),
    ]


def test_pull_takes_a_revision(server):
    later = "e" * 40
    server.add(REPO, {**FILES, "tokenizer_config.json": b'{"later": 1}'}, commit=later)
    first = localq("pull", REPO, "--revision", fake_hub.COMMIT, "-q").stdout
    second = localq("pull", REPO, "--revision", "main", "-q").stdout
    assert (Path(first.strip()).name, Path(second.strip()).name) == (fake_hub.COMMIT, later)
    localq("pull", "smollm2-135m", "--revision", "main", code=2)
    assert "v7" in localq("pull", REPO, "--revision", "v7", code=4).stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["maker/nothing"], 4),
        (["lama-3.1-8b"], 4),
        ([REPO, "lama-3.1-8b"], 4),
        (["maker/gated"], 5),
        (["maker/pickles"], 8),
        (["maker/fresh", "--offline"], 6),
        (["."], 2),
        ([], 2),
    ],
)
def test_pull_refuses_in_one_line_with_the_code_of_the_cause(server, arguments, code):
    server.add("maker/gated", FILES, gated="auto")
    server.add("maker/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    result = localq("pull", *arguments, code=code)
    assert result.stdout == ""
    assert server.fetched() == []
    assert not arguments or result.stderr.splitlines()[-1].startswith("localq: ")


@pytest.mark.parametrize("terminal", ["xterm-256color", "dumb"])
def test_pull_draws_a_bar_on_a_terminal_and_plain_lines_on_a_dumb_one(server, terminal):
    environment = {**os.environ, "TERM": terminal}
    child = pexpect.spawn(
        sys.executable, ["-m", "localq", "pull", REPO], cwd=ROOT, env=environment, timeout=60, encoding="utf-8"
    )
    printed = child.read()
    child.close()
    assert child.exitstatus == 0
    assert "downloaded and verified" in printed
    assert ("\x1b[" in printed) == (terminal != "dumb")


def test_pull_stopped_with_ctrl_c_says_that_it_goes_on_and_does(server):
    server.add("maker/large", {**FILES, "model.safetensors": fake_hub.safetensors(3, 12_000_000)})
    server.slow_after = 1_000_000
    child = pexpect.spawn(
        sys.executable, ["-m", "localq", "pull", "maker/large"], cwd=ROOT, timeout=60, encoding="utf-8",
        env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    child.expect("downloading maker/large")
    deadline = time.monotonic() + 30
    while server.sent_of("model.safetensors") < 1_500_000 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.sendintr()
    printed = child.read()
    child.close()
    assert child.exitstatus == 130
    assert "Traceback" not in printed
    assert printed.splitlines()[-1] == "maker/large: stopped; run the same command to resume"
    server.slow_after = None
    localq("pull", "maker/large", "-q")
    assert server.seen("GET", "model.safetensors")[-1].headers["range"].startswith("bytes=")


# ---- ls


def test_ls_shows_name_size_and_path(server):
    path = put_embedded()
    folder = cached_models.put(REPO, FILES)
    result = localq("ls")
    head, *rows = result.stdout.splitlines()
    assert head.split() == ["NAME", "FORMAT", "SIZE", "SHARED", "LAST", "USED", "PATH"]
    assert {row.split()[0]: row.split()[-1] for row in rows} == {"smollm2-135m": str(path), REPO: str(folder)}
    assert "1.0 kB" in next(row for row in rows if row.startswith("smollm2"))
    assert server.requests == []


def test_ls_json(server):
    cached_models.put(REPO, FILES)
    [model] = one_object(localq("ls", "--json").stdout)["models"]
    assert model["name"] == model["repo"] == REPO
    assert (model["format"], model["bytes"]) == ("bf16", sum(map(len, FILES.values())))
    assert (model["complete"], model["commit"], model["where"]) == (True, fake_hub.COMMIT, "hub")


def test_ls_of_nothing_names_the_next_step(server):
    result = localq("ls")
    assert result.stdout == ""
    assert "localq fit" in result.stderr
    assert "is built into localq" in result.stderr
    assert one_object(localq("ls", "--json").stdout)["models"] == []


def test_ls_into_a_closed_pipe_ends_with_141(server):
    for number in range(300):
        cached_models.put(f"maker/model-{number}", {"m.gguf": b"GGUF"})
    command = [sys.executable, "-m", "localq", "ls"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == ""


def test_ls_does_not_load_the_hub_client_nor_anything_heavy(server):
    cached_models.put(REPO, FILES)
    heavy = ("torch", "numpy", "huggingface_hub", "httpx2", "rich.progress", "gguf", "tokenizers")
    code = (
        "import sys; from localq.cli import execute; execute(['ls']); execute(['show', 'smollm2-135m']); "
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert result.stderr.splitlines()[-1] == "[]"


# ---- show


def test_show_a_catalogue_model_that_is_not_here(server):
    text = localq("show", "llama-3.1-8b").stdout
    for part in ("Llama 3.1 8B Instruct", "8.03 billion", "131,072", "nf4", "aqlm", "gated", "not verified", "llama3"):
        assert part in text
    body = one_object(localq("show", "llama-3.1-8b@bf16", "--json").stdout)
    assert (body["name"], body["format"], body["path"]) == ("llama-3.1-8b@bf16", "bf16", None)
    assert body["architecture"]["layers"] == 32
    assert body["architecture"]["kv_cache_bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert {source["format"] for source in body["sources"]} >= {"nf4", "bf16", "aqlm"}
    assert server.requests == []


def test_show_tells_what_grows_with_the_context(server):
    windows = localq("show", "gemma-3-27b")
    assert "81,920 bytes per token at 16 bits, 425,984 more inside the window" in windows.stdout
    assert "32,768 bytes per token at 16 bits, 51.5 MB of recurrent state" in localq("show", "qwen3.5-9b").stdout
    body = one_object(localq("show", "qwen3.5-9b", "--json").stdout)["architecture"]
    assert body["kv_cache_growing_bytes_per_token"] == body["kv_cache_bytes_per_token"] == 8 * 2 * 4 * 256 * 2
    assert body["state_bytes"] == 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert server.requests == []


EXPERTS_IN_GPTQ = """
[[model]]
name = "experts"
title = "Experts"
licence = "mit"
arch = {model_type = "gpt_oss", layers = 1, hidden = 64, heads = 2, kv_heads = 1, head_dim = 32, intermediate = 0,
        vocab = 96, tied = false, max_context = 128, experts = 4, experts_active = 2, expert_intermediate = 96}
source = [{format = "gptq", repo = "some/experts", bytes = 1000}]
"""


def test_show_says_when_this_version_cannot_run_it(server, tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text(EXPERTS_IN_GPTQ.replace(",\n        ", ", "))
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "own.toml"))
    body = one_object(localq("show", "experts@gptq", "--json").stdout)
    assert body["runs"] is False
    assert "not in gptq" in body["reason"]


def test_show_says_so_of_a_folder_too(server, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**HUB["gpt-oss-20b"], "model_type": "gpt_oss_next"}))
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    body = one_object(localq("show", str(tmp_path), "--json").stdout)
    assert body["runs"] is False
    assert "gpt_oss_next" in body["reason"]


def test_show_a_repository_that_is_here(server):
    config = {
        "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 64, "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 512,
        "dtype": "float16",
    }  # fmt: skip
    folder = cached_models.put(REPO, {**FILES, "config.json": json.dumps(config).encode()})
    body = one_object(localq("show", REPO, "--json").stdout)
    assert (body["path"], body["format"], body["runs"]) == (str(folder), "fp16", True)
    assert body["architecture"]["head_dim"] == 16
    assert body["generation_defaults"] == {"temperature": 0.6}
    text = localq("show", REPO).stdout
    assert "temperature 0.6" in text
    assert str(folder) in text


def test_show_an_architecture_that_is_not_supported(server):
    cached_models.put(REPO, {**FILES, "config.json": b'{"model_type": "mamba"}'})
    body = one_object(localq("show", REPO, "--json").stdout)
    assert body["architecture"] is None
    assert (body["runs"], "mamba" in body["reason"]) == (False, True)


def test_show_what_is_nowhere(server):
    assert "localq pull maker/unknown" in localq("show", "maker/unknown", code=4).stderr
    localq("show", code=2)
    assert server.requests == []


# ---- rm


def test_rm_in_a_pipe_asks_for_y_and_then_frees_only_what_it_names(server):
    path = put_embedded()
    stays = cached_models.put(REPO, FILES)
    refusal = localq("rm", "smollm2-135m", code=2)
    assert "-y" in refusal.stderr
    assert path.exists()
    result = localq("rm", "-y", "smollm2-135m")
    assert "1.0 kB freed" in result.stderr
    assert result.stdout == ""
    assert not path.exists()
    assert hub_cache.is_complete(stays)
    localq("rm", "-y", "smollm2-135m", code=4)


def test_rm_json_and_several_names(server):
    put_embedded()
    cached_models.put(REPO, FILES)
    body = one_object(localq("rm", "-y", REPO, "smollm2-135m", REPO, "--json").stdout)
    assert [each["name"] for each in body["removed"]] == [REPO, "smollm2-135m"]
    assert body["freed_bytes"] == 1000 + sum(map(len, FILES.values()))
    assert one_object(localq("ls", "--json").stdout)["models"] == []


def test_rm_stops_before_anything_is_removed_when_a_name_is_wrong(server):
    path = put_embedded()
    localq("rm", "-y", "smollm2-135m", "maker/nothing", code=4)
    localq("rm", "-y", str(path), code=2)
    assert path.exists()


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, False), ("n", 1, True), ("", 1, True)])
def test_rm_asks_on_a_terminal(server, answer, code, left):
    path = put_embedded()
    child = pexpect.spawn(
        sys.executable, ["-m", "localq", "rm", "smollm2-135m"], cwd=ROOT, timeout=60, encoding="utf-8"
    )
    child.expect(r"Delete this model \(1.0 kB\)\?")
    child.sendline(answer)
    printed = child.read()
    child.close()
    assert child.exitstatus == code, printed
    assert path.exists() == left

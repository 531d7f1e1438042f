"""`fit`, `pull` and `--dry-run` of repositories outside the catalogue: the verdict from what the hub tells."""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localq import cli, gpus, settings
from localq.errors import LocalqError
from localq.files import catalog
from localq.files.gguf.binary import read_container
from localq.files.hub import remote as hub_remote
from localq.planner import choose
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO, TOKEN
from tests.support.files.uncatalogued_models import CONFIG, gguf, model

BLOCK_BYTES = 2 * (64 * 64 + 3 * 4000 * 640)  # of `model`, as its headers say


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr("sys.stdin", io.StringIO())
        server.add(REPO, repository())
        yield server
        assert list(tmp_path.glob("localq-outline-*")) == []


def repository(config: dict[str, Any] | None = None) -> dict[str, bytes]:
    files = model(config)
    del files["model.safetensors"]
    return files


def localq(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert cli.execute(list(arguments)) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def row(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    (found,) = json.loads(localq(capsys, "fit", *arguments, "--json")[0])["rows"]
    return found


def failing(monkeypatch: pytest.MonkeyPatch, name: str, failure: int) -> None:
    """Let the system refuse to write files of this name."""
    system = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> Any:
        if flags & os.O_CREAT and Path(os.fsdecode(path)).name == name:
            raise OSError(failure, os.strerror(failure), str(path))
        return system(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)


def test_the_verdict_is_of_headers_alone_and_the_same_once_it_is_here(server, capsys):
    before = row(capsys, REPO, "--vram", "4")
    assert (before["name"], before["format"], before["fits"], before["ctx_max"]) == (REPO, "bf16", True, 8192)
    assert before["ledger_bytes"]["weights"] == BLOCK_BYTES
    assert before["weights_bytes"] == BLOCK_BYTES + 2 * 2 * 320 * 64  # and embedding and head
    assert server.sent_of("model-00002-of-00002.safetensors") <= hub_remote.HEAD_BYTES
    assert localq(capsys, "ls")[1].startswith("no models yet")
    assert not row(capsys, REPO, "--vram", "520MiB")["fits"]
    server.sent.clear()
    localq(capsys, "pull", REPO, "--vram", "4")
    assert before["download_bytes"] == sum(len(each) for each in repository().values())
    server.requests.clear()
    assert row(capsys, REPO, "--vram", "4", "--offline") == {**before, "download_bytes": None, "disk_bytes": None}
    assert server.requests == []


def test_the_table_says_so_too(server, capsys):
    out, _ = localq(capsys, "fit", REPO, "--vram", "4")
    assert out.splitlines()[1].split()[:3] == [REPO, "bf16", "8,192"]
    out, _ = localq(capsys, "fit", f"{REPO}@main", "--vram", "520MiB")
    assert "needs 5" in out


@pytest.mark.parametrize("switch", ["--offline", "HF_HUB_OFFLINE", "LOCALQ_OFFLINE"])
@pytest.mark.parametrize("verb", [["fit"], ["chat", "--dry-run"]])
def test_offline_asks_nobody(server, capsys, monkeypatch, switch, verb):
    flags = [switch] if switch.startswith("--") else []
    if not flags:
        monkeypatch.setenv(switch, "1")
    assert "localq is in offline mode" in localq(capsys, *verb, REPO, "--vram", "4", *flags, code=6)[1]
    assert server.requests == []


def test_errors_are_those_of_pull(server, capsys, monkeypatch):
    server.add("maker/gated", repository(), gated="manual", allowed_tokens=frozenset({TOKEN}))
    server.add("maker/pickled", {**fake_hub.model_files(), "pytorch_model.bin": b"x"})
    del server.repos["maker/pickled"].commits[fake_hub.COMMIT]["model.safetensors"]
    for repo, code, said in (
        ("maker/none", 4, "does not exist or is private"), (f"{REPO}@v9", 4, "revision 'v9' does not exist"),
        ("maker/gated", 5, "hf auth login"), ("maker/pickled", 8, "pickle"),
    ):  # fmt: skip
        for verb in ("fit", "pull"):
            assert said in localq(capsys, verb, repo, "--vram", "4", code=code)[1]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert row(capsys, "maker/gated", "--vram", "4")["reason"].endswith("gated")
    server.fail("/api/models/", *[503] * 5)
    assert "503" in localq(capsys, "fit", REPO, "--vram", "4", code=6)[1]
    assert "catalogue" in localq(capsys, "fit", REPO, "--vram", "4", "--format", "nf4", code=2)[1]


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ({"model_type": "llama", "hidden_size": "wide"}, 8, "hidden_size"),
        ({**CONFIG, "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, 1, "int8"),
        ({**CONFIG, "num_hidden_layers": 10**9}, 8, "num_hidden_layers"),
    ],
)
def test_what_cannot_be_judged_is_named_by_its_repository(server, capsys, tmp_path, config, code, said):
    server.add(REPO, repository(config))
    err = localq(capsys, "fit", REPO, "--vram", "4", code=code)[1]
    assert err.startswith(f"localq: {REPO}")
    assert said in err
    assert str(tmp_path) not in err


def test_a_damaged_header_is_named_by_its_repository(server, capsys, tmp_path):
    server.add(REPO, {**repository(), "model-00001-of-00002.safetensors": b"\xff" * 200})
    err = localq(capsys, "fit", REPO, "--vram", "4", code=8)[1]
    assert f"{REPO}/model-00001-of-00002.safetensors" in err
    assert str(tmp_path) not in err


def test_a_dry_run_plans_what_is_not_here(server, capsys):
    out, _ = localq(capsys, "chat", REPO, "--dry-run", "--vram", "4")
    assert f"source      {REPO} at {fake_hub.COMMIT}" in out
    assert any(line.startswith("download ") and line.endswith("B") for line in out.splitlines())
    body = json.loads(localq(capsys, "run", REPO, "--dry-run", "--vram", "4", "--json")[0])
    assert (body["path"], body["source"], body["ledger_bytes"]["weights"]) == (None, REPO, BLOCK_BYTES)
    localq(capsys, "chat", REPO, "--dry-run", "--vram", "520MiB", code=3)


@pytest.mark.parametrize(("tokens", "asked"), [(1000, 1), (100_000, 2)])  # headers of 24 kB and of 2.4 MB
def test_a_gguf_is_judged_by_its_header(server, capsys, tokens, asked):
    content = gguf(tokens, 2**16)
    server.add("maker/tiny-gguf", {"tiny.gguf": content, "README.md": b"."})
    found = row(capsys, "maker/tiny-gguf", "--vram", "4")
    assert (found["format"], found["fits"], found["ctx_max"]) == ("gguf", True, 8192)
    assert found["download_bytes"] == len(content)
    ranges = [each.headers["range"] for each in server.seen("GET", "/resolve/")]
    assert ranges == [f"bytes=0-{min(count, len(content)) - 1}" for count in hub_remote.GGUF_HEAD_BYTES[:asked]]
    assert "does not fit" in localq(capsys, "pull", "maker/tiny-gguf", "--vram", "520MiB", code=3)[1]
    assert "fits: " in localq(capsys, "pull", "maker/tiny-gguf", "--vram", "4")[1]


def test_a_damaged_gguf_is_refused_and_fetched_by_force(server, capsys, tmp_path):
    server.add("maker/tiny-gguf", {"tiny.gguf": b"GGUF" + bytes(3000)})
    err = localq(capsys, "fit", "maker/tiny-gguf", "--vram", "4", code=8)[1]
    assert "maker/tiny-gguf/tiny.gguf" in err
    assert str(tmp_path) not in err
    assert "maker/tiny-gguf/tiny.gguf" in localq(capsys, "pull", "maker/tiny-gguf", "--vram", "4", code=8)[1]
    assert "cannot determine whether it fits" in localq(capsys, "pull", "maker/tiny-gguf", "--vram", "4", "--force")[1]


@pytest.mark.parametrize(
    ("failure", "code"), [(errno.ENOSPC, 9), (errno.EACCES, 9), (errno.EFBIG, 8), (errno.EINVAL, 8)]
)
def test_only_a_size_that_no_file_has_is_the_repositorys_fault(server, capsys, tmp_path, monkeypatch, failure, code):
    failing(monkeypatch, "model-00001-of-00002.safetensors", failure)
    err = localq(capsys, "fit", REPO, "--vram", "4", code=code)[1]
    assert err.startswith(f"localq: {tmp_path}: " if code == 9 else f"localq: {REPO}: ")


def test_a_full_folder_for_temporary_files_is_said(server, capsys, tmp_path, monkeypatch):
    failing(monkeypatch, "config.json", errno.ENOSPC)
    assert f"{tmp_path}: the disk is full" in localq(capsys, "fit", REPO, "--vram", "4", code=9)[1]


def test_no_folder_for_temporary_files_is_said(server, capsys, monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert "No usable temporary" in localq(capsys, "fit", REPO, "--vram", "4", code=9)[1]


def test_a_header_that_is_cut_off_is_none(tmp_path):
    content, path = gguf(20, 64), tmp_path / "stub.gguf"
    path.write_bytes(content)
    whole = read_container(path)
    seen = 0
    for kept in range(24, content.index(b"token_embd.weight") + 50):
        path.write_bytes(content[:kept].ljust(len(content), b"\0"))
        os.utime(path, ns=(kept, kept))  # it is remembered while its time stays
        try:
            found = read_container(path)
        except LocalqError:
            seen += 1
        else:
            assert replace(found, files=whole.files) == whole, kept  # only zeros were cut off
    assert seen > 500


def on_a_gpu_of(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    card = gpus.Gpu(0, "card", "GPU-aaaa", (8, 9), mib * 2**20, mib * 2**20, None)
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (card,), ()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_chat_and_run_refuse_before_the_download(server, capsys, monkeypatch):
    on_a_gpu_of(monkeypatch, 520)
    for line in (["chat", REPO], ["run", REPO, "hello"]):
        err = localq(capsys, *line, code=3)[1]
        assert "Options: " in err
        assert err.startswith(f"localq: {REPO}: ")
    assert server.sent_of("model-00002-of-00002.safetensors") <= 2 * hub_remote.HEAD_BYTES
    assert localq(capsys, "ls")[1].startswith("no models yet")
    server.requests.clear()
    assert "localq is in offline mode" in localq(capsys, "chat", REPO, "--offline", code=6)[1]
    assert server.requests == []


def test_chat_refuses_what_does_not_run_before_the_download_on_the_cpu_too(server, capsys):
    gemv = {**CONFIG, "quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}}
    server.add(REPO, repository(gemv))
    assert "unsupported format: AWQ in layout 'gemv'" in localq(capsys, "run", REPO, "hello", code=1)[1]
    assert server.sent_of("model-00002-of-00002.safetensors") <= hub_remote.HEAD_BYTES


def test_what_fits_is_here_or_is_forced_goes_on(server, capsys, monkeypatch):
    on_a_gpu_of(monkeypatch, 4096)
    target, asked = catalog.resolve(REPO), settings.Settings()
    choose.check_unlisted(target, choose.budget_here(asked), asked, force=False)
    on_a_gpu_of(monkeypatch, 520)
    server.requests.clear()
    choose.check_unlisted(target, choose.budget_here(asked), asked, force=True)
    assert server.requests == []
    localq(capsys, "pull", REPO, "--force")
    server.requests.clear()
    choose.check_unlisted(target, choose.budget_here(asked), asked, force=False)
    assert server.requests == []

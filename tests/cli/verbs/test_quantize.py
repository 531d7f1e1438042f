"""`localq quantize` from the shell: what it prints where, exit codes, and going on after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localq.errors import ExitCode
from localq.files.model_folder import open_model
from localq.formats import nf4
from localq.formats.open_checkpoint import open_checkpoint
from tests.support.models.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "tiny-llama", "llama")


def localq(*arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), "LOCALQ_CONFIG": str(home / "none.toml"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "localq", "quantize", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_folder_is_quantized(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = localq(llama, "--format", "nf4", "--out", out, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # `localq run` may quantize on its way, and its stdout is the answer's
    assert str(out) in done.stderr
    assert "\x1b" not in done.stderr
    with open_checkpoint(open_model(out)) as checkpoint:
        assert nf4.is_quantized(checkpoint.tensors, "model.layers.0.self_attn.q_proj")

    again = localq(llama, "--out", out, home=tmp_path)
    assert again.returncode == ExitCode.USAGE
    assert "--force" in again.stderr
    assert "Traceback" not in again.stderr
    forced = localq(llama, "--out", out, "--force", "--json", "--quiet", home=tmp_path)
    assert forced.returncode == 0
    assert forced.stderr == ""
    report = json.loads(forced.stdout)
    weights = (out / "model.safetensors").stat().st_size
    assert report == {"schema": 1, "path": str(out), "format": "nf4", "weights_bytes": weights}


def test_what_cannot_be_quantized(llama: Path, tmp_path: Path) -> None:
    cases = [
        ((llama, "--format", "nf5", "--out", tmp_path / "a"), ExitCode.USAGE, "mxfp4, bcq, squeezellm"),
        ((llama,), ExitCode.USAGE, "--out"),
        ((tmp_path, "--out", tmp_path / "b"), ExitCode.BAD_FILE, "config.json"),
        (("no-such-model-anywhere", "--out", tmp_path / "c"), ExitCode.UNKNOWN_MODEL, "no-such-model-anywhere"),
    ]
    for arguments, code, named in cases:
        ended = localq(*arguments, home=tmp_path)
        assert ended.returncode == code, ended.stderr
        assert named in ended.stderr
        assert "Traceback" not in ended.stderr

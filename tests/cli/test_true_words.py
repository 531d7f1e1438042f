"""What an error or a plan says is so: exit codes of texts, formats of files, advice that helps."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from localq.cli import execute
from localq.errors import ExitCode
from tests.support.models.tiny_checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch) -> None:
    for name in ("LOCALQ_DATA", "LOCALQ_CACHE", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("LOCALQ_DEVICE", "cpu")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_checkpoint(tmp_path / "tiny")


def edit(path: Path, **fields: object) -> None:
    """Fields of a JSON file, set or (`...`) removed."""
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", chat_template=...)


# ---- a text that is too long is wrong use, not a model that does not fit


@pytest.mark.parametrize("is_base", [True, False])
@pytest.mark.parametrize("verb", ["run", "chat"])
@pytest.mark.parametrize("size", [5_000, 900_000, 9_000_000])
def test_a_text_that_is_too_long_ends_with_2(verb, is_base, size, folder, monkeypatch, capsys):
    if is_base:
        without_template(folder)
    text = ("a red boat " * size)[:size]
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    arguments = [verb, str(folder), *(["-p", "sum up"] if verb == "chat" else [])]
    code = execute(arguments)
    err = capsys.readouterr().err
    if verb == "chat" and is_base:
        assert code in (ExitCode.FAILURE, ExitCode.USAGE)  # it cannot chat, whatever the text
        return
    assert code == ExitCode.USAGE, err
    assert "long" in err
    assert "/clear" not in err or verb == "chat" or not is_base


# ---- a plan names the format of the files

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@pytest.mark.parametrize("is_stated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_names_the_dtype_of_the_files(dtype, is_stated, tmp_path, capsys):
    import torch

    folder = make_checkpoint(tmp_path / "typed", dtype=getattr(torch, dtype))
    if not is_stated:
        edit(folder / "config.json", dtype=..., torch_dtype=...)
    assert execute(["run", str(folder), "x", "--dry-run"]) == ExitCode.OK
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("format"))
    bits = "32.00 bits per weight, 16.00 in memory" if dtype == "float32" else "16.00 bits per weight"
    assert row.split(None, 1)[1] == f"{DTYPES[dtype]}, {bits} (the only format available)"
    assert execute(["run", str(folder), "x", "--dry-run", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["format"] == DTYPES[dtype]


@pytest.mark.parametrize("value", [None, {}])
def test_no_quantization_is_none(value, folder, tmp_path, capsys):
    edit(folder / "config.json", quantization_config=value)
    assert execute(["show", str(folder), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["format"] in DTYPES.values()
    assert execute(["quantize", str(folder), "--format", "nf4", "--out", str(tmp_path / "out"), "-q"]) == ExitCode.OK
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["quant_method"]


# ---- advice


@pytest.mark.parametrize("verb", [["run", "FOLDER", "hi"], ["chat", "FOLDER", "-p", "hi"]])
@pytest.mark.parametrize(
    "template", ["{% for i in range(10**9) %}x{% endfor %}", "{{ messages[", "{{ 1 + 'a' }}", "{{ x.y.z }}"]
)
def test_a_broken_template_is_no_reason_for_another_verb_that_renders_it(verb, template, folder, capsys):
    (folder / "chat_template.jinja").write_text(template)
    assert execute([part.replace("FOLDER", str(folder)) for part in verb]) == ExitCode.BAD_FILE
    err = capsys.readouterr().err
    assert "chat template" in err
    assert not re.search("`localq (run|chat)`", err)
    assert "Use another copy of the model." in err

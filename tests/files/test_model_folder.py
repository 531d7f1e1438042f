"""What a folder is, and which folders are refused: pickles, missing parts, hostile configurations."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import LIMITS, ModelFiles, check_config, open_model
from tests.support.files.hostile_configs import FIELDS, TEXTS
from tests.support.files.raw_safetensors import entry, write_raw
from tests.support.models.tiny_checkpoints import CHAT_TEMPLATE, make_checkpoint

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def folder_with(folder: Path, **files: Any) -> Path:
    """A folder with config.json and one small shard, and `files` (name with __ for a dot) on top; None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_raw(folder / "model.safetensors", {"a": entry()}, bytes(24))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        if content is None:
            path.unlink()
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def refusal(path: Path) -> LocalqError:
    with pytest.raises(LocalqError) as caught:
        open_model(path)
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert caught.value.next_step
    return caught.value


# ---- what is read


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_folder_of_transformers(tmp_path: Path, model_type: str) -> None:
    files = open_model(make_checkpoint(tmp_path / "my model", model_type))
    assert (files.kind, files.name) == ("safetensors", "my model")
    assert files.config["model_type"] == model_type
    assert files.text_config is files.config
    assert files.eos_ids == (258, 256)  # generation_config's list, not config's single id
    assert files.chat_template == CHAT_TEMPLATE
    assert files.tokenizer_config["eos_token"] == "<|im_end|>"
    assert files.ignored == ()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, None),
        ({"tokenizer_config__json": {"chat_template": "T"}}, "T"),
        ({"tokenizer_config__json": {"chat_template": "T"}, "chat_template__jinja": "J"}, "J"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "tool_use", "template": "U"},
                                                       {"name": "default", "template": "D"}]}}, "D"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "rag", "template": "R"}]}}, None),
    ],
)  # fmt: skip
def test_chat_template(tmp_path: Path, parts: dict[str, Any], expected: str | None) -> None:
    assert open_model(folder_with(tmp_path / "m", **parts)).chat_template == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 1]}, {"eos_token_id": 7}, (3, 1)),
        ({"eos_token_id": 3}, {"eos_token_id": 7}, (3,)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        ({}, {"text_config": {"eos_token_id": [5]}}, (5,)),
        ({"eos_token_id": ["a", True, -1, 2**40]}, {}, ()),
        ({}, {}, ()),
    ],
)
def test_eos_ids(generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]) -> None:
    files = ModelFiles(Path("m"), "safetensors", {"model_type": "llama", **config}, generation)
    assert files.eos_ids == expected


def test_a_snapshot_of_the_cache_is_named_after_its_repository(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "models--org--some--name" / "snapshots" / "0a1b")
    assert open_model(folder).name == "org/some/name"


def test_code_is_listed_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Poison:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    folder = folder_with(
        tmp_path / "m",
        config__json={**CONFIG, "auto_map": {"AutoModel": "code.Model"}},
        code__py=f"open({str(marker)!r}, 'w')",
        **{"weights__zip": "PK"},
    )
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Poison()))
    files = open_model(folder)
    assert files.ignored == ("code.py", "pytorch_model.bin", "weights.zip")
    assert "auto_map" not in files.config
    assert not marker.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert marker.exists()  # the poison does work where it is opened


# ---- what is refused


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path / "m", model__safetensors=None)
    torch.save({"a": torch.ones(1)}, folder / name)
    error = refusal(folder)
    assert "pickle" in error.why
    assert name in error.why


def test_missing_parts_are_named(tmp_path: Path) -> None:
    assert "config.json" in refusal(folder_with(tmp_path / "a", config__json=None)).why
    assert "no .safetensors" in refusal(folder_with(tmp_path / "b", model__safetensors=None)).why
    other = folder_with(tmp_path / "c", model__safetensors=None)
    write_raw(other / "model-00001-of-00002.safetensors", {"a": entry()}, bytes(24))
    assert "model-00001-of-00002.safetensors" in refusal(other).why
    (other / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
    )
    assert "model-00002-of-00002.safetensors, which is missing" in refusal(other).why


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(LocalqError) as caught:
        open_model(tmp_path / "nowhere")
    assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    refusal(text)


@pytest.mark.parametrize("name", TEXTS)
def test_config_that_is_no_configuration(tmp_path: Path, name: str) -> None:
    assert "config.json" in refusal(folder_with(tmp_path / "m", config__json=TEXTS[name])).what


def test_large_and_binary_files_are_refused(tmp_path: Path) -> None:
    padded = json.dumps({**CONFIG, "x": " " * 2**23})
    assert "too large" in refusal(folder_with(tmp_path / "a", config__json=padded)).why
    assert "too large" in refusal(folder_with(tmp_path / "b", chat_template__jinja=" " * (2**20 + 1))).why
    folder = folder_with(tmp_path / "c")
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    assert "UTF-8" in refusal(folder).why
    assert "not a string" in refusal(folder_with(tmp_path / "d", tokenizer_config__json={"chat_template": 5})).why
    assert "object" in refusal(folder_with(tmp_path / "e", generation_config__json=[1])).why


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
@pytest.mark.parametrize("change", FIELDS, ids=lambda change: str(change)[:60])
def test_hostile_configurations_are_refused(change: dict[str, Any], nested: bool) -> None:
    body = {**CONFIG, **change}
    config = {"model_type": "gemma3", "text_config": body} if nested else body
    with pytest.raises(LocalqError) as caught:
        check_config(config, "config.json")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert next(iter(change)) in caught.value.why or "heads" in caught.value.why


@pytest.mark.parametrize("name", LIMITS)
def test_limits_hold_at_their_edges(name: str) -> None:
    least, greatest = LIMITS[name]
    for value in (None, least, greatest):
        check_config({"model_type": "llama", name: value}, "config.json")
    for value in (least - 1, greatest + 1):
        with pytest.raises(LocalqError, match=name):
            check_config({"model_type": "llama", name: value}, "config.json")


def test_opening_a_model_loads_no_torch(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    code = (
        "import sys, pathlib; from localq.files.model_folder import open_model; open_model(pathlib.Path(sys.argv[1]));"
        "assert not {'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)

"""Layers trained together at the end of a conversion: nearer to the full model, and restartable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from localq import kernels
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.quantize import by_layer
from localq.quantize.codebooks import joint_output, joint_training
from localq.quantize.settings import Effort, Tuning
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests
from tests.support.quantize.vq2_conversions import converted, loaded, logits, request, windows

pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
         "num_key_value_heads": 1}  # fmt: skip
WHOLE = Tuning(24, 2, 4e-3, 4e-3, 4e-3)
SETTINGS: dict[str, Any] = {
    "windows": windows(4, 40),
    "effort": Effort(beam=2, columns=32),
    "tuning": Tuning(steps=2, sequences=2),
    "joint_tuning": WHOLE,
    "seed": 5,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", **SHAPE)


@pytest.fixture(scope="module")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(source, tmp_path_factory.mktemp("out") / "whole", **SETTINGS)


def divergence(source: Path, folder: Path, texts: list[list[int]]) -> float:
    """Mean KL from the full model, nats a token."""
    full, made = loaded(source), loaded(folder)
    each = []
    for text in texts:
        p, q = (torch.log_softmax(logits(model, text).double(), -1) for model in (full, made))
        each.append(float((p.exp() * (p - q)).sum(-1).mean()))
    return sum(each) / len(each)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("llama", {}), ("gemma2", {}), ("qwen2", {"scheme": "s4l16+s8l16"}), ("llama", {"format": "aqlm2x8"})],
    ids=["llama", "gemma2", "3 bits", "aqlm2x8"],
)
def test_the_model_is_nearer_to_the_full_one_and_its_codes_are_the_same(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    source = make_checkpoint(
        tmp_path / "source", model_type, dtype=torch.float32, num_hidden_layers=2, initializer_range=0.1
    )
    changes = {**SETTINGS, "tuning": Tuning(), "joint_tuning": Tuning(16, 2, 1e-3, 5e-4, 5e-4), **changes}
    said: list[str] = []
    trained = by_layer.convert(request(source, tmp_path / "trained", **changes), say=said.append)
    apart = converted(source, tmp_path / "apart", **{**changes, "joint_tuning": Tuning()})
    texts = changes["windows"]
    assert divergence(source, trained, texts) < 0.9 * divergence(source, apart, texts)
    assert said[-1].startswith(f"{source.name}: joint training: ")
    assert sorted(path.name for path in trained.iterdir()) == sorted(path.name for path in apart.iterdir())
    one, other = tensors(trained), tensors(apart)
    assert one.keys() == other.keys()
    changed = {name.rpartition(".")[2] for name, value in one.items() if not torch.equal(value, other[name])}
    assert not changed & {"codes", "codes_2", "signs"}
    assert {"scales"} < changed


def _stopped(source: Path, out: Path, what: str, done: int, **settings: Any) -> None:
    """A conversion that ends where it tells of this."""

    def stop(*told: Any) -> None:
        if told[:2] == (what, done):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        by_layer.convert(request(source, out, **(settings or SETTINGS)), stop)


def test_what_is_stopped_goes_on_from_the_steps_that_are_kept(source: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _stopped(source, out, by_layer.TRAINING, 2 * joint_training.KEPT_EVERY + 3)
    with pytest.raises(LocalqError):
        open_model(out)
    told: list[tuple[str, int, int]] = []
    by_layer.convert(request(source, out, **SETTINGS), lambda *each: told.append(each))
    assert {what for what, *_ in told[1:]} == {by_layer.CATCHING_UP, by_layer.TRAINING, by_layer.QUANTIZING_FIRST}
    steps = [done for what, done, _ in told if what == by_layer.TRAINING]
    assert steps == list(range(2 * joint_training.KEPT_EVERY, WHOLE.steps + 1))
    assert digests(out) == digests(finished)


def test_what_is_stopped_between_the_layers_that_are_written_goes_on(
    source: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = by_layer.ShardWriter.write, [5]  # two ends, two drafts, one layer

    def stop(*arguments: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(*arguments)

    monkeypatch.setattr(by_layer.ShardWriter, "write", stop)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        converted(source, out, **SETTINGS)
    monkeypatch.undo()
    assert len(list(out.glob("model-*"))) == 3
    assert digests(converted(source, out, **SETTINGS)) == digests(finished)


@pytest.mark.parametrize("name", [joint_training.FILE, joint_output.DRAFT.format(2)])
def test_damaged_files_of_a_training_are_made_again(source: Path, finished: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    _stopped(source, out, by_layer.TRAINING, joint_training.KEPT_EVERY + 1)
    raw = bytearray((out / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (out / name).write_bytes(raw)
    assert digests(converted(source, out, **SETTINGS)) == digests(finished)


def test_another_training_does_not_go_on(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _stopped(source, out, by_layer.TRAINING, 1)
    with pytest.raises(LocalqError, match="a different unfinished conversion") as caught:
        converted(source, out, **{**SETTINGS, "joint_tuning": Tuning(25, 2)})
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_trained_too_and_go_on(model_type: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", model_type, **SHAPE)
    out, steps = tmp_path / "out", joint_training.KEPT_EVERY + 3
    settings = {**SETTINGS, "joint_tuning": replace(WHOLE, steps=steps)}
    _stopped(source, out, by_layer.TRAINING, joint_training.KEPT_EVERY + 1, **settings)
    again = converted(source, out, **settings)
    assert digests(again) == digests(converted(source, tmp_path / "finished", **settings))


@pytest.mark.cuda
def test_on_a_gpu(source: Path, tmp_path: Path) -> None:
    """Trained there, and written; interrupted, the same."""
    settings = {**SETTINGS, "device": torch.device("cuda", 0)}
    finished, out = converted(source, tmp_path / "finished", **settings), tmp_path / "out"
    _stopped(source, out, by_layer.TRAINING, joint_training.KEPT_EVERY + 1, **settings)
    assert digests(converted(source, out, **settings)) == digests(finished)


def test_models_that_are_too_large_are_made_layer_by_layer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = converted(source, tmp_path / "apart", **{**SETTINGS, "joint_tuning": Tuning()})
    monkeypatch.setattr(joint_output, "LARGEST", 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96) - 1)
    said: list[str] = []
    assert digests(by_layer.convert(request(source, tmp_path / "out", **SETTINGS), say=said.append)) == digests(apart)
    assert "joint training is limited" in said[0]

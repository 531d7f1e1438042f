"""Models in compressed-tensors as they are published: several entries, `ignore`, malformed files."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.catalog import resolve
from localq.files.model_folder import ModelFiles, open_model
from localq.formats.dense_checkpoint import dequantized
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner import uncatalogued
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.formats.int4_checkpoints import (
    COMPRESSED,
    Int4,
    compressed_config,
    compressed_group,
    reference,
    tensors,
    write,
)
from tests.support.models.tiny_checkpoints import make_model

CPU = LoadOptions(device="cpu", dtype="float32")
SYMMETRIC, FINER = Int4(COMPRESSED, 64, symmetric=True), Int4(COMPRESSED, 32)
Q = "model.layers.0.self_attn.q_proj"


def rewrite(folder: Path, held: dict[str, Tensor], quantization: dict[str, Any] | None) -> None:
    save_file({name: each.contiguous() for name, each in held.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def logits(folder: Path) -> Tensor:
    loaded = load(open_model(folder), CPU)
    return logits_of(loaded.model, loaded, prompt_of(20))


def test_a_gemma_4_in_its_wrapper(tmp_path):
    """As Google publishes those trained for 4 bits: symmetric groups of 32, around the text model a wrapper."""
    of = Int4(COMPRESSED, 32, symmetric=True)
    linears = write(tmp_path / "int4", of, torch.bfloat16, "gemma4_text", tie_word_embeddings=False)
    held = load_file(tmp_path / "int4" / "model.safetensors")
    plain = {name: each for name, each in held.items() if name.rpartition(".")[0] not in linears}
    plain |= {f"{path}.weight": reference(made, of) for path, made in linears.items()}
    shutil.copytree(tmp_path / "int4", tmp_path / "plain")
    rewrite(tmp_path / "plain", plain, None)
    wrapped = {name.replace("model.", "model.language_model.", 1): each for name, each in held.items()}
    text = json.loads((tmp_path / "int4" / "config.json").read_text())
    stated = {"model_type": "gemma4", "text_config": text, "tie_word_embeddings": False}
    (tmp_path / "int4" / "config.json").write_text(json.dumps(stated))
    rewrite(tmp_path / "int4", wrapped, text.pop("quantization_config"))
    torch.testing.assert_close(logits(tmp_path / "int4"), logits(tmp_path / "plain"), rtol=0, atol=1e-4)


def test_several_entries_and_names_to_ignore(tmp_path):
    """Targets by pattern, class and name, and Linears left in 16 bit at random: the tensors say which is which."""
    chance = random.Random(7)
    write(tmp_path / "int4", SYMMETRIC, torch.bfloat16, num_hidden_layers=2)
    plain_model = make_model("llama", initializer_range=0.15, num_hidden_layers=2).bfloat16()
    paths = [name for name, each in plain_model.named_modules() if isinstance(each, nn.Linear) and name != "lm_head"]
    ignored = chance.sample(paths, 5)
    held = load_file(tmp_path / "int4" / "model.safetensors")
    plain = dict(held)
    for number, path in enumerate(paths):
        shape = tuple(plain_model.get_submodule(path).weight.shape)
        of = FINER if path.endswith(("down_proj", "v_proj")) else SYMMETRIC
        made = tensors(shape, of, torch.bfloat16, seed=number)
        held = {name: each for name, each in held.items() if not name.startswith(f"{path}.weight")}
        plain = {name: each for name, each in plain.items() if not name.startswith(f"{path}.weight")}
        weight = plain_model.get_submodule(path).weight.data if path in ignored else reference(made, of)
        plain[f"{path}.weight"] = weight
        held |= {f"{path}.weight": weight} if path in ignored else {path + key: each for key, each in made.items()}
    stated = compressed_config(
        compressed_group(FINER, ("re:.*down_proj$", "re:.*v_proj")), compressed_group(SYMMETRIC, ("Linear", paths[0])),
        ignore=["lm_head", *ignored, "re:.*vision.*", *(f"other.{path}" for path in paths)],
    )  # fmt: skip
    shutil.copytree(tmp_path / "int4", tmp_path / "plain")
    rewrite(tmp_path / "int4", held, stated)
    rewrite(tmp_path / "plain", plain, None)
    assert torch.equal(logits(tmp_path / "int4"), logits(tmp_path / "plain"))
    offer = uncatalogued.offer(resolve(str(tmp_path / "int4")), offline=True)
    assert (offer.format, offer.scheme, offer.unsupported) == (COMPRESSED, "g32", None)


def test_the_16_bit_baseline_has_the_dequantized_weights(tmp_path):
    linears = write(tmp_path / "int4", FINER, torch.bfloat16, num_hidden_layers=1)
    with open_checkpoint(open_model(tmp_path / "int4")) as checkpoint:
        dense = dequantized(checkpoint, torch.device("cpu"), torch.bfloat16)
        assert not [name for name in dense.tensors if "weight_" in name]
        for path, made in linears.items():
            assert torch.equal(dense.read(f"{path}.weight"), reference(made, FINER))


# ---- hostile files


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    write(folder, FINER, torch.bfloat16, num_hidden_layers=1)
    return folder


@pytest.fixture
def edit(sound: Path, tmp_path: Path) -> Callable[..., ModelFiles]:
    """A copy, changed by a function of its tensors and of its quantization_config."""

    def make(change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> ModelFiles:
        made = tmp_path / "edited"
        shutil.copytree(sound, made)
        held = load_file(made / "model.safetensors")
        stated = json.loads((made / "config.json").read_text())["quantization_config"]
        change(held, stated)
        rewrite(made, held, stated)
        return open_model(made)

    return make


DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, Any]], object], str]] = {
    "no codes": (lambda held, stated: held.pop(f"{Q}.weight_packed"), "missing|do not belong to this architecture"),
    "no scales": (lambda held, stated: held.pop(f"{Q}.weight_scale"), f"lacks {Q}.weight_scale"),
    "no shape": (lambda held, stated: held.pop(f"{Q}.weight_shape"), f"lacks {Q}.weight_shape"),
    "another width": (
        lambda held, stated: held.update(
            {Q + key: held[Q + key].repeat(2, 1) for key in (".weight_packed", ".weight_scale", ".weight_zero_point")}
        ),
        r"q_proj' has shape \[256, 128\], not \[128, 128\]",
    ),
    "another shape": (
        lambda held, stated: held.update({f"{Q}.weight_shape": torch.tensor([128, 127])}), f"^{Q}: .*weight_shape is"
    ),
    "NaN": (
        lambda held, stated: held.update({f"{Q}.weight_scale": held[f"{Q}.weight_scale"] * float("nan")}),
        f"^{Q}: .*weight_scale contain NaN",
    ),
    "codes of eight bits": (
        lambda held, stated: held.update({f"{Q}.weight_packed": held[f"{Q}.weight_packed"].repeat(1, 2)}),
        f"^{Q}: .*4 groups of 64 columns with zero points, but config.json specifies",
    ),
    "plain and quantized": (
        lambda held, stated: held.update({f"{Q}.weight": torch.zeros(128, 128)}),
        rf"'{Q}\.weight' and another tensor both map to",
    ),
    "groups that no entry has": (
        lambda held, stated: stated["config_groups"]["group_0"]["weights"].update(group_size=128),
        "but config.json specifies 4-bit weights with groups of 128 and zero points",
    ),
    "another program": (
        lambda held, stated: stated.update(quant_method="awq", bits=4, format="gemm"), "but the tensors are packed for"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(edit, case):
    change, why = DAMAGED[case]
    files = edit(change)
    begin = time.monotonic()
    with pytest.raises(LocalqError, match=why) as caught:
        load(files, CPU)
    assert time.monotonic() - begin < 1
    assert caught.value.exit_code == ExitCode.BAD_FILE


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": ({"num_bits": 3}, "compressed-tensors with 3 bits"),
    "floats": ({"num_bits": 4, "type": "float"}, "compressed-tensors with float weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_variants_are_refused_before_anything_is_read(edit, case):
    fields, why = REFUSED[case]
    files = edit(lambda held, stated: stated["config_groups"]["group_0"]["weights"].update(fields))
    for attempt in (lambda: load(files, CPU), lambda: uncatalogued.offer(resolve(str(files.path)), offline=True)):
        with pytest.raises(LocalqError, match=why) as caught:
            attempt()
        assert caught.value.exit_code == ExitCode.FAILURE

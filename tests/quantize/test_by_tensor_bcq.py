"""A model in binary codes: what is written, how it says so, that it loads and computes what its bytes stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localq.bench.quality import bits
from localq.cli import execute
from localq.cli.verbs import quantize_bcq
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files import stored_format
from localq.files.model_folder import open_model
from localq.files.stored_format import format_of_config
from localq.formats import bcq
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.binary import layers as binary_layers
from localq.quantize.bits import binary_mixture
from localq.quantize.bits import mixture as bit_mixture
from localq.quantize.model import sensitivity
from localq.quantize.model.input_moments import CalibrationText, open_streams
from localq.quantize.output import sensitivity_log
from localq.quantize.output.tensor_jobs import is_block_linear
from localq.quantize.request import TensorwiseRequest
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "qwen2", "qwen2", num_hidden_layers=2)  # with biases


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "qwen2-bcq"
    arguments = ["quantize", str(source), "--format", "bcq", "--bits", "2", "--group", "32", "--zero-points", "-q"]
    assert execute([*arguments, "--calibration", "none", "--out", str(out)]) == ExitCode.OK
    return out


def test_every_matrix_of_the_blocks_is_quantized_and_all_else_is_copied(source: Path, made: Path) -> None:
    maker = bcq.of_scheme("q2g32z")
    with open_checkpoint(open_model(source)) as before, open_checkpoint(open_model(made)) as after:
        expected = {}
        for name, part in before.tensors.items():
            tensor = before.read(name)
            if is_block_linear(name, part.shape):
                expected |= maker.to_tensors(maker.quantize(tensor), name.removesuffix(".weight"))
            else:
                expected[name] = tensor
        assert expected.keys() == after.tensors.keys()
        for name, tensor in expected.items():
            assert torch.equal(after.read(name), tensor), name


def test_the_configuration_and_the_shapes_say_what_it_is(made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "localq_bcq"
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    assert format_of_config(config) == "bcq"
    assert stored_format.scheme_of(open_model(made)) == "q2g32z"
    assert bits.per_weight(open_model(made)) == 2 + 3 * 16 / 32


def test_it_loads_and_computes_what_its_bytes_stand_for(made: Path) -> None:
    loaded = load(open_model(made), LoadOptions(device="cpu", dtype="float32"))
    assert loaded.format == "bcq"
    with open_checkpoint(open_model(made)) as checkpoint:
        prefixes = [name.removesuffix(".signs") for name in checkpoint.tensors if name.endswith(".signs")]
        assert len(prefixes) == 2 * 7
        for prefix in prefixes:
            weight = bcq.dequantize(bcq.from_checkpoint(checkpoint, prefix), torch.float32)
            assert torch.equal(loaded.model.get_parameter(f"{prefix.removeprefix('model.')}.weight"), weight)
    with torch.inference_mode():
        logits = loaded.model(torch.arange(9), torch.arange(9), loaded.cache, 9)
    assert torch.isfinite(logits).all()


def test_another_scheme_does_not_go_on_with_it(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", out, scheme="q1row"))
    assert stored_format.scheme_of(open_model(out)) == "q1row"
    with pytest.raises(LocalqError) as caught:
        by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", out, scheme="q3g128"))
    assert caught.value.exit_code == ExitCode.USAGE
    by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", out, force=True))
    assert stored_format.scheme_of(open_model(out)) in ("q3g128", "q3row")  # rows of 64 and 128 columns


TEXT = CalibrationText([list(range(3, 35)), list(range(40, 72)), [7, 9] * 16], torch.device("cpu"))


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with open_checkpoint(open_model(folder)) as checkpoint:
        return {name: each.shape for name, each in checkpoint.tensors.items() if name.endswith((".signs", ".alphas"))}


def test_a_mixture_takes_no_more_than_asked_and_fills_it(source: Path, tmp_path: Path) -> None:
    told: list[str] = []
    wish = binary_mixture.BitBudget(3.5, TEXT)
    out = by_tensor.convert(
        TensorwiseRequest(open_model(source), "bcq", tmp_path / "out", budget=wish), None, told.append
    )
    assert 3.3 < bits.per_weight(open_model(out)) <= 3.5
    assert any("bits per weight (at most 3.5)" in line for line in told)
    assert re.fullmatch(r"mix3\.[345]\d?", stored_format.scheme_of(open_model(out)))
    found = shapes(out)
    for layer in range(2):  # what reads one input has one scheme, and goes into one launch
        for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({found[f"model.layers.{layer}.{name}.alphas"][1:] for name in names}) == 1
    assert len({each[1] for name, each in found.items() if name.endswith(".signs")}) > 1
    assert not (out / bit_mixture.FILE).exists()
    assert load(open_model(out), LoadOptions(device="cpu", dtype="float32")).format == "bcq"


def test_a_mixture_that_was_stopped_keeps_its_choice(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish, out = binary_mixture.BitBudget(3.5, TEXT), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(by_tensor, "_write_shards", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", out, budget=wish))
    assert (out / bit_mixture.FILE).is_file()
    monkeypatch.setattr(binary_mixture, "sensitivities", lambda *given, **named: pytest.fail("measured again"))
    by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", out, budget=wish))
    assert not (out / bit_mixture.FILE).exists()


@pytest.mark.parametrize("step", [1, 3])  # on the way there, and back
def test_a_mixture_that_was_killed_while_it_measured_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    wish, out, left, steps = binary_mixture.BitBudget(3.5, TEXT), tmp_path / "out", [step], []
    real, read = sensitivity_log.SensitivityLog.reach, sensitivity.SourceModel.block

    def reach(*given: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(sensitivity_log.SensitivityLog, "reach", reach)
        with pytest.raises(KeyboardInterrupt):
            by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", out, budget=wish))
    assert (out / sensitivity_log.FILE).is_file()
    monkeypatch.setattr(
        sensitivity.SourceModel, "block", lambda model, layer: (steps.append(layer), read(model, layer))[1]
    )
    by_tensor.convert(
        TensorwiseRequest(open_model(source), "bcq", out, budget=wish), lambda what, *_: steps.append(what)
    )
    measured = [each for each in steps[: steps.index("quantizing")] if isinstance(each, int)]
    assert measured == {1: [1, 1, 0, 0, 1], 3: [1, 0, 0, 1]}[step]  # the last two: where schemes are tried
    assert not list(out.glob("conversion.*"))
    assert digests(out) == digests(
        by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", tmp_path / "whole", budget=wish))
    )


def test_too_few_bits_for_a_mixture(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalqError, match="this model needs at least") as caught:
        by_tensor.convert(
            TensorwiseRequest(open_model(source), "bcq", tmp_path / "out", budget=binary_mixture.BitBudget(1.01, TEXT))
        )
    assert caught.value.exit_code == ExitCode.USAGE


def test_bits_in_between_are_a_mixture() -> None:
    assert quantize_bcq.mixture("bcq", "3.25", None, None) == 3.25
    assert quantize_bcq.mixture("bcq", "3", "64", None) is None
    assert quantize_bcq.mixture("vq2", "2.3", None, None) is None
    for given in (("bcq", "3.25", "64", None), ("bcq", "3.25", None, True)):
        with pytest.raises(LocalqError, match="chooses the group size of each matrix"):
            quantize_bcq.mixture(*given)


GIVEN = {
    ("bcq", None, None, None): "q3g128", ("bcq", "4", "row", None): "q4row", ("bcq", "1", "512", True): "q1g512z",
    ("nf4", "3", None, None): "",
}  # fmt: skip
WRONG = {
    ("bcq", "6", None, None): "'6' is not supported", ("bcq", "x", "64", None): "'x' is not supported",
    ("bcq", "3", "100", None): "'100' is not supported",
    ("nf4", None, "64", None): "--group: --format nf4 does not support this option",
    ("vq2", "2", None, True): "--zero-points: --format vq2 does not support this option",
}  # fmt: skip


@pytest.mark.parametrize("given", GIVEN)
def test_options(given: tuple) -> None:
    assert quantize_bcq.scheme(*given) == GIVEN[given]


@pytest.mark.parametrize("given", WRONG)
def test_options_that_are_refused(given: tuple) -> None:
    with pytest.raises(LocalqError, match=WRONG[given]) as caught:
        quantize_bcq.scheme(*given)
    assert caught.value.exit_code == ExitCode.USAGE


# ---- on a text


def logits(folder: Path, ids: Tensor) -> Tensor:
    """f32 [T, vocab], of the whole prompt."""
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="float32"))
    with torch.inference_mode():
        hidden = loaded.model(ids, torch.arange(len(ids)), loaded.cache, len(ids))
    return hidden.float()


def test_on_a_text_the_model_computes_more_nearly_what_it_did(source: Path, tmp_path: Path) -> None:
    """Of the text itself; and only the codes differ, not what is written besides or how it is called."""
    ids = torch.tensor(TEXT.windows[0])
    plain = by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", tmp_path / "plain", scheme="q2g32"))
    on_text = by_tensor.convert(
        TensorwiseRequest(open_model(source), "bcq", tmp_path / "text", scheme="q2g32", text=TEXT)
    )
    assert shapes(on_text) == shapes(plain)
    assert stored_format.scheme_of(open_model(on_text)) == stored_format.scheme_of(open_model(plain)) == "q2g32"
    assert (on_text / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    exact = logits(source, ids)
    lost = [(logits(folder, ids) - exact).square().mean() for folder in (plain, on_text)]
    assert lost[1] < 0.5 * lost[0]
    assert not list(on_text.glob("conversion*"))


def test_rows_that_are_no_multiple_of_8_are_copied_on_a_text_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without one; and what is written already is not searched again for the lack of them."""
    uneven = open_model(make_checkpoint(tmp_path / "uneven", "llama", num_hidden_layers=2, intermediate_size=100))
    plain = by_tensor.convert(TensorwiseRequest(uneven, "bcq", tmp_path / "plain", scheme="q2g32"))
    whole = by_tensor.convert(TensorwiseRequest(uneven, "bcq", tmp_path / "text", scheme="q2g32", text=TEXT))
    assert shapes(whole) == shapes(plain)
    mixed = by_tensor.convert(
        TensorwiseRequest(uneven, "bcq", tmp_path / "mixed", budget=binary_mixture.BitBudget(3.5, TEXT))
    )
    assert shapes(mixed).keys() == shapes(plain).keys()
    with open_checkpoint(uneven) as before, open_checkpoint(open_model(mixed)) as after:
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(after.read(name), before.read(name))
    assert load(open_model(mixed), LoadOptions(device="cpu", dtype="float32")).format == "bcq"

    def written(prefix: str) -> bcq.Packed | None:
        names = [prefix + suffix for suffix in bcq.suffixes]
        with open_checkpoint(open_model(whole)) as checkpoint:
            return bcq.from_checkpoint(checkpoint, prefix) if names[0] in checkpoint.tensors else None

    monkeypatch.setattr(binary_layers, "_quantize_group", lambda *given: pytest.fail("searched again"))
    with open_checkpoint(uneven) as checkpoint, torch.inference_mode():
        made = binary_layers.LayerCodes(
            *open_streams(TEXT, uneven, checkpoint), lambda prefix: bcq.of_scheme("q2g32"), written
        )
        again = made.codes("model.layers.1.mlp.up_proj")
    stored = written("model.layers.1.mlp.up_proj")
    assert stored is not None
    assert torch.equal(again.codes, stored.codes)


def test_one_that_was_stopped_goes_on_to_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was written of the layers before, which are not searched again."""
    whole = by_tensor.convert(
        TensorwiseRequest(open_model(source), "bcq", tmp_path / "whole", shard_bytes=5_000, text=TEXT)
    )
    out, packed = tmp_path / "out", binary_layers.LayerCodes.codes

    def stopped(layers: binary_layers.LayerCodes, prefix: str) -> bcq.Packed:
        if "layers.1.mlp" in prefix:
            raise KeyboardInterrupt
        return packed(layers, prefix)

    with monkeypatch.context() as patch:
        patch.setattr(binary_layers.LayerCodes, "codes", stopped)
        with pytest.raises(KeyboardInterrupt):
            by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", out, shard_bytes=5_000, text=TEXT))
    searched: list[str] = []
    search = binary_layers._quantize_group

    def told(*given: Any) -> list[bcq.Packed]:
        searched.append(given[4])
        return search(*given)

    monkeypatch.setattr(binary_layers, "_quantize_group", told)
    by_tensor.convert(TensorwiseRequest(open_model(source), "bcq", out, shard_bytes=5_000, text=TEXT))
    assert set(searched) == {"model.layers.1."}
    files = sorted(path.name for path in whole.glob("*.safetensors"))
    assert len(files) > 3
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in files)


def test_a_text_is_the_default(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    arguments = ["quantize", str(source), "--format", "bcq", "--device", "cpu", "--windows", "1"]
    assert execute([*arguments, "--calibration", str(text), "--out", str(tmp_path / "out")]) == ExitCode.OK
    assert "computing error weights using 1 window of" in capsys.readouterr().err
    for option in (("--best",), ("--seed", "1"), ("--calibration", "none")):
        assert execute([*arguments, *option, "--out", str(tmp_path / "other")]) == ExitCode.USAGE
        assert (
            "does not support this option" in (said := capsys.readouterr().err) or "without a calibration text" in said
        )

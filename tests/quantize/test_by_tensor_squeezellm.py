"""A model with 16 values a row: made on a text or without, gone on with after a kill, loaded; and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from localq.bench.quality import bits
from localq.cli import execute
from localq.engine.load import weights
from localq.engine.load.load import load, share_scratch
from localq.engine.step.operands import fusable, operand
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.files.stored_format import format_of_config
from localq.formats import squeezellm
from localq.formats.open_checkpoint import open_checkpoint
from localq.formats.squeezellm.kernel import RowLutOperand
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.model import input_moments
from localq.quantize.model.calibration_stream import NoCache
from localq.quantize.output.tensor_jobs import is_block_linear
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.packed_models import packed_model
from tests.support.formats import expert_checkpoints
from tests.support.models.tiny_checkpoints import make_checkpoint

CPU = torch.device("cpu")
TEXT = input_moments.CalibrationText([list(range(3, 35)), list(range(40, 72)), [7, 9] * 16], CPU)
LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "qwen2"  # with biases
    return make_checkpoint(folder, "qwen2", num_hidden_layers=2, max_position_embeddings=256, intermediate_size=256)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "made"
    return by_tensor.convert(TensorwiseRequest(open_model(source), "squeezellm", out, shard_bytes=60_000, text=TEXT))


def moments_of(source: Path) -> dict[str, torch.Tensor]:
    """Mean squares of the inputs of all linears, by hooks on the loaded model."""
    model = load(open_model(source), LoadOptions(device="cpu", dtype="float32")).model
    sums: dict[str, torch.Tensor] = {}

    def look(name: str):
        def add(module: object, given: tuple[torch.Tensor, ...]) -> None:
            sums[name] = sums.get(name, 0) + given[0].double().square().sum(0)

        return add

    for name, module in model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(look(f"model.layers.{name}"))
    with torch.inference_mode():
        for ids in TEXT.windows:
            model(torch.tensor(ids), torch.arange(len(ids)), NoCache(), len(ids))
    return {name: (total / 96).float() for name, total in sums.items()}


def test_columns_count_as_their_inputs_do(source: Path, tmp_path: Path) -> None:
    files = open_model(source)
    with open_checkpoint(files) as checkpoint:
        found = input_moments.load_or_measure(tmp_path, TEXT, files, checkpoint, lambda what, done, total: None)
        again = input_moments.load_or_measure(
            tmp_path, TEXT, files, checkpoint, lambda *told: pytest.fail("measured again")
        )
    assert len(found) == 2 * 7
    assert all(torch.equal(found[name], again[name]) for name in found)
    for name, expected in moments_of(source).items():
        assert torch.allclose(found[name], expected, rtol=1e-4), name


def test_every_matrix_of_the_blocks_is_made_with_them(source: Path, made: Path, tmp_path: Path) -> None:
    moments, files = moments_of(source), open_model(source)
    with open_checkpoint(files) as before, open_checkpoint(open_model(made)) as after:
        assert len(after.tensors) == len(before.tensors) + 2 * 7
        for name, part in before.tensors.items():
            if not is_block_linear(name, part.shape):
                assert torch.equal(after.read(name), before.read(name)), name
                continue
            prefix, weight = name.removesuffix(".weight"), before.read(name).float()
            got = squeezellm.dequantize(squeezellm.from_checkpoint(after, prefix), torch.float32)
            best = squeezellm.dequantize(squeezellm.quantize(weight, moments[prefix]), torch.float32)
            losses = [float((moments[prefix] * (each - weight).square()).sum()) for each in (got, best)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-3), name
    assert not (made / input_moments.FILE).exists()
    assert not list(tmp_path.iterdir())


def test_the_configuration_says_what_it_is_and_it_loads(made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "squeezellm", "wbits": 4, "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    assert format_of_config(config) == "squeezellm"
    loaded = load(open_model(made), LoadOptions(device="cpu", dtype="float32"))
    assert loaded.format == "squeezellm"
    with open_checkpoint(open_model(made)) as checkpoint:
        packed = squeezellm.from_checkpoint(checkpoint, "model.layers.1.mlp.up_proj")
    weight = squeezellm.dequantize(packed, torch.float32)
    assert torch.equal(loaded.model.get_parameter("layers.1.mlp.up_proj.weight"), weight)
    assert 4 < bits.per_weight(open_model(made)) <= 4 + 256 / 64  # columns of the narrowest


def test_packed_linears_give_the_same_logits(made: Path, monkeypatch) -> None:
    """What a GPU holds, on the CPU: tensors in one arena, slabs in the shared scratch; one launch for what shares x."""
    files = open_model(made)
    model, sizes, _ = packed_model(files)
    plain = load(files, LoadOptions(device="cpu", dtype="float32")).model
    linears = [module for module in model.modules() if isinstance(module, squeezellm.Linear)]
    assert len(linears) == 14
    assert {each.in_features for each in linears if each.tiled} == {128, 256}  # the others have 64 columns
    assert sum(sizes) == weights.weight_bytes(model)["weights"]
    plain.make_tables(512, CPU)
    ids = torch.tensor(TEXT.windows[0])
    with torch.inference_mode():
        expected, got = (each(ids, torch.arange(32), NoCache(), 32) for each in (plain, model))
        assert torch.equal(got, expected)
        assert share_scratch(model, torch.float32) > 0
        for linear in linears:
            linear.scratch = linear.scratch[: 4 * linear.in_features * 50]  # slabs of 50 rows
            monkeypatch.setattr(linear, "forward", linear._by_slabs)
        slabs = model(ids, torch.arange(32), NoCache(), 32)
    assert (slabs - expected).norm() / expected.norm() < 3e-5
    attention = model.layers[0].self_attn
    operands = [operand(each) for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert all(isinstance(each, RowLutOperand) for each in operands)
    assert fusable(operands)
    assert not operands[0].readable()  # on a CPU
    assert operands[0].bytes() == attention.q_proj.packed.nbytes + attention.q_proj.bias.nbytes
    assert operands[0].halves() is None


def test_tiles_and_rows_are_not_one_launch() -> None:
    made = (
        squeezellm.Packed(torch.zeros(out, 64, dtype=torch.uint8), torch.zeros(out, 16).half()) for out in (8, 16, 9)
    )
    tiles, others, rows = (operand(squeezellm.Linear(each).tile_()) for each in made)
    assert fusable([tiles, others])
    assert not fusable([tiles, rows])


def test_rows_that_the_kernel_does_not_take_are_no_operand() -> None:
    packed = squeezellm.Packed(torch.zeros(4, 20, dtype=torch.uint8), torch.zeros(4, 16).half())
    assert operand(squeezellm.Linear(packed)) is None


def test_what_was_killed_goes_on_with_what_it_measured(source: Path, made: Path, tmp_path: Path) -> None:
    files, told = open_model(source), []

    def stop(what: str, done: int, total: int) -> None:
        told.append(what)
        if what == "quantizing" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        by_tensor.convert(TensorwiseRequest(files, "squeezellm", tmp_path / "out", shard_bytes=60_000, text=TEXT), stop)
    assert input_moments.MEASURING in told
    assert (tmp_path / "out" / input_moments.FILE).is_file()
    told.clear()
    again = {"shard_bytes": 60_000, "text": TEXT}
    by_tensor.convert(
        TensorwiseRequest(files, "squeezellm", tmp_path / "out", **again), lambda what, *_: told.append(what)
    )
    assert set(told) == {"quantizing"}
    for path in made.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in made.iterdir()}


def test_another_text_is_another_conversion(source: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "quantizing":
            raise KeyboardInterrupt

    files = open_model(source)
    with pytest.raises(KeyboardInterrupt):
        by_tensor.convert(TensorwiseRequest(files, "squeezellm", tmp_path / "out", text=TEXT), stop)
    other = input_moments.CalibrationText(TEXT.windows[:1], CPU)
    for text in (other, None):
        with pytest.raises(LocalqError, match="a different unfinished conversion") as caught:
            by_tensor.convert(TensorwiseRequest(files, "squeezellm", tmp_path / "out", text=text))
        assert caught.value.exit_code is ExitCode.USAGE
    by_tensor.convert(TensorwiseRequest(files, "squeezellm", tmp_path / "out", force=True))
    assert not (tmp_path / "out" / input_moments.FILE).exists()


@pytest.mark.parametrize("weighed", [True, False])
def test_the_command(source: Path, tmp_path: Path, capsys, monkeypatch, weighed: bool) -> None:
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))
    text = ("--calibration", LICENSE, "--windows", 2, "--device", "cpu") if weighed else ("--calibration", "none")
    arguments = ("quantize", source, "--format", "squeezellm", "--out", tmp_path / "out", *text)
    assert execute([*map(str, arguments)]) == 0
    said = capsys.readouterr().err
    assert ("computing error weights using 2 windows of 256 tokens" in said) == weighed
    with open_checkpoint(open_model(tmp_path / "out")) as made:
        assert squeezellm.stored_shape(made, "model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--best",), "--best: --format squeezellm does not support this option"),
        (("--seed", "3"), "--seed: --format squeezellm does not support this option"),
        (("--bits", "4"), "--bits"),
        (("--calibration", "none", "--windows", "3"), "--windows: has no effect without a calibration text"),
        (("--calibration", "no-such-file"), "no-such-file cannot be read"),
    ],
)
def test_options_that_it_does_not_have(source: Path, tmp_path: Path, capsys, monkeypatch, options, why) -> None:
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))
    code = execute(["quantize", str(source), "--format", "squeezellm", "--out", str(tmp_path / "out"), *options])
    assert code == ExitCode.USAGE
    assert why in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["squeezellm", "bcq"])
def test_a_mixture_of_experts_needs_no_option(tmp_path: Path, capsys, monkeypatch, format: str) -> None:
    """By itself, and so as `NAME@squeezellm`, it is made without a text, and says so; asked for one it is refused."""
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))
    source = expert_checkpoints.source(tmp_path / "m", "mixtral", hidden_size=64, intermediate_size=96)
    command = ["quantize", str(source), "--format", format, "--out"]
    assert execute([*command, str(tmp_path / "bare")]) == 0
    assert "quantizing each matrix without calibration" in capsys.readouterr().err
    assert execute([*command, str(tmp_path / "none"), "--calibration", "none"]) == 0
    bare, none = (expert_checkpoints.read(tmp_path / name) for name in ("bare", "none"))
    assert bare.keys() == none.keys()
    assert all(torch.equal(each, none[name]) for name, each in bare.items())
    assert execute([*command, str(tmp_path / "asked"), "--windows", "2", "--device", "cpu"]) == ExitCode.USAGE
    assert "--calibration none" in capsys.readouterr().err

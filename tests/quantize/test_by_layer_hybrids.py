"""Hybrids and their mixtures layer by layer: the rotated model is the same function, and 2-bit folders load."""

from __future__ import annotations

import functools

import pytest
import torch

from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import architecture
from localq.planner.load_options import LoadOptions
from localq.quantize import by_layer
from localq.quantize.model.calibration_stream import NoCache
from localq.quantize.model.sensitivity import logits as logits_of_end
from localq.quantize.model.sensitivity import make_ending
from localq.quantize.model.source import SourceModel
from localq.quantize.request import LayerwiseRequest
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.formats import hybrid_checkpoints
from tests.support.formats.hybrid_checkpoints import KINDS, PREFIXES

CPU = torch.device("cpu")
IDS = prompt_of(90, seed=5)
WINDOWS = tuple(tuple(prompt_of(128, seed)) for seed in range(4))
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    sources = {kind: hybrid_checkpoints.source(folder / kind, kind) for kind in KINDS}
    return {
        kind: hybrid_checkpoints.wrapped(folder / f"{kind}-wrapped", each, PREFIXES[0])
        for kind, each in sources.items()
    }


@pytest.fixture(scope="module")
def two_bits(folders, tmp_path_factory):
    """A 2-bit folder of a kind, made once."""
    out = tmp_path_factory.mktemp("two-bits")
    return functools.cache(
        lambda kind: by_layer.convert(LayerwiseRequest(open_model(folders[kind]), out / kind, WINDOWS, CPU))
    )


def exact(folder):
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="float32"))
    return logits_of(loaded.model, loaded, IDS)


@every_kind
@pytest.mark.parametrize("rotated", [True, False])
def test_the_rotated_model_is_the_same_function(kind, rotated, folders):
    if not rotated and kind == "qwen3_5_moe":
        return  # only codebooks take experts one by one
    files = open_model(folders[kind])
    with open_checkpoint(files) as checkpoint, torch.inference_mode():
        source = SourceModel(files, checkpoint, architecture(files.config), CPU, 3, rotated=rotated)
        assert source.rotated == rotated
        (x,) = source.embeddings([IDS])
        ending = make_ending(source.model, *source.ending(), CPU)
        model = load(files, LoadOptions(device="cpu", dtype="float32")).model
        step = model.begin(torch.arange(len(IDS)), NoCache(model.cache_layout()), len(IDS))
        for index in range(source.layers):
            x = source.block(index)(x, step)
        found = logits_of_end(ending, x)
    expected = exact(folders[kind])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@every_kind
def test_a_2_bit_folder_loads_and_keeps_what_it_must(kind, folders, two_bits):
    files, out = open_model(folders[kind]), two_bits(kind)
    made, source = open_checkpoint(open_model(out)), open_checkpoint(files)
    loaded = load(open_model(out), LoadOptions(device="cpu", dtype="float32"))
    assert loaded.format == "vq2"
    packed = {name.removesuffix(".codes").rpartition("layers.")[2] for name in made.tensors if name.endswith(".codes")}
    wanted = {f"0.linear_attn.{each}" for each in ("in_proj_qkv", "in_proj_z", "out_proj")}
    wanted |= {f"1.self_attn.{each}_proj" for each in "qkvo"}
    wanted |= {f"2.mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")} if "moe" in kind else set()
    assert wanted <= packed
    assert not [name for name in packed if "in_proj_a" in name or "in_proj_b" in name or name.endswith("gate")]
    rates = [name for name in source.tensors if name.endswith(".A_log")]
    assert rates
    assert all(made.tensors[name].dtype == "float32" for name in rates)
    assert all(made.read(name).equal(source.read(name).float()) for name in rates)
    assert torch.isfinite(logits_of(loaded.model, loaded, IDS)).all()


@pytest.mark.parametrize(
    ("kind", "scheme", "bits"),
    [
        ("qwen3_5", "s4l16+s8l16", None),
        ("qwen3_5_moe", "s4l16+s8l16", None),
        ("qwen3_5", "s4l16", 5.0),  # of matrices so small, codebooks are two of these bits
    ],
)
def test_more_bits_are_nearer_to_the_source(kind, scheme, bits, folders, two_bits, tmp_path):
    """3 bits everywhere, and a mixture of schemes; against 2 bits on the same text."""
    files, of_source = open_model(folders[kind]), exact(folders[kind])
    more = by_layer.convert(LayerwiseRequest(files, tmp_path / "more", WINDOWS, CPU, scheme=scheme, bits=bits))

    def difference(out):
        loaded = load(open_model(out), LoadOptions(device="cpu", dtype="float32"))
        return float((logits_of(loaded.model, loaded, IDS) - of_source).square().mean())

    assert difference(more) < 0.95 * difference(two_bits(kind))


def test_a_mixture_of_experts_takes_no_mixture_of_schemes(folders, tmp_path):
    request = LayerwiseRequest(open_model(folders["qwen3_5_moe"]), tmp_path / "out", WINDOWS, CPU, bits=4.2)
    with pytest.raises(LocalqError, match="must use the same bit width") as caught:
        by_layer.convert(request)
    assert caught.value.exit_code == ExitCode.USAGE

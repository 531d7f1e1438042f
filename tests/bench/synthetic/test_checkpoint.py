"""Random weights: of every catalogued shape, the same each time, read by the loader, and tame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localq.bench.synthetic import checkpoint as synthetic_checkpoint
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts
from localq.files.model_folder import ModelFiles, check_config, open_model
from localq.formats import FORMATS
from localq.formats.checkpoint import Checkpoint
from localq.formats.dense_checkpoint import dequantized
from localq.formats.int4 import codec as int4_codec
from localq.formats.open_checkpoint import open_checkpoint
from localq.formats.samples import Random
from localq.models import architecture, gemma4
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from tests.support.files.tiny_gguf_families import GEMMA4, SHAPE
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.vq2_conversions import converted

CPU = torch.device("cpu")
RUNNABLE = [entry for entry in catalog.load_catalogue() if not format_facts.why_unsupported(entry.arch, "nf4")]
FAMILIES = sorted({entry.arch.model_type for entry in RUNNABLE})


QUANTIZED = ["nf4", "vq2", "aqlm", "vptq", "awq", "gptq", "mxfp4", "squeezellm", "bcq"]
CODES = {"nf4": ".weight", "vq2": ".codes", "aqlm": ".codes", "vptq": ".indices", "awq": ".qweight", "gptq": ".qweight",
         "mxfp4": ".weight_blocks", "squeezellm": ".qweight",
         "bcq": ".signs"}  # fmt: skip
EXPERTS = ("nf4", "mxfp4", "vq2", "aqlm", "awq", "gptq", "squeezellm", "bcq")
MIXTURES = {"gpt_oss": ("mxfp4", "nf4", "fp16"), "mixtral": ("nf4", "vq2", "aqlm", "fp16"),
            "qwen3_moe": (*EXPERTS, "fp16"), "qwen3_5_moe": ("nf4", "vq2", "fp16"),
            "lfm2_moe": ("nf4", "mxfp4", "vq2", "fp16"),
            **dict.fromkeys(("granitemoehybrid", "laguna", "nemotron_h"), ("nf4", "mxfp4", "fp16")),
            "glm4_moe_lite": ("nf4", "mxfp4", "fp16")}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def tiny(model_type: str, format: str = "fp16") -> ModelFiles:
    """A small model of the family, by the catalogue's own road."""
    arch = next(entry.arch for entry in RUNNABLE if entry.arch.model_type == model_type)
    small = replace(
        arch, layers=3, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=192, vocab=320, max_context=512,
        window=arch.window and 16, experts=arch.experts and 4, experts_active=arch.experts and 2,
        expert_intermediate=arch.experts and 192,
    )  # fmt: skip
    if arch.recurrent_layers:
        small = replace(
            small, layers=4, recurrent_layers=3, rotary=8, shared_intermediate=arch.shared_intermediate and 64,
            delta_key_heads=2, delta_value_heads=8 if arch.traits.multipliers else 6, delta_key_dim=16,
            delta_value_dim=32,
        )  # fmt: skip
    if arch.traits.head_gates:
        small = replace(small, window_layers=2, window_heads=6, rotary=16, shared_intermediate=64)
    if arch.traits.latents:
        small = replace(
            small, kv_heads=4, kv_latent=80, query_latent=64, rotary=8, value_dim=48, shared_intermediate=192
        )
    config = synthetic_checkpoint.in_format(synthetic_checkpoint.config_of(small), format)
    return ModelFiles(path=Path(), kind="safetensors", config=config, name="tiny")


@pytest.mark.parametrize("entry", RUNNABLE, ids=lambda entry: entry.name)
def test_every_catalogued_shape_makes_a_model_with_that_many_weights(entry):
    config = synthetic_checkpoint.config_of(entry.arch)
    check_config(config, entry.name)
    family = architecture(config)
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(config))
    assert sum(parameter.numel() for parameter in model.parameters()) == entry.arch.parameters
    assert sum(bool(window) for window in model.config.windows) == entry.arch.window_layers


@pytest.mark.parametrize(
    ("model_type", "format"),
    [
        *((family, format) for family in FAMILIES for format in MIXTURES.get(family, (*QUANTIZED[:4], "fp16"))),
        *((family, format) for format in QUANTIZED[4:] for family in ("llama", "phi3")),
    ],
)
def test_the_loader_reads_it_and_logits_stay_finite(model_type, format):
    files = tiny(model_type, format)
    model = load(
        files,
        LoadOptions(device="cpu", dtype="float32", ctx=320),
        opened=lambda each: synthetic_checkpoint.checkpoint(each, format, CPU, seed=1),
    )
    assert model.format == format
    prompt = [5 + 7 * i % 300 for i in range(263)]  # in passes, which take a tenth of the time that steps do
    steps = list(Engine(model).generate(prompt, Sampling(), max_tokens=40))
    assert sum(len(step.ids) for step in steps) == 40
    for index, layer in model.cache.kv_layers.items():
        window = model.cache.window_of(index)
        last = 301 - (window.base if window else 0)
        assert layer.k[:, : last + 1].isfinite().all()
        assert layer.v[:, : last + 1].isfinite().all()
        assert layer.k[:, last].count_nonzero()
    assert all(each[:, :302].isfinite().all() and each[:, 301].any() for each in model.cache.latents.values())
    held = synthetic_checkpoint.checkpoint(files, format, CPU, seed=1).tensors
    dense = [name for name in held if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    assert not dense or format == "fp16", "what is said to be quantized is"


@pytest.mark.parametrize("format", QUANTIZED)
def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(format):
    files = tiny("llama", format)
    first, again, other = (synthetic_checkpoint.checkpoint(files, format, CPU, seed) for seed in (1, 1, 2))
    name = f"model.layers.1.mlp.up_proj{CODES[format]}"
    assert torch.equal(first.read(name), again.read(name))
    assert not torch.equal(first.read(name), other.read(name))
    for each, described in first.tensors.items():
        tensor = first.read(each)
        assert (tuple(tensor.shape), tensor.nbytes) == (described.shape, described.nbytes), each


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3", "gemma2"])
@pytest.mark.parametrize("format", ["vq2", "aqlm"])
def test_names_sizes_and_so_bits_are_those_of_a_conversion(model_type, format, tmp_path):
    """gemma2's stream cannot be turned; phi3's matrices are fused."""
    arch = next(entry.arch for entry in RUNNABLE if entry.arch.model_type == model_type)
    source = make_checkpoint(tmp_path / "source", model_type, dtype=torch.float16, tie_word_embeddings=arch.tied)
    target = {"vq2": "vq2", "aqlm": "aqlm2x8"}[format]
    folder = converted(source, tmp_path / "out", format=target)
    files = tiny(model_type, format)
    random = synthetic_checkpoint.checkpoint(files, format, CPU, seed=0)
    with open_checkpoint(open_model(folder)) as real:
        assert random.tensors == real.tensors
        assert random.config["quantization_config"]["quant_method"] == real.quantization["quant_method"]
        assert random.config["tie_word_embeddings"] == real.config["tie_word_embeddings"]
        shared = [name for name in real.tensors if name.endswith(".signs")]
        assert all(torch.equal(random.read(name), real.read(name)) for name in shared)


@pytest.mark.parametrize("format", QUANTIZED)
def test_rows_have_about_unit_gain(format):
    weights = synthetic_checkpoint.checkpoint(tiny("llama", format), format, CPU, seed=0)
    module = FORMATS[format]
    packed = module.from_checkpoint(weights, "model.layers.0.mlp.down_proj")
    gain = module.dequantize(packed, torch.float32).square().sum(-1).sqrt()
    assert gain.mean() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    ("model_type", "format"), [*(("llama", format) for format in QUANTIZED), ("gpt_oss", "mxfp4"), ("qwen3_moe", "nf4")]
)
def test_the_dense_form_holds_the_same_weights(model_type, format):
    files = tiny(model_type, format)
    plain = dequantized(synthetic_checkpoint.checkpoint(files, format, CPU, 0), CPU, torch.float32)
    assert not any(quantized_in(plain, name.removesuffix(".weight")) for name in plain.tensors)
    quantized = load(
        files,
        LoadOptions(device="cpu", dtype="float32", ctx=64),
        opened=lambda f: synthetic_checkpoint.checkpoint(f, format, CPU, 0),
    )
    dense = load(files, LoadOptions(device="cpu", dtype="float32", ctx=64), opened=lambda f: plain)
    assert dense.format in ("fp16", "bf16")
    pairs = zip(quantized.model.parameters(), dense.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def quantized_in(checkpoint: Checkpoint, prefix: str) -> bool:
    return any(module.is_quantized(checkpoint.tensors, prefix) for module in FORMATS.values())


def test_a_cut_keeps_the_pattern_of_its_layers():
    config = {
        "model_type": "gemma3",
        "text_config": {"num_hidden_layers": 4, "hidden_size": 8, "layer_types": list("abcd")},
    }
    cut = synthetic_checkpoint.with_layers(config, 2)
    assert cut["model_type"] == "gemma3_text"
    assert (cut["num_hidden_layers"], cut["layer_types"], cut["hidden_size"]) == (2, ["a", "b"], 8)
    wrappers = (("mistral3", "mistral"), ("mistral3", "ministral3"), ("muse_glimmer", None), ("gemma4", None))
    for wrapper, text_type in wrappers:
        text = {"num_hidden_layers": 4, "layer_rope_theta": [1, 2, 3, 4], "model_type": text_type}
        cut = synthetic_checkpoint.with_layers({"model_type": wrapper, "text_config": text}, 2)
        assert cut["model_type"] == (text_type or f"{wrapper}_text")
        assert cut["layer_rope_theta"] == [1, 2]


@pytest.mark.parametrize(("layers", "shared"), [(6, 3), (4, 1), (2, 0)])
def test_a_cut_gemma_4_still_shares_what_is_left(layers, shared):
    text = {
        **SHAPE,
        **GEMMA4,
        "num_kv_shared_layers": 3,
        "per_layer_config": {"2": {"head_dim": 24}, "5": {"head_dim": 24}},
    }
    cut = synthetic_checkpoint.with_layers({"model_type": "gemma4", "text_config": text}, layers)
    config = gemma4.Config.from_dict(cut)
    assert (config.layers, len(config.shared)) == (layers, shared)
    assert config.heads_of(layers - 1) == (2, 24)


def test_names_that_cannot_be_made_up():
    for name, code in {
        "nosuchmodel": 4,
        "gpt-oss-20b@aqlm": 2,
        "qwen3-30b-a3b@vptq": 2,
    }.items():
        with pytest.raises(LocalqError) as caught:
            synthetic_checkpoint.files_of(name)
        assert caught.value.exit_code == ExitCode(code), name
    files, format = synthetic_checkpoint.files_of("llama-3.1-8b")
    assert (format, files.config["num_hidden_layers"]) == ("nf4", 32)
    assert synthetic_checkpoint.files_of("llama-3.1-8b@fp16")[1] == "fp16"
    assert [synthetic_checkpoint.files_of(name)[1] for name in ("gpt-oss-20b", "qwen3-30b-a3b")] == ["mxfp4", "nf4"]


def test_codes_of_4_bits_are_zero_on_average():
    """A mean of half a step adds up along wide matrices until float16 overflows."""
    found = int4_codec.nibbles(Random(3, "cpu").nibbles(64, 1280)).flatten().bincount(minlength=16)
    assert found[0] == 0
    shares = found[1:] / found.sum()
    expected = torch.full((15,), 1 / 16)
    expected[7] = 1 / 8
    assert (shares - expected).abs().max() < 6 * (1 / 16 / found.sum()) ** 0.5
    assert float((torch.arange(16) - 8).square() @ found / found.sum()) == pytest.approx(
        int4_codec.POWER - 2 / 3, rel=0.01
    )

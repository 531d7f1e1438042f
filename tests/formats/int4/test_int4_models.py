"""Models in AWQ, GPTQ, compressed-tensors: against plain models of their weights, as on a GPU, hostile files.

transformers reads the first two by gptqmodel only, which is no part of the tests: its model here has plain Linears that
hold what the formula of the projects gives (`int4_checkpoints.reference`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from localq.bench.quality import bits
from localq.engine.generate import Engine
from localq.engine.load import weights
from localq.engine.load.load import load, share_scratch
from localq.engine.step import fused
from localq.engine.step.graph import StepGraphs
from localq.engine.step.operands import operand
from localq.errors import ExitCode, LocalqError
from localq.files import stored_format
from localq.files.architecture import Architecture
from localq.files.catalog import resolve
from localq.files.model_folder import ModelFiles, open_model
from localq.files.stored_format import scheme_of
from localq.formats.int4.linear import Int4Linear
from localq.planner import footprint, uncatalogued
from localq.planner.load_options import LoadOptions
from tests.support.engine import fused_models
from tests.support.engine.engine_runs import GREEDY, ids_of, logits_of, prompt_of
from tests.support.engine.packed_models import packed_model
from tests.support.formats.int4_checkpoints import COMPRESSED, Int4, reference, tensors, write

CPU = LoadOptions(device="cpu", dtype="float32")
AWQ, ORDERED, SYMMETRIC = Int4("awq", 64), Int4("gptq", 64, True), Int4(COMPRESSED, 64, symmetric=True)
METHODS = ("awq", "gptq", COMPRESSED)
Q, O_BIAS = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj.bias"


def plain_folder(folder: Path, linears: dict[str, dict[str, Tensor]], of: Int4) -> Path:
    """The same model with dequantized weights, in the type of the files."""
    held, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for path, made in linears.items():
        for suffix in made:
            del held[path + suffix]
        held[f"{path}.weight"] = reference(made, of)
    del config["quantization_config"]
    made_here = folder.parent / f"{folder.name}-plain"
    shutil.copytree(folder, made_here)
    save_file(held, made_here / "model.safetensors")
    (made_here / "config.json").write_text(json.dumps(config))
    return made_here


def transformers_logits(folder: Path, ids: list[int]) -> Tensor:
    """Of a plain folder, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(
    ("of", "model_type", "dtype"),
    [
        (AWQ, "llama", torch.float16),
        (Int4("awq", 32), "qwen2", torch.bfloat16),
        (Int4("awq", -1), "llama", torch.float16),
        (ORDERED, "llama", torch.float16),
        (ORDERED, "qwen2", torch.float16),
        (Int4("gptq", 32, True, "gptq_v2"), "qwen2", torch.bfloat16),
        (Int4("gptq", 64, g_idx=False), "llama", torch.float16),
        (SYMMETRIC, "llama", torch.bfloat16),
        (Int4(COMPRESSED, 32), "qwen2", torch.bfloat16),
        (Int4(COMPRESSED, -1), "llama", torch.float16),
        (Int4(COMPRESSED, 64, act_order=True), "llama", torch.float16),
    ],
    ids=str,
)
def test_logits_are_those_of_the_dequantized_model(tmp_path, of, model_type, dtype):
    """Bit for bit those of the same engine on plain weights, and near those of transformers. qwen2 has biases."""
    linears = write(tmp_path / "int4", of, dtype, model_type, num_hidden_layers=2)
    assert len(linears) == 14
    plain = plain_folder(tmp_path / "int4", linears, of)
    loaded, dense, ids = load(open_model(tmp_path / "int4"), CPU), load(open_model(plain), CPU), prompt_of(40)
    assert (loaded.format, loaded.notes) == (of.method, ())
    logits = logits_of(loaded.model, loaded, ids)
    assert torch.equal(logits, logits_of(dense.model, dense, ids))
    expected = transformers_logits(plain, ids)
    assert (logits - expected).norm() / expected.norm() < 3e-5


def test_a_matrix_may_be_plain_and_biases_idle(tmp_path):
    """AutoGPTQ wrote a bias of zeros for every Linear; `modules_to_not_convert` is believed of the tensors only."""
    of = Int4("gptq", 64)
    linears = write(tmp_path / "int4", of, model_type="qwen2", plain="up_proj", idle_biases=True, num_hidden_layers=1)
    held = load_file(tmp_path / "int4" / "model.safetensors")
    assert held[O_BIAS].count_nonzero() == 0
    plain = plain_folder(tmp_path / "int4", linears, of)
    held, real = load_file(plain / "model.safetensors"), ("q_proj.bias", "k_proj.bias", "v_proj.bias")
    without = {name: each for name, each in held.items() if not name.endswith(".bias") or name.endswith(real)}
    save_file(without, plain / "model.safetensors")
    loaded, dense, ids = load(open_model(tmp_path / "int4"), CPU), load(open_model(plain), CPU), prompt_of(9)
    assert torch.equal(logits_of(loaded.model, loaded, ids), logits_of(dense.model, dense, ids))


def test_a_quantized_head_is_dequantized(tmp_path):
    """GPTQModel's `lm_head`: `placement` plans a head in 16 bit, and so it is held."""
    of = Int4("gptq", 64)
    linears = write(tmp_path / "int4", of, num_hidden_layers=1)
    path = tmp_path / "int4" / "model.safetensors"
    held = load_file(path)
    linears["lm_head"] = tensors((320, 128), of, seed=99)
    del held["lm_head.weight"]
    save_file(held | {f"lm_head{suffix}": each for suffix, each in linears["lm_head"].items()}, path)
    plain = plain_folder(tmp_path / "int4", linears, of)
    loaded, dense, ids = load(open_model(tmp_path / "int4"), CPU), load(open_model(plain), CPU), prompt_of(9)
    assert torch.equal(logits_of(loaded.model, loaded, ids), logits_of(dense.model, dense, ids))


# ---- as on a GPU


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each method."""
    made = {}
    for of in (AWQ, ORDERED, SYMMETRIC):
        made[of.method] = tmp_path_factory.mktemp(of.method)
        write(made[of.method], of, num_hidden_layers=2)
    return made


@pytest.mark.parametrize("method", METHODS)
def test_packed_linears_give_the_same_logits(folders, method, monkeypatch):
    """What a GPU holds, on the CPU: tensors in one arena and in tiles, slabs in the shared scratch."""
    files = open_model(folders[method])
    plain = load(files, CPU)
    model, sizes, _ = packed_model(files)
    linears = [module for module in model.modules() if isinstance(module, Int4Linear)]
    assert len(linears) == 14
    assert sum(sizes) == weights.weight_bytes(model)["weights"]
    assert share_scratch(model, torch.float32) == 4 * 192 * 128
    ids = prompt_of(20)
    expected = logits_of(plain.model, plain, ids)
    assert torch.equal(logits_of(model, plain, ids), expected)
    for linear in linears:
        linear.scratch = linear.scratch[: 4 * 192 * 50]  # slabs of some 50 rows
        monkeypatch.setattr(linear, "forward", linear._by_slabs)
    logits = logits_of(model, plain, ids)
    assert (logits - expected).norm() / expected.norm() < 3e-5
    found = [operand(linear) for linear in linears]
    assert all(each.codes.shape == (each.out_features, each.in_features // 2) for each in found)
    assert [(each.order is None) for each in found] == [method != "gptq"] * 14
    assert not any(each.readable() for each in found)  # on a CPU
    name = method if method == COMPRESSED else method.upper()
    assert fused._format_of(linears[0]) == f" in {name}"  # what a note about slow decoding names


@pytest.mark.parametrize("method", METHODS)
def test_sizes_before_a_download_are_those_of_the_files(folders, method):
    """`fit` and `show`: format, scheme, bits per weight and the plan's bytes."""
    files = open_model(folders[method])
    arch, scheme = Architecture.from_config(files.config), scheme_of(files)
    assert (stored_format.format_of_config(files.config), scheme) == (method, "g64")
    offer = uncatalogued.offer(resolve(str(folders[method])), offline=True)
    assert (offer.format, offer.scheme, offer.unsupported) == (method, "g64", None)
    assert offer.remark == ""
    exact = bits.per_weight(files)
    per_column = 16 if method == "gptq" else 0  # g_idx has 32 bits in files, 16 in memory
    columns = sum(each.count * each.columns for each in arch.linears)
    more = per_column * columns // 8 + (16 * 14 if method == COMPRESSED else 0)  # weight_shape is in files only
    zeros = arch.linear_parameters // 64 // 2 if method == COMPRESSED else 0  # and zero points of 8 in memory only
    computed = footprint.bits_per_weight(arch, method, scheme)
    assert computed == pytest.approx(exact - 8 * (more - zeros) / arch.linear_parameters, rel=1e-9)
    in_memory = footprint.weights_bytes(arch, method, scheme)["weights"]
    assert offer.block_bytes == in_memory


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_a_reply_on_the_gpu(folders, method):
    """By the kernels: every token is the CPU's, but where that has another within roundings of 16 bit."""
    files = open_model(folders[method])
    engine = Engine(load(files, LoadOptions(device="cuda")))
    assert engine.graphs
    assert not [note for note in engine.notes if "slow" in note]
    prompt = prompt_of(50)
    reply = ids_of(engine, prompt, GREEDY, max_tokens=64)
    assert len(reply) == 64
    exact, loaded, ids = load(files, CPU), engine.model, [*prompt, *reply]
    expected = logits_of(exact.model, exact, ids)
    assert (logits_of(loaded.model, loaded, ids).float().cpu() - expected).norm() / expected.norm() < 0.02
    before = expected[len(prompt) - 1 : -1].float()
    behind = before.amax(1) - before.gather(1, torch.tensor(reply).unsqueeze(1)).squeeze(1)
    assert behind.max() < 0.02 * before.std()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_graph_equals_eager_bit_for_bit(folders, method):
    loaded = load(open_model(folders[method]), LoadOptions(device="cuda"))
    step, cache = fused_models.step_of(loaded.model, 256)
    shape = (256, loaded.model.config.kv_heads, loaded.model.config.head_dim)
    k, v = (torch.randn(shape, dtype=loaded.dtype, device="cuda") for _ in range(2))
    for layer in range(2):
        cache.update(layer, k, v, torch.arange(256, device="cuda"), 256)
    step.state.sampler.reset(GREEDY, torch.arange(20), 256)
    graphs = StepGraphs(step)
    for position in range(0, 250, 10):
        found = []
        for run in (graphs.replay, step.run):
            step.state.rewind(position)
            step.state.token.fill_(position)
            step.logits.fill_(float("nan"))
            run(True)
            found.append((step.logits.clone(), step.state.chosen.clone()))
        assert torch.isfinite(found[0][0]).all()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


# ---- hostile files


@pytest.fixture
def edit(folders: dict[str, Path], tmp_path: Path) -> Callable[..., ModelFiles]:
    """A copy, changed by a function of its tensors and of its quantization_config."""

    def make(method: str, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> ModelFiles:
        made = tmp_path / "edited"
        shutil.copytree(folders[method], made)
        tensors, config = load_file(made / "model.safetensors"), json.loads((made / "config.json").read_text())
        change(tensors, config["quantization_config"])
        save_file(tensors, made / "model.safetensors")
        (made / "config.json").write_text(json.dumps(config))
        return open_model(made)

    return make


def said(**fields: Any) -> Any:
    return lambda held, config: config.update(fields)


VARIANTS = {
    "5 bits": ("gptq", said(bits=5), "GPTQ with 5 bits"),
    "8 bits": ("awq", said(bits=8), "AWQ with 8 bits"),
    "bits of text": ("awq", said(bits="4"), "AWQ with '4' bits"),
    "no bits": ("gptq", lambda held, config: config.pop("bits"), "GPTQ with an unknown number of bits"),
    "some layers of 6 bits": ("gptq", said(dynamic={"+:.*down.*": {"bits": 6}}), "GPTQ with 6 bits"),
    "gemv": ("awq", said(version="GEMV"), "AWQ in layout 'gemv'"),
    "gemv_fast": ("awq", said(version="gemv_fast"), "AWQ in layout 'gemv_fast'"),
    "exllama": ("awq", said(version="exllama"), "AWQ in layout 'exllama'"),
    "llm-awq": ("awq", said(backend="llm-awq"), "AWQ in layout 'llm-awq'"),
    "marlin": ("gptq", said(checkpoint_format="marlin"), "GPTQ in layout 'marlin'"),
    "an old marlin": ("gptq", said(is_marlin_format=True), "GPTQ in layout 'marlin'"),
    "bitblas": ("gptq", said(checkpoint_format=None, format="bitblas"), "GPTQ in layout 'bitblas'"),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS)
def test_other_variants_are_refused_by_name(edit, case):
    """Before anything is read, and before anything is fetched."""
    method, change, why = VARIANTS[case]
    files = edit(method, change)
    for attempt in (lambda: load(files, CPU), lambda: uncatalogued.offer(resolve(str(files.path)), offline=True)):
        with pytest.raises(LocalqError, match=why) as caught:
            attempt()
        assert caught.value.exit_code == ExitCode.FAILURE


def test_what_to_use_instead_of_exl3(edit):
    """Of a format that localq does not read."""
    files = edit("gptq", said(quant_method="exl3", bits=3.0))
    use = r"Use a GGUF version of this model, or quantize its 16-bit weights to vq2\."
    with pytest.raises(LocalqError, match=rf"'exl3', which localq does not support\. {use}"):
        uncatalogued.offer(resolve(str(files.path)), offline=True)
    with pytest.raises(LocalqError, match=rf"'exl3', which is not supported\. {use}"):
        load(files, CPU)


DAMAGED = {
    "no codes": ("awq", lambda held, config: held.pop(f"{Q}.qweight"), "do not belong to this architecture|missing"),
    "no scales": ("gptq", lambda held, config: held.pop(f"{Q}.scales"), "lacks model.layers.0"),
    "another width": (
        "awq",
        lambda held, config: held.update(
            {Q + each: held[Q + each].repeat(2, 1) for each in (".qweight", ".qzeros", ".scales")}
        ),
        r"shape \[128, 256\], not \[128, 128\]",
    ),
    "a bias that is none": (
        "gptq", lambda held, config: held.update({O_BIAS: torch.ones(128)}), "do not belong to this architecture"
    ),
    "a bias of NaN": (
        "gptq", lambda held, config: held.update({O_BIAS: torch.zeros(128) / 0}), "do not belong to this architecture"
    ),
    "an idle bias of AWQ": (
        "awq", lambda held, config: held.update({O_BIAS: torch.zeros(128)}), "do not belong to this architecture"
    ),
    "plain and quantized": (
        "awq", lambda held, config: held.update({f"{Q}.weight": torch.zeros(128, 128)}),
        rf"'{Q}\.weight' and another tensor both map to",
    ),
    "the other's name": ("awq", said(quant_method="gptq"), "but the tensors are packed for awq"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(edit, case):
    method, change, why = DAMAGED[case]
    with pytest.raises(LocalqError, match=why) as caught:
        load(edit(method, change), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_names_that_config_json_leaves_out_are_the_defaults(edit):
    """AutoAWQ's older words; and GPTQ that says no layout, which is the first."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config.update(w_bit=config.pop("bits"), q_group_size=config.pop("group_size"), version="GEMM")

    old = edit("awq", change)
    assert load(old, CPU).format == "awq"
    assert scheme_of(old) == "g64"
    assert all(isinstance(module, nn.Linear) for module in load(old, CPU).model.layers[0].mlp.inputs())

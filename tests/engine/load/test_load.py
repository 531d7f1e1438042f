"""Loading: every parameter from exactly one tensor, the type and the plan that were asked for."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from localq.driver import CudaStack, Driver
from localq.engine.load import weights
from localq.engine.load.device import NO_DRIVER_NOTE, pick
from localq.engine.load.load import load, pick_dtype
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.formats import int8, nf4
from localq.kv_bits import KV_BITS
from localq.planner import ram
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import prompt_of
from tests.support.models.tiny_checkpoints import make_checkpoint

CPU = LoadOptions(device="cpu", dtype="float32")


def logits_of(loaded, ids) -> torch.Tensor:
    """f32 [T, vocab]."""
    loaded.cache.clear()
    with torch.inference_mode():
        positions = torch.arange(len(ids))
        return loaded.model(torch.tensor(ids), positions, loaded.cache, len(ids), last_only=False)


def quantize_linears(tensors, config, only=("q_proj", "up_proj", "down_proj")) -> dict[str, torch.Tensor]:
    """Replace some Linears by NF4; -> the dequantized matrices."""
    dense = {}
    for key in [key for key in tensors if key.endswith(".weight") and key.split(".")[-2] in only]:
        packed = nf4.quantize(tensors.pop(key))
        dense[key] = nf4.dequantize(packed, torch.float32)
        parts = nf4.to_tensors(packed, key.removesuffix(".weight"))
        tensors.update({name: part.clone() for name, part in parts.items()})  # the maps are shared, a file has each
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return dense


def test_logits_equal_transformers(loaded, reference):
    ids = prompt_of(40)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(loaded, ids), expected, rtol=0, atol=1e-4)


def test_what_was_loaded_is_described(loaded, checkpoint):
    assert (loaded.format, loaded.dtype, loaded.ctx, loaded.vocab) == ("fp32", torch.float32, 512, 320)
    counted = sum(tensor.nbytes for tensor in load_file_all(checkpoint).values())
    table = 320 * 128 * 4
    tables = 512 * (2 * 32 * 4 + 8)
    kv_cache = 3 * 2 * 2 * 32 * 512 * 4
    assert loaded.ledger == {
        "weights": counted - 2 * table, "embedding": table, "head": table, "kv_cache": kv_cache, "tables": tables,
    }  # fmt: skip
    assert {part: loaded.plan.ledger.components[part] for part in loaded.ledger} == loaded.ledger
    assert (loaded.kv_bits, loaded.embed, loaded.head_bits) == (16, "device", "16")


GEMMA4_MIXTURE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        *(
            (each, {})
            for each in ("gemma2", "gemma3_text", "gemma4_text", "granite", "olmo3", "phi3", "qwen3", "smollm3")
        ),
        ("gemma4_text", GEMMA4_MIXTURE),
    ],
)
def test_what_is_planned_is_what_is_allocated(tmp_path, model_type, fields):
    loaded = load(open_model(make_checkpoint(tmp_path, model_type, **fields)), CPU)
    assert {part: loaded.plan.ledger.components[part] for part in loaded.ledger} == loaded.ledger


def load_file_all(folder) -> dict[str, torch.Tensor]:
    return {key: tensor for shard in folder.glob("*.safetensors") for key, tensor in load_file(shard).items()}


def test_mixed_nf4_equals_the_dequantized_model(edit, loaded):
    dense: dict[str, torch.Tensor] = {}
    quantized = load(edit(lambda tensors, config: dense.update(quantize_linears(tensors, config))), CPU)
    assert quantized.format == "nf4"
    ids = prompt_of(33)
    got = logits_of(quantized, ids)
    own = {name: parameter.data.clone() for name, parameter in loaded.model.named_parameters()}
    try:
        for key, matrix in dense.items():
            loaded.model.get_parameter(key.removeprefix("model.")).data.copy_(matrix)
        assert torch.equal(got, logits_of(loaded, ids))
    finally:
        for name, parameter in loaded.model.named_parameters():
            parameter.data.copy_(own[name])
    assert not torch.equal(got, logits_of(loaded, ids))


def test_biases_beside_quantized_linears(tmp_path):
    folder = make_checkpoint(tmp_path / "qwen2", "qwen2", dtype=torch.float32, shard_bytes=10**9)
    expected = load(open_model(folder), CPU)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    dense = quantize_linears(tensors, config, only=("q_proj",))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for key, matrix in dense.items():
        expected.model.get_parameter(key.removeprefix("model.")).data.copy_(matrix)
    ids = prompt_of(9)
    assert torch.equal(logits_of(load(open_model(folder), CPU), ids), logits_of(expected, ids))


def test_tied_head(tmp_path):
    folder = make_checkpoint(tmp_path, dtype=torch.float32, tie_word_embeddings=True)
    loaded = load(open_model(folder), CPU)
    counted = sum(tensor.nbytes for tensor in load_file_all(folder).values())
    assert loaded.ledger["weights"] + loaded.ledger["embedding"] == counted
    assert loaded.ledger["head"] == 0
    from transformers import AutoModelForCausalLM

    ids = prompt_of(12)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(loaded, ids), expected, rtol=0, atol=1e-4)


def test_context_as_asked_and_beyond_the_model(checkpoint):
    files = open_model(checkpoint)
    assert load(files, LoadOptions(device="cpu", dtype="float32", ctx=77)).cache.capacity == 77
    with pytest.raises(LocalqError, match="513") as caught:
        load(files, LoadOptions(device="cpu", dtype="float32", ctx=513))
    assert caught.value.exit_code == ExitCode.USAGE


def test_too_little_host_memory_is_a_load_time_answer(checkpoint, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    with pytest.raises(LocalqError, match=r"but only 10\.0 kB is free") as caught:
        load(open_model(checkpoint), CPU)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT


def test_memory_that_runs_out_on_the_way_is_freed(checkpoint, monkeypatch):
    """The nth allocation fails, for every n: exit 3, and nothing of the model stays."""
    files, put_parameter = open_model(checkpoint), weights._put
    parameters = len(load_file_all(checkpoint))
    for failing in range(0, parameters, 5):
        made: list[weakref.ref] = []

        def fail(model, target, tensor, failing=failing, made=made):
            if len(made) == failing:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
            made.append(weakref.ref(tensor))
            put_parameter(model, target, tensor)

        monkeypatch.setattr(weights, "_put", fail)
        with pytest.raises(LocalqError, match="ran out of memory while loading") as caught:
            load(files, CPU)
        assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
        gc.collect()
        assert len(made) == failing
        assert not [tensor for tensor in made if tensor() is not None]


def test_progress_is_told(checkpoint):
    reports = []
    load(open_model(checkpoint), CPU, lambda *report: reports.append(report))
    counted = sum(tensor.nbytes for tensor in load_file_all(checkpoint).values())
    assert list(dict.fromkeys(stage for stage, _, _ in reports)) == [
        "starting the device",
        "planning",
        "loading weights",
        "allocating the KV cache",
    ]
    assert reports[-2] == ("loading weights", counted, counted)
    read = [done for stage, done, _ in reports if stage == "loading weights"]
    assert read == sorted(read)
    assert len(read) > 20


def test_notes_of_the_device_are_kept(checkpoint):
    machine = CudaStack(Driver(present=False), None)
    loaded = load(open_model(checkpoint), LoadOptions(), pick=lambda word: pick(word, lambda: machine))
    assert loaded.notes == (NO_DRIVER_NOTE,)


def test_a_budget_for_a_gpu_is_noted_where_there_is_none(checkpoint):
    assert load(open_model(checkpoint), LoadOptions(device="cpu", dtype="float32", vram_bytes=2**33)).notes == (
        "--vram is ignored when running on the CPU",
    )


@pytest.mark.parametrize(
    ("device", "wanted", "config", "dtype"),
    [
        ("cpu", "auto", {"torch_dtype": "float16"}, getattr(torch, ram.cpu_dtype())),
        ("cpu", "float32", {"torch_dtype": "bfloat16"}, torch.float32),
        ("cpu", "bfloat16", {}, torch.bfloat16),
        ("cuda", "auto", {"torch_dtype": "float16"}, torch.float16),
        ("cuda", "auto", {"dtype": "float32"}, torch.float32),
        ("cuda", "auto", {"text_config": {"dtype": "float16"}}, torch.float16),
        ("cuda", "auto", {}, torch.bfloat16),
        ("cuda", "float16", {"dtype": "bfloat16"}, torch.float16),
    ],
)
def test_dtype(edit, device, wanted, config, dtype):
    def change(tensors, own):
        own.pop("dtype", None)
        own.pop("torch_dtype", None)
        own.update(config)

    assert pick_dtype(wanted, edit(change), torch.device(device)) == dtype


@pytest.mark.parametrize(("form", "module", "relative"), [("8", int8, 0.02), ("nf4", nf4, 0.15)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_reduced_head_has_the_values_of_its_dequantized_form(tmp_path, tied, form, module, relative):
    folder = make_checkpoint(tmp_path, dtype=torch.float32, initializer_range=0.15, tie_word_embeddings=tied)
    plain, quantized = (
        load(open_model(folder), CPU),
        load(open_model(folder), LoadOptions(device="cpu", dtype="float32", head=form)),
    )
    assert quantized.head_bits == form
    head = plain.model.embed_tokens.weight if tied else plain.model.lm_head.weight
    expected = module.dequantize(module.quantize(head.detach()), torch.float32)
    assert torch.equal(quantized.model.lm_head.weight, expected)
    assert torch.equal(quantized.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    ids = prompt_of(20)
    assert_near(logits_of(quantized, ids), logits_of(plain, ids), relative)


def assert_near(logits: torch.Tensor, reference: torch.Tensor, relative: float) -> None:
    """The error is a share of the logits' spread: of the size that the rounding of one step makes."""
    assert (logits - reference).norm() / reference.norm() < relative


def test_quantized_caches_on_the_cpu(checkpoint, loaded):
    ids = prompt_of(40)
    exact, errors = logits_of(loaded, ids), []
    for bits in KV_BITS[1:]:
        quantized = load(open_model(checkpoint), LoadOptions(device="cpu", dtype="float32", kv_bits=bits))
        assert (quantized.kv_bits, quantized.cache.bits) == (bits, bits)
        assert quantized.ledger["kv_cache"] == quantized.plan.ledger.components["kv_cache"]
        assert quantized.ledger["kv_cache"] < loaded.ledger["kv_cache"]
        errors.append((logits_of(quantized, ids) - exact).norm() / exact.norm())
    assert errors[0] < 0.04
    assert errors[1] < 25 * errors[0]  # the steps are 17 times as large


def test_host_memory_for_the_embedding_changes_nothing_on_the_cpu(checkpoint, loaded):
    same = load(open_model(checkpoint), LoadOptions(device="cpu", dtype="float32", embed="host"))
    assert (same.embed, same.ledger) == ("device", loaded.ledger)


def test_a_head_that_the_files_hold_in_nf4(edit):
    def change(tensors, config):
        quantize_linears(tensors, config, only=("lm_head",))

    files = edit(change)
    assert load(files, CPU).head_bits == "nf4"
    with pytest.raises(LocalqError, match="the output head is stored as NF4") as caught:
        load(files, LoadOptions(device="cpu", dtype="float32", head="8"))
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_load_and_a_reply_import_nothing_of_the_compiler_of_torch(checkpoint):
    """It takes two seconds, which every start of a chat would wait for."""
    code = """
import sys
from pathlib import Path
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.planner.load_options import LoadOptions
from localq.files.model_folder import open_model
from localq.sampling import Sampling
engine = Engine(load(open_model(Path(sys.argv[1])), LoadOptions(device="cpu", dtype="float32")))
assert list(engine.generate([3, 4, 5], Sampling(), max_tokens=3))
print([each for each in ("torch._dynamo", "torch._inductor", "sympy", "transformers") if each in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

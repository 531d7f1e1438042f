"""A converted model is what bitsandbytes would have made, loads in transformers, and comes with its small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from localq.files.model_folder import LOCK_NAME, STATE_NAME, open_model
from localq.files.safetensors_headers import INDEX_NAME, read_header
from localq.formats import nf4
from localq.formats.checkpoint import info
from localq.formats.open_checkpoint import open_checkpoint
from localq.quantize import by_tensor
from localq.quantize.output.shards import plan_shards
from localq.quantize.output.tensor_jobs import TensorJob, is_block_linear, plan_jobs, skipped_modules
from localq.quantize.request import TensorwiseRequest
from tests.support.files.real_model import smollm2
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import SHARD, quantized


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama")


@pytest.fixture(scope="module")
def finished(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(llama, tmp_path_factory.mktemp("out") / "llama-nf4")


# ---- which tensors


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.11.mlp.down_proj.weight", (64, 128), True),
        ("model.layers.3.self_attn.qkv_proj.weight", (192, 64), True),  # phi3
        ("model.layers.3.mlp.gate_up_proj.weight", (256, 64), True),
        ("model.layers.7.mlp.experts.12.up_proj.weight", (64, 64), True),  # qwen3_moe
        ("model.layers.7.block_sparse_moe.experts.1.w2.weight", (64, 64), True),  # mixtral
        ("language_model.model.layers.2.self_attn.o_proj.weight", (64, 64), True),  # gemma3, older files
        ("model.language_model.layers.2.self_attn.o_proj.weight", (64, 64), True),  # gemma3, newer files
        ("model.language_model.layers.0.linear_attn.in_proj_qkv.weight", (64, 64), True),  # qwen3_5
        ("model.layers.0.linear_attn.in_proj_z.weight", (64, 64), True),
        ("model.layers.0.linear_attn.out_proj.weight", (64, 64), True),
        ("model.layers.0.linear_attn.in_proj_a.weight", (6, 64), False),
        ("model.layers.0.linear_attn.in_proj_b.weight", (6, 64), False),
        ("model.layers.0.linear_attn.conv1d.weight", (64, 1, 4), False),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", (64, 64), True),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 64), False),
        ("model.layers.0.self_attn.q_proj.bias", (64,), False),
        ("model.layers.0.input_layernorm.weight", (64,), False),
        ("model.layers.0.self_attn.q_norm.weight", (32,), False),
        ("model.layers.7.mlp.gate.weight", (8, 64), False),  # the router
        ("model.layers.7.mlp.experts.gate_up_proj", (8, 64, 64), False),
        ("model.layers.7.mlp.experts.down_proj.weight", (8, 64, 64), False),
        ("model.embed_tokens.weight", (320, 64), False),
        ("lm_head.weight", (320, 64), False),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", (64, 64), False),
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj.weight", (64, 64), False),
        ("multi_modal_projector.linear_1.weight", (64, 64), False),
    ],
)
def test_which_tensors_are_quantized(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_block_linear(name, shape) is expected


def test_rows_that_nf4_cannot_take_stay_as_they_are(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "m", "llama", intermediate_size=200)  # only down_proj has 200 columns
    notes: list[str] = []
    out = quantized(source, tmp_path / "out", say=notes.append)
    tensors = open_checkpoint(open_model(out)).tensors
    assert tensors["model.layers.1.mlp.down_proj.weight"].dtype == "bfloat16"
    assert nf4.is_quantized(tensors, "model.layers.1.mlp.up_proj")
    assert len(notes) == 1
    assert "3 matrices" in notes[0]
    assert "200 columns" in notes[0]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["llm_int8_skip_modules"] == ["layers.0.mlp.down_proj", "layers.1.mlp.down_proj",
                                               "layers.2.mlp.down_proj", "lm_head"]  # fmt: skip


def test_skipped_modules_name_towers_and_routers() -> None:
    names = ["vision_tower.encoder.fc1.weight", "model.multi_modal_projector.linear.weight", "lm_head.weight",
             "model.layers.0.mlp.gate.weight", "model.embed_tokens.weight"]  # fmt: skip
    shape = info(torch.bfloat16, (8, 64))
    jobs = [TensorJob(name, shape, {name: shape}, quantized=False) for name in names]
    assert skipped_modules(jobs) == ["layers.0.mlp.gate", "lm_head", "model.multi_modal_projector",
                                     "model.vision_tower", "multi_modal_projector", "vision_tower"]  # fmt: skip


def test_layers_are_worked_on_in_their_order() -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (10, 2, 0)] + ["lm_head.weight"]
    jobs = plan_jobs({name: info(torch.float16, (64, 128)) for name in names}, nf4, "safetensors")
    assert [job.name for job in jobs] == [names[3], names[2], names[1], names[0]]


# ---- what is written


def test_every_tensor_is_right(llama: Path, finished: Path) -> None:
    with open_checkpoint(open_model(llama)) as source, open_checkpoint(open_model(finished)) as result:
        linears = [name for name, part in source.tensors.items() if is_block_linear(name, part.shape)]
        assert len(linears) == 3 * 7
        for name in source.tensors:
            if name in linears:
                prefix = name.removesuffix(".weight")
                for part, tensor in nf4.to_tensors(nf4.quantize(source.read(name)), prefix).items():
                    assert torch.equal(result.read(part), tensor), part
            else:
                assert torch.equal(result.read(name), source.read(name)), name
        extra = {name for name in result.tensors if ".weight." in name}
        assert len(result.tensors) - len(extra) == len(source.tensors)


def test_small_files_come_along(llama: Path, finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (finished / name).read_bytes() == (llama / name).read_bytes()
    assert not {STATE_NAME, LOCK_NAME} & names
    assert not any(name.endswith(".part") for name in names)
    files = open_model(finished)
    assert files.eos_ids == (258, 256)
    assert files.chat_template == open_model(llama).chat_template
    config = {**files.config}
    assert config.pop("quantization_config")["quant_method"] == "bitsandbytes"
    assert config == {**open_model(llama).config, "dtype": "bfloat16"}


def test_shards_are_sound_and_aligned(finished: Path) -> None:
    shards = sorted(finished.glob("*.safetensors"))
    assert len(shards) > 4
    index = json.loads((finished / INDEX_NAME).read_text())
    total = 0
    for shard in shards:
        header = read_header(shard)
        assert header.metadata == {"format": "pt"}
        assert load_file(shard).keys() == header.tensors.keys()
        for name, part in header.tensors.items():
            assert index["weight_map"][name] == shard.name
            assert part.begin % {"F32": 4, "BF16": 2, "U8": 1}[part.dtype] == 0
            total += part.nbytes
        assert sum(part.nbytes for part in header.tensors.values()) <= SHARD or len(header.tensors) <= 6
    assert index["metadata"]["total_size"] == total


def test_one_shard_needs_no_index(llama: Path, tmp_path: Path) -> None:
    out = by_tensor.convert(TensorwiseRequest(open_model(llama), "nf4", tmp_path / "out"))
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]


def test_a_group_larger_than_a_shard_gets_its_own() -> None:
    groups = [{f"{i}": info(torch.uint8, (size,))} for i, size in enumerate((10, 30, 5, 5, 40, 1))]
    assert [list(shard.tensors) for shard in plan_shards(groups, 20)] == [["0"], ["1"], ["2", "3"], ["4"], ["5"]]
    assert [shard.name for shard in plan_shards(groups, 1000)] == ["model.safetensors"]


# ---- other loaders


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3", "gemma2"])
@pytest.mark.filterwarnings("ignore")  # of bitsandbytes and accelerate, about the machine
def test_transformers_and_bitsandbytes_load_it(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_checkpoint(tmp_path / "source", model_type, dtype=torch.float32)
    out = quantized(source, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(out, device_map="cpu")
    assert type(theirs.model.layers[1].self_attn.o_proj).__name__ == "Linear4bit"
    assert type(theirs.lm_head).__name__ == "Linear"
    ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with open_checkpoint(open_model(out)) as checkpoint, torch.no_grad():
        for name, parameter in ours.named_parameters():
            if nf4.is_quantized(checkpoint.tensors, name.removesuffix(".weight")):
                packed = nf4.from_checkpoint(checkpoint, name.removesuffix(".weight"))
                assert not torch.equal(parameter, nf4.dequantize(packed, torch.float32))
                parameter.copy_(nf4.dequantize(packed, torch.float32))
    ids = torch.randint(0, 320, (1, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # In eval mode bitsandbytes computes in bfloat16 where a CPU can; in train mode (no dropout here) as asked.
        assert (theirs.train()(ids).logits - ours(ids).logits).abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(out).encode("the") == AutoTokenizer.from_pretrained(source).encode("the")


def test_a_gguf_file_becomes_a_model_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = open_model(smollm2())
    out = by_tensor.convert(TensorwiseRequest(source, "nf4", tmp_path / "out"))
    files = open_model(out)
    assert files.eos_ids == source.eos_ids
    assert files.chat_template == source.chat_template
    with open_checkpoint(source) as before, open_checkpoint(files) as after:
        prefix = "model.layers.17.mlp.down_proj"
        packed = nf4.from_checkpoint(after, prefix)
        assert packed.dtype == torch.bfloat16
        weight = before.read(prefix + ".weight")
        assert torch.equal(packed.codes, nf4.quantize(weight).codes)
        embedding = after.read("model.embed_tokens.weight")
        assert torch.equal(embedding, before.read("model.embed_tokens.weight").bfloat16())
        assert "lm_head.weight" not in after.tensors
    text = "The capital of France is Paris: 2024, naïve 日本."
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer.encode(text)) == text

"""The variant of a format by the files of a model: shapes of AQLM's codebooks and of vq2, VPTQ's config.json."""

from __future__ import annotations

import json

import pytest

from localq.errors import LocalqError
from localq.files.model_folder import open_model
from localq.files.schemes import int4_layout
from localq.files.stored_format import scheme_of, unreadable
from tests.support.files.raw_safetensors import entry, write_raw


def files(folder, quantization, **shapes):
    """A model folder with float16 tensors of these shapes, their data left out of the story: all zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for each in shape:
            size *= each
        header[f"model.layers.0.{name.replace('__', '.')}"] = entry("F16", shape, (end, end + size))
        end += size
    write_raw(folder / "model.safetensors", header, bytes(end))
    config = {"model_type": "llama", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return open_model(folder)


@pytest.mark.parametrize(
    ("shape", "scheme"),
    [
        ((1, 65_536, 1, 8), "1x16g8"),
        ((1, 4096, 1, 16), "1x12g16"),
        ((2, 256, 1, 8), "2x8g8"),
        ((8, 256, 1, 32), "8x8g32"),
        ((2, 256, 2, 4), "2x8g8"),  # blocks of two rows take as many codes
        ((2, 256, 8), ""),
        ((2, 0, 1, 8), ""),
        ((2, 2**17, 1, 1), ""),
    ],
)
def test_aqlm_by_the_shape_of_its_codebooks(tmp_path, shape, scheme):
    said = {"quant_method": "aqlm", "num_codebooks": 7, "nbits_per_codebook": 3}  # names and numbers lie
    made = files(tmp_path, said, norm__weight=(4,), mlp__up_proj__codebooks=shape)
    assert scheme_of(made) == scheme


def vptq(**changes):
    layer = {"vector_lens": [-1, 8], "num_centroids": [-1, 65_536], "num_res_centroids": [-1, 256], **changes}
    return {"quant_method": "vptq", "config_for_layers": {"model.layers.0.mlp.up_proj": layer}}


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        (vptq(), "v8-k65536-256"),
        (vptq(vector_lens=[4, 16], num_res_centroids=[-1, -1]), "v16-k65536-0"),
        (vptq(vector_lens=[-1, 0]), ""),
        (vptq(num_centroids=[-1, 10**9]), ""),
        (vptq(num_res_centroids=[-1, 10**9]), ""),
        (vptq(num_centroids=[-1, True]), ""),
        (vptq(num_centroids=65_536), ""),
        (vptq(num_centroids=None), ""),
        ({"quant_method": "vptq"}, ""),
        ({"quant_method": "vptq", "config_for_layers": {}}, ""),
        ({"quant_method": "vptq", "config_for_layers": {"a": 3}}, ""),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ""),
        ({"quant_method": "awq"}, "g128"),
        ({"quant_method": "awq", "q_group_size": 64}, "g64"),
        ({"quant_method": "gptq", "group_size": -1}, "row"),
        ({"quant_method": "gptq", "group_size": 0}, ""),
        ({"quant_method": "gptq", "group_size": 10**9}, ""),
        ({"quant_method": "gptq", "group_size": [32]}, ""),
        ({"quant_method": ["aqlm"]}, ""),
        (None, ""),
    ],
)
def test_vptq_by_its_configuration_and_others_have_none(tmp_path, said, scheme):
    assert scheme_of(files(tmp_path, said, norm__weight=(4,))) == scheme


SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "scheme"),
    [
        ({"mlp__up_proj__codes": (6, 8), "mlp__up_proj__codebook": (256, 16)}, "s4l16"),
        ({"mlp__down_proj__codes": (6, 6), "mlp__codebook": (256, 8)}, "s8l8"),  # shared; 48 columns
        ({"a__q_proj__codes": (6, 8), "codebook": (256, 8), "a__q_proj__codes_2": (6, 2), "a__codebook_2": (256, 16)},
         "s4l8+s16l16"),
        ({"mlp__up_proj__codes": (6, 8), "mlp__down_proj__codes": (6, 12), "codebook": (256, 16),
          "mlp__down_proj__codes_2": (6, 3), "mlp__down_proj__codebook_2": (256, 16)}, "mix2.30"),  # 552 bits of 240
        ({"mlp__up_proj__codes": (6, 8), "mlp__down_proj__codes": (6, 7), "codebook": (256, 16)}, ""),
        ({"mlp__up_proj__codes": (6, 8)}, ""),
        ({"mlp__up_proj__codes": (6, 8), "a__codebook": (256, 16)}, ""),
        ({"mlp__up_proj__codes": (6, 7), "codebook": (256, 16)}, ""),
        ({"mlp__up_proj__codes": (6, 0), "codebook": (256, 16)}, ""),
        ({"mlp__up_proj__codes": (6, 32), "codebook": (256, 16)}, ""),
        ({"mlp__up_proj__codes": (6, 8), "codebook": (256, 18)}, ""),
        ({"mlp__up_proj__codes": (6, 8, 1), "codebook": (256, 16)}, ""),
        ({"mlp__router__codes": (6, 8), "codebook": (256, 16)}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_vq2_by_the_shapes_of_codes_and_codebooks(tmp_path, shapes, scheme):
    made = files(tmp_path, {"quant_method": "localq_vq2"}, norm__weight=(4,), **shapes)
    assert scheme_of(made) == ""  # of a shape that is not known
    made.config.update(SHAPE)
    assert scheme_of(made) == scheme


def test_a_damaged_header_is_an_error(tmp_path):
    made = files(tmp_path, {"quant_method": "aqlm"}, norm__weight=(4,))
    (tmp_path / "model.safetensors").write_bytes(b"nope")
    with pytest.raises(LocalqError):
        scheme_of(made)


@pytest.mark.parametrize(
    ("said", "layout", "refused"),
    [
        ({"quant_method": "awq"}, "gemm", ""),
        ({"quant_method": "awq", "version": "GEMM", "bits": 4}, "gemm", ""),
        ({"quant_method": "awq", "format": "gemv", "bits": 4}, "gemv", "AWQ in layout 'gemv'"),
        ({"quant_method": "awq", "version": ["x" * 2**16]}, None, "AWQ in layout"),
        ({"quant_method": "awq", "bits": True}, "gemm", "AWQ with True bits"),
        ({"quant_method": "gptq", "bits": 4}, "gptq", ""),
        ({"quant_method": "gptq", "bits": 4, "format": "gptq_v2"}, "gptq_v2", ""),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}, "+:y": {"group_size": 32}, "z": None}}, "gptq", ""),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"z": None, "y": {"bits": 6}}}, "gptq", "GPTQ with 6 bits"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin", "GPTQ in layout 'marlin'"),
        ({"quant_method": "gptq"}, "gptq", "GPTQ with an unknown number of bits"),
        ({"quant_method": ["gptq"]}, "gptq", ""),
        ({}, "gptq", ""),
    ],
)
def test_variants_of_awq_and_gptq_that_are_not_read(said, layout, refused):
    assert layout in (None, int4_layout(said))
    assert unreadable(said).startswith(refused)
    assert bool(unreadable(said)) == bool(refused)
    assert len(unreadable(said)) < 120

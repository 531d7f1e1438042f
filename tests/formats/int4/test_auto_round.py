"""AutoRound: tensors of GPTQ or AWQ under a name and with fields of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localq.engine.load.load import load
from localq.errors import LocalqError
from localq.files import schemes
from localq.files.catalog import resolve
from localq.files.model_folder import open_model
from localq.files.stored_format import scheme_of, unreadable
from localq.planner import uncatalogued
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.formats.int4_checkpoints import Int4, tensors, write

CPU = LoadOptions(device="cpu", dtype="float32")
BASE = {
    "quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "data_type": "int", "iters": 200,
    "autoround_version": "0.9", "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
}  # fmt: skip
PACKINGS = {
    "auto_round:auto_gptq": Int4("gptq", 64, g_idx=False),
    "auto_round:gptq": Int4("gptq", 64),
    "auto_round": Int4("gptq", 64, version="gptq_v2", g_idx=False),
    "auto_round:gptqmodel": Int4("gptq", 64, version="gptq_v2"),
    "auto_round:auto_awq": Int4("awq", 64),
}
DOWN = "model.layers.0.mlp.down_proj"


def restate(folder: Path, stated: dict[str, Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return folder


@pytest.mark.parametrize("packing", PACKINGS)
def test_it_is_read_as_the_format_that_it_stores(tmp_path, packing):
    of = PACKINGS[packing]
    write(tmp_path / "m", of, num_hidden_layers=1)
    files, ids = open_model(tmp_path / "m"), prompt_of(9)
    plain = load(files, CPU)
    expected = logits_of(plain.model, plain, ids)
    files = open_model(restate(tmp_path / "m", {**BASE, "packing_format": packing}))
    loaded = load(files, CPU)
    assert (loaded.format, scheme_of(files)) == (of.method, "g64")
    assert torch.equal(logits_of(loaded.model, loaded, ids), expected)
    offer = uncatalogued.offer(resolve(str(tmp_path / "m")), offline=True)
    assert (offer.format, offer.scheme, offer.unsupported) == (of.method, "g64", None)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_layers_have_groups_of_their_own_or_none(tmp_path, method):
    """`extra_config` names them; their tensors say the same."""
    of, finer = Int4(method, 64, g_idx=False), Int4(method, 32, g_idx=False)
    write(tmp_path / "m", of, plain="q_proj", num_hidden_layers=1)
    held = load_file(tmp_path / "m" / "model.safetensors")
    held |= {DOWN + suffix: each for suffix, each in tensors((128, 192), finer).items()}
    save_file(held, tmp_path / "m" / "model.safetensors")
    extra = {DOWN: {"group_size": 32}, "model.layers.0.self_attn.q_proj": {"bits": 16, "data_type": "fp"},
             ".*mlp.gate$": {"bits": 16}}  # fmt: skip
    stated = {**BASE, "packing_format": f"auto_round:auto_{method}", "extra_config": extra}
    loaded = load(open_model(restate(tmp_path / "m", stated)), CPU)
    assert loaded.format == method
    without = {key: each for key, each in stated.items() if key != "extra_config"}
    with pytest.raises(LocalqError, match="6 groups for 192 columns do not match the group size of 64"):
        load(open_model(restate(tmp_path / "m", without)), CPU)


def test_a_description_beside_config_json_is_the_same(tmp_path):
    write(tmp_path / "m", Int4("gptq", 64), num_hidden_layers=1)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "quantization_config.json").write_text(json.dumps(BASE))
    assert load(open_model(tmp_path / "m"), CPU).format == "gptq"


VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "5 bits": ({"bits": 5}, "AutoRound with 5 bits (localq supports 2, 3, 4, 8)"),
    "2 bits of AWQ": (
        {"bits": 2, "packing_format": "auto_round:auto_awq"},
        "AutoRound with 2 bits (localq supports 4)",
    ),
    "no bits": ({"bits": None}, "AutoRound with an unknown number of bits"),
    "layers of 6 bits": ({"extra_config": {"lm_head": {"bits": 6}}}, "AutoRound with 6 bits"),
    "bits of text": ({"extra_config": {"lm_head": {"bits": "4"}}}, "AutoRound with '4' bits"),
    "fp8": ({"packing_format": "auto_round:fp8_static"}, "AutoRound in layout 'auto_round:fp8_static'"),
    "mxfp4": ({"data_type": "mx_fp"}, "AutoRound with mx_fp weights"),
    "a layer of mxfp4": ({"extra_config": {"a": {"data_type": "mx_fp"}}}, "AutoRound with mx_fp weights"),
    "another program's": ({"packing_format": "auto_round:llm_compressor"}, "in layout 'auto_round:llm_comp"),
    "a packing that is a list": ({"packing_format": ["x" * 999]}, "AutoRound in layout"),
    "rotated": ({"rotation_config": {"rotation_type": "hadamard"}}, "AutoRound with rotated inputs"),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_other_variants_are_refused_by_name(tmp_path, case):
    fields, why = VARIANTS[case]
    write(tmp_path / "m", Int4("gptq", 64), num_hidden_layers=1)
    files = open_model(restate(tmp_path / "m", {**BASE, **fields}))
    found = unreadable(files.quantization)
    assert why in found
    assert len(found) < 120
    with pytest.raises(LocalqError) as caught:
        load(files, CPU)
    assert found in caught.value.why


@pytest.mark.parametrize("extra", [None, [], "x", {"a": None}, {"a": {"bits": None}}, {"a": {"bits": 32}}], ids=repr)
def test_what_extra_config_may_be(extra):
    stated = {**BASE, "quant_method": "gptq", "extra_config": extra}
    assert (unreadable(stated), schemes.int4_layout(stated)) == ("", "gptq")

"""VPTQ layers that are damaged, or whose tensors and config.json disagree: each is refused by name, none is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.formats import vptq
from localq.formats.checkpoint import Checkpoint
from tests.support.formats.vptq_layers import Layer, Layout, checkpoint_of, make

PACKED = Layout((8, 1024, 32), 43, 2 * 17 + 5, outlier=(4, 30, 5), groups=2)
PLAIN = Layout((8, 1000, 30), 43, 2 * 17 + 5, outlier=(4, 30, 5), groups=2, packed=False)

Damage = Callable[[Layer], None]


def tensor(suffix: str, change: Callable[[Tensor], Tensor] | None) -> Damage:
    """Change the tensor of that suffix, or take it away."""

    def damage(layer: Layer) -> None:
        found = layer.tensors.pop(suffix)
        if change is not None:
            layer.tensors[suffix] = change(found)

    return damage


def said(**fields: Any) -> Damage:
    """Say something else in config.json; None takes it out."""

    def damage(layer: Layer) -> None:
        layer.config.update(fields)
        for name in [name for name, value in fields.items() if value is None]:
            del layer.config[name]

    return damage


def added(suffix: str, value: Tensor) -> Damage:
    return lambda layer: layer.tensors.update({suffix: value})


def put(value: float) -> Callable[[Tensor], Tensor]:
    """The tensor with its last element changed."""

    def change(found: Tensor) -> Tensor:
        found = found.clone()
        found.view(-1)[-1] = value
        return found

    return change


def fewer_centroids(layer: Layer) -> None:
    """In config.json and in the codebooks alike: only the indices still name the last one."""
    layer.config["num_centroids"] = [30, 999]
    layer.tensors[".centroids.weight"] = layer.tensors[".centroids.weight"][:, :-8].contiguous()


def swapped_columns(found: Tensor) -> Tensor:
    return found.transpose(1, 2).contiguous()


BOTH: dict[str, Damage] = {
    "no indices": tensor(".indices", None),
    "flat indices": tensor(".indices", torch.flatten),
    "scalar indices": tensor(".indices", lambda found: found[0, 0, 0]),
    "indices of another layer": tensor(".indices", lambda found: found[:, :, :-1].contiguous()),
    "indices of more vectors": tensor(".indices", lambda found: torch.cat([found, found[:, :1]], 1)),
    "transposed indices": tensor(".indices", swapped_columns),
    "indices in 64 bit": tensor(".indices", lambda found: found.long()),
    "indices of floats": tensor(".indices", lambda found: found.float()),
    "short centroids": tensor(".centroids.weight", lambda found: found[:, :-1].contiguous()),
    "centroids of one group": tensor(".centroids.weight", lambda found: found[:1]),
    "centroids of integers": tensor(".centroids.weight", lambda found: found.to(torch.int16)),
    "centroids in 64 bit": tensor(".centroids.weight", lambda found: found.double()),
    "nan in centroids": tensor(".centroids.weight", put(float("nan"))),
    "inf in residual centroids": tensor(".res_centroids.weight", put(float("inf"))),
    "no residual centroids": tensor(".res_centroids.weight", None),
    "short residual centroids": tensor(".res_centroids.weight", lambda found: found[:, 8:].contiguous()),
    "no outlier centroids": tensor(".outlier_centroids.weight", None),
    "no outlier indices": tensor(".outlier_indices", None),
    "outlier index too large": tensor(".outlier_indices", put(30)),
    "outlier index below 0": tensor(".outlier_indices", put(-1)),
    "outlier indices in 32 bit": tensor(".outlier_indices", lambda found: found.int()),
    "fewer outlier vectors": tensor(".outlier_indices", lambda found: found[:, 1:].contiguous()),
    "nan in outliers": tensor(".outlier_centroids.weight", put(float("nan"))),
    "a column twice": tensor(".perm", lambda found: torch.where(found == 3, 4, found).to(torch.int16)),
    "a column that is not there": tensor(".perm", lambda found: torch.where(found == 38, 39, found).to(torch.int16)),
    "a column below 0": tensor(".perm", lambda found: torch.where(found == 38, -1, found).to(torch.int16)),
    "a column far away": tensor(".perm", lambda found: torch.where(found == 38, 2**40, found.long())),
    "a column far below": tensor(".perm", lambda found: torch.where(found == 0, -(2**63), found.long())),
    "short permutation": tensor(".perm", lambda found: found[:-1]),
    "permutation of floats": tensor(".perm", lambda found: found.half()),
    "no permutation": tensor(".perm", None),
    "permutation unsaid": said(enable_perm=False),
    "no scale": tensor(".weight_scale", None),
    "no bias of the norm": tensor(".weight_bias", None),
    "nan in scale": tensor(".weight_scale", put(float("nan"))),
    "inf in bias": tensor(".weight_bias", put(float("-inf"))),
    "scale of rows": tensor(".weight_scale", lambda found: torch.ones(43, dtype=torch.float16)),
    "norm unsaid": said(enable_norm=False),
    "norm of rows": said(norm_dim=1),
    "vectors along the input": said(vector_quant_dim="in"),
    "other vector length": said(vector_lens=[4, 16]),
    "vector length 0": said(vector_lens=[4, 0]),
    "vector length -1": said(vector_lens=[4, -1]),
    "vast vector length": said(vector_lens=[4, 2**40]),
    "one vector length": said(vector_lens=[8]),
    "vector length as a number": said(vector_lens=8),
    "vector length as text": said(vector_lens=["4", "8"]),
    "vector length of true": said(vector_lens=[4, True]),
    "no vector lengths": said(vector_lens=None),
    "other count": said(num_centroids=[30, 512]),
    "vast count": said(num_centroids=[30, 2**31]),
    "no centroids": said(num_centroids=[30, -1]),
    "other residual count": said(num_res_centroids=[-1, 64]),
    "no residual": said(num_res_centroids=[-1, -1]),
    "residual of outliers": said(num_res_centroids=[16, 32]),
    "other outlier count": said(num_centroids=[29, 1024]),
    "outliers unsaid": said(vector_lens=[-1, 8]),
    "other number of outliers": said(outlier_size=6),
    "outliers and a half": said(outlier_size=5.0),
    "no number of outliers": said(outlier_size=None),
    "groups of nothing": said(group_num=0),
    "one group": said(group_num=1, group_size=34),
    "groups below 0": said(group_num=-2, group_size=-17),
    "vast groups": said(group_num=2**16, group_size=2**20),
    "other group size": said(group_size=16),
    "group size -1": said(group_size=-1),
    "other columns": said(in_features=40),
    "other rows": said(out_features=35),
    "rows of text": said(out_features="43"),
    "no rows": said(out_features=0),
    "packing unsaid": lambda layer: layer.config.update(is_indice_packed=not layer.config["is_indice_packed"]),
    "packing of text": said(is_indice_packed="yes"),
}  # fmt: skip
ONLY_PACKED: dict[str, Damage] = {
    "residual indices besides": added(".res_indices", torch.zeros(2, 6, 17, dtype=torch.int16)),
    "a count of no whole bits": said(num_centroids=[30, 1000]),
    "a residual count of no whole bits": said(num_res_centroids=[-1, 31]),
    "no bits": said(num_centroids=[30, 1], num_res_centroids=[-1, 1]),
    "unpacked": tensor(".indices", lambda found: found.to(torch.int16)),
}
ONLY_PLAIN: dict[str, Damage] = {
    "index too large": tensor(".indices", put(1000)),
    "index below 0": tensor(".indices", put(-1)),
    "residual index too large": tensor(".res_indices", put(30)),
    "no residual indices": tensor(".res_indices", None),
    "residual indices of one group": tensor(".res_indices", lambda found: found[:1]),
    "fewer centroids than indices": fewer_centroids,
}
CASES = [
    *((PACKED, name, damage) for name, damage in {**BOTH, **ONLY_PACKED}.items()),
    *((PLAIN, name, damage) for name, damage in {**BOTH, **ONLY_PLAIN}.items()),
]


def refused(checkpoint: Checkpoint) -> LocalqError:
    with pytest.raises(LocalqError) as caught:
        vptq.from_checkpoint(checkpoint, "a.q_proj")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert "a.q_proj" in caught.value.what
    assert len(str(caught.value)) < 300
    return caught.value


@pytest.mark.parametrize("layout", [PACKED, PLAIN], ids=["packed", "plain"])
def test_what_is_damaged_below_is_sound_before(layout: Layout) -> None:
    assert vptq.from_checkpoint(checkpoint_of(make(layout)), "a.q_proj").shape == (43, 39)


@pytest.mark.parametrize(
    ("layout", "damage"),
    [pytest.param(layout, damage, id=f"{name}{'' if layout.packed else ', plain'}") for layout, name, damage in CASES],
)
def test_damaged_layers_are_refused(layout: Layout, damage: Damage) -> None:
    layer = make(layout)
    damage(layer)
    refused(checkpoint_of(layer))


@pytest.mark.parametrize(
    "quantization",
    [
        {},
        {"config_for_layers": []},
        {"config_for_layers": {"a.k_proj": {}}},
        {"config_for_layers": {"a.q_proj": None}, "shared_layer_config": "q_proj"},
        {"config_for_layers": {"a.q_proj": [1]}},
        {"shared_layer_config": {"a.q_proj": {}, "proj": {}}},
    ],
    ids=str,
)
def test_a_layer_that_config_json_does_not_describe(quantization: dict[str, Any]) -> None:
    held = checkpoint_of(make(PACKED))
    error = refused(Checkpoint(held.tensors, held._source, quantization))
    assert "has no entry for this layer" in error.why


def test_errors_name_what_differs() -> None:
    layer = make(PACKED)
    layer.tensors[".indices"] = layer.tensors[".indices"][:, :5].contiguous()
    assert "indices has shape [2, 5, 8]; expected [2, 6, 8]" in refused(checkpoint_of(layer)).why
    layer = make(PLAIN)
    layer.tensors[".res_indices"] = put(77)(layer.tensors[".res_indices"])
    assert "res_indices contains the index 77, but there are only 30" in refused(checkpoint_of(layer)).why
    layer = make(PACKED)
    layer.config["group_num"] = "2" * 500
    assert "group_num, 22222" in refused(checkpoint_of(layer)).why


def test_more_columns_than_16_bits_order_are_refused() -> None:
    layer = make(Layout((8, 2, 0), 3, 2**16 + 4, perm=torch.int64, norm=False))
    assert "65540 columns" in refused(checkpoint_of(layer)).why


def test_any_bits_of_packed_indices_are_indices() -> None:
    """Nothing in a packed row can point out of its codebook: every index has just the bits that the codebook needs."""
    layer = make(PACKED)
    noise = torch.randint(-(2**31), 2**31, layer.tensors[".indices"].shape, dtype=torch.int64).to(torch.int32)
    layer.tensors[".indices"] = noise
    assert torch.isfinite(vptq.dequantize(vptq.from_checkpoint(checkpoint_of(layer), "a.q_proj"), torch.float32)).all()


def test_the_largest_index_of_16_bits() -> None:
    layer = make(Layout((8, 65536, 0), 11, 13, packed=False, norm=False))
    weight = vptq.dequantize(vptq.from_checkpoint(checkpoint_of(layer), "a.q_proj"), torch.float16)
    book, last = layer.tensors[".centroids.weight"].view(65536, 8), int(layer.tensors[".perm"][-1])
    assert int(layer.tensors[".indices"][0, -1, -1]) == -1
    assert torch.equal(weight[8:, last], book[65535, :3])  # the second vector has 3 rows left

"""Quantized tensors that contradict themselves or their configuration (reliability M4), over sound folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.files.hostile_models import QUERY, Case, Change, sound_tensors, write_tensors

Damage = Callable[[dict[str, Any]], object]  # changes the tensors of a model, by name


def damaged(format: str, damage: Damage) -> Change:
    def change(folder: Path) -> None:
        tensors = dict(sound_tensors(format)[0])
        damage(tensors)
        write_tensors(folder, tensors)

    return change


def _gone(suffix: str) -> Damage:
    return lambda tensors: tensors.pop(QUERY + suffix)


def _as(suffix: str, change: Callable[[Any], Any]) -> Damage:
    """Replaced by what `change` makes of a copy."""
    return lambda tensors: tensors.__setitem__(QUERY + suffix, change(tensors[QUERY + suffix].clone()))


def _last(suffix: str, value: float) -> Damage:
    """The last element is another."""

    def change(tensor: Any) -> Any:
        tensor.view(-1)[-1] = value
        return tensor

    return _as(suffix, change)


def _double_rows(tensor: Any) -> Any:
    return tensor.repeat(2, *[1] * (tensor.dim() - 1))


def _said(**fields: Any) -> Change:
    """Another block of VPTQ's for the damaged Linear."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["config_for_layers"][QUERY].update(fields)
        (folder / "config.json").write_text(json.dumps(config))

    return change


# ---- NF4: a JSON text in a tensor

STATE = ".weight.quant_state.bitsandbytes__nf4"


def _state(text: bytes) -> Damage:
    def change(_: Any) -> Any:
        import torch

        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    return _as(STATE, change)


def _stated(**fields: Any) -> Damage:
    def change(tensors: dict[str, Any]) -> None:
        state = json.loads(tensors[QUERY + STATE].numpy().tobytes())
        _state(json.dumps({**state, **fields}).encode())(tensors)

    return change


NF4: dict[str, Damage] = {
    "blob is not JSON": _state(b"{nope"),
    "blob is not UTF-8": _state(b"\xff\xfe{}"),
    "blob is a list": _state(b"[1]"),
    "blob is deep": _state(b"[" * 4000),
    "blob is long": _state(b" " * 5000),
    "blob is of floats": _as(STATE, lambda t: t.float()),
    "a key twice": _state(b'{"shape": [64, 64], "shape": [64, 64]}'),
    "another shape": _stated(shape=[64, 128]),
    "a shape of the same size": _stated(shape=[32, 128]),
    "a vast shape": _stated(shape=[2**40, 2**40]),
    "a negative shape": _stated(shape=[-64, -64]),
    "a shape of text": _stated(shape=["64", "64"]),
    "another type inside": _stated(quant_type="fp4"),
    "blocks of 0": _stated(blocksize=0),
    "nested blocks of 128": _stated(nested_blocksize=128),
    "an unknown dtype": _stated(dtype="int8"),
    "offset NaN": _stated(nested_offset=float("nan")),
    "offset infinite": _stated(nested_offset=float("inf")),
    "offset beyond f32": _stated(nested_offset=1e300),
    "offset beyond floats": _stated(nested_offset=10**400),
    "offset of text": _stated(nested_offset="0"),
    "codes cut": _as(".weight", lambda t: t[:-1]),
    "no absmax": _gone(".weight.absmax"),
    "absmax cut": _as(".weight.absmax", lambda t: t[:-1]),
    "absmax of floats": _as(".weight.absmax", lambda t: t.float()),
    "no nested absmax": _gone(".weight.nested_absmax"),
    "nested absmax NaN": _last(".weight.nested_absmax", float("nan")),
    "nested map infinite": _last(".weight.nested_quant_map", float("inf")),
    "nested map cut": _as(".weight.nested_quant_map", lambda t: t[:-1]),
    "another table": _as(".weight.quant_map", lambda t: t.flip(0)),
    "no table": _gone(".weight.quant_map"),
}

# ---- AQLM, VPTQ, vq2: codes and codebooks

AQLM: dict[str, Damage] = {
    "no codebooks": _gone(".codebooks"),
    "no scales": _gone(".scales"),
    "no codes": _gone(".codes"),
    "codes of floats": _as(".codes", lambda t: t.float()),
    "codes of 64 bits": _as(".codes", lambda t: t.long()),
    "codes of two sizes": _as(".codes", lambda t: t[..., 0]),
    "codes for more codebooks": _as(".codes", lambda t: t.repeat(1, 1, 2)),
    "more rows": _as(".codes", _double_rows),
    "255 entries": _as(".codebooks", lambda t: t[:, :255]),
    "entries that no code names": _as(".codebooks", lambda t: t.repeat(1, 2, 1, 1)),
    "another group": _as(".codebooks", lambda t: t.repeat(1, 1, 1, 2)),
    "groups of rows": _as(".codebooks", lambda t: t.repeat(1, 1, 2, 1)),
    "a codebook of integers": _as(".codebooks", lambda t: t.char()),
    "a codeword infinite": _last(".codebooks", float("inf")),
    "a scale that is NaN": _last(".scales", float("nan")),
    "scales of one size": _as(".scales", lambda t: t.flatten()),
    "scales cut": _as(".scales", lambda t: t[:-1]),
    "scales of another type": _as(".scales", lambda t: t.float()),
}
VPTQ: dict[str, Damage] = {
    "no centroids": _gone(".centroids.weight"),
    "no indices": _gone(".indices"),
    "no permutation": _gone(".perm"),
    "indices of floats": _as(".indices", lambda t: t.float()),
    "indices cut": _as(".indices", lambda t: t[..., :-1]),
    "indices of more vectors": _as(".indices", lambda t: t.repeat(1, 2, 1)),
    "indices of one size": _as(".indices", lambda t: t.flatten()),
    "centroids cut": _as(".centroids.weight", lambda t: t[:, :-8]),
    "a centroid NaN": _last(".centroids.weight", float("nan")),
    "a residual infinite": _last(".res_centroids.weight", float("inf")),
    "a column twice": _as(".perm", lambda t: t.clamp(max=62)),
    "a column that is not there": _last(".perm", 9999),
    "a scale that is NaN": _last(".weight_scale", float("nan")),
    "no bias of the norm": _gone(".weight_bias"),
}
VPTQ_SAID: dict[str, dict[str, Any]] = {
    "a vast vector length": {"vector_lens": [-1, 2**40]},
    "vector length 0": {"vector_lens": [-1, 0]},
    "vast centroids": {"num_centroids": [-1, 2**31]},
    "fewer centroids": {"num_centroids": [-1, 128]},
    "other residuals": {"num_res_centroids": [-1, 4096]},
    "vast groups": {"group_num": 2**16, "group_size": 2**20},
    "groups below 0": {"group_num": -1, "group_size": -64},
    "another width": {"in_features": 2**20},
    "another height": {"out_features": 2**20},
    "outliers that are not there": {"outlier_size": 8, "vector_lens": [4, 8], "num_centroids": [16, 256]},
    "a text for a number": {"group_size": "64"},
}
VQ2: dict[str, Damage] = {
    "no codebook": _gone(".codebook"),
    "no scales": _gone(".scales"),
    "signed codes": _as(".codes", lambda t: t.char()),
    "codes of one size": _as(".codes", lambda t: t.flatten()),
    "codes that do not divide": _as(".codes", lambda t: t[:, :-1]),
    "more rows": _as(".codes", _double_rows),
    "255 codewords": _as(".codebook", lambda t: t[:255]),
    "short codewords": _as(".codebook", lambda t: t[:, :2]),
    "long codewords": _as(".codebook", lambda t: t.repeat(1, 4)),
    "a codeword infinite": _last(".codebook", float("inf")),
    "a scale that is NaN": _last(".scales", float("nan")),
    "scales cut": _as(".scales", lambda t: t[:-1]),
    "signs cut": _as(".signs", lambda t: t[:-1]),
    "signs of floats": _as(".signs", lambda t: t.float()),
}
INT4: dict[str, Damage] = {
    "no codes": _gone(".qweight"),
    "no zero points": _gone(".qzeros"),
    "no scales": _gone(".scales"),
    "codes of floats": _as(".qweight", lambda t: t.float()),
    "codes of 64 bits": _as(".qweight", lambda t: t.long()),
    "codes of one size": _as(".qweight", lambda t: t.flatten()),
    "codes transposed": _as(".qweight", lambda t: t.T),
    "codes cut": _as(".qweight", lambda t: t[:-1]),
    "more rows": _as(".qweight", _double_rows),
    "zero points of floats": _as(".qzeros", lambda t: t.float()),
    "zero points cut": _as(".qzeros", lambda t: t[:-1]),
    "a group more": _as(".scales", _double_rows),
    "scales of integers": _as(".scales", lambda t: t.int()),
    "scales of a number": _as(".scales", lambda t: t[0, 0]),
    "a scale that is NaN": _last(".scales", float("nan")),
}
GPTQ: dict[str, Damage] = {
    **INT4,
    "no groups": _gone(".g_idx"),
    "a group that is not there": _last(".g_idx", 2**31 - 1),
    "a group below 0": _last(".g_idx", -1),
    "groups cut": _as(".g_idx", lambda t: t[:-1]),
    "groups of floats": _as(".g_idx", lambda t: t.float()),
    "groups of a number": _as(".g_idx", lambda t: t[0]),
    "one group of all": _as(".g_idx", lambda t: t * 0),
}
BCQ: dict[str, Damage] = {
    "no signs": _gone(".signs"),
    "no scales": _gone(".alphas"),
    "signs of floats": _as(".signs", lambda t: t.float()),
    "signs of one size": _as(".signs", lambda t: t.flatten()),
    "signs cut": _as(".signs", lambda t: t[:, :, :-1]),
    "more rows": _as(".signs", _double_rows),
    "six planes": _as(".signs", lambda t: t.repeat(1, 3, 1)),
    "no planes": _as(".signs", lambda t: t[:, :0]),
    "scales of floats": _as(".alphas", lambda t: t.float()),
    "scales of a number": _as(".alphas", lambda t: t[0, 0, 0]),
    "fewer scales than planes": _as(".alphas", lambda t: t[:, :1]),
    "groups that no size makes": _as(".alphas", lambda t: t.repeat(1, 1, 9)),
    "a scale that is NaN": _last(".alphas", float("nan")),
}
PLAIN: dict[str, Damage] = {
    "of integers": _as(".weight", lambda t: t.int()),
    "in 8 bit floats": _as(".weight", lambda t: t.to(__import__("torch").float8_e4m3fn)),
    "of bools": _as(".weight", lambda t: t.bool()),
    "of one size": _as(".weight", lambda t: t.flatten()),
    "transposed": _as(".weight", lambda t: t[:32].T),
    "without rows": _as(".weight", lambda t: t[:0]),
    "twice": lambda tensors: tensors.__setitem__(
        QUERY.removeprefix("model.") + ".weight", tensors[QUERY + ".weight"].clone()
    ),
    "that nobody asked for": lambda tensors: tensors.__setitem__("\u202e.weight", tensors[QUERY + ".weight"].clone()),
}
CASES = [
    *(Case(f"M4 weights {name}", damaged("plain", damage)) for name, damage in PLAIN.items()),
    *(Case(f"M4 {format}: {name}", damaged(format, damage), format=format)
      for format, damages in {"nf4": NF4, "aqlm": AQLM, "vptq": VPTQ, "vq2": VQ2, "awq": INT4,
                              "gptq": GPTQ, "bcq": BCQ}.items()
      for name, damage in damages.items()),
    *(Case(f"M4 vptq says: {name}", _said(**fields), format="vptq") for name, fields in VPTQ_SAID.items()),
    Case("M4 vptq without a configuration", lambda folder: _drop_layers(folder), format="vptq"),
]  # fmt: skip


def _drop_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "vptq"}
    (folder / "config.json").write_text(json.dumps(config))

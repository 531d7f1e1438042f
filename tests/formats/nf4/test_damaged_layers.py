"""NF4 matrices that are damaged: each is refused by name, none is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.formats import nf4
from tests.support.formats.memory_checkpoint import Held
from tests.support.formats.nf4_weights import sample


def _with_state(**changes: Any) -> dict[str, Tensor]:
    tensors = nf4.to_tensors(nf4.quantize(sample(6, 128, torch.float32)), "p")
    state = json.loads(tensors["p" + nf4.STATE_SUFFIX].numpy().tobytes())
    state.update(changes)
    text = json.dumps({key: value for key, value in state.items() if value != "absent"})
    tensors["p" + nf4.STATE_SUFFIX] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return tensors


def _with_tensor(suffix: str, tensor: Tensor | None) -> dict[str, Tensor]:
    tensors = _with_state()
    if tensor is None:
        del tensors["p" + suffix]
    else:
        tensors["p" + suffix] = tensor
    return tensors


def _text(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


DAMAGED: dict[str, dict[str, Tensor]] = {
    "other shape": _with_state(shape=[6, 192]),
    "shape of one": _with_state(shape=[768]),
    "shape of text": _with_state(shape=["6", "128"]),
    "shape of bool": _with_state(shape=[True, 128]),
    "negative shape": _with_state(shape=[-6, -128]),
    "huge shape": _with_state(shape=[6, 2**60]),
    "blocks across rows": _with_state(shape=[8, 96]),
    "no shape": _with_state(shape="absent"),
    "fp4 inside": _with_state(quant_type="fp4"),
    "other blocks": _with_state(blocksize=128),
    "other nested blocks": _with_state(nested_blocksize=128),
    "unknown dtype": _with_state(dtype="int8"),
    "dtype of a list": _with_state(dtype=["float32"]),
    "offset of text": _with_state(nested_offset="1"),
    "offset too large": _with_state(nested_offset=1e300),
    "offset nan": _with_tensor(nf4.STATE_SUFFIX, _text(b'{"nested_offset": NaN}')),
    "not json": _with_tensor(nf4.STATE_SUFFIX, _text(b"{nope")),
    "json list": _with_tensor(nf4.STATE_SUFFIX, _text(b"[1]")),
    "deep json": _with_tensor(nf4.STATE_SUFFIX, _text(b"[" * 4000)),
    "duplicate key": _with_tensor(nf4.STATE_SUFFIX, _text(b'{"shape": [6, 128], "shape": [6, 128]}')),
    "not utf-8": _with_tensor(nf4.STATE_SUFFIX, _text(b"\xff\xfe{}")),
    "long state": _with_tensor(nf4.STATE_SUFFIX, torch.zeros(5000, dtype=torch.uint8)),
    "state of floats": _with_tensor(nf4.STATE_SUFFIX, torch.zeros(10)),
    "no codes": _with_tensor(".weight", None),
    "short codes": _with_tensor(".weight", torch.zeros(383, 1, dtype=torch.uint8)),
    "no absmax": _with_tensor(".weight.absmax", None),
    "short absmax": _with_tensor(".weight.absmax", torch.zeros(11, dtype=torch.uint8)),
    "absmax of floats": _with_tensor(".weight.absmax", torch.zeros(12)),
    "no nested absmax": _with_tensor(".weight.nested_absmax", None),
    "nan in nested absmax": _with_tensor(".weight.nested_absmax", torch.tensor([float("nan")])),
    "short nested map": _with_tensor(".weight.nested_quant_map", torch.zeros(255)),
    "inf in nested map": _with_tensor(".weight.nested_quant_map", torch.full((256,), float("inf"))),
    "other table": _with_tensor(".weight.quant_map", torch.linspace(-1, 1, 16)),
    "no table": _with_tensor(".weight.quant_map", None),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_checkpoints_are_refused(case: str) -> None:
    with pytest.raises(LocalqError) as caught:
        nf4.from_checkpoint(Held(DAMAGED[case]).checkpoint(), "p")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert "p" in caught.value.what

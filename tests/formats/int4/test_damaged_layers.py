"""AWQ and GPTQ layers that are damaged, or disagree with config.json: each is refused by name, none is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.formats import FORMATS
from tests.support.formats.int4_checkpoints import Int4, checkpoint_of, tensors

SHAPE = (48, 128)
AWQ, GPTQ, ORDERED = Int4("awq", 64), Int4("gptq", 64), Int4("gptq", 64, True)
Damage = Callable[[dict[str, Tensor], dict[str, Any]], object]


def as_(suffix: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda made, config: made.__setitem__(suffix, change(made[suffix]))


def gone(suffix: str) -> Damage:
    return lambda made, config: made.pop(suffix)


def last(suffix: str, value: float) -> Damage:
    def change(found: Tensor) -> Tensor:
        found = found.clone()
        found.view(-1)[-1] = value
        return found

    return as_(suffix, change)


def said(**fields: Any) -> Damage:
    return lambda made, config: config.update(fields)


BOTH: dict[str, tuple[Damage, str]] = {
    "no zero points": (gone(".qzeros"), "lacks P.qzeros"),
    "no scales": (gone(".scales"), "lacks P.scales"),
    "codes of 64 bits": (as_(".qweight", lambda t: t.long()), "qweight has dtype int64, expected int32"),
    "codes of floats": (as_(".qweight", lambda t: t.float()), "qweight has dtype float32"),
    "codes of bytes": (as_(".qweight", lambda t: t.view(torch.uint8)), "qweight has dtype uint8"),
    "codes of one size": (
        as_(".qweight", lambda t: t.flatten()),
        r"has shape \[768\], expected two dimensions|packed as",
    ),
    "no codes": (as_(".qweight", lambda t: t[:0]), "expected two dimensions"),
    "codes cut": (as_(".qweight", lambda t: t[:, :-1]), "not|packed as"),
    "codes transposed": (
        as_(".qweight", lambda t: t.T.contiguous()),
        "has shape .*, expected|packed as|cannot be packed",
    ),
    "zero points of floats": (as_(".qzeros", lambda t: t.half()), "qzeros has dtype float16, expected int32"),
    "zero points cut": (as_(".qzeros", lambda t: t[:, :-1]), r"qzeros has shape \[2, 5\], expected \[2, 6\]"),
    "a group of zero points more": (
        as_(".qzeros", lambda t: t.repeat(2, 1)),
        r"qzeros has shape \[4, 6\], expected \[2, 6\]",
    ),
    "scales of integers": (as_(".scales", lambda t: t.int()), "scales has dtype int32, expected float16"),
    "scales of one size": (
        as_(".scales", lambda t: t.flatten()),
        "scales has shape .* expected two dimensions|packed as",
    ),
    "a scale that is NaN": (last(".scales", float("nan")), "scales contain NaN"),
    "a scale that is infinite": (last(".scales", float("inf")), "scales contain NaN or infinity"),
    "other groups": (said(group_size=32), "2 groups for 128 columns do not match the group size of 32 in config.json"),
    "one group": (said(group_size=-1), "2 groups for 128 columns do not match"),
    "groups of 48": (said(group_size=48), "groups of 48 columns"),
    "groups of 0": (said(group_size=0), "groups of 0 columns"),
    "groups of text": (said(group_size="64"), "groups of '64' columns"),
    "groups of a truth": (said(group_size=True), "groups of True columns"),
    "a nameless method": (lambda made, config: config.pop("quant_method"), "quant_method None"),
    "another method": (said(quant_method="aqlm"), "quant_method 'aqlm'"),
}
OF_GPTQ: dict[str, tuple[Damage, str]] = {
    "a group beyond the last": (last(".g_idx", 2), "g_idx contains values from 0 to 2, but there are 2 groups"),
    "a group below the first": (last(".g_idx", -1), "g_idx contains values from -1 to"),
    "a vast group": (last(".g_idx", 2**31 - 1), "g_idx contains values from 0 to 2147483647"),
    "groups of other sizes": (as_(".g_idx", lambda t: torch.zeros_like(t)), "64 columns to every full group"),
    "g_idx cut": (as_(".g_idx", lambda t: t[:-1]), r"g_idx has shape \[127\], expected \[128\]"),
    "g_idx a number": (as_(".g_idx", lambda t: t[0]), r"g_idx has shape \[\], expected \[128\]"),
    "g_idx of floats": (as_(".g_idx", lambda t: t.float()), "g_idx has dtype float32"),
    "rows that are no words": (
        lambda made, config: made.update({".qweight": made[".qweight"][:, :44], ".scales": made[".scales"][:, :44]}),
        "44 x 128 codes cannot be packed into words",
    ),
    "awq's name": (said(quant_method="awq"), "but the tensors are packed for gptq"),
}


def refused(of: Int4, damage: Damage, why: str) -> None:
    made, config = tensors(SHAPE, of), dict(of.config)
    damage(made, config)
    checkpoint = checkpoint_of(made, config)
    (module,) = (each for each in FORMATS.values() if each.is_quantized(checkpoint.tensors, "P"))
    with pytest.raises(LocalqError, match=why) as caught:
        module.from_checkpoint(checkpoint, "P")
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("case", BOTH)
@pytest.mark.parametrize("of", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_damaged_layers_are_refused(of, case):
    refused(of, *BOTH[case])


@pytest.mark.parametrize("case", OF_GPTQ)
def test_damaged_gptq_is_refused(case):
    refused(ORDERED, *OF_GPTQ[case])


def test_act_order_without_its_order():
    refused(ORDERED, gone(".g_idx"), "desc_act is true, but g_idx is missing")


def test_awq_under_the_name_of_gptq():
    refused(AWQ, said(quant_method="gptq"), "but the tensors are packed for awq")


def test_awq_of_broken_groups():
    refused(
        AWQ,
        lambda made, config: [made.__setitem__(".qweight", made[".qweight"][:120])],
        "is not a multiple of the group size",
    )


def test_layers_may_have_groups_of_their_own_where_config_json_says_so():
    made = tensors(SHAPE, Int4("gptq", 32, True))
    config = {**ORDERED.config, "dynamic": {"+:.*": {"group_size": 32}}}
    assert FORMATS["gptq"].from_checkpoint(checkpoint_of(made, config), "P").group == 32

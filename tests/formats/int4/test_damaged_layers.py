"""AWQ and GPTQ layers that are damaged, or disagree with config.json: each is refused by name, none is read."""

from __future__ import annotations

import pytest
import torch

from localq.errors import ExitCode, LocalqError
from localq.formats import FORMATS
from tests.support.formats.int4_checkpoints import Int4, checkpoint_of, tensors
from tests.support.formats.int4_damage import Damage, change, drop, set_last, state

SHAPE = (48, 128)
AWQ, GPTQ, ORDERED = Int4("awq", 64), Int4("gptq", 64), Int4("gptq", 64, True)


BOTH: dict[str, tuple[Damage, str]] = {
    "no zero points": (drop(".qzeros"), "lacks P.qzeros"),
    "no scales": (drop(".scales"), "lacks P.scales"),
    "codes of 64 bits": (change(".qweight", lambda t: t.long()), "qweight has dtype int64; expected int32"),
    "codes of floats": (change(".qweight", lambda t: t.float()), "qweight has dtype float32"),
    "codes of bytes": (change(".qweight", lambda t: t.view(torch.uint8)), "qweight has dtype uint8"),
    "codes of one size": (
        change(".qweight", lambda t: t.flatten()),
        r"has shape \[768\]; expected two dimensions|packed as",
    ),
    "no codes": (change(".qweight", lambda t: t[:0]), "expected two dimensions"),
    "codes cut": (change(".qweight", lambda t: t[:, :-1]), "not|packed as"),
    "codes transposed": (
        change(".qweight", lambda t: t.T.contiguous()),
        "has shape .*; expected|packed as|cannot be packed",
    ),
    "zero points of floats": (change(".qzeros", lambda t: t.half()), "qzeros has dtype float16; expected int32"),
    "zero points cut": (change(".qzeros", lambda t: t[:, :-1]), r"qzeros has shape \[2, 5\]; expected \[2, 6\]"),
    "a group of zero points more": (
        change(".qzeros", lambda t: t.repeat(2, 1)),
        r"qzeros has shape \[4, 6\]; expected \[2, 6\]",
    ),
    "scales of integers": (change(".scales", lambda t: t.int()), "scales has dtype int32; expected float16"),
    "scales of one size": (
        change(".scales", lambda t: t.flatten()),
        "scales has shape .* expected two dimensions|packed as",
    ),
    "a scale that is NaN": (set_last(".scales", float("nan")), "scales contain NaN"),
    "a scale that is infinite": (set_last(".scales", float("inf")), "scales contain NaN or infinity"),
    "other groups": (state(group_size=32), "2 groups for 128 columns do not match the group size of 32 in config.json"),
    "one group": (state(group_size=-1), "2 groups for 128 columns do not match"),
    "groups of 48": (state(group_size=48), "a group size of 48; supported"),
    "groups of 0": (state(group_size=0), "a group size of 0; supported"),
    "groups of text": (state(group_size="64"), "a group size of '64'; supported"),
    "groups of a truth": (state(group_size=True), "a group size of True; supported"),
    "a nameless method": (lambda made, config: config.pop("quant_method"), "quant_method None"),
    "another method": (state(quant_method="aqlm"), "quant_method 'aqlm'"),
}
OF_GPTQ: dict[str, tuple[Damage, str]] = {
    "a group beyond the last": (set_last(".g_idx", 2), "g_idx contains values from 0 to 2, but there are 2 groups"),
    "a group below the first": (set_last(".g_idx", -1), "g_idx contains values from -1 to"),
    "a vast group": (set_last(".g_idx", 2**31 - 1), "g_idx contains values from 0 to 2147483647"),
    "groups of other sizes": (change(".g_idx", lambda t: torch.zeros_like(t)), "64 columns to every full group"),
    "g_idx cut": (change(".g_idx", lambda t: t[:-1]), r"g_idx has shape \[127\]; expected \[128\]"),
    "g_idx a number": (change(".g_idx", lambda t: t[0]), r"g_idx has shape \[\]; expected \[128\]"),
    "g_idx of floats": (change(".g_idx", lambda t: t.float()), "g_idx has dtype float32"),
    "rows that are no words": (
        lambda made, config: made.update({".qweight": made[".qweight"][:, :44], ".scales": made[".scales"][:, :44]}),
        "44 x 128 codes cannot be packed into words",
    ),
    "awq's name": (state(quant_method="awq"), "but the tensors are packed for gptq"),
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
    refused(ORDERED, drop(".g_idx"), "desc_act is true, but g_idx is missing")


def test_awq_under_the_name_of_gptq():
    refused(AWQ, state(quant_method="gptq"), "but the tensors are packed for awq")


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

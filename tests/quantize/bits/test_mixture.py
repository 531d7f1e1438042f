"""Which scheme each group of matrices gets: sums worked by hand, the least of all choices, what is kept and told."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from localq import kernels
from localq.errors import ExitCode, LocalqError
from localq.quantize.bits import mixture as bit_mixture
from localq.quantize.bits.mixture import NOISE_LEFT, SCHEMES, PricedGroup
from localq.quantize.codebooks import initial_codebooks

SIZES = (2000, 2500, 3000, 4000)  # of 8000 weights


def part(sensitivity: float, sizes: tuple[int, ...] = SIZES, name: str = "mlp.up_proj") -> PricedGroup:
    return PricedGroup((name,), sensitivity, sizes, 8000)


def loss(parts: list[PricedGroup], chosen: list[int]) -> float:
    return sum(each.loss(scheme) for each, scheme in zip(parts, chosen, strict=True))


def size(parts: list[PricedGroup], chosen: list[int]) -> int:
    return sum(each.sizes[scheme] for each, scheme in zip(parts, chosen, strict=True))


def test_two_groups_by_hand() -> None:
    parts = [part(1.0), part(3.0)]
    assert bit_mixture.choose(parts, 2.0) == [0, 0]
    assert bit_mixture.choose(parts, 2.24) == [0, 0]  # half a bit of one costs a quarter of both
    assert bit_mixture.choose(parts, 2.25) == [0, 1]
    assert bit_mixture.choose(parts, 2.5) == [0, 2]  # 3 * 0.0226 is more than 0.0316
    assert bit_mixture.choose(parts, 2.75) == [1, 2]
    assert bit_mixture.choose(parts, 4.0) == [3, 3]


def test_a_size_that_lies_above_the_hull_is_left_out() -> None:
    dear = part(1.0, (2000, 2990, 3000, 4000))  # half a bit costs nearly as much as a whole one
    assert dear.steps() == [0, 2, 3]
    assert bit_mixture.choose([dear], 3.0) == [2]
    assert bit_mixture.choose([dear], 2.995) == [0]


@pytest.mark.parametrize("bits", [2.1, 2.3, 2.5, 2.72, 3.3])
def test_no_choice_of_the_size_that_was_reached_loses_less(bits: float) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = []
    for factor in (1, 3, 2, 7, 1, 5):
        sensitivity = float(torch.rand((), generator=generator)) + 0.01
        parts.append(PricedGroup(("a",), sensitivity, tuple(factor * each + 64 for each in SIZES), factor * 8000))
    chosen = bit_mixture.choose(parts, bits)
    reached, lost = size(parts, chosen), loss(parts, chosen)
    assert 8 * reached <= bits * sum(each.weights for each in parts)
    steepest = max(each.slope(0, 1) for each in parts)
    for other in itertools.product(range(4), repeat=len(parts)):
        if size(parts, list(other)) <= reached:
            # what the last step did not fill is all that another choice can gain
            assert loss(parts, list(other)) >= lost - steepest * 7000


def test_less_than_the_least_is_refused_with_the_least() -> None:
    parts = [part(1.0, (2100, 2600, 3100, 4100)), part(2.0)]
    with pytest.raises(LocalqError, match=r"at least 2\.05 bits") as caught:
        bit_mixture.choose(parts, 2.04)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "Use 2.05 or more" in str(caught.value)
    assert bit_mixture.choose(parts, 2.05) == [0, 0]


def test_where_no_bits_on_offer_are_enough_the_way_without_a_mixture_is_named() -> None:
    with pytest.raises(LocalqError, match=r"at least 4\.10 bits") as caught:
        bit_mixture.choose([part(1.0, (4100, 4600, 5100, 6100))], 3.99)
    assert "or more" not in str(caught.value)
    assert "--bits 2 works for any model" in str(caught.value)


def test_bits_are_told_by_kind() -> None:
    parts = [part(1.0), part(3.0), PricedGroup(("self_attn.q_proj", "self_attn.k_proj"), 1.0, SIZES, 8000)]
    assert bit_mixture.summary(parts, [0, 1, 3], 2.9) == "2.833 bits per weight (at most 2.9): up 2.25, q k 4.00"


def test_what_was_chosen_stays_chosen(tmp_path: Path) -> None:
    job, other = {"fingerprint": "a"}, {"fingerprint": "b"}
    first = bit_mixture.load_or_choose(tmp_path, job, 1, lambda trail: [["s4l16", SCHEMES[2]]])
    assert bit_mixture.load_or_choose(tmp_path, job, 1, pytest.fail) == first == [["s4l16", SCHEMES[2]]]
    assert bit_mixture.load_or_choose(tmp_path, other, 1, lambda trail: [["s4l16"]]) == [["s4l16"]]
    assert json.loads((tmp_path / bit_mixture.FILE).read_text())["job"] == other


@pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_schemes_leave_of_noise_is_what_the_codebooks_leave(scheme: str) -> None:
    torch.set_num_threads(1)
    held = initial_codebooks.load_initial(scheme, torch.device("cpu"))
    # 32,768 squared errors: their mean is within 2 % (three standard deviations) of what it comes to
    assert initial_codebooks.mean_square_error(held, 64, 16) == pytest.approx(NOISE_LEFT[scheme], rel=0.02)

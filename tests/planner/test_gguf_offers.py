"""The models of a GGUF repository by the header of one: what is derived from the size of the others' files."""

from __future__ import annotations

import pytest

from localq.files import catalog, format_facts
from localq.planner import footprint, gguf_offers, uncatalogued
from localq.planner.offers import Offer
from tests.support.files.real_model import smollm2


@pytest.fixture(scope="module")
def known() -> Offer:
    return uncatalogued.offer(catalog.resolve(str(smollm2())), offline=True)


def test_weights_are_in_proportion_to_the_file(known):
    size = smollm2().stat().st_size
    same = gguf_offers._derived(known, "same", size)
    assert same.block_bytes == known.block_bytes
    assert same.file_bits == pytest.approx(known.file_bits)
    half = gguf_offers._derived(known, "half", size // 2)
    assert half.block_bytes == pytest.approx(known.block_bytes / 2, rel=0.01)
    assert half.stored_bits == pytest.approx(known.stored_bits / 2, rel=0.01)
    assert half.name == "half"


@pytest.mark.parametrize(
    ("tag", "slow"),
    [
        *(
            (tag, "")
            for tag in (
                "Q4_K_M",
                "Q4_0",
                "UD-Q2_K_XL",
                "Q8_0",
                "IQ4_XS",
                "UD-IQ4_NL",
                "IQ2_XXS",
                "UD-IQ3_XXS",
                "IQ3_M",
                "MXFP4_MOE",
                "NVFP4",
                "IQ1_S",
                "UD-IQ1_M",
                "TQ1_0",
                "IQ2_XS",
                "UD-IQ2_M",
                "",
            )
        ),
        ("Q1_0", "Q1_0"),
    ],
)
def test_a_tag_of_types_without_kernels_is_told(known, tag, slow):
    found = gguf_offers._derived(known, "other", smollm2().stat().st_size, tag)
    assert format_facts.without_kernels(found.scheme) == slow


def test_a_load_makes_no_weights_of_more_than_16_bits(known):
    arch = known.arch
    for bits in (16, 32):
        found = gguf_offers._derived(known, "wide", bits * arch.parameters // 8)
        whole = footprint.weights_bytes(arch, "bf16")["weights"]
        assert found.block_bytes == whole
        assert (found.scheme, found.arch.stored_head) == ("", 0)

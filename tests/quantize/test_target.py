"""What the encoder finds, written as one format or the other: by hand, there and back, against the package aqlm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.files.schemes import vq2_codebooks
from localq.formats.codebooks import aqlm, vq2
from localq.formats.codebooks.vq2_codec import Packed
from localq.quantize.target import Aqlm2x8Format, TargetFormat, Vq2Format, target_format
from tests.support.formats import aqlm_package
from tests.support.formats.memory_checkpoint import Held
from tests.support.models.tiny_checkpoints import make_config

SHAPE = (5, 48)
UP = "model.layers.0.mlp.up_proj"


def packed(scheme: str) -> Packed:
    generator = torch.Generator().manual_seed(3)
    books = []
    for stride, length in vq2_codebooks(scheme):
        codes = torch.randint(256, (SHAPE[0], SHAPE[1] // stride), generator=generator, dtype=torch.uint8)
        books.append((codes, torch.randn(256, length, generator=generator).half()))
    return Packed(tuple(books), (0.1 + torch.rand(SHAPE[0], generator=generator)).half(), None, SHAPE)


def read_again(target: TargetFormat, given: Packed) -> tuple[dict[str, Tensor], Packed]:
    tensors = target.to_tensors(given, UP, UP)
    held = Held(tensors).checkpoint()
    held.config.update(make_config(hidden_size=SHAPE[1], num_hidden_layers=1).to_dict())
    return tensors, target.from_checkpoint(held, UP)


def test_aqlm_by_hand():
    """Row 1 begins with the codewords 255 and 128, which are stored as -1 and -128."""
    given = packed("s8l8+s8l8")
    given.books[0][0][1, 0], given.books[1][0][1, 0] = 255, 128
    tensors = Aqlm2x8Format().to_tensors(given, "P", "P")
    assert sorted(tensors) == ["P.codebooks", "P.codes", "P.scales"]
    assert tensors["P.codes"][1, 0].tolist() == [-1, -128]
    assert torch.equal(tensors["P.codebooks"][1, 128, 0], given.books[1][1][128])
    assert torch.equal(tensors["P.scales"][1, 0, 0], given.scales[1:2])


@pytest.mark.parametrize(
    "target", [Vq2Format(), Vq2Format("s4l16+s8l16"), Aqlm2x8Format()], ids=["s4l16", "s4l16+s8l16", "aqlm2x8"]
)
def test_what_is_written_is_as_planned_and_reads_the_same(target):
    given = packed(target.scheme)
    tensors, again = read_again(target, given)
    planned = target.layout(*SHAPE, signs=False)
    assert {name.removeprefix(UP): (each.dtype, tuple(each.shape)) for name, each in tensors.items()} == planned
    assert again.shape == SHAPE
    for (codes, codebook), (others, other) in zip(given.books, again.books, strict=True):
        assert torch.equal(codes, others)
        assert torch.equal(codebook, other)
    assert torch.equal(given.scales, again.scales)


def test_the_package_makes_the_same_matrix_of_it_but_for_its_roundings():
    """The sum and the product are rounded to float16; a sum may be near 0 where its terms are not."""
    given = packed("s8l8+s8l8")
    tensors = Aqlm2x8Format().to_tensors(given, UP, UP)
    theirs = aqlm_package.dequantized(*(tensors[UP + suffix] for suffix in aqlm.suffixes)).float()
    ours = vq2.dequantize(given, torch.float32)
    assert 0 < (theirs - ours).abs().max() <= 2**-10 * ours.abs().max()
    torch.testing.assert_close(theirs, ours, rtol=2**-10, atol=0)


def test_aqlm_has_no_signs():
    with pytest.raises(ValueError, match="signs"):
        Aqlm2x8Format().layout(*SHAPE, signs=True)


def test_targets_by_name():
    assert target_format("vq2", "s4l16+s4l16").scheme == "s4l16+s4l16"
    assert target_format("aqlm2x8", "s4l16").scheme == "s8l8+s8l8"
    with pytest.raises(LocalqError, match="aqlm2x8") as caught:
        target_format("nf4")
    assert caught.value.exit_code == ExitCode.USAGE

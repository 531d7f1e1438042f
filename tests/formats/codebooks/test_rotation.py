"""The rotation of inputs against explicit Hadamard matrices, and its bits against butterflies done one by one."""

from __future__ import annotations

import pytest
import torch

from localq.formats.codebooks import rotation as codebook_rotation
from tests.support.formats.vq2_checkpoints import rotation, sylvester


def signs_of(columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (columns // 8,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_by_hand():
    """Eight columns are one block: the first unit vector becomes a row of 1 / sqrt(8), signs of the input first."""
    x = torch.zeros(2, 8)
    x[0, 0], x[1, 3] = 4.0, 2.0
    y = codebook_rotation.rotate(x, torch.tensor([0b0000_1000], dtype=torch.uint8))  # column 3 is negative
    part = torch.tensor(8**-0.5, dtype=torch.float32)
    assert torch.equal(y[0], 4 * part.expand(8))
    assert torch.equal(y[1], -2 * part * torch.tensor([1.0, -1, -1, 1, 1, -1, -1, 1]))


@pytest.mark.parametrize(
    ("columns", "block"),
    [
        (8, 8),
        (24, 8),
        (576, 64),
        (1536, 512),
        (2048, 2048),
        (8192, 4096),
        (12_288, 4096),
        (28_672, 4096),
        (11_008, 256),
    ],
)
def test_blocks_are_the_largest_powers_of_two_that_divide(columns, block):
    assert codebook_rotation.block_of(columns) == block


def test_the_matrices_to_compare_with_have_the_signs_of_common_bits():
    signs = [[(-1) ** (i & j).bit_count() for j in range(32)] for i in range(32)]
    assert torch.equal(sylvester(32).sign(), torch.tensor(signs).double())
    assert torch.allclose(sylvester(32) @ sylvester(32), torch.eye(32).double())


@pytest.mark.parametrize("columns", [16, 48, 576, 1536, 8192])
def test_against_the_matrices(columns):
    """Every stage rounds each value once: their errors add up to less than a stage's, in the norm of a row."""
    x, signs = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)), signs_of(columns)
    x[2, columns // 3] = 1000.0
    matrix = rotation(columns, signs)
    bound = (codebook_rotation.block_of(columns).bit_length() + 2) * 2**-24 * x.double().norm(dim=1)
    assert ((codebook_rotation.rotate(x, signs).double() - x.double() @ matrix.T).norm(dim=1) <= bound).all()
    assert ((codebook_rotation.unrotate(x, signs).double() - x.double() @ matrix).norm(dim=1) <= bound).all()
    back = codebook_rotation.unrotate(codebook_rotation.rotate(x, signs), signs)
    assert ((back - x).double().norm(dim=1) <= 2 * bound).all()


def test_the_bits_are_those_of_the_butterflies_in_their_order():
    columns, block = 96, 32
    x, signs = torch.randn(3, columns, generator=torch.Generator().manual_seed(2)), signs_of(columns, 3)
    y = x * codebook_rotation.factors_of(signs)
    for row in y:
        for stage in range(block.bit_length() - 1):
            for i in range(columns):
                if not i >> stage & 1:
                    a, b = row[i].clone(), row[i + (1 << stage)].clone()
                    row[i], row[i + (1 << stage)] = a + b, a - b
    y *= torch.tensor(block**-0.5, dtype=torch.float32)
    assert torch.equal(codebook_rotation.rotate(x, signs), y)
    assert torch.equal(codebook_rotation.unrotate_(x.clone(), signs), codebook_rotation.unrotate(x, signs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_inputs_are_rotated_in_f32_and_rounded_once(dtype):
    x, signs = torch.randn(2, 3, 192).to(dtype), signs_of(192)
    assert torch.equal(codebook_rotation.rotate(x, signs), codebook_rotation.rotate(x.float(), signs).to(dtype))
    assert torch.equal(codebook_rotation.unrotate(x, signs), codebook_rotation.unrotate(x.float(), signs).to(dtype))
    strided = torch.randn(7, 400).to(dtype)[:, 100:292]
    assert torch.equal(codebook_rotation.rotate(strided, signs), codebook_rotation.rotate(strided.contiguous(), signs))


def test_nothing_that_was_given_is_changed_and_chunks_change_nothing(monkeypatch):
    x, signs = torch.randn(11, 64), signs_of(64)
    before, whole, back = x.clone(), codebook_rotation.rotate(x, signs), codebook_rotation.unrotate(x, signs)
    monkeypatch.setitem(codebook_rotation.CHUNK_VALUES, "cpu", 3 * 64 + 5)
    assert torch.equal(codebook_rotation.rotate(x, signs), whole)
    assert torch.equal(codebook_rotation.unrotate(x, signs), back)
    assert torch.equal(x, before)


def test_signs_are_packed_from_the_lowest_bit_on():
    minus = torch.zeros(24, dtype=torch.bool)
    minus[[0, 9, 10, 23]] = True
    packed = codebook_rotation.packed_signs(minus)
    assert packed.tolist() == [1, 0b0000_0110, 0b1000_0000]
    assert torch.equal(codebook_rotation.factors_of(packed), 1 - 2 * minus.float())


@pytest.mark.parametrize("y", [torch.zeros(2, 8).half(), torch.zeros(8, 2).T])
def test_in_place_takes_contiguous_f32_only(y):
    with pytest.raises(ValueError, match="not contiguous float32"):
        codebook_rotation.transform_(y)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("columns", [576, 8192])
def test_a_gpu_gives_the_same_bits(columns):
    x, signs = torch.randn(3, columns), signs_of(columns)
    assert torch.equal(codebook_rotation.rotate(x.cuda(), signs.cuda()).cpu(), codebook_rotation.rotate(x, signs))
    assert torch.equal(codebook_rotation.unrotate(x.cuda(), signs.cuda()).cpu(), codebook_rotation.unrotate(x, signs))

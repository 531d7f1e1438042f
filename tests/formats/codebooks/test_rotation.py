"""The rotation of inputs against explicit Hadamard matrices, and its bits against butterflies done one by one."""

from __future__ import annotations

import pytest
import torch

from localq.formats.codebooks import rotation as hadamard
from tests.support.formats.vq2_checkpoints import rotation, sylvester


def signs_of(columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (columns // 8,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_by_hand():
    """Eight columns are one block: the first unit vector becomes a row of 1 / sqrt(8), signs of the input first."""
    x = torch.zeros(2, 8)
    x[0, 0], x[1, 3] = 4.0, 2.0
    y = hadamard.rotate(x, torch.tensor([0b0000_1000], dtype=torch.uint8))  # column 3 is negative
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
    assert hadamard.block_of(columns) == block


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
    bound = (hadamard.block_of(columns).bit_length() + 2) * 2**-24 * x.double().norm(dim=1)
    assert ((hadamard.rotate(x, signs).double() - x.double() @ matrix.T).norm(dim=1) <= bound).all()
    assert ((hadamard.unrotate(x, signs).double() - x.double() @ matrix).norm(dim=1) <= bound).all()
    back = hadamard.unrotate(hadamard.rotate(x, signs), signs)
    assert ((back - x).double().norm(dim=1) <= 2 * bound).all()


def test_the_bits_are_those_of_the_butterflies_in_their_order():
    columns, block = 96, 32
    x, signs = torch.randn(3, columns, generator=torch.Generator().manual_seed(2)), signs_of(columns, 3)
    y = x * hadamard.factors_of(signs)
    for row in y:
        for stage in range(block.bit_length() - 1):
            for i in range(columns):
                if not i >> stage & 1:
                    a, b = row[i].clone(), row[i + (1 << stage)].clone()
                    row[i], row[i + (1 << stage)] = a + b, a - b
    y *= torch.tensor(block**-0.5, dtype=torch.float32)
    assert torch.equal(hadamard.rotate(x, signs), y)
    assert torch.equal(hadamard.unrotate_(x.clone(), signs), hadamard.unrotate(x, signs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_inputs_are_rotated_in_f32_and_rounded_once(dtype):
    x, signs = torch.randn(2, 3, 192).to(dtype), signs_of(192)
    assert torch.equal(hadamard.rotate(x, signs), hadamard.rotate(x.float(), signs).to(dtype))
    assert torch.equal(hadamard.unrotate(x, signs), hadamard.unrotate(x.float(), signs).to(dtype))
    strided = torch.randn(7, 400).to(dtype)[:, 100:292]
    assert torch.equal(hadamard.rotate(strided, signs), hadamard.rotate(strided.contiguous(), signs))


def test_nothing_that_was_given_is_changed_and_chunks_change_nothing(monkeypatch):
    x, signs = torch.randn(11, 64), signs_of(64)
    before, whole, back = x.clone(), hadamard.rotate(x, signs), hadamard.unrotate(x, signs)
    monkeypatch.setitem(hadamard.CHUNK_VALUES, "cpu", 3 * 64 + 5)
    assert torch.equal(hadamard.rotate(x, signs), whole)
    assert torch.equal(hadamard.unrotate(x, signs), back)
    assert torch.equal(x, before)


def test_signs_are_packed_from_the_lowest_bit_on():
    minus = torch.zeros(24, dtype=torch.bool)
    minus[[0, 9, 10, 23]] = True
    packed = hadamard.packed_signs(minus)
    assert packed.tolist() == [1, 0b0000_0110, 0b1000_0000]
    assert torch.equal(hadamard.factors_of(packed), 1 - 2 * minus.float())


@pytest.mark.parametrize("y", [torch.zeros(2, 8).half(), torch.zeros(8, 2).T])
def test_in_place_takes_contiguous_f32_only(y):
    with pytest.raises(ValueError, match="not contiguous float32"):
        hadamard.transform_(y)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("columns", [576, 8192])
def test_a_gpu_gives_the_same_bits(columns):
    x, signs = torch.randn(3, columns), signs_of(columns)
    assert torch.equal(hadamard.rotate(x.cuda(), signs.cuda()).cpu(), hadamard.rotate(x, signs))
    assert torch.equal(hadamard.unrotate(x.cuda(), signs.cuda()).cpu(), hadamard.unrotate(x, signs))

"""Experts in additive codebooks for the tests of their kernel: stacks, and their weights beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from localq.formats.codebooks import experts_kernel as codebook_experts
from localq.formats.codebooks.experts_kernel import VqStack, vq_stack
from localq.formats.codebooks.lookup_kernel import VqBook, VqOperand
from localq.kernels.gemv import Norm
from tests.support.kernels import expert_operands, nf4_operands
from tests.support.kernels.vq_operands import SCHEMES, Books, VqSample, make, weights_of


@dataclass(frozen=True)
class VqExperts:
    """A stack, its weights f32 [E, parts * out, in], and its matrices [E][parts]."""

    stack: VqStack
    dense: Tensor
    operands: list[list[VqSample]]


def stack_of(
    shape: tuple[int, int, int],
    books: Books,
    parts: int,
    seed: int,
    *,
    shared: bool = False,
    device: str = "cpu",
    scales: torch.dtype = torch.float16,
) -> VqExperts:
    """shape [E, out of one matrix, in]. `shared`: up has the codebooks of gate; AQLM's two books lie in one tensor."""
    experts, out, columns = shape
    together = len(books) > 1 and len(set(books)) == 1
    operands = [
        [make((out, columns), books, seed + 31 * expert + part, device, scales, together) for part in range(parts)]
        for expert in range(experts)
    ]
    if shared:
        operands = [[first, *(with_books_of(first, each) for each in others)] for first, *others in operands]
    matrices = [[each.matrix for each in pair] for pair in operands]
    dense = torch.stack([torch.cat([each.dense for each in pair]) for pair in operands])
    return VqExperts(vq_stack(matrices), dense, operands)


def with_books_of(first: VqSample, other: VqSample) -> VqSample:
    """The codes and scales of `other` in the codebooks of `first`."""
    books = tuple(
        VqBook(mine.codes, theirs.fragments, mine.stride, mine.before, mine.tile_positions)
        for mine, theirs in zip(other.matrix.books, first.matrix.books, strict=True)
    )
    of = other.matrix
    matrix = VqOperand(books, of.scales, first.matrix.factor, of.out_features, of.in_features)
    return VqSample(matrix, weights_of(matrix), other.codes, first.codebooks)


def dense_of(stack: VqStack) -> Tensor:
    """f32 [E, parts * out, in] of a stack as the kernel takes it."""
    return torch.stack([torch.cat([weights_of(each) for each in pair]) for pair in stack.matrices])


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """On a GPU, for `every_kernel.py`: parts of tiles and of tables; one slot and many; shapes of qwen3-30b-a3b."""
    shapes = ((5, 3, 20, 320), (3, 2, 9, 64), (2, 1, 8, 3648), (40, 16, 72, 192), (9, 8, 768, 2048))
    names = ("s4l16", "s8l8+s8l8", "s4l16+s16l32")
    for name, (count, active, width, columns), shared in product(names, shapes, (False, True)):
        books, (chosen, weights) = SCHEMES[name], expert_operands.chosen_of(count, active, 1, "cuda")
        norm = Norm(torch.ones(columns, dtype=torch.float16, device="cuda"), 1e-5)
        x = nf4_operands.inputs(active, columns, torch.float16, "cuda")
        out = torch.empty(active, width, dtype=torch.float16, device="cuda")
        opened = stack_of((count, width, columns), books, 2, 1, shared=shared, device="cuda").stack
        what = f"{name} {(count, active, width, columns)}, {'one codebook' if shared else 'own codebooks'}"
        run = partial(codebook_experts.vq_experts_gate_up, x[:1], opened, chosen, norm=norm, out=out)
        yield f"vq_experts_gate_up {what}", run
        if not shared:
            closed = stack_of((count, width, columns), books, 1, 1, device="cuda").stack
            given = {"residual": None, "out": torch.empty(1, width, dtype=torch.float16, device="cuda")}
            run = partial(codebook_experts.vq_experts_down, x, closed, chosen, weights, **given)
            yield f"vq_experts_down {what}", run
            signs = torch.zeros(columns // 8, dtype=torch.uint8, device="cuda")
            yield f"vq_experts_down {what}, rotated", partial(run, signs=signs)

"""Cases of 2-bit quantization, for self-test and bench: blocks of columns whose codes a search must recover, and the
adjoint of decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localq.engine.selftest.compare import Mismatch
from localq.formats.codebooks import adjoint_kernel
from localq.formats.codebooks import search_kernel as search
from localq.formats.codebooks.search_kernel import Codebook

SHAPES = ((4, 16, 16), (2, 8, 21), (8, 24, 40), (16, 32, 9))  # stride, length, beam: each a kernel of its own
FIRST = 0.01  # error of the first position, over the weights' size


@dataclass(frozen=True)
class Known:
    """Operands of `vq_search` (all but tails and beam), and what it must find: `codes`, f32 `errors`, `left` as tails.

    The weights are sums of codewords, but for a small error at the first position, and what that feeds back.
    """

    targets: Tensor
    feedback: Tensor
    white: Tensor
    book: Codebook
    codes: Tensor
    errors: Tensor
    left: Tensor

    def search(self, beam: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, errors, tails of a search."""
        tails = torch.zeros_like(self.left)
        codes, errors = search.vq_search(self.targets, self.feedback, self.white, [self.book], tails, beam)
        return codes[0], errors, tails

    def why_not(self, beam: int) -> str:
        """Return the fault in the result of a search; empty if there is none."""
        codes, errors, tails = self.search(beam)
        if not torch.equal(codes, self.codes):
            return f"{int((codes != self.codes).sum())} codes differ from the ones used to build the weights"
        for name, got, expected in (("errors", errors, self.errors), ("tails", tails, self.left)):
            off = float((got - expected).abs().max())
            if not off <= 1e-4:
                return f"{name} are off by {off:.3g}"
        return ""


def known(rows: int, columns: int, stride: int, length: int, device: torch.device, seed: int = 1) -> Known:
    """Random codewords and codes, triangles near the unit matrix, as much feedback as keeps sizes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    words, positions = normal(256, length), columns // stride
    codes = torch.randint(256, (rows, positions), generator=generator)
    decoded = torch.zeros(rows, columns + length)
    for position in range(positions):
        begin = position * stride
        decoded[:, begin : begin + length] += words[codes[:, position]]
    feedback = normal(columns, columns) * columns**-0.5
    white = torch.eye(stride) + torch.triu(0.2 * normal(positions, stride, stride), 1)
    first = FIRST * normal(rows, stride)
    errors = torch.zeros(rows, columns)
    errors[:, :stride] = first @ white[0]
    targets = decoded[:, :columns].clone()
    targets[:, :stride] += first
    targets[:, stride:] += errors[:, :stride] @ feedback[:stride, stride:]
    tensors = (targets, feedback, white, words, codes.to(torch.uint8), errors, decoded[:, columns:].contiguous())
    targets, feedback, white, words, codes, errors, left = (each.to(device) for each in tensors)
    return Known(targets, feedback, white, Codebook(stride, words), codes, errors, left)


def check_adjoint(device: torch.device) -> None:
    """Check `vq_adjoint` at strides and lengths of each kind, against fp64."""
    generator = torch.Generator().manual_seed(1)
    for stride, length in ((4, 16), (8, 8), (2, 32), (1, 1)):
        matrix = torch.randn(43, 24 * stride, generator=generator).to(device)
        codes = torch.randint(256, (43, 24), generator=generator, dtype=torch.uint8).to(device)
        if why := why_no_adjoint(matrix, codes, stride, length):
            raise Mismatch(why)


def why_no_adjoint(matrix: Tensor, codes: Tensor, stride: int, length: int) -> str:
    """Return the fault in the result of `vq_adjoint` for these operands on a GPU; empty if there is none."""
    got = adjoint_kernel.vq_adjoint(matrix, codes, stride, length)
    parts = matrix.view(*codes.shape, stride)
    for lag in range(-(-length // stride)):
        used, end = codes[:, : codes.shape[1] - lag].reshape(-1).int(), min(length, (lag + 1) * stride)
        some = parts[:, lag:].reshape(-1, stride)[:, : end - lag * stride].double()
        wanted = torch.zeros(len(got), some.shape[1], dtype=torch.float64, device=got.device)
        wanted.index_add_(0, used, some)
        sizes = torch.zeros_like(wanted).index_add_(0, used, some.abs())
        terms = torch.bincount(used, minlength=len(got))[:, None]
        # a sum of n terms is rounded n times, each time by no more than 2^-24 of their sizes
        excess = (got[:, lag * stride : end] - wanted).abs() - 2.0**-24 * terms * sizes
        if not bool((excess <= 0).all()):
            return f"the rounding error of a sum exceeds its bound by {float(excess.max()):.3g}"
    return ""

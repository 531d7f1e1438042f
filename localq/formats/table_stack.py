"""The experts of a layer as matrices that lie anywhere: a table on the device says where, for kernels that choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from localq.kernels.operand import Operand

OperandT = TypeVar("OperandT", bound=Operand)


@dataclass(frozen=True)
class TableStack(Generic[OperandT]):
    """Gate and up of each expert, or one matrix [out, in] of each.

    matrices  [E][2] or [E][1], all of one size and kind
    table     i64 [E, parts, ...] on their device: where each is
    """

    matrices: tuple[tuple[OperandT, ...], ...]
    table: Tensor

    @property
    def parts(self) -> int:
        """Matrices of an expert."""
        return len(self.matrices[0])

    @property
    def experts(self) -> int:
        """The number of experts."""
        return len(self.matrices)

    @property
    def out_features(self) -> int:
        """Rows of one, of gate and up together."""
        return self.parts * self.matrices[0][0].out_features

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.matrices[0][0].in_features

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, each with what it reads beside its codes."""
        return sum(matrix.nbytes for each in self.matrices for matrix in each)

    def active_bytes(self, active: int) -> int:
        """Bytes that a product with so many experts reads."""
        return self.nbytes // self.experts * active

"""Rows and columns of matrices that are packed row by row: what their tensors say of them."""

from __future__ import annotations

from torch import Tensor


class PackedRows:
    """A matrix whose `codes` have a row for each of its own."""

    codes: Tensor

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.codes.shape[0]


class NibbleRows(PackedRows):
    """A matrix whose `codes` are u8 [out, in/2]."""

    @property
    def in_features(self) -> int:
        """Columns."""
        return 2 * self.codes.shape[1]

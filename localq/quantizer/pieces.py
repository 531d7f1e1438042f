"""Rows of a matrix that are worked on together, so that what is made of them on the way stays small.

The cuts depend on the shape alone: what fits into memory decides nothing about the bits of a result.
"""

from __future__ import annotations

VALUES = 2**26  # of a piece


def pieces(rows: int, columns: int, factor: int = 1) -> list[slice]:
    """Cuts of [rows, columns] into equal pieces of at most `factor` times `VALUES`, and of a row at least."""
    count = min(-(-rows * columns // (factor * VALUES)), rows)
    size = -(-rows // max(count, 1))
    return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]

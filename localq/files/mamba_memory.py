"""Memory of a pass of many tokens through a Mamba-2 layer (`models.mamba2`). Torch-free.

The pass goes in chunks, one after the other; the planner and the model share their length.
"""

from __future__ import annotations

CHUNK = 128  # tokens


def chunk_bytes(heads: int, groups: int, state: int, head_dim: int) -> int:
    """Most bytes of the temporaries of a chunk, f32.

    x, B and C while they are convolved; then beside them dt x, twice, what is read of the matrices, and its gate; of
    every head the decay between tokens, while it is summed and multiplied; and the matrices once more.
    """
    width, channels = heads * head_dim, heads * head_dim + 2 * groups * state
    rows = CHUNK * max(2 * channels, channels + 4 * width)
    return 4 * (rows + 2 * heads * CHUNK * CHUNK + heads * state * head_dim)

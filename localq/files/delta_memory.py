"""Memory of a pass of many tokens through a gated delta net (`models.gated_delta_net`). Torch-free.

In torch the rule is computed in f32, some key heads with their value heads at a time, so that its temporaries do not
grow with the heads of a layer. The kernels (`kernels.delta_net.delta_prefill`) take all heads and some chunks at a
time. The planner, the model and the kernels share the numbers here.
"""

from __future__ import annotations

CHUNK = 64  # tokens whose recurrence is solved at once
GROUP_BYTES = 64 * 2**20  # limit of the temporaries of a group of heads
# Limit of the kernels' workspace. With it, and the operands that they need at once, a pass of a prompt takes no more
# than the same in torch, in every model of the catalogue.
WORKSPACE_BYTES = 48 * 2**20
# Of the kernels' workspace (csrc/delta/tiles.cuh), per chunk: q, k or v of a head in 16 bit; and of a value head the
# writes in f32, the reads and 10 blocks of scores in two halves of 16 bit each, and factors of the tokens.
KERNEL_DIMS = (128, 128)  # keys and values of the heads that they take
TILE_BYTES = 2 * CHUNK * 128
VALUE_HEAD_BYTES = 4 * CHUNK * 128 + 4 * CHUNK * 128 + 2 * 10 * 512 + 4 * (2 * CHUNK + 4)


def head_bytes(tokens: int, shared: int, key_dim: int, value_dim: int) -> int:
    """Most bytes of the temporaries of a key head and its `shared` value heads in a pass of `tokens`.

    The larger of: q, k and v while they are convolved; the system of each chunk, its right sides and their solution.
    """
    padded = -(-tokens // CHUNK) * CHUNK
    operands = 2 * key_dim + shared * value_dim
    chunks = 3 * shared * CHUNK + CHUNK
    sides = 2 * shared * (key_dim + value_dim) + shared * value_dim
    return 4 * padded * (2 * operands + chunks + sides)


def group_heads(tokens: int, key_heads: int, shared: int, key_dim: int, value_dim: int) -> int:
    """Return how many key heads go through the rule together."""
    return min(key_heads, max(1, GROUP_BYTES // head_bytes(tokens, shared, key_dim, value_dim)))


def rule_bytes(tokens: int, key_heads: int, shared: int, key_dim: int, value_dim: int) -> int:
    """Most bytes of the temporaries of the rule in a pass of `tokens`."""
    shape = (shared, key_dim, value_dim)
    return group_heads(tokens, key_heads, *shape) * head_bytes(tokens, *shape)


def chunk_bytes(key_heads: int, shared: int) -> int:
    """Bytes of the kernels' workspace for a chunk, with heads of 128 x 128."""
    heads = key_heads * shared
    return (2 * key_heads + heads) * TILE_BYTES + heads * VALUE_HEAD_BYTES


def group_chunks(tokens: int, key_heads: int, shared: int) -> int:
    """Return how many chunks go through the kernels together: groups of equal size."""
    chunks = -(-tokens // CHUNK)
    groups = -(-chunks // max(1, WORKSPACE_BYTES // chunk_bytes(key_heads, shared)))
    return -(-chunks // groups)


def kernel_bytes(tokens: int, key_heads: int, shared: int) -> int:
    """Bytes of the kernels' workspace in a pass of `tokens`."""
    return group_chunks(tokens, key_heads, shared) * chunk_bytes(key_heads, shared)

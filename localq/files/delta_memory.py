"""Memory of a pass of many tokens through a gated delta net (`models.gated_delta_net`). Torch-free.

The rule is computed in f32, some key heads with their value heads at a time, so that its temporaries do not grow with
the heads of a layer. The planner and the model share the numbers here.
"""

from __future__ import annotations

CHUNK = 64  # tokens whose recurrence is solved at once
GROUP_BYTES = 64 * 2**20  # limit of the temporaries of a group of heads


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

"""Memory of the fused decode steps of Gemma 4, where it is not that of other families. Torch-free.

Sizes are those that `engine.step.fused_attention` and `engine.step.fused_gemma4` allocate.
"""

from __future__ import annotations

from localq.files.architecture import Architecture


def row_elements(arch: Architecture, rows: int, rotates: bool) -> int:
    """Elements of a row of the buffers, without logits and experts.

    The stream, what comes out of a layer, what heads gather and MLPs hold; q, k and v of layers with a window and
    without; what layers add, twice, and that of a layer; what experts give. Of several rows: what is normed; with
    matrices in codebooks also what is rotated; and what a product leaves between other columns.
    """
    shapes, mlps = arch.attention_shapes, {arch.intermediate * (2 if wide else 1) for wide in (False, arch.wide_layers)}
    queries = {each.query_width for each in shapes}
    row = 2 * arch.hidden + max(queries) + max(mlps)
    row += sum({each.window: each.query_width + 2 * each.kv_width for each in shapes}.values())
    row += (2 * arch.layers + 1) * arch.input_width + (arch.hidden if arch.experts else 0)
    if rows == 1:
        return row
    rotated = {arch.hidden, arch.input_width, *queries, *mlps} if rotates else set()
    beside = {each.query_width + each.kv_width * each.keys for each in shapes if not each.values}
    return row + arch.hidden + sum(rotated) + sum(beside)


def layer_launches(arch: Architecture) -> int:
    """Return the most launches of a layer in addition to those of a family with four norms: the norm of values, the
    number that multiplies the output, and the layer's inputs."""
    beside = 6 if arch.experts else 0  # two of the router, two of the experts, and two norms
    return 2 + (5 if arch.input_width else 0) + beside


def row_launches(arch: Architecture) -> int:
    """Return the most launches of a layer for each further row: the norm of values, and two of the router."""
    return 3 if arch.experts else 1

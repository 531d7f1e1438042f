"""Memory of layers with a state beside the cache: activations of a prefill pass, buffers of a decode step. Torch-free.

Sizes are those that `models` and `engine.step` allocate for gated delta nets, Mamba-2 and short convolutions.
"""

from __future__ import annotations

from localq.files import delta_memory, mamba_memory
from localq.files.architecture import Architecture


def pass_bytes(arch: Architecture, itemsize: int, tokens: int) -> int:
    """Peak bytes of the activations of a pass of `tokens` in a layer with a state; 0 for a model without one."""
    if not arch.recurrent_layers:
        return 0
    if arch.traits.mamba:
        return _mamba_pass(arch, itemsize, tokens)
    return (_convolution_pass if arch.conv_kernel else _delta_pass)(arch, itemsize, tokens)


def step_buffers(arch: Architecture, itemsize: int, rows: int) -> int:
    """Bytes of the decode steps of up to `rows` rows, for all layers with a state; no kernels run a Mamba-2."""
    if not arch.recurrent_layers or arch.traits.mamba:
        return 0
    return (_convolution_buffers if arch.conv_kernel else _delta_buffers)(arch, itemsize, rows)


def _convolution_pass(arch: Architecture, itemsize: int, tokens: int) -> int:
    """Peak bytes of the activations of a prefill chunk in a short convolution: the residual and its norm; three parts,
    what the convolution reads, twice; its sum in f32, and what is added to it."""
    return tokens * arch.hidden * (7 * itemsize + 2 * 4)


def _delta_pass(arch: Architecture, itemsize: int, tokens: int) -> int:
    """Peak bytes of the activations of a prefill chunk in a gated delta net."""
    shared, heads = arch.delta_value_heads // arch.delta_key_heads, arch.delta_key_heads
    rule = delta_memory.rule_bytes(tokens, heads, shared, arch.delta_key_dim, arch.delta_value_dim)
    rates = 16 * tokens * arch.delta_value_heads  # f32, with temporaries
    gathered, around = arch.delta_columns, 2 * arch.hidden  # the residual and its norm
    # q, k and v, and what they are convolved from; then with what is gathered; then the gate in f32
    mixing = itemsize * tokens * (around + arch.delta_channels + gathered) + rule
    if itemsize == 2 and (arch.delta_key_dim, arch.delta_value_dim) == delta_memory.KERNEL_DIMS:
        # by kernels: the same, the gate, what is gathered, and their workspace
        workspace = delta_memory.kernel_bytes(tokens, heads, shared)
        mixing = max(mixing, 2 * tokens * (around + arch.delta_channels + 2 * gathered) + workspace)
    gating = tokens * (itemsize * (around + 3 * gathered) + 2 * 4 * gathered)
    return max(mixing, gating, itemsize * tokens * (around + 2 * arch.delta_channels)) + rates


def _mamba_pass(arch: Architecture, itemsize: int, tokens: int) -> int:
    """Peak bytes of the activations of a prefill chunk in a Mamba-2."""
    heads, width, channels = arch.delta_value_heads, arch.delta_columns, arch.delta_channels
    read = 2 * arch.hidden + width + channels + heads  # the residual, its norm, and z to dt
    written = width + arch.hidden  # what is gated, and what is added
    rule = mamba_memory.chunk_bytes(heads, arch.delta_key_heads, arch.delta_key_dim, arch.delta_value_dim)
    return tokens * (itemsize * (read + written) + 16 * heads) + rule


def _convolution_buffers(arch: Architecture, itemsize: int, rows: int) -> int:
    """Bytes of the decode steps of short convolutions: parts of x and results, sums and inputs in f32, places, and what
    multiplies the inputs in every layer, in f32."""
    past = arch.conv_kernel - 1
    taps = 4 * arch.conv_kernel * arch.hidden * arch.recurrent_layers
    return rows * arch.hidden * (5 * itemsize + 4) + 4 * (past + rows) * arch.hidden + 8 * (1 + 2 * past) + taps


def _delta_buffers(arch: Architecture, itemsize: int, rows: int) -> int:
    """Bytes of the decode steps of gated delta nets: operands, workspace, and rates and offsets of every layer in f32.

    Of several rows, the workspace has the rates of rows and two positions.
    """
    operands = arch.delta_channels + 2 * arch.delta_columns
    workspace = rows * arch.delta_columns + arch.delta_key_heads
    workspace += 2 * arch.delta_value_heads * (arch.recurrent_layers + (rows if rows > 1 else 0))
    return rows * itemsize * operands + 4 * workspace + (16 if rows > 1 else 0)

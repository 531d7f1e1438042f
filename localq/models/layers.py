"""The parts that all families share: norms, the gated MLP, and what a layer expects of the cache.

Shape letters: T tokens of this pass, hidden = width of the residual stream, live = cache slots that attention sees.
There is no batch dimension: x is [T, hidden].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from localq.files.layer_caches import RecurrentState

# In place: of a prefill pass, the rows of the MLP are the largest tensors.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_,
    "gelu": torch.ops.aten.gelu_,
    "gelu_pytorch_tanh": partial(torch.ops.aten.gelu_, approximate="tanh"),
}


class LayerState(NamedTuple):
    """The state of a recurrent layer, which a pass changes in place.

    matrix    f32 [heads, key_dim, value_dim]; of a short convolution without any element
    columns   [channels, columns] in the dtype of the model: the last inputs of the causal convolution, oldest first
    """

    matrix: Tensor
    columns: Tensor


class DraftedInputs(NamedTuple):
    """The inputs of the drafted tokens of a step in a recurrent layer, a row each, until some are accepted.

    inputs   [rows, channels] in the dtype of the model: of the causal convolution
    decay    f32 [rows, heads]: the logarithm of what stays of the matrix
    beta     f32 [rows, heads]
    """

    inputs: Tensor
    decay: Tensor
    beta: Tensor


def empty_state(kept: RecurrentState, dtype: torch.dtype, device: torch.device | str) -> LayerState:
    """Return the state of a recurrent layer at the start of a text: zeros."""
    matrix = torch.zeros(kept.heads, kept.key_dim, kept.value_dim, dtype=torch.float32, device=device)
    return LayerState(matrix, torch.zeros(kept.channels, kept.columns, dtype=dtype, device=device))


class RecurrentMixer(nn.Module):
    """A layer that mixes tokens by a state, which the cache keeps: (x [T, hidden], step) -> [T, hidden].

    `is_gated` and `output` as of `Attention`.
    """

    is_gated = True
    output = "out_proj"
    out_proj: Linear

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears that read x."""
        raise NotImplementedError

    def replay(self, drafted: DraftedInputs, count: int, state: LayerState) -> None:
        """Move `state` on by the first `count` drafted tokens."""
        raise NotImplementedError


class Cache(Protocol):
    """Cache of the layers for the positions seen so far (`files.layer_caches`); `engine.cache.KVCache` is one."""

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor, live: int) -> tuple[Tensor, Tensor]:
        """Stores k, v [T, kv_heads, head_dim] of the positions `positions` int64 [T].

        Returns both for the slots that `view` tells, each [kv_heads, slots, head_dim]. `live` is a host integer that no
        position reaches.
        """
        ...

    def update_latents(self, layer: int, latents: Tensor, positions: Tensor, live: int) -> Tensor:
        """Store latents [T, columns] of the positions `positions` int64 [T]; returns all [1, live, columns]."""
        ...

    def read(self, layer: int, live: int) -> tuple[Tensor, Tensor]:
        """Return what `update` returned for the layer whose keys and values this one shares, in the same pass."""
        ...

    def view(self, window: int, live: int) -> tuple[int, int]:
        """Return what the slots of layers with `window` are, in a pass that looks at positions below `live`.

        The position of the first slot (0, unless the window has slid), and how many slots the pass looks at.
        """
        ...

    def state(self, layer: int) -> LayerState:
        """Return the state of a recurrent layer after the positions seen so far; zeros at the start of a text."""
        ...

    def drafted(self, layer: int) -> DraftedInputs | None:
        """Return a recurrent layer's buffers for the inputs of drafted tokens; None in a pass that has none.

        In a pass with drafts, all tokens but the first are drafted, and the state moves on by the first alone.
        """
        ...


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> [T, out]: x W^T + bias with W [out, in].

    One row in bfloat16 on the CPU is a matrix-vector product, which reads W faster than `F.linear` does and sums in f32
    as it does.
    """
    if x.shape[0] != 1 or x.dtype != torch.bfloat16 or x.is_cuda:
        return F.linear(x, weight, bias)
    return (torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])).unsqueeze(0)


class Linear(nn.Linear):
    """y = x W^T + b by `product`."""

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        return product(x, self.weight, self.bias)


class PlainLinear(Linear):
    """A Linear that is never quantized, and dequantized where a checkpoint did: routers, gates, rates, factors."""


class RMSNorm(nn.Module):
    """weight * x / rms(x): the quotient in f32, rounded to the type of x, then scaled (llama's order of rounding).

    neutral   the weight of a norm that only divides
    """

    neutral = 1.0

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        if x.dtype == torch.float32:  # nothing to round, so one call does both
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, None, self.eps) * self.weight

    def finish(self) -> None:
        """Finish after the weights are set; this norm derives nothing from them."""

    def derived_bytes(self) -> int:
        """Return the bytes of what `finish` keeps."""
        return 0

    @property
    def factor(self) -> Tensor:
        """Factor of x / rms(x), [width]: in the dtype of x after rounding to it, or in f32 with rounding last."""
        return self.weight


class WideRMSNorm(RMSNorm):
    """weight * x / rms(x), all in f32 and rounded last (gpt-oss)."""

    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        return F.rms_norm(x.float(), self.scale.shape, self.scale, self.eps).to(x.dtype)

    def finish(self) -> None:
        """Keep the weight in f32, to convert it only once."""
        self.scale = self.weight.detach().float().clone()

    def derived_bytes(self) -> int:
        """Bytes of `scale`."""
        return 4 * self.weight.numel()

    @property
    def factor(self) -> Tensor:
        """`scale`, f32 [width]."""
        return self.scale


class ScaledRMSNorm(WideRMSNorm):
    """constant * weight * x / rms(x), all in f32 and rounded last."""

    def __init__(self, width: int, eps: float, constant: float) -> None:
        super().__init__(width, eps)
        self.constant = constant

    def finish(self) -> None:
        """Keep the product in f32, to compute it only once."""
        self.scale = self.constant * self.weight.detach().float()


class OffsetRMSNorm(WideRMSNorm):
    """(1 + weight) * x / rms(x), all in f32 and rounded last (gemma's order of rounding)."""

    neutral = 0.0

    def finish(self) -> None:
        """Keep 1 + weight in f32, to compute it only once."""
        self.scale = 1.0 + self.weight.detach().float()


class ConstantRMSNorm(RMSNorm):
    """constant * x / rms(x), all in f32 and rounded last: a norm whose weights are one number, not in the files."""

    def __init__(self, width: int, eps: float, constant: float = 1.0) -> None:
        super().__init__(width, eps)
        del self.weight
        self.width, self.constant = width, constant
        self.scale = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        normed = F.rms_norm(x.float(), (self.width,), None, self.eps)
        return (normed if self.constant == 1.0 else normed * self.constant).to(x.dtype)

    def place(self, device: torch.device | str) -> None:
        """Make `factor`, which only kernels read, on `device`."""
        self.scale = torch.full((self.width,), self.constant, dtype=torch.float32, device=device)

    def derived_bytes(self) -> int:
        """Bytes of `factor`."""
        return 4 * self.width

    @property
    def factor(self) -> Tensor:
        """`constant`, f32 [width]."""
        return self.scale


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2; x is written over."""
    return x.relu_().square_()


class PlainMLP(nn.Module):
    """down(relu(up(x))^2)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.up_proj = Linear(hidden, intermediate, bias=False)
        self.down_proj = Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        projected: Tensor = self.down_proj(squared_relu(self.up_proj(x)))
        return projected


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.add_projections(hidden, intermediate, bias)

    def add_projections(self, hidden: int, intermediate: int, bias: bool) -> None:
        """Create the linears of this layer."""
        self.gate_proj = Linear(hidden, intermediate, bias=bias)
        self.up_proj = Linear(hidden, intermediate, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def inputs(self) -> tuple[nn.Module, ...]:
        """Return the linears that read x: gate and up, or one whose first half of rows is gate."""
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gated = self.activation(self.gate_proj(x))
        gated *= self.up_proj(x)
        projected: Tensor = self.down_proj(gated)
        return projected

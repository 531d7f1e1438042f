"""Experts of a prompt on a GPU: all of a layer in a few launches, without a wait of the host.

    sort       entries (a token and one of its experts) by expert, on the device
    gate_up    of all entries, with the gate
    down       of all entries
    sum        of the entries of each token, weighted

Experts in MXFP4, NF4 and 16 bit are multiplied as they are stored. Experts in other formats
are dequantized into the scratch, as many at a time as it holds, and multiplied there as 16-bit weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localq.formats.codebooks import rotation_kernel
from localq.formats.expert_linears import LinearStack, stack_of
from localq.formats.experts import grouped
from localq.formats.experts.grouped import Entries, ExpertsGemm, Gate
from localq.formats.experts.kernel import GATES
from localq.formats.experts.stacks import Stack
from localq.formats.linear import SlabLinear, SlabStack
from localq.formats.table_stack import TableStack
from localq.models.experts import Experts


def install(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the kernels compute the experts of `model` in prefill wherever they read them beside x of `dtype`."""
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        experts.grouped = of(experts, dtype)


def of(experts: Experts, dtype: torch.dtype) -> GroupedMixture | None:
    """The launches of these experts; None where no kernel reads them, or knows their activation."""
    if experts.gate not in GATES:
        return None
    gate_up, down = (_products(part, dtype) for part in (experts.gate_up_proj, experts.down_proj))
    if gate_up is None or down is None or (isinstance(gate_up, DequantizedExperts) and gate_up.signs is not None):
        return None
    rows, columns = gate_up.shape
    if rows % 16 or columns % 8 or down.shape[0] % 8 or down.shape[1] % 8:
        return None
    return GroupedMixture(experts, gate_up, down)


class GroupedMixture:
    """The experts of one layer."""

    def __init__(
        self, experts: Experts, gate_up: StoredExperts | DequantizedExperts, down: StoredExperts | DequantizedExperts
    ) -> None:
        self.count, self.width, self.gate_up, self.down = experts.stacked, experts.width, gate_up, down
        biases = (experts.gate_up_proj_bias, experts.down_proj_bias)
        self.biases = tuple(None if each is None else each.detach() for each in biases)
        self.gate = Gate(experts.gate, experts.interleaved, experts.alpha, experts.limit)

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x T [tokens, hidden], weights f32 and chosen int64 [tokens, k] -> the weighted sums T [tokens, hidden]."""
        entries = grouped.experts_sort(chosen.contiguous(), self.count)
        gated = x.new_empty(entries.count, self.width)
        self.gate_up.multiply(x.contiguous(), self.biases[0], entries, self.gate, gated)
        each = x.new_empty(entries.count, x.shape[1])
        self.down.multiply(gated, self.biases[1], entries, None, each)
        return grouped.experts_sum(each, entries, weights.contiguous(), torch.empty_like(x))


class StoredExperts:
    """Products with a stack that the kernel reads as it is."""

    def __init__(self, stack: Stack, dtype: torch.dtype) -> None:
        """Raises ValueError where the kernel does not read it."""
        self._product = ExpertsGemm(stack, dtype)
        self.shape = (self._product.rows, self._product.columns)

    def multiply(self, x: Tensor, bias: Tensor | None, entries: Entries, gate: Gate | None, out: Tensor) -> None:
        """See `ExpertsGemm`."""
        self._product(x, bias, entries, gate=gate, out=out)


class DequantizedExperts:
    """Products with experts that are dequantized first, as many at a time as the scratch holds.

    signs  of the rotation of x, which all experts share; None without
    """

    def __init__(self, part: SlabStack | LinearStack, signs: Tensor | None) -> None:
        self.part, self.signs = part, signs
        self.shape = (part.out_features, part.in_features)
        self._of_scratch = part.tall if isinstance(part, SlabStack) else part.linears[0]

    def multiply(self, x: Tensor, bias: Tensor | None, entries: Entries, gate: Gate | None, out: Tensor) -> None:
        """See `ExpertsGemm`; x may be written over."""
        if self.signs is not None:
            rotation_kernel.hadamard(x, self.signs, out=x)
        room = self._room(x.dtype)
        for first in range(0, self.part.count, len(room)):
            dense = room[: self.part.count - first]
            self.part.dequantize(first, dense)
            shift = None if bias is None else bias[first : first + len(dense)]
            grouped.experts_gemm(x, dense, shift, entries, gate=gate, out=out, first=first)

    def _room(self, dtype: torch.dtype) -> Tensor:
        """T [experts, out, in] in the scratch, at least one."""
        scratch = self._of_scratch.scratch
        of_one = self.shape[0] * self.shape[1] * dtype.itemsize
        if scratch is None or scratch.nbytes < of_one:
            return torch.empty(1, *self.shape, dtype=dtype, device=next(self._of_scratch.buffers()).device)
        fit = min(scratch.nbytes // of_one, self.part.count)
        return scratch[: fit * of_one].view(dtype).view(fit, *self.shape)


def _products(part: object, dtype: torch.dtype) -> StoredExperts | DequantizedExperts | None:
    stack = stack_of(part)
    if stack is not None and not isinstance(stack, TableStack):
        try:
            return StoredExperts(stack, dtype)
        except ValueError:
            return None
    if isinstance(part, SlabStack):
        return DequantizedExperts(part, None)
    if not isinstance(part, LinearStack) or not all(isinstance(each, SlabLinear) for each in part.linears):
        return None
    signs, are_shared = part.signs()
    return DequantizedExperts(part, signs) if are_shared else None

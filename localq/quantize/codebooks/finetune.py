"""Fine-tuning of a quantized layer: its codebooks, scales and norms are trained to match the full layer.

The codes are fixed. Adam on whole sequences: x is the layer's input in the quantized model, the target is the full
model's stream after the layer, so the layer also learns to compensate for earlier drift. AQLM does the same block by
block (Egiazarov et al. 2024, section 3.4), without drift in its target.

On a GPU matrices, their inputs and their gradients are bfloat16, as in mixed-precision training (Micikevicius et al.
2018); trained values, the stream, norms, attention and the loss stay in f32. Rounding changes a weight by at most
0.2 %, while 2 bits leave a squared error of 7.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from localq.formats.codebooks import rotation
from localq.formats.codebooks.search_kernel import Codebook
from localq.formats.codebooks.vq2 import Packed
from localq.models.attention import Pass
from localq.models.decoder import Block
from localq.models.layers import RMSNorm
from localq.quantize.codebooks.refine import adjoint, decode
from localq.quantize.settings import OnStage, Tuning, ignore_stage

T = TypeVar("T")


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products while a layer is trained on `device`."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class _Mixed(TorchFunctionMode):
    """Multiply f32 inputs with 16-bit matrices: the input is rounded, the result is f32 again."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        called = _linear if function is F.linear else function
        return called(*arguments, **(options or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` whose result has the dtype of the input, whatever the dtype of the weight."""
    if weight.dtype == input.dtype:
        return F.linear(input, weight, bias)
    out = F.linear(input.to(weight.dtype), weight).to(input.dtype)
    return out if bias is None else out + bias


class _CodebookDecode(torch.autograd.Function):
    """Decode codes u8 by a codebook f32 [256, length] to f32 [rows, columns]; differentiable in the codebook."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, codes: Tensor, stride: int, columns: int) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.book = Codebook(stride, words.detach())
        return decode([codes], [ctx.book], columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (codes,) = ctx.saved_tensors
        return adjoint(gradients[0].contiguous(), [codes], [ctx.book])[0], None, None, None


class TrainableLayer(nn.Module):
    """A layer with trainable codebooks, scales and norms; its matrices are functions of them."""

    def __init__(self, packed: dict[str, Packed], block: Block, device: torch.device, *, lent: bool = False) -> None:
        """Take a quantized layer; lent: codes are on the device only while they are decoded."""
        super().__init__()
        self._device, self._dtype = device, product_dtype(device)
        self._packed = packed if lent else {name: each.to(device) for name, each in packed.items()}
        places: dict[int, int] = {}
        self.books = nn.ParameterList()
        self._books: dict[str, list[int]] = {}
        for name, each in packed.items():
            for _, codebook in each.books:
                if codebook.data_ptr() not in places:
                    places[codebook.data_ptr()] = len(self.books)
                    self.books.append(nn.Parameter(codebook.to(device, torch.float32)))
            self._books[name] = [places[codebook.data_ptr()] for _, codebook in each.books]
        self.scales = nn.ParameterList(
            nn.Parameter(torch.ones(len(each.scales), 1, device=device)) for each in packed.values()
        )
        quantized = {f"{name}.weight" for name in packed}
        fixed = {f"{name}.weight" for name, module in block.named_modules() if _derives(module)}
        rest = [(name, value) for name, value in block.named_parameters() if name not in quantized | fixed]
        self.kept = {name: value.detach().to(device) for name, value in rest}
        self.norms = nn.ParameterList(nn.Parameter(torch.ones_like(value)) for value in self.kept.values())

    def parameters_of(self, rates: Tuning) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups."""
        groups = ((self.books, rates.codebooks), (self.scales, rates.scales), (self.norms, rates.norms))
        return [{"params": list(part), "lr": rate} for part, rate in groups]

    def weights(self) -> dict[str, Tensor]:
        """Return every parameter of the block by name, differentiable: matrices in `product_dtype`, the others f32."""
        found = {name: value * factor for (name, value), factor in zip(self.kept.items(), self.norms, strict=True)}
        for name, factor in zip(self._packed, self.scales, strict=True):
            # Intermediates between codes and weights are as large as the layer: the backward pass recomputes them.
            made = checkpoint(self._weight, name, factor, use_reentrant=False, preserve_rng_state=False)
            found[f"{name}.weight"] = made
        return found

    def _weight(self, name: str, factor: Tensor) -> Tensor:
        """Decode a matrix [out, in]."""
        packed, total = self._packed[name].to(self._device), None
        for (codes, _), stride, place in zip(packed.books, packed.strides, self._books[name], strict=True):
            part = _CodebookDecode.apply(self.books[place], codes, stride, packed.shape[1])  # type: ignore[no-untyped-call]
            total = part if total is None else total + part
        assert total is not None  # there is at least one book
        weight: Tensor = total * (packed.scales.float()[:, None] * factor)
        if packed.signs is not None:
            weight = _Unrotate.apply(weight, packed.signs)  # type: ignore[no-untyped-call]
        return weight.to(self._dtype)

    def result(self) -> tuple[dict[str, Packed], dict[str, Tensor]]:
        """Return the trained matrices, on the CPU and rounded as stored, and the other parameters."""
        words = [book.detach().half().cpu() for book in self.books]
        made = {}
        for (name, packed), factor in zip(self._packed.items(), self.scales, strict=True):
            pairs = tuple(
                (codes.cpu(), words[place]) for (codes, _), place in zip(packed.books, self._books[name], strict=True)
            )
            scales = (packed.scales.float().to(self._device) * factor.detach().flatten()).half().cpu()
            made[name] = Packed(pairs, scales, None if packed.signs is None else packed.signs.cpu(), packed.shape)
        others = {
            name: (value * factor).detach().cpu()
            for (name, value), factor in zip(self.kept.items(), self.norms, strict=True)
        }
        return made, others


def _derives(module: nn.Module) -> bool:
    """True for a module that computes with values derived from its weights at load time (gemma's norms)."""
    return isinstance(module, RMSNorm) and module.derived_bytes() > 0


class _Unrotate(torch.autograd.Function):
    """Undo the rotation of a decoded matrix's rows; the backward pass applies it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, signs: Tensor) -> Tensor:
        ctx.save_for_backward(signs)
        return rotation.unrotate(weight, signs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (signs,) = ctx.saved_tensors
        return rotation.rotate(gradients[0].contiguous(), signs), None


@dataclass(frozen=True)
class TuningText:
    """The text that a layer is fine-tuned on.

    pair   number below `count` -> x and target of a sequence, f32 [T, hidden] on the device
    step   pass state, shared by all sequences
    """

    count: int
    pair: Callable[[int], tuple[Tensor, Tensor]]
    step: Pass


def tune(
    block: Block,
    packed: dict[str, Packed],
    text: TuningText,
    tuning: Tuning,
    seed: int,
    device: torch.device,
    on_stage: OnStage = ignore_stage,
) -> tuple[dict[str, Packed], dict[str, Tensor], float]:
    """Train a layer; block: f32, of plain linears, with its initial norms and biases, on any device.

    Returns the matrices, the other parameters by name, and the loss, as a fraction of the targets' energy, over the
    last tenth of the steps. `on_stage` is called before ("fine-tuning") and after ("forward") the steps.
    """
    generator = torch.Generator().manual_seed(seed)
    losses = []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):  # the other backends sum in varying order
        trained = TrainableLayer(packed, block, device)
        optimizer = torch.optim.Adam(trained.parameters_of(tuning), betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda at: (1 + math.cos(math.pi * at / tuning.steps)) / 2
        )
        on_stage("fine-tuning")
        for _ in range(tuning.steps):
            chosen = torch.randperm(text.count, generator=generator)[: tuning.sequences].tolist()
            losses.append(_step(block, trained, [text.pair(index) for index in chosen], text.step))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        on_stage("forward")
        tenth = max(1, len(losses) // 10)
        made, others = trained.result()
    return made, others, sum(losses[-tenth:]) / tenth


def _step(block: Block, trained: TrainableLayer, batch: list[tuple[Tensor, Tensor]], step: Pass) -> float:
    """Compute gradients of the mean loss of a batch; the matrices are decoded once for all its sequences."""

    def losses(weights: dict[str, Tensor]) -> float:
        total = 0.0
        for x, aim in batch:
            out = run_block(block, weights, x.clone(), step)
            loss = (out - aim).square().sum() / (aim.square().sum() * len(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    return backpropagate(trained, losses)


def run_block(block: Block, weights: dict[str, Tensor], x: Tensor, step: Pass) -> Tensor:
    """Run x f32 [T, hidden] through a block with these weights; x may be overwritten."""
    with _Mixed():
        out: Tensor = torch.func.functional_call(block, weights, (x, step))
    return out


def backpropagate(trained: TrainableLayer, work: Callable[[dict[str, Tensor]], T]) -> T:
    """Call `work` with the weights, and propagate the gradients it leaves on them to the trained values."""
    weights = trained.weights()
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    found = work(leaves)
    # Experts without a token in the batch have no gradient.
    seen = [(weights[name], leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None]
    torch.autograd.backward([weight for weight, _ in seen], [gradient for _, gradient in seen])
    return found

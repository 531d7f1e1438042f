"""Joint training of all layers on the full model's predictions: the last stage of `--best`.

Layer-by-layer tuning (`finetune.py`) matches the full model's stream, every direction alike. Codebooks, scales and
norms of all layers continue from there, on the output: the Kullback-Leibler divergence of the next-token distribution
from that of the full model, whose stream after the last layer is stored. The codes are fixed. QuIP# ends in the same
way (Tseng et al. 2024, section 5).

Device memory is that of one layer and the head: a batch runs layer by layer, inputs of all layers wait on the host, and
the backward pass computes each layer again. Every `KEPT_EVERY` steps the whole state is written to disk
(`output/resume_files.py`), so a killed training resumes with the same result. Training that ends further from the full
model than it started, on a few of the sequences, is discarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from localq.formats.codebooks.vq2 import Packed
from localq.models.attention import Pass
from localq.models.decoder import Block
from localq.quantize.codebooks.finetune import TrainableLayer, backpropagate, run_block
from localq.quantize.model.calibration_stream import check_range
from localq.quantize.model.sensitivity import HEAD_BYTES, Ending, logits, spread_indices
from localq.quantize.output.resume_files import ResumeFiles
from localq.quantize.settings import Tuning

FILE = "conversion.training.safetensors"
KEPT_EVERY = 10  # steps
JUDGED = 4  # sequences, before and after
BETAS = (0.9, 0.95)
_KNOWN = ("step", "exp_avg", "exp_avg_sq")  # Adam's state of a parameter

OnStep = Callable[[int, int], None]  # steps done, and in total
Layer = tuple[Block, dict[str, Packed]]  # a block with norms and biases in f32 on the device; its matrices
Result = tuple[dict[str, Packed], dict[str, Tensor]]  # see `finetune.TrainableLayer.result`


@dataclass(frozen=True)
class Sequences:
    """Sequences of one length: f32 [T, hidden] on the device, by number below `count`.

    first  input of the first layer
    aim    the full model's stream after the last layer
    step   pass state, shared by all sequences
    name, dtype  of the model, for errors, and the dtype it computes in
    """

    count: int
    first: Callable[[int], Tensor]
    aim: Callable[[int], Tensor]
    step: Pass
    name: str = "the model"
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class TrainingResult:
    """The trained layers; before, after: mean divergence, nats per token, of some sequences; losses: by step."""

    layers: list[Result]
    before: float
    after: float
    losses: list[float]

    def __str__(self) -> str:
        if not self.after < self.before:
            return f"joint training did not help and was discarded (KL {self.before:.3g} nats per token)"
        change = f"from {self.before:.3g} to {self.after:.3g} nats per token"
        return f"joint training: reduced the KL divergence relative to the full-precision model {change}"


def train(
    layers: Sequence[Layer],
    texts: Sequences,
    ending: Ending,
    tuning: Tuning,
    seed: int,
    resume: ResumeFiles,
    on_step: OnStep,
) -> TrainingResult:
    """Train `layers`, resuming from the state in `resume`.

    Raises LocalqError: exit 8 for NaN, 2 for values outside the range of `Sequences.dtype`.
    """
    device = ending[1].device
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(_attention(device)):
        blocks = [block for block, _ in layers]
        trained = [TrainableLayer(packed, block, device, lent=True) for block, packed in layers]
        optimizer = torch.optim.Adam([group for each in trained for group in each.parameters_of(tuning)], betas=BETAS)
        rates = [group["lr"] for group in optimizer.param_groups]
        before, losses = _restore(optimizer, resume) or (
            _mean_divergence(blocks, trained, texts, ending),
            list[float](),
        )
        for step in range(len(losses), tuning.steps):
            on_step(step, tuning.steps)
            chosen = _choose_sequences(texts.count, tuning.sequences, seed, step)
            losses.append(_step(blocks, trained, texts, ending, chosen))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1 + math.cos(math.pi * step / tuning.steps)) / 2
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % KEPT_EVERY == 0 or step + 1 == tuning.steps:
                _keep(optimizer, resume, before, losses)
        on_step(tuning.steps, tuning.steps)
        after = _mean_divergence(blocks, trained, texts, ending)
        if not after < before:
            trained = [TrainableLayer(packed, block, device, lent=True) for block, packed in layers]
        return TrainingResult([each.result() for each in trained], before, after, losses)


def _attention(device: torch.device) -> list[SDPBackend]:
    """Return attention backends that sum in a fixed order: the CPU's fused one does, a GPU's does not."""
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if device.type == "cpu" else [SDPBackend.MATH]


def _choose_sequences(count: int, most: int, seed: int, step: int) -> list[int]:
    """Return the sequences of a step; the order is shuffled again for every pass over the text."""
    size = min(count, most)
    found = []
    for place in range(step * size, (step + 1) * size):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 4096 + place // count))
        found.append(int(order[place % count]))
    return found


def _step(
    blocks: Sequence[Block], trained: Sequence[TrainableLayer], texts: Sequences, ending: Ending, chosen: list[int]
) -> float:
    """Compute gradients of the mean divergence of some sequences; returns that divergence."""
    stream, read = [texts.first(number) for number in chosen], list[list[Tensor]]()
    for index, (block, each) in enumerate(zip(blocks, trained, strict=True)):
        read.append([_to_host(x) for x in stream])
        stream = _through(block, each, stream, texts.step)
        check_range(stream, index, texts.name, texts.dtype)
    total, slopes = 0.0, list[Tensor]()
    for x, number in zip(stream, chosen, strict=True):
        loss, slope = _divergence(ending, x, texts.aim(number), len(chosen))
        total += loss
        slopes.append(slope)
    for block, each in zip(reversed(blocks), reversed(trained), strict=True):
        slopes = _backward(block, each, read.pop(), slopes, texts.step)
    return total


def _mean_divergence(
    blocks: Sequence[Block], trained: Sequence[TrainableLayer], texts: Sequences, ending: Ending
) -> float:
    """Return the mean divergence of some sequences from all over the text."""
    chosen = spread_indices(texts.count, JUDGED)
    stream = [texts.first(number) for number in chosen]
    for block, each in zip(blocks, trained, strict=True):
        stream = _through(block, each, stream, texts.step)
    pairs = zip(stream, chosen, strict=True)
    return sum(_divergence(ending, x, texts.aim(number), len(chosen))[0] for x, number in pairs)


def _to_host(x: Tensor) -> Tensor:
    """Copy to the host, into pinned memory for a GPU."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)


@torch.no_grad()
def _through(block: Block, trained: TrainableLayer, stream: list[Tensor], step: Pass) -> list[Tensor]:
    weights = trained.weights()
    return [run_block(block, weights, x.clone(), step) for x in stream]


def _backward(
    block: Block, trained: TrainableLayer, read: list[Tensor], slopes: list[Tensor], step: Pass
) -> list[Tensor]:
    """Return gradients to a layer's inputs from those to its outputs; gradients to trained values accumulate."""

    def slopes_through(weights: dict[str, Tensor]) -> list[Tensor]:
        found = []
        for x, slope in zip(read, slopes, strict=True):
            leaf = x.to(slope.device).requires_grad_()
            torch.autograd.backward(run_block(block, weights, leaf.clone(), step), slope)
            assert leaf.grad is not None
            found.append(leaf.grad)
        return found

    return backpropagate(trained, slopes_through)


def _divergence(ending: Ending, x: Tensor, aim: Tensor, count: int) -> tuple[float, Tensor]:
    """Return a sequence's share of the mean of `count`, and its gradient to x [T, hidden]."""
    rows = max(1, HEAD_BYTES // (4 * len(ending[1])))
    leaf = x.detach().requires_grad_()
    total = torch.zeros((), device=x.device)
    for begin in range(0, len(x), rows):
        with torch.no_grad():
            wanted = torch.log_softmax(logits(ending, aim[begin : begin + rows]), -1)
        given = torch.log_softmax(logits(ending, leaf[begin : begin + rows]), -1)
        loss = F.kl_div(given, wanted, reduction="sum", log_target=True) / (len(x) * count)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    assert leaf.grad is not None
    return float(total), leaf.grad


# ---- on the disk


def _keep(optimizer: torch.optim.Adam, resume: ResumeFiles, before: float, losses: list[float]) -> None:
    """Write the whole state of the training."""
    tensors = {}
    for number, value in enumerate(_values(optimizer)):
        tensors[f"{number}.value"] = value.detach()
        tensors |= {f"{number}.{name}": each for name, each in optimizer.state.get(value, {}).items()}
    resume.write(FILE, {name: each.cpu() for name, each in tensors.items()}, {"before": before, "losses": losses})


def _restore(optimizer: torch.optim.Adam, resume: ResumeFiles) -> tuple[float, list[float]] | None:
    """Restore the state of an interrupted training: returns its initial divergence and the losses so far."""
    found = resume.read(FILE)
    if found is None:
        return None
    state, tensors = found
    losses: list[float] = state["losses"]
    for number, value in enumerate(_values(optimizer)):
        value.data.copy_(tensors[f"{number}.value"])
        known = {name: tensors[f"{number}.{name}"] for name in _KNOWN if f"{number}.{name}" in tensors}
        if known:  # absent for an expert without tokens
            optimizer.state[value] = {
                name: each.to(value.device) if each.dim() else each for name, each in known.items()
            }
    return state["before"], losses


def _values(optimizer: torch.optim.Adam) -> list[Tensor]:
    return [value for group in optimizer.param_groups for value in group["params"]]

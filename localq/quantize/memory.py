"""Memory of quantizing, counted before anything is allocated: of one layer on the device, by stage, and of one tensor.

Sizes are those of the tensors that each stage holds at its peak; the allocator adds a few per cent. A resident layer is
on the device twice: the source's, and the quantized one. With weights on the host (`ConversionSettings.on_host`) the
device holds only what a stage computes with.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from localq.engine.load.load import is_out_of_memory
from localq.errors import ExitCode, LocalqError
from localq.files import delta_memory, format_facts
from localq.models.attention import Attention
from localq.models.decoder import Block
from localq.models.gated_delta_net import GatedDeltaNet
from localq.models.short_convolution import ConvolutionMixer
from localq.planner import footprint, ram
from localq.quantize.codebooks.finetune import product_dtype
from localq.quantize.model import linear_algebra, statistics
from localq.quantize.model.fold import plain_linear
from localq.quantize.model.matrix_groups import Group, groups_of
from localq.quantize.model.sensitivity import HEAD_BYTES
from localq.quantize.output.tensor_jobs import TensorJob
from localq.quantize.settings import ConversionSettings
from localq.wording import human_bytes

F32, F64 = 4, 8
# Bytes of temporaries per weight: a piece whose codewords are gathered, a matrix that is decoded, one that is read and
# rotated, and one whose gradient goes to its codebooks.
GATHERED = 15
SLOPES = {"cpu": 18, "cuda": 26}
SCORES = {"cpu": 3, "cuda": 4}  # tensors as large as the attention scores, in the backward pass
DECODED, READ = 13, 14
LOGITS = 7  # tensors as large as some logits, of the divergence and its gradient
SPARE = 1.05  # what the allocator's blocks hold unused


@dataclass(frozen=True)
class MemoryCount:
    """Bytes on the device, by stage.

    stages  at the peak of each
    always  held throughout, on top of `stages`: CUDA, cuBLAS, the rotation of the stream
    """

    stages: dict[str, int]
    always: int

    @property
    def widest(self) -> str:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: self.stages[stage])

    @property
    def peak(self) -> int:
        """Bytes at the peak of the whole conversion."""
        return self.always + round(SPARE * self.stages[self.widest])


def count(
    block: Block,
    hidden: int,
    tokens: int,
    settings: ConversionSettings,
    *,
    device: str,
    rotated: bool,
    vocab: int = 0,
    made: bool = False,
) -> MemoryCount:
    """Count a layer like `block`, on the meta device, with windows of `tokens`; device: "cpu" or "cuda".

    vocab: of the head in joint training (`ConversionSettings.joint_tuning`); made: only that training is left.
    """
    layer = _LayerBytes(block, hidden, tokens, settings, device)
    stages = {"loading a layer": layer.reading()}
    first = {group.number: group for group in reversed(groups_of(block))}
    for group in reversed(first.values()) if not made else ():
        stages |= layer.group(group)  # of experts, which are all alike, the first
    stages["a forward pass"] = layer.passing()
    if settings.tuning.steps:
        stages["fine-tuning"] = layer.tuning()
    if settings.joint_tuning.steps:
        stages["training all layers"] = layer.training(vocab)
    mixer = block.mixer()
    tables = 2 * F32 * tokens * mixer.head_dim if isinstance(mixer, Attention) else 0
    cuda = footprint.CUDA_CONTEXT_BYTES + footprint.CUBLAS_BYTES if device == "cuda" else 0
    turn = (F32 if device == "cuda" else F64) * hidden**2 if rotated else 0
    return MemoryCount(stages, cuda + turn + tables)


def place(
    name: str, counted: Callable[[ConversionSettings], MemoryCount], settings: ConversionSettings, budget: int
) -> ConversionSettings:
    """Return `settings` that fit into `budget` bytes of the device, with weights on the host where needed.

    `counted` is `count` for the model `name`. Raises LocalqError (exit 3) where they do not fit at all.
    """
    for tried in (settings, replace(settings, on_host=True)):
        found = counted(tried)
        if found.peak <= budget:
            return tried
    needed, allowed = (f"{each / 2**30:.1f} GiB" for each in (found.peak, budget))
    why = f"quantization needs up to {needed} of GPU memory ({found.widest}), but only {allowed} is allowed"
    step = "Close other programs, raise --vram, omit --best, or use --device cpu."
    raise LocalqError(name, why, step, ExitCode.DOES_NOT_FIT)


def tensor_bytes(jobs: Iterable[TensorJob], format: str) -> int:
    """RAM of quantizing tensor by tensor: the tensor that takes most, with what is written for it and temporaries."""
    return max((_job_bytes(job, format) for job in jobs), default=0)


def _job_bytes(job: TensorJob, format: str) -> int:
    held = job.source.nbytes + sum(each.nbytes for each in job.outputs.values())
    matrices = sum(len(parts) for parts in job.experts) or 1
    per_weight = format_facts.of(format).temporaries if job.quantized else 0
    return held + per_weight * (math.prod(job.source.shape) // matrices)


def text_bytes(jobs: Iterable[TensorJob], windows: Sequence[Sequence[int]], hidden: int, on_gpu: bool) -> int:
    """RAM of weighing errors by a text, at least: the text as wide as the stream, and on the CPU the largest layer."""
    layers: dict[str, int] = {}
    for job in jobs:
        if job.quantized:
            layer = job.name.partition("layers.")[2].partition(".")[0]
            layers[layer] = layers.get(layer, 0) + math.prod(job.source.shape)
    stream = 2 * len(windows) * len(windows[0]) * hidden
    return stream + (0 if on_gpu else F32 * max(layers.values(), default=0))


def check_ram(name: str, needed: int, step: str = "use a smaller --windows, or use --format nf4") -> None:
    """Raise LocalqError (exit 3) where quantizing the model `name` needs more RAM than is free for this process.

    step: what else helps, beside closing other programs.
    """
    free = min(ram.free_ram().bytes, _address_space())
    if needed > free:
        why = f"quantization needs up to {human_bytes(needed)} of RAM, but only {human_bytes(free)} is free"
        raise LocalqError(name, why, _freed(step), ExitCode.DOES_NOT_FIT)


def _freed(step: str) -> str:
    return f"Close other programs, {step}." if step else "Close other programs."


def _address_space() -> int:
    """Bytes that the limit of this process leaves (`ulimit -v`)."""
    import psutil  # type: ignore[import-untyped]  # has no types

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


@contextmanager
def guard(out: Path, step: str) -> Iterator[None]:
    """Report memory that runs out while `out` is quantized as a LocalqError (exit 3); finished files are kept.

    step: as for `check_ram`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        why = f"ran out of memory while quantizing ({(str(error).splitlines() or ['no reason given'])[0]})"
        raise LocalqError(str(out), why, f"{_freed(step)} Completed work is saved.", ExitCode.DOES_NOT_FIT) from None


@dataclass(frozen=True)
class _LayerBytes:
    """The counts of one layer; bytes."""

    block: Block
    hidden: int
    tokens: int
    settings: ConversionSettings
    device: str

    def reading(self) -> int:
        """f32 weights, the widest of them read and rotated."""
        return F32 * self._weights() + READ * self._widest()

    def group(self, group: Group) -> dict[str, int]:
        """The stages of a group: statistics, target, search, fit."""
        rows, columns = self._rows(group), self._columns(group)
        weight, metric, wide = F32 * rows * columns, F32 * columns**2, columns <= statistics.F64_COLUMNS
        panel, item = min(linear_algebra.PANEL, columns), F64 if wide else F32
        factor, factoring, inverting = (
            item * size for size in (columns**2, panel * (columns + panel), 2 * panel * columns)
        )
        owed = weight if group.writes else 0
        kept = self._kept_bytes()
        piece = self._largest_piece(rows, columns, 1)
        solving = (F64 if wide else 0) * piece + item * self._panel(rows, columns)
        codes = rows * columns // 2  # of 4 bits, the most
        again = metric if self.settings.effort.rounds > 1 else 0
        left = 2 * F32 * self._largest_piece(rows, columns, 2)
        finding = factor + max(factoring, inverting, metric if wide else 0)
        name = group.names[0]
        return {
            f"statistics of {name}": self._lent_bytes(group) + 2 * metric + owed + self._read_by(group),
            f"target of {name}": kept + 2 * weight + metric + max(metric, factor + max(factoring, solving)),
            f"codes of {name}": kept + weight + metric + max(finding, metric + codes + left),
            f"codebooks of {name}": kept + weight + metric + again + codes + GATHERED * piece,
            f"weights of {name}": kept + weight + metric + codes + DECODED * self._widest(group),
        }

    def passing(self) -> int:
        """Both layers, or the parts of both that the MLP needs, and the activations of one window."""
        mlp = [name for group in groups_of(self.block)[2:] for name in group.names]
        weights = self._kept_bytes() or 2 * F32 * self._weights(mlp)
        gated = F32 * self.tokens * (4 * self.hidden + 2 * self._columns(groups_of(self.block)[3]))
        return weights + max(gated, self._mixing())

    def _mixing(self) -> int:
        """Activations of a gated delta net or a short convolution; those of attention are counted with its groups."""
        mixer = self.block.mixer()
        if isinstance(mixer, ConvolutionMixer):
            return 10 * F32 * self.tokens * self.hidden
        if not isinstance(mixer, GatedDeltaNet):
            return 0
        shape, gathered = mixer.shape, mixer.shape.value_heads * mixer.shape.value_dim
        shared = shape.value_heads // shape.key_heads
        rule = delta_memory.rule_bytes(self.tokens, shape.key_heads, shared, shape.key_dim, shape.value_dim)
        return rule + F32 * self.tokens * (2 * self.hidden + 2 * shape.channels + 4 * gathered)

    def training(self, vocab: int) -> int:
        """The head and the streams of a batch; then logits, or fine-tuning without the source's layers."""
        streams = 3 * F32 * self.tokens * self.hidden * self.settings.joint_tuning.sequences
        layer = self.tuning() - self._kept_bytes() + self._weights() // 2  # with codes of 4 bits, the most
        logits = min(max(HEAD_BYTES, F32 * vocab), F32 * vocab * self.tokens)
        return F32 * vocab * self.hidden + streams + max(layer, LOGITS * logits)

    def tuning(self) -> int:
        """All weights with their gradients; then attention scores, or the backward pass through the widest matrix."""
        mixer, stream = self.block.mixer(), F32 * self.tokens * self.hidden
        scores = F32 * mixer.heads * self.tokens**2 if isinstance(mixer, Attention) else 3 * self._mixing()
        middle = F32 * self.tokens * self._columns(groups_of(self.block)[3])
        widest = self._widest()
        back = SLOPES[self.device] * widest
        if self.device == "cpu":
            back += GATHERED * min(widest, linear_algebra.VALUES)
        attending = SCORES[self.device] * scores + 10 * stream + (middle if self.device == "cuda" else 0)
        held = max(attending, scores + 6 * middle + 8 * stream, back)
        return self._kept_bytes() + 2 * product_dtype(torch.device(self.device)).itemsize * self._weights() + held

    def _kept_bytes(self) -> int:
        """Bytes of weights that stay on the device."""
        return 0 if self.settings.on_host else 2 * F32 * self._weights()

    def _lent_bytes(self, group: Group) -> int:
        return self._kept_bytes() or 2 * F32 * self._weights(group.after)

    def _read_by(self, group: Group) -> int:
        """A window in both streams, their difference, and the inputs of the group."""
        inputs, stream = F32 * self.tokens * self._columns(group), F32 * self.tokens * self.hidden
        return (3 if group.after else 2) * inputs + 4 * stream + (self._projected_bytes(group) if group.after else 0)

    def _projected_bytes(self, group: Group) -> int:
        """Queries, keys and values in attention, before and after the rotary embedding."""
        return 0 if group.number == 3 else 2 * F32 * self.tokens * self._rows(groups_of(self.block)[0])

    def _rows(self, group: Group) -> int:
        return sum(plain_linear(self.block.get_submodule(name)).out_features for name in group.names)

    def _columns(self, group: Group) -> int:
        return plain_linear(self.block.get_submodule(group.names[0])).in_features

    def _weights(self, names: list[str] | tuple[str, ...] | None = None) -> int:
        every = [name for group in groups_of(self.block) for name in group.names]
        chosen = every if names is None else names
        return sum(plain_linear(self.block.get_submodule(name)).weight.numel() for name in chosen)

    def _widest(self, group: Group | None = None) -> int:
        groups = groups_of(self.block) if group is None else [group]
        return max(self._weights((name,)) for each in groups for name in each.names)

    @staticmethod
    def _largest_piece(rows: int, columns: int, factor: int) -> int:
        """Weights of the largest piece."""
        return _height(rows, columns, factor) * columns

    @staticmethod
    def _panel(rows: int, columns: int) -> int:
        return 2 * _height(rows, columns, 1) * min(linear_algebra.PANEL, columns)


def _height(rows: int, columns: int, factor: int) -> int:
    """Rows of the largest piece."""
    first = linear_algebra.pieces(rows, columns, factor)[0]
    return int(first.stop) - int(first.start)

"""The search for the codes of additive codebooks: beams of paths along the rows of a matrix.

A row is read from left to right. At every position each of the `beam` best ways so far is continued with all 256
codewords of the book that stands there, and the `beam` cheapest of these stay. What a way costs is the squared whitened
error of the columns that it has finished; what it owes to the columns to come, the part of its last codewords that
reaches over, and the error that it feeds back to them, it carries along.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localq import kernels
from localq.kernels.checks import place

ENTRIES = 256


@dataclass(frozen=True)
class Codebook:
    """One codebook: codewords f32 [256, length], `stride` weights between two of its positions.

    Strides of books that are searched together divide each other, and every length is a multiple of the least stride.
    """

    stride: int
    codewords: Tensor

    @property
    def length(self) -> int:
        """Weights of a codeword."""
        return self.codewords.shape[1]


def events(books: Sequence[Codebook], columns: int) -> list[tuple[int, bool]]:
    """In which order books are read along `columns`: (number of the book, is it the last of its position).

    The finest strides come first at a position: their codewords carry most of a weight, and paths that are judged
    before them are judged by what matters least (a third more squared error at 3 bits).
    """
    step = min(book.stride for book in books)
    order = sorted(range(len(books)), key=lambda book: books[book].stride)
    found = []
    for column in range(0, columns, step):
        here = [book for book in order if column % books[book].stride == 0]
        found += [(book, book == here[-1]) for book in here]
    return found


def vq_search(
    targets: Tensor, feedback: Tensor, white: Tensor, books: Sequence[Codebook], tails: Tensor, beam: int
) -> tuple[list[Tensor], Tensor]:
    """Codes of one block of columns, all rows: codes u8 [rows, positions] of each book, and whitened errors.

    targets   f32 [rows, columns]     the weights, less what the errors of earlier blocks feed back
    feedback  f32 [columns, columns]  feedback[i, j] * whitened error i is subtracted from every later column j
    white     f32 [positions, step, step]  upper triangles: (row vector of a position's error) @ white is whitened
    tails     f32 [rows, tail]        what codewords of earlier blocks add to the first columns; replaced by what these
                                      add to the next. tail = the longest codeword
    errors    f32 [rows, columns]     what the next blocks are to be fed back

    All on one device; step is the least stride. On a GPU 2, 4, 8 or 16, and about (5 columns + 200) * beam bytes must
    fit into the shared memory of a multiprocessor. Raises ValueError for sizes that do not belong together, ImportError
    where the compiled part is missing.

    Bound by instructions: csrc/README.md, "The search for codes".
    """
    search = prepare(targets, feedback, white, books, tails, beam)
    search.launch()
    numbers = [book for book, _ in search.arguments["events"]]
    chosen = [[i for i, book in enumerate(numbers) if book == number] for number in range(len(books))]
    return [search.codes[:, at].contiguous() for at in chosen], search.errors


@dataclass(frozen=True)
class Search:
    """A checked search: `launch` fills `codes` u8 [rows, events] and `errors` and replaces the tails it was given."""

    arguments: dict[str, Any]  # of the bindings, but for where to run
    held: tuple[Tensor, ...]  # what their addresses are of
    codes: Tensor
    errors: Tensor

    def launch(self) -> None:
        """On torch's current stream of the GPU that holds the tensors, or on the CPU with all threads."""
        if self.codes.is_cuda:
            kernels.module().vq_search(**self.arguments, **place(self.codes))
        else:
            threads = min(len(self.codes), os.cpu_count() or 1)
            kernels.host_module().vq_search_host(**self.arguments, threads=threads)


def prepare(
    targets: Tensor, feedback: Tensor, white: Tensor, books: Sequence[Codebook], tails: Tensor, beam: int
) -> Search:
    """All of `vq_search` but the search."""
    rows, columns = targets.shape
    step = min(book.stride for book in books)
    order = events(books, columns)
    tensors = {"targets": targets.contiguous(), "feedback": feedback.contiguous(), "white": white.contiguous()}
    words = [book.codewords.contiguous() for book in books]
    _check({**tensors, "tails": tails, **{f"book {i}": each for i, each in enumerate(words)}}, rows, columns, step)
    tensors = {**tensors, "tables": _tables(order, books, white), "tails": tails}
    tensors["codes"] = torch.empty(rows, len(order), dtype=torch.uint8, device=targets.device)
    tensors["errors"] = torch.empty_like(tensors["targets"])
    arguments = {
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        "events": order,
        "books": [(each.data_ptr(), each.shape[1]) for each in words],
        "rows": rows,
        "columns": columns,
        "step": step,
        "tail": tails.shape[1],
        "beam": beam,
    }
    return Search(arguments, (*tensors.values(), *words), tensors["codes"], tensors["errors"])


def vq_search_bytes(rows: int, columns: int, events: int, tail: int) -> int:
    """Bytes that `vq_search` must move, without what all rows share."""
    return rows * (4 * columns + 8 * tail + events + 4 * columns)


def _tables(order: Sequence[tuple[int, bool]], books: Sequence[Codebook], white: Tensor) -> Tensor:
    """f32 [events, step + 1, 256]: whitened beginnings of codewords by component, and their squares' sums."""
    step = white.shape[1]
    position, tables = 0, []
    for book, last in order:
        begin = books[book].codewords[:, :step] @ white[position]
        tables.append(torch.cat((begin.T, begin.square().sum(1)[None])))
        position += last
    return torch.stack(tables)


def _check(tensors: dict[str, Tensor], rows: int, columns: int, step: int) -> None:
    shapes = {"targets": (rows, columns), "feedback": (columns, columns), "white": (columns // step, step, step)}
    device = tensors["targets"].device
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(f"vq_search: {name} must be contiguous float32 on {device}")
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"vq_search: {name} has shape {tuple(tensor.shape)}, must be {shapes[name]}")
        if name.startswith("book") and (tensor.dim() != 2 or tensor.shape[0] != ENTRIES or tensor.shape[1] % step):
            raise ValueError(f"vq_search: {name} has shape {tuple(tensor.shape)}, must be [256, n * {step}]")
    longest = max(tensor.shape[1] for name, tensor in tensors.items() if name.startswith("book"))
    if tuple(tensors["tails"].shape) != (rows, longest):
        raise ValueError(f"vq_search: tails have shape {tuple(tensors['tails'].shape)}, must be {(rows, longest)}")
    finite = torch.stack([torch.isfinite(tensor).all() for tensor in tensors.values()])  # asked once: GPUs run on
    if not bool(finite.all()):
        name = next(name for name, each in zip(tensors, finite.tolist(), strict=True) if not each)
        raise ValueError(f"vq_search: {name} contains NaN or infinity")

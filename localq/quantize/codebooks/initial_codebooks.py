"""Initial codebooks: trained on Gaussian noise, the start of every search.

Rotated weights look like Gaussian noise, whatever the model, so one set of codebooks per scheme is packaged
(`localq/data/codebooks.safetensors`, f16 [256, length] under "s4l16.0" and so on), made by

    python -m localq.quantize.codebooks.initial_codebooks localq/data/codebooks.safetensors

`train` alternates between choosing codes for rows of noise and fitting the codebooks to them, with fresh noise each
time; in the second half it averages old and new codebooks, so that they do not fit the last noise.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save

from localq import disk, places
from localq.errors import usage_error
from localq.files.schemes import vq2_codebooks
from localq.formats.codebooks.search_kernel import ENTRIES, Codebook
from localq.formats.tensor_files import read_tensors
from localq.quantize.codebooks.encode import search_codes
from localq.quantize.codebooks.refine import decode, fit_codebooks
from localq.quantize.model.statistics import Factor
from localq.quantize.settings import Effort

SCHEMES = ("s4l16", "s4l16+s16l16", "s4l16+s8l16", "s4l16+s4l16", "s8l8+s8l8")
COLUMNS = 512
FILE = places.PACKAGE_DATA / "codebooks.safetensors"


def load_initial(scheme: str, device: torch.device) -> tuple[Codebook, ...]:
    """Load the codebooks of a scheme of `SCHEMES`, for weights of mean square 1; f32 on `device`.

    Raises LocalqError (exit 2) for other schemes.
    """
    sizes = vq2_codebooks(scheme)
    if scheme not in SCHEMES:
        raise usage_error(
            f"vq2 {scheme}", "there are no initial codebooks for this scheme", f"Schemes: {', '.join(SCHEMES)}."
        )
    tensors = read_tensors(FILE)
    return tuple(
        Codebook(stride, tensors[f"{scheme}.{number}"].float().to(device)) for number, (stride, _) in enumerate(sizes)
    )


def train(scheme: str, rows: int, rounds: int, beam: int, seed: int = 0) -> tuple[Codebook, ...]:
    """Train codebooks on Gaussian weights of mean square 1, on the CPU; `rows` of 512 weights in every round."""
    generator = torch.Generator().manual_seed(seed)
    sizes = vq2_codebooks(scheme)
    books = _first(sizes, generator)
    for number in range(rounds):
        noise = torch.randn(rows, COLUMNS, generator=generator)
        effort = Effort(beam=beam if number >= rounds // 4 else max(beam // 4, 4), columns=COLUMNS)
        codes = search_codes(noise, torch.ones(rows, 1), _plain(min(stride for stride, _ in sizes)), books, effort)
        fitted = fit_codebooks(noise, torch.eye(COLUMNS), codes, books, torch.ones(rows, 1), 12)
        late = number >= rounds // 2
        books = [
            Codebook(new.stride, (old.codewords + new.codewords) / 2 if late else new.codewords)
            for old, new in zip(books, fitted, strict=True)
        ]
    return tuple(books)


def mean_square_error(books: tuple[Codebook, ...], rows: int, beam: int, seed: int = 1) -> float:
    """Return the mean square error on fresh Gaussian weights; the lower bound is 4^-bits."""
    noise = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))
    step = min(book.stride for book in books)
    codes = search_codes(noise, torch.ones(rows, 1), _plain(step), books, Effort(beam=beam, columns=COLUMNS))
    return float((noise - decode(codes, books, COLUMNS)).square().mean())


def _first(sizes: list[tuple[int, int]], generator: torch.Generator) -> list[Codebook]:
    """Start from noise that decays along every codeword; all codebooks together have mean square 0.9."""
    books = []
    for number, (stride, length) in enumerate(sizes):
        lags = torch.arange(length) // stride
        words = torch.randn(ENTRIES, length, generator=generator) * 0.6**lags * 0.5**number
        books.append(Codebook(stride, words))
    power = sum(float(book.codewords.square().sum(1).mean()) / book.stride for book in books)
    return [Codebook(book.stride, book.codewords * (0.9 / power) ** 0.5) for book in books]


def _plain(step: int) -> Factor:
    """Return the factor of the unit matrix, with which no error reaches another column."""
    return Factor(torch.zeros(COLUMNS, COLUMNS), torch.eye(step).expand(COLUMNS // step, step, step))


def main(path: str) -> None:
    """Train all schemes and write them to `path`; prints the error of each."""
    tensors: dict[str, torch.Tensor] = {}
    for scheme in SCHEMES:
        books = train(scheme, rows=256, rounds=40, beam=16)
        tensors |= {f"{scheme}.{number}": book.codewords.half() for number, book in enumerate(books)}
        print(
            f"{scheme}: mean squared error {mean_square_error(books, 512, 32):.5f} with a beam width of 32", flush=True
        )
    disk.write_durably(places.expand(path), save(tensors))


if __name__ == "__main__":
    main(sys.argv[1])

"""Times of kernels on one GPU, from data/measurements.toml, with which `localq fit` predicts speed.

Torch-free.

One row of x, cold L2, CUDA graphs, medians. The file has card, date and command of every figure.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass

from localq import places

Rows = tuple[tuple[int, int, float], ...]  # out, in, microseconds of one launch


@dataclass(frozen=True)
class Variant:
    """Format of the matrices of a key of `products`; expert: matrices of chosen experts."""

    format: str
    scheme: str = ""
    expert: bool = False


@dataclass(frozen=True)
class Measurements:
    """The content of the file.

    gpu                the card that all times were measured on
    products           key -> matrix-vector products; "KEY experts": products of chosen experts
    attention          bits of the cache, query heads, slots, microseconds; with 8 KV heads of 128
    rotation_us ...    other parts of a step; see the file
    perplexity_ratio   (model, format) -> perplexity divided by that of the reference
    quality_notes      format -> other facts about its quality
    """

    gpu: str
    read_bytes_per_s: float
    gather_bytes_per_s: float
    clock_ghz: float
    multiprocessors: int
    products: dict[str, Rows]
    variants: dict[str, Variant]
    attention: tuple[tuple[int, int, int, float], ...]
    rotation_us: float
    norm_us: float
    router_us: float
    router_expert_us: float
    qk_norm_us: float
    embed_and_choice_us: float
    delta_us: float
    own_codebooks_us: float
    perplexity_ratio: dict[tuple[str, str], float]
    quality_notes: dict[str, str]

    @property
    def multiprocessor_ghz(self) -> float:
        """Multiprocessors times clock, by which gathers from L2 scale."""
        return self.multiprocessors * self.clock_ghz

    def variant(self, key: str) -> Variant:
        """The variant of `products[key]`: the format of that name, unless the file states another."""
        plain = key.removesuffix(" experts")
        known = self.variants.get(plain, Variant(plain))
        return Variant(known.format, known.scheme, plain != key)


@functools.cache
def load() -> Measurements:
    """The measurements, read once a process."""
    with (places.PACKAGE_DATA / "measurements.toml").open("rb") as file:
        body = tomllib.load(file)
    device, step = body["device"], {name: entry["value"] for name, entry in body["step"].items()}
    return Measurements(
        gpu=device["name"],
        read_bytes_per_s=device["read_bytes_per_s"],
        gather_bytes_per_s=device["gather_bytes_per_s"],
        clock_ghz=device["clock_ghz"],
        multiprocessors=device["multiprocessors"],
        products={key: tuple((out, columns, us) for out, columns, us, _ in rows)
                  for key, rows in body["products"].items()},
        variants={key: Variant(**fields) for key, fields in body["variants"].items()},
        attention=tuple(tuple(row[:4]) for row in body["attention"]["rows"]),
        perplexity_ratio={_split_name(name): entry["value"] / entry["reference"]
                          for name, entry in body["perplexity"].items()},
        quality_notes=dict(body["quality_notes"]),
        **step,
    )  # fmt: skip


def _split_name(name: str) -> tuple[str, str]:
    """Model and format of NAME@FORMAT."""
    model, _, format = name.partition("@")
    return model, format

"""Code shared by all rows of the kernel benchmark: cold copies, a check against fp64, and optional rivals."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.bench.kernels import roofline
from localq.bench.kernels.roofline import Timing
from localq.bench.kernels.table import Rival
from localq.errors import LocalqError
from localq.formats.cases import TIMES_NAIVE

SEED = 20
CHUNK = 4096  # rows of a matrix that are multiplied in fp64 at a time


@dataclass(frozen=True)
class Bench:
    """Settings of a measurement: the device, the size of its cache, and the number of replays."""

    device: torch.device
    cache_bytes: int
    replays: int

    def copies(self, bytes_each: int) -> int:
        """Return how many copies of `bytes_each` to cycle through for a cold cache."""
        return roofline.copies_for_cold_cache(max(bytes_each, 1), self.cache_bytes)

    def time(self, launches: Sequence[Callable[[], object]]) -> Timing:
        """One of `launches`, which do the same on different copies."""
        return roofline.time_cold(launches, self.replays)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = SEED) -> Tensor:
        """Normal numbers, the same every time."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, device=self.device, generator=generator).to(dtype)

    def rival(self, name: str, launches: Sequence[Callable[[], object]]) -> Rival:
        """A rival's time."""
        return Rival(name, self.time(launches))


def guard(name: str, made: Callable[[], Rival]) -> Rival:
    """Return the result of `made`; a rival that fails becomes a note with its error, and our rows go on."""
    try:
        return made()
    except Exception as error:  # other people's code: any failure of it is theirs to name
        first = (str(error).strip() or "no message").splitlines()[0]
        return Rival(name, None, f"not measured ({type(error).__name__}: {first[:100]})")


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, in] times weight f32 [out, in], in fp64 -> [rows, out]."""
    return torch.cat([x.double() @ chunk.double().T for chunk in torch.split(weight, CHUNK)], dim=1)


def check(op: str, what: str, got: Tensor, exact: Tensor, naive: Tensor) -> None:
    """`got` may be twice as far from fp64 as the plain 16-bit computation is. Raises LocalqError (exit 1)."""
    error = (got.double() - exact).abs().max().item()
    allowed = (naive.double() - exact).abs().max().item()
    if not error <= TIMES_NAIVE * allowed + 1e-6 * exact.abs().max().item():
        raise wrong(op, what, f"the error is {error:.3g}, compared with only {allowed:.3g} for 16-bit torch")


def wrong(op: str, what: str, why: str) -> LocalqError:
    """A kernel that must not be timed."""
    return LocalqError(op, f"wrong result for {what}: {why}", "The kernel was not timed. Report this as a bug.")


def type_name(dtype: torch.dtype) -> str:
    """Without "torch."."""
    return str(dtype).removeprefix("torch.")


def is_installed(package: str) -> bool:
    """Return whether a rival can be imported."""
    return importlib.util.find_spec(package) is not None


def version_of(package: str) -> str | None:
    """Of a rival; None where it cannot be imported, "unknown" where it lies there without its metadata."""
    try:
        return importlib.metadata.version(package) if is_installed(package) else None
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def clones(tensor: Tensor, count: int) -> Iterator[Tensor]:
    """`tensor`, and `count` - 1 copies of it at addresses of their own."""
    yield tensor
    for _ in range(count - 1):
        yield tensor.clone()

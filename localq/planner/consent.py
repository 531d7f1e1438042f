"""Cost of a download or a quantization, for the confirmation of one of more than 1 GB. Torch-free.

The line chat and the verbs ask at a terminal (`cli.agree`), the full screen by a dialog. Without a terminal a
named model is downloaded without a question, as `ollama` and `hf` do; quantizing needs --yes (exit 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localq import disk
from localq.errors import ExitCode, LocalqError, usage_error
from localq.wording import human_bytes

LIMIT = 10**9  # bytes; more is not downloaded or made without a question
USUAL_RATE = 100e6 / 8  # bytes per second of a usual connection, for the estimate of a download


@dataclass(frozen=True)
class OpenCost:
    """Cost of opening a model, beyond what is on this machine.

    origin       the repository or package
    download     bytes to download, without what is here already
    disk         bytes on the disk at the end, the source of a quantization included
    make_s       seconds to quantize it here, estimated; None if it is published
    folders      where the files go
    alternative  another model or format that needs less, in words; empty if there is none
    why          why this model was chosen, if the user did not name it
    """

    name: str
    origin: str
    download: int
    disk: int
    make_s: float | None
    folders: tuple[Path, ...]
    alternative: str = ""
    why: str = ""

    def plus(self, other: OpenCost) -> OpenCost:
        """The cost of both."""
        work_s = [each for each in (self.make_s, other.make_s) if each is not None]
        return OpenCost(
            f"{self.name} and {other.name}", f"{self.origin} and {other.origin}", self.download + other.download,
            self.disk + other.disk, sum(work_s) if work_s else None, tuple(dict.fromkeys(self.folders + other.folders)),
            self.alternative or other.alternative, self.why or other.why,
        )  # fmt: skip

    @property
    def is_large(self) -> bool:
        """True if the cost is large enough to need confirmation."""
        return self.download > LIMIT or (self.make_s is not None and self.disk > LIMIT)

    @property
    def title(self) -> str:
        """The question in one line."""
        return f"{self.name}: {self.work}?"

    @property
    def work(self) -> str:
        """Download and quantization, such as "download 16.9 GB"."""
        from localq.planner import making  # start-up cost: most models are here

        size = f"download {human_bytes(self.download)}" if self.download else ""
        made = "" if self.make_s is None else f"quantize (about {making.duration(self.make_s)})"
        return " and ".join(filter(None, (size, made)))

    def lines(self) -> list[str]:
        """Size, time, place and alternative, one line each."""
        from localq.planner import making  # start-up cost, as above

        found = [self.why] if self.why else []
        if self.download:
            time = making.duration(self.download / USUAL_RATE)
            found.append(f"download: {human_bytes(self.download)} from {self.origin}, about {time} at 100 Mbit/s")
        if self.make_s is not None:
            time = making.duration(self.make_s)
            found.append(f"quantize: about {time} on this machine")
        free = min(disk.free_bytes(folder) for folder in self.folders)
        where = " and ".join(map(str, self.folders))
        found.append(f"disk: {human_bytes(self.disk)} in {where} ({human_bytes(free)} free)")
        return [*found, *([f"alternative: {self.alternative}"] if self.alternative else [])]


class ConsentError(LocalqError):
    """A download or quantization that the user has to agree to; a screen asks, and opens the model again."""

    def __init__(self, cost: OpenCost) -> None:
        self.cost = cost
        why = f"confirmation is required to {cost.work}"
        super().__init__(cost.name, why, "Add --yes to proceed.", ExitCode.USAGE)


def declined(name: str) -> LocalqError:
    """The error where the user answered no."""
    return LocalqError(name, "not started", "To list the models on this machine, run `localq ls`.", ExitCode.FAILURE)


def needs_yes(cost: OpenCost) -> LocalqError:
    """The error without a terminal (exit 2)."""
    why = f"these weights are not published, so localq would {cost.work}; confirming this requires a terminal"
    return usage_error(cost.name, why, f"Add --yes{f', or use {cost.alternative}' if cost.alternative else ''}.")


def total(costs: Sequence[OpenCost]) -> int:
    """Bytes to download for several models."""
    return sum(each.download for each in costs)

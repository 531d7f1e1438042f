"""An engine process that acts as one on a GPU, and fails in it as told. No torch.

`python faulty_engine.py STEP_LIMIT_S [SPOILED]`: a reply is a checksum of the whole prompt, one character a step, and
comes out otherwise once the file SPOILED exists (a card that has gone wrong). What fails is written in the last turn of
the conversation, `WAY [KIND] STEP`; see `WAYS` and `KINDS`. After a device fault every call fails, as on a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from localq.errors import ExitCode, LocalqError
from localq.stats import Stats
from localq.worker import server
from localq.worker.messages import Generate, Load, Loaded, Profile, Profiled

VOCAB, CONTEXT = 1000, 100_000
ALLOCATIONS = 60  # of a load
WAYS = ("sticky", "hang", "segfault", "weights")


class AcceleratorError(RuntimeError):
    """As torch names it."""


class CudaError(RuntimeError):
    """As torch.cuda names it."""


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


KINDS: dict[str, Exception] = {
    "700": RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"),
    "719": AcceleratorError("CUDA error: unspecified launch failure"),
    "ours": RuntimeError("vq_gemv: CUDA error: misaligned address"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    "driver": RuntimeError("CUDA driver error: invalid device context"),
    "check": CudaError("unspecified launch failure (719)"),
}


@dataclass(frozen=True)
class Step:
    ids: tuple[int, ...]
    stats: Stats
    reason: str | None = None
    logprobs: tuple[object, ...] = ()


def answer(text: str, spoiled: bool = False) -> str:
    """What the model says to a prompt."""
    return f"{zlib.crc32(text.encode()):08x}"[:: -1 if spoiled else 1]


class FaultyBackend:
    """`held`: names of what was allocated."""

    can_hang = True

    def __init__(self) -> None:
        self.spoiled = Path(sys.argv[2]).exists() if len(sys.argv) > 2 else False
        self.fault: Exception | None = None
        self.held: list[str] = []

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def _break(self, fault: Exception) -> NoReturn:
        self.fault = fault
        raise fault

    def load(self, request: Load, on_progress: Callable[[str, int, int], None]) -> Loaded:
        """`oom:N[:leak]`: the Nth allocation fails; with "leak", giving back what there is fails too."""
        self._check()
        self.held.clear()
        way, _, rest = request.path.partition(":")
        number, _, leak = rest.partition(":")
        for count in range(ALLOCATIONS):
            if way == "oom" and count == int(number):
                if leak:
                    self.fault = KINDS["700"]
                raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore words")
            self.held.append(f"tensor {count}")
        sizes = {"weights": len(self.held)}
        return Loaded(
            request.options.name, "cuda", "a GPU", "bfloat16", "nf4", request.options.ctx or CONTEXT, VOCAB, True, 0.0,
            sizes, [request.options.device], request.options.kv_bits or 16, "host", "8",
        )  # fmt: skip

    def unload(self) -> None:
        self._check()
        self.held.clear()

    def profile(self, request: Profile) -> Profiled:
        self._check()
        return Profiled({"held": len(self.held)})

    def generate(self, request: Generate, cancelled: Callable[[], bool]) -> Iterator[Step]:
        self._check()
        text = "".join(map(chr, request.prompt))
        way, *told = text.rpartition("<user>")[2].removesuffix("<assistant>").split()
        yield Step((), Stats(prompt_tokens=len(request.prompt)))
        said = answer(text, self.spoiled)
        for count, letter in enumerate(said):
            if way in WAYS and count == int(told[-1]):
                self._fail(way, told[0])
            yield Step((ord(letter),), Stats("decode", generated_tokens=count + 1))
        yield Step((), Stats("done", generated_tokens=len(said)), "stop")

    def _fail(self, way: str, kind: str) -> None:
        if way == "sticky":
            self._break(KINDS[kind])
        elif way == "hang":
            time.sleep(60)
        elif way == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif way == "weights":
            raise LocalqError("model", "non-finite logits at token 3", "Try other weights.", ExitCode.FAILURE)


if __name__ == "__main__":
    server.main(FaultyBackend, float(sys.argv[1]))

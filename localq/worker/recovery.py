"""Recovery after the engine process dies: is the GPU still there, may a new process start, may it serve?

A CUDA error makes a process useless, so the cure is a new process. But faulty hardware can give wrong answers without
an error, and a process that dies at every start would loop forever. Hence: at most one restart within RESTART_S, only
while the driver reaches a GPU, with the load that worked before, and no reply until the new process has continued a
known prompt (the canary) exactly as the old one did. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from localq.errors import ExitCode, LocalqError
from localq.worker.messages import DOCTOR, GPU, PROCESS, Generate, Load, Loaded

RESTART_S = 60.0
CANARY_ID = 0  # of its reply; sessions count from 1
CANARY_PROMPT, CANARY_TOKENS = 8, 8

CanaryResult = tuple[object, ...]  # the canary's ids and reason of its end, or the text of its error


@dataclass(frozen=True)
class _Reference:
    """A load that worked: its request, its result, and its canary."""

    request: Load
    loaded: Loaded
    outcome: CanaryResult


def why_lost() -> str:
    """Return `probe.why_lost()`, imported on use."""
    from localq.worker import probe  # start-up cost: NVML and libcuda, rarely needed

    return probe.why_lost()


class Recovery:
    """The rules of restarts for one client; clock: monotonic seconds; lost: as `probe.why_lost`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, lost: Callable[[], str] = why_lost) -> None:
        self._clock, self._lost = clock, lost
        self._died = False  # and no load is confirmed since
        self._on_gpu = False  # the dead process used one
        self._restarted: float | None = None
        self._reference: _Reference | None = None

    def after(self, death: LocalqError, on_gpu: bool) -> LocalqError:
        """Record the death of the process; returns the error to raise: `death`, or that the GPU is lost."""
        self._died, self._on_gpu = True, self._on_gpu or on_gpu
        return (self._device_error(str(death)) if on_gpu else None) or death

    def permit(self, request: Load) -> Load:
        """Return what a new process loads. Raises LocalqError where none may start now."""
        if not self._died:
            return request
        now = self._clock()
        if self._restarted is not None and now - self._restarted < RESTART_S:
            wait = f"Wait {RESTART_S - (now - self._restarted):.0f} s; the conversation is safe."
            why = f"failed again within {RESTART_S:.0f} s of a restart"
            raise LocalqError(PROCESS, why, f"{wait} {DOCTOR}")
        if self._on_gpu and (gone := self._device_error()) is not None:
            raise gone
        self._restarted = now
        return self._pin(request)

    def confirm(self, request: Load, loaded: Loaded, canary: Callable[[], CanaryResult]) -> None:
        """Confirm the load of `request`: on a GPU run the canary and, after a death, compare it.

        Raises LocalqError (exit 7) where it differs: the process must not serve.
        """
        if loaded.device == "cuda":
            outcome, known = canary(), self._reference
            if self._died and known is not None and known.request == request and known.outcome != outcome:
                why = "a known prompt produces a different reply after the restart, so results cannot be trusted"
                step = f"Restart the machine. {DOCTOR} The conversation is safe."
                raise LocalqError(GPU, why, step, ExitCode.NO_DEVICE)
            self._reference = _Reference(request, loaded, outcome)
        self._died = self._on_gpu = False

    def _device_error(self, cause: str = "") -> LocalqError | None:
        why = self._lost()
        if not why:
            return None
        step = "Restart the machine, or reseat the card; `localq chat --continue` resumes the conversation."
        return LocalqError(
            GPU, f"the GPU was lost because {why}{f' (after {cause})' if cause else ''}", step, ExitCode.NO_DEVICE
        )

    def _pin(self, request: Load) -> Load:
        """Return `request` with the choices of the earlier load: the same memory, and the same bits for the canary."""
        known = self._reference
        if known is None or known.request != request:
            return request
        was = known.loaded
        options = replace(
            request.options,
            device=was.device,
            dtype=was.dtype,
            ctx=was.context_size,
            kv_bits=was.kv_bits,
            embed=was.embed,
            head=was.head,
        )
        return replace(request, options=options)


def canary_request(loaded: Loaded) -> Generate:
    """Return the canary: ids from all over the vocabulary, continued greedily."""
    prompt = [loaded.vocab_size * place // (CANARY_PROMPT + 1) for place in range(1, CANARY_PROMPT + 1)]
    return Generate(CANARY_ID, prompt, max_tokens=CANARY_TOKENS)

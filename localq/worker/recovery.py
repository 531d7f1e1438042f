"""What follows a dead engine process: is the GPU still there, may a successor start, and may it serve?

A CUDA error leaves a process useless, so the cure is a new process. But one on hardware that has gone wrong can give
wrong answers with a healthy face, and one that dies whenever it starts would never stop. Hence: at most one restart
within RESTART_S, only while the driver reaches a GPU, with the load that worked before, and no reply until the new
process has continued a known prompt (the canary) exactly as the old one did. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from localq.errors import ExitCode, LocalqError
from localq.worker.messages import Generate, Load, Loaded

RESTART_S = 60.0
CANARY_ID = 0  # of its reply; sessions count from 1
CANARY_PROMPT, CANARY_TOKENS = 8, 8

Outcome = tuple[object, ...]  # what came of the canary: ids and the reason of its end, or the words of its failure


@dataclass(frozen=True)
class _Reference:
    """A load that worked: what was asked, what came of it, and how it continued the canary."""

    request: Load
    loaded: Loaded
    outcome: Outcome


def why_lost() -> str:
    """See `probe.why_lost`."""
    from localq.worker import probe  # start-up cost: NVML and libcuda, for hardly anybody

    return probe.why_lost()


class Recovery:
    """The rules of restarts, for one client. clock: monotonic seconds; lost: as `probe.why_lost`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, lost: Callable[[], str] = why_lost) -> None:
        self._clock, self._lost = clock, lost
        self._died = False  # and nothing has been confirmed since
        self._on_gpu = False  # what died since had used one
        self._restarted: float | None = None
        self._reference: _Reference | None = None

    def after(self, death: LocalqError, on_gpu: bool) -> LocalqError:
        """Remember that the process died; the error to raise: `death`, or that the GPU is lost."""
        self._died, self._on_gpu = True, self._on_gpu or on_gpu
        return (self._gone(str(death)) if on_gpu else None) or death

    def permit(self, request: Load) -> Load:
        """Called before a process starts: what it shall load. Raises LocalqError where none may start now."""
        if not self._died:
            return request
        now = self._clock()
        if self._restarted is not None and now - self._restarted < RESTART_S:
            wait = f"Wait {RESTART_S - (now - self._restarted):.0f} s; the conversation is kept."
            why = f"it failed again within {RESTART_S:.0f} s of its restart"
            raise LocalqError("engine process", why, f"{wait} `localq doctor` shows what is wrong.")
        if self._on_gpu and (gone := self._gone()) is not None:
            raise gone
        self._restarted = now
        return self._pinned(request)

    def confirm(self, request: Load, loaded: Loaded, canary: Callable[[], Outcome]) -> None:
        """Called when `request` is loaded: on a GPU, continue the canary and, after a death, compare.

        Raises LocalqError (exit 7) where it differs: the process must not serve.
        """
        if loaded.device == "cuda":
            outcome, known = canary(), self._reference
            if self._died and known is not None and known.request == request and known.outcome != outcome:
                why = "the new engine process continues a known prompt otherwise than before: it cannot be trusted"
                step = "Restart the machine; `localq doctor` shows what is wrong. The conversation is kept."
                raise LocalqError("GPU", why, step, ExitCode.NO_DEVICE)
            self._reference = _Reference(request, loaded, outcome)
        self._died = self._on_gpu = False

    def _gone(self, cause: str = "") -> LocalqError | None:
        why = self._lost()
        if not why:
            return None
        step = "Restart the machine, or re-seat the card; `localq chat --continue` goes on with what was saved."
        return LocalqError("GPU", f"it is lost: {why}{f' (after {cause})' if cause else ''}", step, ExitCode.NO_DEVICE)

    def _pinned(self, request: Load) -> Load:
        """`request` with everything decided as before: the same memory, and the same bits for the canary."""
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
    """Ids from all over the vocabulary, to be continued greedily."""
    prompt = [loaded.vocab_size * place // (CANARY_PROMPT + 1) for place in range(1, CANARY_PROMPT + 1)]
    return Generate(CANARY_ID, prompt, max_tokens=CANARY_TOKENS)

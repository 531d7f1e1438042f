"""What bytes that come in tell: how many were here before, how fast the others come, how long the rest takes.

Pure arithmetic over (bytes done, bytes in total) as `OnProgress` gets them; the clock is the caller's.
"""

from __future__ import annotations

import collections

LEAP_BYTES = 2**20  # more than one piece of a transfer has: what leaps was here before
WINDOW_S = 10.0  # the rate is of the last so many seconds


class ResumedBytes:
    """Bytes that were here before the transfer began. Must see every count of it."""

    def __init__(self) -> None:
        self._done = self._total = self._here = 0

    def update(self, done: int, total: int) -> int:
        """The bytes of `done` that did not come in just now."""
        if total != self._total:  # another batch of files, counted from its own beginning
            self._done, self._total, self._here = 0, total, 0
        step, self._done = done - self._done, done
        if step > LEAP_BYTES:
            self._here += step
        elif step < 0:  # a file is begun again
            self._here = max(0, self._here + step)
        return self._here


class TransferRate:
    """Bytes per second over the last `WINDOW_S`, and what that means for the rest."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def update(self, now_s: float, came_in: int) -> None:
        """`came_in`: bytes in all; fewer than before begin anew."""
        if self._seen and came_in < self._seen[-1][1]:
            self._seen.clear()
        if self._seen and came_in == self._seen[-1][1] and len(self._seen) > 1:
            return  # nothing came: `quiet_s` counts on
        self._seen.append((now_s, came_in))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > WINDOW_S:
            self._seen.popleft()

    def bytes_per_s(self, now_s: float) -> float | None:
        """None before anything can be told, and where nothing came for as long as the window."""
        if len(self._seen) < 2 or self.quiet_s(now_s) >= WINDOW_S:
            return None
        (first_s, first), (_, last) = self._seen[0], self._seen[-1]
        return (last - first) / max(now_s - first_s, 1e-3)

    def left_s(self, now_s: float, missing: int) -> float | None:
        """Seconds for `missing` bytes at this rate."""
        rate = self.bytes_per_s(now_s)
        return missing / rate if rate else None

    def quiet_s(self, now_s: float) -> float:
        """Seconds since the last byte."""
        return now_s - self._seen[-1][0] if self._seen else 0.0

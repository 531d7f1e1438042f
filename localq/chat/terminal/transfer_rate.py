"""Rate and remaining time of a transfer, without the bytes that were on disk before it began.

Pure arithmetic over (bytes done, total bytes) as `OnProgress` gets them; the clock is the caller's.
"""

from __future__ import annotations

import collections

LEAP_BYTES = 2**20  # a larger step than a transfer makes: these bytes were on disk before
WINDOW_S = 10.0  # the rate is an average over this time


class ResumedBytes:
    """Counts the bytes that were on disk before the transfer began; needs every progress event."""

    def __init__(self) -> None:
        self._done = self._total = self._here = 0

    def update(self, done: int, total: int) -> int:
        """Return how many of the bytes `done` were on disk before."""
        if total != self._total:  # another set of files, counted from zero
            self._done, self._total, self._here = 0, total, 0
        step, self._done = done - self._done, done
        if step > LEAP_BYTES:
            self._here += step
        elif step < 0:  # a file is fetched again
            self._here = max(0, self._here + step)
        return self._here


class TransferRate:
    """Bytes per second over the last `WINDOW_S`, and the time for the rest."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def update(self, now_s: float, came_in: int) -> None:
        """Add the total of received bytes; a smaller total than before starts over."""
        if self._seen and came_in < self._seen[-1][1]:
            self._seen.clear()
        if self._seen and came_in == self._seen[-1][1] and len(self._seen) > 1:
            return  # nothing new: `quiet_s` keeps growing
        self._seen.append((now_s, came_in))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > WINDOW_S:
            self._seen.popleft()

    def bytes_per_s(self, now_s: float) -> float | None:
        """The rate; None before two events, and after a pause as long as the window."""
        if len(self._seen) < 2 or self.quiet_s(now_s) >= WINDOW_S:
            return None
        (first_s, first), (_, last) = self._seen[0], self._seen[-1]
        return (last - first) / max(now_s - first_s, 1e-3)

    def remaining_s(self, now_s: float, missing: int) -> float | None:
        """Seconds for `missing` bytes at the current rate."""
        rate = self.bytes_per_s(now_s)
        return missing / rate if rate else None

    def quiet_s(self, now_s: float) -> float:
        """Seconds since the last byte."""
        return now_s - self._seen[-1][0] if self._seen else 0.0

"""Garbage collection of the line chat: once after each reply, without the objects of the start.

Each prompt leaves reference cycles of prompt_toolkit (event loops, screens) and tuples that CPython 3.11 keeps to use
again, 2,000 of each length. A full collection frees both, but CPython begins one only after some 400 replies, because
it counts 60,000 objects of the start that never die: until then memory grows by 2 kB a reply.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def collect_between() -> Iterator[Callable[[], None]]:
    """Yield the function that frees garbage; call it after a reply.

    The first call takes 0.02 s and freezes what is left, the modules that a reply needs among it, so that later ones
    take 0.001 s; at the end that is undone. Where another has frozen objects, that stays as it is.
    """
    frozen = gc.get_freeze_count() > 0
    ours = False

    def collect() -> None:
        nonlocal frozen, ours
        gc.collect()
        if not frozen:
            gc.freeze()
            frozen = ours = True

    try:
        yield collect
    finally:
        if ours:
            gc.unfreeze()

"""Signals that come while a large library is imported: they end the command, whatever the library makes of them.

A KeyboardInterrupt inside such an import may be swallowed, or come out as an ImportError: the end raises it again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

LIBRARIES = frozenset({"torch", "transformers", "numpy", "safetensors", "tokenizers", "gguf", "rich", "prompt_toolkit"})
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ImportGuard:
    """A finder before all others that lets `LIBRARIES` be imported under watch."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None  # by a handler, in the current import
        self._depth = 0

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the other finders have for a library; None for everything else."""
        if name not in LIBRARIES or threading.current_thread() is not threading.main_thread():
            return None
        found = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._watched(spec.loader.exec_module)  # type: ignore[method-assign, assignment]
        return spec

    def _watched(self, run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            with self._watch():
                run(module)

        return exec_module

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        handlers = ((number, signal.getsignal(number)) for number in SIGNALS)
        before = {number: handler for number, handler in handlers if callable(handler)}
        self._depth += 1
        try:
            for number, handler in before.items():
                signal.signal(number, self._noting(handler))
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._depth -= 1
            raised, self._raised = self._raised, self._raised if self._depth else None
            if raised is not None:
                raise raised from None

    def _noting(self, handler: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                self._raised = error
                raise

        return handle


def install() -> None:
    """Watch the imports of this process; a second guard would ask the first without an end."""
    if not any(isinstance(each, ImportGuard) for each in sys.meta_path):
        sys.meta_path.insert(0, ImportGuard())

"""The progress of measuring sensitivities (`model/sensitivity.py`), on disk, so that a killed measuring resumes.

The folder of the conversion holds, for every layer that the text has passed, its inputs in the traced windows and the
energies of its weights (`conversion.measured-00007.safetensors`); and in `FILE` the text after the last of them, or in
the backward pass gradients and prices. Files are written atomically, that of a layer before the text after it, and
deleted once their prices are known: a kill leaves finished steps, or one to repeat. The host holds none of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localq.disk import check_free
from localq.quantize.output.resume_files import ResumeFiles

FILE = "conversion.measuring.safetensors"
_LAYER = "conversion.measured-{:05d}.safetensors"
_LAYERS = "conversion.measured-*.safetensors"


@dataclass
class MeasuringState:
    """The state of a measuring.

    layer   the next one of the forward pass, or with `back` of the backward pass
    rows    by window, the text before that layer, or the gradients; [T, hidden] on the CPU
    prices  of the layers after it, from the last one; empty in the forward pass
    """

    rows: list[Tensor]
    layer: int = 0
    back: bool = False
    prices: list[list[float]] = field(default_factory=list)


class SensitivityLog:
    """The files of the measuring in `folder` for the conversion `job`."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self._folder, self._kept = folder, ResumeFiles(folder, job)

    def begin(self, rows: list[Tensor], traced: int, layers: int) -> MeasuringState:
        """Start at the first layer. Raises LocalqError (exit 9) where the disk is too small for the traced inputs."""
        self.clear()
        size = rows[0].nbytes
        check_free(self._folder, (2 * len(rows) + layers * traced) * size, str(self._folder))  # a text replaces another
        return MeasuringState(rows)

    def resume_state(self) -> MeasuringState | None:
        """Return the state that a killed measuring left; None to start at the beginning."""
        read = self._kept.read(FILE)
        if read is None:
            return None
        state, tensors = read
        point = MeasuringState(_apart(tensors["rows"]), state["layer"], state["back"], state["prices"])
        needed = range(point.layer + 1 if point.back else point.layer)
        return point if all(self._kept.read(_LAYER.format(layer), "energies") for layer in needed) else None

    def record_layer(self, layer: int, read: list[Tensor], energies: list[Tensor], text: list[Tensor]) -> None:
        """Record that the text has passed a layer. read: inputs by traced window; energies: f64 [rows] by group."""
        tensors = {"read": torch.stack(read), "energies": torch.cat(energies)}
        self._kept.write(_LAYER.format(layer), tensors, {"rows": [len(each) for each in energies]})
        self.reach(MeasuringState(text, layer + 1))

    def layer(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return `read` and `energies` of a layer that the text has passed."""
        read = self._kept.read(_LAYER.format(layer))
        assert read is not None
        state, tensors = read
        return _apart(tensors["read"]), _apart(torch.split(tensors["energies"], state["rows"]))

    def reach(self, point: MeasuringState) -> None:
        """Record the state; in the backward pass the files of later layers are deleted."""
        state = {"layer": point.layer, "back": point.back, "prices": point.prices}
        self._kept.write(FILE, {"rows": torch.stack(point.rows)}, state)
        if point.back:
            (self._folder / _LAYER.format(point.layer + 1)).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all files of the measuring."""
        for path in (self._folder / FILE, *self._folder.glob(_LAYERS)):
            path.unlink(missing_ok=True)


def _apart(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Clone each: alignment changes the order of sums, so views of a file would change the result."""
    return [each.clone() for each in tensors]

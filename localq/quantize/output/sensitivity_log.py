"""How far the measuring of a mixture has come (`sensitivity.py`), on the disk: a killed one goes on from there.

While it lasts, the folder of the conversion holds of every layer that the text went through what that read of the
traced windows and what its weights count (`conversion.measured-00007.safetensors`), and the text behind the last of
them; on the way back, in the place of the text, slopes and prices (`FILE`). Every file is placed whole, that of a layer
before the text behind it, and removed when the prices that it is needed for are there: what a kill leaves is a step
that is done, or one that is done again (`kept.py`). Nothing of it is on the host meanwhile.
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
    """Where a measuring is.

    layer   the next one that the text, or on the way `back` the slopes, go through
    rows    by window what the text is there, or the slopes; [T, hidden] on the CPU
    prices  of the layers behind, from the last one on; empty on the way there
    """

    rows: list[Tensor]
    layer: int = 0
    back: bool = False
    prices: list[list[float]] = field(default_factory=list)


class SensitivityLog:
    """What lies in `folder` of the measuring for the conversion `job`."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self._folder, self._kept = folder, ResumeFiles(folder, job)

    def begin(self, rows: list[Tensor], traced: int, layers: int) -> MeasuringState:
        """Raises LocalqError (exit 9) where the disk is too small for what `traced` of `rows` are in so many layers."""
        self.clear()
        size = rows[0].nbytes
        check_free(self._folder, (2 * len(rows) + layers * traced) * size, str(self._folder))  # a text replaces another
        return MeasuringState(rows)

    def found(self) -> MeasuringState | None:
        """Where a killed measuring was; None for the beginning."""
        read = self._kept.read(FILE)
        if read is None:
            return None
        state, tensors = read
        point = MeasuringState(_apart(tensors["rows"]), state["layer"], state["back"], state["prices"])
        needed = range(point.layer + 1 if point.back else point.layer)
        return point if all(self._kept.read(_LAYER.format(layer), "energies") for layer in needed) else None

    def passed(self, layer: int, read: list[Tensor], energies: list[Tensor], text: list[Tensor]) -> None:
        """The text has gone through a layer. read: by traced window; energies: f64 [rows] by group."""
        tensors = {"read": torch.stack(read), "energies": torch.cat(energies)}
        self._kept.write(_LAYER.format(layer), tensors, {"rows": [len(each) for each in energies]})
        self.reach(MeasuringState(text, layer + 1))

    def layer(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """`read` and `energies` of one that was passed, whose file `found` or `passed` has seen."""
        read = self._kept.read(_LAYER.format(layer))
        assert read is not None
        state, tensors = read
        return _apart(tensors["read"]), _apart(torch.split(tensors["energies"], state["rows"]))

    def reach(self, point: MeasuringState) -> None:
        """Record it; layers behind it on the way back are not needed any more."""
        state = {"layer": point.layer, "back": point.back, "prices": point.prices}
        self._kept.write(FILE, {"rows": torch.stack(point.rows)}, state)
        if point.back:
            (self._folder / _LAYER.format(point.layer + 1)).unlink(missing_ok=True)

    def clear(self) -> None:
        """Nothing of it is needed any more."""
        for path in (self._folder / FILE, *self._folder.glob(_LAYERS)):
            path.unlink(missing_ok=True)


def _apart(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each where torch would have put it: sums come in another order where memory begins elsewhere."""
    return [each.clone() for each in tensors]

"""Tensors that a conversion keeps on the disk while it lasts, so that a killed one goes on from there.

Every file is placed whole and says which conversion it belongs to; those of another one, and unsound ones, count as
none.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from localq.quantize.output.shards import write_file


class Kept:
    """Files in `folder` of the conversion `job`."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.folder = folder
        self._job = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()

    def write(self, name: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Replace the file `name`. Raises LocalqError (exit 9) where the disk does not take it."""
        facts = {"job": self._job, "state": json.dumps(state), "sha256": _sha256(tensors)}
        write_file(self.folder / name, save(tensors, facts))

    def read(self, name: str, *only: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """State and tensors, or `only` some of them; None where it is not there, not sound, or of another job.

        That no byte has changed is seen where all of it is read.
        """
        try:
            with safe_open(self.folder / name, framework="pt") as file:
                facts = file.metadata() or {}
                if facts.get("job") != self._job:
                    return None
                tensors = {key: file.get_tensor(key) for key in only or file.keys()}
                sound = bool(only) or facts.get("sha256") == _sha256(tensors)
                return (json.loads(facts["state"]), tensors) if sound else None
        except (OSError, SafetensorError, ValueError, KeyError):
            return None


def _sha256(tensors: dict[str, Tensor]) -> str:
    """Of the bytes of all, by name."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()

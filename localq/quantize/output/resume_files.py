"""Files that a conversion resumes from: tensors and state, kept on disk while it runs.

Every file is written atomically and names its conversion; files of another one, and damaged ones, are ignored.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from localq.errors import LocalqError
from localq.files.safetensors_headers import read_header
from localq.formats.tensor_files import each_tensor
from localq.quantize.output.shards import write_file


class ResumeFiles:
    """The resume files in `folder` of the conversion `job`."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.folder = folder
        self._job = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()

    def write(self, name: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Replace the file `name`. Raises LocalqError (exit 9) where the disk refuses it."""
        facts = {"job": self._job, "state": json.dumps(state), "sha256": _sha256(tensors)}
        write_file(self.folder / name, save(tensors, facts))

    def read(self, name: str, *only: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Read state and tensors, or `only` some; None for a file that is missing, damaged, or of another job.

        The hash is checked only where all tensors are read.
        """
        try:
            header = read_header(self.folder / name)
            facts = header.metadata
            if facts.get("job") != self._job:
                return None
            tensors = dict(each_tensor(header, only or None))
            sound = bool(only) or facts.get("sha256") == _sha256(tensors)
            return (json.loads(facts["state"]), tensors) if sound else None
        except (LocalqError, ValueError, KeyError, RecursionError):
            return None


def _sha256(tensors: dict[str, Tensor]) -> str:
    """Return the hash of all tensors' bytes, in the order of names."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()

"""Conversions that tests share: a small shard size, the digest of a folder, a finished conversion."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from localq.files.model_folder import open_model
from localq.files.publish.record import RECORD_NAME
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from localq.wording import OnProgress, Say

SHARD = 60_000  # bytes: the tiny models become five shards and more


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def model_digests(folder: Path) -> dict[str, str]:
    """`digests` of all but the record of the command, which differs where two commands make the same model."""
    sums = [line for line in (folder / "localq.sha256").read_text().splitlines() if not line.endswith(RECORD_NAME)]
    found = {name: digest for name, digest in digests(folder).items() if name != RECORD_NAME}
    return {**found, "localq.sha256": "\n".join(sums)}


def quantized(
    source: Path, out: Path, on_progress: OnProgress | None = None, say: Say | None = None, **options: Any
) -> Path:
    request = TensorwiseRequest(open_model(source), "nf4", out, shard_bytes=SHARD, **options)
    return by_tensor.convert(request, on_progress, say)


def kill_after(process: int, seconds: float) -> None:
    """SIGKILL to a child once it has had so much processor time, unless it ends before: whatever else runs here."""
    clock = ~process << 3 | 2  # Linux: of another process
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.clock_gettime(clock) >= seconds:
            os.kill(process, signal.SIGKILL)
            return
        time.sleep(0.001)

"""Turn a name into files that can be loaded: found, downloaded, or quantized here once.

Torch-free. Quantizing runs as `localq quantize` in a separate process: the front end loads no torch, and after a kill
that process can resume.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from localq import disk, places, processes
from localq.errors import ExitCode, LocalqError, bad_file, usage_error
from localq.files import catalog, format_facts, verification
from localq.files.hub import client as hub_client
from localq.files.hub import fetch as hub
from localq.wording import OnProgress, Say

POLL_S = 0.2  # interval of checks on the quantizing process


def model_path(
    target: catalog.Target, say: Say, on_progress: OnProgress | None = None, offline: bool = False, *,
    mend: bool = False,
) -> Path:  # fmt: skip
    """The folder or .gguf file of `target`, downloaded or quantized if need be. Its recorded hashes are right.

    say    gets lines for the user
    mend   replace a damaged embedded model, and quantize a damaged one that was made here again, instead of refusing it
    """
    if target.path is not None:
        verification.refuse_damaged(target.path, target.name if target.store else str(target.path), on_progress)
        return target.path
    if target.source is not None:
        return hub.fetch(target.source, on_progress, offline=offline, mend=mend)
    if target.repo is not None:
        return hub.fetch_repo(target.repo, target.revision, on_progress, offline=offline, choice=target.choice)
    made_here = hub.local_path(target)
    if made_here is not None and not (mend and damage(target, on_progress) is not None):
        verification.refuse_damaged(made_here, target.name, on_progress)
        return made_here
    return _quantized_here(target, say, on_progress, offline, again=made_here is not None)


def damage(target: catalog.Target, on_progress: OnProgress | None = None) -> LocalqError | None:
    """The error for a damaged file of a model that was quantized here; None for any other model."""
    made_here = hub.local_path(target) if target.base is not None and target.source is None else None
    return None if made_here is None else verification.find_damage(made_here, target.name, on_progress)


def source_path(name: str, say: Say, on_progress: OnProgress | None = None, offline: bool = False) -> Path:
    """`model_path` for a name."""
    return model_path(catalog.resolve(name), say, on_progress, offline)


def remote_source(name: str, offline: bool = False) -> catalog.Source | None:
    """The repository from whose safetensors `name` would be made; None if it is here, quantized here, or in GGUF."""
    target = catalog.resolve(name)
    if offline or hub_client.is_offline() or hub.local_path(target) is not None:
        return None
    if target.repo is not None:
        return None if target.choice else hub.repo_source(target)
    return target.source


def check_can_make(format: str, source: str = "") -> None:
    """Check that `format` can be quantized here from `source`, a name or path.

    Raises LocalqError: exit 7 if it needs compiled kernels that were not built, 2 if a model of the catalogue does not
    support it.
    """
    made = format_facts.writable().get(format)
    if made is None or made.made_from != "text":
        return
    entry = catalog.resolve(source).entry if source else None
    if entry is not None and entry.arch.traits.interleaved_experts:
        raise usage_error(source, format_facts.NO_SEARCH_OF_EXPERTS, "Use --format nf4.")
    if importlib.util.find_spec("localq._C") is None:
        raise cannot_search(format, "this installation was built without it")


def cannot_search(format: str, why: str) -> LocalqError:
    """The error (exit 7) for a format that needs the compiled search. why: why there is none."""
    ways = "Reinstall localq with a C++ compiler (and nvcc for a GPU), or use --format nf4."
    return LocalqError(
        f"--format {format}", f"quantizing to this format requires compiled code, but {why}", ways, ExitCode.NO_DEVICE
    )


def ready_layers(target: catalog.Target) -> Path | None:
    """The packaged folder of a model's quantized layers, or None (`localq.quantize.prequantized_layers`)."""
    from localq.planner import making  # start-up cost: only for what is quantized here

    if target.entry is None or not making.has_layers(target.entry.name, target.format or ""):
        return None
    return places.PACKAGE_DATA / f"{target.entry.name}-{target.format}"


def _quantized_here(
    target: catalog.Target, say: Say, on_progress: OnProgress | None, offline: bool, *, again: bool = False
) -> Path:
    """Quantize `target`, unless it was interrupted: then go on. again: replace a damaged model."""
    from localq.planner import making  # start-up cost, as above

    if target.base is None or target.format is None:
        raise bad_file(
            target.name, "there are no weights to download or quantize", "`localq show` lists the model's sources."
        )
    ready = ready_layers(target)
    if ready is None:
        check_can_make(target.format)
    out = places.quantized_dir() / target.name
    origin = target.base.repo or target.base.package
    time = making.estimate(target.format, target.entry.arch.parameters if target.entry else 0)
    took, why = ("a few seconds", "; localq includes its quantized layers") if ready else (time, "")
    say(
        f"{target.name}: these weights are not published, so localq quantizes {origin} once "
        f"({took} after the download{why}). The result is saved in {out}; `localq rm {target.name}` removes it."
    )
    source = hub.fetch(target.base, on_progress, offline=offline)
    # --force replaces an interrupted conversion in that folder, or a damaged model.
    more = ("--layers", str(ready), "--force") if ready else ("--force",) if again else ()
    quantize(target.name, source, target.format, out, on_progress, more)
    return out


def quantize(
    name: str, source: Path, format: str, out: Path, on_progress: OnProgress | None = None, more: Sequence[str] = ()
) -> None:
    """Run `localq quantize SOURCE --format FORMAT --out OUT` in a separate process, with `more` options.

    Raises LocalqError about `name`, with that command's exit code.
    """
    # -P: the current folder must not provide modules.
    localq = [sys.executable, "-P", "-m", "localq"]
    command = [*localq, "quantize", str(disk.resolve(source)), "--format", format, "--out", str(out), *more]
    code, last_line = _run(command, on_progress)
    if code != 0:
        again = f"{'' if last_line else 'See the error above. '}Run the same command again to resume."
        known = code in ExitCode.__members__.values()
        why = f"quantization failed{f': {last_line}' if last_line else ''}"
        raise LocalqError(name, why, again, ExitCode(code) if known else ExitCode.FAILURE)


def _run(command: list[str], on_progress: OnProgress | None) -> tuple[int, str]:
    """Run `command`, which prints progress on stderr: (exit code, last line unless it was shown).

    With a stderr the process prints there itself. Under a full screen there is none: its lines go to `on_progress`, and
    an exception of `on_progress` ends the process.
    """
    environment = processes.child_environment()
    if _has_stderr():
        shown = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, check=False)
        return shown.returncode, ""
    lines: collections.deque[str] = collections.deque([""], maxlen=1)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        errors="replace", env=environment,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        reader = threading.Thread(target=_read_lines, args=(process.stderr, lines), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                if on_progress is not None:
                    on_progress(lines[-1] or "quantizing", 0, 0)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            process.terminate()
            reader.join()
    return process.returncode, lines[-1]


def _read_lines(stream: IO[str], lines: collections.deque[str]) -> None:
    for line in stream:
        if line.strip():
            lines.append(line.strip())


def _has_stderr() -> bool:
    try:
        return sys.stderr.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False

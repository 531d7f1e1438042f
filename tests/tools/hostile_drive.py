"""Takes malformed model folders through the product, in a process that records what it touches.

`python -m tests.tools.hostile_drive` drives the corpus of `hostile_models` and prints one JSON line per case;
`--fuzz COUNT --seed SEED` then drives mutations of sound files (`mutations`) and prints those that misbehave, and
`--no-corpus` leaves it at these. A case goes
the way of `localq show` (catalogue, folder, architecture), then that of `localq run` on the CPU: configuration,
tokenizer, prompt, headers, weights. Python's audit events tell what was opened, imported and run; the one library that
opens files without Python (safetensors) is recorded by the path that it is given.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.files.hostile_models import FORMATS, Case, cases, write_sound

PROMPT = "a" * 40 + " héllo x <s> hello " + "a" * 400
SETTINGS = "/nonexistent"  # where settings would be
SYSTEM = ("/proc/", "/sys/", "/dev/null", SETTINGS)  # free memory is read there; nothing of the user's
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")  # asked for the card's memory, and found by the system's rules
FORBIDDEN = ("exec", "compile", "import", "socket", "subprocess", "os.exec", "os.system", "os.posix_spawn", "os.fork",
             "pickle.find_class", "ctypes.dlopen", "urllib", "http", "shutil", "webbrowser")  # fmt: skip


class Recorder:
    """Audit events while `folder` is set: what lies outside of it, and everything that runs or connects."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            self.opened(arguments[0])
        elif event == "ctypes.dlopen" and arguments[0] in DRIVER:
            return
        elif event.split(".")[0] in FORBIDDEN or event in FORBIDDEN:
            self.seen.append(f"{event} {arguments!r:.200}")

    def opened(self, path: Any) -> None:
        """A file that is about to be opened."""
        if isinstance(path, int) or self.folder is None:
            return
        text = os.path.realpath(os.fsdecode(path))
        if not text.startswith((f"{self.folder}/", *SYSTEM)):
            self.seen.append(f"open {text!r}")

    @contextlib.contextmanager
    def watching(self, folder: Path) -> Iterator[list[str]]:
        """The list of what was seen within."""
        self.seen, self.folder = [], folder
        try:
            yield self.seen
        finally:
            self.folder = None


def record_safetensors(recorder: Recorder) -> None:
    """Its files are opened in Rust, which no audit event tells."""
    import safetensors

    opens = safetensors.safe_open

    def recorded(path: str, *arguments: Any, **keywords: Any) -> Any:
        recorder.opened(path)
        return opens(path, *arguments, **keywords)

    safetensors.safe_open = recorded


def drive(folder: Path) -> None:
    """What `localq run` does with a model folder, up to a model in memory. Raises what the product raises."""
    from localq.engine.load.load import load
    from localq.files.architecture import Architecture
    from localq.files.model_folder import open_model
    from localq.planner.load_options import LoadOptions
    from localq.sampling import Sampling
    from localq.text.tokenizer import Tokenizer

    files = open_model(folder)
    Sampling.from_generation_config(files.generation_config)
    tokenizer = Tokenizer.load(files)
    tokenizer.prompt_ids(PROMPT)
    tokenizer.stream().push(range(300))
    Architecture.from_config(files.config)
    load(files, LoadOptions(device="cpu", dtype="float32", ctx=64))


def show(folder: Path) -> None:
    """`localq show FOLDER`, both ways of printing."""
    from localq.cli.verbs.show import show

    for as_json in (True, False):
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
            show(str(folder), json=as_json)


def run_case(case: Case, recorder: Recorder, room: Path) -> dict[str, Any]:
    """One case, in a folder of its own: what came of it."""
    from localq.errors import LocalqError

    folder = write_sound(room / "model", case.format)
    case.change(folder)
    before = _peak_bytes()
    outcome: dict[str, Any] = {"case": case.name, "wanted": case.exit_code}
    with recorder.watching(folder.resolve()) as seen:
        for name, action in (("show", show), ("run", drive)):
            started, used = time.perf_counter(), time.process_time()
            code: int | None = 0
            text = ""
            try:
                action(folder)
            except LocalqError as error:
                code, text = int(error.exit_code), str(error)
            except BaseException as error:
                code, text = None, f"{type(error).__name__}: {error!s:.300}"
            clocks = {f"{name}_s": time.perf_counter() - started, f"{name}_cpu_s": time.process_time() - used}
            outcome |= {name: code, **clocks}
            outcome |= {f"{name}_text": text[:300], f"{name}_characters": len(text)}
    outcome |= {"seen": list(seen), "peak_bytes": _peak_bytes() - before, "ran": (room / "ran").exists()}
    return outcome


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def workroom() -> Iterator[tuple[Recorder, Path]]:
    """A recorder and an empty folder, with everything imported that a sound model needs, and errors too."""
    import localq.text.tokenizer

    localq.text.tokenizer.MAX_SECONDS = 0.5  # a corpus has many texts that never end
    os.environ["LOCALQ_CONFIG"] = os.environ["HF_HUB_CACHE"] = os.environ["LOCALQ_DATA"] = SETTINGS
    recorder, top = Recorder(), Path(tempfile.mkdtemp())
    try:
        record_safetensors(recorder)
        for format in FORMATS:
            folder = write_sound(top / "warm" / format, format)
            show(folder)
            drive(folder)
        gc.freeze()  # a failed load collects garbage; all that was imported is none
        yield recorder, top
    finally:
        shutil.rmtree(top)


def rooms(top: Path) -> Iterator[Path]:
    """Empty folders, each gone before the next."""
    while True:
        room = top / "room"
        room.mkdir()
        yield room
        shutil.rmtree(room)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuzz", type=int, default=0, help="mutations to drive")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--no-corpus", action="store_true", help="mutations only")
    given = parser.parse_args()
    chosen = [] if given.no_corpus else [case for case in cases() if given.only in case.name]
    with workroom() as (recorder, top):
        for case, room in zip(chosen, rooms(top), strict=False):
            print(json.dumps(run_case(case, recorder, room)), flush=True)
        if given.fuzz:
            from tests.tools import mutations

            for line in mutations.campaign(given.fuzz, given.seed, recorder, top):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

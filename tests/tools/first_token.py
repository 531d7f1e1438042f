"""How long `localq run` takes to its first token where the model stays in memory: `python -m tests.tools.first_token`.

    python -m tests.tools.first_token --runs 15 --model smollm2-135m --against ../other/.venv/bin/python

The first run of each installation starts a background process (`keep_alive`), the second fills what is kept; neither
counts. --against: the Python of another installation, whose runs alternate with those of this one. --model: one that
is on this machine; without it a tiny one of random weights, so that the front end is nearly all there is.
Prints medians of the seconds from the start to the first byte of the answer (of the help, for `--help`), and of the
processor time of the whole command, its children included. Asserts nothing; last line: one JSON object, with the load
and the pace of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.cli.terminal_localq import environment
from tests.support.common import pace
from tests.support.models.tiny_checkpoints import make_checkpoint

SETTINGS = {"LOCALQ_KEEP_ALIVE": "10m", "LOCALQ_MAX_TOKENS": "1", "LOCALQ_TEMPERATURE": "0", "OMP_NUM_THREADS": "1"}


def once(python: str, environ: dict[str, str], arguments: tuple[str, ...]) -> tuple[float, float]:
    """Seconds from the start to the first byte on stdout, and of the processor."""
    begun = time.monotonic()
    started = subprocess.Popen(
        [python, "-m", "localq", *arguments], env=environ, cwd=environ["HOME"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert started.stdout is not None
    assert started.stderr is not None
    said = os.read(started.stdout.fileno(), 1)
    first_s = time.monotonic() - begun
    complaint = started.stderr.read().decode()
    _, status, used = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    started.stdout.close()
    started.stderr.close()
    if not said or started.returncode:
        raise SystemExit(f"{python} -m localq {' '.join(arguments)}: exit {started.returncode}: {complaint}")
    return first_s, used.ru_utime + used.ru_stime


def home_of(folder: Path) -> dict[str, str]:
    """The environment of a user with a home of their own, and with the bytecode that an installation has."""
    folder.mkdir()
    environ = environment(folder, **SETTINGS)
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        environ.pop(name, None)
    return environ


def measure(environs: dict[str, dict[str, str]], arguments: tuple[str, ...], runs: int) -> dict[str, dict[str, float]]:
    """Medians of the runs of each Python, in turn; two of each before them do not count."""
    took: dict[str, list[tuple[float, float]]] = {python: [] for python in environs}
    for _ in range(runs + 2):
        for python, environ in environs.items():
            took[python].append(once(python, environ, arguments))
    figures = {}
    for python, each in took.items():
        first, busy = (statistics.median(values) for values in zip(*each[2:], strict=True))
        figures[python] = {"first_s": round(first, 3), "processor_s": round(busy, 3)}
    return figures


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--model")
    parser.add_argument("--against", metavar="PYTHON")
    given = parser.parse_args()
    pythons = [sys.executable, *([os.path.abspath(given.against)] if given.against else [])]
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(make_checkpoint(Path(folder) / "tiny", initializer_range=0.15))
        environs = {python: home_of(Path(folder) / f"home{place}") for place, python in enumerate(pythons)}
        try:
            for arguments in (("run", model, "Hello"), ("--help",)):
                figures[arguments[0]] = measure(environs, arguments, given.runs)
                print(arguments[0], figures[arguments[0]], flush=True)
        finally:
            for python, environ in environs.items():
                stop = [python, "-m", "localq", "stop", "--all"]
                subprocess.run(stop, env=environ, stdout=subprocess.DEVNULL, check=False, timeout=60)
    python_s = round(statistics.median(pace.start_s() for _ in range(5)), 3)
    print(json.dumps({"runs": given.runs, "load": round(os.getloadavg()[0], 1), "python_s": python_s, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

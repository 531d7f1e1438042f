"""A signal inside the import of a library is never lost, nor taken for another error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localq.cli import import_guard
from localq.cli.import_guard import ImportGuard

ROOT = Path(__file__).parents[2]
LOSES = {  # what a library makes of an exception inside its import
    "passes it on": "{send}",
    "swallows it": "try:\n    {send}\n    for _ in range(1000): pass\nexcept:\n    pass\nloaded = True\n",
    "makes an ImportError of it": "try:\n    {send}\nexcept BaseException:\n    raise ImportError('x') from None\n",
    "swallows it in an import of its own": "try:\n    import numpy\nexcept BaseException:\n    pass\n",
}
PROGRAM = """
import sys
from localq.cli import command_line
def work(arguments, **options):
    import torch
    print("went on", flush=True)
command_line.app = work
command_line.run()
"""


@pytest.mark.parametrize("way", LOSES)
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_an_import_ends_the_command(tmp_path, way, name, code):
    send = f"import os, signal; os.kill(os.getpid(), signal.{name})"
    (tmp_path / "torch.py").write_text(LOSES[way].replace("{send}", send))
    (tmp_path / "numpy.py").write_text(LOSES["swallows it"].replace("{send}", send))
    done = run(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_second_run_in_one_process_imports_as_the_first(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if type(each) is not ImportGuard])
    import_guard.install()
    import_guard.install()
    assert sys.meta_path[0].find_spec("torch", None) is not None  # it ended in a RecursionError


def test_an_import_without_a_signal_is_as_ever(tmp_path):
    (tmp_path / "torch.py").write_text("import numpy\n")
    (tmp_path / "numpy.py").write_text("import signal\nassert signal.getsignal(signal.SIGINT)\n")
    assert run(tmp_path).stdout == "went on\n"
    (tmp_path / "numpy.py").write_text("raise ImportError('damaged')\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def run(libraries: Path) -> subprocess.CompletedProcess[str]:
    signal_default = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    environment = {**os.environ, "PYTHONPATH": f"{libraries}{os.pathsep}{ROOT}", "XDG_STATE_HOME": str(libraries)}
    return subprocess.run(
        [sys.executable, "-c", signal_default + PROGRAM], env=environment, capture_output=True, text=True, check=False,
        timeout=120, cwd=libraries,
    )  # fmt: skip


def test_a_ctrl_c_while_the_last_one_is_handled_ends_with_130():
    """Python would kill the process with SIGINT, which a shell takes for a crash of the whole script."""
    program = """
from localq import cli
from localq.cli import command_line
def interrupt(): raise KeyboardInterrupt
command_line.note_lost_characters = interrupt
def again(): raise KeyboardInterrupt
command_line._ignore_interrupts = again
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (130, "")

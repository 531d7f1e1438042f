"""`python -m localq.kernels.setup VERB`, in a clone; the Makefile names the verb and passes its variables."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

from localq.kernels.setup import launcher, machine, steps
from localq.kernels.setup.link import LinkError, is_on_path, make_link, remove_link
from localq.kernels.setup.progress import Display, about
from localq.kernels.setup.run import Installation, SetupError
from localq.kernels.setup.steps import SetupRecord, SetupRequest

ROOT = Path(__file__).resolve().parents[3]


def main() -> int:
    """Run the verb of the command line; returns the exit code."""
    given = _parser().parse_args()
    venv = Path(os.path.abspath(given.venv))
    program, folder = venv / "bin/localq", Path(given.bin_dir).expanduser()
    try:
        if given.verb in ("chat", "build", "test", "install"):
            _install(given, venv)
            launcher.write(program)
        if given.verb == "next":
            lines = next_lines(program, folder, bool(given.driver))
        elif given.verb == "uninstall":
            lines = remove_link(program, folder)
        else:
            lines = make_link(program, folder) if given.verb == "install" else []
    except (SetupError, LinkError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command to resume.", file=sys.stderr)
        return 128 + signal.SIGINT
    for line in lines:
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m localq.kernels.setup")
    parser.add_argument("verb", choices=("chat", "build", "test", "install", "uninstall", "next"))
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--torch", default="torch>=2.8", help="requirement")
    parser.add_argument("--torch-index", default="", help="additional package index for torch")
    parser.add_argument("--driver", default="", help="files that indicate an NVIDIA driver; empty = none")
    parser.add_argument("--nvidia-smi", default="", help="program that lists the GPUs")
    parser.add_argument(
        "--nvcc", choices=("", "pip"), default="", help="pip = install nvcc with pip even if it is already installed"
    )
    parser.add_argument("--bin-dir", default="~/.local/bin", help="folder where `install` puts the link to localq")
    return parser


def _install(given: argparse.Namespace, venv: Path) -> None:
    """Install what is missing for `make chat`, `make readme`, `make install` or `make test`. Raises SetupError."""
    request = _request(given, venv)
    usable = steps.is_usable(venv)
    lacks_pip = not usable and steps.has_python(venv)
    if lacks_pip:
        request = replace(request, python=str(venv / "bin/python"))  # adds pip for the same version of Python
    elif not usable:
        if (venv / "pyvenv.cfg").exists():
            print(f"{venv} no longer works (it was moved, or its Python was removed); recreating it.")
            shutil.rmtree(venv)
        (venv / "setup").mkdir(parents=True, exist_ok=True)
    record = SetupRecord.read(venv / "setup/record.json")
    wanted = steps.steps(request)
    if usable and "environment" not in record.keys:
        record.add(wanted[0])  # made by other means
    if lacks_pip:
        record.forget(wanted[0])
    installation = Installation(wanted, record, Display(sys.stdout, live=_is_live()))
    missing = [step for step in wanted if step.name not in installation.done]
    if not missing:
        return
    expected = installation.seconds_left()
    print(f"localq setup: {request.build.why}.")
    count = f"{len(missing)} step{'s' if len(missing) > 1 else ''}"
    print(f"{count}, about {about(expected)}; logs in {venv / 'setup'}", flush=True)
    installation.run()
    print(f"Installed in {about(installation.elapsed)}.", flush=True)
    if given.verb == "chat":
        print(f"Starting {steps.MODEL}; the first start takes about {about(steps.FIRST_START_S)}.", flush=True)


def _request(given: argparse.Namespace, venv: Path) -> SetupRequest:
    no_cuda = os.environ.get("LOCALQ_NO_CUDA", "")
    test = given.verb == "test"
    listed = machine.listed_architectures(ROOT)
    if test:
        build = machine.build_for_all(no_cuda)
    else:
        build = machine.build_for_this_machine(no_cuda, bool(given.driver), listed, given.nvidia_smi)
    own = steps.own_nvcc(venv)
    from_pip = build.kind == machine.KERNELS and (
        given.nvcc == "pip" or machine.find_nvcc(os.environ, own).path in (None, own)
    )
    return SetupRequest(
        ROOT, venv, sys.executable, given.torch, build, torch_index=given.torch_index, nvcc=from_pip, test=test
    )


def _is_live() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def next_lines(program: Path, folder: Path, driver: bool) -> list[str]:
    """Return the lines on the next steps: where localq is, how to get it on PATH, three commands."""
    link = folder / "localq"
    short = link.is_symlink() and is_on_path(folder) and link.resolve() == program.resolve()
    name = "localq" if short else str(program)
    lines = ["", f"localq is installed at {program}."]
    if not short:
        lines.append(f"Run `make install` to link it into {folder}; then you can start it with `localq`.")
    commands = [
        (
            "fit" if driver else "fit --vram 24",
            "list what fits on this card" if driver else "list what fits on a 24 GB card",
        ),
        ("chat", "chat in full-screen mode"),
        ("doctor", "check GPU, driver and kernels; show how to update"),
    ]
    return [*lines, "Next:", *(f"  {f'{name} {arguments}':<{len(name) + 16}} {what}" for arguments, what in commands)]


if __name__ == "__main__":
    sys.exit(main())

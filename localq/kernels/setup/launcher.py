"""The script `localq` of an environment, in place of pip's.

Python takes 20 ms until it runs the first line of localq, and a Ctrl-C in that time is a traceback of the interpreter.
This script blocks the signals meanwhile; `localq.cli.main` has its handlers when it lets them through.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = """#!/bin/sh
''':'
# A shell script, which Python reads as a string before the program below. It does not rely on PATH.
self=$0
[ -L "$self" ] && self=$(command -p readlink -f -- "$self")
exec /usr/bin/env --block-signal=INT --block-signal=TERM "${self%/*}/python" "$self" "$@"
'''
from localq.cli import main

main()
"""


def write(program: Path) -> bool:
    """Write the script to `program`, which pip has made; return whether it is there now.

    pip's own stays where `env` cannot block signals (GNU coreutils before 8.31), or would take the path for a variable.
    """
    if not program.exists() or "=" in str(program.resolve()) or not _blocks_signals():
        return False
    if program.read_bytes() != SCRIPT.encode():
        new = program.with_name(f".{program.name}-new")
        new.write_text(SCRIPT, encoding="utf-8")
        new.chmod(0o755)
        os.replace(new, program)
    return True


def _blocks_signals() -> bool:
    command = ["/usr/bin/env", "--block-signal=INT", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False

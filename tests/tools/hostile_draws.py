"""What hostile runs draw from: names, texts, values, commands on a model, odd files, damaged files."""

from __future__ import annotations

import os
import random
import shutil
import socket
from functools import cache
from pathlib import Path

from tests.support.cli.hostile_sequences import ACTING, random_text
from tests.support.cli.terminal_engine import Script, latin
from tests.support.cli.terminal_localq import write_model
from tests.tools.hostile_scratch import Scratch
from tests.tools.mutations import damaged_bytes

HEAVY = 0.05  # of the commands on a model: those that load torch
NUMBERS = (
    "0", "-1", "1e309", "nan", "inf", "9" * 30, "9" * 5000, "0x" + "f" * 5000, "1_0", "٣", "1.5", "", " ", "8k", "-8k",
    "max", "24GiB", "1e-400", "true", "None", "²", "2**63",
)  # fmt: skip
WORDS = (
    "", " ", "-", "--", "..", "/", "~", "~nobody-there", "@", "@/", "@/dev/null", "a" * 5000, "🦙" * 300, "a\nb",
    "%s%n", "{0}", "[red]x[/]", "[@click=app.quit]x[/]", "$(id)", "`id`", "../" * 50, "C:\\x", "con", "*", "?",
    "\ufeff",
    "ﷺ" * 50, "e\u0301" * 400, "\u200b",
)  # fmt: skip


def name(rng: random.Random) -> str:
    """A file name that acts on a terminal, or is merely odd; no slash, no NUL."""
    drawn = rng.choice((rng.choice(list(ACTING.values())), random_text(rng), rng.choice(WORDS)))
    clean = drawn.replace("/", "|").replace("\0", "").strip(".")
    return clean.encode("utf-8", "replace")[:180].decode("utf-8", "ignore") or "x"


def argument(rng: random.Random) -> str:
    """A word of a command line: anything but NUL."""
    drawn = rng.choice((rng.choice(list(ACTING.values())), random_text(rng), rng.choice(WORDS), rng.choice(NUMBERS)))
    return drawn.replace("\0", "")


def text(rng: random.Random) -> str:
    """What somebody says, or an answer: pieces that act and letters."""
    return " ".join(rng.choice((random_text(rng), rng.choice(list(ACTING.values())), "hello")) for _ in range(8))


def data(rng: random.Random) -> bytes:
    """The content of a file or a pipe."""
    nested = rng.choice((b"[", b'{"a":', b"(", b"<", b"a=[")) * rng.choice((50, 3000, 100_000))
    return rng.choice((
        b"", b"\0" * 5000, rng.randbytes(4000), nested, text(rng).encode("utf-8", "surrogatepass"),
        b"\xff\xfe" + b"a\0" * 50,
        b"\xef\xbb\xbfhello", b"9" * 200_000, b"hello\r\nthere\r\r\n", b"/exit\n/export md notes.txt\n",
        b"a" * 3_000_000,
    ))  # fmt: skip


def says(scratch: Scratch, rng: random.Random) -> None:
    """The scripted engine's next answers."""
    said = rng.choice(("Hello.", text(rng), f"<think>{text(rng)}</think>{text(rng)}", "```\n" + text(rng), ""))
    fails = text(rng) if rng.random() < 0.2 else ""
    notes = (text(rng),) if rng.random() < 0.2 else ()
    Script(text=latin(said), step=rng.choice((1, 7, 300)), fails=fails, notes=notes).write(scratch.script)


@cache
def _model() -> dict[str, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = write_model(Path(folder) / "model")
        return {path.name: path.read_bytes() for path in made.iterdir()}


def sound_model(folder: Path) -> Path:
    """A folder that the front end and the scripted engine take for a small model."""
    folder.mkdir(parents=True)
    for file, content in _model().items():
        (folder / file).write_bytes(content)
    return folder


def on_model(rng: random.Random, target: str, scratch: Scratch, heavy: bool = True) -> list[str]:
    """A command on a model; what it may write is allowed. heavy: some load torch."""
    out = scratch.work / "made"
    if heavy and rng.random() < HEAVY:
        scratch.allow(out)
        notes = str(scratch.work / "notes.txt")
        return rng.choice((
            ["run", target, "hello", "-n", "4", "-c", "64"], ["quantize", target, "-o", str(out), "-y"],
            ["eval", target, "--text", notes, "--max-windows", "1", "--window", "16"],
            ["bench", target, "-n", "2", "-p", "4", "-r", "1", "--against", "none", "--no-baseline"],
            ["quantize", target, "-o", str(out), "-f", rng.choice(("mxfp4", "bcq", "squeezellm", "vq2", "aqlm2x8"))],
        ))  # fmt: skip
    return rng.choice((
        ["show", target], ["show", target, "--json"], ["show", target, "--vram", "24"], ["verify", target],
        ["run", target, "hello", "--dry-run"], ["chat", target, "--dry-run", "--json"], ["fit", target, "--vram", "24"],
        ["chat", target, "--dry-run", "-c", "max"], ["pull", target, "-y"], ["rm", target, "-y"], ["ls"], ["ls",
        "--json"],
        ["run", target, "hello", "--dry-run", "--format", rng.choice(("nf4", "vq2", "bf16", "x"))],
        ["fit", target, "--vram", rng.choice(("0", "8", "24GiB", "1e9"))], ["verify"], ["prune", "--dry-run"],
    ))  # fmt: skip


def odd_file(rng: random.Random, path: Path, scratch: Scratch) -> str:
    """Puts something at `path` that is no plain file, or no good one; what it is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    kind = rng.choice((
        "fifo", "folder", "loop", "link to others", "link to a device", "link to nothing", "socket", "sparse", "empty",
        "bytes", "closed", "link to a folder", "hard link",
    ))  # fmt: skip
    _ODD[kind](rng, path, scratch)
    return kind


def _socket(rng: random.Random, path: Path, scratch: Scratch) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}"[:107])
        except (OSError, ValueError):
            path.mkdir()
        finally:
            os.close(here)


def _sparse(rng: random.Random, path: Path, scratch: Scratch) -> None:
    with path.open("wb") as file:
        file.truncate(rng.choice((2**26, 2**33, 2**40)))


def _closed(rng: random.Random, path: Path, scratch: Scratch) -> None:
    path.write_bytes(data(rng))
    path.chmod(0)


_ODD = {
    "fifo": lambda rng, path, scratch: os.mkfifo(path),
    "folder": lambda rng, path, scratch: (path / "inside").mkdir(parents=True),
    "loop": lambda rng, path, scratch: path.symlink_to(path.name),
    "link to others": lambda rng, path, scratch: path.symlink_to(scratch.foreign / "keep.txt"),
    "link to a device": lambda rng, path, scratch: path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/full"))),
    "link to nothing": lambda rng, path, scratch: path.symlink_to(scratch.foreign / "not there"),
    "link to a folder": lambda rng, path, scratch: path.symlink_to(scratch.foreign),
    "hard link": lambda rng, path, scratch: os.link(scratch.foreign / "keep.txt", path),
    "socket": _socket,
    "sparse": _sparse,
    "empty": lambda rng, path, scratch: path.write_bytes(b""),
    "bytes": lambda rng, path, scratch: path.write_bytes(data(rng)),
    "closed": _closed,
}


def damage(rng: random.Random, path: Path) -> None:
    """Bytes of a file changed, cut or doubled; or the file cut short."""
    raw = path.read_bytes()
    path.write_bytes(raw[: rng.randrange(len(raw) + 1)] if rng.random() < 0.3 else damaged_bytes(raw, rng))

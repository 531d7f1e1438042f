"""The scratch user of one hostile run: a home, a working folder, files of others, and secrets that must not get out.

Everything lies below one folder: settings, conversations, caches and the token where they lie for a user who has set
nothing. `snapshot` tells all that is there, so that what a run has changed can be told from what it was allowed to.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import os
import random
import re
import shutil
import stat
import string
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from localq.kernels.setup import launcher

ROOT = Path(__file__).resolve().parents[2]
PART = 12  # characters of a secret that count as a leak: messages are cut
HASHED_BYTES = 4 * 2**20  # larger files are compared by size and time
_BETWEEN = re.compile(rb"[^A-Za-z0-9_]+")
KEPT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")  # of the environment of who runs the campaign


def _word(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=length))


@dataclass(frozen=True)
class Secrets:
    """token: of the hub, in its file or HF_TOKEN. password: in HF_ENDPOINT. told: in a saved conversation."""

    token: str
    password: str
    told: str

    @classmethod
    def draw(cls, rng: random.Random) -> Secrets:
        return cls(f"hf_{_word(rng, 34)}", _word(rng, 30), _word(rng, 30))

    def credentials(self) -> dict[str, list[bytes]]:
        """Name -> what tells it, in whole or in part, also as HTTP's basic authentication encodes it."""
        basic = base64.b64encode(f"user:{self.password}".encode())[8:]
        return {
            "token": [*_parts(self.token), base64.b64encode(self.token.encode())[:20]],
            "password": [*_parts(self.password), basic[:20]],
        }

    def conversation(self) -> list[bytes]:
        """What tells the secret of the conversation."""
        return _parts(self.told)


def _parts(secret: str) -> list[bytes]:
    return [secret[:PART].encode(), secret[-PART:].encode()]


def holds(data: bytes, parts: list[bytes]) -> bool:
    """A secret is in `data`, as it is or broken by line ends, frames and escape sequences."""
    joined = _BETWEEN.sub(b"", data)
    return any(part in data or _BETWEEN.sub(b"", part) in joined for part in parts)


@dataclass(frozen=True)
class Entry:
    """One name in a snapshot: kind and rights, and what it holds or leads to."""

    mode: int
    content: str
    owner: int = 0

    def __str__(self) -> str:
        return f"{stat.filemode(self.mode)} {self.content[:40]}"


@dataclass
class Scratch:
    """All places of the run; `own` are prefixes, relative to `root`, below which localq may change what exists."""

    root: Path
    secrets: Secrets
    own: set[str] = field(default_factory=lambda: set(OWN))

    def __post_init__(self) -> None:
        self.home, self.work, self.foreign = self.root / "home", self.root / "work", self.root / "foreign"
        self.tmp, self.script = self.root / "tmp", self.root / "script.json"
        self.config = self.home / ".config/localq/config.toml"
        self.models = self.home / ".config/localq/models.toml"
        self.data = self.home / ".local/share/localq"
        self.cache = self.home / ".cache/localq"
        self.state = self.home / ".local/state/localq"
        self.hub = self.home / ".cache/huggingface/hub"
        self.token = self.home / ".cache/huggingface/token"

    def plant(self) -> Scratch:
        """Files of others, a token, a conversation with a secret."""
        for folder in (self.work, self.foreign, self.tmp, self.token.parent, self.config.parent):
            folder.mkdir(parents=True)
        self.token.write_text(self.secrets.token)
        self.token.chmod(0o600)
        (self.work / "notes.txt").write_text("written by hand\n")
        (self.home / ".ssh").mkdir(mode=0o700)
        (self.home / ".ssh/authorized_keys").write_text("ssh-ed25519 AAAA me\n")
        (self.foreign / "keep.txt").write_text("written by somebody else\n")
        os.link(self.foreign / "keep.txt", self.foreign / "hard link.txt")
        (self.work / "link").symlink_to(self.foreign / "keep.txt")
        (self.work / "loop").symlink_to("loop")
        stranger = self.hub / "models--stranger--model/snapshots/0123456789abcdef0123456789abcdef01234567"
        stranger.mkdir(parents=True)
        (stranger / "config.json").write_text('{"model_type": "llama"}')
        self._converse()
        return self

    def _converse(self) -> None:
        record = Record(model="smollm2-135m", title="first")
        told = f"Remember {self.secrets.told}, and tell nobody."
        for role, content in (("user", told), ("assistant", "I do.")):
            record.conversation.add(Message(role, content), record.conversation.head)
        ConversationStore(self.data / "sessions.db").save(record)

    def environment(self) -> dict[str, str]:
        """Of a user who has set no places, without a network; the hub has a password."""
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        return {
            **kept, "HOME": str(self.home), "TMPDIR": str(self.tmp), "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8",
            "LOCALQ_DEVICE": "cpu", "LOCALQ_DTYPE": "float32", "OMP_NUM_THREADS": "1", "TERM": "xterm-256color",
            "HF_ENDPOINT": f"http://user:{self.secrets.password}@127.0.0.1:9", "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "LESSHISTFILE": "-",
        }  # fmt: skip

    def places(self) -> dict[str, str]:
        """The variables that lead to the places also where there is no home."""
        named = {"LOCALQ_CONFIG": self.config, "LOCALQ_MODELS": self.models, "LOCALQ_DATA": self.data,
                 "LOCALQ_CACHE": self.cache, "HF_HOME": self.token.parent,
                 "XDG_STATE_HOME": self.state.parent, "XDG_CACHE_HOME": self.home / ".cache",
                 "XDG_CONFIG_HOME": self.home / ".config", "XDG_DATA_HOME": self.data.parent}  # fmt: skip
        return {name: str(path) for name, path in named.items()}

    def relative(self, path: Path) -> str:
        """As `own` names it."""
        return os.path.relpath(path, self.root)

    def allow(self, *paths: Path) -> None:
        """What the command may change besides."""
        self.own |= {self.relative(path) for path in paths}

    def is_own(self, name: str) -> bool:
        """Below a place where localq may change what exists."""
        return any(name == own or name.startswith(f"{own}/") for own in self.own)

    def snapshot(self) -> dict[str, Entry]:
        """Name relative to `root` -> entry, of everything there; links are not followed."""
        return {self.relative(path): _entry(path) for path in walk(self.root)}

    def remove(self) -> None:
        """All of it, whatever rights a run has left."""
        shutil.rmtree(self.root, ignore_errors=True)


# localq's own: a user's conversations, caches, logs and what is downloaded. Settings are changed by some verbs alone.
OWN = (
    "home/.local/share/localq", "home/.cache/localq", "home/.local/state/localq", "home/.cache/huggingface/hub", "tmp",
    "script.json",
)  # fmt: skip


def walk(folder: Path) -> Iterator[Path]:
    """Every name below `folder`, links not followed."""
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from walk(Path(entry.path))


def _entry(path: Path) -> Entry:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return Entry(found.st_mode, f"-> {os.readlink(path)}", found.st_uid)
    if not stat.S_ISREG(found.st_mode):
        return Entry(found.st_mode, "", found.st_uid)
    if found.st_size > HASHED_BYTES:
        return Entry(found.st_mode, f"{found.st_size} bytes of {found.st_mtime_ns}", found.st_uid)
    return Entry(found.st_mode, hashlib.sha256(path.read_bytes()).hexdigest(), found.st_uid)


def quoted_url(secrets: Secrets, port: int) -> str:
    """HF_ENDPOINT of a hub on this machine."""
    return f"http://user:{urllib.parse.quote(secrets.password)}@127.0.0.1:{port}"


@cache
def command() -> list[str]:
    """`localq` by the script of `make`; as a module where `env` cannot block signals."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = folder / "localq"
    script.touch()
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    return [str(script)] if launcher.write(script) else [sys.executable, "-m", "localq"]

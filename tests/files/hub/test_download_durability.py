"""Power cuts: every operation on files is recorded, and what each prefix of them leaves on the disk is gone on with.

A disk keeps what `fsync` was asked for. Of the rest it may keep all (as after a kill), nothing, or names and lengths
without contents: all of these are tried after each operation.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localq.files.hub import cache as hub_cache
from localq.files.hub import fetch as hub
from localq.files.hub import parts as download_parts
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO

CONTENT = random.Random(3).randbytes(420_000)  # the last step is not the end
NAME = "tiny.gguf"


class Recorder:
    """Wraps the operations of `os` on files below `root`; each is a line of `log` after it was done."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("open", "write", "ftruncate", "fsync", "replace", "symlink", "unlink", "mkdir"):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, operation: Any) -> Any:
        def wrapped(first: Any, *rest: Any, **options: Any) -> Any:
            named = rest[0] if name == "symlink" else first
            path = os.readlink(f"/proc/self/fd/{named}") if isinstance(named, int) else os.path.abspath(named)
            new = name == "open" and not os.path.lexists(path)
            content = bytes(rest[0]) if name == "write" else b""
            result = operation(first, *rest, **options)
            if f"{path}/".startswith(f"{self.root}/") and (name != "open" or new):
                where = os.path.relpath(path, self.root)
                if name == "write":
                    self.log.append((name, where, content[:result]))
                elif name == "replace":
                    self.log.append((name, where, os.path.relpath(rest[0], self.root)))
                elif name == "symlink":
                    self.log.append((name, where, str(first)))
                else:
                    self.log.append((name, where, rest[0] if name == "ftruncate" else None))
            return result

        return wrapped


class Disk:
    """What is on a disk: names (path -> inode, link target or folder) and contents, as written and as durable."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.durable_names: dict[str, Any] = {}
        self.contents: dict[int, bytearray] = {}
        self.durable: dict[int, bytes] = {}

    def apply(self, name: str, path: str, detail: Any) -> None:
        if name == "open":
            inode = len(self.contents)
            self.names[path], self.contents[inode], self.durable[inode] = inode, bytearray(), b""
        elif name == "write":  # all of ours append
            self.contents[self.names[path]] += detail
        elif name == "ftruncate":
            del self.contents[self.names[path]][detail:]
        elif name == "mkdir":
            self.names[path] = "folder"
        elif name == "symlink":
            self.names[path] = ("link", detail)
        elif name == "unlink":
            del self.names[path]
        elif name == "replace":
            self.names[detail] = self.names.pop(path)
        elif self.names.get(path, "folder") == "folder":  # fsync of a folder
            inside = {each for each in {*self.names, *self.durable_names} if os.path.dirname(each) == path.strip(".")}
            for each in inside:
                self.durable_names.pop(each, None)
                if each in self.names:
                    self.durable_names[each] = self.names[each]
        else:
            self.durable[self.names[path]] = bytes(self.contents[self.names[path]])

    def build(self, root: Path, names: dict[str, Any], contents: Any) -> None:
        """Make `root` what the disk holds after the cut."""
        for path, what in sorted(names.items()):
            target = root / path
            if os.path.dirname(path) and not target.parent.is_dir():
                continue  # its folder did not become durable
            if what == "folder":
                target.mkdir()
            elif isinstance(what, tuple):
                target.symlink_to(what[1])
            else:
                target.write_bytes(contents[what])

    def worlds(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        yield "killed", self.names, self.contents
        yield "only what is durable", self.durable_names, self.durable
        yield "names without contents", self.names, self.durable
        zeros = {inode: self.durable[inode].ljust(len(content), b"\0") for inode, content in self.contents.items()}
        yield "names and lengths without contents", self.names, zeros


@pytest.fixture
def log(tmp_path, monkeypatch):
    """The operations of one fetch, in a hub that stays up; HF_HUB_CACHE and the rest lie below `disk`."""
    monkeypatch.setattr(download_parts, "STEP_BYTES", 100_000)
    with hub_server.running(tmp_path, monkeypatch) as server:
        server.add(REPO, {NAME: CONTENT})
        (tmp_path / "disk").mkdir()
        places(monkeypatch, tmp_path / "disk")
        recorder = Recorder(tmp_path / "disk")
        with monkeypatch.context() as patch:
            recorder.install(patch)
            hub.fetch_repo(REPO)
        yield recorder.log


def places(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    for name, folder in (("HF_HUB_CACHE", "hub"), ("LOCALQ_DATA", "data"), ("LOCALQ_CACHE", "cache")):
        monkeypatch.setenv(name, str(root / folder))


def test_a_power_cut_after_any_operation_costs_time_and_nothing_else(log, tmp_path, monkeypatch):
    disk = Disk()
    seen = set()
    for step, operation in enumerate(log):
        disk.apply(*operation)
        for world, names, contents in disk.worlds():
            root = tmp_path / "world"
            root.mkdir()
            disk.build(root, names, contents)
            key = hashlib.sha256(repr([(str(path), path.is_file() and path.read_bytes())
                                       for path in sorted(root.rglob("*"))]).encode()).digest()  # fmt: skip
            if key not in seen:
                seen.add(key)
                places(monkeypatch, root)
                look(step, operation, world)
            shutil.rmtree(root)
    assert len(seen) > 40


def look(step: int, operation: tuple[Any, ...], world: str) -> None:
    """Nothing wrong stands under a final name, and the next fetch makes it whole."""
    said = f"after operation {step} ({operation[0]} {operation[1]}), {world}"
    for path in hub_cache.repo_folder(REPO).glob("blobs/*"):
        assert path.read_bytes() == CONTENT, said
    path = hub.fetch_repo(REPO)
    assert path.read_bytes() == CONTENT, said
    assert path.name == NAME


def test_the_order_of_writes(log):
    """Bytes, fsync, state, fsync, ..., fsync, rename, fsync of the folder, link, fsync, record last."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    names = [(name, os.path.basename(path)) for name, path, _ in log]
    part, state = f"{digest}.part", f"{digest}.state"
    steps = [i for i, each in enumerate(names) if each == ("write", state)]
    assert len(steps) >= 2  # how many there are depends on how the bytes come in
    for i in steps:
        assert names[i - 1] == ("fsync", part)
        assert names[i + 1] == ("fsync", state)
    renamed = names.index(("replace", part))
    assert [name for name, path in names[:renamed] if path == part][-1] == "fsync"
    assert names[renamed + 1] == ("fsync", "blobs")
    linked = names.index(("symlink", NAME))
    assert names[linked + 1] == ("fsync", fake_hub.COMMIT)
    recorded = next(i for i, each in enumerate(log) if each[0] == "replace" and str(each[2]).startswith("data/pulled"))
    assert renamed < linked < recorded

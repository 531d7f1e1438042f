"""Installation method, update command, and leftovers of an uninstall on the disk; for `localq doctor`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from localq import kernels, places
from localq.wording import human_bytes


@dataclass(frozen=True)
class Provenance:
    """Installation method of this localq, and the commands that update and remove it."""

    how: str
    update: str
    uninstall: str


@dataclass(frozen=True)
class KeptFiles:
    """A folder or file that an uninstall leaves: its bytes, and a remark."""

    what: str
    path: Path
    bytes: int
    remark: str = ""


def installation(prefix: Path | None = None, origin: dict[str, Any] | None = None) -> Provenance:
    """Return this process's provenance. prefix: its environment; origin: direct_url.json of the package (PEP 610)."""
    prefix = prefix or Path(sys.prefix)
    origin = _origin() if origin is None else origin
    source = _source_folder(origin)
    if source is not None and origin.get("dir_info", {}).get("editable"):
        return _in_clone(source, prefix)
    path = shlex.quote(str(source)) if source else ""
    first = f"git -C {path} pull && " if source else ""  # a package index has no part in it
    if (prefix / "pipx_metadata.json").is_file():
        update = f"{first}pipx install --force {path}" if source else "pipx upgrade localq"
        return Provenance(f"with pipx, in {prefix}", update, "pipx uninstall localq")
    if (prefix / "uv-receipt.toml").is_file():
        update = f"{first}uv tool install --reinstall-package localq {path}" if source else "uv tool upgrade localq"
        return Provenance(f"with uv tool, in {prefix}", update, "uv tool uninstall localq")
    pip = f"{shlex.quote(str(prefix / 'bin/python'))} -m pip"
    update = f"{first}{pip} install {path}" if source else f"{pip} install --upgrade localq"
    return Provenance(f"with pip, in {prefix}", update, f"{pip} uninstall localq")


def _in_clone(source: Path, prefix: Path) -> Provenance:
    path, pip = shlex.quote(str(source)), f"{shlex.quote(str(prefix / 'bin/python'))} -m pip"
    if prefix == source / ".venv":
        return Provenance(
            f"from the clone {source}, in {prefix}",
            f"git -C {path} pull && make -C {path} chat",
            f"make -C {path} uninstall clean",
        )
    update = f"git -C {path} pull && {pip} install --editable {path}"
    return Provenance(f"from the clone {source}, in {prefix}", update, f"{pip} uninstall localq")


def _origin() -> dict[str, Any]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        text = importlib.metadata.distribution("localq").read_text("direct_url.json")
        found = json.loads(text or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _source_folder(origin: dict[str, Any]) -> Path | None:
    """The folder that was installed; None for a wheel or a package index."""
    address = urlsplit(str(origin.get("url", "")))
    return Path(unquote(address.path)) if address.scheme == "file" and "dir_info" in origin else None


def leftovers() -> list[KeptFiles]:
    """Return the files that an uninstall leaves, if any, the large and the valuable ones first."""
    sessions = places.sessions_file()
    own = (places.quantized_dir(), places.embedded_dir())
    conversations = [sessions, *(sessions.with_name(sessions.name + end) for end in ("-wal", "-shm"))]
    conversations += [places.snapshots_dir()]
    rest = [each for each in _children(places.data_dir()) if each not in (*own, *conversations, places.state_dir())]
    rest += [each for each in _children(places.cache_dir()) if each != places.snapshots_dir()]
    downloads = places.downloads_dir()
    if downloads.parent != places.cache_dir():
        rest.append(downloads)
    shared = "the Hugging Face cache, shared with other programs"
    found = [
        KeptFiles("downloaded models", places.hub_cache(), _size(places.hub_cache()), shared),
        KeptFiles("models quantized here", own[0], _size(own[0])),
        KeptFiles("built-in model", own[1], _size(own[1])),
        KeptFiles("conversations", sessions, sum(map(_size, conversations))),
        KeptFiles("settings", places.config_file(), _size(places.config_file()) + _size(places.user_models_file())),
        KeptFiles("input history, logs", places.state_dir(), _size(places.state_dir())),
        KeptFiles("other files", places.data_dir(), sum(map(_size, rest)), f"and in {places.cache_dir()}"),
    ]
    return [each for each in found if each.bytes]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _size(path: Path) -> int:
    """Bytes of a file, or of the files below a folder; links count nothing, nor does what cannot be read."""
    total = 0
    with contextlib.suppress(OSError):
        if path.is_file() and not path.is_symlink():
            return path.stat().st_size
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                entry = os.lstat(os.path.join(folder, name))
                total += entry.st_size if not os.path.islink(os.path.join(folder, name)) else 0
    return total


def lines() -> list[tuple[str, str]]:
    """(title, text) of every line."""
    here = installation()
    rows = [("installed", here.how), ("update", here.update), ("uninstall", here.uninstall)]
    title = "  leaves"
    for each in leftovers():
        remark = f" ({each.remark})" if each.remark else ""
        rows.append((title, f"{each.what}: {human_bytes(each.bytes)} in {each.path}{remark}"))
        title = ""
    if why := kernels.host_why_not():
        rows.append(("vq2", f"can be loaded but not quantized: {why}"))
    return rows


def as_json() -> dict[str, Any]:
    """The same as `--json` prints it; sizes in bytes."""
    left = [{"what": each.what, "path": str(each.path), "bytes": each.bytes} for each in leftovers()]
    return {"installation": {**asdict(installation()), "uninstall_leaves": left}}

"""Folders and files of localq, and the environment variables that move them.

Weights are in the Hugging Face cache, in its layout (`hub_cache`); the rest is in the platform's user folders. These
functions return paths and create nothing. They raise LocalqError (exit 2) for ~USER where there is no such user, and
where a folder is not set and the user has no home folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

from localq.errors import usage_error

PACKAGE_DATA = Path(__file__).parent / "data"  # texts, codebooks, layers, the catalogue
PACKAGE_PARENT = Path(__file__).resolve().parents[1]  # what a child process needs on its path
PROJECT_FILE, NO_PROJECT = "localq.toml", "LOCALQ_NOPROJECT"  # settings of a project; the variable that ignores them
_NO_HOME = "HOME is not set, and this user is not in the user database"


def expand(path: str | Path, what: str = "") -> Path:
    """`path` with a leading ~ or ~USER replaced by that home folder. what: the option or variable that holds it.

    Raises LocalqError (exit 2) where there is no such user or home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = Path(path).parts[0][1:]
        about = f"{what}={path}" if what.isupper() else f"{what} {path}".strip()
        if not user:
            raise usage_error(about, _NO_HOME, "Set HOME, or use the full path.") from error
        step = f"Use the full path; for a file with that name in this folder, use ./{path}."
        raise usage_error(about, f"there is no user {user}", step) from error


def config_file() -> Path:
    """The user's `config.toml` (`LOCALQ_CONFIG` overrides)."""
    return _from_variable("LOCALQ_CONFIG") or _required(_user_folder(platformdirs.user_config_dir)) / "config.toml"


def project_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The nearest `localq.toml` from the current folder up to the top of the git checkout, if there is one.

    None without one, with LOCALQ_NOPROJECT, and for a file of another user than this one or root: a folder that many
    users can write, such as /tmp, is no project.
    """
    if environment.get(NO_PROJECT, "0") not in ("", "0"):
        return None
    try:
        here = Path.cwd()
        above = [here, *here.parents]
        top = next((number for number, each in enumerate(above) if (each / ".git").exists()), 0)
        found = next((each / PROJECT_FILE for each in above[: top + 1] if (each / PROJECT_FILE).is_file()), None)
        owners = set() if found is None else {found.lstat().st_uid, found.stat().st_uid}  # of a link, and of its target
        return found if owners <= {os.getuid(), 0} else None
    except OSError:  # the folder is gone or unreadable
        return None


def user_models_file() -> Path:
    """The user's `models.toml`, additions to the catalogue (`LOCALQ_MODELS` overrides).

    Without a home folder it is beside `config_file`.
    """
    if (chosen := _from_variable("LOCALQ_MODELS")) is not None:
        return chosen
    folder = _user_folder(platformdirs.user_config_dir)
    return (folder or config_file().parent) / "models.toml"


def data_dir() -> Path:
    """Conversations, unpacked and quantized models (`LOCALQ_DATA` overrides)."""
    return _from_variable("LOCALQ_DATA") or _required(_user_folder(platformdirs.user_data_dir))


def cache_dir() -> Path:
    """Files that can be created again (`LOCALQ_CACHE` overrides)."""
    return _from_variable("LOCALQ_CACHE") or _required(_user_folder(platformdirs.user_cache_dir))


def state_dir() -> Path:
    """Input history and logs. Without a home folder they are in `data_dir`."""
    return _user_folder(platformdirs.user_state_dir) or data_dir() / "state"


def runtime_dir() -> Path:
    """Sockets of servers of this user (`LOCALQ_RUNTIME` overrides); beside them, `server.log` of those in background.

    In XDG_RUNTIME_DIR, which is cleared at logout; without one, and where `LOCALQ_CACHE` is set, in the cache.
    """
    if (chosen := _from_variable("LOCALQ_RUNTIME")) is not None:
        return chosen
    session = None if _from_variable("LOCALQ_CACHE") else _from_variable("XDG_RUNTIME_DIR")
    return cache_dir() / "run" if session is None else session / "localq"


def _from_variable(name: str) -> Path | None:
    """The path in an environment variable; None where it is unset or empty."""
    value = os.environ.get(name)
    return expand(value, name) if value else None


def _user_folder(find: Callable[[str], str]) -> Path | None:
    """The platform's folder of localq; None where it would be in a home folder and there is none."""
    try:
        folder = find("localq")
    except RuntimeError:  # newer platformdirs; older ones return a path that begins with ~
        return None
    is_homeless = folder.startswith("~/") and os.path.expanduser("~") == "~"
    return None if is_homeless else expand(folder)  # XDG variables may begin with ~


def _required(folder: Path | None) -> Path:
    if folder is None:
        step = "Set HOME, or LOCALQ_CONFIG, LOCALQ_DATA, LOCALQ_CACHE and HF_HOME."
        raise usage_error("home folder", _NO_HOME, step)
    return folder


def embedded_dir() -> Path:
    """Models unpacked from package-index wheels: `<data>/embedded/<file>`."""
    return data_dir() / "embedded"


def quantized_dir() -> Path:
    """Models quantized on this machine: `<data>/quantized/<name>@<format>/`."""
    return data_dir() / "quantized"


def checked_dir() -> Path:
    """Records of checked files of embedded and quantized models: `<data>/checked/HASH.json`, one a folder."""
    return data_dir() / "checked"


def pulled_dir() -> Path:
    """Records of files in the Hugging Face cache: `<data>/pulled/models--ORG--REPO/HASH.json`."""
    return data_dir() / "pulled"


def sessions_file() -> Path:
    """Conversations: `<data>/sessions.db`."""
    return data_dir() / "sessions.db"


def snapshots_dir() -> Path:
    """Snapshots, which are saved KV caches of conversations: `<cache>/sessions/`."""
    return cache_dir() / "sessions"


def downloads_dir() -> Path:
    """Unfinished downloads: `<cache>/downloads`, or beside the weights if those are on another disk.

    A finished download is renamed into the Hugging Face cache, which works on one disk only. Where a folder of that
    name is another user's, or a link of another user's, it is `<name>-<number of this user>`.
    """
    here, cache = cache_dir(), hub_cache()
    if _device(here) == _device(cache):
        return _own(here / "downloads")
    beside = cache.parent if _device(cache.parent) == _device(cache) and os.access(cache.parent, os.W_OK) else cache
    return _own(beside / ".localq-downloads")


def _own(folder: Path) -> Path:
    """`folder`, or one beside it where another user made it: what lies in there is not ours to go on with."""
    user = os.geteuid()
    for look in (os.lstat, os.stat):  # a link, and what it leads to
        try:
            if look(folder).st_uid != user:
                return folder.with_name(f"{folder.name}-{user}")
        except OSError:  # there is none yet, or nobody may look
            continue
    return folder


def _device(folder: Path) -> int:
    for each in (folder.absolute(), *folder.absolute().parents):
        try:
            return each.stat().st_dev
        except OSError:  # there is none yet, or nobody may look
            continue
    raise AssertionError("the root folder exists")


def hub_cache() -> Path:
    """The Hugging Face cache, as huggingface_hub finds it: HF_HUB_CACHE, HF_HOME/hub, XDG_CACHE_HOME."""
    if (chosen := _from_variable("HF_HUB_CACHE") or _from_variable("HUGGINGFACE_HUB_CACHE")) is not None:
        return chosen
    if (home := _from_variable("HF_HOME")) is not None:
        return home / "hub"
    cache = _from_variable("XDG_CACHE_HOME") or _required(_user_folder(lambda _: "~/.cache"))
    return cache / "huggingface" / "hub"

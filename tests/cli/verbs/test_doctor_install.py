"""`localq doctor`: how localq was installed, how to update it, and what an uninstall leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localq import kernels, places
from localq.cli import execute
from localq.cli.verbs.doctor_install import Provenance, installation, leftovers


def of_folder(folder: Path, editable: bool = False) -> dict:
    return {"url": folder.as_uri(), "dir_info": {"editable": True} if editable else {}}


def test_a_clone_is_updated_by_git_and_make(tmp_path):
    clone = tmp_path / "my clone"
    found = installation(clone / ".venv", of_folder(clone, editable=True))
    assert found == Provenance(
        f"from the clone {clone}, in {clone}/.venv",
        f"git -C '{clone}' pull && make -C '{clone}' chat",
        f"make -C '{clone}' uninstall clean",
    )


def test_a_clone_in_an_environment_of_the_users_own_is_updated_by_pip(tmp_path):
    found = installation(tmp_path / "env", of_folder(tmp_path / "clone", editable=True))
    assert found.update.endswith(f"{tmp_path}/env/bin/python -m pip install --editable {tmp_path}/clone")
    assert found.uninstall == f"{tmp_path}/env/bin/python -m pip uninstall localq"


WHEEL = {"url": "file:///tmp/localq-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl", "archive_info": {}}


@pytest.mark.parametrize(
    ("marker", "update", "uninstall"),
    [
        ("pipx_metadata.json", "pipx upgrade localq", "pipx uninstall localq"),
        ("uv-receipt.toml", "uv tool upgrade localq", "uv tool uninstall localq"),
        ("", "{}/bin/python -m pip install --upgrade localq", "{}/bin/python -m pip uninstall localq"),
    ],
)
@pytest.mark.parametrize("origin", [{}, WHEEL], ids=["index", "wheel"])
def test_a_wheel_is_updated_by_what_installed_it(tmp_path, marker, update, uninstall, origin):
    if marker:
        (tmp_path / marker).touch()
    found = installation(tmp_path, origin)
    assert (found.update, found.uninstall) == (update.format(tmp_path), uninstall.format(tmp_path))


@pytest.mark.parametrize(
    ("marker", "update"),
    [
        ("pipx_metadata.json", "pipx install --force {}"),
        ("uv-receipt.toml", "uv tool install --reinstall-package localq {}"),
        ("", "-m pip install {}"),
    ],
)
def test_a_folder_is_pulled_first(tmp_path, marker, update):
    clone, prefix = tmp_path / "clone", tmp_path / "prefix"
    prefix.mkdir()
    if marker:
        (prefix / marker).touch()
    found = installation(prefix, of_folder(clone)).update
    assert found.startswith(f"git -C {clone} pull && ")
    assert found.endswith(update.format(clone))


@pytest.fixture
def used(monkeypatch, tmp_path) -> Path:
    """Folders in which each kind of file lies, with a size of its own."""
    for name in ("data", "cache"):
        monkeypatch.setenv(f"LOCALQ_{name.upper()}", str(tmp_path / name))
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config/config.toml"))
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "config/models.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    sizes = {
        "hub/models--a--b/blobs/x": 4_000_000, "data/quantized/m@nf4/model.safetensors": 3_000_000,
        "data/embedded/s.gguf": 2_000_000, "data/sessions.db": 1000, "data/sessions.db-wal": 500,
        "cache/sessions/1.kv": 700, "config/config.toml": 20, "config/models.toml": 30,
        "state/localq/history": 40, "data/pulled/a.json": 5, "cache/downloads/b.part": 6,
    }  # fmt: skip
    for name, size in sizes.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"#" * size)
    (tmp_path / "hub/models--a--b/snapshots").mkdir()
    (tmp_path / "hub/models--a--b/snapshots/x").symlink_to("../blobs/x")  # counted once
    return tmp_path


def test_what_an_uninstall_leaves_has_sizes_and_paths(used, capsys):
    execute(["doctor", "--json"])
    left = json.loads(capsys.readouterr().out)["installation"]["uninstall_leaves"]
    assert {each["what"]: (each["bytes"], each["path"]) for each in left} == {
        "downloaded models": (4_000_000, f"{used}/hub"),
        "models quantized here": (3_000_000, f"{used}/data/quantized"),
        "built-in model": (2_000_000, f"{used}/data/embedded"),
        "conversations": (2200, f"{used}/data/sessions.db"),
        "settings": (50, f"{used}/config/config.toml"),
        "input history, logs": (40, f"{used}/state/localq"),
        "other files": (11, f"{used}/data"),
    }
    execute(["doctor"])
    said = capsys.readouterr().out
    assert f"downloaded models: 4.0 MB in {used}/hub (the Hugging Face cache, shared with other programs)" in said
    assert "\nupdate " in said


def test_nothing_is_left_where_nothing_was_used(monkeypatch, tmp_path, capsys):
    for name in ("LOCALQ_DATA", "LOCALQ_CACHE", "LOCALQ_CONFIG", "LOCALQ_MODELS", "XDG_STATE_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    execute(["doctor"])
    assert "leaves" not in capsys.readouterr().out


def test_a_missing_compiled_part_is_said(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "host_why_not", lambda: "localq was installed without its compiled module")
    execute(["doctor"])
    assert (
        "can be loaded but not quantized: localq was installed without its compiled module" in capsys.readouterr().out
    )


def test_another_environment_in_the_clone_is_the_users_own(tmp_path):
    found = installation(tmp_path / "venv", of_folder(tmp_path, editable=True))
    assert found.uninstall == f"{tmp_path}/venv/bin/python -m pip uninstall localq"


def test_a_state_folder_in_the_data_folder_is_counted_once(used, monkeypatch):
    monkeypatch.setattr(places, "state_dir", lambda: places.data_dir() / "state")  # as without a home folder
    (used / "data/state").mkdir()
    (used / "data/state/history").write_bytes(b"#" * 40)
    left = {each.what: each.bytes for each in leftovers()}
    assert (left["input history, logs"], left["other files"]) == (40, 11)

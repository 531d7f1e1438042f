"""The data of a safetensors file is that of the header that was checked, or an error with the file's name."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import ModelFiles
from localq.files.safetensors_headers import SINGLE_NAME, Header, read_header
from localq.formats import tensor_files
from localq.formats.open_checkpoint import open_checkpoint, open_fetched
from localq.formats.tensor_files import DTYPES, TensorFile, each_tensor, read_tensors

TENSORS = {
    "a": torch.arange(6000, dtype=torch.bfloat16).reshape(60, 100),
    "b": torch.tensor(5.0),
    "c": torch.zeros(0, 7, dtype=torch.uint8),
    "d": torch.arange(24, dtype=torch.int8).reshape(2, 3, 4),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE_NAME)
    return tmp_path / SINGLE_NAME


def rewrite(path: Path, content: bytes) -> None:
    """In place, a moment later."""
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(0, before + 1))


def shorter(path: Path) -> None:
    rewrite(path, path.read_bytes()[:-1])


def empty(path: Path) -> None:
    rewrite(path, b"")


def longer(path: Path) -> None:
    rewrite(path, path.read_bytes() + b"x")


def other_values(path: Path) -> None:
    rewrite(path, save({name: torch.zeros_like(each) for name, each in TENSORS.items()}))


def other_header(path: Path) -> None:
    """As long, and as old: the time is set back."""
    before, content = path.stat().st_mtime_ns, path.read_bytes()
    path.write_bytes(content.replace(b'"shape":[60,100]', b'"shape":[100,60]'))
    os.utime(path, ns=(0, before))


def another_file(path: Path) -> None:
    shorter_ = path.read_bytes()[:-1]
    path.unlink()
    path.write_bytes(shorter_)


CHANGES = (shorter, empty, longer, other_values)


def refused(read: Callable[[], object], path: Path) -> None:
    with pytest.raises(LocalqError, match="changed while it was being read") as caught:
        read()
    assert (caught.value.what, caught.value.exit_code) == (str(path), ExitCode.BAD_FILE)
    assert caught.value.next_step


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
def test_tensors_are_read_as_they_are_stored(path: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", 1000)
    file = TensorFile(read_header(path), mapped=mapped)
    for name, expected in TENSORS.items():
        found = file.read(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
        for dtype in (torch.float32, expected.dtype):
            converted = file.read_as(name, dtype)
            assert torch.equal(converted, expected.to(dtype))
            assert (converted.dtype, converted.is_contiguous()) == (dtype, True)
            converted.zero_()  # its own memory
    assert torch.equal(file.read("a"), TENSORS["a"])
    file.close()


def test_every_type_is_converted(tmp_path: Path) -> None:
    made = {name: torch.ones(3).to(dtype) for name, dtype in DTYPES.items()}
    save_file(made, tmp_path / SINGLE_NAME)
    file = TensorFile(read_header(tmp_path / SINGLE_NAME))
    for name, each in made.items():
        assert torch.equal(file.read_as(name, torch.float32), each.to(torch.float32)), name
    file.close()


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("change", [*CHANGES, other_header, another_file])
def test_a_file_that_changes_before_it_is_opened(path: Path, change: Callable[[Path], None], mapped: bool) -> None:
    header = read_header(path)
    change(path)
    refused(lambda: TensorFile(header, mapped=mapped), path)


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_open(path: Path, change: Callable[[Path], None], mapped: bool) -> None:
    file = TensorFile(read_header(path), mapped=mapped)
    assert torch.equal(file.read("d"), TENSORS["d"])
    change(path)
    refused(lambda: file.read("a"), path)
    refused(lambda: file.read_as("a", torch.float32), path)
    file.close()


def test_a_checkpoint_names_the_file_that_changed(path: Path) -> None:
    with open_checkpoint(ModelFiles(path.parent, "safetensors", {"model_type": "llama"})) as checkpoint:
        shorter(path)
        for _ in range(2):  # the first read opens it
            refused(lambda: checkpoint.read("a"), path)
            refused(lambda: checkpoint.read_as("a", torch.float32), path)


def test_a_file_that_is_fetched_with_another_header(path: Path, tmp_path: Path) -> None:
    headers = {SINGLE_NAME: read_header(path)}
    files = ModelFiles(tmp_path, "safetensors", {"model_type": "llama"})
    with open_fetched(files, headers, lambda shard: path) as checkpoint:
        assert torch.equal(checkpoint.read("a"), TENSORS["a"])
        other_header(path)
        with pytest.raises(LocalqError, match="do not match the header on the hub"):
            checkpoint.read("a")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_bad_block_or_a_drive_that_went_away(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TensorFile(read_header(path))

    def fails(descriptor: int, buffers: object, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fails)
    reads: list[Callable[[], object]] = [lambda: file.read("a"), lambda: file.read_as("a", torch.float32)]
    for read in reads:
        with pytest.raises(LocalqError, match=os.strerror(number)) as caught:
            read()
        assert (caught.value.what, caught.value.exit_code) == (str(path), ExitCode.DISK)
        assert caught.value.next_step == "Check the disk or network drive that holds the file."
    file.close()


def test_a_writer_at_the_same_time_is_an_error_and_never_a_signal(tmp_path: Path) -> None:
    """As rsync --inplace: cut and written again, over and over."""
    path, over = tmp_path / SINGLE_NAME, threading.Event()
    content = save({"a": torch.arange(2**18, dtype=torch.float32)})
    path.write_bytes(content)

    def writes() -> None:
        while not over.is_set():
            with path.open("r+b") as file:
                file.truncate(700)
                file.write(content)

    writer = threading.Thread(target=writes)
    writer.start()
    told: set[tuple[str, int]] = set()
    try:
        for _ in range(300):
            try:
                read_tensors(path)
            except LocalqError as error:
                told.add((error.what, error.exit_code))
    finally:
        over.set()
        writer.join()
    assert told == {(str(path), ExitCode.BAD_FILE)}


def test_only_some_tensors(path: Path) -> None:
    assert list(read_tensors(path, ("d", "b"))) == ["d", "b"]
    with pytest.raises(LocalqError, match="x is missing"):
        read_tensors(path, ("a", "x"))
    header: Header = read_header(path)
    assert [name for name, _ in each_tensor(header)] == list(header.tensors)


def test_files_are_closed(path: Path) -> None:
    count = len(os.listdir("/proc/self/fd"))
    for mapped in (False, True):
        file = TensorFile(read_header(path), mapped=mapped)
        tensor = file.read("a")
        file.close()
        file.close()
        assert torch.equal(tensor, TENSORS["a"])
        TensorFile(read_header(path), mapped=mapped)
    assert len(os.listdir("/proc/self/fd")) == count

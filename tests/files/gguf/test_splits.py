"""Split models: opened by any part, read as one, and refused with the name of the part that is not there."""

from __future__ import annotations

import contextlib
import re
import shutil
import struct

import numpy as np
import pytest

from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.gguf import splits
from localq.files.gguf.reader import read_header
from localq.files.gguf.tensors import FileBytes, read_tensor
from localq.files.gguf.vocab import build_tokenizer, special_tokens
from localq.files.model_folder import open_model
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import logits_of
from tests.support.files import tiny_gguf_families as families
from tests.support.files import tiny_gguf_models

CPU = LoadOptions(device="cpu", dtype="float32")
CASE = families.CASES["qwen35moe"]
PER_PART = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The weights, and their only file."""
    folder = tmp_path_factory.mktemp("whole")
    weights = families.read_folder(families.make_folder(CASE, folder / "folder"))
    return weights, families.write(folder / "NAME.gguf", CASE, weights)


@pytest.fixture
def parts(source, tmp_path):
    weights, _ = source
    families.write(tmp_path / "NAME.gguf", CASE, weights, split_max_tensors=PER_PART)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"NAME-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return found


@pytest.mark.parametrize("given", [0, 1, 2])
def test_every_part_opens_the_whole_model(source, parts, given):
    weights, whole = source
    files = open_model(parts[given])
    assert (files.path, files.name) == (parts[0], "NAME")
    assert files.weight_paths == tuple(parts)
    assert files.config == open_model(whole).config
    header = read_header(parts[given])
    assert [file.path for file in header.files] == parts
    assert header.size == sum(path.stat().st_size for path in parts)
    assert {part.file for part in header.tensors.values()} == {0, 1, 2}
    assert header.tensors.keys() == weights.keys()
    expected = read_header(whole)
    for name in weights:
        np.testing.assert_array_equal(read_tensor(header, name), read_tensor(expected, name), err_msg=name)


def test_a_first_part_without_tensors(source, tmp_path):
    """As `llama-gguf-split --no-tensor-first-split` makes it, for downloads of the metadata alone."""
    weights, whole = source
    families.write(tmp_path / "NAME.gguf", CASE, weights, split_max_tensors=60, small_first_shard=True)
    parts = sorted(tmp_path.glob("*.gguf"))
    header = read_header(parts[1])
    assert 0 not in {part.file for part in header.tensors.values()}
    assert header.config == read_header(whole).config
    for name in list(weights)[::9]:
        np.testing.assert_array_equal(read_tensor(header, name), read_tensor(read_header(whole), name), err_msg=name)


def test_a_tensor_that_does_not_fit_names_its_part(source, tmp_path):
    weights, _ = source

    def narrow(tensors):
        tensors["blk.4.ffn_up_exps.weight"] = tensors["blk.4.ffn_up_exps.weight"][:-1]

    families.write(tmp_path / "NAME.gguf", CASE, weights, change=narrow, split_max_tensors=PER_PART)
    why = r"'blk.4.ffn_up_exps.weight' has shape .*, which is not a stack of 5"
    with pytest.raises(LocalqError, match=why) as caught:
        open_model(tmp_path / "NAME-00001-of-00003.gguf")
    assert caught.value.what == str(tmp_path / "NAME-00003-of-00003.gguf")


def test_the_engine_computes_the_same(source, parts):
    _, whole = source
    loaded = [load(open_model(path), CPU) for path in (whole, parts[1])]
    first, second = (logits_of(each.model, each, list(range(20))) for each in loaded)
    assert bool((first == second).all())


def test_parts_that_are_removed_while_they_are_read(source, parts):
    weights, _ = source
    with open_checkpoint(open_model(parts[0])) as checkpoint:
        first, *others = checkpoint.tensors
        checkpoint.read(first)
        for part in parts:
            part.unlink()
        for name in others:
            if not name.endswith(".A_log"):
                np.testing.assert_array_equal(checkpoint.read(name).numpy(), weights[name], err_msg=name)


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_part_that_is_missing_is_named(parts, gone, given):
    if gone == given:
        return
    parts[gone].unlink()
    with pytest.raises(LocalqError, match=rf"part {gone + 1} of 3 is missing from this split model") as caught:
        open_model(parts[given])
    assert (caught.value.what, caught.value.exit_code) == (str(parts[gone]), ExitCode.BAD_FILE)


def test_a_part_of_another_model_is_named(source, parts):
    """Parts in another order, of another number, with other tensors, and a whole model in the place of a part."""
    _, whole = source

    def refused(words: str) -> None:
        with pytest.raises(LocalqError, match=words) as caught:
            open_model(parts[0])
        assert (caught.value.what, caught.value.exit_code) == (str(parts[1]), ExitCode.BAD_FILE)

    kept = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    refused("not part 2 of 3 in the split model: split.no is 2, not 1")
    shutil.copy(whole, parts[1])
    refused("split.no is None, not 1")
    parts[1].write_bytes(with_value(kept, "split.count", "<H", 4))
    refused("split.count is 4, not 3")
    parts[1].write_bytes(with_value(kept, "split.tensors.count", "<i", 9))
    refused("split.tensors.count is 9")
    parts[1].write_bytes(with_name_of(parts[0].read_bytes(), kept))
    refused(r"tensor 'blk\.\d\..+' is also in NAME-00001-of-00003.gguf")


def with_value(data: bytes, key: str, layout: str, value: int) -> bytes:
    """The file with another value of a key."""
    name = key.encode()
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
    return data[:at] + struct.pack(layout, value) + data[at + struct.calcsize(layout) :]


def with_name_of(first: bytes, data: bytes) -> bytes:
    """The file with a tensor named as one in the first part."""
    names = [set(re.findall(rb"blk\.\d\.[a-z_.]+?\.weight", part)) for part in (first, data)]
    taken, free = next((a, b) for a in sorted(names[0] - names[1]) for b in sorted(names[1]) if len(a) == len(b))
    return data.replace(free, taken, 1)


def test_a_number_of_tensors_that_is_not_stated(parts):
    for part in parts:
        part.write_bytes(with_value(part.read_bytes(), "split.tensors.count", "<i", 9))
    with pytest.raises(LocalqError, match=r"the parts contain \d+ tensors in total; expected 9") as caught:
        open_model(parts[0])
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("name", ["renamed.gguf", "NAME-00001-of-00002.gguf"])
def test_a_part_that_was_renamed_is_refused_with_the_names_that_parts_have(parts, name):
    renamed = parts[0].rename(parts[0].with_name(name))
    with pytest.raises(LocalqError, match=r"part of a split model .* -00001-of-00003.gguf") as caught:
        open_model(renamed)
    assert caught.value.exit_code == ExitCode.FAILURE


def test_a_part_that_changes_after_its_header_was_read(parts):
    header = read_header(parts[0])
    last = next(name for name, tensor in header.tensors.items() if tensor.file == 2)
    with contextlib.closing(FileBytes(header)) as file:
        parts[2].write_bytes(parts[2].read_bytes() + b"x")
        with pytest.raises(LocalqError, match="changed while it was being read") as caught:
            read_tensor(header, last, file)
    assert caught.value.what == str(parts[2])
    with pytest.raises(LocalqError, match="changed while it was being read"):
        FileBytes(header)


def test_the_vocabulary_is_that_of_the_first_part(tmp_path):
    whole = tiny_gguf_models.write_with_tokenizer(tmp_path / "whole.gguf", "F32")
    tiny_gguf_models.write_with_tokenizer(tmp_path / "NAME.gguf", "F32", split_max_tensors=9)
    last = sorted(tmp_path.glob("NAME-*.gguf"))[-1]
    assert build_tokenizer(last).to_str() == build_tokenizer(whole).to_str()
    assert special_tokens(last) == special_tokens(whole)


def test_names_of_parts(tmp_path):
    part = tmp_path / "A-B-00002-of-00003.GGUF"
    assert [path.name for path in splits.part_paths(part)] == [f"A-B-0000{n}-of-00003.GGUF" for n in (1, 2, 3)]
    assert splits.model_name(part) == "A-B"
    for name in ("A.gguf", "A-00004-of-00003.gguf", "A-00000-of-00003.gguf", "A-1-of-3.gguf", "A-00001-of-00001.gguf"):
        path = tmp_path / name
        assert splits.part_paths(path) == (path,)
        assert splits.model_name(path) == path.stem

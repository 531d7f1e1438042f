"""The record of a conversion: where a source came from, by its path, and what is refused as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog
from localq.files.catalog import Target
from localq.files.publish import record as records
from localq.files.publish.record import RECORD_NAME, ConversionRecord

COMMIT = "1" * 40


def test_a_snapshot_names_its_repository_and_commit(tmp_path):
    folder = tmp_path / "models--org--a-model--x" / "snapshots" / COMMIT
    found = records.describe(Target("x", "folder", path=folder), folder, "nf4", ("--bits", "3"))
    assert (found.source, found.repo, found.revision) == ("org/a-model--x", "org/a-model--x", COMMIT)
    assert found.command == "localq quantize org/a-model--x --format nf4 --bits 3"
    blob = tmp_path / "models--org--a" / "blobs" / "aa"  # what a link to a .gguf file leads to
    assert records.describe(Target("x", "gguf", path=blob), blob, "nf4", ()).repo == "org/a"


def test_the_embedded_model_is_named_by_what_it_was_made_from(tmp_path):
    target = catalog.resolve("smollm2-135m")
    found = records.describe(target, tmp_path / "SmolLM2.gguf", "vq2", ())
    assert (found.repo, found.licence) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    assert found.source == "HuggingFaceTB/SmolLM2-135M-Instruct (SmolLM2.gguf)"
    assert found.command == "localq quantize smollm2-135m --format vq2"


def test_a_repository_of_the_catalogue_has_its_licence(tmp_path):
    target = catalog.resolve("llama-3.1-8b@bf16")
    found = records.describe(target, tmp_path, "vq2", ())
    assert (found.source, found.repo, found.licence) == (target.source.repo, target.source.repo, "llama3.1")
    assert found.command == "localq quantize llama-3.1-8b@bf16 --format vq2"


def test_of_a_folder_only_its_name_is_kept(tmp_path):
    folder = tmp_path / "my model\x1b[31m"
    found = records.describe(Target("x", "folder", path=folder), folder, "nf4", ())
    assert str(tmp_path) not in found.to_bytes().decode()
    (tmp_path / RECORD_NAME).write_bytes(found.to_bytes())
    read = records.read(tmp_path)
    assert read is not None
    assert (read.source, read.repo, read.licence) == ("my model[31m", "", "")
    assert read.command == 'localq quantize "my model[31m" --format nf4'


@pytest.mark.parametrize("fields", [{"source": 3}, {"command": "x" * 3000}, {"licence": None}])
def test_a_malformed_record_is_refused(tmp_path: Path, fields: dict[str, object]):
    body = {**json.loads(ConversionRecord().to_bytes()), **fields}
    (tmp_path / RECORD_NAME).write_text(json.dumps(body))
    with pytest.raises(LocalqError) as caught:
        records.read(tmp_path)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_a_folder_without_a_record(tmp_path):
    assert records.read(tmp_path) is None

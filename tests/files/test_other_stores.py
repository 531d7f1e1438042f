"""Models of ollama and LM Studio: found where they are, named as there, and whatever is wrong there is one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog, local_models, other_stores, removal, verification
from localq.files.local_models import LocalModel
from tests.support.files import foreign_stores
from tests.support.files.foreign_stores import MODEL, add_blob, add_lm_studio, add_manifest, add_ollama, layer, manifest

GGUF = b"GGUF" + bytes(60)


@pytest.fixture
def ollama(tmp_path, monkeypatch) -> Path:
    return foreign_stores.use_home(tmp_path, monkeypatch)


def models() -> dict[str, LocalModel]:
    here = local_models.inventory()
    assert here.unreadable == []
    return {each.name: each for each in here.models}


def complaints() -> dict[str, LocalqError]:
    return {each.name: each.error for each in local_models.inventory().unreadable}


def failing(name: str) -> LocalqError:
    with pytest.raises(LocalqError) as caught:
        catalog.resolve(name)
    return caught.value


# ---- ollama


def test_names_are_those_of_ollama_list(ollama):
    blob = add_ollama(ollama, "llama3/8b", GGUF)
    add_ollama(ollama, "me/own/latest", GGUF + b"1")
    add_ollama(ollama, "hf.co/maker/Tiny-GGUF/Q4_K_M", GGUF + b"2")
    (ollama / "manifests" / ".DS_Store").write_bytes(b"x")
    found = models()
    assert set(found) == {"ollama/llama3:8b", "ollama/me/own:latest", "ollama/hf.co/maker/Tiny-GGUF:Q4_K_M"}
    each = found["ollama/llama3:8b"]
    assert (each.path, each.where, each.format, each.bytes) == (blob, "ollama", "gguf", 64)
    assert each.shared
    assert each.complete
    for name, model in found.items():
        target = catalog.resolve(name)
        assert (target.name, target.kind, target.path, target.store) == (name, "gguf", model.path, "ollama")
        assert local_models.matching(name) == [model]


def test_latest_is_left_out_and_case_does_not_matter(ollama):
    blob = add_ollama(ollama, "llama3/latest", GGUF)
    for name in ("ollama/llama3", "ollama/llama3:latest", "Ollama/LLAMA3", "ollama/library/llama3"):
        assert catalog.resolve(name).path == blob
        assert catalog.resolve(name).name == "ollama/llama3:latest"
    assert [each.name for each in local_models.matching("ollama/llama3")] == ["ollama/llama3:latest"]


def test_the_variable_and_the_service_name_other_folders(ollama, tmp_path, monkeypatch):
    blob = add_ollama(tmp_path / "service", "tiny/1b", GGUF)
    assert catalog.resolve("ollama/tiny:1b").path == blob
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "elsewhere"))
    assert failing("ollama/tiny:1b").exit_code == ExitCode.UNKNOWN_MODEL
    moved = add_ollama(tmp_path / "elsewhere", "tiny/1b", GGUF)
    assert models()["ollama/tiny:1b"].path == moved


def test_manifests_that_are_links_to_blobs_and_lists_of_manifests(ollama):
    digest = add_blob(ollama, GGUF)
    inner = add_blob(ollama, json.dumps(manifest(layer(MODEL, digest))).encode())
    children = [
        {"mediaType": "m", "digest": add_blob(ollama, b"{}"), "runner": "mlx", "format": "safetensors"},
        {"mediaType": "m", "digest": inner, "runner": "llamacpp", "format": "gguf"},
    ]
    outer = add_blob(ollama, json.dumps({"mediaType": "list", "manifests": children}).encode())
    path = add_manifest(ollama, "tiny/1.5b", "", "manifests-v2")
    path.unlink()
    path.symlink_to(os.path.relpath(ollama / "blobs" / outer.replace(":", "-"), path.parent))
    add_manifest(ollama, "tiny/1.5b", "damaged, but older")
    assert models()["ollama/tiny:1.5b"].path == ollama / "blobs" / digest.replace(":", "-")


def test_models_in_the_cloud_or_in_other_formats_are_passed_over(ollama):
    add_manifest(ollama, "large/cloud", {"schemaVersion": 2, "config": {}})
    add_manifest(ollama, "tensors/1b", manifest(layer("application/vnd.ollama.image.tensor", "sha256:" + "a" * 64)))
    assert models() == {}
    assert "not store this model as GGUF" in failing("ollama/large:cloud").why


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{not json", "not valid JSON"), ("[1]", "expected a JSON object"), (json.dumps({"layers": 7}), "the layers"),
        (json.dumps(manifest({"mediaType": MODEL, "digest": "sha256:../../../etc/passwd"})), "is not a sha256 digest"),
        (json.dumps(manifest({"mediaType": MODEL, "digest": 5})), "is not a sha256 digest"),
        (json.dumps(manifest(layer(MODEL, "sha256:" + "a" * 64))), "is missing"),
        ("x" * 2**21, "too large"),
        (json.dumps({"manifests": [{"digest": "sha256:" + "b" * 64}]}), "sha256-bbbb"),
        ("[" * 9000, "nested"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_one_line_with_the_command_that_repairs_it(ollama, body, words):
    add_manifest(ollama, "bad/1b", body)
    add_ollama(ollama, "good/1b", GGUF)
    (error,) = complaints().values()
    assert words in str(error)
    assert "\n" not in str(error)
    assert str(failing("ollama/bad:1b")) == str(error)
    assert [each.name for each in local_models.list_local()] == ["ollama/good:1b"]


def test_blobs_that_are_no_models(ollama, tmp_path):
    blob = add_ollama(ollama, "pickle/1b", b"PK\3\4")
    assert "is not a GGUF file" in complaints()["ollama/pickle:1b"].why
    blob.unlink()
    blob.symlink_to("nowhere")
    assert "is a broken link" in complaints()["ollama/pickle:1b"].why
    blob.unlink()
    blob.symlink_to(blob.name)
    assert "symbolic links" in complaints()["ollama/pickle:1b"].why
    blob.unlink()
    os.mkfifo(blob)
    assert "is not a file" in complaints()["ollama/pickle:1b"].why
    assert "`ollama pull pickle:1b`" in failing("ollama/pickle:1b").next_step


def test_a_manifest_that_leads_out_of_the_store_is_not_read(ollama, tmp_path):
    add_ollama(ollama, "good/1b", GGUF)
    path = add_manifest(ollama, "led/away", "{}")
    path.unlink()
    (tmp_path / "secret").write_text("{}")
    path.symlink_to(tmp_path / "secret")
    assert "a link that points outside ollama's folder" in complaints()["ollama/led:away"].why


def test_the_store_may_be_a_link_to_another_disk(ollama, tmp_path):
    add_ollama(tmp_path / "disk", "tiny/1b", GGUF)
    ollama.parent.mkdir()
    ollama.symlink_to(tmp_path / "disk")
    assert set(models()) == {"ollama/tiny:1b"}


def test_an_adapter_is_not_left_out_silently(ollama):
    body = manifest(layer(MODEL, add_blob(ollama, GGUF)), layer("application/vnd.ollama.image.adapter", "sha256:x"))
    add_manifest(ollama, "tuned/1b", body)
    assert "LoRA adapters" in complaints()["ollama/tuned:1b"].why


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_closed_folder_is_one_line(ollama):
    add_ollama(ollama, "tiny/1b", GGUF)
    (ollama / "manifests").chmod(0)
    try:
        assert set(complaints()) == {"ollama"}
    finally:
        (ollama / "manifests").chmod(0o700)


def test_a_folder_that_cannot_be_read_is_one_line(ollama, monkeypatch):
    add_ollama(ollama, "tiny/1b", GGUF)
    system = os.listdir

    def refuse(path: str = ".") -> list[str]:
        if str(path).endswith("manifests"):
            raise PermissionError(13, "Permission denied", str(path))
        return system(path)

    monkeypatch.setattr(os, "listdir", refuse)
    (error,) = complaints().values()
    assert (error.what, error.exit_code) == ("ollama", ExitCode.DISK)


@pytest.mark.parametrize("name", ["ollama/none", "ollama/a/b/c/d", "ollama/../x", "ollama/x:..", "ollama//x"])
def test_an_unknown_model_of_ollama(ollama, name):
    add_ollama(ollama, "tiny/1b", GGUF)
    error = failing(name)
    assert error.exit_code == ExitCode.UNKNOWN_MODEL
    assert f"hf.co/{name}" in error.next_step


def test_a_repository_or_a_folder_of_these_names_can_be_meant(ollama, tmp_path, monkeypatch):
    assert catalog.resolve("hf.co/ollama/tiny").repo == "ollama/tiny"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ollama" / "tiny").mkdir(parents=True)
    assert catalog.resolve("ollama/tiny").kind == "folder"


# ---- LM Studio


def test_files_of_lm_studio_in_both_folders(ollama, tmp_path):
    new = add_lm_studio(tmp_path, "maker/Tiny-GGUF/tiny-Q4_0.gguf", GGUF)
    add_lm_studio(tmp_path, "maker/Tiny-GGUF/mmproj-F16.gguf", GGUF)
    add_lm_studio(tmp_path, "maker/Tiny-GGUF/notes.txt", b"x")
    old = add_lm_studio(tmp_path, "maker/Old/old model.gguf", GGUF, ".cache/lm-studio/models")
    found = models()
    assert {name: each.path for name, each in found.items()} == {
        "lm-studio/maker/Tiny-GGUF/tiny-Q4_0.gguf": new, "lm-studio/maker/Old/old model.gguf": old,
    }  # fmt: skip
    for name, each in found.items():
        target = catalog.resolve(name)
        assert (target.name, target.path, target.store, each.where) == (name, each.path, "lm-studio", "lm-studio")
        assert local_models.matching(name) == [each]


def test_parts_links_and_damage_in_lm_studio(ollama, tmp_path):
    for number in (1, 2):
        add_lm_studio(tmp_path, f"maker/Split/m-0000{number}-of-00002.gguf", GGUF)
    add_lm_studio(tmp_path, "maker/Gap/m-00002-of-00002.gguf", GGUF)
    add_lm_studio(tmp_path, "maker/Zip/m.gguf", b"PK\3\4")
    broken = add_lm_studio(tmp_path, "maker/Gone/m.gguf", b"")
    broken.unlink()
    broken.symlink_to("nowhere")
    linked = tmp_path / ".lmstudio/models/maker/Linked"
    linked.symlink_to("Split")
    loop = tmp_path / ".lmstudio/models/loop"
    loop.symlink_to(".")
    here = local_models.inventory()
    names = {each.name: each.bytes for each in here.models if "loop" not in each.name}
    assert names == {f"lm-studio/maker/{each}/m-00001-of-00002.gguf": 128 for each in ("Split", "Linked")}
    why = {each.name: each.error.why for each in here.unreadable}
    assert "some parts are missing (found 1)" in why["lm-studio/maker/Gap/m-00002-of-00002.gguf"]
    assert "not a GGUF file" in why["lm-studio/maker/Zip/m.gguf"]
    assert "broken link" in why["lm-studio/maker/Gone/m.gguf"]


@pytest.mark.parametrize("name", ["maker/none.gguf", "maker/Tiny/none.gguf", "../../x.gguf", "a/b/c/d.gguf", "x"])
def test_an_unknown_file_of_lm_studio(ollama, tmp_path, name):
    add_lm_studio(tmp_path, "maker/Tiny/tiny.gguf", GGUF)
    (tmp_path / "x.gguf").write_bytes(GGUF)
    assert failing(f"lm-studio/{name}").exit_code == ExitCode.UNKNOWN_MODEL


# ---- what stays as it is


def test_nothing_is_removed_and_the_error_says_whose_file_it_is(ollama, tmp_path):
    add_ollama(ollama, "tiny/1b", GGUF)
    add_lm_studio(tmp_path, "maker/Tiny/tiny.gguf", GGUF)
    before = foreign_stores.state(tmp_path)
    said = {}
    for model in models().values():
        with pytest.raises(LocalqError) as caught:
            removal.remove([model])
        assert caught.value.exit_code == ExitCode.USAGE
        said[model.where] = str(caught.value)
    assert "belongs to ollama" in said["ollama"]
    assert "Run `ollama rm tiny:1b` to remove it." in said["ollama"]
    assert "belongs to LM Studio" in said["lm-studio"]
    assert foreign_stores.state(tmp_path) == before


def test_verifying_reads_the_hash_that_ollama_states_and_changes_nothing(ollama, tmp_path):
    blob = add_ollama(ollama, "tiny/1b", GGUF)
    add_lm_studio(tmp_path, "maker/Tiny/tiny.gguf", GGUF)
    before = foreign_stores.state(ollama.parent)
    found = models()
    states = {
        name: [each.state for each in verification.check(model, lambda *_: None)] for name, model in found.items()
    }
    assert states == {"ollama/tiny:1b": ["right"], "lm-studio/maker/Tiny/tiny.gguf": ["unrecorded"]}
    assert verification.find_damage(blob, "ollama/tiny:1b") is None
    assert foreign_stores.state(ollama.parent) == before
    blob.write_bytes(GGUF[:-1] + b"!")
    (checked,) = verification.check(found["ollama/tiny:1b"], lambda *_: None)
    assert checked.state == "wrong"
    assert verification.repair(found["ollama/tiny:1b"], [checked]) == "ollama rm tiny:1b && ollama pull tiny:1b"
    damage = verification.find_damage(blob, "ollama/tiny:1b")
    assert damage is not None
    assert damage.exit_code == ExitCode.BAD_FILE
    assert "ollama pull tiny:1b" in damage.next_step


def test_a_user_without_a_home_has_no_stores(monkeypatch):
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert list(other_stores.scan(lambda name, error: None)) == []


def test_a_name_of_the_catalogue_looks_into_no_store(ollama, monkeypatch):
    shutil.rmtree(ollama, ignore_errors=True)
    monkeypatch.setattr(other_stores, "scan", None)
    monkeypatch.setattr(other_stores, "find", None)
    assert catalog.resolve("qwen3-8b").kind == "catalogue"
    assert catalog.resolve("maker/model").kind == "repo"

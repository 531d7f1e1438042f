"""What `ls` sees and what `rm` frees: names that lead back, sizes counted once, nothing removed but what was named."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from localq import places
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, local_models, removal
from localq.files.hub import cache as hub_cache
from localq.files.hub import fetch as hub
from localq.files.local_models import LocalModel, list_local, matching
from localq.files.removal import remove
from localq.planner import model_facts
from localq.settings import Settings
from tests.support.files import cached_models, fake_hub

OTHER, THIRD = "a" * 40, "b" * 40
FILES = fake_hub.model_files(shards=2)
SIZE = sum(map(len, FILES.values()))


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))


def by_name() -> dict[str, LocalModel]:
    return {model.name: model for model in list_local()}


def test_nothing_is_there_yet():
    assert list_local() == []


def test_models_of_all_three_places_with_names_that_lead_back_to_them():
    listed = catalog.find("llama-3.1-8b")
    nf4, bf16 = listed.source("nf4"), listed.source("bf16")
    cached_models.put(nf4.repo, FILES)
    cached_models.put(bf16.repo, FILES)
    cached_models.put("maker/tiny", FILES)
    cached_models.put("maker/tiny-gguf", {"tiny.gguf": b"GGUF" * 9})
    places.embedded_dir().mkdir(parents=True)
    (places.embedded_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    made = places.quantized_dir() / "qwen3-8b@nf4"
    made.mkdir(parents=True)
    for name, content in FILES.items():
        (made / name).write_bytes(content)
    models = by_name()
    assert set(models) == {
        "llama-3.1-8b", "llama-3.1-8b@bf16", "maker/tiny", "maker/tiny-gguf", "smollm2-135m", "qwen3-8b@nf4"
    }  # fmt: skip
    assert all(model.complete for model in models.values())
    assert {model.where for model in models.values()} == {"hub", "embedded", "quantized"}
    assert models["maker/tiny"].bytes == models["qwen3-8b@nf4"].bytes == SIZE
    assert (models["maker/tiny-gguf"].bytes, models["maker/tiny-gguf"].format) == (36, "gguf")
    for name in ("llama-3.1-8b", "llama-3.1-8b@bf16", "maker/tiny", "maker/tiny-gguf"):
        assert hub.local_path(catalog.resolve(name)) == models[name].path


def test_a_second_source_of_a_format_does_not_take_the_name_of_the_first():
    gated = [each for each in catalog.find("llama-3.1-8b").sources if each.format == "bf16"][1]
    cached_models.put(gated.repo, FILES)
    assert set(by_name()) == {gated.repo}


@pytest.mark.parametrize(
    ("config", "format"),
    [
        ({"dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"text_config": {"torch_dtype": "float32"}}, "fp32"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
         "nf4"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "int8"),
        ({"quantization_config": {"quant_method": "aqlm"}, "dtype": "float16"}, "aqlm"),
        ({}, "unknown"),
    ],
)  # fmt: skip
def test_the_format_is_what_the_configuration_says(config, format):
    cached_models.put("maker/tiny", {**FILES, "config.json": json.dumps(config).encode()})
    assert by_name()["maker/tiny"].format == format


def test_a_damaged_configuration_is_listed_so_that_it_can_be_removed():
    cached_models.put("maker/tiny", {**FILES, "config.json": b"{not json"})
    assert by_name()["maker/tiny"].format == "unknown"


def test_what_is_cut_off_is_listed_as_incomplete_and_what_is_no_model_is_not():
    cut = cached_models.put("maker/cut", FILES)
    hub_cache.discard(cut / "model-00002-of-00002.safetensors")
    cached_models.put("maker/tokenizer-only", {name: FILES[name] for name in ("config.json", "tokenizer.json")})
    cached_models.put("maker/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    (places.hub_cache() / "datasets--maker--texts" / "snapshots").mkdir(parents=True)
    (places.hub_cache() / ".locks").mkdir()
    begun = hub_cache.repo_folder("maker/begun") / "blobs"
    begun.mkdir(parents=True)
    (begun / ("c" * 64 + ".1234abcd.incomplete")).write_bytes(bytes(777))
    models = by_name()
    assert {name: model.complete for name, model in models.items()} == {"maker/cut": False, "maker/begun": False}
    assert models["maker/begun"].bytes == 777
    assert models["maker/cut"].bytes == cached_models.stored_bytes("maker/cut")


def test_revisions_that_no_branch_names_carry_their_commit():
    cached_models.put("maker/tiny", FILES, OTHER, ref=None)
    cached_models.put("maker/tiny", {**FILES, "tokenizer_config.json": b"[1]"}, THIRD)
    assert set(by_name()) == {"maker/tiny", f"maker/tiny@{OTHER[:12]}"}
    [old] = matching(f"maker/tiny@{OTHER[:12]}")
    assert hub.local_path(catalog.resolve(old.name)) == old.path


# ---- removing


def test_a_revision_goes_and_what_another_one_shares_stays():
    old = cached_models.put("maker/tiny", FILES, OTHER, ref=None)
    new = cached_models.put("maker/tiny", {**FILES, "tokenizer_config.json": b"[1]"}, THIRD)
    assert remove(matching(f"maker/tiny@{OTHER}")) == len(FILES["tokenizer_config.json"])
    assert not old.exists()
    assert hub_cache.is_complete(new)


def test_a_repository_goes_with_all_it_has_and_nothing_else_does():
    cached_models.put("maker/tiny", FILES, OTHER, ref=None)
    cached_models.put("maker/tiny", {**FILES, "tokenizer_config.json": b"[1]"}, THIRD)
    (hub_cache.repo_folder("maker/tiny") / "blobs" / "dead.incomplete").write_bytes(bytes(99))
    stays = cached_models.put("maker/tiny2", FILES)
    same_commit = cached_models.put("maker/fork", FILES, THIRD)
    stored = cached_models.stored_bytes("maker/tiny")
    models = [*matching("maker/tiny"), *matching(f"maker/tiny@{OTHER[:12]}")]
    assert remove(models) == stored
    assert not hub_cache.repo_folder("maker/tiny").exists()
    assert hub_cache.is_complete(stays)
    assert hub_cache.is_complete(same_commit)


def test_one_gguf_of_several_goes_alone():
    folder = cached_models.put("maker/tiny-gguf", {"a.gguf": b"GGUF" * 5, "b.gguf": b"GGUF" * 7, "README.md": b"#"})
    models = {model.path.name: model for model in list_local()}
    assert remove([models["a.gguf"]]) == 20
    assert {path.name for path in folder.iterdir()} == {"b.gguf", "README.md"}
    assert cached_models.stored_bytes("maker/tiny-gguf") == 28 + 1
    remove(list_local())
    assert {path.name for path in folder.iterdir()} == {"README.md"}  # not counted, not named, not removed


@pytest.mark.parametrize("other", ["mmproj.bin", "sub/config.json"])
def test_a_gguf_goes_without_what_is_neither_counted_nor_named(other):
    folder = cached_models.put("maker/tiny-gguf", {"a.gguf": b"GGUF" * 5})
    (folder / other).parent.mkdir(exist_ok=True)
    (folder / other).write_bytes(bytes(1000))
    [model] = list_local()
    assert (model.bytes, removal.paths_of(model)) == (20, [str(folder / "a.gguf")])
    assert remove([model]) == 20
    assert [path for path in folder.rglob("*") if path.is_file()] == [folder / other]


def test_a_gguf_goes_with_its_tokenizer_counted_and_named():
    folder = cached_models.put("maker/tiny-gguf", {"a.gguf": b"GGUF" * 5, "tokenizer.json": b"[7]"})
    [model] = list_local()
    assert (model.bytes, removal.paths_of(model)) == (23, [str(folder / "a.gguf"), str(folder / "tokenizer.json")])
    assert remove([model]) == 23
    assert not hub_cache.repo_folder("maker/tiny-gguf").exists()


@pytest.mark.parametrize("vanishing", ["model-00002-of-00002.safetensors", "a.gguf"])
def test_a_file_that_goes_while_it_is_looked_at_is_no_reason_to_fail(monkeypatch, vanishing):
    stays = cached_models.put("maker/stays", FILES)
    gone = cached_models.put("maker/goes", {**FILES, "a.gguf": b"GGUF"}) / vanishing
    is_file = Path.is_file

    def then_goes(path):
        found = is_file(path)
        if path == gone:
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", then_goes)
    assert stays in [model.path for model in list_local()]


def test_a_cache_that_cannot_be_read_is_said(monkeypatch):
    cached_models.put("maker/tiny", FILES)

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    here = local_models.inventory()
    assert here.models == []
    [closed] = here.unreadable
    assert closed.name == "maker/tiny"
    with pytest.raises(LocalqError, match=r"maker/tiny: .* cannot be read \(Permission denied") as caught:
        matching("maker/tiny")
    assert caught.value.exit_code == ExitCode.DISK


def test_a_cut_off_download_goes_whole_but_spares_a_complete_revision():
    stays = cached_models.put("maker/begun", FILES, OTHER)
    cached_models.put("maker/begun", {"tokenizer.json": b"[9]"}, THIRD, ref=None)
    (hub_cache.repo_folder("maker/begun") / "blobs" / "dead.incomplete").write_bytes(bytes(501))
    [begun] = [model for model in list_local() if not model.complete]
    assert begun.bytes == 501 + 3
    assert remove([begun]) == 501 + 3
    assert [model.path for model in list_local()] == [stays]
    assert hub_cache.incomplete_files("maker/begun") == []


def test_a_repository_that_the_client_cannot_read_goes_all_the_same():
    folder = cached_models.put("maker/tiny", FILES)
    (folder / "tokenizer_config.json").resolve().unlink()  # a broken link: the client calls that corrupted
    stored = cached_models.stored_bytes("maker/tiny")
    assert remove(matching("maker/tiny")) == stored + len(fake_hub.COMMIT)  # the ref is a file, too
    assert not hub_cache.repo_folder("maker/tiny").exists()


def test_embedded_and_quantized_models_go_by_name():
    places.embedded_dir().mkdir(parents=True)
    (places.embedded_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF" * 3)
    made = places.quantized_dir() / "qwen3-8b@nf4"
    made.mkdir(parents=True)
    (made / "model.safetensors.part").write_bytes(bytes(1000))
    assert remove(matching("smollm2:135m")) == 12
    [model] = matching("qwen3-8b@nf4")
    assert not model.complete
    assert remove([model]) == 1000
    assert list_local() == []


def test_only_what_localq_knows_by_name_is_removed(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(LocalqError) as caught:
        matching(str(tmp_path / "mine"))
    assert caught.value.exit_code == ExitCode.USAGE
    assert "fetched" not in str(caught.value)  # what other tools fetched is removed by its name, too
    for name in ("llama-3.1-8b", "maker/nothing", "no-such-model"):
        with pytest.raises(LocalqError) as caught:
            matching(name)
        assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL


def test_what_cannot_be_removed_is_said(monkeypatch):
    places.embedded_dir().mkdir(parents=True)
    (places.embedded_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")

    def denied(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.unlink", denied)
    with pytest.raises(LocalqError) as caught:
        remove(matching("smollm2-135m"))
    assert caught.value.exit_code == ExitCode.DISK
    assert "Permission denied" in str(caught.value)


def test_a_shared_blob_stays_while_another_repository_links_to_it():
    """The layout of huggingface_hub 2: blobs may be links into a store that the whole cache shares."""
    store = places.hub_cache() / "blobs" / "ab" / ("ab" * 32)
    store.parent.mkdir(parents=True)
    store.write_bytes(b"GGUF" * 11)
    for repo in ("maker/one", "maker/two"):
        folder = cached_models.put(repo, {"x.gguf": b"", "y.gguf": b"GGUF"})
        blob = (folder / "x.gguf").resolve()
        blob.unlink()
        blob.symlink_to(os.path.relpath(store, blob.parent))
    models = {(model.repo, model.path.name): model for model in list_local()}
    assert models["maker/one", "x.gguf"].bytes == 44
    assert remove([models["maker/one", "x.gguf"]]) == 0
    assert models["maker/two", "x.gguf"].path.read_bytes() == b"GGUF" * 11
    assert "maker/one" in {model.repo for model in local_models.list_local()}


@pytest.mark.parametrize("name", ["gone-8b@nf4", "gone", "qwen3-8b@mxfp4"])
def test_a_model_made_here_that_the_catalogue_lacks_goes_by_the_name_that_is_listed(name):
    """By a catalogue file that the user has changed since, or an earlier version of localq."""
    made = places.quantized_dir() / name
    for unknown in (name, name.upper(), f"{name}x"):
        with pytest.raises(LocalqError) as caught:
            catalog.resolve(unknown)
        assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL
    made.mkdir(parents=True)
    for file, content in FILES.items():
        (made / file).write_bytes(content)
    [listed] = list_local()
    assert listed.name == name
    for asked in (name, name.upper()):
        assert catalog.resolve(asked).path == made
        assert model_facts.of_name(asked, Settings())["path"] == str(made)
        assert [each.path for each in matching(asked)] == [made]
    (made / "config.json").unlink()
    with pytest.raises(LocalqError) as caught:
        catalog.resolve(name)
    assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL

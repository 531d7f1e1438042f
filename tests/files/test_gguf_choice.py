"""Which .gguf files of a repository are models, what their tags are, and which one a tag or a file name means."""

from __future__ import annotations

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import gguf_choice

REPO = "maker/tiny-GGUF"


def labels(*names: str) -> list[str]:
    return [each.label for each in gguf_choice.choices(names)]


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("llama-2-7b.Q5_K_S.gguf", "Q5_K_S"),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Model.i1-IQ3_XXS.gguf", "IQ3_XXS"),
        ("Q6_K/model-00001-of-00003.gguf", "Q6_K"),
        ("BF16/model-BF16-00001-of-00002.gguf", "BF16"),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "FP16"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("model-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("model-TQ1_0.gguf", "TQ1_0"),
        ("gemma-3-12b-it-qat-q4_0.gguf", "Q4_0"),
        ("tiny.gguf", ""),
        ("Q4_K_Mixed.gguf", ""),
    ],
)
def test_the_tag_of_a_name(name, tag):
    assert gguf_choice.tag_of(name) == tag


@pytest.mark.parametrize(
    ("name", "is_model"),
    [
        ("mmproj-F16.gguf", False), ("model-mmproj-Q8_0.gguf", False), ("mmproj/model-F16.gguf", False),
        ("imatrix.gguf", False), ("imatrix_unsloth.gguf", False), ("model.imatrix.gguf", False),
        ("model-imatrix-Q4_0.gguf", True), ("MODEL.GGUF", True), ("model.gguf_file", False),
        ("config.json", False),
    ],
)  # fmt: skip
def test_projectors_and_statistics_are_no_models(name, is_model):
    assert gguf_choice.is_model(name) is is_model


def test_parts_are_one_model_and_a_set_with_a_gap_is_none():
    whole = [f"Q4_K_M/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    (found,) = gguf_choice.choices([*reversed(whole), "m-Q8_0-00002-of-00002.gguf"])
    assert (found.tag, found.label, found.files) == ("Q4_K_M", "Q4_K_M", tuple(whole))
    seen = gguf_choice.choices([*whole, "m-Q8_0-00002-of-00002.gguf"], incomplete=True)
    assert [each.label for each in seen] == ["Q4_K_M", "Q8_0"]


def test_a_model_that_is_published_whole_and_in_parts_is_taken_whole():
    assert labels("m-q4_0.gguf", "m-q4_0-00001-of-00002.gguf", "m-q4_0-00002-of-00002.gguf") == ["Q4_0"]


def test_a_tag_that_two_models_share_names_neither():
    assert labels("large-Q4_0.gguf", "small-Q4_0.gguf", "tiny.gguf") == [
        "large-Q4_0.gguf", "small-Q4_0.gguf", "tiny.gguf",
    ]  # fmt: skip
    found = gguf_choice.choices(["large-Q4_0.gguf", "small-Q4_0.gguf"])
    with pytest.raises(LocalqError, match="matches 2 GGUF models") as caught:
        gguf_choice.select(found, "Q4_0", REPO)
    assert caught.value.exit_code == ExitCode.USAGE
    assert f"{REPO}/large-Q4_0.gguf" in caught.value.next_step
    assert gguf_choice.select(found, "small-Q4_0.gguf", REPO).files == ("small-Q4_0.gguf",)
    assert gguf_choice.select(found, "small", REPO).files == ("small-Q4_0.gguf",)


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("q4_k_m", "m-Q4_K_M.gguf"), ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"), ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("Q8_0", "Q8_0/m-00001-of-00002.gguf"), ("Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00001-of-00002.gguf"),
        ("m-00002-of-00002.gguf", "Q8_0/m-00001-of-00002.gguf"), ("M-q4_k_m.GGUF", "m-Q4_K_M.gguf"),
    ],
)  # fmt: skip
def test_what_a_tag_or_file_name_means(wanted, file):
    names = ["m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf"]
    assert gguf_choice.select(gguf_choice.choices(names), wanted, REPO).files[0] == file
    assert gguf_choice.find(names, wanted)[0] == file


@pytest.mark.parametrize("wanted", ["Q4_K", "Q4", "K_M", "Q2_K", "other.gguf", "m", ".*"])
def test_an_unknown_tag_lists_the_tags_that_are_there(wanted):
    found = gguf_choice.choices(["m-Q4_K_M.gguf", "m-Q8_0.gguf"])
    if wanted == "m":
        assert gguf_choice.find(["m-Q4_K_M.gguf", "m-Q8_0.gguf"], wanted) == ()  # both
        return
    with pytest.raises(LocalqError, match="available: Q4_K_M, Q8_0") as caught:
        gguf_choice.select(found, wanted, REPO)
    assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL
    assert f"{REPO}:Q4_K_M" in caught.value.next_step


def test_the_usual_choice_is_that_of_llama_cpp():
    assert gguf_choice.best(gguf_choice.choices(["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"])).tag == "Q4_K_M"
    assert gguf_choice.best(gguf_choice.choices(["m-Q2_K.gguf", "m-Q8_0.gguf"])).tag == "Q2_K"


def test_parts_on_the_disk(tmp_path):
    paths = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for path in paths[:2]:
        path.write_bytes(b"GGUF")
    assert gguf_choice.parts_of(paths[0]) == paths[:2]
    upper = [path.rename(path.with_suffix(".GGUF")) for path in paths[:2]]
    assert gguf_choice.parts_of(upper[0]) == upper
    assert gguf_choice.parts_of(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]

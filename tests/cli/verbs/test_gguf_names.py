"""ORG/REPO:TAG and ORG/REPO/FILE.gguf in every verb, and the list for a repository that has several GGUF models."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from localq import cli
from localq.cli import gguf_list
from localq.errors import LocalqError
from localq.files.hub import cache as hub_cache
from localq.settings import Settings
from tests.support.files import cached_models, fake_hub, hub_server
from tests.support.files.uncatalogued_models import gguf, model

REPO = "maker/tiny-GGUF"
SMALL, LARGE = gguf(300, 1000), gguf(300, 4000)
PARTS = [f"Q8_0/tiny-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
FILES = {
    "tiny-Q2_K.gguf": SMALL, "tiny-Q4_K_M.gguf": LARGE, "tiny-UD-Q4_K_XL.gguf": LARGE + b"1",
    "mmproj-F16.gguf": b"GGUF", "imatrix.gguf": b"GGUF", PARTS[0]: LARGE + b"2", PARTS[1]: LARGE + b"3",
    "README.md": b"#", "config.json": b'{"model_type": "llama"}', "generation_config.json": b"{}",
}  # fmt: skip
KEPT = ["config.json", "generation_config.json"]  # beside the model


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr("sys.stdin", io.StringIO())
        server.add(REPO, FILES)
        yield server


def localq(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert cli.execute(list(arguments)) == code, capsys.readouterr()
    captured = capsys.readouterr()
    return captured.out, captured.err


def snapshot() -> Path:
    return hub_cache.repo_folder(REPO) / "snapshots" / fake_hub.COMMIT


def here() -> list[str]:
    folder = snapshot()
    return sorted(path.relative_to(folder).as_posix() for path in hub_cache.files_below(folder))


def names(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [each["name"] for each in json.loads(localq(capsys, "ls", "--json")[0])["models"]]


@pytest.mark.parametrize("prefix", ["", "hf.co/", "https://huggingface.co/"])
@pytest.mark.parametrize("name", [f"{REPO}:q4_k_m", f"{REPO}/tiny-Q4_K_M.gguf", f"{REPO}:tiny-Q4_K_M.gguf"])
def test_pull_fetches_one_model_and_the_small_files(server, capsys, name, prefix):
    out, err = localq(capsys, "pull", prefix + name, "--vram", "4")
    assert here() == sorted([*KEPT, "tiny-Q4_K_M.gguf"])
    assert Path(out.strip()) == snapshot() / "tiny-Q4_K_M.gguf"
    assert Path(out.strip()).is_symlink()  # the layout of the cache: the content is a blob
    assert "downloaded and verified" in err
    assert names(capsys) == [f"{REPO}:Q4_K_M"]
    server.requests.clear()
    assert localq(capsys, "pull", name, "--offline")[0] == out
    assert server.requests == []


def test_all_parts_are_one_model_in_a_folder(server, capsys):
    out, _ = localq(capsys, "pull", f"{REPO}:Q8_0", "--vram", "4", "--force")
    assert Path(out.strip()) == snapshot() / PARTS[0]
    assert here() == sorted([*KEPT, *PARTS])
    (row,) = json.loads(localq(capsys, "ls", "--json")[0])["models"]
    assert (row["name"], row["complete"], row["where"]) == (f"{REPO}:Q8_0", True, "hub")
    assert row["bytes"] == sum(len(FILES[name]) for name in (*PARTS, *KEPT))
    (checked,) = json.loads(localq(capsys, "verify", f"{REPO}:q8_0", "--json")[0])["models"]
    assert [(Path(each["path"]).name, each["state"]) for each in checked["files"]] == [
        (Path(name).name, "right") for name in PARTS
    ]
    localq(capsys, "rm", f"{REPO}:Q8_0", "--yes")
    assert names(capsys) == []
    assert not hub_cache.repo_folder(REPO).exists()


def test_a_part_that_is_missing_makes_it_incomplete_and_pull_fetches_it(server, capsys):
    localq(capsys, "pull", f"{REPO}:Q8_0", "--vram", "4", "--force")
    hub_cache.discard(snapshot() / PARTS[1])
    (row,) = json.loads(localq(capsys, "ls", "--json")[0])["models"]
    assert (row["name"], row["complete"]) == (f"{REPO}:Q8_0", False)
    assert "offline" in localq(capsys, "pull", f"{REPO}:Q8_0", "--offline", code=6)[1]
    server.requests.clear()
    localq(capsys, "pull", f"{REPO}:Q8_0", "--vram", "4", "--force")
    assert server.fetched()[-1:] == ["tiny-Q8_0-00002-of-00002.gguf"]
    assert snapshot().joinpath(PARTS[1]).is_file()


def test_an_unknown_tag_lists_the_tags(server, capsys):
    for verb in (["pull"], ["fit", "--vram", "4"], ["run", "--dry-run"]):
        err = localq(capsys, *verb, f"{REPO}:Q5_K_M", code=4)[1]
        assert "no GGUF model matches Q5_K_M; available: Q2_K, Q4_K_M, Q8_0, UD-Q4_K_XL" in err
    assert "mmproj" not in err
    assert not hub_cache.repo_folder(REPO).exists()


@pytest.mark.parametrize("name", [REPO, f"hf.co/{REPO}", f"{REPO}:latest"])
@pytest.mark.parametrize("verb", [["pull"], ["pull", "--dry-run"], ["chat", "--plain"], ["chat", "--dry-run"], ["run"]])
def test_without_a_tag_the_models_are_listed_with_the_verdict_on_each(server, capsys, verb, name):
    words = ["hello"] if verb == ["run"] else []
    out, err = localq(capsys, verb[0], name, *words, *verb[1:], code=2)
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == f"localq: {REPO}: found 4 GGUF models; select one by its tag:"
    assert lines[1].split() == ["TAG", "SIZE", "PARTS", "VERDICT"]
    assert [line.split()[0] for line in lines[2:6]] == ["Q2_K", "Q4_K_M", "UD-Q4_K_XL", "Q8_0"]
    assert [line.split()[3] for line in lines[2:6]] == ["1", "1", "1", "2"]
    assert all("fits with 8,192 tokens of context" in line for line in lines[2:6])
    assert lines[6:] == [f"Run `localq {verb[0]} {REPO}:Q4_K_M`."]
    assert server.sent_of("tiny-Q4_K_M.gguf") <= len(LARGE)
    assert not any(server.sent_of(Path(each).name) for each in FILES if each != "tiny-Q4_K_M.gguf")  # one header
    assert not hub_cache.repo_folder(REPO).exists()


def test_the_list_comes_before_the_full_screen(server, monkeypatch):
    with pytest.raises(LocalqError, match="select one by its tag") as caught:
        gguf_list.check(Settings(model=REPO), "chat")
    assert caught.value.next_step == f"Run `localq chat {REPO}:Q4_K_M`."
    server.requests.clear()
    for name in (f"{REPO}:Q4_K_M", "qwen3-8b", "no-such-model", "maker/none"):
        gguf_list.check(Settings(model=name), "chat")  # opening it says what is wrong
    assert {each.path.partition("?")[0] for each in server.requests} == {"/api/models/maker/none/revision/main"}


def test_the_command_is_of_the_largest_that_fits_where_the_usual_one_does_not(server, capsys):
    big = {f"big-{tag}.gguf": gguf(300, 400_000 + 1000 * at) for at, tag in enumerate(("Q2_K", "Q3_K_M", "Q6_K"))}
    server.add("maker/big-GGUF", big)
    err = localq(capsys, "pull", "maker/big-GGUF", "--vram", "4", code=2)[1]
    assert err.splitlines()[-1] == "Run `localq pull maker/big-GGUF:Q6_K`."
    err = localq(capsys, "pull", "maker/big-GGUF", "--vram", "500MiB", code=2)[1]
    assert err.count("too large: needs") == 3
    assert err.splitlines()[-1].startswith(
        "None of them fits on this machine. To list the models that fit, run `localq fit"
    )


def test_the_list_names_the_revision_that_was_asked_for(server, capsys):
    for arguments in ([f"{REPO}@main"], [REPO, "--revision", "main"]):
        err = localq(capsys, "pull", *arguments, "--vram", "4", code=2)[1]
        assert err.splitlines()[-1] == f"Run `localq pull {REPO}@main:Q4_K_M`."
    localq(capsys, "pull", f"{REPO}@main:Q4_K_M", "--vram", "4")
    assert "tiny-Q4_K_M.gguf" in here()


def test_models_that_cannot_run_are_listed_with_the_reason(server, capsys):
    server.add("maker/odd-GGUF", {"odd-Q4_0.gguf": SMALL.replace(b"llama", b"lllma"), "odd-Q8_0.gguf": LARGE})
    err = localq(capsys, "pull", "maker/odd-GGUF", code=2)[1]
    assert err.count("not supported: the architecture 'lllma' is not supported") == 2


def test_fit_has_a_row_for_each_model(server, capsys):
    rows = json.loads(localq(capsys, "fit", REPO, "--vram", "4", "--json")[0])["rows"]
    assert [each["name"] for each in rows] == [f"{REPO}:{tag}" for tag in ("Q2_K", "Q4_K_M", "UD-Q4_K_XL", "Q8_0")]
    assert rows[1]["download_bytes"] == len(LARGE) + sum(len(FILES[name]) for name in KEPT)
    (one,) = json.loads(localq(capsys, "fit", f"{REPO}:Q4_K_M", "--vram", "4", "--json")[0])["rows"]
    assert one == rows[1]
    assert server.sent_of("tiny-Q2_K.gguf") == 0


def test_offline_the_models_that_are_here_are_listed(server, capsys):
    for tag in ("Q2_K", "Q4_K_M"):
        localq(capsys, "pull", f"{REPO}:{tag}", "--vram", "4")
    assert sorted(names(capsys)) == [f"{REPO}:Q2_K", f"{REPO}:Q4_K_M"]
    server.requests.clear()
    for verb in (["pull", "--offline"], ["chat", "--offline", "--plain"], ["show"]):
        err = localq(capsys, verb[0], REPO, *verb[1:], code=2)[1].partition("localq: ")[2]
        assert [line.split()[0] for line in err.splitlines()[2:4]] == ["Q2_K", "Q4_K_M"]
        assert err.splitlines()[-1] == f"Run `localq {verb[0]} {REPO}:Q4_K_M`."
    rows = json.loads(localq(capsys, "fit", REPO, "--vram", "4", "--offline", "--json")[0])["rows"]
    assert [each["name"] for each in rows] == [f"{REPO}:Q2_K", f"{REPO}:Q4_K_M"]
    assert server.requests == []
    facts = json.loads(localq(capsys, "show", f"{REPO}:q2_k", "--json")[0])
    assert (facts["name"], facts["format"]) == (f"{REPO}:Q2_K", "gguf")
    assert facts["path"] == str(snapshot() / "tiny-Q2_K.gguf")


def test_show_of_one_that_is_not_here_says_how_to_get_it(server, capsys):
    assert f"`localq pull {REPO}:Q4_K_M` downloads it" in localq(capsys, "show", f"{REPO}:Q4_K_M", code=4)[1]
    assert server.requests == []


def test_rm_removes_the_one_that_is_named(server, capsys):
    for tag in ("Q2_K", "Q4_K_M", "Q8_0"):
        localq(capsys, "pull", f"{REPO}:{tag}", "--vram", "4", "--force")
    localq(capsys, "rm", f"{REPO}:q4_k_m", "--yes")
    assert here() == sorted([*KEPT, *PARTS, "tiny-Q2_K.gguf"])
    localq(capsys, "rm", f"{REPO}/{PARTS[0]}", "--yes")
    assert here() == sorted([*KEPT, "tiny-Q2_K.gguf"])
    assert "not on this machine" in localq(capsys, "rm", f"{REPO}:Q8_0", "--yes", code=4)[1]
    localq(capsys, "rm", REPO, "--yes")  # the last one, with the small files
    assert not hub_cache.repo_folder(REPO).exists()


def test_a_download_that_breaks_off_resumes(server, capsys):
    server.fail("tiny-Q4_K_M.gguf whole", cut_after=500_000)
    localq(capsys, "pull", f"{REPO}:Q4_K_M", "--vram", "4")
    ranges = [each.headers.get("range", "") for each in server.seen("GET", "tiny-Q4_K_M.gguf")]
    assert ranges[-1].startswith("bytes=")
    assert not ranges[-1].startswith("bytes=0")
    assert (snapshot() / "tiny-Q4_K_M.gguf").read_bytes() == LARGE


def test_a_plain_name_of_a_repository_with_safetensors_means_these(server, capsys):
    both = {**model(), "tiny-Q4_0.gguf": SMALL, "tiny-Q8_0.gguf": LARGE}
    server.add("maker/both", both)
    localq(capsys, "pull", "maker/both:Q4_0", "--vram", "4")
    assert names(capsys) == ["maker/both:Q4_0"]
    assert "offline" in localq(capsys, "pull", "maker/both", "--offline", code=6)[1]
    localq(capsys, "pull", "maker/both", "--vram", "4")
    assert sorted(names(capsys)) == ["maker/both", "maker/both:Q4_0"]


def test_the_only_model_of_a_repository_needs_no_tag(server, capsys):
    server.add("maker/one", {"one-Q4_0.gguf": SMALL, "mmproj-F16.gguf": b"GGUF"})
    localq(capsys, "pull", "maker/one", "--vram", "4")
    assert names(capsys) == ["maker/one:Q4_0"]
    assert (
        localq(capsys, "pull", "maker/one:q4_0", "--offline")[0] == localq(capsys, "pull", "maker/one", "--offline")[0]
    )


def test_files_of_other_tools_have_these_names_too(server, capsys):
    cached_models.put("other/tiny", {"tiny-Q2_K.gguf": SMALL, "sub/tiny-Q8_0.gguf": LARGE, "mmproj-F16.gguf": b"GGUF"})
    assert sorted(names(capsys)) == ["other/tiny:Q2_K", "other/tiny:Q8_0"]
    out, _ = localq(capsys, "pull", "other/tiny:q8_0", "--offline")
    assert Path(out.strip()).read_bytes() == LARGE


@pytest.mark.parametrize("name", ["../x-Q4_0.gguf", "a/b/x-Q4_0.gguf", ".hidden/x-Q4_0.gguf", "-x/x-Q4_0.gguf"])
def test_a_name_on_the_hub_never_becomes_another_path(server, capsys, name):
    server.add("maker/hostile", {name: SMALL, "good-Q8_0.gguf": LARGE})
    assert "available: Q8_0." in localq(capsys, "pull", "maker/hostile:Q4_0", code=4)[1]


def test_json_of_a_dry_run(server, capsys):
    plan: dict[str, Any] = json.loads(localq(capsys, "pull", f"{REPO}:Q4_K_M", "--dry-run", "--vram", "4", "--json")[0])
    (each,) = plan["models"]
    assert (each["name"], each["format"], each["fits"]) == (f"{REPO}:Q4_K_M", "gguf", True)
    assert [file["name"] for file in each["files"]] == [*KEPT, "tiny-Q4_K_M.gguf"]

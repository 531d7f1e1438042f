"""The plan of an upload: which licences count, which names and files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from localq.errors import ExitCode
from localq.files.publish import plan as plans
from localq.files.publish.plan import PushPlan, PushRequest
from tests.support.files import made_models
from tests.support.files.fake_hub import FakeHub
from tests.support.files.hub_server import refused
from tests.support.files.made_models import BASE

REPO = "someone/tiny-llama-nf4"


def plan(folder: Path, **options: object) -> PushPlan:
    return plans.plan(PushRequest(folder, REPO, **options))


def state(server: FakeHub, **card: object) -> None:
    """Let the card of the source's repository state this."""
    server.repos[BASE].card.clear()
    server.repos[BASE].card.update(card)


@pytest.mark.parametrize(
    ("card", "named"),
    [
        ({"license": "Somebodys-Own"}, "somebodys-own"),
        ({"license": "other", "license_name": "somebodys-own"}, "somebodys-own"),
        ({"license": ["apache-2.0", "somebodys-own"]}, "somebodys-own"),
        ({"license": "two words, and more"}, "two words, and more"),
    ],
)
def test_a_stated_licence_without_known_terms_has_to_be_acknowledged(made, server, card, named):
    state(server, **card)
    error = refused(plan, made)
    assert (error.exit_code, error.what) == (ExitCode.USAGE, BASE)
    assert f"does not know the terms of its licence, {named}" in error.why
    assert "--license " in error.next_step
    assert named in error.next_step
    assert plan(made, licence=named.upper()).terms[-1].id == named
    for other in ("mit", "apache-2.0"):
        assert refused(plan, made, licence=other).exit_code == ExitCode.USAGE


@pytest.mark.parametrize("id", ["unknown", "other", " Other", "", None, 3, ["apache-2.0", "unknown"], []])
@pytest.mark.parametrize("name", [None, "unknown", "other"])
def test_what_states_no_licence_is_not_known(made, server, id, name):
    state(server, license=id, license_name=name)
    assert "is not known" in refused(plan, made).why
    assert "is not known" in refused(plan, made, licence="unknown").why
    assert plan(made, licence="mit").licence == "mit"


def test_a_recorded_licence_without_known_terms_has_to_be_acknowledged(made, server, tmp_path):
    state(server)
    folder = made_models.copy(made, tmp_path)
    made_models.change_record(folder, licence="mystery")
    assert "does not know the terms" in refused(plan, folder).why
    assert plan(folder, licence="mystery").licence == "mystery"


def test_every_licence_of_a_list_counts(made, server):
    state(server, license=["mit", "cc-by-nd-4.0"])
    assert refused(plan, made).exit_code == ExitCode.FAILURE
    state(server, license=["mit", "llama3.1"])
    assert "begins with Llama" in refused(plan, made).why
    state(server, license=["mit", "cc-by-nc-4.0"])
    found = plan(made)
    assert 'license:\n- "mit"\n- "cc-by-nc-4.0"\n' in found.card
    assert "Commercial use is not allowed." in found.card
    assert "[MIT License](https://opensource.org/license/mit) and [Creative" in found.card
    assert any("mit (MIT License), cc-by-nc-4.0 (" in line for line in plans.summary(found))
    assert 'licence = "mit, cc-by-nc-4.0"' in plans.catalogue_source(found, "a" * 40)
    state(server, license=["mit", "other"], license_name="qwen-research")
    found = plan(made)
    assert 'license: other\nlicense_name: "mit, qwen-research"\n' in found.card
    assert "Improved using Qwen" in found.card
    assert "Qwen RESEARCH LICENSE" in next(each for each in found.files if each.name == "NOTICE").content.decode()


def test_gemma_needs_a_copy_of_its_terms(made, server, tmp_path):
    folder = made_models.copy(made, tmp_path)
    state(server, license="gemma")
    server.add(BASE, {"README.md": b""}, commit="d" * 40)
    error = refused(plan, folder)
    assert "requires including a copy" in error.why
    assert f"Save the text of https://ai.google.dev/gemma/terms as {folder / 'LICENSE'}." in error.next_step
    (folder / "LICENSE").write_text("Gemma Terms of Use")
    assert {"LICENSE", "NOTICE"} <= {each.name for each in plan(folder).files}


@pytest.mark.parametrize("id", ["apache-2.0", "mit", "bsd-3-clause"])
def test_common_licences_need_no_copy_and_the_card_links_their_text(made, server, id):
    state(server, license=id)
    server.add(BASE, {"README.md": b""}, commit="d" * 40)
    found = plan(made)
    assert "LICENSE" not in {each.name for each in found.files}
    assert f"]({found.terms[0].source})" in found.card


def test_of_a_source_that_the_hub_has_no_more_the_record_counts(made, server, tmp_path):
    folder = made_models.copy(made, tmp_path)
    made_models.change_record(folder, licence="mit")
    del server.repos[BASE]
    found = plan(folder)
    assert 'license: "mit"' in found.card
    assert "LICENSE" not in {each.name for each in found.files}


def test_a_source_that_cannot_be_reached_is_an_error(made, server):
    server.fail(f"GET /{BASE}/resolve/", *[500] * 40)
    assert refused(plan, made).exit_code == ExitCode.NETWORK


def test_a_known_licence_is_not_contradicted(made, server):
    error = refused(plan, made, licence="mit")
    assert (error.exit_code, error.what) == (ExitCode.USAGE, "--license mit")
    assert f"the licence of {BASE} is apache-2.0" in error.why


def test_a_licence_that_forbids_it(made, server):
    state(server, license="cc-by-nc-nd-4.0")
    error = refused(plan, made, force=True)
    assert error.exit_code == ExitCode.FAILURE
    assert "does not allow redistribution" in error.why
    assert "https://creativecommons.org" in error.why


FORBIDDEN = ["a--b", "a..b", "ab.", "ab-", "ab.git", "a" * 97]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_names_that_the_hub_forbids(tmp_path, server, name):
    """Before anything else: there is no such folder."""
    for request, what in [
        (PushRequest(tmp_path / "none", f"someone/{name}"), f"someone/{name}"),
        (PushRequest(tmp_path / "none", REPO, base=f"someone/{name}"), f"--base someone/{name}"),
    ]:
        error = refused(plans.plan, request)
        assert (error.exit_code, error.what) == (ExitCode.USAGE, what)
        assert "at most 96 characters, no -- or .." in error.why
        assert "ORG/REPO" in error.next_step
    assert server.requests == []


def test_a_recorded_source_of_a_forbidden_name_has_to_be_replaced(made, server, tmp_path):
    folder = made_models.copy(made, tmp_path)
    made_models.change_record(folder, repo="someone/a--b")
    error = refused(plan, folder)
    assert (error.exit_code, "--base" in error.next_step) == (ExitCode.USAGE, True)
    assert plan(folder, base=BASE).base == BASE


# ---- links


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE", "USE_POLICY.md"])
@pytest.mark.parametrize("target", ["outside", "inside", "nothing"])
def test_a_licence_text_is_no_link(made, server, tmp_path, name, target):
    folder = made_models.copy(made, tmp_path)
    targets = {"outside": tmp_path / "secret", "inside": folder / "private.txt", "nothing": folder / "nothing"}
    for each in ("outside", "inside"):
        targets[each].write_text("secret")
    (folder / name).symlink_to(targets[target])
    error = refused(plan, folder)
    assert (error.exit_code, error.what) == (ExitCode.BAD_FILE, str(folder / name))
    assert "symbolic link" in error.why


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "localq.json", "localq.sha256", "notes.txt"])
def test_a_link_to_a_file_outside_is_refused(made, server, tmp_path, name):
    folder = made_models.copy(made, tmp_path)
    outside = tmp_path / name
    if (folder / name).exists():
        (folder / name).rename(outside)
    else:
        outside.write_text("secret")
    (folder / name).symlink_to(outside)
    error = refused(plan, folder)
    assert (error.exit_code, error.what) == (ExitCode.BAD_FILE, str(folder / name))
    assert "points outside the model folder" in error.why


def test_a_link_within_the_folder_and_to_the_folder_are_followed(made, server, tmp_path):
    folder = made_models.copy(made, tmp_path)
    (folder / "config.json").rename(folder / "other.json")
    (folder / "config.json").symlink_to("other.json")
    (tmp_path / "link").symlink_to(folder)
    assert plan(tmp_path / "link").files

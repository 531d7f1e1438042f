"""Uploads against a hub on the loopback address, by the client library: what arrives, what failures cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from localq import disk
from localq.errors import ExitCode, LocalqError
from localq.files.publish import plan as plans
from localq.files.publish import upload
from localq.files.publish.plan import PushRequest
from tests.support.files import made_models
from tests.support.files.fake_hub import FakeHub
from tests.support.files.hub_server import TOKEN, refused

REPO = "someone/tiny-llama-nf4"
CREATE, PREUPLOAD, BATCH, PUT, COMMIT = "POST /api/repos", "/preupload/", "objects/batch", "PUT /store", "/commit/"


def push(folder: Path, **options: object) -> str:
    return upload.push(plans.plan(PushRequest(folder, REPO, **options)))


def held(server: FakeHub, repo: str = REPO) -> dict[str, bytes]:
    found = server.repos[repo]
    return found.commits[found.refs["main"]]


def is_whole(server: FakeHub, folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    return all(held(server)[name] == (folder / name).read_bytes() for name in names)


def sent(server: FakeHub) -> list[str]:
    """The hashes of the files that went to the store, in order."""
    return [each.path.split("/")[2].partition("?")[0] for each in server.seen("PUT", "/store/")]


@pytest.mark.parametrize("part_bytes", [0, 50_000])
def test_all_files_arrive_whole_or_in_parts(sharded, server, part_bytes):
    server.store.part_bytes = part_bytes
    push(sharded)
    assert is_whole(server, sharded)
    assert {".gitattributes", "README.md", "LICENSE", "localq.sha256", "localq.json"} < held(server).keys()
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert (len(server.store.parts) > len(server.store.objects)) == bool(part_bytes)
    assert server.repos[REPO].lfs == {path.name for path in sharded.glob("*.safetensors")}


def test_a_second_time_there_is_nothing_to_send(sharded, server):
    push(sharded)
    again = plans.plan(PushRequest(sharded, REPO))
    assert (again.to_send, again.replaced, again.removed) == ((), (), ())


def test_files_of_weights_are_committed_as_they_come_and_the_configuration_last(sharded, server, monkeypatch):
    monkeypatch.setattr(upload, "COMMIT_FILES", 2)
    push(sharded)
    weights, small = server.store.committed[:-1], server.store.committed[-1]
    assert all(name.endswith(".safetensors") for names in weights for name in names)
    assert [len(names) for names in weights] == [2] * len(weights)
    assert "config.json" in small


@pytest.mark.parametrize("where", [PUT, BATCH, PREUPLOAD, COMMIT, CREATE])
@pytest.mark.parametrize("how", ["status", "hang up"])
def test_passing_failures_are_waited_for(sharded, server, where, how):
    if how == "status":
        server.fail(where, 500, 429, 503)
    else:
        server.fail(where, cut_after=10, times=2)
    push(sharded)
    assert is_whole(server, sharded)


def test_a_commit_whose_answer_was_lost_is_not_made_twice(sharded, server):
    server.fail(COMMIT, 503, how="late")
    commit = push(sharded)
    assert is_whole(server, sharded)
    assert len(server.store.committed) == 1
    assert commit == server.repos[REPO].refs["main"]


@pytest.mark.parametrize(
    ("where", "status", "code", "told"),
    [
        (CREATE, 401, ExitCode.GATED, "rejected the access token"),
        (CREATE, 403, ExitCode.GATED, "does not allow writing to someone"),
        (CREATE, 404, ExitCode.UNKNOWN_MODEL, "no such user or organization"),
        (PREUPLOAD, 403, ExitCode.GATED, "settings/tokens"),
        (BATCH, 413, ExitCode.NETWORK, "no room"),
        (COMMIT, 409, ExitCode.FAILURE, "changed in the meantime"),
        (COMMIT, 412, ExitCode.FAILURE, "sends only what is missing"),
        (COMMIT, 429, ExitCode.NETWORK, "limit on requests was reached"),
        (COMMIT, 500, ExitCode.NETWORK, "HTTP status 500"),
        (COMMIT, 418, ExitCode.NETWORK, "HTTP status 418"),
    ],
)
def test_refusals_name_the_cause_and_the_next_step(made, server, where, status, code, told):
    server.fail(where, *[status] * 40)
    error = refused(push, made)
    assert error.exit_code == code
    assert told in str(error)
    assert error.what == REPO
    assert error.next_step
    assert "Amz" not in str(error)


def test_a_hub_that_hangs_up_each_time_is_a_network_failure(made, server):
    server.fail(PUT, cut_after=1000, times=40)
    error = refused(push, made)
    assert error.exit_code == ExitCode.NETWORK
    assert "sends only what is missing" in error.next_step


def test_a_card_that_the_hub_rejects_stops_before_anything_is_sent(made, server):
    server.fail("POST /api/validate-yaml", 400)
    error = refused(push, made)
    assert (error.exit_code, error.what) == (ExitCode.USAGE, REPO)
    assert "rejected the front matter of the model card" in error.why
    assert REPO not in server.repos
    assert not server.seen("PUT")


CARD = "POST /api/validate-yaml"


@pytest.mark.parametrize("where", [CARD, CREATE, PREUPLOAD, BATCH, COMMIT])
def test_an_answer_that_is_no_json_is_waited_for(made, server, where):
    server.fail(where, 200, how="html")
    push(made)
    assert is_whole(server, made)


@pytest.mark.parametrize("where", [CARD, CREATE, PREUPLOAD, BATCH, COMMIT])
def test_a_hub_that_never_answers_in_json_is_a_network_failure(made, server, where):
    server.fail(where, *[200] * 40, how="html")
    error = refused(push, made)
    assert error.exit_code == ExitCode.NETWORK
    assert "cannot be read (not JSON)" in error.why
    assert "refused a file" not in error.why
    assert "sends only what is missing" in error.next_step


def test_what_was_sent_is_not_sent_again(sharded, server, capfd):
    weights = sorted(sharded.glob("*.safetensors"))
    fourth = disk.sha256_of(weights[3])
    server.fail(f"PUT /store/{fourth}", cut_after=1000, times=40)
    assert refused(push, sharded).exit_code == ExitCode.NETWORK
    stored = set(server.store.objects)
    assert len(stored) == 3
    assert not server.store.committed, "a repository without its configuration would be taken for a model"
    server.requests.clear()
    server.faults.clear()
    push(sharded)
    assert is_whole(server, sharded)
    assert len(sent(server)) == len(weights) - 3
    assert not stored & set(sent(server))
    assert capfd.readouterr().err == ""  # the library's own bars


def test_a_repository_that_changed_meanwhile_is_left_as_it_is(made, server):
    push(made)
    changed = plans.plan(PushRequest(made, REPO, force=True, measured={"perplexity": "7"}))
    server.add(REPO, {**held(server), "other.txt": b"of another program"}, commit="b" * 40)
    error = refused(upload.push, changed)
    assert (error.exit_code, "changed in the meantime" in error.why) == (ExitCode.FAILURE, True)
    assert held(server)["other.txt"]


def test_force_replaces_the_model_and_leaves_other_files(made, server):
    old = {"model-00001-of-00002.safetensors": b"x", "model.safetensors.index.json": b"{}", "config.json": b"{}",
           "notes.md": b"mine", "gguf/model.gguf": b"GGUF"}  # fmt: skip
    server.add(REPO, old)
    error = refused(plans.plan, PushRequest(made, REPO))
    assert error.exit_code == ExitCode.USAGE
    assert "different content: config.json and 4 more" in error.why
    assert "--force" in error.next_step
    push(made, force=True)
    assert is_whole(server, made)
    assert held(server)["notes.md"] == b"mine"
    assert held(server)["gguf/model.gguf"] == b"GGUF"
    assert not {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} & held(server).keys()


def other_model() -> dict[str, bytes]:
    """Another model in a repository: a load takes it for whole."""
    weights = {f"model-0000{number}-of-00003.safetensors": b"old" for number in (1, 2, 3)}
    return {**weights, "config.json": b"{}", "model.safetensors.index.json": b"{}", "localq.sha256": b"old"}


def test_no_commit_mixes_two_models(sharded, server, monkeypatch):
    monkeypatch.setattr(upload, "COMMIT_FILES", 2)
    old = other_model()
    server.add(REPO, old)
    push(sharded, force=True)
    assert is_whole(server, sharded)
    states = [*server.repos[REPO].commits.values()]
    assert states[0] == old
    assert [state for state in states[1:] if state != held(server)] == []


def test_a_model_stays_whole_where_replacing_it_is_interrupted(sharded, server, monkeypatch):
    monkeypatch.setattr(upload, "COMMIT_FILES", 1)
    server.add(REPO, other_model())
    fourth = disk.sha256_of(sorted(sharded.glob("*.safetensors"))[3])
    server.fail(f"PUT /store/{fourth}", cut_after=1000, times=40)
    refused(push, sharded, force=True)
    assert held(server) == other_model()
    server.faults.clear()
    push(sharded, force=True)
    assert is_whole(server, sharded)


def test_a_repository_that_came_after_the_plan_is_not_adopted(made, server):
    found = plans.plan(PushRequest(made, REPO))
    server.add(REPO, {"config.json": b"of another program"})
    error = refused(upload.push, found)
    assert (error.exit_code, "changed in the meantime" in error.why) == (ExitCode.FAILURE, True)
    assert held(server) == {"config.json": b"of another program"}
    assert not server.seen("PUT")


@pytest.mark.parametrize("private", [True, False])
def test_an_empty_repository_of_other_visibility_is_not_adopted(made, server, private):
    found = plans.plan(PushRequest(made, REPO, private=private))
    server.add(REPO, {".gitattributes": b""})
    server.store.private[REPO] = not private
    error = refused(upload.push, found)
    assert (error.exit_code, "changed in the meantime" in error.why) == (ExitCode.FAILURE, True)
    assert not server.seen("PUT")


def test_a_repository_that_is_not_shown_after_it_was_created_is_not_written_to(made, server):
    found = plans.plan(PushRequest(made, REPO))
    server.fail(f"GET /api/models/{REPO}", 404)
    assert refused(upload.push, found).exit_code == ExitCode.FAILURE
    assert not server.seen("PUT")


def test_a_repository_without_a_commit_is_not_written_to(made, server):
    server.add(REPO, {}, commit="HEAD")
    error = refused(push, made)
    assert (error.exit_code, "has no commit" in error.why) == (ExitCode.NETWORK, True)


def test_files_that_the_repository_ignores_are_named(made, server):
    server.add(REPO, {".gitignore": b"tokenizer.json\n"})
    error = refused(push, made, force=True)
    assert error.exit_code == ExitCode.FAILURE
    assert "does not have tokenizer.json as sent" in error.why
    assert ".gitignore" in error.next_step


def test_files_that_the_hub_does_not_remove_are_named(made, server):
    server.add(REPO, other_model())
    server.store.kept = frozenset({"model-00002-of-00003.safetensors"})
    error = refused(push, made, force=True)
    assert error.exit_code == ExitCode.FAILURE
    assert "still has model-00002-of-00003.safetensors" in error.why


def test_private_is_not_dropped_for_a_public_repository(made, server):
    push(made)
    error = refused(plans.plan, PushRequest(made, REPO, private=True))
    assert (error.exit_code, error.what) == (ExitCode.USAGE, REPO)
    assert "--private" in error.why
    assert f"{server.url}/{REPO}/settings" in error.next_step


def test_a_card_that_its_owner_changed_is_not_overwritten(made, server):
    push(made)
    server.add(REPO, {**held(server), "README.md": b"my words"}, commit="c" * 40)
    error = refused(plans.plan, PushRequest(made, REPO))
    assert "README.md" in error.why


@pytest.mark.parametrize("private", [True, False])
def test_a_repository_is_private_where_that_is_asked(made, server, private):
    push(made, private=private)
    assert server.store.private[REPO] is private
    assert plans.plan(PushRequest(made, REPO)).private is private


def test_the_token_goes_to_the_hub_alone_and_into_no_file(made, server, tmp_path):
    push(made)
    stores = server.seen("PUT", "/store/")
    assert stores
    assert all("authorization" not in each.headers for each in stores)
    assert all(TOKEN not in each.path for each in server.requests)
    assert all(TOKEN.encode() not in content for content in held(server).values())
    written = [path for folder in (tmp_path, made) for path in folder.rglob("*") if path.is_file()]
    assert all(TOKEN.encode() not in path.read_bytes() for path in written)


def test_without_a_token_nothing_is_sent(made, server, monkeypatch):
    found = plans.plan(PushRequest(made, REPO))
    monkeypatch.delenv("HF_TOKEN")
    error = refused(upload.push, found)
    assert error.exit_code == ExitCode.GATED
    assert "write access" in str(error)
    assert not server.seen("POST")


def test_errors_of_the_library_are_not_shown(made, server, monkeypatch):
    """They hold signed addresses."""
    server.fail(PUT, *[400] * 40)
    error = refused(push, made)
    assert isinstance(error, LocalqError)
    assert error.__cause__ is None
    assert "Signature" not in str(error)


# ---- local files that change


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("how", ["gone", "other", "longer"])
@pytest.mark.parametrize("small", [0, 2**20])
def test_a_local_file_that_changed_after_the_plan_is_named(made, server, tmp_path, monkeypatch, name, how, small):
    monkeypatch.setattr(upload, "SMALL_BYTES", small)
    folder = made_models.copy(made, tmp_path)
    found = plans.plan(PushRequest(folder, REPO))
    path = folder / name
    if how == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content + b" " * (how == "longer"))
    error = refused(upload.push, found)
    assert error.exit_code == (ExitCode.DISK if how == "gone" else ExitCode.BAD_FILE)
    assert str(path) in str(error)
    assert server.store.committed == []


@pytest.mark.parametrize("how", ["gone", "shorter", "other"])
def test_a_local_file_that_changes_while_it_is_sent_is_named(made, server, tmp_path, how):
    folder = made_models.copy(made, tmp_path)
    path = folder / "model.safetensors"
    found, whole, done_once = plans.plan(PushRequest(folder, REPO)), path.read_bytes(), []

    def change(what: str, done: int, total: int) -> None:
        if not 0 < done < len(whole) or "model.safetensors" not in what or done_once:
            return
        done_once.append(done)
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[:-1000] + (b"" if how == "shorter" else bytes(1000)))

    error = refused(upload.push, found, change)
    assert done_once
    assert error.exit_code == (ExitCode.DISK if how == "gone" else ExitCode.BAD_FILE)
    assert str(path) in str(error)
    assert server.store.committed == []


def test_a_small_file_is_read_once(made, server, tmp_path, monkeypatch):
    folder = made_models.copy(made, tmp_path)
    path = folder / "config.json"
    whole = path.read_bytes()
    server.fail(COMMIT, 503)
    monkeypatch.setattr("time.sleep", lambda seconds: path.write_bytes(b"{}"))
    push(folder)
    assert path.read_bytes() == b"{}"
    assert held(server)["config.json"] == whole

"""Models that may be asked for, the switch between them, an idle unload, and metrics, over HTTP."""

from __future__ import annotations

import concurrent.futures
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localq.files import catalog
from localq.files.local_models import LocalModel
from localq.server import names
from localq.server.api_error import ApiError
from localq.server.model import ModelRequest
from localq.server.names import ModelNames
from localq.settings import Settings
from tests.support.server.live_server import HELLO, LiveServer

FIRST = ModelRequest("tiny", Settings(model="tiny", ctx=64))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of models on this machine; one is not complete."""
    found = ["qwen3-8b", "org/Repo", "Tiny", "half@nf4"]

    def listed() -> Iterator[LocalModel]:
        for name in found:
            yield LocalModel(name, "nf4", Path("/x"), 1, "hub", not name.startswith("half"), 5.0)

    monkeypatch.setattr(names.local_models, "list_local", lambda: list(listed()))
    return found


def test_without_the_switch_only_the_model_of_the_server_is_found(disk: list[str]) -> None:
    known = ModelNames(FIRST, "tiny", ("gpt-4o",))
    assert [known.find(name, None) for name in ("tiny", " TINY ", "gpt-4o", "")] == [FIRST] * 4
    for name in ("qwen3-8b", "/etc/passwd", "~/x.gguf", "tiny/../x"):
        with pytest.raises(ApiError, match=r"is not served\. Available: tiny\.") as refused:
            known.find(name, None)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert [each.name for each in known.models()] == ["tiny"]


def test_with_the_switch_complete_models_of_this_machine_are_found(disk: list[str]) -> None:
    known = ModelNames(FIRST, "tiny", switch=True)
    found = known.find("QWEN3-8B", None)
    assert (found.name, found.settings.model, found.settings.ctx, found.settings.offline) == (
        "qwen3-8b",
        "qwen3-8b",
        64,
        True,
    )
    assert known.find("", found) is found  # no name: the one that is open
    assert known.find("tiny", found) is FIRST
    for name in ("half@nf4", "/x", "qwen3-9b", "org/Other"):
        with pytest.raises(ApiError, match=r"not on this machine\. Available: org/Repo, qwen3-8b, tiny\."):
            known.find(name, None)
    assert [each.name for each in known.models()] == ["tiny", "qwen3-8b", "org/Repo"]


def test_a_folder_with_the_name_of_a_repository_is_not_opened(
    disk: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ModelNames(FIRST, "tiny", switch=True)
    (tmp_path / "org" / "Repo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = known.find("org/Repo", None)
    assert catalog.resolve(found.name).path is None
    assert catalog.resolve(found.name).repo == "org/Repo"


def test_requests_switch_and_the_lists_of_models_say_so(model_folder: Path, tmp_path: Path, disk: list[str]) -> None:
    server = LiveServer(model_folder, tmp_path)
    server.names.switch = True
    try:
        listed = server.get("/v1/models").json
        assert [each["id"] for each in listed["data"]] == ["tiny", "qwen3-8b", "org/Repo"]
        assert server.get("/v1/models/org/Repo").json["id"] == "org/Repo"
        assert server.get("/v1/models/half@nf4").status == 404
        assert server.chat(model="org/Repo").json["model"] == "org/Repo"
        assert server.chat().json["model"] == "org/Repo"
        assert server.chat(model="tiny").json["model"] == "tiny"
        assert server.watcher.said[:2] == ["switching from tiny to org/Repo", "switching from org/Repo to tiny"]
    finally:
        server.close()


def test_clients_of_two_models_at_a_time_cause_few_switches(
    model_folder: Path, tmp_path: Path, disk: list[str]
) -> None:
    server = LiveServer(model_folder, tmp_path)
    server.names.switch = True
    try:
        server.say("Hello.", step_s=0.005)
        wanted = ["tiny", "org/Repo"] * 8

        def ask(number: int) -> str:
            time.sleep(number * 0.005)
            answer = server.chat(model=wanted[number], user=f"user {number}")
            return str(answer.json["model"]) if answer.status == 200 else str(answer.body)

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert list(pool.map(ask, range(16))) == wanted
        assert 1 <= len(server.watcher.said) <= 3
    finally:
        server.close()


def test_an_idle_model_is_unloaded_and_comes_back(model_folder: Path, tmp_path: Path) -> None:
    server = LiveServer(model_folder, tmp_path, keep_alive_s=0.0)
    try:
        for _ in range(2):
            assert server.chat().status == 200
            count = server.post("/v1/messages/count_tokens", HELLO)  # no load for this
            assert count.json["input_tokens"] > 0
        deadline = time.monotonic() + 5
        while server.slot.state().loaded is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "localq_model_loaded 0.0" in server.get("/metrics").body.decode()
    finally:
        server.close()


def value(text: str, name: str) -> float:
    found = re.search(rf"^localq_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_metrics_count_what_happened(server: LiveServer) -> None:
    before = server.get("/metrics").body.decode()
    server.chat()
    server.chat(stream=True)
    server.chat(temperature=9)
    answer = server.get("/metrics")
    after = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    route = 'requests_total{route="/v1/chat/completions",status="%s"}'
    for name, more in {
        route % 200: 2, route % 400: 1, 'tokens_total{kind="generated"}': 12, 'replies_total{reason="stop"}': 2,
        "time_to_first_token_seconds_count": 2, 'time_to_first_token_seconds_bucket{le="+Inf"}': 2,
    }.items():  # fmt: skip
        assert value(after, name) - value(before, name) == more, name
    assert value(after, "model_loaded") == 1
    assert value(after, "busy") == value(after, "queue_length") == 0


def test_metrics_are_in_the_format_of_prometheus(server: LiveServer) -> None:
    lines = server.get("/metrics").body.decode().splitlines()
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"\\\n]*"(,[a-z]+="[^"\\\n]*")*\})? [-+0-9.e]+')
    described = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    for line in lines:
        if not line.startswith("#"):
            assert sample.fullmatch(line), line
            name = re.sub("_(bucket|sum|count)$", "", re.split("[{ ]", line)[0])
            assert name in described, line


def test_an_unknown_path_is_no_label(server: LiveServer) -> None:
    server.get("/v1/evil\u0022label".replace("\u0022", "%22"))
    assert "evil" not in server.get("/metrics").body.decode()

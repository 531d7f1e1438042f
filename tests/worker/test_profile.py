"""The profile of a decode step on its way from the engine process to the front end."""

from __future__ import annotations

import sys

import pytest

from localq.errors import ExitCode, LocalqError
from localq.worker.client import EngineClient
from localq.worker.messages import Generate, Profile, Profiled, decode, encode

SCRIPTED = (sys.executable, "-m", "tests.support.worker.scripted_engine")


def test_a_profile_crosses_the_pipe_as_it_is():
    profile = {"rows": [{"kernel": "qkv", "calls": 32, "us": 12.5, "bytes": 2**40}], "step_us": 12.75, "timer": "cupti"}
    assert decode(encode(Profiled(profile))) == Profiled(profile)
    assert decode(encode(Profile(77))) == Profile(77)


def test_client_gets_the_profile_or_the_reason_and_goes_on():
    with EngineClient(SCRIPTED) as client:
        assert client.profile(Profile(42)) == {"position": 42, "rows": []}
        with pytest.raises(LocalqError, match="no such position") as caught:
            client.profile(Profile(-1))
        assert caught.value.exit_code == ExitCode.USAGE
        assert len(list(client.generate(Generate(1, [5], max_tokens=3)))) > 1
        assert client.profile(Profile(7))["position"] == 7


def test_without_a_process_there_is_no_profile():
    with pytest.raises(LocalqError, match="not running"):
        EngineClient(SCRIPTED).profile(Profile())

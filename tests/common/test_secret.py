"""Secrets have a text of their own, and are taken out of the texts of others."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass

import pytest
from rich.pretty import pretty_repr

from localq import sanitize
from localq.errors import LocalqError
from localq.files.hub import errors as hub_errors
from localq.sanitize import HIDDEN, Address, Secret, redact

PASSWORD = "p4ss-of-a-mirror"
ADDRESSES = {
    f"https://me:{PASSWORD}@hub.example:8/x": "https://hub.example:8/x",
    f"https://{PASSWORD}@hub.example": "https://hub.example",
    f"http://me:{PASSWORD}/with@slash@hub.example": "http://hub.example",
    f"https://me:{PASSWORD}#x?@hub.example": "https://hub.example",
    f"HTTPS://:{PASSWORD}@[::1]:8": "HTTPS://[::1]:8",
    f"https://me:{PASSWORD}@[::1": "https://[::1",
    f"https:/me:{PASSWORD}@hub.example": "https:/hub.example",
    f"me:{PASSWORD}@hub.example": "hub.example",
    f"https://hub.example/api?token={PASSWORD}": "https://hub.example/api",
    f"  https://me:{PASSWORD}@hub.example": "  https://hub.example",
    "https://hub.example/@scope": "https://hub.example/@scope",
    "http://localhost:80": "http://localhost:80",
    "": "",
}


@dataclass
class Holder:
    held: Secret


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_is_shown_without_what_stands_before_the_at(address):
    held = Address(address)
    assert held.reveal() == address
    assert str(held) == f"{held}" == ADDRESSES[address]
    assert PASSWORD not in repr(held) + pretty_repr({"held": held}) + repr(Holder(held)) + f"{held:>80}"


def test_a_secret_is_stars_wherever_it_is_held():
    held = Secret("hf_mine-alone")
    for text in (str(held), f"{held}", f"{held!r}", repr([held]), repr({"a": held}), repr(Holder(held)),
                 pretty_repr(Holder(held), max_string=4), f"{held:.9}", repr(vars(Holder(held)))):  # fmt: skip
        assert "mine" not in text
        assert HIDDEN in text
    assert held.reveal() == "hf_mine-alone"
    assert not hasattr(held, "__dict__")


@pytest.mark.parametrize("save", [pickle.dumps, json.dumps, copy.deepcopy])
def test_a_secret_is_not_saved(save):
    with pytest.raises(TypeError):
        save(Secret("hf_mine-alone"))


VARIABLES = [*sanitize.TOKEN_VARIABLES, "HF_ENDPOINT", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "PIP_INDEX_URL"]


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_environment_holds_is_taken_out_of_errors(monkeypatch, name):
    value = PASSWORD if name in sanitize.TOKEN_VARIABLES else f"https://me:{PASSWORD}%21@host"
    monkeypatch.setenv(name, value)
    for text in (value, f"({value})", f"{PASSWORD}%21", f"{PASSWORD}!"):
        error = LocalqError(text, f"lost {text}", f"see {text}")
        assert PASSWORD not in str(error) + repr(error) + json.dumps(error.to_dict())
        assert PASSWORD not in redact(f"File x, line 3: {text}")


LOOKS = {
    "https://you:and-me@elsewhere.example/x": "https://elsewhere.example/x",
    "Authorization: Bearer abcdef.ghi-jkl": "Authorization: Bearer ***",
    "authorization: basic bWU6cDRzcw==": "authorization: basic ***",
    "of hf_aBcDeFgHiJkLmNoPqRsTuV in": "of *** in",
    "https://cdn.example/f?X-Amz-Signature=0123abc&X-Amz-Date=1": "https://cdn.example/f?X-Amz-Signature=***&X-Amz-Date=1",
    "https://cdn.example/f?a=1&Key-Pair-Id=K1&Policy=ey": "https://cdn.example/f?a=1&Key-Pair-Id=***&Policy=***",
    "a basic problem, hf_quantizer.py and me@example.com": "a basic problem, hf_quantizer.py and me@example.com",
}


@pytest.mark.parametrize("text", LOOKS)
def test_what_looks_like_a_secret_is_taken_out(text):
    assert redact(text) == LOOKS[text]


def test_the_hub_is_named_without_its_password_in_every_error(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"https://me:{PASSWORD}@hub.example/")
    assert str(hub_errors.endpoint()) == "https://hub.example"

    class Response:
        status_code, headers, request = 418, {"Retry-After": "1"}, None

    found = [hub_errors.gated_error("a/b"), hub_errors.no_repository("a/b")]
    shown: list[str] = []
    monkeypatch.setattr("localq.files.hub.pauses.pause", lambda seconds, why: shown.append(why))
    for error in (
        hub_errors.SlowError(), hub_errors.UnreadableError("ValueError"), hub_errors.RefusedError(Response()),
        ConnectionResetError("reset by https://me"), TimeoutError(),
    ):  # fmt: skip
        found.append(hub_errors.translate(error, "a/b", "main", "x"))
        hub_errors.pause_after(error, 1.0)
    assert all(isinstance(each, LocalqError) for each in found)
    assert PASSWORD not in " ".join([*map(str, found), *shown])
    assert any("https://hub.example" in str(each) for each in found)
    assert all("https://hub.example" in each for each in shown)

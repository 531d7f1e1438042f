"""What tests of fetching share: a fake hub that the environment leads to, a source, the error of a refusal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localq.errors import LocalqError
from localq.files.catalog import Source
from tests.support.files import fake_hub

REPO = "maker/tiny-model"
TOKEN = "hf_a-secret-of-the-user"


@contextlib.contextmanager
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.FakeHub]:
    """A fake hub, and a user who has neither a token nor a cache yet."""
    with fake_hub.FakeHub() as server:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))
        monkeypatch.setenv("LOCALQ_CACHE", str(tmp_path / "cache"))
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # the pauses between tries
        yield server


def refused(call: Any, *arguments: Any, **options: Any) -> LocalqError:
    """The error of a call that must be refused; the user's token is not in it."""
    with pytest.raises(LocalqError) as caught:
        call(*arguments, **options)
    assert TOKEN not in str(caught.value)
    return caught.value


def source(**fields: Any) -> Source:
    return Source(format="bf16", repo=REPO, **fields)

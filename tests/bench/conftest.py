"""What tests of `localq eval` judge: a tiny model, plain and in NF4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localq.files.model_folder import open_model
from localq.quantize.by_tensor import convert
from localq.quantize.request import TensorwiseRequest
from tests.support.models.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="package")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), dtype=torch.float32, initializer_range=0.15)


@pytest.fixture(scope="package")
def nf4_folder(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(TensorwiseRequest(open_model(plain), "nf4", tmp_path_factory.mktemp("nf4") / "out"))

"""What a killed measuring leaves is gone on from where it is whole and of the same conversion, and else is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localq import disk
from localq.errors import ExitCode, LocalqError
from localq.quantize.output import sensitivity_log
from localq.quantize.output.sensitivity_log import MeasuringState, SensitivityLog

JOB: dict[str, Any] = {"source": "m", "fingerprint": "f"}
TEXT = [torch.arange(15.0).reshape(3, 5) + number for number in range(4)]
ENERGIES = [torch.tensor([1 / 3, 2e-300], dtype=torch.float64), torch.tensor([float(7)], dtype=torch.float64)]
PRICES = [[0.1, 1 / 3], [2e-300, float(7)]]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return [each.dtype for each in first] == [each.dtype for each in second] and all(map(torch.equal, first, second))


@pytest.fixture
def there(tmp_path: Path) -> SensitivityLog:
    """Two layers of a text that goes on."""
    made = SensitivityLog(tmp_path, JOB)
    made.begin(TEXT, 2, 3)
    for layer in range(2):
        made.record_layer(layer, TEXT[: layer + 1], ENERGIES, [each * (layer + 2) for each in TEXT])
    return made


def test_a_text_goes_on_behind_the_last_layer(there: SensitivityLog, tmp_path: Path) -> None:
    found = SensitivityLog(tmp_path, JOB).resume_state()
    assert found is not None
    assert (found.layer, found.back, found.prices) == (2, False, [])
    assert same(found.rows, [each * 3 for each in TEXT])
    read, energies = there.layer(1)
    assert same(read, TEXT[:2])
    assert same(energies, ENERGIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_it_come_out_as_those_before_the_kill(there: SensitivityLog, dtype: torch.dtype) -> None:
    """Products add up in an order that depends on where memory begins: as torch hands it out, 64 bytes apart."""
    there.reach(MeasuringState([each.to(dtype) for each in TEXT], 2))
    found = there.resume_state()
    assert found is not None
    assert not any(each.data_ptr() % 64 for each in (*found.rows, *there.layer(0)[1], *there.layer(1)[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_go_on_and_leave_no_layer_behind(there: SensitivityLog, tmp_path: Path, dtype: torch.dtype) -> None:
    slopes = [each.to(dtype) for each in TEXT]
    there.reach(MeasuringState(slopes, 1, back=True))
    assert len(list(tmp_path.iterdir())) == 3
    there.reach(MeasuringState(slopes, -1, back=True, prices=PRICES))
    (tmp_path / "conversion.measured-00001.safetensors").unlink()  # of a step that went further than one
    found = there.resume_state()
    assert found is not None
    assert (found.layer, found.back, found.prices) == (-1, True, PRICES)
    assert same(found.rows, slopes)
    there.clear()
    assert not list(tmp_path.iterdir())


def test_another_conversion_has_none(there: SensitivityLog, tmp_path: Path) -> None:
    assert SensitivityLog(tmp_path, {**JOB, "fingerprint": "g"}).resume_state() is None
    assert SensitivityLog(tmp_path / "elsewhere", JOB).resume_state() is None


@pytest.mark.parametrize("name", [sensitivity_log.FILE, "conversion.measured-00000.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "short", "text"])
def test_what_is_not_whole_is_begun_anew(there: SensitivityLog, tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    raw = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(raw[:-1] if damage == "short" else b"no tensors")
    assert there.resume_state() is None
    there.begin(TEXT, 2, 3)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small_is_named_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = TEXT[0].nbytes * (2 * len(TEXT) + 3 * 2)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 2 * size)
    SensitivityLog(tmp_path, JOB).begin(TEXT, 2, 3)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 2 * size - 1)
    with pytest.raises(LocalqError) as caught:
        SensitivityLog(tmp_path, JOB).begin(TEXT, 2, 3)
    assert caught.value.exit_code == ExitCode.DISK

"""The report of set-up times: what it pretends, and what it prints. Installs nothing."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

from tests.tools import setup_report
from tests.tools.setup_report import SetupTimes


def test_a_pretended_machine_has_a_driver_and_cards(tmp_path):
    given = SimpleNamespace(capability="8.6,12.0", nvcc="pip")
    made = dict(each.split("=", 1) for each in setup_report.variables("cards", tmp_path, given))
    assert made["NVCC"] == "pip"
    assert (tmp_path / "driver-version").exists()
    run = subprocess.run([made["NVIDIA_SMI"], "--query-gpu=compute_cap"], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["8.6", "12.0"]
    assert setup_report.variables("cpu", tmp_path, given) == [f"DRIVER_FILES={tmp_path}/no-driver"]


def test_nothing_of_this_user_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_NO_CUDA", "1")
    monkeypatch.setenv("MAKEFLAGS", "-j8")
    made = setup_report.environment(tmp_path)
    assert "LOCALQ_NO_CUDA" not in made
    assert "MAKEFLAGS" not in made
    assert made["PIP_CACHE_DIR"] == f"{tmp_path}/pip"
    assert made["XDG_DATA_HOME"].startswith(str(tmp_path))


def test_the_report_has_a_line_for_each_stage():
    found = SetupTimes("cpu", 61.2, 70.0, (0.5, 1.9), True, "host part", {"clone": 0.4, "torch": 11.0})
    assert [line.split() for line in setup_report.lines(found)][2:] == [["clone", "0.4", "s"], ["torch", "11.0", "s"]]
    assert "61 s" in setup_report.lines(found)[0]
    assert "load 0.5 to 1.9" in setup_report.lines(found)[0]

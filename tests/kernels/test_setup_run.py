"""The steps of an installation: which run, in what order, what is shown, and what is said when one fails."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localq.kernels.setup import __main__ as setup_main
from localq.kernels.setup import machine, steps
from localq.kernels.setup.machine import BuildChoice
from localq.kernels.setup.progress import Display, StepProgress, about, seconds_left
from localq.kernels.setup.run import Installation, SetupError
from localq.kernels.setup.steps import SetupRecord, SetupRequest, SetupStep

ROOT = Path(__file__).parents[2]


def step(name: str, code: str, *needs: str, key: str = "1", optional: str = "") -> SetupStep:
    """A step that runs Python code."""
    return SetupStep(
        name, f"the {name}", lambda: ([sys.executable, "-c", code], {}), key, needs=needs, optional=optional
    )


@pytest.fixture
def install(tmp_path) -> Callable[..., str]:
    def run(*wanted: SetupStep) -> str:
        out = io.StringIO()
        Installation(wanted, SetupRecord.read(tmp_path / "setup/record.json"), Display(out, live=False)).run()
        return out.getvalue()

    return run


def writes(path: Path, text: str) -> str:
    return f"open({str(path)!r}, 'a').write({text!r})"


def test_steps_run_once_and_again_when_what_they_depend_on_changes(install, tmp_path):
    log = tmp_path / "log"
    first, second = step("first", writes(log, "1")), step("second", writes(log, "2"), "first")
    assert "the second" in install(second, first)
    assert log.read_text() == "12"
    assert install(first, second) == ""
    install(first, step("second", writes(log, "3"), "first", key="2"))
    assert log.read_text() == "123"
    times = json.loads((tmp_path / "setup/times.json").read_text())
    assert set(times) == {"total", "second"}


def test_steps_that_do_not_wait_for_each_other_run_side_by_side(install, tmp_path):
    """Each waits until the other has begun."""
    meet = "import pathlib, time\npathlib.Path({!r}).touch()\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    left, right = str(tmp_path / "left"), str(tmp_path / "right")
    install(step("left", meet.format(left, right)), step("right", meet.format(right, left)))


def test_a_failure_ends_the_others_and_shows_the_end_of_its_log(install, tmp_path):
    begun = tmp_path / "begun"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(begun)!r}).exists(): time.sleep(0.01)\n"
    fails = step("broken", f"{wait}print('the disk is full'); raise SystemExit(1)")
    sleeps = step("endless", f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)")
    with pytest.raises(SetupError, match=r"the broken failed\.") as caught:
        install(fails, sleeps, step("later", writes(tmp_path / "never", "x"), "broken"))
    assert "the disk is full" in str(caught.value)
    assert not (tmp_path / "never").exists()
    record = SetupRecord.read(tmp_path / "setup/record.json")
    assert record.keys == {}


def test_of_a_build_that_fails_the_error_is_shown_without_what_pip_adds(install):
    said = [
        "-- Found Threads",
        "CMake Error at CMakeLists.txt:11:",
        "  no nvcc",
        "error: subprocess-exited-with-error",
        "x",
    ]
    with pytest.raises(SetupError) as caught:
        install(step("build", f"print({chr(10).join(said)!r}); raise SystemExit(1)"))
    shown = str(caught.value).splitlines()[1:]
    assert shown == ["  | CMake Error at CMakeLists.txt:11:", "  |   no nvcc"]


def test_an_optional_step_may_fail_and_is_tried_again(install, tmp_path):
    broken = step("extra", "raise SystemExit(1)", optional="some tests are skipped")
    after = step("after", writes(tmp_path / "log", "x"), "extra")
    assert "some tests are skipped" in install(broken, after)
    assert (tmp_path / "log").read_text() == "x"
    assert "some tests are skipped" in install(broken, after)
    assert (tmp_path / "log").read_text() == "x"


def test_a_damaged_record_is_an_empty_one(tmp_path):
    for text in ("", "{", "[1]"):
        (tmp_path / "record.json").write_text(text)
        assert SetupRecord.read(tmp_path / "record.json").keys == {}


# ---- what is installed


def request(venv: Path, build: BuildChoice, **more: object) -> SetupRequest:
    return SetupRequest(ROOT, venv, sys.executable, "torch==2.13.0", build, **more)  # type: ignore[arg-type]


def commands(given: SetupRequest) -> dict[str, tuple[str, dict[str, str]]]:
    found = {each.name: each.command() for each in steps.steps(given)}
    return {name: (" ".join(arguments), environment) for name, (arguments, environment) in found.items()}


def test_the_host_part_needs_no_nvcc(tmp_path):
    found = commands(request(tmp_path, BuildChoice(machine.HOST)))
    assert list(found) == ["environment", "tools", "packages", "torch", "localq", "model"]
    command, environment = found["localq"]
    assert environment == {"LOCALQ_NO_CUDA": "1"}
    assert "LOCALQ_ARCHITECTURES" not in command
    assert "torch" not in found["packages"][0]  # its own step, with its own requirement
    assert "transformers" in found["packages"][0]


def test_kernels_for_one_card_have_a_build_folder_of_their_own(tmp_path):
    """CMake keeps definitions: in a shared folder the next `pip install .` would build for that card alone."""
    given = request(tmp_path, BuildChoice(machine.KERNELS, ("86", "120")), nvcc=True)
    found = commands(given)
    command, environment = found["localq"]
    assert "cmake.define.LOCALQ_ARCHITECTURES=86;120" in command
    assert "build-dir=build/kernels-86-120" in command
    assert environment == {"LOCALQ_NO_CUDA": "0"}  # the nvcc step left none: CMake says what to do
    assert "nvidia-cuda-nvcc" in found["nvcc"][0]
    assert "nvidia-cuda-cccl" in found["nvcc"][0]
    given.own_nvcc.parent.mkdir(parents=True)
    given.own_nvcc.touch()
    assert commands(given)["localq"][1]["CUDACXX"] == str(given.own_nvcc)
    (step,) = (each for each in steps.steps(given) if each.name == "nvcc")
    assert step.optional


def test_tests_are_built_for_all_cards(tmp_path):
    found = commands(request(tmp_path, machine.build_for_all(""), test=True))
    assert "cmake.define" not in found["localq"][0]
    assert "build-dir" not in found["localq"][0]
    assert "pytest" in found["test packages"][0]


@pytest.mark.parametrize(("installed", "index", "again"), [
    ("torch-2.13.0+cpu.dist-info", "", True), ("torch-2.13.0.dist-info", "", False),
    ("torch-2.13.0+cpu.dist-info", "http://127.0.0.1:9/cpu", False), ("torchao-1.0+cpu.dist-info", "", False),
])  # fmt: skip
def test_with_a_driver_torch_for_the_cpu_is_replaced(tmp_path, installed, index, again):
    found = commands(request(tmp_path, BuildChoice(machine.KERNELS), torch_index=index))
    assert "--force-reinstall" not in found["torch"][0]  # a new environment
    (tmp_path / "lib/python3.12/site-packages" / installed).mkdir(parents=True)
    found = commands(request(tmp_path, BuildChoice(machine.KERNELS), torch_index=index))
    assert ("--force-reinstall" in found["torch"][0]) is again
    assert found["torch"][0].endswith("torch==2.13.0")
    assert not any("--force-reinstall" in command for name, (command, _) in found.items() if name != "torch")


def test_requirements_are_those_of_the_project_file(tmp_path):
    (tmp_path / "localq").mkdir()
    (tmp_path / "localq/__init__.py").touch()
    wanted = 'dependencies = ["torch~=2.8", "torch-extra>=1", "torchao"]'
    (tmp_path / "pyproject.toml").write_text(f'[build-system]\nrequires = ["backend>=7"]\n[project]\n{wanted}\n')
    found = commands(replace(request(tmp_path, BuildChoice(machine.HOST)), root=tmp_path))
    assert found["packages"][0].endswith(" torch-extra>=1 torchao")
    assert "torch~=2.8" not in found["packages"][0]
    assert found["tools"][0].endswith(" backend>=7 cmake>=3.26 ninja>=1.11")


def test_an_environment_without_pip_is_kept_and_gets_pip(tmp_path, monkeypatch, capsys):
    venv, mine = tmp_path / ".venv", tmp_path / ".venv/mine.txt"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    mine.write_text("kept")
    record = SetupRecord(venv / "setup/record.json", {"environment": "made"})
    made: list[tuple[list[str], bool]] = []

    def run(installation: Installation) -> None:
        made.append((installation.steps[0].command()[0], "environment" in installation.done))

    monkeypatch.setattr(Installation, "run", run)
    monkeypatch.setattr(sys, "argv", ["setup", "build", "--venv", str(venv)])
    for keys in ({}, record.keys):
        record.path.parent.mkdir(exist_ok=True)
        record.path.write_text(json.dumps(keys))
        assert setup_main.main() == 0
        assert made.pop() == ([str(venv / "bin/python"), "-m", "venv", str(venv)], False)
    said = capsys.readouterr().out
    assert mine.read_text() == "kept"
    assert "no longer works" not in said
    assert "Starting" not in said  # that is of `make chat`
    (venv / "bin/python").unlink()
    assert setup_main.main() == 0
    assert "no longer works" in capsys.readouterr().out
    assert not mine.exists()


def test_chat_takes_the_build_of_the_tests_and_not_the_other_way_round(tmp_path):
    def localq(build: BuildChoice) -> SetupStep:
        return next(each for each in steps.steps(request(tmp_path, build)) if each.name == "localq")

    record = SetupRecord(tmp_path / "record.json")
    everything, one = localq(machine.build_for_all("")), localq(BuildChoice(machine.KERNELS, ("89",)))
    host, asked = localq(BuildChoice(machine.HOST)), localq(machine.build_for_all("1"))
    record.add(everything)
    assert [record.covers(each) for each in (everything, one, host, asked)] == [True, True, True, False]
    record.add(one)
    assert [record.covers(each) for each in (everything, one, host, asked)] == [False, True, False, False]


def test_what_is_compiled_changes_the_fingerprint(tmp_path):
    for name in ("pyproject.toml", "localq/__init__.py", "csrc/CMakeLists.txt", "csrc/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    before = steps.fingerprint(tmp_path)
    (tmp_path / "csrc/README.md").write_text("2")
    assert steps.fingerprint(tmp_path) == before
    (tmp_path / "csrc/CMakeLists.txt").write_text("2")
    assert steps.fingerprint(tmp_path) != before


# ---- progress


def test_what_ninja_and_pip_write_says_how_far_a_step_is(tmp_path):
    progress = StepProgress()
    progress.read("  [12/48] Building CUDA object CMakeFiles/_C.dir/nf4/gemv.cu.o")
    assert (progress.fraction, progress.detail) == (0.25, "12 of 48 files")
    progress.read("Collecting torch>=2.8")
    assert progress.detail == "1 found, torch"
    progress.read("  Downloading https://example.org/torch-2.13.0-cp311-cp311-linux_x86_64.whl (530.5 MB)")
    assert progress.detail == "torch, 530.5 MB"
    part = tmp_path / "pip-unpack-x/torch-2.13.0.whl"
    part.parent.mkdir()
    part.write_bytes(b"0" * 3_000_000)
    progress.look(tmp_path)
    assert progress.detail == "torch, 3 of 530 MB"
    progress.read("Installing collected packages: a, b, c")
    assert progress.detail == "unpacking 3 packages"


def test_the_time_left_is_that_of_the_longest_chain_at_the_pace_so_far():
    chain = [
        SetupStep("a", "", lambda: ([], {}), "", seconds=10),
        SetupStep("b", "", lambda: ([], {}), "", needs=("a",), seconds=20),
        SetupStep("c", "", lambda: ([], {}), "", needs=("a",), seconds=5),
    ]
    assert seconds_left(chain, {}, {}) == 30
    assert seconds_left(chain, {}, {"a": 20.0}) == 40  # twice as slow as expected
    assert seconds_left(chain, {"b": (30.0, 0.75)}, {"a": 10.0}) == 0.25 * 7.5 + 0.75 * 10  # by what it has done
    assert seconds_left(chain, {}, {"a": 10.0, "b": 20.0, "c": 5.0}) == 0
    assert seconds_left(chain, {"b": (100.0, 0.0)}, {"a": 10.0, "c": 5.0}) > 0  # late, and not over


def test_seconds_are_said_roundly():
    assert [about(each) for each in (0.2, 7.6, 43, 200)] == ["1 s", "8 s", "45 s", "3 min"]


def test_a_log_gets_a_line_every_ten_seconds_and_a_terminal_one_line_that_changes():
    log, screen = io.StringIO(), io.StringIO()
    for out, live in ((log, False), (screen, True)):
        display = Display(out, live)
        for second in range(0, 25):
            display.status(f"at {second}", float(second))
        display.line("done")
    assert log.getvalue().splitlines() == ["at 10", "at 20", "done"]
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().endswith("done\n")

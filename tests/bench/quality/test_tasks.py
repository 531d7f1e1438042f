"""The tasks of `localq eval --tasks`: the set itself, grading, and replies of models."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from localq import places
from localq.bench.quality import code_child, code_sandbox, evaluation, tasks
from localq.bench.quality.evaluation import EvaluationRequest
from localq.cli.verbs import eval as verb
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.bench.quality.task_solutions import SOLUTIONS
from tests.bench.quality.test_evaluation import TEXT, evaluated

SET: dict[str, list[dict[str, Any]]] = tomllib.loads((places.PACKAGE_DATA / "tasks.toml").read_text(encoding="utf-8"))


def test_forty_of_each_kind_each_once():
    assert {kind: len(found) for kind, found in SET.items()} == dict.fromkeys(tasks.KINDS, tasks.MOST)
    assert tasks.MOST == verb.MOST_TASKS
    for found in SET.values():
        assert len({each["ask"] for each in found}) == tasks.MOST
    assert len({each["name"] for each in SET["code"]}) == tasks.MOST


@pytest.mark.parametrize("task", SET["code"], ids=lambda each: each["name"])
def test_a_right_function_passes_and_one_that_does_nothing_fails(task):
    right = SOLUTIONS[task["name"]]
    reply = f"Here it is:\n\n```python\n{right}```\nIt works."
    assert tasks.is_right_code(task["name"], task["checks"], reply)
    wrong = f"def {task['name']}(*values):\n    return None\n"
    assert not tasks.is_right_code(task["name"], task["checks"], wrong)
    assert f"`{task['name']}(" in task["ask"]
    assert task["checks"] not in task["ask"]


@pytest.mark.parametrize("task", SET["arithmetic"], ids=lambda each: each["working"])
def test_the_answer_is_what_the_working_gives(task):
    assert eval(task["working"]) == pytest.approx(task["answer"])
    assert tasks.is_right_number(str(task["answer"]), f"So it is.\nAnswer: {task['answer']}")
    assert not tasks.is_right_number(str(task["answer"]), f"Answer: {task['answer'] + 1}")


@pytest.mark.parametrize("task", SET["fact"], ids=lambda each: each["answer"])
def test_the_pattern_knows_the_answer_and_is_not_in_the_question(task):
    assert tasks.is_right_fact(task["pattern"], f"The answer is {task['answer']}.")
    assert not tasks.is_right_fact(task["pattern"], task["ask"])
    assert not tasks.is_right_fact(task["pattern"], "I do not know.")


@pytest.mark.parametrize(
    ("answer", "reply", "right"),
    [
        ("26", "12 * 8 = 96 and 96 - 70 = 26", True),
        ("26", "Answer: 26 rolls", True),
        ("26", "**Answer:** $26.00.", True),
        ("26", r"The answer is \boxed{26}, from 96 - 70.", True),
        ("1250", "Answer: 1,250", True),
        ("0.5", "Answer: 0.50", True),
        ("26", "Answer: -26", False),
        ("26", "Answer: 26.5", False),
        ("26", "Answer: 126", False),
        ("26", "There are 26.\nAnswer: 25", False),
        ("26", "26 and 27", False),
        ("26", "The answer follows.\n96 - 70 = 26", False),  # the first number after the word is 96
        ("26", "Answer: unknown", False),
        ("26", "no number", False),
        ("26", "", False),
        ("5", "Answer: 5,", True),
        ("5", "Answer: x5", False),
    ],
)
def test_numbers(answer, reply, right):
    assert tasks.is_right_number(answer, reply) is right


CODE = "def f(n):\n    return n + 1\n"


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (f"```python\n{CODE}```", CODE),
        (f"```\nprint(1)\n```\nand\n```py\nimport math\n{CODE}```", f"import math\n{CODE}"),
        (f"```python\n{CODE}", CODE),  # cut
        (f"Sure.\n{CODE}\nThis adds one.", CODE),
        ("def g(n):\n    return n\n", ""),
        ("    def f(self): ...", ""),
        ("no code", ""),
    ],
)
def test_the_function_in_a_reply(reply, found):
    assert tasks.find_function("f", reply) == found


def test_code_of_a_model_reaches_nothing(tmp_path):
    there = tmp_path / "there"
    there.write_text("kept")
    for attempt in (
        f"open({str(there)!r}).read()",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os\nos.unlink({str(there)!r})",
        "import os\nif os.fork() == 0: os._exit(0)",
        f"import os\nos.execv('/bin/sh', ['sh', '-c', 'echo > {tmp_path / 'new'}'])",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.listdir('/')",
        "import _socket\n_socket.socket()",
        f"import ctypes\nassert ctypes.CDLL(None).open({str(there).encode()!r}, 0) >= 0",
        f"import ctypes\nassert ctypes.CDLL(None).mkdir({str(tmp_path / 'new').encode()!r}, 511) == 0",
        f"import os\nassert os.system('echo > {tmp_path / 'new'}') == 0",
    ):
        assert not code_sandbox.passes(attempt, "pass"), attempt
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert there.read_text() == "kept"


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass", "x = ' ' * 10**10", "raise SystemExit", "import os\nos._exit(0)", "def f(:", "1 / 0",
        "print('passed')\nraise ValueError", "import os\nos.write(1, b'x' * 10**6)", "f = lambda: f()\nf()",
        "input()", "'" + "(" * 10**5,
    ],
)  # fmt: skip
def test_code_that_does_not_end_well_fails(source):
    assert not code_sandbox.passes(source, "pass")


def test_what_functions_import_is_there():
    names = [module.__name__ for module in code_child.MODULES]
    source = "\n".join(f"import {name}" for name in names) + "\nfrom typing import List, Optional\n"
    assert code_sandbox.passes(source + "print(statistics.mean([1, 2]), end='')", "pass")
    assert code_sandbox.passes("if __name__ == '__main__':\n    raise ValueError", "pass")


def test_every_machine_has_its_own_numbers_for_the_same_calls():
    lengths = {len(calls) for calls in code_child.SYSTEM_CALLS.values()}
    assert lengths == {26}
    for machine, calls in code_child.SYSTEM_CALLS.items():
        assert len(set(calls)) == 26
        assert len(code_child.bpf(machine)) == 8 * (26 + 6)


def test_without_seccomp_nothing_runs(plain, monkeypatch):
    monkeypatch.setattr(code_child.platform, "machine", lambda: "mips")
    assert not code_child.enter_sandbox()
    for answer, why in ((code_child.NO_SANDBOX, "never runs without them"), ("", "did not start")):
        child = [sys.executable, "-c", f"print({answer!r}, end='')"]
        start = partial(subprocess.Popen, child, stdin=-1, stdout=-1)
        monkeypatch.setattr(
            code_sandbox, "processes", SimpleNamespace(start_module=lambda module, start=start: start())
        )
        with pytest.raises(LocalqError, match=why):
            evaluated(plain, tasks=1)


def test_a_reply_cannot_give_its_own_verdict_or_fill_the_memory():
    for source in (
        "import os\nos.write(1, b'passed')\nos._exit(0)",
        "import os\nos.write(1, b'no sandbox')\nos._exit(0)",
        "import os\nwhile True: os.write(1, b'passed ' * 10_000)",
    ):
        assert not code_sandbox.passes(source, "pass"), source


def test_scores_of_a_tiny_model_are_counted_and_its_replies_are_shown(plain):
    found = evaluated(plain, most=1, tasks=1, options={"ctx": None})["tasks"]
    assert {kind: found[kind]["n"] for kind in tasks.KINDS} == dict.fromkeys(tasks.KINDS, 1)
    assert [each["kind"] for each in found["replies"]] == list(tasks.KINDS)
    assert found["n"] == 3
    assert found["correct"] == sum(each["correct"] for each in found["replies"]) == 0
    assert all(each["reply"] for each in found["replies"])
    assert json.loads(json.dumps(found)) == found
    assert evaluated(plain, most=1)["tasks"] is None


def test_right_replies_count(plain, monkeypatch):
    right = {"code": f"```\n{SOLUTIONS['is_even']}```", "arithmetic": "Answer: 26", "fact": "It is Lyon."}
    monkeypatch.setattr(tasks, "_answer", lambda engine, tokenizer, task: right[task.kind])
    found = evaluated(plain, most=1, tasks=1)["tasks"]
    assert (found["correct"], found["n"]) == (2, 3)
    assert [found[kind]["correct"] for kind in tasks.KINDS] == [1, 1, 0]


def test_a_base_model_is_refused_before_its_weights_are_read(plain, monkeypatch):
    monkeypatch.setattr(evaluation, "load", lambda *of, **more: pytest.fail("loaded"))
    files = replace(open_model(plain), chat_template=None)
    with pytest.raises(LocalqError, match="no chat template"):
        evaluation.run(EvaluationRequest(files, LoadOptions(device="cpu"), TEXT.read_bytes(), "LICENSE", 96, tasks=1))


def test_a_context_that_is_too_short_is_refused(plain):
    with pytest.raises(LocalqError, match="a context of 256 tokens is too short for a task") as caught:
        evaluated(plain, tasks=1, options={"ctx": 256})
    assert caught.value.exit_code == ExitCode.USAGE

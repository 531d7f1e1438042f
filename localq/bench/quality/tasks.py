"""Short tasks with one right answer, for `localq eval --tasks`: what a format keeps of a model's ability to generate.

The tasks are in `data/tasks.toml`: Python functions, word problems, questions of fact. Replies are greedy, with as
little thinking as the model's template allows, and graded by a program: hidden asserts, a number, a pattern.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from localq import places
from localq.bench.quality import code_sandbox
from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel
from localq.errors import LocalqError
from localq.sampling import Sampling
from localq.text import harmony, thinking
from localq.text.tokenizer import Tokenizer
from localq.wording import OnProgress

KINDS = ("code", "arithmetic", "fact")
MOST = 40  # of each kind
CONTEXT = 1024  # tokens of a prompt and its reply
_MAX_TOKENS = {"code": 384, "arithmetic": 384, "fact": 64}
_PROMPTS = {
    "code": "Write this Python function: {} Reply with the complete function in one code block, without examples.",
    "arithmetic": "{} Work it out step by step. End with a line that says 'Answer:' and the number.",
    "fact": "{} Answer in one short sentence.",
}
_FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Task:
    """A prompt, and `grade`, which tells whether a reply is right."""

    kind: str
    name: str
    prompt: str
    grade: Callable[[str], bool]


def load_tasks(most: int) -> list[Task]:
    """The first `most` tasks of each kind."""
    with (places.PACKAGE_DATA / "tasks.toml").open("rb") as file:
        found = tomllib.load(file)
    return [_task(kind, each) for kind in KINDS for each in found[kind][:most]]


def _task(kind: str, facts: dict[str, Any]) -> Task:
    grades: dict[str, Callable[[], Callable[[str], bool]]] = {
        "code": lambda: partial(is_right_code, facts["name"], facts["checks"]),
        "arithmetic": lambda: partial(is_right_number, str(facts["answer"])),
        "fact": lambda: partial(is_right_fact, facts["pattern"]),
    }
    return Task(kind, facts.get("name", facts["ask"]), _PROMPTS[kind].format(facts["ask"]), grades[kind]())


# ---- grading


def is_right_code(name: str, checks: str, reply: str) -> bool:
    """Return whether the function `name` in `reply` passes `checks`."""
    source = find_function(name, reply)
    return bool(source) and code_sandbox.passes(source, checks)


def find_function(name: str, reply: str) -> str:
    """The code block that defines `name`; without blocks the definition and its indented lines; "" if there is none."""
    defines = re.compile(rf"^def {name}\b", re.MULTILINE)
    for block in _FENCED.findall(reply):
        if defines.search(block):
            return str(block)
    found = defines.search(reply)
    if found is None:
        return ""
    first, *rest = reply[found.start() :].split("\n")
    ends = (at for at, line in enumerate(rest) if line.strip() and not line[0].isspace())
    return "\n".join([first, *rest[: next(ends, len(rest))]])


def is_right_number(answer: str, reply: str) -> bool:
    """Return whether the first number after the last "answer", or else the last number, equals `answer`."""
    _, _, tail = reply.lower().rpartition("answer")
    numbers = _NUMBER.findall(tail)
    number = numbers[0] if numbers and "answer" in reply.lower() else next(iter(_NUMBER.findall(reply)[::-1]), None)
    return number is not None and Decimal(number.replace(",", "")) == Decimal(answer)


def is_right_fact(pattern: str, reply: str) -> bool:
    """Return whether `pattern` matches anywhere in `reply`, ignoring case."""
    return re.search(pattern, reply, re.IGNORECASE) is not None


# ---- replies


def check(tokenizer: Tokenizer) -> None:
    """Raise LocalqError (exit 1) for a model without a chat template, and as `code_sandbox.check` does."""
    if tokenizer.chat_template is None:
        raise LocalqError("--tasks", "this base model has no chat template", "Use an instruction-tuned model.")
    code_sandbox.check()


def run(model: LoadedModel, tokenizer: Tokenizer, tasks: Sequence[Task], on_progress: OnProgress) -> dict[str, Any]:
    """Ask and grade all tasks. Return what `--json` prints: counts for each kind, and every reply."""
    engine = Engine(model)
    replies = []
    for done, task in enumerate(tasks):
        on_progress("tasks", done, len(tasks))
        reply = _answer(engine, tokenizer, task)
        replies.append({"kind": task.kind, "task": task.name, "correct": task.grade(reply), "reply": reply})
    kinds = [kind for kind in KINDS if any(task.kind == kind for task in tasks)]
    return {
        "correct": sum(each["correct"] for each in replies),
        "n": len(replies),
        **{kind: _count([each for each in replies if each["kind"] == kind]) for kind in kinds},
        "replies": replies,
    }


def _count(replies: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {"correct": sum(each["correct"] for each in replies), "n": len(replies)}


def _answer(engine: Engine, tokenizer: Tokenizer, task: Task) -> str:
    """The greedy reply without its thoughts; a thought that does not end leaves no answer."""
    template = tokenizer.chat_template
    prompt = tokenizer.chat_ids([{"role": "user", "content": task.prompt}], **thinking.minimal_variables(template))
    room = min(_MAX_TOKENS[task.kind], engine.model.ctx - len(prompt))
    steps = engine.generate(prompt, Sampling(), tokenizer.stop_ids, room)
    ids = [id for step in steps for id in step.ids]
    skipped = frozenset[int]() if harmony.is_template(template) else None  # its marks are special tokens
    opened = thinking.thought_opening(tokenizer.decode(prompt[-thinking.TAIL_TOKENS :]))
    return thinking.split_reply(opened + tokenizer.decode(ids, skipped))[1]

"""Chats to calibrate on: files of them, alone and beside texts, from the command line to windows of ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from localq.cli import execute
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.formats.checkpoint import info
from localq.planner import prepare
from localq.quantize import by_layer, calibration
from localq.quantize.request import LayerwiseRequest, layerwise_task
from localq.text.tokenizer import Tokenizer
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.chat_prompts import read_prompts

SIZE = 48  # tokens of a window: the context of the model
TEXT = Path(__file__).parents[2] / "LICENSE"


def said(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)]}


CHATS = [
    said("Where is the inn?", "In the lane behind the church."),
    said("And the mill?", "<|im_end|> is what ends a turn."),
    {"messages": [{"role": "system", "content": "Be brief."}, *said("Why?", "So.", "Thanks!", "Bye.")["messages"]]},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("source") / "tiny"
    return make_checkpoint(folder, "llama", num_hidden_layers=1, max_position_embeddings=SIZE)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n\n".join(json.dumps({**chat, "id": 3}) for chat in CHATS) + "\n")  # blank lines, other fields
    return path


def windows_of(source: Path, *paths: Path, count: int | None = None) -> list[list[int]]:
    return calibration.token_windows(open_model(source), calibration.read_texts(paths), count)


# ---- windows


def read_as_the_model_does(source: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(open_model(source))
    found = []
    for chat in CHATS:
        plain = [{**each, "content": each["content"].replace("<|im", "<\u200b|im")} for each in chat["messages"]]
        found.append(tokenizer.encode(tokenizer.chat_text(plain, add_generation_prompt=False)))
    return found


def test_windows_of_chats_begin_with_one_and_go_on_with_the_next(source, chats) -> None:
    alone = read_as_the_model_does(source)
    first, last = 0, 0
    for window in windows_of(source, chats):
        assert len(window) == SIZE
        begun = [*(index for index in range(first, len(alone)) if window[: len(alone[index])] == alone[index][:SIZE])]
        first = begun[0]
        assert first in (last, last + 1), "nothing but the rest of one that fills a window is left out"
        joined, index = [], first
        while len(joined) < SIZE:
            joined += alone[index]
            last, index = index, index + 1
        assert window == joined[:SIZE]
    left = alone[last:] if len(alone[last]) < SIZE else alone[last + 1 :]
    assert sum(map(len, left)) < SIZE, "what is left is less than a window"


def test_every_file_gives_windows_of_its_own_in_their_order(source, chats) -> None:
    text, alone = windows_of(source, TEXT), windows_of(source, chats)
    both = windows_of(source, TEXT, chats)
    assert both == text + alone
    assert windows_of(source, chats, TEXT) == alone + text


def test_of_some_windows_every_file_gives_as_many_as_far_as_it_has_them(source, chats) -> None:
    text, alone = windows_of(source, TEXT), windows_of(source, chats)
    assert len(text) > 2 * len(alone)
    for count, of_text, of_chats in ((1, 1, 0), (2, 1, 1), (5, 3, 2), (2 * len(alone) + 3, len(alone) + 3, len(alone))):
        spread = [text[index * len(text) // of_text] for index in range(of_text)]
        spread += [alone[index * len(alone) // of_chats] for index in range(of_chats)]
        assert windows_of(source, TEXT, chats, count=count) == spread
    assert len(windows_of(source, TEXT, chats, count=len(text) + len(alone))) == len(text) + len(alone)


def test_a_file_of_less_than_a_window_is_named(source, tmp_path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps(said("Hi", "Ho")))
    with pytest.raises(LocalqError, match=r"few\.jsonl has only \d+ tokens, fewer than one 48-token window") as caught:
        windows_of(source, TEXT, few)
    assert caught.value.exit_code == ExitCode.USAGE


def test_default_is_the_text_that_localq_has(source, tmp_path, monkeypatch, chats) -> None:
    monkeypatch.setattr(calibration, "DEFAULT_TEXT", TEXT)
    monkeypatch.chdir(tmp_path)
    Path("default").write_text("not this one")
    default = calibration.DEFAULT
    assert windows_of(source, default, chats) == windows_of(source, TEXT, chats)
    assert calibration.read_texts([Path("./default").absolute()]) == ["not this one"]


def test_the_chats_tell_a_conversion_from_others(source, chats, tmp_path) -> None:
    planned = [{"layer": info(torch.float16, (3, 5))}]

    def fingerprint(*paths: Path) -> str:
        request = LayerwiseRequest(
            open_model(source), tmp_path / "out", windows_of(source, *paths), torch.device("cpu")
        )
        return str(layerwise_task(request, planned)["fingerprint"])

    known = fingerprint(TEXT, chats)
    assert known == fingerprint(TEXT, chats)
    assert known not in (fingerprint(TEXT), fingerprint(chats, TEXT))
    chats.write_text(chats.read_text().replace("church", "tower"))
    assert known != fingerprint(TEXT, chats)


# ---- what does not do


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([json.dumps(CHATS[0]), "{oops"], r"line 2: not valid JSON"),
        (["[1, 2]"], r"line 1: expected a JSON object, but found a JSON list"),
        (["", '{"text": "hello"}'], r"line 2: messages must be a list"),
        (['{"messages": []}'], r"line 1: messages must be"),
        (['{"messages": ["hello"]}'], r"line 1: messages must be"),
        (['{"messages": [{"role": "user", "content": ["hello"]}]}'], r"line 1: messages must be"),
        (['{"messages": [{"content": "hello"}]}'], r"line 1: messages must be"),
        (["", "  "], "no chats found in"),
    ],
)
def test_lines_that_are_no_chats_are_named(tmp_path, lines, why) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(LocalqError, match=why) as caught:
        calibration.read_texts([path])
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.what == calibration.OPTION
    assert caught.value.next_step.startswith('Each line must be {"messages"')


def test_a_model_that_cannot_read_chats_says_so(source, tmp_path, chats) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for path in source.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    config = json.loads((base / "tokenizer_config.json").read_text())
    for template, why in (
        (None, "but this base model has no chat template"),
        ("{{ raise_exception('no system') if messages[0]['role'] == 'system' }}", "line 5: .*no system"),
    ):
        (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        with pytest.raises(LocalqError, match=why) as caught:
            windows_of(base, chats)
        assert (caught.value.what, caught.value.exit_code) == (calibration.OPTION, ExitCode.USAGE)
        assert windows_of(base, TEXT)


# ---- the chats that localq has


def test_the_chats_in_the_tree_are_those_that_are_described() -> None:
    path = calibration.DEFAULT_TEXT.with_name("chats.jsonl")
    raw, described = path.read_bytes(), path.with_name("README.md").read_text()
    (line,) = [each for each in described.splitlines() if each.startswith(f"| `{path.name}`")]
    assert f"`{hashlib.sha256(raw).hexdigest()}`" in line
    assert f"| {len(raw):,} |" in line
    (found,) = calibration.read_texts([path])
    made_of = read_prompts("calibration")
    for (_, messages), chat in zip(found.chats, made_of, strict=True):
        assert list(messages[: len(chat.messages)]) == chat.messages
        assert tuple(each["content"] for each in messages if each["role"] == "user") == chat.asked
        assert all(each["content"] for each in messages)


def test_nothing_that_models_are_judged_on_was_calibrated_on() -> None:
    calibrated, judged = (
        {turn for chat in read_prompts(name) for turn in chat.asked} for name in ("calibration", "held_out")
    )
    assert len(judged) > 20
    assert not calibrated & judged


# ---- from the shell


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[LayerwiseRequest]:
    """What is asked of the encoder."""
    found: list[LayerwiseRequest] = []

    def convert(request: LayerwiseRequest, on_progress: Any, say: Any) -> Path:
        found.append(request)
        return request.out

    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(by_layer, "convert", convert)
    monkeypatch.setattr(prepare, "check_can_make", lambda *asked: None)
    return found


def test_the_option_may_be_repeated(source, chats, tmp_path, asked) -> None:
    command = ["quantize", str(source), "--format", "vq2", "--best", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert execute([*command, "--calibration", str(TEXT), "--calibration", str(chats)]) == ExitCode.OK
    assert asked[0].windows == windows_of(source, TEXT, chats)
    assert f"{len(asked[0].windows)} windows of {SIZE} tokens" in asked[0].start_note
    assert execute([*command, "--calibration", "default", "--calibration", str(chats), "--windows", "5"]) == ExitCode.OK
    assert len(asked[1].windows) == 5


@pytest.mark.parametrize(
    ("format", "texts", "named"),
    [
        ("vq2", ("default", "none"), "--calibration none: --format vq2 needs a calibration text"),
        ("squeezellm", ("default", "none"), "--calibration none: cannot be combined with a calibration text"),
        ("nf4", ("default",), "--calibration: --format nf4 needs no calibration"),
        ("vq2", ("default", "missing.jsonl"), "missing.jsonl cannot be read"),
    ],
)
def test_texts_that_do_not_go_together(source, tmp_path, asked, capsys, format, texts, named) -> None:
    given = [part for each in texts for part in ("--calibration", each)]
    command = ["quantize", str(source), "--format", format, "--out", str(tmp_path / "out"), *given]
    assert execute(command) == ExitCode.USAGE
    assert named in capsys.readouterr().err
    assert not asked

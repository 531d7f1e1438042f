"""`localq run` and `localq chat` as a user meets them: real processes, a real model, pipes, signals and a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pexpect
import pytest

from tests.support.cli.cli_processes import LOCALQ, ROOT, environment_of, localq, localq_typed
from tests.support.files.real_model import smollm2
from tests.support.models.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """A small context: keys and values of all 8,192 tokens take a second of every start."""
    return {**environment_of(tmp_path_factory.mktemp("home"), smollm2()), "LOCALQ_CTX": "1024"}


def test_a_piped_question_gets_only_the_answer_on_stdout(environment):
    model = environment["LOCALQ_MODEL"]
    result = localq(environment, "run", model, "Capital of France?", stdin="Answer in one word.\n", LOCALQ_CTX="max")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "\x1b" not in result.stdout + result.stderr
    assert "tok/s" in result.stderr
    assert "tok/s" not in result.stdout
    assert "importing torch" not in result.stderr


def test_stats_as_a_flag_times_the_stages_of_the_start(environment):
    result = localq(environment, "run", environment["LOCALQ_MODEL"], "Hi", "--max-tokens", "2", "--stats")
    seconds = {line[11:-1]: float(line[1:7]) for line in result.stderr.splitlines() if line[8:11] == "s  "}
    assert list(seconds)[:2] == ["starting the engine process", "importing torch"]
    assert list(seconds)[-2:] == ["first token", "total start-up"]
    assert seconds.pop("total start-up") == pytest.approx(sum(seconds.values()), abs=0.01 * len(seconds))


def test_json_is_one_line_with_schema_and_units(environment):
    result = localq(environment, "run", environment["LOCALQ_MODEL"], "Capital of France?", "--json", "-n", "5", "-q")
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    body = json.loads(result.stdout)
    assert body["schema"] == 1
    assert body["reason"] == "length"
    assert body["stats"]["generated_tokens"] == 5
    assert list(body["start_s"])[:2] == ["starting the engine process", "importing torch"]
    assert body["stats"]["time_to_first_token_s"] > 0


def test_a_seed_makes_a_sampled_reply_repeatable(environment, tmp_path):
    model = str(make_checkpoint(tmp_path / "tiny"))
    arguments = ("run", model, "Invent a word.", "--temp", "1.2", "-n", "12", "-q", "--seed")
    first, second, other = (localq(environment, *arguments, seed, LOCALQ_CTX="max").stdout for seed in ("5", "5", "6"))
    assert first == second != other


def test_a_typed_conversation_keeps_its_turns_and_reuses_the_prefix(environment):
    lines = "My name is Ada.\n/nonsense\nWhat is my name?\n/stats\n/exit\n"
    result = localq_typed({**environment, "TERM": "dumb"}, "chat", "-n", "20", lines=lines)
    assert result.returncode == 0, result.stderr
    assert "Ada" in result.stdout
    assert "unknown command" in result.stderr
    assert "cached" in result.stderr  # the second prompt begins with the first turn


def test_a_conversation_from_a_pipe_keeps_its_turns_and_obeys_no_command(environment):
    lines = "My name is Ada.\n/exit\nWhat is my name?\n"
    result = localq(environment, "chat", "-n", "20", stdin=lines, TERM="dumb")
    assert result.returncode == 0, result.stderr
    assert "Ada" in result.stdout
    assert result.stderr.count("piped lines are sent as plain text") == 1
    assert result.stderr.count("cached") == 2  # the second and third prompt begin with the earlier turns


def test_a_closed_pipe_ends_with_141_and_no_traceback(environment):
    command = f"{' '.join(LOCALQ)} run {environment['LOCALQ_MODEL']} 'Count to one hundred.' | head -c 1 >/dev/null; "
    result = subprocess.run(
        ["bash", "-c", command + "exit ${PIPESTATUS[0]}"], cwd=ROOT, env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 141, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["ls", "--json"], ["help"]])
def test_a_full_disk_behind_stdout_is_said_and_ends_with_9(environment, arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*LOCALQ, *arguments], stdout=full, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=ROOT,
            env=environment, check=False, timeout=60, text=True,
        )  # fmt: skip
    assert done.returncode == 9, done.stderr
    assert done.stderr.splitlines()[-1].startswith("localq: stdout: cannot write ([Errno 28] No space left")
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["chat", "--help"],
        ["ls", "--json"],
        ["fit", "--vram", "24"],
        ["help"],
        ["config", "show"],
        ["show", "phi-4"],
        ["doctor"],
        ["pull", "smollm2-135m", "-q"],
        ["rm", "--help"],
        ["quantize", "--help"],
        ["bench", "--help"],
    ],
)
@pytest.mark.parametrize("more", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_verbs_print_no_escapes_and_survive_a_closed_stdout(environment, arguments, more):
    plain = localq(environment, *arguments, **more)
    assert plain.returncode == 0, plain.stderr
    assert "\x1b" not in plain.stdout + plain.stderr
    if "TERM" in more:
        return  # a closed stdout has no colours to be without: once is enough
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(
        [*LOCALQ, *arguments], stdout=writer, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=ROOT,
        env={**environment, **more}, check=False, timeout=60,
    )  # fmt: skip
    os.close(writer)
    assert closed.returncode == 141, closed.stderr
    assert b"Traceback" not in closed.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_quickly_with_its_code(environment, number, code):
    command = [*LOCALQ, "run", environment["LOCALQ_MODEL"], "Tell a very long story about the sea.", "--no-stats"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        process.send_signal(number)
        rest, errors = process.stdout.read(), process.stderr.read()
        assert process.wait(timeout=60) == code, errors  # the end of the story would be 0
        assert first + rest
        assert b"Traceback" not in errors


def test_a_base_model_completes_in_run_and_is_refused_in_chat(environment, tmp_path):
    base = make_checkpoint(tmp_path / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (base / "chat_template.jinja").unlink(missing_ok=True)
    run = localq(environment, "run", str(base), "once upon", "-n", "4", LOCALQ_CTX="max")
    assert run.returncode == 0, run.stderr
    assert "base model" in run.stderr
    chat = localq(environment, "chat", str(base), stdin="hello\n", LOCALQ_CTX="max")
    assert chat.returncode == 1
    assert "no chat template" in chat.stderr
    assert chat.stdout == ""


def test_wrong_use_ends_with_the_documented_code(environment):
    model = environment["LOCALQ_MODEL"]
    expected = {
        ("run", "smolm2-135m", "hi"): 4,
        ("run", model): 2,
        ("run", model, "hi", "--temp", "-1"): 2,
        ("run", model, "hi", "--nonsense"): 2,
        ("run", "/nowhere/model.gguf", "hi"): 4,
        ("run", model, "hi", "--device", "cuda"): 7,
        ("config", "get", "modle"): 2,
    }
    for arguments, code in expected.items():
        result = localq(environment, *arguments)
        assert result.returncode == code, (arguments, result.stderr)
        assert "Traceback" not in result.stderr
        assert result.stderr.strip()


@pytest.mark.parametrize(
    ("closed", "arguments", "code"), [("<&-", "chat M", 0), ("2>&-", "run M hi -q -n 2", 0), ("<&- >&-", "", 2)]
)
def test_a_standard_stream_that_is_closed_is_an_empty_one(environment, tmp_path, closed, arguments, code):
    out, err = tmp_path / "out", tmp_path / "err"
    words = [*LOCALQ, *arguments.replace("M", environment["LOCALQ_MODEL"]).split()]
    command = f"{' '.join(words)} </dev/null >{out} 2>{err} {closed}"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=False, timeout=120)
    assert result.returncode == code
    assert "Traceback" not in err.read_text()


@pytest.fixture
def terminal(environment):
    plain = {**environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    child = pexpect.spawn(
        LOCALQ[0],
        [*LOCALQ[1:], "chat", "--plain"],
        cwd=str(ROOT),
        env=plain,
        encoding="utf-8",
        timeout=60,
        dimensions=(24, 80),
    )
    child.expect("Ctrl-D")
    yield child
    child.close(force=True)


def test_at_a_terminal_ctrl_c_keeps_the_reply_and_ctrl_d_leaves(terminal):
    terminal.expect(">>>")
    terminal.send("Tell a very long story about a ship.\r")
    terminal.expect("vessel")  # a word of the reply, not of the echoed message
    terminal.sendintr()
    terminal.expect("stopped")
    terminal.expect(r"tok/s")
    terminal.send("What is the capital of France?\r")
    terminal.expect("Paris")
    terminal.expect(r"tok/s")
    terminal.expect(">>>")  # before the prompt is there, the terminal would take the end-of-file for itself
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


def test_at_an_empty_prompt_the_second_ctrl_c_leaves(terminal):
    terminal.expect(">>>")
    terminal.sendintr()
    terminal.expect("to quit")
    terminal.expect(">>>")  # between two prompts the key would be a signal
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0  # nothing was interrupted


def test_a_killed_engine_is_reported_and_the_conversation_goes_on(terminal):
    terminal.expect(">>>")
    terminal.send("Tell a very long story about a ship.\r")
    terminal.expect("vessel")  # a word of the reply, not of the echoed message
    workers = subprocess.run(["pgrep", "-P", str(terminal.pid)], capture_output=True, text=True, check=True).stdout
    for pid in workers.split():
        if b"localq.worker.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)
    terminal.expect("SIGKILL")
    terminal.expect(">>>")
    terminal.send("What is the capital of France?\r")
    terminal.expect("Paris")


def test_a_format_that_nobody_publishes_is_made_once_announced_and_removable(environment):
    first = localq(environment, "run", "smollm2-135m@nf4", "What is the capital of France?", "-n", "12")
    assert first.returncode == 0, first.stderr
    assert "Paris" in first.stdout
    assert "are not published, so localq quantizes " in first.stderr
    assert "about 1 min" in first.stderr
    again = localq(environment, "run", "smollm2-135m@nf4", "What is the capital of France?", "-n", "12")
    assert again.stdout == first.stdout
    assert "made here" not in again.stderr
    listed = json.loads(localq(environment, "ls", "--json").stdout)
    assert "smollm2-135m@nf4" in [model["name"] for model in listed["models"]]
    removed = localq(environment, "rm", "smollm2-135m@nf4", "-y")
    assert removed.returncode == 0, removed.stderr
    assert "smollm2-135m@nf4" not in localq(environment, "ls", "--json").stdout


def test_two_bits_of_the_embedded_model_come_with_localq(environment):
    made = localq(environment, "run", "smollm2-135m@vq2", "What is the capital of France?", "-n", "8")
    assert made.returncode == 0, made.stderr
    assert "localq includes its quantized layers" in made.stderr
    assert made.stdout.strip()
    shown = json.loads(localq(environment, "show", "smollm2-135m@vq2", "--json").stdout)
    assert (shown["format"], shown["scheme"]) == ("vq2", "s4l16")

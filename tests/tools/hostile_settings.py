"""Hostile runs, kinds `settings` and `environment`: files of settings and records, variables, limits, signals."""

from __future__ import annotations

import random
import resource
import signal
from dataclasses import fields

from localq.cli.registry import VERBS
from localq.settings import Settings
from tests.tools import hostile_draws as draws
from tests.tools.hostile_process import Plan
from tests.tools.hostile_scratch import Scratch

NAMES = tuple(each.name for each in fields(Settings))
SERVES_S = 3.0  # until `serve`, which does not end by itself, is interrupted
EDITOR = "#!/bin/sh\n{}\n"


def settings(rng: random.Random, scratch: Scratch) -> Plan:
    """A file of settings, of a project, of models, or a record, with something wrong in it."""
    scratch.allow(scratch.config)  # and its neighbours, which a writer makes beside it
    files = {
        "config.toml": scratch.config, "localq.toml": scratch.work / "localq.toml", "models.toml": scratch.models,
        "sessions.db": scratch.data / "sessions.db", "history": scratch.state / "history",
        "pulled": scratch.data / "pulled/models--stranger--model/record.json",
        "cards": scratch.cache / "speeds.json", "refs": scratch.hub / "models--stranger--model/refs/main",
        "token": scratch.token,
    }  # fmt: skip
    name = rng.choice((*files, "config.toml", "config.toml", "localq.toml", "localq.toml", "models.toml"))
    path = files[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    if rng.random() < 0.25:
        trap = f"{name} is a {draws.odd_file(rng, path, scratch)}"
    elif name.endswith(".toml"):
        path.write_bytes(_toml(rng, name))
        trap = f"{name} with odd values"
    else:
        if path.is_file() and rng.random() < 0.7:
            draws.damage(rng, path)
        else:
            path.write_bytes(draws.data(rng))
        trap = f"{name} with other content"
    if name == "localq.toml":
        (scratch.work / ".git").mkdir()
    plan = _with_settings(rng, scratch)
    plan.trap = trap
    return plan


def _with_settings(rng: random.Random, scratch: Scratch) -> Plan:
    model = str(draws.sound_model(scratch.work / "model"))
    draws.says(scratch, rng)
    key = rng.choice((*NAMES, draws.argument(rng)))
    value = rng.choice((draws.argument(rng), rng.choice(draws.NUMBERS), "4"))
    argv = rng.choice((
        ["config", "show"], ["config", "show", "--json"], ["config", "get", key], ["config", "set", key, value],
        ["config", "set", "--", key, value], ["config", "unset", key], ["config", "path"], ["config", "edit"], ["ls"],
        ["run", model, "hello"], ["run", model, "hello", "-q"], ["chat", model, "--plain"], ["doctor"], ["verify"],
        ["fit", "--vram", "24"], ["show", "smollm2-135m"], ["chat", "--plain", "--continue", "-m", model], ["show"],
        ["prune", "-y"], ["chat", "-m", model, "--plain", "--resume", "1"], ["run", "hello", "--dry-run"], ["help",
        key],
    ))  # fmt: skip
    environment: dict[str, str | None] = {}
    if argv == ["config", "edit"]:
        editor = scratch.work / "editor"
        editor.write_text(
            EDITOR.format(rng.choice(("exit 3", 'echo "x = [" >> "$1"', 'rm "$1"', "kill -9 $$", "true")))
        )
        editor.chmod(0o755)
        environment["EDITOR"] = str(editor)
    stdin = b"hello\n/set\n/sessions\n/show params\n" if argv[0] == "chat" else b""
    return Plan(argv, "", environment, stdin=stdin, scripted=argv[0] in ("run", "chat") and "--dry-run" not in argv,
                may_tell=argv[0] == "chat")  # fmt: skip


def _toml(rng: random.Random, name: str) -> bytes:
    key = rng.choice((*NAMES, "keys", draws.argument(rng).replace("\n", " ")))
    quoted = rng.choice(list(draws.WORDS) + list(draws.NUMBERS) + [draws.text(rng)])
    string = '"' + "".join(f"\\U{ord(each):08x}" if each in '"\\' or ord(each) < 32 or 0xD800 <= ord(each) < 0xE000
                           else each for each in quoted) + '"'  # fmt: skip
    string = string.replace("\\U0000d8", "\\U0000e8")
    values = (
        string, string, *draws.NUMBERS, "[]", "{}", "[[1]]", "{a = 1}", "1979-05-27", "true", "-nan", "'''\n\n'''",
        "[1, 2",
        "0x" + "f" * 6000, "[" * 4000, "{a=" * 3000, "0o7777777777777777777777777", "12:00:00",
    )  # fmt: skip
    line = f"{key} = {rng.choice(values)}\n"
    parts = rng.choice((20_000, 3000, 600))
    more = rng.choice((
        "", "", "[a]\n[a]\n", "[[model]]\n" * 2000, "a." * parts + "b = 1\n", "[" + "a." * parts + "b]\n",
        "a = 1\n" * 2,
        "\n".join(f"k{number} = 1" for number in range(20_000)), '[[model]]\nname = "x"\n', "\x1b]0;ZQtitle\x07",
        '[[model]]\nname = "../x"\nsources = [{format = "nf4", repo = "a/../b"}]\n', "# " + draws.text(rng),
    ))  # fmt: skip
    text = (line + more).encode("utf-8", "surrogatepass")
    return rng.choice(
        (text, text, text, text.replace(b"\n", b"\r"), b"\xef\xbb\xbf" + text, text + b"\xff", draws.data(rng))
    )


# ---- environments

VARIABLES = (
    "HOME", "TMPDIR", "PATH", "LANG", "LC_ALL", "COLUMNS", "LINES", "TERM", "PAGER", "EDITOR", "TZ", "HF_HOME",
    "HF_HUB_CACHE", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LOCALQ_CONFIG",
    "LOCALQ_MODELS", "LOCALQ_DATA", "LOCALQ_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "NO_COLOR", "CLICOLOR_FORCE", "ESCDELAY", "PYTHONIOENCODING", "PYTHONWARNINGS", "LESS", "LOCALQ_TOKEN",
    "LOCALQ_NOHISTORY",
    "XDG_RUNTIME_DIR", "USER", "SHELL", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_XET_HIGH_PERFORMANCE",
)  # fmt: skip
# The folders of these are made where there are none: what is a device, or the machine's, they must not lead to.
FOLDERS = ("HOME", "TMPDIR", "HF_HOME", "HF_HUB_CACHE", "LOCALQ_CONFIG", "LOCALQ_MODELS", "LOCALQ_DATA", "LOCALQ_CACHE",
           "HF_TOKEN_PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME",
           "XDG_RUNTIME_DIR")  # fmt: skip


def environment(rng: random.Random, scratch: Scratch) -> Plan:
    """A machine on which something is odd, full, closed, small or gone."""
    plan = rng.choice((_plain, _plain, _plain_engine))(rng, scratch)
    ways = rng.sample(_WAYS, 2)
    traps = [way(rng, scratch, plan) for way in ways if not (way is _gone_folder and plan.scripted)]
    plan.trap = "; ".join(filter(None, traps))
    return plan


def _plain(rng: random.Random, scratch: Scratch) -> Plan:
    verb = rng.choice(VERBS)
    more = {
        "chat": ["--dry-run"], "tui": [], "run": ["hello", "--dry-run"], "pull": ["smollm2-135m", "--dry-run"],
        "show": ["smollm2-135m"], "rm": ["nothing/there"], "fit": ["--vram", "24"], "quantize": ["nothing", "-o",
        "made"],
        "bench": ["nothing"], "eval": ["nothing"], "config": ["show"], "help": [rng.choice(("keys", "environment",
        "x"))],
    }.get(verb, [])  # fmt: skip
    if verb in ("show", "fit", "config", "doctor", "ls", "help", "verify") and rng.random() < 0.3:
        more = [*more, "--json"]
    environment = {**scratch.places()} if rng.random() < 0.5 else {}
    return Plan([verb, *more], "", environment, patience=SERVES_S if verb == "serve" else None)


def _plain_engine(rng: random.Random, scratch: Scratch) -> Plan:
    model = str(draws.sound_model(scratch.work / "model"))
    draws.says(scratch, rng)
    argv = rng.choice((["run", model, "hello"], ["chat", model, "--plain"], ["run", model, "hello", "--json"]))
    return Plan(argv, "", stdin=b"hello\n", scripted=True, may_tell=True)


def _variables(rng: random.Random, scratch: Scratch, plan: Plan) -> str:
    name = rng.choice(VARIABLES)
    if name == "HOME":
        plan.environment |= scratch.places()
    if name in FOLDERS:
        path = scratch.root / "odd"
        kind = rng.choice(("text", "odd", "file in the way", "closed", "unset" if name != "HOME" else "odd"))
        if kind == "text":
            value: str | None = str(scratch.root / "odd" / draws.name(rng)[:60])
        elif kind == "unset":
            value = None
        else:
            path.write_text("written by somebody else\n")
            value = str(path / "below") if kind == "file in the way" else str(path)
            if kind == "odd":
                kind = draws.odd_file(rng, path, scratch)
        if kind in ("folder", "text", "link to nothing", "link to a folder"):
            scratch.allow(path, scratch.foreign / "not there")
    else:
        odd = ("latin-1", "ascii", "utf-16", "utf-8:strict") if name == "PYTHONIOENCODING" else ()
        kind = value = rng.choice(odd or (draws.argument(rng), rng.choice(draws.NUMBERS), "/nonexistent", None))
        if name == "PATH" and plan.scripted:
            value = None
    if name == "HF_ENDPOINT" and value is not None:
        value = f"http://user:{scratch.secrets.password}@{value[:200]}"
    if name.endswith("PROXY") and value is not None and name != "NO_PROXY":
        value = (
            f"{rng.choice(('http', 'socks5', 'socks', 'x', 'https'))}://user:{scratch.secrets.password}@{value[:200]}"
        )
        plan.environment |= {"HF_HUB_OFFLINE": None, "NO_PROXY": None, "HF_ENDPOINT": "http://127.0.0.2:9"}
    plan.environment[name] = value.replace("\0", "").encode("utf-8", "replace").decode() if value is not None else None
    return f"{name} {kind!r:.60}"


def _setting(rng: random.Random, scratch: Scratch, plan: Plan) -> str:
    name = f"LOCALQ_{rng.choice(NAMES).upper()}"
    value = rng.choice((draws.argument(rng), rng.choice(draws.NUMBERS), rng.choice(draws.NUMBERS)))
    plan.environment[name] = value.encode("utf-8", "replace").decode()
    return f"{name}={value[:60]!r}"


def _streams(rng: random.Random, scratch: Scratch, plan: Plan) -> str:
    name = rng.choice(("stdin", "stdout", "stderr", "stdout", "stderr"))
    how = rng.choice(("closed", "full", "broken"))
    setattr(plan, name, "closed" if name == "stdin" else how)
    return f"{name} is {'closed' if name == 'stdin' else how}"


def _limits(rng: random.Random, scratch: Scratch, plan: Plan) -> str:
    kind, values = rng.choice((
        (resource.RLIMIT_NOFILE, (12, 16, 24, 40)), (resource.RLIMIT_AS, (2**27, 2**28, 3 * 2**27)),
        (resource.RLIMIT_FSIZE, (0, 100, 5000)), (resource.RLIMIT_STACK, (2**17, 2**20)), (resource.RLIMIT_MEMLOCK,
        (0,)),
        (resource.RLIMIT_NICE, (0,)),
    ))  # fmt: skip
    plan.limits[kind] = rng.choice(values)
    return f"limit {kind} is {plan.limits[kind]}"


def _signals(rng: random.Random, scratch: Scratch, plan: Plan) -> str:
    number = rng.choice((signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    plan.signal = (number, rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.4), rng.uniform(0, 1.5))))
    return f"{number.name} after {plan.signal[1]:.3f} s"


def _gone_folder(rng: random.Random, scratch: Scratch, plan: Plan) -> str:
    plan.folder = plan.deletes = scratch.root / "gone"
    plan.folder.mkdir()
    scratch.allow(plan.folder)
    return "the working folder is gone"


def _ended_child(rng: random.Random, scratch: Scratch, plan: Plan) -> str:
    """Its youngest process is killed or stopped; where it is stopped, the front end is told to end."""
    number = rng.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGABRT))
    plan.child_signal = (number, rng.choice((0.3, 0.6, rng.uniform(0, 3))))
    if number == signal.SIGSTOP:
        plan.patience = 2.0
    return f"{number.name} to a child after {plan.child_signal[1]:.1f} s"


def _umask(rng: random.Random, scratch: Scratch, plan: Plan) -> str:
    plan.umask = rng.choice((0o777, 0o000, 0o077))
    return f"umask {plan.umask:o}"


_WAYS = (_variables, _variables, _setting, _streams, _limits, _signals, _signals, _gone_folder, _ended_child, _umask)

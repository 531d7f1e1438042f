"""Hostile runs, kinds `folder` and `file`: models, and the files that options name for reading and for writing."""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path

from tests.support.files import fake_hub
from tests.support.files.hostile_models import FORMATS, Case, cases, write_sound
from tests.tools import hostile_draws as draws
from tests.tools.hostile_process import Plan
from tests.tools.hostile_scratch import Scratch
from tests.tools.mutations import damaged

LIGHT_FORMATS = ("plain", "plain", "plain", *FORMATS)


@cache
def _corpus() -> list[Case]:
    return cases()


def folder(rng: random.Random, scratch: Scratch) -> Plan:
    """A model folder, or a GGUF file, in which something is wrong."""
    way = rng.choice((_case, _case, _mutated, _mutated, _odd, _odd, _named, _gguf, _quantized, _cached))
    target, trap = way(rng, scratch)
    plan = Plan(draws.on_model(rng, target, scratch), trap)
    if plan.argv[0] in ("run", "quantize", "eval", "bench") and rng.random() < 0.3:
        weights = scratch.work / "model/model.safetensors"
        plan.during = (lambda: _cut(weights), rng.uniform(0.2, 6))
        plan.trap += "; weights are cut meanwhile"
        scratch.allow(weights)
    if plan.argv[0] == "rm" and target.startswith("/"):
        return plan  # a folder is no name: nothing may be deleted
    return plan


def _cut(path: Path) -> None:
    """The rest of a file goes; it must be of the model's folder alone."""
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
        os.truncate(path, min(1000, path.stat().st_size))


def _case(rng: random.Random, scratch: Scratch) -> tuple[str, str]:
    case = rng.choice(_corpus())
    made = write_sound(scratch.work / "model", case.format)
    case.change(made)
    return str(made), f"case {case.name}"


def _mutated(rng: random.Random, scratch: Scratch) -> tuple[str, str]:
    format = rng.choice(LIGHT_FORMATS)
    made = write_sound(scratch.work / "model", format)
    names = []
    for _ in range(rng.randint(1, 2)):
        path = rng.choice(sorted(made.iterdir()))
        names.append(path.name)
        if path.suffix == ".json" and rng.random() < 0.7:
            try:
                path.write_text(json.dumps(damaged(json.loads(path.read_text()), rng)))
                continue
            except (ValueError, RecursionError):
                pass
        draws.damage(rng, path)
    return str(made), f"damaged {format}: {', '.join(names)}"


def _odd(rng: random.Random, scratch: Scratch) -> tuple[str, str]:
    """Something else in the place of a file, or besides the files, or instead of the folder."""
    made = draws.sound_model(scratch.work / "model")
    chance = rng.random()
    if chance < 0.15:
        return str(made), f"the folder is a {draws.odd_file(rng, made, scratch)}"
    others = ("generation_config.json", "chat_template.jinja", "model.safetensors.index.json", "localq.json",
              "quantize_config.json", "conversion.lock", "added_tokens.json", "special_tokens_map.json")  # fmt: skip
    path = made / rng.choice((*sorted(each.name for each in made.iterdir()), *others))
    return str(made), f"{path.name} is a {draws.odd_file(rng, path, scratch)}"


def _named(rng: random.Random, scratch: Scratch) -> tuple[str, str]:
    """Sound, or empty, with a name that acts; or a name of nothing."""
    path = scratch.work / draws.name(rng)
    if rng.random() < 0.5 and not path.exists():
        draws.sound_model(path)
        if rng.random() < 0.5:
            config = json.loads((path / "config.json").read_text())
            config |= {"_name_or_path": draws.text(rng), "model_type": draws.argument(rng)}
            (path / "config.json").write_text(json.dumps(config))
        if rng.random() < 0.3:
            (path / draws.name(rng)).write_text("x")
        return str(path), "a name that acts"
    return rng.choice((str(path), draws.argument(rng))), "a name of nothing"


def _gguf(rng: random.Random, scratch: Scratch) -> tuple[str, str]:
    path = scratch.work / f"{rng.choice(('model', draws.name(rng)))[:80]}.gguf"
    path.write_bytes(_gguf_bytes())
    trap = "a damaged GGUF file"
    if rng.random() < 0.15:
        trap = f"a GGUF file that is a {draws.odd_file(rng, path, scratch)}"
    elif rng.random() < 0.9:
        draws.damage(rng, path)
    return str(path), trap


@cache
def _gguf_bytes() -> bytes:
    import tempfile

    import gguf
    import numpy as np

    from tests.support.files.tiny_gguf import CASES, finish, write_keys

    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        write_keys(writer, CASES["llama"])
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["<unk>", "<s>", "</s>", *map(chr, range(33, 127))])
        writer.add_token_merges(["a b"])
        for name in ("token_embd.weight", "output.weight", "blk.0.attn_q.weight"):
            writer.add_tensor(name, np.zeros((131, 72), np.float32))
        finish(writer)
        return path.read_bytes()


def _quantized(rng: random.Random, scratch: Scratch) -> tuple[str, str]:
    """A model that localq seems to have made, and its records, damaged."""
    made = write_sound(scratch.data / "quantized" / "tiny@nf4", "nf4")
    (made / "localq.json").write_bytes(draws.data(rng))
    path = rng.choice(sorted(made.iterdir()))
    trap = "a quantized model with damage"
    if rng.random() < 0.3:
        trap = f"a quantized model; {path.name} is a {draws.odd_file(rng, path, scratch)}"
    else:
        draws.damage(rng, path)
    return rng.choice(("tiny@nf4", str(made))), trap


def _cached(rng: random.Random, scratch: Scratch) -> tuple[str, str]:
    """A repository of the cache that another tool has laid out, or seems to have."""
    part = draws.name(rng)[:60]
    folder = scratch.hub / rng.choice((f"models--x--{part}", "models--x--y", "models--", part, f"datasets--{part}"))
    commit = rng.choice((fake_hub.COMMIT, part, "main"))
    snapshot = folder / "snapshots" / commit
    if not snapshot.exists():
        draws.sound_model(snapshot)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs/main").write_bytes(rng.choice((commit.encode(), draws.data(rng)[:3000])))
    path = rng.choice((folder / "blobs", folder / "refs/main", snapshot / "config.json", folder / "refs", snapshot))
    trap = f"{path.name} is a {draws.odd_file(rng, path, scratch)}" if rng.random() < 0.6 else "as it should be"
    names = (folder.name.removeprefix("models--").replace("--", "/"), "x/y", str(snapshot))
    return rng.choice(names), f"cached; {trap}"


# ---- files that options name


def file(rng: random.Random, scratch: Scratch) -> Plan:
    """A file that an option names: for reading, for writing, or stdin."""
    return rng.choice((_read, _read, _written, _written, _piped, _piped, _template, _grammar))(rng, scratch)


def _read(rng: random.Random, scratch: Scratch) -> Plan:
    model = str(draws.sound_model(scratch.work / "model"))
    draws.says(scratch, rng)
    path = scratch.work / draws.name(rng)
    trap = draws.odd_file(rng, path, scratch) if not path.exists() and not path.is_symlink() else "what is there"
    heavy = (["eval", model, "--text", str(path)], ["quantize", model, "-o", "made", "--calibration", str(path)])
    at = f"@{path}"
    argv = rng.choice((
        ["run", model, "-f", str(path), "sum up"], ["run", model, "hello", "-s", at], ["run", model, f"say {at} now"],
        ["run", model, "hello", "--json-schema", str(path)], ["run", model, "hello", "--grammar", str(path)],
        ["run", model, "hello", "--token", at], ["fit", str(path), "--vram", "24"], ["show", str(path)],
        ["chat", model, "--plain", "-s", at, "--no-save"], rng.choice(heavy) if rng.random() < 0.3 else ["show", model],
    ))  # fmt: skip
    if argv[0] == "quantize":
        scratch.allow(scratch.work / "made")
    return Plan(argv, f"reads a {trap}", scripted=argv[0] in ("run", "chat"), stdin=b"hello\n", may_tell=True)


def _written(rng: random.Random, scratch: Scratch) -> Plan:
    """Something that exists, or a link, where the command would write."""
    model = str(draws.sound_model(scratch.work / "model"))
    draws.says(scratch, rng)
    path = scratch.work / "target"
    trap = rng.choice(("nothing", "odd", "odd", "odd", "locks"))
    if trap == "odd":
        trap = draws.odd_file(rng, path, scratch)
    elif trap == "locks":
        path.mkdir()
        lock = rng.choice(("conversion.lock", "model.safetensors", "config.json", "localq.json", "tokenizer.json"))
        trap = f"folder in which {lock} is a {draws.odd_file(rng, path / lock, scratch)}"
    else:
        scratch.allow(path)
    argv = rng.choice((
        ["run", model, "hello", "--think-out", str(path)], ["run", model, "hello", "--think-out",
        f"{model}/config.json"],
        ["run", str(scratch.work / "not there"), "hello", "--think-out", str(path)], ["ls"],
        ["chat", model, "--plain", "--no-save"], ["chat", model, "--plain", "--no-save"],
        ["quantize", model, "-o", str(path)] if rng.random() < 0.3 else ["quantize", "not/there", "-o", str(path)],
    ))  # fmt: skip
    stdin = f"hello\n/export md {path}\n/export json {path}\n".encode() if argv[0] == "chat" else b""
    if argv[0] == "run" and trap in ("empty", "bytes", "closed", "sparse"):
        scratch.allow(path)  # the user names it: it is replaced once there is a thought
    return Plan(argv, f"writes to a {trap}", scripted=argv[0] in ("run", "chat"), stdin=stdin, may_tell=True)


def _piped(rng: random.Random, scratch: Scratch) -> Plan:
    """What comes through stdin, to a command that reads it or does not."""
    model = str(draws.sound_model(scratch.work / "model"))
    draws.says(scratch, rng)
    stdin = rng.choice((draws.data(rng), draws.data(rng), draws.data(rng), "endless", "closed", "open"))
    argv = rng.choice((
        ["run", model, "sum up"], ["run", model], ["chat", model, "--plain"], ["run", model, "hello", "--json"],
        ["run", model, "-s", "@-", "x"], ["rm", "stranger/model"], ["prune"], ["ls"], ["config", "edit"],
        ["chat", model, "-q", "--no-save"], ["eval", model, "--text", "-"] if rng.random() < 0.3 else ["tui", model],
    ))  # fmt: skip
    return Plan(
        argv, f"stdin: {stdin if isinstance(stdin, str) else stdin[:20]!r}", scripted=argv[0] in ("run", "chat", "tui"),
        stdin=stdin, may_tell=argv[0] in ("run", "chat"), patience=2.0 if stdin == "open" else None,
    )  # fmt: skip


TEMPLATES = (
    "{{ messages", "{% for i in range(10**9) %}x{% endfor %}", "{{ 'a' * 10**10 }}", "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('\x1b]0;ZQtitle\x07') }}", "{{ 1 // 0 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "",
    "{{ messages[-1].content }}" * 3000, "{{ 9 ** 9 ** 9 }}", "{% include '/etc/passwd' %}", "{{ messages | tojson }}",
    "{% set x = namespace(a=[]) %}{% for i in range(1000) %}{% set x.a = x.a + x.a + [i] %}{% endfor %}",
    "\x1b]0;ZQtitle\x07{{ messages[-1].content }}\u202e", "{{ lipsum.__globals__['os'].environ }}",
    "{{ " + "(" * 3000 + "}}",
    "{% for m in messages %}{{ m.content.split() }}{% endfor %}", "{{ messages[-1].content | reverse | upper }}",
)  # fmt: skip
GRAMMARS = (
    "root ::= root", "root ::= " + "(" * 5000, "root ::= " + '"a" | ' * 50_000 + '"b"', "start: start",
    "root ::= [^\\x00-",
    "start: /(a+)+$/", "start: /" + "(a|" * 500 + "/", "root ::= \"\x1b]0;ZQtitle\x07\"", "root ::= x{1000000}",
    "%import x",
    '{"$ref": "#"}', '{"type": "\x1bc"}', '{"pattern": "(a*)*b"}', '{"$ref": "file:///etc/passwd"}', '{"enum": []}',
    '{"type": "object", "properties": ' + '{"a": {"properties": ' * 300, '{"minLength": 1e99}',
    '{"$ref": "http://127.0.0.1:9"}',
)  # fmt: skip


def _template(rng: random.Random, scratch: Scratch) -> Plan:
    """A chat template that comes with the model."""
    model = draws.sound_model(scratch.work / "model")
    draws.says(scratch, rng)
    template = rng.choice(TEMPLATES)
    (model / "chat_template.jinja").write_text(template)
    argv = rng.choice((["run", str(model), "hello"], ["chat", str(model), "--plain"], ["show", str(model)]))
    stdin = b"hello\n/show prompt\n/show template\n/compact\n/think on\nhello\n" if argv[0] == "chat" else b""
    return Plan(argv, f"template {template[:50]!r}", stdin=stdin, scripted=argv[0] != "show", may_tell=True)


def _grammar(rng: random.Random, scratch: Scratch) -> Plan:
    """A grammar, a schema or a pattern, in words or in a file."""
    model = str(draws.sound_model(scratch.work / "model"))
    draws.says(scratch, rng)
    text = rng.choice((*GRAMMARS, draws.text(rng).encode("utf-8", "replace").decode(), rng.choice(draws.WORDS)))
    path = scratch.work / rng.choice(("a.gbnf", "a.lark", "a.json", "a"))
    path.write_text(text)
    option = rng.choice(("--grammar", "--json-schema", "--regex"))
    given = (str(path) if rng.random() < 0.5 and option != "--regex" else text[:50_000]).replace("\0", "")
    return Plan(["run", model, "hello", option, given], f"{option} {text[:50]!r}", scripted=True, may_tell=True)

"""What must not run (reliability M5) and tokenizers that are no tokenizers (M6), over a sound folder."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.files.hostile_configs import changed
from tests.support.files.hostile_headers import as_folder, linked, piped
from tests.support.files.hostile_models import Case, Change

MARKER = "ran"  # the file beside the folder that poison would write
CHARSMAP = base64.b64encode((8).to_bytes(4, "little") + b"\xff" * 8 + b"abcd").decode()


# ---- M5: pickles, code, archives


class Poison:
    """Writes the marker when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.marker = folder.parent / MARKER

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def _poisoned(name: str, keep: bool = False) -> Change:
    """A pickle of that name, with or instead of the weights."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(pickle.dumps(Poison(folder)))
        if not keep:
            (folder / "model.safetensors").unlink(missing_ok=name == "model.safetensors")
            if name == "model.safetensors":
                (folder / name).write_bytes(pickle.dumps(Poison(folder)))

    return change


def _code(folder: Path) -> None:
    """Modules that a library might import, and a configuration that names them."""
    text = f"open({str(folder.parent / MARKER)!r}, 'w').close()\n"
    for name in ("modeling.py", "tokenization.py", "torch.py", "json.py", "__init__.py", "sitecustomize.py"):
        (folder / name).write_text(text)
    code = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    changed({"auto_map": code, "trust_remote_code": True, "custom_pipelines": {"x": {"impl": "modeling.Pipe"}}})(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    auto = {"auto_map": {"AutoTokenizer": ["tokenization.Slow", "tokenization.Fast"]}, "tokenizer_class": "Slow"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **auto}))


def _archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "weights.zip", "w") as archive:
        archive.writestr("../../ran", "x")
        archive.writestr("inner.zip", b"PK\3\4")


def _only_code(folder: Path) -> None:
    _code(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "custom", "auto_map": {"AutoModel": "modeling.M"}}))


# ---- M6: tokenizers


def tokenizer(edit: Callable[[dict[str, Any]], object]) -> Change:
    """tokenizer.json, edited."""

    def change(folder: Path) -> None:
        body = json.loads((folder / "tokenizer.json").read_text())
        edit(body)
        (folder / "tokenizer.json").write_text(json.dumps(body))

    return change


def _part(**parts: Any) -> Change:
    return tokenizer(lambda body: body.update(parts))


def _vocab(**tokens: Any) -> Change:
    return tokenizer(lambda body: body["model"]["vocab"].update(tokens))


def _merges(*merges: Any) -> Change:
    return tokenizer(lambda body: body["model"]["merges"].extend(merges))


def _added(**fields: Any) -> Change:
    token = {"id": 400, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True, **fields}  # fmt: skip
    return tokenizer(lambda body: body["added_tokens"].append(token))


def _file(name: str, content: str | bytes) -> Change:
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return lambda folder: (folder / name).write_bytes(raw)


def _said(**fields: Any) -> Change:
    """tokenizer_config.json, edited."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, **fields}))

    return change


def _declared(**tokens: Any) -> Change:
    return _said(added_tokens_decoder=tokens)


def _sparse(size: int) -> Change:
    return lambda folder: os.truncate(folder / "tokenizer.json", size)


def _split(rule: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}


def _replace(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def _ranks(*vocab: Any, **rest: Any) -> Change:
    """A unigram model."""
    return _part(model={"type": "Unigram", "unk_id": 0, "vocab": list(vocab), "byte_fallback": False, **rest})


MANY = b'{"version": "1.0", "model": {"type": "BPE", "vocab": {%b"a": 0}, "merges": [%b["a", "a"]]}}'
MODELS: dict[str, Change] = {
    "negative id": _vocab(zz=-1),
    "id of 2^32": _vocab(zz=2**32),
    "id of 2^40": _vocab(zz=2**40),
    "id beyond the embedding": _vocab(a=5000),
    "the last id of 32 bits": _vocab(a=2**32 - 1),
    "more tokens than the embedding": _vocab(**{f"t{i}": 320 + i for i in range(100)}),
    "id of text": _vocab(zz="5"),
    "id of a float": _vocab(zz=5.0),
    "vocabulary is a list": tokenizer(lambda body: body["model"].update(vocab=["a"])),
    "vocabulary is empty": tokenizer(lambda body: body["model"].update(vocab={})),
    "no model": tokenizer(lambda body: body.pop("model")),
    "unknown kind": tokenizer(lambda body: body["model"].update(type="Cyclic")),
    "merge into nothing": _merges(["q", "z"]),
    "merge of nothing": _merges(["\u2603", "a"]),
    "merges in a circle": _merges(["qz", "zq"], ["zq", "qz"]),
    "merge of three": _merges(["a", "b", "c"]),
    "merge of numbers": _merges([1, 2]),
    "merge is text of three": _merges("a b c"),
    "unknown token that is not there": _ranks(["a", 0.0], unk_id=7),
    "scores of text": _ranks(["a", "0"]),
    "score NaN": _ranks(["a", float("nan")]),
    "no pieces": _ranks(),
    "four million tokens": lambda folder: _file("tokenizer.json", MANY % (b'"token":1,' * 4_000_000, b""))(folder),
    "a million merges": lambda folder: _file("tokenizer.json", MANY % (b"", b'["a","b"],' * 1_100_000))(folder),
}  # fmt: skip
STEPS: dict[str, Change] = {
    "regex that backtracks": _part(pre_tokenizer=_split("(a*)*(a*)*(a*)*b|x")),
    "regex that searches for ever": _part(pre_tokenizer=_split("(a|a){1,18}(?:b|c)x")),
    "regex that is none": _part(pre_tokenizer=_split("((")),
    "regex of 1 MB": _part(pre_tokenizer=_split("(" * 10**6)),
    "an unknown step": _part(pre_tokenizer={"type": "Exec"}),
    "a normalizer that grows": _part(normalizer=_replace("a" * 33)),
    "growing steps": _part(normalizer={"type": "Sequence", "normalizers": [_replace("aa")] * 6}),
    "nested steps": _part(normalizer=json.loads('{"type": "Sequence", "normalizers": [' * 100 + "]}" * 100)),
    "a decoder that grows": _part(decoder={"type": "Sequence", "decoders": [_replace("aa")] * 6}),
    "replaces nothing": _part(normalizer={"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
    "charsmap cut": _part(normalizer={"type": "Precompiled", "precompiled_charsmap": ""}),
    "charsmap that points outside": _part(normalizer={"type": "Precompiled", "precompiled_charsmap": CHARSMAP}),
    "an unknown end": _part(post_processor={
        "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"SpecialToken": {"id": "q", "type_id": 0}}]}),
}  # fmt: skip
ADDED: dict[str, Change] = {
    "id of 2^32": _added(id=2**32),
    "negative id": _added(id=-1),
    "content is a number": _added(content=5),
    "half a character": _added(content="\ud800"),
    "without an id": tokenizer(lambda body: body["added_tokens"][0].pop("id")),
    "are text": _part(added_tokens="<x>"),
}
DECLARED: dict[str, Change] = {
    "half a character": _declared(**{"320": {"content": "\ud800"}}),
    "200,000 tokens": _declared(**{str(264 + i): {"content": f"<{i}>"} for i in range(200_000)}),
    "70,000 short ones": _declared(**{str(264 + i): 0 for i in range(70_000)}),
    "half a character to begin with": _said(bos_token="\ud800"),
}
HARMLESS: dict[str, Change] = {  # the library numbers tokens itself; what is declared otherwise is passed over
    "added, with an id far away": _added(id=2**31, content="hello", special=False),
    "declared, with an id of 5,000 digits": _declared(**{"9" * 5000: {"content": "<x>"}}),
    "added, with control characters": _added(content="\x1b]52;c;x\x07\u202e"),
}
FILES: dict[str, Change] = {
    "no file": lambda folder: (folder / "tokenizer.json").unlink(),
    "empty": _file("tokenizer.json", ""),
    "not UTF-8": _file("tokenizer.json", b"\xff{}"),
    "list": _file("tokenizer.json", "[]"),
    "not JSON": _file("tokenizer.json", "{"),
    "deep": _file("tokenizer.json", "[" * 10**6),
    "1 GB": _sparse(2**30),
    "64 MiB and one byte": _sparse(64 * 2**20 + 1),
    "60 MB of zeros": _sparse(60 * 10**6),
    "a pipe": piped("tokenizer.json"),
    "a folder": as_folder("tokenizer.json"),
    "a link out": linked("tokenizer.json", "outside"),
    "a device": linked("tokenizer.json", "/dev/zero"),
    "settings are a link out": linked("tokenizer_config.json", "outside"),
    "settings of 17 MB": _said(x=" " * 17 * 10**6),
    "map is a list": _file("special_tokens_map.json", "[1]"),
    "map is deep": _file("special_tokens_map.json", "[" * 100_000),
    "template is a number": _said(chat_template=5),
    "template of half a character": _said(chat_template="{{ '\ud800' }}"),
    "template of 2 MB": _file("chat_template.jinja", " " * 2 * 10**6),
    "template is a link out": lambda folder: (
        (folder.parent / "secret").write_text("{{ 1 }}"),
        (folder / "chat_template.jinja").symlink_to(folder.parent / "secret"),
    ),
    "template is not UTF-8": _file("chat_template.jinja", b"\xff"),
    "templates of a list for a name": _said(chat_template=[{"name": ["default"], "template": "x"}, {"name": "default",
                                                            "template": 7}]),
}  # fmt: skip
CASES = [
    *(Case(f"M5 only {name}", _poisoned(name)) for name in
      ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "model.pkl", "model.safetensors")),
    Case("M5 a pickle beside the weights", _poisoned("pytorch_model.bin", keep=True), 0),
    Case("M5 code beside the weights", _code, 0),
    Case("M5 an archive beside the weights", _archive, 0),
    Case("M5 code instead of an architecture", _only_code, 1),
    *(Case(f"M6 file: {name}", change) for name, change in FILES.items()),
    *(Case(f"M6 model: {name}", change) for name, change in MODELS.items()),
    *(Case(f"M6 step: {name}", change) for name, change in STEPS.items()),
    *(Case(f"M6 added token: {name}", change) for name, change in ADDED.items()),
    *(Case(f"M6 declared token: {name}", change) for name, change in DECLARED.items()),
    *(Case(f"M6 {name}", change, 0) for name, change in HARMLESS.items()),
]  # fmt: skip

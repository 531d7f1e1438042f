"""The folder that a conversion writes: whose it is, what may be in it, and the small files beside the weights."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from localq.disk import disk_errors
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files.json_files import inside
from localq.files.model_folder import ModelFiles
from localq.files.safetensors_headers import shard_paths
from localq.quantize.output.shards import STATE_NAME, load_state, write_file

LOCK_NAME = "conversion.lock"
# Everything that a tokenizer, a chat front end or the licence of the weights needs.
COPIED = re.compile(
    r"(tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|spiece\.model|chat_template\.(jinja|json)|generation_config\.json|(pre)?processor_config\.json"
    r"|preprocessor_config\.json|(LICENSE|NOTICE|USE_POLICY).*)"
)
OURS = re.compile(
    r"(model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|conversion\.(state|bits)\.json"
    r"|conversion\.(moments|measuring|training|(measured|layer)-\d{5})\.safetensors)"
)


def source_facts(source: ModelFiles) -> list[tuple[str, int, int]]:
    """Name, size and time of every file of weights: what tells one source from another."""
    paths = [source.path] if source.kind == "gguf" else list(shard_paths(source.path).values())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


@contextmanager
def claimed(source: ModelFiles, out: Path, task: dict[str, Any], force: bool) -> Iterator[None]:
    """Keep `out` for a conversion: new, empty, the same one interrupted, or with `force` cleared of an earlier model.

    Refuses before it writes anything, and once more behind the lock: another localq may have been at work until then.
    """
    _stale(source, out, task, force)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with _lock(out):
        try:
            stale = _stale(source, out, task, force)
        except LocalqError:
            (out / LOCK_NAME).unlink()
            raise
        with disk_errors(out):
            for path in stale:
                path.unlink(missing_ok=True)
        yield
        (out / LOCK_NAME).unlink(missing_ok=True)


def _stale(source: ModelFiles, out: Path, task: dict[str, Any], force: bool) -> list[Path]:
    """The files of an earlier model in `out` that are to go; raises a usage error unless it may be written."""
    if out.resolve() == (source.path if source.kind == "safetensors" else source.path.parent).resolve():
        raise usage_error(str(out), "this is the folder of the source", "Give another folder.")
    if out.exists() and not out.is_dir():
        raise usage_error(str(out), "this is a file", "Give a folder.")
    unstarted = {LOCK_NAME, f"{STATE_NAME}.part"}  # all that a kill before the first record leaves
    names = [path.name for path in out.iterdir() if path.name not in unstarted] if out.exists() else []
    if not names:
        return []
    state = load_state(out)
    if state is not None and state.get("job") == task:
        return []
    if not force:
        why = "it holds an unfinished conversion of something else" if state else "the folder is not empty"
        raise usage_error(str(out), why, "Give another folder, or --force to replace the model in it.")
    return [out / name for name in names if OURS.fullmatch(name)]


def _lock(out: Path) -> IO[str]:
    """The file that keeps a second localq from writing into the same folder, as long as it is open."""
    path = out / LOCK_NAME
    while True:
        with disk_errors(out):
            file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                return file
        except BlockingIOError as error:
            file.close()
            why = "another localq is quantizing into it"
            raise LocalqError(str(out), why, "Wait for it to end.", ExitCode.FAILURE) from error
        file.close()  # whoever held it has ended, and removed it


def _is_at(path: Path, file: IO[str]) -> bool:
    """`file` is still what lies at `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


# ---- configuration and tokenizer


def write_small_files(
    source: ModelFiles, quantization: dict[str, Any], out: Path, changes: dict[str, Any] | None = None
) -> None:
    if source.kind == "gguf":
        _write_gguf_text_files(source, out)
    else:
        for name in sorted(path.name for path in source.path.iterdir()):
            path = inside(source.path, name) if COPIED.fullmatch(name) and not (source.path / name).is_dir() else None
            if path is not None:
                write_file(out / name, path.read_bytes())
    config = {**source.config, "dtype": stated_dtype(source), **(changes or {}), "quantization_config": quantization}
    config.pop("torch_dtype", None)  # the older name of "dtype"
    write_file(out / "config.json", _json(config))


def stated_dtype(source: ModelFiles) -> str:
    """The dtype of the tensors that stay unquantized, and the one to compute in."""
    named = [part.get(key) for part in (source.config, source.text_config) for key in ("dtype", "torch_dtype")]
    known = [name for name in named if name in ("bfloat16", "float16", "float32")]
    return known[0] if known and source.kind != "gguf" else "bfloat16"


def _write_gguf_text_files(source: ModelFiles, out: Path) -> None:
    from localq.files.gguf import vocab  # tokenizers and the gguf package: only for a .gguf source

    tokens = vocab.special_tokens(source.path)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokens[key] for key in ("bos_token", "eos_token", "unk_token", "pad_token") if tokens.get(key)},
        "add_bos_token": bool(tokens.get("add_bos")),
        "add_eos_token": bool(tokens.get("add_eos")),
        "clean_up_tokenization_spaces": False,
    }
    if source.chat_template:
        config["chat_template"] = source.chat_template
    write_file(out / "tokenizer.json", vocab.build_tokenizer(source.path).to_str().encode())
    write_file(out / "tokenizer_config.json", _json(config))
    write_file(out / "generation_config.json", _json(source.generation_config))


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"

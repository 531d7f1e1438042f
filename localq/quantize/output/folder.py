"""The output folder of a conversion: its owner, its lock, and the small files beside the weights."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from localq import __version__, disk
from localq.disk import disk_errors
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import own_files
from localq.files.json_files import inside
from localq.files.model_folder import LOCK_NAME, STATE_NAME, ModelFiles
from localq.files.publish.record import RECORD_NAME, ConversionRecord
from localq.formats.checkpoint import TensorInfo
from localq.quantize.output.shards import load_state, write_file

# Everything that a tokenizer, a chat front end or the licence of the weights needs.
COPIED = re.compile(
    r"(tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|spiece\.model|chat_template\.(jinja|json)|generation_config\.json|(pre)?processor_config\.json"
    r"|preprocessor_config\.json|(LICENSE|NOTICE|USE_POLICY).*)"
)
OURS = re.compile(
    r"(model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|conversion\.(state|bits)\.json"
    r"|conversion\.(moments|measuring|training|(measured|layer)-\d{5})\.safetensors|localq\.(sha256|json))"
)


def source_facts(source: ModelFiles) -> list[tuple[str, int, int]]:
    """Return name, size and time of every file of weights."""
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.weight_paths]


def conversion_task(
    source: ModelFiles,
    format: str,
    layout: Iterable[Mapping[str, TensorInfo]],
    settings: Sequence[Any],
    facts: Any = None,
) -> dict[str, Any]:
    """Return what identifies a conversion: source files, output layout, settings, localq's version.

    Only the same conversion is resumed. facts: those of the source where its files are not on disk.
    """
    tensors = [[name, part.dtype, list(part.shape)] for group in layout for name, part in group.items()]
    described = [source_facts(source) if facts is None else facts, tensors, *settings]
    return {
        "source": source.name,
        "format": format,
        "localq": __version__,
        "fingerprint": hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest(),
    }


@contextmanager
def claim_folder(source: ModelFiles, out: Path, task: dict[str, Any], force: bool) -> Iterator[None]:
    """Hold `out` for a conversion: a new or empty folder, the same one interrupted, or with `force` an earlier model.

    Checks before it writes anything, and again under the lock: another localq may have been writing until then.
    Raises LocalqError: exit 2 for a folder that holds something else, or files of others, 9 for the disk.
    """
    _stale(source, out, task, force)
    is_new = not out.exists()
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
        try:
            yield
        except BaseException:
            _leave(out, is_new)
            raise
        (out / LOCK_NAME).unlink(missing_ok=True)


def _leave(out: Path, is_new: bool) -> None:
    """Remove the lock of a conversion that failed before it wrote anything, and the folder that was made for it."""
    with contextlib.suppress(OSError):
        if not any(OURS.fullmatch(path.name.removesuffix(".part")) for path in out.iterdir()):
            (out / LOCK_NAME).unlink()
            if is_new:
                out.rmdir()


def _check_own(out: Path) -> None:
    """Raise a usage error where a name that a conversion uses is a link, another user's file, or no file.

    Another user may have prepared the folder, so that what is written here would land elsewhere.
    """
    with disk_errors(out):
        owner = _owner_in(out)
        used = [path for path in out.iterdir() if _is_used(path.name)]
        foreign = sorted(path.name for path in used if not own_files.is_free(path, owner))
    if foreign:
        why = f"the folder contains {foreign[0]}, which is a link, a special file or a file owned by another user"
        raise usage_error(str(out), why, "Remove that file, or choose another folder.")


def _owner_in(out: Path) -> int:
    try:
        return own_files.owner_in(out)
    except own_files.ForeignError:  # shared with this user
        return os.geteuid()


def _is_used(name: str) -> bool:
    plain = name.removesuffix(".part")
    return plain in (LOCK_NAME, "config.json") or bool(OURS.fullmatch(plain) or COPIED.fullmatch(plain))


def _stale(source: ModelFiles, out: Path, task: dict[str, Any], force: bool) -> list[Path]:
    """Return the files of an earlier model in `out` to delete; raises a usage error unless `out` may be written."""
    with disk.disk_errors(out):
        is_source = disk.resolve(out) == disk.resolve(
            source.path if source.kind == "safetensors" else source.path.parent
        )
    if is_source:
        raise usage_error(str(out), "this is the SOURCE folder", "Choose another folder.")
    if out.exists() and not out.is_dir():
        raise usage_error(str(out), "this is a file, not a folder", "Choose a folder.")
    if out.exists():
        _check_own(out)
    unstarted = {LOCK_NAME, f"{STATE_NAME}.part"}  # left by a kill before the first record
    names = [path.name for path in out.iterdir() if path.name not in unstarted] if out.exists() else []
    if not names:
        return []
    state = load_state(out)
    if state is not None and state.get("job") == task:
        return []
    if not force:
        why = "the folder contains a different unfinished conversion" if state else "the folder is not empty"
        raise usage_error(str(out), why, "Choose another folder, or use --force to replace the model in this folder.")
    return [out / name for name in names if OURS.fullmatch(name.removesuffix(".part"))]


def _lock(out: Path) -> IO[bytes]:
    """Return the open lock file, which keeps a second localq from writing into the same folder."""
    path = out / LOCK_NAME
    while True:
        with disk_errors(out):
            file = os.fdopen(own_files.open_own(path, os.O_RDWR | os.O_CREAT, _owner_in(out)), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                return file
        except BlockingIOError as error:
            file.close()
            why = "another localq process is quantizing into this folder"
            raise LocalqError(str(out), why, "Wait until it has finished.", ExitCode.FAILURE) from error
        file.close()  # its owner has ended and deleted it


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """True while `path` still names the open `file`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


# ---- configuration and tokenizer


def write_small_files(
    source: ModelFiles, quantization: dict[str, Any], out: Path, changes: dict[str, Any] | None = None,
    record: ConversionRecord | None = None,
) -> None:  # fmt: skip
    """Write config.json, the tokenizer, `record` and the other small files.

    changes   of config.json, beside `quantization`
    """
    if record is not None:
        write_file(out / RECORD_NAME, record.to_bytes())
    if source.kind == "gguf":
        write_gguf_text_files(source, out)
    else:
        for name in sorted(path.name for path in source.path.iterdir()):
            path = inside(source.path, name) if COPIED.fullmatch(name) and not (source.path / name).is_dir() else None
            if path is not None:
                write_file(out / name, path.read_bytes())
    config = {**source.config, "dtype": output_dtype(source), **(changes or {}), "quantization_config": quantization}
    config.pop("torch_dtype", None)  # the older name of "dtype"
    write_file(out / "config.json", _json(config))


def output_dtype(source: ModelFiles) -> str:
    """Return the dtype of unquantized tensors, which is also the one to compute in."""
    named = [part.get(key) for part in (source.config, source.text_config) for key in ("dtype", "torch_dtype")]
    known = [name for name in named if name in ("bfloat16", "float16", "float32")]
    return known[0] if known and source.kind != "gguf" else "bfloat16"


def write_gguf_text_files(source: ModelFiles, out: Path) -> None:
    """Write tokenizer, chat template and defaults of sampling of a .gguf model, as a folder has them."""
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

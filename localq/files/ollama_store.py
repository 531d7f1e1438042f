"""The store of ollama: its GGUF models, by the names that `ollama list` shows.

    $OLLAMA_MODELS, else ~/.ollama/models, and /usr/share/ollama/.ollama/models (its service)
        manifests/HOST/NAMESPACE/NAME/TAG    JSON; a layer of the type `_MODEL` states the sha256 of the model
        manifests-v2/...                     the same as links to blobs (ollama 0.33); a list of manifests, too
        blobs/sha256-HASH                    the content; its first bytes say that it is GGUF

What ollama keeps besides the model (Go template, parameters) is not used: the GGUF file has its own template.
Torch-free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localq import disk
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.json_files import read_object
from localq.files.store_files import OnUnreadable, StoreModel, below, below_home, check_magic, children

STORE = "ollama"
MAX_MANIFEST_BYTES = 2**20
_SERVICE = Path("/usr/share/ollama/.ollama/models")
_MANIFESTS = ("manifests-v2", "manifests")
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"  # what ollama leaves out of a name
_MODEL, _ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
_RUNNERS = ("ollama", "llamacpp", "")  # of the manifests in a list: those whose model is GGUF
_DIGEST = re.compile(r"sha256[:-](?P<hex>[0-9a-f]{64})")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")  # of a name: a host may have a port


def digest_of(path: Path) -> str | None:
    """The sha256 that a blob of ollama must have: its name states it. None for any other file."""
    match = _DIGEST.fullmatch(path.name)
    return match["hex"] if match and path.parent.name == "blobs" else None


def folders() -> list[Path]:
    """The folders of ollama's models that may exist."""
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [Path(chosen)]
    return [*below_home(".ollama/models"), _SERVICE]


def scan(on_unreadable: OnUnreadable) -> Iterator[StoreModel]:
    """All models. Reads the manifests, and four bytes of each model."""
    seen = set[str]()
    for root in folders():
        for manifests in (root / each for each in _MANIFESTS):
            for path in below(manifests, 4, STORE, on_unreadable):
                parts = path.relative_to(manifests).parts
                name = _ollama_name(parts)
                if name in seen or not all(map(_PART.fullmatch, parts)):
                    continue
                seen.add(name)
                try:
                    found = _of_manifest(root, path, name)
                except LocalqError as error:
                    on_unreadable(name, error)
                else:
                    yield from () if found is None else (found,)


def find(rest: str) -> StoreModel | None:
    """The model that ollama calls `rest`; None for an unknown one. Raises LocalqError as `other_stores.find`."""
    *before, last = rest.split("/")
    name, _, tag = last.partition(":")
    if len(before) > 2:
        return None
    parts = (*(_HOST, _NAMESPACE)[: 2 - len(before)], *before, name, tag or _TAG)
    if not all(map(_PART.fullmatch, parts)):
        return None
    for root in folders():
        for manifests in _MANIFESTS:
            path = _in_any_case(root / manifests, parts)
            if path is not None:
                shown = _ollama_name(path.relative_to(root / manifests).parts)
                found = _of_manifest(root, path, shown)
                if found is None:
                    why, step = "ollama does not store this model as GGUF", "Use another model."
                    raise LocalqError(shown, why, step, ExitCode.FAILURE)
                return found
    return None


def _in_any_case(folder: Path, parts: tuple[str, ...]) -> Path | None:
    """The path of these names below `folder`, in any case: ollama treats names so. Raises LocalqError (exit 9)."""
    for part in parts:
        exact = folder / part
        if not os.path.lexists(exact):
            with disk.read_errors(folder, STORE):
                same = [each for each in children(folder) if each.name.casefold() == part.casefold()]
            if not same:
                return None
            exact = same[0]
        folder = exact
    return folder


def _ollama_name(parts: tuple[str, ...]) -> str:
    """The name of a manifest at HOST/NAMESPACE/NAME/TAG, without what ollama leaves out."""
    host, namespace, name, tag = parts
    shown = [host, namespace] if host != _HOST else [namespace] if namespace != _NAMESPACE else []
    return f"{STORE}/{'/'.join([*shown, name])}:{tag}"


def _of_manifest(root: Path, path: Path, name: str) -> StoreModel | None:
    """The model of a manifest; None if it is not one in GGUF. Raises LocalqError about `name`."""
    again = f"Run `ollama pull {name.partition('/')[2]}` to repair it."
    digest = _digest_in(root, _read_manifest(root, path, name, again), name, again)
    if digest is None:
        return None
    blob = root / "blobs" / f"sha256-{digest}"
    check_magic(blob, name, again)
    return StoreModel(name, STORE, (blob,))


def _read_manifest(root: Path, path: Path, name: str, again: str) -> dict[str, Any]:
    try:
        if not any(disk.resolve(path).is_relative_to(disk.resolve(each)) for each in (root, root / "blobs")):
            raise bad_file(name, f"{path} is a link that points outside ollama's folder", again)
        return read_object(path, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise disk.read_error(path, error, name) from error
    except LocalqError as error:
        step = again if error.exit_code == ExitCode.BAD_FILE else error.next_step
        why = error.why if error.what == name else f"{error.why} ({path})"
        raise LocalqError(name, why, step, error.exit_code) from error


def _digest_in(root: Path, manifest: dict[str, Any], name: str, again: str) -> str | None:
    """The sha256 of the model of a manifest, or of a manifest in its list; None without a GGUF model."""
    listed = manifest.get("manifests")
    if not isinstance(listed, list):
        return _digest_of_layers(manifest, name, again)
    for runner in _RUNNERS:
        for each in listed:
            if not isinstance(each, dict) or (each.get("runner") or "") != runner:
                continue
            if "layers" not in each and "digest" in each:  # it is a blob of its own
                blob = root / "blobs" / f"sha256-{_hex(each, name, again)}"
                each = _read_manifest(root, blob, name, again)
            if (digest := _digest_of_layers(each, name, again)) is not None:
                return digest
    return None


def _digest_of_layers(manifest: dict[str, Any], name: str, again: str) -> str | None:
    layers = manifest.get("layers")
    if layers is None:  # a model in the cloud
        return None
    if not isinstance(layers, list) or not all(isinstance(each, dict) for each in layers):
        raise bad_file(name, "the manifest is damaged: the layers are not a list of objects", again)
    if any(each.get("mediaType") == _ADAPTER for each in layers):
        raise LocalqError(name, "LoRA adapters are not supported", "Use the model without the adapter.")
    found = [_hex(each, name, again) for each in layers if each.get("mediaType") == _MODEL]
    if len(found) > 1:
        raise LocalqError(name, "ollama models split into several files are not supported", "Use another model.")
    return found[0] if found else None


def _hex(layer: dict[str, Any], name: str, again: str) -> str:
    digest = layer.get("digest")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise bad_file(name, f"the manifest is damaged: {str(digest)[:80]!r} is not a sha256 digest", again)
    return match["hex"]

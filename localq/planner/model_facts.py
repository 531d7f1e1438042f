"""Facts of one model: from the catalogue, its files on this machine, and its last load.

As data for `localq show --json`, and as lines for `localq show` and the model picker. Torch-free, without network.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from localq import kv_bits
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts, layer_caches, packaged_model, stored_format
from localq.files.architecture import Architecture
from localq.files.catalog import Source
from localq.files.catalog_file import ORDERS, ModelEntry
from localq.files.extra_tensors import extra_tensors, in_words, is_of_mtp_block
from localq.files.gguf import reader
from localq.files.hub import fetch as hub
from localq.files.model_folder import ModelFiles, open_model
from localq.files.model_types import MODEL_TYPES
from localq.files.safetensors_headers import read_header, shard_paths, unread_tensors
from localq.files.stored_format import format_of_config, scheme_of
from localq.planner import choose, room
from localq.planner import plan as memory_plan
from localq.planner.speed import local_measurements
from localq.sanitize import sanitize
from localq.settings import Settings
from localq.wording import human_bytes, memory_lines, table_lines

NAME_CELLS = 18  # width of the first column of `lines`


def of_name(name: str, settings: Settings) -> dict[str, Any]:
    """All facts of the model `name`, in the form of `--json`.

    Raises LocalqError: exit 4 for a model that is not found in the catalogue or on this machine, 8 for damaged files.
    """
    target = catalog.resolve(name)
    path = hub.local_path(target)
    if target.entry is None and path is None:
        step = f"`localq pull {target.name}` downloads it."
        raise LocalqError(target.name, "not found in the catalogue or on this machine", step, ExitCode.UNKNOWN_MODEL)
    return _facts(target, path, settings)


def _facts(target: catalog.Target, path: Path | None, settings: Settings) -> dict[str, Any]:
    entry = target.entry
    arch, reason, generation, scheme = entry.arch if entry else None, None, None, ""
    weights: int | None = None
    left_out = _beside_text(entry)
    if path is not None:
        files = open_model(path)
        generation, scheme, left_out = files.generation_config, scheme_of(files), _left_out(files)
        try:
            arch = arch or Architecture.from_config(files.config)
            arch = dataclasses.replace(arch, stored_head=stored_format.stored_head(files), mtp=_has_mtp(files, arch))
            weights = stored_format.block_bytes(files)
        except LocalqError as error:  # shown anyway, with the reason
            reason = error.why
    if entry is not None:
        reason = format_facts.why_unsupported(entry.arch, target.format or entry.default_format)
    elif arch is not None:
        reason = format_facts.why_unsupported(arch, "bf16")  # checks the architecture; loading checks the weights
    format = target.format or _stated_format(path)
    scheme = scheme or (target.source.scheme if target.source else "")
    return {
        "name": target.name,
        "title": entry.title if entry else None,
        "aliases": list(entry.aliases) if entry else [],
        "format": format,
        "scheme": scheme or None,
        "runs": reason is None,
        "reason": reason,
        "architecture": _architecture(arch),
        "left_out": left_out or None,
        "path": str(path) if path else None,
        "generation_defaults": generation,
        "settings": entry.settings if entry else {},
        "memory": _memory(target.name, arch, format, scheme, weights, settings)
        if arch and format and not reason
        else None,
        "sources": [_source(source) for source in entry.sources] if entry else [],
    }


def _beside_text(entry: ModelEntry | None) -> str:
    """The part of the files that is not loaded, as far as the catalogue knows it."""
    if entry is None or not entry.side_parameters:
        return ""
    return f"{_count(entry.side_parameters)} parameters outside the text model, such as a vision tower"


def _left_out(files: ModelFiles) -> str:
    """The tensors of the files that are not loaded."""
    if files.kind == "gguf":
        return ""
    layers = files.text_config.get("num_hidden_layers")
    found = extra_tensors([*_names(files), *unread_tensors(files.path)], layers)
    return in_words({kind: names for kind, names in found.items() if not all(map(is_of_mtp_block, names))})


def _names(files: ModelFiles) -> list[str]:
    return [name for path in shard_paths(files.path).values() for name in read_header(path).tensors]


def _has_mtp(files: ModelFiles, arch: Architecture) -> bool:
    """Return whether the files have an MTP block that can draft."""
    if files.kind == "gguf":
        return bool(reader.read_header(files.path).mtp)
    return arch.traits.hybrid and any(map(is_of_mtp_block, _names(files)))


def _memory(
    name: str, arch: Architecture, format: str, scheme: str, weights: int | None, settings: Settings
) -> dict[str, Any] | None:
    """Memory of the last load on a GPU, measured and predicted; without one, or with --vram, the plan.

    None without both, as on a machine without a GPU.
    """
    last = local_measurements.last_load(name) if settings.vram is None else None
    if last is not None:
        load = dataclasses.asdict(last)
        return {**load, "predicted_bytes": load.pop("predicted"), "measured_bytes": load.pop("measured")}
    budget = room.planned(settings).budget
    if not isinstance(budget, int):
        return None
    wishes = choose.wishes_of(settings)
    try:
        plan = memory_plan.assess(arch, format, budget, wishes=wishes, weights=weights, scheme=scheme, name=name)
    except LocalqError:  # settings that this shape does not support: loading reports them
        return None
    placed = {"kv_bits": plan.kv_bits, "embed": plan.embed, "head": plan.head}
    sizes = {"predicted_bytes": plan.ledger.components, "measured_bytes": None}
    return {"device": None, "format": plan.format, "ctx": plan.ctx, **placed, **sizes}


def _stated_format(path: Path | None) -> str | None:
    if path is None or path.is_file():
        return "gguf" if path else None
    return format_of_config(open_model(path).config)


def _architecture(arch: Architecture | None) -> dict[str, Any] | None:
    if arch is None:
        return None
    counts = {
        "parameters": arch.parameters,
        "active_linear_parameters": arch.active_linear_parameters,
        "kv_cache_bytes_per_token": arch.kv_bytes_per_token(16),
        "kv_cache_growing_bytes_per_token": layer_caches.growing_bytes(arch.layer_caches, 16),
        "state_bytes": layer_caches.state_bytes(arch.layer_caches, 2),
    }
    fields = {name: value for name, value in dataclasses.asdict(arch).items() if name not in ORDERS}
    return {**fields, **counts}


def _source(source: Source) -> dict[str, Any]:
    here = hub.local_source(source)
    return {
        "format": source.format,
        "scheme": source.scheme or None,
        "from": source.repo or f"{source.package} {source.version}",
        "kind": source.kind,
        "revision": source.revision if source.kind == "hub" else source.version,
        "bytes": source.bytes or None,
        "licence": source.licence or None,
        "gated": source.gated,
        "verified": source.verified,
        "path": str(here) if here else None,
    }


# ---- for people


def lines(facts: dict[str, Any], width: int | None = None) -> list[str]:
    """The facts of `of_name` as lines, sanitized; an empty line separates the parts.

    width: of the terminal, as in `wording.table_lines`
    """
    rows = [["name", facts["name"]]]
    if facts["title"]:
        rows.append(["title", facts["title"]])
    if facts["aliases"]:
        rows.append(["aliases", ", ".join(facts["aliases"])])
    form = " ".join(filter(None, (facts["format"], facts["scheme"]))) or "-"
    rows += [["format", form], ["runs here", "yes" if facts["runs"] else f"no: {facts['reason']}"]]
    if facts["architecture"]:
        rows += _architecture_rows(facts["architecture"])
    if facts["left_out"]:
        rows.append(["not loaded", facts["left_out"]])
    comes_along = any(each["kind"] == "pypi" and each["format"] == facts["format"] for each in facts["sources"])
    absent = f"no; it {packaged_model.BUILT_IN}" if comes_along else "no"
    rows.append(["on this machine", facts["path"] or absent])
    sampling = facts["generation_defaults"] or {}
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    if stated := [f"{key} {sampling[key]}" for key in known if sampling.get(key) is not None]:
        rows.append(["model defaults", ", ".join(stated)])
    if facts["settings"]:
        rows.append(["from models.toml", ", ".join(f"{name} {value}" for name, value in facts["settings"].items())])
    found = [f"{key:<{NAME_CELLS - 2}}  {sanitize(value)}" for key, value in rows]
    if facts["memory"]:
        found += ["", *_memory_lines(facts["memory"])]
    if facts["sources"]:
        found += ["", *_source_lines(facts["sources"], width)]
    return found


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    where = f"at the last load on {memory['device']}" if memory["device"] else "as planned (not yet loaded here)"
    cache, embed, head = kv_bits.text(memory["kv_bits"]), memory["embed"], memory["head"]
    form = f"{memory['format']}, {memory['ctx']:,} tokens, KV {cache}, embedding {embed}, head {head}"
    measured, predicted = memory["measured_bytes"], memory["predicted_bytes"]
    parts = memory_lines(measured, predicted) if measured else memory_lines(predicted, {})
    return [sanitize(f"memory {where}: {form}"), *parts]


def _architecture_rows(arch: dict[str, Any]) -> list[list[str]]:
    heads = f"{arch['heads']} heads of size {arch['head_dim']}, {arch['kv_heads']} KV heads"
    if arch["global_head_dim"] or arch["global_kv_heads"]:
        width, count = arch["global_head_dim"] or arch["head_dim"], arch["global_kv_heads"] or arch["kv_heads"]
        heads += f"; full-attention layers have a head size of {width} and {count} KV heads"
    if arch["shared_layers"]:
        heads += f"; the last {arch['shared_layers']} layers reuse the keys and values of earlier ones"
    window = f"; {arch['window_layers']} layers with a window of {arch['window']:,} tokens" if arch["window"] else ""
    if arch["kv_latent"]:
        heads = f"{arch['heads']} heads of size {arch['head_dim']}, which share a latent of size {arch['kv_latent']}"
    if arch["window_heads"]:
        heads += f"; {arch['window_heads']} heads in layers with a window"
    shared = " and a shared one" if arch["shared_intermediate"] else ""
    experts = f", {arch['experts_active']} of {arch['experts']} experts{shared} per token" if arch["experts"] else ""
    width = arch["intermediate"] or arch["expert_intermediate"]
    growing, states = arch["kv_cache_growing_bytes_per_token"], arch["state_bytes"]
    windowed = arch["kv_cache_bytes_per_token"] - growing
    kept = f"{growing:,} bytes per token at 16 bits"
    kept += f", {windowed:,} more inside the window" if windowed else ""
    kept += f", {human_bytes(states)} of recurrent state" if states else ""
    return [
        ["architecture", f"{arch['model_type']}, {arch['layers']} layers{experts}"],
        ["parameters", _count(arch["parameters"])],
        ["sizes", f"hidden {arch['hidden']:,}, MLP {width:,}, vocabulary {arch['vocab']:,}"],
        ["attention", heads + window + _recurrent(arch)],
        ["context", f"{arch['max_context']:,} tokens, {kept}"],
        *([["MTP block", "drafts tokens (--draft auto or mtp)"]] if arch["mtp"] else []),
    ]


def _recurrent(arch: dict[str, Any]) -> str:
    """The layers without attention."""
    count, layers = arch["recurrent_layers"], arch["layers"]
    if attention := arch["attention_layers"]:
        return f"; {attention} of {layers} layers use attention, {count} use Mamba-2"
    name = (
        "a short convolution"
        if arch["conv_kernel"]
        else "Mamba-2"
        if MODEL_TYPES[arch["model_type"]].mamba
        else "a gated delta net"
    )
    return f"; {count} of {layers} layers use {name} instead" if count else ""


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} million"


def _source_lines(sources: list[dict[str, Any]], width: int | None) -> list[str]:
    rows = []
    for each in sources:
        remarks = ["gated" if each["gated"] else "", "" if each["verified"] else "not verified"]
        size = human_bytes(each["bytes"]) if each["bytes"] else "-"
        marks = ", ".join(remark for remark in remarks if remark)
        here = "yes" if each["path"] else "no"
        form = f"{each['format']} {each['scheme']}" if each["scheme"] else each["format"]
        rows.append([form, each["from"], each["revision"][:12], size, each["licence"] or "-", here, marks])
    headers = ["FORMAT", "FROM", "REVISION", "SIZE", "LICENCE", "HERE", "REMARKS"]
    return table_lines(headers, rows, frozenset({3}), width)

"""A model folder or .gguf file: configuration, chat template, stop tokens.

Front end and engine both open models here. Reads and checks small files only: `formats.checkpoint` reads weights,
`text.tokenizer` the tokenizer. Nothing in a folder is executed: pickles and Python files are listed in `ignored`,
`auto_map` is dropped. Torch-free.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localq import disk
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files import quantization_files
from localq.files.gguf_choice import parts_of
from localq.files.json_files import DAMAGED, inside, read_object, read_text
from localq.files.safetensors_headers import INDEX_NAME, SINGLE_NAME, read_header, shard_paths
from localq.files.store_files import MAGIC

MAX_CONFIG_BYTES = 8 * 2**20  # a VPTQ config, with one block per Linear, has 300 kB
MAX_TOKENIZER_CONFIG_BYTES = 16 * 2**20
MAX_TEMPLATE_BYTES = 2**20  # `text.template` limits more tightly what it renders
OWN_HEAD = (
    "config.json ties the output head to the embedding, but the files contain a separate head; using the separate one"
)
STATE_NAME, LOCK_NAME = "conversion.state.json", "conversion.lock"
THOUGHT_MARKS = ("enable_thinking", "reasoning_effort", "<think>", "<seed:think>")
UNFINISHED = (STATE_NAME, LOCK_NAME)  # files that `localq quantize` deletes when it has finished
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
IGNORED = (*PICKLES, ".py", ".zip", ".tar", ".gz", ".7z", ".h5", ".msgpack", ".onnx")

# Limits of a configuration: field -> (least, greatest). Absent and null fields are not checked.
LIMITS = {
    "num_hidden_layers": (1, 256),
    "hidden_size": (1, 65_536),
    "intermediate_size": (1, 2**20),
    "moe_intermediate_size": (1, 2**20),
    "num_attention_heads": (1, 1024),
    "num_key_value_heads": (1, 1024),
    "head_dim": (1, 1024),
    "global_head_dim": (1, 1024),
    "num_global_key_value_heads": (1, 1024),
    "num_kv_shared_layers": (0, 256),
    "hidden_size_per_layer_input": (0, 4096),
    "vocab_size_per_layer_input": (1, 2**20),
    "top_k_experts": (0, 512),
    "vocab_size": (1, 2**20),
    "num_experts": (0, 512),
    "num_local_experts": (0, 512),
    "num_experts_per_tok": (0, 512),
    "experts_per_token": (0, 512),
    "max_position_embeddings": (1, 2**24),
    "original_max_position_embeddings": (1, 2**24),
    "sliding_window": (0, 2**24),
    "max_window_layers": (0, 256),
    "no_rope_layer_interval": (1, 256),
    "shared_expert_intermediate_size": (0, 2**20),
    "full_attention_interval": (1, 256),
    "linear_num_key_heads": (1, 1024),
    "linear_num_value_heads": (1, 1024),
    "linear_key_head_dim": (1, 1024),
    "linear_value_head_dim": (1, 1024),
    "linear_conv_kernel_dim": (1, 64),
    "conv_L_cache": (2, 64),
    "block_ff_dim": (1, 2**20),
    "block_multiple_of": (1, 2**20),
    "num_dense_layers": (0, 256),
    "n_routed_experts": (0, 512),
    "n_shared_experts": (0, 512),
    "kv_lora_rank": (1, 65_536),
    "q_lora_rank": (1, 65_536),
    "qk_nope_head_dim": (1, 1024),
    "qk_rope_head_dim": (1, 1024),
    "v_head_dim": (1, 1024),
    "n_group": (1, 512),
    "topk_group": (1, 512),
    "moe_shared_expert_intermediate_size": (0, 2**20),
    "mamba_num_heads": (1, 1024),
    "mamba_head_dim": (1, 1024),
    "n_groups": (1, 1024),
    "ssm_state_size": (1, 1024),
    "conv_kernel": (1, 64),
    "shared_intermediate_size": (1, 2**20),
    "mamba_n_heads": (1, 1024),
    "mamba_n_groups": (1, 1024),
    "mamba_d_state": (1, 1024),
    "mamba_d_conv": (1, 64),
    "mamba_expand": (1, 64),
    "first_k_dense_replace": (0, 256),
    "num_shared_experts": (0, 512),
    "prefix_dense_intermediate_size": (1, 2**20),
    "prefix_dense_sliding_window_pattern": (1, 256),
}
POSITIVE = (
    "rope_theta",
    "rms_norm_eps",
    "norm_eps",
    "layer_norm_eps",
    "logit_scale",
    "block_ffn_dim_multiplier",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "partial_rotary_factor",
)
LARGEST_FLOAT = 1e12


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk.

    path              the folder, or the .gguf file: of a split model the first one, whichever was opened
    kind              "safetensors" or "gguf"
    config            config.json as Hugging Face writes it (from the header, for GGUF), within `LIMITS`; with
                      `quantization_config` where a file beside it describes the quantization
    generation_config generation_config.json, {} without one
    tokenizer_config  tokenizer_config.json, {} without one
    chat_template     Jinja source, None without one
    name              display name: the folder's name, or org/repo within the Hugging Face cache
    ignored           files of the folder that localq never opens (pickles, code, archives)
    notes             for the user: what the files say otherwise than config.json
    """

    path: Path
    kind: str
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    name: str = ""
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of `config` for the language model: `text_config` of a multimodal model, else all of it."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def quantization(self) -> dict[str, Any]:
        """config.json's quantization_config, {} without one."""
        for config in (self.config, self.text_config):
            if isinstance(found := config.get("quantization_config"), dict):
                return found
        return {}

    @property
    def thinks(self) -> bool:
        """True if replies may begin with a thought: the chat template has a switch, a level or tags for it."""
        return any(mark in (self.chat_template or "") for mark in THOUGHT_MARKS)

    @property
    def weight_paths(self) -> tuple[Path, ...]:
        """The files of weights: shards, or the .gguf file, or all parts of a split one."""
        return tuple(parts_of(self.path) if self.kind == "gguf" else shard_paths(self.path).values())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a reply: `eos_token_id` of generation_config.json, else of config.json."""
        for source in (self.generation_config, self.config, self.text_config):
            value = source.get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            if found := tuple(item for item in ids if type(item) is int and 0 <= item < LIMITS["vocab_size"][1]):
                return found
        return ()


def open_model(path: Path, *, weights: bool = True, stubs: bool = False) -> ModelFiles:
    """Open the model in a folder or a .gguf file; another file is one if it begins so, as blobs of ollama do.

    Raises LocalqError: exit 4 for a path that does not exist, else 8.

    weights: whether weights are required; False for a folder whose weights are fetched later.
    stubs: the files of weights have headers, but no data (`hub.remote`).
    """
    if path.is_dir():
        return _open_folder(path, weights, stubs)
    if (path.is_file() and path.suffix.lower() == ".gguf") or is_gguf(path):
        return _open_gguf(path)
    raise no_model_error(path)


def no_model_error(path: Path) -> LocalqError:
    """The error for a path that is neither a folder nor a .gguf file: exit 8 for something else, 4 for nothing."""
    code = ExitCode.BAD_FILE if path.exists() else ExitCode.UNKNOWN_MODEL
    is_file = path.suffix.casefold() in (".gguf", ".safetensors")
    why, step = f"no such {'file' if is_file else 'folder'}", "Check the path."
    if path.is_symlink() and not path.exists():
        why = f"broken link to {os.readlink(path)}"
        step = "Restore the target of the link, or use another path."
    elif path.is_file():
        why, step = "this is a file, not a model folder", "Use a model folder or a .gguf file."
        if (path.parent / "config.json").exists():
            step = f"Use the folder that contains it: {path.parent}"
    elif path.exists():
        why = "not a regular file or folder"
    return LocalqError(str(path), why, step, code)


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a file that begins like a GGUF file."""
    try:
        return disk.read_regular(path, len(MAGIC)) == MAGIC
    except (OSError, disk.NotRegularError):
        return False


def _open_gguf(path: Path) -> ModelFiles:
    from localq.files.gguf import reader, splits  # start-up cost: only .gguf files need it

    header = reader.read_header(path)
    check_config(header.config, str(path))
    return ModelFiles(
        path=header.path,
        kind="gguf",
        config=header.config,
        generation_config=header.generation_config,
        chat_template=header.chat_template,
        name=splits.model_name(header.path),
    )


def _open_folder(folder: Path, weights: bool, stubs: bool) -> ModelFiles:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise disk.read_error(folder, error) from error
    config_path = inside(folder, "config.json")
    if config_path is None and any(name.startswith(UNFINISHED) for name in names):
        step = "Run the same `localq quantize` command again to resume."
        raise bad_file(str(folder), "the conversion is unfinished", step)
    if config_path is None:
        raise bad_file(
            str(folder), "config.json not found", "Use the folder that contains config.json and the weights."
        )
    config = read_object(config_path, MAX_CONFIG_BYTES)
    config.pop("auto_map", None)  # names code to import, which localq never does
    check_config(config, str(config_path))
    if weights and not shard_paths(folder):
        raise _no_weights(folder, names)
    if _applies(folder, weights) and (described := quantization_files.describe(folder, config)) is not None:
        config["quantization_config"] = described
    stated, config = config, _with_own_head(folder, config) if weights and not stubs else config
    tokenizer_config = _optional(folder, "tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES)
    tokenizer_config.pop("auto_map", None)
    return ModelFiles(
        path=folder,
        kind="safetensors",
        config=config,
        generation_config=_optional(folder, "generation_config.json", MAX_CONFIG_BYTES),
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(folder, tokenizer_config),
        name=_display_name(folder),
        ignored=tuple(name for name in names if name.lower().endswith(IGNORED)),
        notes=(OWN_HEAD,) if config != stated else (),
    )


def _applies(folder: Path, weights: bool) -> bool:
    """Return whether a quantization described beside config.json applies: not with full-precision weights."""
    headers = (read_header(path).tensors for path in shard_paths(folder).values()) if weights else ()
    return not weights or any(quantization_files.are_quantized(tensors) for tensors in headers)


def _with_own_head(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    from localq.files import own_head  # start-up cost: listings need no weights

    return own_head.untied(config, (read_header(path) for path in shard_paths(folder).values()))


def _optional(folder: Path, name: str, max_bytes: int) -> dict[str, Any]:
    path = inside(folder, name)
    return read_object(path, max_bytes) if path else {}


def _no_weights(folder: Path, names: list[str]) -> LocalqError:
    if pickles := [name for name in names if name.lower().endswith(PICKLES)]:
        why = f"the weights are pickle files ({pickles[0]}), which can run arbitrary code when loaded"
        return bad_file(str(folder), why, "Use a repository with .safetensors files, or convert the weights.")
    if others := [name for name in names if name.endswith(".safetensors")]:
        why = f"{others[0]} is neither {SINGLE_NAME} nor listed in {INDEX_NAME}"
        return bad_file(str(folder), why, "Download the model again, including its index file.")
    return bad_file(str(folder), "no .safetensors weights found", "Download the model again, or use its .gguf file.")


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """`chat_template.jinja`, else "chat_template" of tokenizer_config: a text, or "default" of a list."""
    path = inside(folder, "chat_template.jinja")
    if path is not None:
        return read_text(path, MAX_TEMPLATE_BYTES)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [item.get("template") for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[-1] if named else None
    if template is not None and not isinstance(template, str):
        raise bad_file(str(folder / "tokenizer_config.json"), "chat_template is not a string", DAMAGED)
    return template


def _display_name(folder: Path) -> str:
    absolute = folder.absolute()
    repo = absolute.parent.parent.name
    if absolute.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.removeprefix("models--").replace("--", "/")
    return absolute.name


def check_config(config: dict[str, Any], what: str) -> None:
    """Raises LocalqError (exit 8) for a size in `config` outside `LIMITS`; `what` names the file."""
    if not isinstance(config.get("model_type"), str):
        raise bad_file(what, "model_type is missing", DAMAGED)
    _check_sizes(config, what)
    _check_lists(config, what)
    inner = config.get("text_config")
    if inner is not None:
        if not isinstance(inner, dict):
            raise bad_file(what, "text_config is not an object", DAMAGED)
        _check_sizes(inner, what)
        _check_lists(inner, what)


def _check_sizes(config: dict[str, Any], what: str) -> None:
    for name, (least, greatest) in LIMITS.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or not least <= value <= greatest):
            why = f"{name} is {str(value)[:40]}, but must be an integer from {least:,} to {greatest:,}"
            raise bad_file(what, why, DAMAGED)
    for name in POSITIVE:
        value = config.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 < value <= LARGEST_FLOAT):
            raise bad_file(what, f"{name} is {str(value)[:40]}, but must be a positive number", DAMAGED)
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        why = f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        raise bad_file(what, why, DAMAGED)


def _check_lists(config: dict[str, Any], what: str) -> None:
    """Check `layer_types` and `quantization_config`, which are not numbers."""
    types, most = config.get("layer_types"), LIMITS["num_hidden_layers"][1]
    named = isinstance(types, list) and len(types) <= most and all(isinstance(each, str) for each in types)
    if types is not None and not named:
        raise bad_file(what, f"layer_types is {str(types)[:40]}, but must be a list of up to {most} names", DAMAGED)
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise bad_file(what, f"quantization_config is {str(quantization)[:40]}, but must be an object", DAMAGED)

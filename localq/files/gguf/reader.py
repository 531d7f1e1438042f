"""A .gguf file as a Hugging Face folder: configuration, stop tokens, chat template, tensors by name.

Torch-free and numpy-free. `tensors.py` reads the data, `vocab.py` the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localq.errors import LocalqError
from localq.files.gguf import splits
from localq.files.gguf.binary import GgufFile
from localq.files.gguf.config import family_of, predicting_blocks, read_config
from localq.files.gguf.directory import GgufTensor, read_directory
from localq.files.gguf.facts import Facts, shortest_f32
from localq.files.gguf.names import ARCHITECTURES

# Name in generation_config.json -> key after `general.sampling.`
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# Of several templates the default one: others are named after what they are for, such as "tool_use" or "rag".
_TEMPLATES = ("tokenizer.chat_template", "tokenizer.chat_template.default")


@dataclass(frozen=True)
class GgufModel:
    """The header of a .gguf model.

    files         of the model, in order: one, or all parts of a split one, as they were when the header was read
    architecture  GGUF's name
    tensors       Hugging Face name -> tensor
    extra         kind -> GGUF names of tensors that generating text does not need (`files.extra_tensors`)
    mtp           those of them that are of an MTP block, by Hugging Face name
    """

    files: tuple[GgufFile, ...]
    architecture: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    chat_template: str | None
    tensors: dict[str, GgufTensor]
    extra: dict[str, list[str]] = field(default_factory=dict)
    mtp: dict[str, GgufTensor] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file that names the model: the only one, or the first."""
        return self.files[0].path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def read_header(path: Path) -> GgufModel:
    """Read and check the header of the model of which `path` is the file, or any part of a split one.

    Raises LocalqError: exit 8 for a damaged file or a missing part, 1 for an unsupported one.
    """
    container = splits.read_model(path)
    facts = Facts(container)
    if facts.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise LocalqError(
            str(path), f"the architecture '{facts.architecture}' is not supported", f"Supported: {known}."
        )
    family = family_of(facts)
    config = read_config(facts, family)
    tensors, extra, mtp = read_directory(container, family, config, predicting_blocks(facts))
    templates = (facts.values.get(key) for key in _TEMPLATES)
    return GgufModel(
        container.files,
        facts.architecture,
        config,
        _generation_config(facts),
        next((template for template in templates if isinstance(template, str)), None),
        tensors,
        extra,
        mtp,
    )


def _generation_config(facts: Facts) -> dict[str, Any]:
    """Stop tokens (end of sequence, turn and message, as far as stated) and sampling."""
    names = ("eos", "eot", "eom")
    ids = [facts.get(f"tokenizer.ggml.{name}_token_id", int) for name in names]
    stops = list(dict.fromkeys(each for each in ids if each is not None))
    bos = facts.get("tokenizer.ggml.bos_token_id", int)
    config: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": stops} if stops else {"bos_token_id": bos}
    sampling = _sampling(facts)
    return {**config, **sampling, "do_sample": True} if sampling else config


def _sampling(facts: Facts) -> dict[str, Any]:
    """The stored defaults of sampling, unchecked: `sampling.read_generation_config` ignores what means nothing."""
    stated = {name: facts.values.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return {
        name: shortest_f32(value) if isinstance(value, float) else value
        for name, value in stated.items()
        if value is not None
    }

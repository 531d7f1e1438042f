"""GGUF models of other programs on this machine, used where they are: of ollama and of LM Studio.

Names are `ollama/NAME:TAG`, as `ollama list` shows them, and `lm-studio/PUBLISHER/REPO/FILE`. Nothing in these stores
is ever written, renamed or removed. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from localq.errors import ExitCode, LocalqError, bad_file, usage_error
from localq.files import lm_studio_store, ollama_store
from localq.files.store_files import OnUnreadable, StoreModel

TITLES = {ollama_store.STORE: "ollama", lm_studio_store.STORE: "LM Studio"}  # by the first word of their names


def store_of(name: str) -> str:
    """The store that a name belongs to by its form; empty for other names."""
    first, slash, rest = name.partition("/")
    return first.casefold() if slash and rest and first.casefold() in TITLES else ""


def find(name: str) -> StoreModel:
    """The model of a name. Raises LocalqError: exit 4 for an unknown one, 8 for damaged files, 9 for closed ones."""
    store, rest = store_of(name), name.partition("/")[2]
    is_ollama = store == ollama_store.STORE
    found = ollama_store.find(rest) if is_ollama else lm_studio_store.find(rest)
    if found is not None:
        return found
    store = TITLES[store]
    more = f", or `ollama pull {rest}` to download this one" if is_ollama else ""
    step = f"Run `localq ls` to list the models in {store}{more}. For a Hugging Face repository, write hf.co/{name}."
    raise LocalqError(name, f"{store} has no such model on this machine", step, ExitCode.UNKNOWN_MODEL)


def scan(on_unreadable: OnUnreadable) -> Iterator[StoreModel]:
    """All models of both stores. Reads the manifests, and four bytes of each model."""
    yield from ollama_store.scan(on_unreadable)
    yield from lm_studio_store.scan(on_unreadable)


def remove_step(store: str, name: str) -> str:
    """Return the instruction that removes a model with the program that owns it."""
    if store == ollama_store.STORE:
        return f"Run `ollama rm {name.partition('/')[2]}` to remove it."
    return "Delete it in LM Studio, under My Models."


def repair_command(name: str) -> str | None:
    """The command that downloads a damaged model again; None for LM Studio, which has none."""
    rest = name.partition("/")[2]
    return f"ollama rm {rest} && ollama pull {rest}" if store_of(name) == ollama_store.STORE else None


def damaged(name: str, path: Path) -> LocalqError:
    """The error (exit 8) for a file of ollama with a wrong hash."""
    command = repair_command(name)
    step = (
        f"Run `{command}` to download it again." if command else "Remove the model from ollama and download it again."
    )
    return bad_file(name, f"{path} is damaged: its hash does not match its name", step)


def refusal(store: str, name: str) -> LocalqError:
    """The error (exit 2) for removing a model of another program."""
    why = f"this file belongs to {TITLES[store]}, and localq does not delete files that belong to other programs"
    return usage_error(name, why, remove_step(store, name))

"""The text that a model is quantized on, as windows of token ids. Torch-free.

Without a file of the user's it is a slice of the training split of WikiText-2, which comes with localq.
"""

from __future__ import annotations

from pathlib import Path

from localq import windows
from localq.errors import LocalqError, usage_error
from localq.modelfiles import ModelFiles
from localq.tokenizer import MAX_TEXT_BYTES, Tokenizer

DEFAULT_TEXT = Path(__file__).parent / "data" / "wikitext-2-train-slice.txt"
WINDOW = 2048  # tokens of a window, less where the model has a shorter context
OPTION = "--calibration"


def token_windows(files: ModelFiles, text: str, count: int | None) -> list[list[int]]:
    """`count` windows (None: all) from all over `text`, each as long as the others.

    Raises LocalqError: exit 2 for a text of less than one window, or of fewer than `count`.
    """
    context = files.text_config.get("max_position_embeddings")
    size = min(WINDOW, context) if isinstance(context, int) else WINDOW
    try:
        found = windows.gptq(Tokenizer.load(files), text, size, None, OPTION).ids
    except LocalqError as error:
        if error.what != OPTION:
            raise
        raise usage_error(OPTION, error.why, "Give a longer text.") from None
    if count is not None and count > len(found):
        why = f"the text has {len(found)} windows of {size} tokens"
        raise usage_error("--windows", why, f"Ask for {len(found)} at most, or give a longer text.")
    wanted = len(found) if count is None else count
    return [found[index * len(found) // wanted] for index in range(wanted)]


def read_text(path: Path) -> str:
    """The UTF-8 text of `path`. Raises LocalqError (exit 2) for a file that cannot be read or is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise usage_error(OPTION, f"{path} cannot be read ({error.strerror})", "Check the path.") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise usage_error(OPTION, f"{path} has more than {MAX_TEXT_BYTES:,} bytes", "Give a part of it.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"{path} is not UTF-8 text ({error.reason} at byte {error.start})"
        raise usage_error(OPTION, why, "Give a plain text.") from None

"""Settings of drafts: tokens that are likely to come next, which one pass of the model verifies together.

A draft does not change a reply. Drafts come from what a grammar forces and from the conversation and its attached files
(prompt look-up); besides, from the model's block for multi-token prediction (MTP), if it has one, or from a draft
model, if one is named; always where that is expected to be faster. "lookup" is the first two alone, "auto" takes the
block where there is one, and "mtp" needs it.
"""

from __future__ import annotations

from localq.errors import LocalqError, usage_error

AUTO, OFF, LOOKUP, MTP = "auto", "off", "lookup", "mtp"
CHOICES = (AUTO, OFF, LOOKUP, MTP)  # any other value is the name of a draft model
OF_MTP = (AUTO, MTP)  # those that take an MTP block
HEADS = ("eagle", "eagle3", "medusa", "dflash")  # names of draft heads elsewhere
ROWS = (1, 2, 4, 8)  # tokens of a pass of the decode step
MOST = ROWS[-1] - 1  # tokens of a draft


def check(value: str, most: int) -> None:
    """Raise LocalqError (exit 2) for a value that is neither a source of drafts nor the name of a model.

    most: tokens of a draft at most, which must be 1 to MOST
    """
    if not 1 <= most <= MOST:
        raise usage_error("draft_max", f"{most} is out of range", f"Use 1 to {MOST} tokens.")
    if value.casefold() in HEADS:
        raise unsupported(value, f"draft heads ({value:.20}) are not supported")
    if not value.strip():
        raise unsupported(value, "the value is empty")


def model_name(value: str) -> str | None:
    """The name of the draft model; None for another source."""
    return None if value in CHOICES else value


def asks_model(value: str, *, is_named: bool) -> bool:
    """Return whether replies use the loaded drafter: a draft model if `is_named`, else an MTP block."""
    return model_name(value) is not None or (value in OF_MTP and not is_named)


def no_mtp(name: str, why: str) -> LocalqError:
    """The error (exit 2) for a model without an MTP block that can be used."""
    step = "Use --draft auto, or --draft NAME with a small model that has the same tokenizer."
    return usage_error(f"{name} --draft mtp", why, step)


def unsupported(value: str, why: str) -> LocalqError:
    """The error (exit 2) for a source of drafts that cannot be used."""
    return usage_error("draft", why, f"Use {', '.join(CHOICES)} or the name of a small model with the same tokenizer.")


def rows_for(rows: int) -> int:
    """Return the rows of the smallest pass that holds `rows` rows."""
    return next(each for each in ROWS if each >= rows)

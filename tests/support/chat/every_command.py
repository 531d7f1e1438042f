"""One conversation in which every slash command is typed once by each of its names, and what each must do."""

from __future__ import annotations

from pathlib import Path

LONG = "word " * 60  # of a message, so that there is something to sum up

# Line -> a part of what is told; "=" before it: the last reply is just that.
STEPS: tuple[tuple[str, str], ...] = (
    ("/help", "/export md|json [FILE]"),
    ("/?", "/export md|json [FILE]"),
    ("hi", "=one"),
    ("/regen", "=two"),
    ("/r", "=three"),
    ("/retry", "=four"),
    ("/regenerate", "=five"),
    ("/edit ho", "=six"),
    ("/e hey", "=seven"),
    ("/continue", "=seven and eight"),
    ("/n", "seven and eight"),
    ("/n 1", "=seven"),
    ("/copy", "code: seven"),
    ("/cc", "code: seven"),
    ("/markdown", "replies are rendered as Markdown"),
    ("/read a.txt", "attached to your next message: a.txt · 5 B · 13 tokens"),
    ("/glob *.md", "2 files attached to your next message"),
    ("/system Be brief", "system prompt: Be brief"),
    ("/set top_k 3", "top_k = 3"),
    ("/set", "top_k = 3"),
    ("/think", "think = auto"),
    ("/grammar regex a+", "answers are now constrained by regex a+"),
    ("/grammar off", "no grammar"),
    ("/tokens", "prompt: "),
    ("/show prompt", "<system>Be brief<user>hey<assistant>seven"),
    ("/show template", "scripted"),
    ("/show params", "top_k = 3"),
    ("/show info", "loaded: bf16, float32, on test CPU"),
    ("/stats", "bf16, float32, on test CPU"),
    ("/tps", "bf16, float32, on test CPU"),
    ("/bench", "the engine reported no timings"),
    ("/save Ships", ": Ships"),
    ("/export md", "hey"),
    ("/export json out.json", "out.json: "),
    ("/sessions", "Ships"),
    ("/new", "new conversation"),
    ("/resume Ships", "Ships ("),
    ("/undo", "removed: hey"),
    (LONG, "=nine"),
    (LONG + "again", "=ten"),
    ("/compact", "now replaces the oldest"),
    ("/compact off", "the prompt contains the original turns again"),
    ("/clear", "cleared"),
    ("/model", "current model: "),
    ("/load", "current model: "),
    ("/tools", "no MCP servers"),
    ("/fit phi-4", "GPU memory 24,564 MiB"),
)
LEAVING = ("/exit", "/bye", "/quit", "/x")
# Of the scripted engine, in this order; behind eight comes what /bench asks for, behind ten the summary.
REPLIES = (
    ["one"], ["two"], ["three"], ["four"], ["five"], ["six"], ["seven"], [" and eight"], ["b"], ["nine"], ["ten"],
    ["words were said"],
)  # fmt: skip


def put_files(folder: Path) -> None:
    """What /read and /glob name."""
    for name in ("a.txt", "b.md", "c.md"):
        (folder / name).write_text("text\n")

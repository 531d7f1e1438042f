"""A model folder whose chat template takes tools: that of Qwen 2.5, over tokens that are bytes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cli.terminal_localq import ROOT, write_model

TEMPLATE = ROOT / "tests" / "data" / "templates" / "qwen2.5.jinja"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def write_tool_model(folder: Path) -> Path:
    """As `write_model`."""
    write_model(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE.read_text("utf-8")}))
    return folder


def call(name: str, **arguments: object) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"

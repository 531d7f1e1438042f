"""The formats of all families, and the one that a chat template has: `tool_format`.

Open `stream` for how a reply is read, `rules` for how a grammar is made, `conversation` for how results go back.
"""

from __future__ import annotations

import re

from localq.text import harmony
from localq.text.tools.channel_formats import AtemFormat, HarmonyFormat
from localq.text.tools.format import ToolFormat
from localq.text.tools.gemma_format import GemmaFormat
from localq.text.tools.json_formats import (
    ActionFormat,
    GraniteFormat,
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    PhiFormat,
)
from localq.text.tools.python_format import PythonFormat
from localq.text.tools.tag_formats import ATEM, PairFormat, SeedFormat, TagFormat

_VARIABLE = re.compile(r"\btools\b")
_CALLS = "tool_calls"  # of a message; a template that reads none wants calls in the content
_LINE = re.compile(r"</arg_key>(?:\n|\\n)")
_THINKING = re.compile(r"[.'\"]thinking\b")  # the field of a message that has its thought, in gpt-oss and LFM2.5
_XML_TOOLS = "xml_tools"  # SmolLM3's name of the variable


def tool_format(chat_template: str | None) -> ToolFormat | None:
    """The format of a chat template; None where the template takes no tools, or has a form that is not known."""
    text = chat_template or ""
    if _VARIABLE.search(text) is None and _XML_TOOLS not in text:
        return None
    found = _by_marks(text)
    if found is not None and _CALLS not in text:
        found = found.in_content()
    if found is not None and _THINKING.search(text) and "reasoning_content" not in text:
        found.thoughts = "thinking"
    return found


def _by_marks(text: str) -> ToolFormat | None:
    if ATEM.opening in text:
        return AtemFormat()
    if harmony.is_template(text):
        return HarmonyFormat(is_single=True) if "functions." in text else None
    if "<|START_ACTION|>" in text:
        return ActionFormat()
    if "<arg_key>" in text:
        return PairFormat("\n" if _LINE.search(text) else "")
    if "<|tool_call>" in text:
        return GemmaFormat()
    if "<|tool_call_start|>" in text or "List of tools: " in text:
        return PythonFormat()
    if "<seed:tool_call>" in text:
        return SeedFormat()
    if "<function=" in text and "<parameter=" in text:
        return TagFormat()
    if "[TOOL_CALLS]" in text:
        return MistralFormat("[ARGS]" in text, ids="nine")
    if "<|tool_call|>" in text:
        return PhiFormat() if "<|/tool_call|>" in text else GraniteFormat()
    if "<tool_call>" in text and "<invoke" not in text:
        return HermesFormat(_XML_TOOLS if _XML_TOOLS in text else "tools")
    is_llama = "<|start_header_id|>" in text and ("<|python_tag|>" in text or '"parameters"' in text)
    return LlamaFormat(is_single=True) if is_llama and "<function=" not in text else None

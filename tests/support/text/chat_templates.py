"""Chat templates of every family with their special tokens, and conversations to render."""

from __future__ import annotations

from pathlib import Path

from localq.files.model_folder import open_model
from tests.support.files.real_model import smollm2

FOLDER = Path(__file__).parents[2] / "data" / "templates"
ENDS = {  # bos and eos of the family, as its tokenizer_config.json has them
    "llama-2": ("<s>", "</s>"),
    "llama": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "ministral": ("<s>", "</s>"),
    "muse": ("<|begin_of_text|>", "<|eot|>"),
    "nemotron": ("<s>", "<|im_end|>"),
    "granite": ("<|end_of_text|>", "<|end_of_text|>"),
    "laguna": ("〈|EOS|〉", "</assistant>"),
    "qwen": (None, "<|im_end|>"),
    "gemma-4": ("<bos>", "<eos>"),
    "gemma": ("<bos>", "<eos>"),
    "phi-3": ("<s>", "<|endoftext|>"),
    "phi-4": ("<|endoftext|>", "<|endoftext|>"),
    "exaone": (None, "[|endofturn|]"),
    "lfm": ("<|startoftext|>", "<|im_end|>"),
    "olmo": (None, "<|endoftext|>"),
    "seed": ("<seed:bos>", "<seed:eos>"),
    "smollm": ("<|im_start|>", "<|im_end|>"),
    "gpt": ("<|startoftext|>", "<|return|>"),
    "glm": (None, "<|endoftext|>"),
    "north": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}
MARKS = {  # what else of a family's templates is one token
    "llama-2": (),
    "llama": ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    "mistral": ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]",
                "[/SYSTEM_PROMPT]"),
    "ministral": ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]",
                  "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "muse": ("<|start|>", "<|message|>", "<|eom|>"),
    "nemotron": ("<|im_start|>",),
    "granite": ("<|start_of_role|>", "<|end_of_role|>"),
    "laguna": ("<system>", "</system>", "<user>", "</user>", "<assistant>", "<tool_response>", "</tool_response>"),
    "qwen": ("<|im_start|>", "<|endoftext|>"),
    "gemma-4": ("<|turn>", "<turn|>", "<|think|>", "<|tool_response>", "<tool_response|>", "<|tool_call>",
                "<tool_call|>", "<|tool>", "<tool|>", '<|"|>'),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi-3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "phi-4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "exaone": ("[|system|]", "[|user|]", "[|assistant|]"),
    "lfm": ("<|im_start|>", "<|endoftext|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>",
            "<|tool_list_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
    "olmo": ("<|im_start|>", "<|im_end|>"),
    "seed": ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"),
    "smollm": ("<|endoftext|>",),
    "gpt": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"),
    "glm": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "north": ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_TEXT|>",
              "<|END_TEXT|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
                 "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
}  # fmt: skip
OF_MODELS = {  # the template of a model of the catalogue, by the beginning of its name; the longest counts
    "smollm2": "smollm2", "smollm3": "smollm3", "llama-3.3": "llama-3.3", "llama-3.1": "llama-3.1",
    "llama-3.2": "llama-3.2", "llama-3-": "llama-3", "llama-2": "llama-2", "qwen3": "qwen3", "qwen3.5": "qwen3.5",
    "qwen3.6": "qwen3.6", "qwen3.8": "qwen3.8", "ornith": "qwen3.5", "ministral-3": "ministral-3",
    "ministral-3-3b-reasoning": "ministral-3-reasoning", "ministral-3-8b-reasoning": "ministral-3-reasoning",
    "ministral-3-14b-reasoning": "ministral-3-reasoning", "devstral": "ministral-3", "muse-glimmer": "muse-glimmer",
    "qwen2.5": "qwen2.5",
    "gemma-4": "gemma-4", "nemotron-3": "nemotron-3",
    "granite-4": "granite-4", "laguna": "laguna", "glm-4.7": "glm-4.7",
    "qwen2-": "qwen2.5", "qwq": "qwen2.5", "gemma-3": "gemma-3", "gemma-2": "gemma-2", "mistral-small": "mistral-small",
    "mistral-nemo": "mistral-nemo", "mistral-7b": "mistral-v0.3", "mistral-7b-v0.2": "mistral-v0.2",
    "mixtral": "mistral-v0.2", "phi-4": "phi-4", "phi-4-mini": "phi-4-mini", "phi-3.5": "phi-3.5", "phi-3-": "phi-3",
    "gpt-oss": "gpt-oss", "olmo-3": "olmo-3", "olmo-3-7b-think": "olmo-3-think",
    "olmo-3.1-32b-think": "olmo-3-think", "seed-oss": "seed-oss", "exaone-4": "exaone-4",
    "granite-3.3": "granite-3.3", "lfm2": "lfm2", "qwen3-vl": "qwen3-vl",
}  # fmt: skip
PUBLISHED = [f"published/{path.stem}" for path in sorted((FOLDER / "published").glob("*.jinja"))]
NAMES = [path.stem for path in sorted(FOLDER.glob("*.jinja"))] + PUBLISHED
EVERY = [*NAMES, "smollm2"]


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn, after an optional system prompt."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [
        {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)
    ]


CONVERSATIONS = {
    "single": turns("What is the capital of France?"),
    "system": turns("Hi", system="Be kind. /no_think"),
    "multi": turns("a", "b", "c", "d", "e"),
    "answered": turns("a", "<think>\nhm\n</think>\n\nb", "c", "<think>\nhm</think>d"),
    "unicode": turns("Où 👩‍👩‍👧‍👦?", "שלום <b>&amp;</b>", "<|im_end|>{{ bos_token }}{% raw %}", system="日本\x00\x1b"),
    "whitespace": turns("  \n a \n", "\n\n b  ", "\t", system=" \n "),
    "empty": turns("", "", "", system=""),
    "thoughts": [*turns("a"), {"role": "assistant", "content": "b", "reasoning_content": " hm\n"}, *turns("c")],
    "twice": turns("a") + turns("b"),
    "system-only": turns(system="x"),
    "system-late": turns("a", "b") + turns("c", system="x"),
    "calls": [*turns("a", "<|channel|>final<|message|>b"), {"role": "tool", "content": "c"}],
}


def family(name: str) -> str:
    """The key of `ENDS` and `MARKS` for a template's name."""
    return next(known for known in ENDS if name.removeprefix("published/").startswith(known))


def source(name: str) -> tuple[str, dict[str, str]]:
    """Text and special tokens of a template."""
    bos, eos = ENDS[family(name)]
    special = {"eos_token": eos} | ({"bos_token": bos} if bos else {})
    if name == "smollm2":
        text = open_model(smollm2()).chat_template
        assert text is not None
        return text, special
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), special

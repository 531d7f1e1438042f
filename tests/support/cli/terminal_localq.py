"""`localq` with a scripted engine, and a model folder for it: `python terminal_localq.py SCRIPT [ARGUMENT ...]`.

Everything but the engine process is the product's. LOCALQ_TEST_UNSAFE=1 switches the sanitizer off: a test of what
reaches the terminal must see that.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (sys.executable, "-m", "tests.support.cli.terminal_localq")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model(folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """A folder that the front end takes for a small model; its tokens are bytes. No torch needed."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from tests.support.cli.terminal_engine import letters
    from tests.support.files.hostile_models import CONFIG, LAYER, LINEARS
    from tests.support.files.raw_safetensors import entry, write_raw

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": special[0], "eos_token": special[2], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 10**6}))
    shapes = {f"{name}.weight": shape for name, shape in LINEARS.items()}
    shapes |= {f"model.{name}.weight": (320, 64) for name in ("embed_tokens",)} | {"lm_head.weight": (320, 64)}
    norms = (f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm", "model.norm")
    shapes |= {f"{name}.weight": (64,) for name in norms}
    header, place = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = entry("F32", shape, (place, place + size))
        place += size
    write_raw(folder / "model.safetensors", header, bytes(place))
    return folder


def environment(home: Path, **more: str) -> dict[str, str]:
    """Of a user who has nothing yet, at a terminal with colours; all that is kept goes below `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALQ_", "HF_", "LC_", "XDG_"))}
    for name in ("NO_COLOR", "VISUAL", "EDITOR", "COLUMNS", "LINES", "TMUX", "TERM_PROGRAM"):
        kept.pop(name, None)
    places = {f"LOCALQ_{name}": str(home / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "MODELS")}
    hub = {"HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    home_of = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "LANG": "C.UTF-8"}
    colours = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    paths = {"PYTHONPATH": str(ROOT), "LOCALQ_DEVICE": "cpu", "LOCALQ_DTYPE": "float32"}
    return {**kept, **places, **hub, **home_of, **colours, **paths, **more}


def _without_sanitizer() -> None:
    from localq import sanitize

    sanitize.sanitize = lambda text: text


def main() -> None:
    """See the module."""
    if os.environ.get("LOCALQ_TEST_UNSAFE"):
        _without_sanitizer()  # before anybody takes the function by its name
    from localq.worker import client

    script = sys.argv.pop(1)
    command = (sys.executable, "-m", "tests.support.cli.terminal_engine", script)
    client.EngineClient.__init__.__defaults__ = (command, *client.EngineClient.__init__.__defaults__[1:])
    from localq import cli

    cli.main()


if __name__ == "__main__":
    main()

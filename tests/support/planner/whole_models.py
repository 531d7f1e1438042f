"""Decoding speeds that were measured on an H200: what tests hold predictions to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WholeModel:
    """Decoding of 128 tokens, random weights. By `localq bench --synthetic` (of qwen3-32b with --formats) at
    depth 0 and with a 16-bit cache; with a depth by `python -m tests.tools.planner_report table`, behind a
    prompt of so many tokens."""

    name: str
    head: str
    embed: str
    tok_s: float
    commit: str
    kv_bits: int = 16
    depth: int = 0
    scheme: str = ""  # what the format leaves open


WHOLE_MODELS = (
    WholeModel("llama-3.1-8b@nf4", "16", "device", 498.0, "ad55577"),
    WholeModel("llama-3.1-8b@fp16", "16", "device", 248.6, "1d73e67"),
    WholeModel("llama-3.1-8b@vq2", "16", "device", 621.9, "8272b55"),
    WholeModel("llama-3.1-8b@aqlm", "16", "device", 602.8, "f45e95d", scheme="2x8g8"),
    WholeModel("llama-3.1-8b@vptq", "16", "device", 139.6, "61779be", scheme="v8-k65536-256"),
    WholeModel("llama-3.1-8b@mxfp4", "16", "device", 453.1, "d2a1339"),
    WholeModel("llama-3.1-8b@bcq", "16", "device", 558.7, "d2a1339", scheme="q3g128"),
    WholeModel("llama-3.1-8b@squeezellm", "16", "device", 467.7, "d2a1339"),
    WholeModel("llama-3.1-8b@awq", "16", "device", 476.7, "d2a1339", scheme="g128"),
    WholeModel("llama-3.1-8b@gptq", "16", "device", 476.9, "d2a1339", scheme="g128"),
    WholeModel("qwen3-32b@fp16", "16", "device", 61.3, "d2a1339"),
    WholeModel("qwen3-32b@nf4", "16", "device", 149.2, "d2a1339"),
    WholeModel("qwen3-32b@vq2", "16", "device", 220.9, "8272b55"),
    WholeModel("qwen3-32b@vptq", "16", "device", 34.1, "8272b55", scheme="v8-k65536-256"),
    WholeModel("gemma-3-12b@vq2", "16", "device", 325.9, "8272b55"),
    WholeModel("qwen3-32b@aqlm", "16", "device", 217.8, "f45e95d", scheme="2x8g8"),
    WholeModel("qwen3-32b@mxfp4", "16", "device", 130.8, "d2a1339"),
    WholeModel("qwen3-32b@bcq", "16", "device", 174.0, "d2a1339", scheme="q3g128"),
    WholeModel("qwen3-32b@squeezellm", "16", "device", 133.1, "d2a1339"),
    WholeModel("qwen3-32b@awq", "16", "device", 142.5, "d2a1339", scheme="g128"),
    WholeModel("qwen3-32b@gptq", "16", "device", 142.7, "d2a1339", scheme="g128"),
    WholeModel("llama-3.3-70b@nf4", "16", "device", 81.4, "1d73e67"),  # held down by power; its first steps 85.4
    WholeModel("llama-3.3-70b@vq2", "nf4", "host", 147.1, "8272b55"),
    WholeModel("gpt-oss-20b@mxfp4", "16", "device", 572.5, "ea30483"),
    WholeModel("qwen3-30b-a3b@nf4", "16", "device", 430.3, "ea30483"),
    WholeModel("qwen3-30b-a3b@vq2", "16", "device", 369.6, "8272b55"),
    WholeModel("llama-3.1-8b@nf4", "16", "device", 469.7, "2056184", 16, 1500),
    WholeModel("llama-3.1-8b@nf4", "16", "device", 454.8, "2056184", 4, 1500),
    WholeModel("qwen3-14b@nf4", "16", "device", 276.8, "2056184", 8, 1500),
    WholeModel("gemma-3-12b@nf4", "16", "device", 252.4, "ea30483", 16, 1500),
    WholeModel("mistral-nemo-12b@nf4", "16", "device", 317.9, "2056184", 4, 1500),
    WholeModel("qwen3-8b@fp16", "16", "device", 230.4, "2056184", 16, 1500),
    WholeModel("qwen3-32b@nf4", "16", "device", 144.3, "2056184", 16, 1500),
    WholeModel("qwen3-32b@nf4", "8", "device", 146.1, "2a7008b", 8, 1500),
    WholeModel("llama-3.3-70b@vq2", "nf4", "host", 138.6, "2056184", 16, 1500),
    WholeModel("llama-3.1-8b@fp16", "16", "device", 240.1, "2056184", 16, 1500),
    WholeModel("llama-3.3-70b@nf4", "16", "device", 80.6, "2056184", 16, 1500),
)

"""The engine: one model on one device; token ids in, token ids out.

    load/      from files to a model in memory: device, plan, weights, GPU memory
    generate   prefill, decode, snapshots and profiles of the loaded model
    step/      the fused decode step and its CUDA graphs
    sampler    the next token from the logits; constraint: masks of tokens
    cache      the KV cache; kv_codec: 8 and 4 bits; snapshot: the cache on disk
    selftest/  kernels against their references, once per device
    scoring    logits of a text, for evaluation
    patch_transformers   localq's kernels under a transformers model

Not here: text, tokens as text, processes (`localq.worker` runs the engine), architectures (`localq.models`).
Called by `worker.server`, `quantize` and `bench`. Open `generate.py` first.
"""

"""The engine: one model on one device; token ids in, token ids out.

    load/      from files to a model in memory: device, plan, weights, GPU memory
    generate   prefill, decode, snapshots and profiles of the loaded model
    step/      the fused decode step and its CUDA graphs
    sampler    the next token from the logits; constraint: masks of tokens
    cache      what layers keep of a text; kv_codec: 8 and 4 bits; sliding: windows; snapshot: the cache on disk
    cached_text   the ids in the cache and how far they can be cut; checkpoints: copies to go back to
    selftest/  kernels against their references, once per device
    scoring    logits of a text, for evaluation
    patch_transformers   localq's kernels under a transformers model

Not here: text, tokens as text, processes (`localq.worker` runs the engine), architectures (`localq.models`).
Called by `worker.server`, `quantize` and `bench`. Open `generate.py` first.
"""

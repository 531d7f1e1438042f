"""The quantized layers of a model in one file, for `localq quantize --layers`; how `localq/data/*-vq2` are made.

    localq quantize smollm2-135m --format vq2 --best --device cuda --out MODEL
    python tests/pack_layers.py MODEL SOURCE.gguf localq/data/smollm2-135m-vq2 --made-by "the first line"

What is no layer's (embedding, head, last norm) is left out: it is made of the source anew.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from localq.disk import sha256_of
from localq.modelfiles import open_model
from localq.ready_layers import RECORD, TENSORS, source_sha256


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("source", type=Path, help="what it was made from: a folder or a .gguf file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--made-by", required=True, help="the command, for the record")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    weight_map = json.loads((asked.model / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted({shard for name, shard in weight_map.items() if ".layers." in name})
    tensors = {name: each for shard in shards for name, each in load_file(asked.model / shard).items()}
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / TENSORS
    save_file(tensors, path, metadata={"format": "pt"})
    record = {
        "sha256": sha256_of(path),
        "source_sha256": source_sha256(open_model(asked.source)),
        "seed": asked.seed,
        "made_by": asked.made_by,
    }
    (asked.out / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    print(f"{path}: {path.stat().st_size} bytes, {len(tensors)} tensors")


if __name__ == "__main__":
    main()

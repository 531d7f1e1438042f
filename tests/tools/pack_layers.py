"""The quantized layers of a model in one file, for `localq quantize --layers`; how `localq/data/*-vq2` are made.

    python -m tests.tools.pack_layers MODEL smollm2-135m localq/data/smollm2-135m-vq2 --make --best --device cuda

first makes the folder MODEL with `localq quantize smollm2-135m --format vq2 --out MODEL` and the options behind
`--make`; killed, the same command goes on. Without `--make`, MODEL is one that was made before, `--made-by` the command
that made it, and `--seed` its seed.

What is no layer's (embedding, head, last norm) is left out: it is made of the source anew.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from localq import cli
from localq.disk import sha256_of
from localq.files.model_folder import open_model
from localq.planner import prepare
from localq.quantize.prequantized_layers import RECORD, TENSORS, open_layers, source_sha256


def pack(model: Path, source: Path, out: Path, made_by: str, seed: int) -> Path:
    """Write the folder `out`, and return it."""
    weight_map = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted({shard for name, shard in weight_map.items() if ".layers." in name})
    tensors = {name: each for shard in shards for name, each in load_file(model / shard).items()}
    out.mkdir(parents=True, exist_ok=True)
    path = out / TENSORS
    save_file(tensors, path, metadata={"format": "pt"})
    record = {
        "sha256": sha256_of(path),
        "source_sha256": source_sha256(open_model(source)),
        "seed": seed,
        "made_by": made_by,
    }
    (out / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    print(f"{path}: {path.stat().st_size} bytes, {len(tensors)} tensors")
    return out


def make(model: Path, source: str, options: list[str]) -> str:
    """Make the folder `model`, and return the command that did. Exits as that does where it fails."""
    command = ["quantize", source, "--format", "vq2", *options]
    if code := cli.execute([*command, "--out", str(model)]):
        sys.exit(code)
    return shlex.join(["localq", *command, "--out", "MODEL"])


def seed_of(options: list[str]) -> int:
    """Of the rotations of what these options of `localq quantize` make."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=Path)
    asked = parser.parse_known_args(options)[0]
    return int(asked.seed) if asked.layers is None else open_layers(asked.layers).seed


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("source", help="what it is made from: a name, a folder or a .gguf file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--made-by", help="the command, for the record")
    how.add_argument("--make", nargs=argparse.REMAINDER, metavar="OPTION", help="all that follows, for localq quantize")
    asked = parser.parse_args()
    made_by, seed = asked.made_by, asked.seed
    if asked.make is not None:
        made_by = make(asked.model, asked.source, asked.make)
        seed = seed_of(asked.make)
    pack(asked.model, prepare.source_path(asked.source, print), asked.out, made_by, seed)


if __name__ == "__main__":
    main()

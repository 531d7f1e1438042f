"""Random damage to sound files, by a seed: configurations of published models, headers, indexes, whole folders.

Mutation `number` of a seed is always the same. Whatever comes of it, the product must take it or refuse it by a
LocalqError, quickly and in few words; `campaign` yields what does otherwise.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.common.pace import slowness
from tests.support.files.hostile_models import CONFIG, FORMATS, write_sound
from tests.support.files.hub_configs import HUB

if TYPE_CHECKING:
    from tests.tools.hostile_drive import Recorder

CPU_SECONDS, CHARACTERS = 1.0, 1000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 63, 255, 65_536, 2**20, 2**31, 2**40, 2**63, 10**400, 0.0, 0.5, -1.5, 1e308,
    1e999, "", "x", "64", "\u202e", "\ud800", "a" * 5000, [], [0], [[]], ["x"], [1, 2, 3], {}, {"a": 1},
    {"type": "yarn"}, [None] * 300,
)  # fmt: skip
FIELDS: tuple[str, ...] = (
    "head_dim", "layer_types", "rope_scaling", "rope_parameters", "rope_theta", "rope_type", "factor", "sliding_window",
    "sliding_window_pattern", "use_sliding_window", "max_window_layers", "no_rope_layers", "no_rope_layer_interval",
    "attention_bias", "mlp_bias", "tie_word_embeddings", "partial_rotary_factor", "hidden_act", "hidden_activation",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "rms_norm_eps", "quantization_config",
    "quant_method", "config_for_layers", "vector_lens", "text_config", "model_type", "torch_dtype", "eos_token_id",
    "num_experts", "num_local_experts", "num_experts_per_tok", "experts_per_token", "moe_intermediate_size",
    "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob", "n_shared_experts",
    "num_key_value_heads", "original_max_position_embeddings", "short_factor", "long_factor", "beta_fast", "mscale",
    "bits", "group_size", "q_group_size", "desc_act", "checkpoint_format", "version", "format", "backend", "dynamic",
)  # fmt: skip
SCALINGS: tuple[Any, ...] = (
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 32, "mscale": 1.0,
     "mscale_all_dim": 0.8},
    {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_theta": 1e4}},
    {"type": "linear", "factor": 2.0},
)  # fmt: skip
QUANTIZATIONS: tuple[Any, ...] = (
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "aqlm", "num_codebooks": 1, "nbits_per_codebook": 16},
    {"quant_method": "vptq", "config_for_layers": {"model.layers.0.self_attn.q_proj": {
        "vector_lens": [-1, 8], "num_centroids": [-1, 65536], "num_res_centroids": [-1, 256], "group_num": 1}}},
    {"quant_method": "localq_vq2", "compute_dtype": "float16"},
    {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "modules_to_not_convert": None},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "checkpoint_format": "gptq",
     "dynamic": {"+:.*down.*": {"bits": 4, "group_size": 32}}},
)  # fmt: skip


# ---- damage


def damaged(value: Any, rng: random.Random) -> Any:
    """A JSON value with one to four things changed, at any depth."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 4)):
        place = _container(value, rng)
        if isinstance(place, dict):
            key = rng.choice([*place, *FIELDS]) if rng.random() < 0.5 and place else rng.choice([*place, "x"])
            _change(place, key, rng)
        elif isinstance(place, list) and place:
            _change(place, rng.randrange(len(place)), rng)
        else:
            return copy.deepcopy(rng.choice(VALUES))
    return value


def _container(value: Any, rng: random.Random) -> Any:
    """A dict or list inside `value`, or itself; the higher the likelier."""
    while isinstance(value, dict | list) and rng.random() < 0.6:
        inner = [
            each for each in (value.values() if isinstance(value, dict) else value) if isinstance(each, dict | list)
        ]
        if not inner:
            break
        value = rng.choice(inner)
    return value


def _change(place: Any, key: Any, rng: random.Random) -> None:
    chance = rng.random()
    there = key in place if isinstance(place, dict) else True
    if chance < 0.15 and there:
        del place[key]
    elif chance < 0.3 and there and type(place[key]) in (int, float):
        place[key] = rng.choice(
            [place[key] + 1, place[key] - 1, place[key] * 2, -place[key], float(place[key] % 2**60)]
        )
    elif chance < 0.4 and there:
        place[key] = rng.choice([[place[key]], {"x": place[key]}, str(place[key])[:5000]])
    else:
        place[key] = copy.deepcopy(rng.choice(VALUES))


def damaged_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut, doubled or put elsewhere, near the beginning above all."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        end = len(data) if rng.random() < 0.3 else min(len(data), 600)
        first = rng.randrange(max(1, end))
        last = min(len(data), first + rng.choice((1, 1, 2, 8, 40)))
        chance = rng.random()
        if chance < 0.5:
            data[first:last] = rng.randbytes(last - first)
        elif chance < 0.7:
            del data[first:last]
        elif chance < 0.85:
            data[first:first] = data[first:last]
        else:
            data[first:last] = rng.choice((b"{", b"[", b'"', b"-", b"9" * 30, b"\\ud800", b"\0", b"null", b"1e999"))
    return bytes(data)


# ---- where it strikes: (name, what takes it)


def _config(rng: random.Random, room: Path) -> Callable[[], None]:
    """config.json of a published model, alone."""
    config = copy.deepcopy(rng.choice([*HUB.values(), CONFIG]))
    text_part = config.get("text_config", config)
    if rng.random() < 0.4:
        text_part[rng.choice(("rope_scaling", "rope_parameters"))] = copy.deepcopy(rng.choice(SCALINGS))
    if rng.random() < 0.3:
        config["quantization_config"] = copy.deepcopy(rng.choice(QUANTIZATIONS))
    text = json.dumps(damaged(config, rng))
    if rng.random() < 0.1:
        text = damaged_bytes(text.encode(), rng).decode("utf-8", "replace")
    return lambda: read_config(text)


def read_config(text: str) -> None:
    """All that the product makes of a config.json."""
    from localq.files.architecture import Architecture
    from localq.files.json_files import parse_object
    from localq.files.model_folder import ModelFiles, check_config
    from localq.files.stored_format import format_of_config, scheme_of
    from localq.models import architecture

    config = parse_object(text, "config.json")
    check_config(config, "config.json")
    files = ModelFiles(Path("nowhere"), "safetensors", config)
    assert all(0 <= each < 2**20 for each in files.eos_ids)
    format_of_config(config)
    scheme_of(files)
    arch = Architecture.from_config(config)
    assert 0 <= arch.active_linear_parameters <= arch.linear_parameters <= arch.parameters
    assert arch.kv_bytes_per_token(16) >= arch.layers * 4
    facts = architecture(config).Config.from_dict(config)
    assert facts.heads % facts.kv_heads == 0
    assert len(facts.windows) == len(facts.ropes) == facts.layers
    for rope in facts.rope_kinds:
        rope.frequencies(64)


def _header(rng: random.Random, room: Path) -> Callable[[], None]:
    """A file of the sound models."""
    from localq.files.safetensors_headers import read_header

    raw = (room / rng.choice(FORMATS) / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if rng.random() < 0.6:
        fields = json.dumps(damaged(json.loads(raw[8 : 8 + length]), rng)).encode()
        raw = len(fields).to_bytes(8, "little") + fields + raw[8 + length :]
    else:
        raw = damaged_bytes(raw, rng)
    path = room / "changed.safetensors"
    path.write_bytes(raw)
    return lambda: _ignore(read_header(path))


def _ignore(_: object) -> None:
    return None


def _folder(rng: random.Random, room: Path) -> Callable[[], None]:
    """A whole sound model with one of its files damaged."""
    from tests.tools.hostile_drive import drive, show

    folder = room / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(room / rng.choice(FORMATS), folder)
    if rng.random() < 0.3:
        _shard(folder, rng)
    path = rng.choice(sorted(folder.iterdir()))
    if path.suffix == ".json" and rng.random() < 0.8:
        path.write_text(json.dumps(damaged(json.loads(path.read_text()), rng)))
    else:
        path.write_bytes(damaged_bytes(path.read_bytes(), rng))

    def both() -> None:
        show(folder)
        drive(folder)

    return both


def _shard(folder: Path, rng: random.Random) -> None:
    """The weights under the name of one of several files, with an index."""
    from localq.files.safetensors_headers import read_header

    names = list(read_header(folder / "model.safetensors").tensors)
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    index = damaged({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}, rng)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


TARGETS = (_config, _config, _config, _header, _header, _folder)


def campaign(count: int, seed: int, recorder: Recorder, top: Path) -> Iterator[dict[str, Any]]:
    """Drives mutations 0 to count - 1 of `seed`; yields those that misbehave, then how many were taken and refused."""
    room = top / "mutations"
    for format in FORMATS:
        write_sound(room / format, format)
    taken = refused = 0
    for number in range(count):
        rng = random.Random(f"{seed}:{number}")
        target = TARGETS[number % len(TARGETS)]
        faults, was_refused = _judged(target(rng, room), recorder, room.resolve())
        refused, taken = refused + was_refused, taken + (not was_refused)
        if faults:
            yield {"mutation": number, "seed": seed, "of": target.__name__, "faults": faults}
    yield {"mutations": count, "taken": taken, "refused": refused}


def _judged(action: Callable[[], None], recorder: Recorder, room: Path) -> tuple[list[str], bool]:
    """What is wrong with how the product took it, and whether it refused it."""
    from localq.errors import LocalqError

    faults, refused, used = [], False, time.process_time()
    with recorder.watching(room) as seen:
        try:
            action()
        except LocalqError as error:
            refused = True
            if len(str(error)) > CHARACTERS or not error.what:
                faults.append(f"{len(str(error))} characters: {str(error)[:200]!r}")
        except BaseException as error:
            faults.append(f"{type(error).__name__}: {error!s:.300}")
    used = time.process_time() - used
    late = used > CPU_SECONDS and used > CPU_SECONDS * slowness()
    return [*faults, *seen, *([f"{used:.2f} s"] if late else [])], refused

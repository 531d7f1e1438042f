"""The few plain messages between a front end and the engine process.

Framing: one JSON object per line, UTF-8, at most `MAX_LINE_BYTES`; `{"type": "<class name in lower case>", ...fields}`.
No pickle, nothing executable, no tensors. Torch-free.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from localq.errors import ExitCode, LocalqError
from localq.kv_bits import KvBits
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from localq.stats import Stats
from localq.text.grammar import Grammar

MAX_LINE_BYTES = 64 * 2**20  # a 1M-token prompt is about 8 MB of JSON
STEP_LIMIT_S = 30.0  # a GPU that finishes no step for so long hangs
GPU = "GPU"  # what an error is about that a device caused


# ---- front end -> engine


@dataclass(frozen=True)
class Load:
    """Load the model at `path` (a folder or a .gguf file); answered by Loading*, then Loaded or Failed."""

    path: str
    options: LoadOptions = field(default_factory=LoadOptions)


@dataclass(frozen=True)
class Generate:
    """Continue `prompt` (token ids); answered by Progress*, Tokens*, then Done or Failed, all carrying `id`."""

    id: int
    prompt: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: list[int] = field(default_factory=list)
    max_tokens: int | None = None  # None = until a stop token or a full context
    grammar: Grammar | None = None  # the reply keeps to it
    grammar_begun: str = ""  # what the prompt has of that reply already
    grammar_after: str = ""  # it holds behind this, which ends the thought that the prompt begins
    breaker_ids: list[int] = field(default_factory=list)  # end a repetition, for DRY


@dataclass(frozen=True)
class Cancel:
    """Stop the generation `id` within one step; it still answers Done(reason="cancelled")."""

    id: int


@dataclass(frozen=True)
class Profile:
    """Time one decode step of the loaded model at cache slot `position`; answered by Profiled or Failed.

    position None = behind the conversation in the cache, which is forgotten unless `keep`: then what lies before the
    position stays.
    """

    position: int | None = None
    keep: bool = False
    id: int = 0  # of the answer


@dataclass(frozen=True)
class SaveCache:
    """Write the conversation in the KV cache to the file `path`; answered by CacheSaved or Failed. May take long."""

    path: str
    id: int = 0  # of the answer


@dataclass(frozen=True)
class RestoreCache:
    """Take up the conversation in the file `path`; answered by CacheRestored, or Failed and it must be read anew."""

    path: str
    id: int = 0  # of the answer


@dataclass(frozen=True)
class Shutdown:
    """End the engine process."""


# ---- engine -> front end


@dataclass(frozen=True)
class Ready:
    """The process is up; sent once, before torch is imported."""

    pid: int


@dataclass(frozen=True)
class Loading:
    """Progress of a load: a stage in words ("reading weights", "capturing graph"), bytes done and in total."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Loaded:
    """The model is ready. `ledger` maps a component to bytes as allocated on the device, `predicted` as planned.

    host: bytes of host memory besides. With a GPU "embedding", where that is put there, and "snapshots", page-locked
    from the first large one on; on the CPU "reading", what a pass over a prompt takes and gives back.

    kv_bits, embed and head are what the load request leaves open or asks for, as they came to be. gpu_uuid is empty on
    the CPU; reads: the fields of `roofline.Reads`, empty where no roof is known.
    """

    name: str
    device: str
    device_name: str
    dtype: str
    format: str
    context_size: int
    vocab_size: int
    graphs: bool
    load_s: float
    ledger: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # things the user must be told, one line each
    kv_bits: KvBits = 16
    embed: str = "device"
    head: str = "16"
    predicted: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    gpu_uuid: str = ""
    reads: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Prefill went on."""

    id: int
    stats: Stats


@dataclass(frozen=True)
class Tokens:
    """New token ids of the reply, in order (a stop token is not among them)."""

    id: int
    ids: list[int]
    stats: Stats


@dataclass(frozen=True)
class Done:
    """The reply is complete. reason: "stop", "length" (max_tokens), "context" (cache full), "cancelled"."""

    id: int
    reason: str
    stats: Stats


@dataclass(frozen=True)
class Profiled:
    """Where the time of a decode step goes: `StepProfile.to_dict()`."""

    profile: dict[str, Any]
    id: int = 0  # of the request, as below


@dataclass(frozen=True)
class CacheSaved:
    """The file is written, with so many bytes."""

    bytes: int
    id: int = 0


@dataclass(frozen=True)
class CacheRestored:
    """The cache holds so many tokens, which the next prompt may begin with."""

    tokens: int
    id: int = 0


@dataclass(frozen=True)
class Failed:
    """A request failed; `id` is None for a load, and where none was understood. `dying`: the process ends now (only a
    new one can help)."""

    error: dict[str, Any]  # LocalqError.to_dict()
    id: int | None = None
    dying: bool = False

    def to_error(self) -> LocalqError:
        """The error to raise on the front end's side."""
        return LocalqError.from_dict(self.error)


Request = Load | Generate | Profile | SaveCache | RestoreCache | Cancel | Shutdown
Event = Ready | Loading | Loaded | Progress | Tokens | Done | Profiled | CacheSaved | CacheRestored | Failed
_TYPES: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Load, Generate, Profile, SaveCache, RestoreCache, Cancel, Shutdown),
        *(Ready, Loading, Loaded, Progress, Tokens, Done, Profiled, CacheSaved, CacheRestored, Failed),
    )
}
_NESTED: dict[str, type[Any]] = {"options": LoadOptions, "sampling": Sampling, "stats": Stats, "grammar": Grammar}
_OPTIONAL = frozenset({"grammar"})


def encode(message: Request | Event) -> bytes:
    """One line, newline included."""
    body = {"type": type(message).__name__.lower(), **dataclasses.asdict(message)}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


def decode(line: bytes) -> Request | Event:
    """Inverse of `encode`; raises LocalqError on anything that is not one of the messages above."""
    try:
        body = json.loads(line)
        kind = _TYPES[body.pop("type")]
        for name, nested in _NESTED.items():
            if name in body and not (name in _OPTIONAL and body[name] is None):
                body[name] = nested(**body[name])
        message: Request | Event = kind(**body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        cause = f"a message that is not understood ({type(error).__name__}: {error})"
        raise LocalqError("engine process", cause, "Report this as a bug.", ExitCode.FAILURE) from error
    return message

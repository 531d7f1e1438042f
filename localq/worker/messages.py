"""Messages between a front end and the engine process.

Framing: one JSON object per line, UTF-8, at most `MAX_LINE_BYTES`; `{"type": "<class name in lower case>", ...fields}`.
No pickle, nothing executable, no tensors. Torch-free.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from localq.errors import ExitCode, LocalqError
from localq.kv_bits import KvBits
from localq.planner.load_options import LoadOptions
from localq.sampling import LogitOptions, Sampling
from localq.stats import Stats, TokenLogprob
from localq.text.grammar import Grammar

MAX_LINE_BYTES = 64 * 2**20  # a 1M-token prompt is about 8 MB of JSON
STEP_LIMIT_S = 30.0  # a GPU step that takes longer counts as hung
GPU, PROCESS = "GPU", "engine process"  # subjects of errors: that a device caused, and others
# Next steps of errors, on both sides.
DOCTOR = "`localq doctor` shows what is wrong."
REPORT = "Report this as a bug."
SHORTEN = "Shorten the prompt."


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
    grammar: Grammar | None = None  # constrains the reply
    grammar_begun: str = ""  # start of the reply that the prompt contains
    grammar_after: str = ""  # the grammar applies after this text, which ends the thinking that the prompt opens
    breaker_ids: list[int] = field(default_factory=list)  # end a repetition, for DRY
    think_budget: int | None = None  # tokens of the thought, which is then ended; None = as many as the model takes
    begun: str = ""  # start of the reply that the prompt contains, with its thought; only read with `think_budget`
    marks: list[int] = field(default_factory=list)  # lengths of the prompt that a later one may go back to
    draft_tokens: int = 0  # of a draft, at most; 0: one token a step
    ask_draft_model: bool = True  # drafts may be of the draft model, if one is loaded
    logits: LogitOptions | None = None  # bias, penalties and log probabilities


@dataclass(frozen=True)
class Cancel:
    """Stop the generation `id` within one step; it still answers Done(reason="cancelled")."""

    id: int


@dataclass(frozen=True)
class Profile:
    """Time one decode step of the loaded model at cache slot `position`; answered by Profiled or Failed.

    position None = after the cached tokens. The cache is cleared, with `keep` only from the position on.
    """

    position: int | None = None
    keep: bool = False
    id: int = 0  # of the answer


@dataclass(frozen=True)
class SaveCache:
    """Write the KV cache to the file `path`; answered by CacheSaved or Failed. May take long."""

    path: str
    id: int = 0  # of the answer


@dataclass(frozen=True)
class RestoreCache:
    """Restore the KV cache from the file `path`; answered by CacheRestored, or Failed: then prefill."""

    path: str
    id: int = 0  # of the answer


@dataclass(frozen=True)
class Shutdown:
    """End the engine process; on the socket of a server, this connection."""


@dataclass(frozen=True)
class AskStatus:
    """Ask a server for its status; answered by ServerStatus. Only on the socket of a server, as StopServer."""


@dataclass(frozen=True)
class StopServer:
    """End the server, after the replies that are running; the connection is closed at its end."""


# ---- engine -> front end


@dataclass(frozen=True)
class Ready:
    """The process runs; sent once, before torch is imported."""

    pid: int


@dataclass(frozen=True)
class Holding:
    """The model that a server holds, or loads for the next reply; sent behind Ready on its socket.

    model    its name
    asked    the name that the server was started with, which may select another format on another machine
    format   the weight format that was asked for; "" = none
    load     the request of its load; None before the first one
    """

    model: str
    asked: str
    format: str = ""
    load: Load | None = None


@dataclass(frozen=True)
class ServerStatus:
    """The status of a server. Times in seconds since 1970.

    pid, url     of the server process; "" where it listens on its socket only
    model        its name
    format, device, context_size   of the model, as in `Loaded`; empty and 0 while it is unloaded
    bytes        of GPU memory, or of RAM on the CPU; 0 while it is unloaded
    loaded       the model is in memory; loading: it is being loaded; busy: a reply is running
    queued       requests that wait
    started, unloads_at   unloads_at None: the model stays
    """

    pid: int
    model: str
    version: str
    url: str = ""
    format: str = ""
    device: str = ""
    context_size: int = 0
    bytes: int = 0
    loaded: bool = False
    loading: bool = False
    busy: bool = False
    queued: int = 0
    started: float = 0.0
    unloads_at: float | None = None


@dataclass(frozen=True)
class Loading:
    """Progress of a load: its stage in words ("loading weights", "capturing graphs"), bytes done and in total."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True)
class Loaded:
    """The model is ready.

    ledger, predicted  component -> bytes allocated on the device, and as planned
    host     bytes of host memory. With a GPU "embedding", where it lies there, and "snapshots", pinned from the first
             large one on; on the CPU "reading", temporary memory of a prefill pass. On both "checkpoints", if any
    kv_bits, embed, head  the values in use
    gpu_uuid  empty on the CPU; reads: the fields of `roofline.Reads`, empty where the roofline is unknown
    stages   stage in words -> seconds, in order: start and imports of a new engine process, then those of the load
    draft_tokens  of a draft that a step can verify, at most; no_drafts: why there are none, where they were wanted
    draft_model   name of the draft model that is loaded beside it, "mtp" for the model's MTP block; "" = none
    no_mtp        why no MTP block drafts, where one would be taken
    shared   the engine is a server's, whose cache other conversations use too; set by the client
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
    notes: list[str] = field(default_factory=list)  # notes for the user, one line each
    kv_bits: KvBits = 16
    embed: str = "device"
    head: str = "16"
    predicted: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    gpu_uuid: str = ""
    reads: dict[str, int] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    draft_tokens: int = 0
    no_drafts: str = ""
    draft_model: str = ""
    shared: bool = False
    no_mtp: str = ""


@dataclass(frozen=True)
class Progress:
    """Prefill progress."""

    id: int
    stats: Stats


@dataclass(frozen=True)
class Tokens:
    """New token ids of the reply, in order (a stop token is not among them). logprobs: of each, where asked for."""

    id: int
    ids: list[int]
    stats: Stats
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        read = [TokenLogprob(**each) if isinstance(each, dict) else each for each in self.logprobs]  # out of JSON
        object.__setattr__(self, "logprobs", read)


@dataclass(frozen=True)
class Done:
    """The reply is complete. reason: "stop", "length" (max_tokens), "context" (cache full), "cancelled"."""

    id: int
    reason: str
    stats: Stats


@dataclass(frozen=True)
class Profiled:
    """The profile of a decode step: `StepProfile.to_dict()`."""

    profile: dict[str, Any]
    id: int = 0  # of the request, as below


@dataclass(frozen=True)
class CacheSaved:
    """The file is written; its bytes."""

    bytes: int
    id: int = 0


@dataclass(frozen=True)
class CacheRestored:
    """The cache is restored; its number of tokens, which the next prompt may share."""

    tokens: int
    id: int = 0


@dataclass(frozen=True)
class Failed:
    """A request failed; id None for a load, and for a malformed request. dying: the process ends now."""

    error: dict[str, Any]  # LocalqError.to_dict()
    id: int | None = None
    dying: bool = False

    def to_error(self) -> LocalqError:
        """Return the error to raise in the front end."""
        return LocalqError.from_dict(self.error)


Request = Load | Generate | Profile | SaveCache | RestoreCache | Cancel | Shutdown | AskStatus | StopServer
Event = (
    Ready | Holding | ServerStatus | Loading | Loaded | Progress | Tokens | Done | Profiled | CacheSaved
    | CacheRestored | Failed
)  # fmt: skip
_TYPES: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in (*get_args(Request), *get_args(Event))}


def _load(path: str, options: dict[str, Any]) -> Load:
    return Load(path, LoadOptions(**options))


_NESTED: dict[str, Callable[..., Any]] = {
    "options": LoadOptions, "sampling": Sampling, "stats": Stats, "grammar": Grammar, "logits": LogitOptions,
    "load": _load,
}  # fmt: skip
_OPTIONAL = frozenset({"grammar", "logits", "load"})


def encode(message: Request | Event) -> bytes:
    """Encode a message as one line, newline included.

    Not by `dataclasses.asdict`: the tuples of fields that it makes stay in CPython's free lists, up to 2,000 of each
    length, which is 1 kB a reply in the engine process.
    """
    body = {"type": type(message).__name__.lower(), **vars(message)}
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), default=_fields)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _fields(part: object) -> dict[str, Any]:
    if not dataclasses.is_dataclass(part):
        raise TypeError(f"{type(part).__name__} cannot be part of a message")
    return vars(part)


def decode(line: bytes) -> Request | Event:
    """Decode a line of `encode`; raises LocalqError for anything else."""
    try:
        body = json.loads(line)
        kind = _TYPES[body.pop("type")]
        for name, nested in _NESTED.items():
            if name in body and not (name in _OPTIONAL and body[name] is None):
                body[name] = nested(**body[name])
        message: Request | Event = kind(**body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        cause = f"malformed message ({type(error).__name__}: {error})"
        raise LocalqError(PROCESS, cause, REPORT, ExitCode.FAILURE) from error
    return message

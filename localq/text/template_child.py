"""The process that renders chat templates: JSON requests on stdin, JSON answers on stdout.

Jinja's environment is set up as transformers does it (utils/chat_template_utils.py): trimmed blocks, loop controls,
`tojson`, `raise_exception`, `strftime_now`, and `generation` blocks that only mark what the model wrote.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2
MEMORY_BYTES = 512 * 2**20  # of address space beyond what the started process has
MAX_OUTPUT_BYTES = 2**20
MAX_WORDS = 500  # characters of an error
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>: the signal for the end of the thread that started this process
KEPT_TEMPLATES = 4  # compiled ones; compiling takes most of the time of a render


class Refused(Exception):
    """The template called raise_exception."""


class GenerationMark(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` renders its body; the tags matter to training only."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the body of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message: str) -> None:
    """Refuse a conversation; called by templates."""
    raise Refused(str(message))


def strftime_now(format: str) -> str:
    """The current date in the given format; called by templates."""
    return datetime.datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TemplateNamespace(jinja2.utils.Namespace):
    """A namespace that refuses names with a leading underscore, so that no Python internals can be set on it."""

    def __init__(*args: Any, **values: Any) -> None:  # so that a value may be named "self"
        self, *rest = args
        named = dict(*rest, **values)
        for name in named:
            TemplateNamespace._check(name)
        jinja2.utils.Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        TemplateNamespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"invalid name in a namespace: {name[:40]!r}")


def make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    """`dict` as a function: the class itself would expose its attributes."""
    return dict(*args, **values)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox with the functions that chat templates use."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMark, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    made.globals.update(namespace=TemplateNamespace, dict=make_dict)
    return made


@functools.lru_cache(maxsize=KEPT_TEMPLATES)
def compile_template(sandbox: ImmutableSandboxedEnvironment, text: str) -> jinja2.Template:
    """The compiled template; it keeps no state between renders, as the sandbox is immutable."""
    return sandbox.from_string(text)


def answer(sandbox: ImmutableSandboxedEnvironment, request: dict[str, Any]) -> dict[str, Any]:
    """Render a request: {"text"}, or {"error", "refused"}."""
    try:
        pieces, size = [], 0
        for piece in compile_template(sandbox, request["template"]).generate(**request["variables"]):
            size += len(piece.encode("utf-8", "surrogatepass"))
            if size > MAX_OUTPUT_BYTES:
                return {"error": f"the output exceeds {MAX_OUTPUT_BYTES} bytes"}
            pieces.append(piece)
    except Refused as words:
        return {"error": str(words)[:MAX_WORDS], "refused": True}
    except (RecursionError, MemoryError) as error:
        return {"error": f"exceeds the memory or recursion limit ({type(error).__name__})"}
    except Exception as error:  # a template can raise any exception of Python objects
        return {"error": f"{type(error).__name__}: {str(error)[:MAX_WORDS]}"}
    return {"text": "".join(pieces)}


def limit_time() -> None:
    """Allow CPU_SECONDS from now, or what a limit of the user leaves; the kernel then kills the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]  # it can be lowered only
    resource.setrlimit(resource.RLIMIT_CPU, (lower(int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1, most), most))


def lower(limit: int, most: int) -> int:
    """The lower of two limits, of which `most` may be none."""
    return limit if most == resource.RLIM_INFINITY else min(limit, most)


def main() -> None:
    """Serve until stdin ends, or the front end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open("/proc/self/statm") as file:
        base = int(file.read().split()[0]) * resource.getpagesize()
    space = lower(base + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1])
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sandbox = environment()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        limit_time()
        sys.stdout.write(json.dumps(answer(sandbox, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

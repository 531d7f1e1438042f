"""The process that renders chat templates: reads one JSON request a line, writes one JSON answer a line.

Jinja's environment is set up as transformers does it (utils/chat_template_utils.py): trimmed blocks, loop controls,
`tojson`, `raise_exception`, `strftime_now`, and `generation` blocks that only mark what the model wrote.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2
MEMORY_BYTES = 512 * 2**20  # of address space beyond what the started process has
MAX_OUTPUT_BYTES = 2**20


class Refused(Exception):
    """The template called raise_exception."""


class GenerationMark(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` renders its body; the marks matter to training only."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise Refused(str(message))


def strftime_now(format: str) -> str:
    """The date as templates want it."""
    return datetime.datetime.now().strftime(format)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without the HTML escapes of jinja's own filter."""
    separators, sort_keys = options.get("separators"), bool(options.get("sort_keys", False))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox with what chat templates may use."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMark, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return made


def answer(sandbox: ImmutableSandboxedEnvironment, request: dict[str, Any]) -> dict[str, Any]:
    """{"text"} or {"error", "refused"}."""
    try:
        pieces, size = [], 0
        for piece in sandbox.from_string(request["template"]).generate(**request["variables"]):
            size += len(piece.encode("utf-8", "surrogatepass"))
            if size > MAX_OUTPUT_BYTES:
                return {"error": f"it writes more than {MAX_OUTPUT_BYTES} bytes"}
            pieces.append(piece)
    except Refused as words:
        return {"error": str(words), "refused": True}
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    except (RecursionError, MemoryError) as error:
        return {"error": f"it exceeds the limit of memory or depth ({type(error).__name__})"}
    return {"text": "".join(pieces)}


def limit_time() -> None:
    """Allow CPU_SECONDS from now; the kernel ends the process after that."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, resource.RLIM_INFINITY))


def main() -> None:
    """Serve until stdin ends."""
    with open("/proc/self/statm") as file:
        base = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (base + MEMORY_BYTES, base + MEMORY_BYTES))
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

"""Hostile chat templates: no escape from the sandbox, every bomb ended in time, and the next render works."""

from __future__ import annotations

import copy
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import ModelFiles
from localq.text import end_of_turn, template, turn_marks
from tests.support.text import tiny_tokenizers

MESSAGES = [{"role": "user", "content": "SAFE"}]
SECONDS = 30.0  # until the error, beside other work; without a limit most of these never end

# Each tries for Python's insides; `{0}` in the text is never filled. What would tell of success is in `SECRETS`.
ESCAPES = {
    "class-walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class-item": "{{ ''['__class__']['__base__']['__subclasses__']() }}",
    "tuple-base": "{{ ().__class__.__bases__[0].__subclasses__()[100] }}",
    "attr-filter": "{{ '' | attr('__class__') | attr('__mro__') }}",
    "attr-join": "{{ messages | attr(['__cl', 'ass__'] | join) | attr('__base__') }}",
    "attr-hex": "{{ ''['\\x5f\\x5fclass\\x5f\\x5f'] }}{{ '' | attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "attr-dot-path": "{{ [''] | map(attribute='__class__.__mro__') | list }}",
    "map-attr": "{{ [''] | map('attr', '__class__') | map('attr', '__subclasses__') | list }}",
    "selectattr": "{{ [''] | selectattr('__class__') | list | length }}{{ ['SAFE'] | groupby('__class__') }}",
    "sort-attribute": "{{ ['a', 'b'] | sort(attribute='__class__.__name__') }}",
    "sum-attribute": "{{ [messages] | sum(attribute='__class__', start='') }}",
    "unique-attribute": "{{ [messages] | unique(attribute='__class__.__subclasses__') | list }}",
    "format-method": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format-map": "{{ '{x.__class__.__base__}'.format_map({'x': ''}) }}",
    "format-indirect": "{{ ('{0.__class__.__init__.__globals__}' | attr('format'))(range) }}",
    "format-map-filter": "{{ ['{0.__class__}'] | map('attr', 'format') | map('string') | list }}",
    "format-by-map": "{% set f = '{0.__class__.__base__}'.format %}{{ f(messages) }}",
    "format-by-call": "{% call(x) ''.format() %}{% endcall %}{{ '{a.__init__}'.format(a=raise_exception) }}",
    "percent-map": "{{ '%(a)s' | format(a=raise_exception.__globals__) }}",
    "cycler-globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "joiner-globals": "{{ joiner.__init__.__globals__['os'].environ }}",
    "namespace-globals": "{{ namespace.__init__.__globals__.os.listdir('/') }}",
    "lipsum-globals": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "lipsum-builtins": "{{ lipsum.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "function-globals": "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
    "function-code": "{{ strftime_now.__code__.co_consts }}",
    "filter-globals": "{{ self._TemplateReference__context.environment.filters.tojson.__globals__ }}",
    "self-context": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context }}",
    "context-environment": "{{ self.environment.globals }}{{ environment.from_string('x') }}",
    "macro-globals": "{% macro m() %}{% endmacro %}{{ m.__call__.__func__.__globals__ }}{{ m._func.__globals__ }}",
    "caller-frames": "{% macro m() %}{{ caller.__globals__ }}{{ caller._func }}{% endmacro %}"
    "{% call m() %}{% endcall %}",
    "loop-internals": "{% for x in [1] %}{{ loop.__init__.__globals__ }}{{ loop._iterator.gi_frame }}{% endfor %}",
    "generator-frame": "{{ ([1] | map('string')).gi_frame.f_globals }}",
    "generator-code": "{{ (messages | map('length')).gi_code.co_consts }}",
    "frame-back": "{% set g = messages | select %}{{ g.gi_frame.f_back.f_back.f_builtins }}",
    "traceback": "{{ raise_exception.__traceback__ }}{{ (1).__class__.__init__.__wrapped__ }}",
    "undefined-globals": "{{ nothing.__init__.__globals__ }}{{ nothing._undefined_exception }}",
    "undefined-class": "{{ nothing.__class__ }}{{ nothing | attr('__class__') }}",
    "include": "{% include '/etc/passwd' %}",
    "include-ignored": "{% include ['/etc/passwd', '../secret'] ignore missing %}",
    "import": "{% import 'os' as os %}{{ os.environ }}",
    "from-import": "{% from '/etc/passwd' import root %}{{ root }}",
    "extends": "{% extends '/etc/passwd' %}",
    "extends-object": "{% extends raise_exception %}",
    "request": "{{ request.application.__globals__.__builtins__.__import__('os').popen('id').read() }}",
    "config": "{{ config.items() }}{{ g.pop.__globals__ }}{{ url_for.__globals__ }}",
    "builtins": "{{ __import__('os').environ }}{{ open('/etc/passwd').read() }}{{ eval('1') }}",
    "type-call": "{{ type('X', (), {}) }}{{ object() }}{{ getattr('', '__class__') }}",
    "mro": "{{ dict.mro() }}{{ namespace.mro() }}{{ range.__class__.mro(range) }}",
    "do": "{% do messages.append(1) %}",
    "debug": "{% debug %}",
    "mutate-append": "{{ messages.append({'role': 'system', 'content': 'EVIL'}) }}{{ messages }}",
    "mutate-update": "{{ messages[0].update(content='EVIL') }}{{ messages }}",
    "mutate-pop": "{% set x = messages.pop() %}{{ x }}{% set y = messages.clear() %}",
    "mutate-setitem": "{{ messages[0].__setitem__('content', 'EVIL') }}{{ messages }}",
    "mutate-attr": "{{ (messages | attr('append'))('EVIL') }}{{ messages }}",
    "mutate-map": "{{ [messages] | map('attr', 'clear') | map('string') | list }}",
    "mutate-via-set": "{% set messages[0].content = 'EVIL' %}{{ messages }}",
    "namespace-dunder": "{% set ns = namespace() %}{% set ns.__class__ = 'EVIL' %}{{ ns.__class__ }}",
    "namespace-init": "{{ namespace(__init__=1, __class__='EVIL') }}",
    "namespace-attrs": "{% set ns = namespace() %}{% set ns._Namespace__attrs = range %}{{ ns.x }}",
    "dict-class": "{{ dict(a=1).__class__.__base__.__subclasses__() }}{{ dict.__base__ }}",
    "string-translate": "{{ 'a'.translate.__self__.__class__ }}{{ 'a'.join.__objclass__ }}",
    "bound-self": "{{ ''.join.__self__ }}{{ tojson.__self__ }}{{ messages.count.__self__.__class__ }}",
    "urlize-markup": "{{ ('x' | escape).__class__ }}{{ ('x' | escape).unescape.__func__ }}",
    "xmlattr": "{{ {'__class__': lipsum.__globals__} | xmlattr }}",
    "tojson-object": "{{ raise_exception | tojson }}{{ self | tojson }}",
    "pprint-object": "{{ messages.__class__ | pprint }}",
    "select-test": "{{ [1] | select('__class__') | list }}",
    "filter-by-name": "{{ [''] | map('__import__') | list }}",
    "async": "{{ cycler('a').next.__func__.__globals__ }}{{ joiner().__class__ }}",
    "block-super": "{% block b %}{{ super.__globals__ }}{{ self.b.__globals__ }}{% endblock %}",
    "recursive-loop": "{% for x in [[1]] recursive %}{{ loop.__call__.__globals__ }}{% endfor %}",
    "autoescape": "{% autoescape true %}{{ lipsum.__globals__ }}{% endautoescape %}",
}
SECRETS = ("root:", "uid=", "PATH", "PYTHONPATH", "LOCALQ_CANARY", "<module", "<class", "<type", "<code", "<frame",
           "__builtins__", "subprocess", "EVIL", "site-packages", "posix")  # fmt: skip

BOMBS = {
    "nested-ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested-ranges-written": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "range-over-limit": "{% for a in range(10000000000) %}{% endfor %}",
    "multiplied-string": "{{ 'a' * 10**10 }}",
    "multiplied-list": "{{ [0] * 10**10 }}",
    "multiplied-below-limit": "{{ 'a' * (300 * 10**6) }}",
    "multiplied-unwritten": "{% set x = ('a' * (400 * 10**6)) | length %}{{ x }}",
    "power": "{{ 9**(9**9) }}",
    "power-of-power": "{{ (9**9)**(9**7) }}",
    "big-number-as-text": "{{ 2**100000 }}",
    "modulo-of-power": "{% set x = 7**(9**8) % 11 %}{{ x }}",
    "doubled-string": "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "doubled-list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "replaced-string": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}{{ n.x }}",
    "recursive-macro": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "recursive-macro-tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursive-loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "padding-percent": "{{ '%1000000000d' | format(1) }}",
    "padding-percent-operator": "{{ '%2000000000s' % 'a' }}",
    "padding-format": "{{ '{:>1000000000}'.format(1) }}",
    "padding-center": "{{ 'a' | center(10000000000) }}",
    "padding-ljust": "{{ 'a'.ljust(3000000000) }}",
    "padding-zfill": "{{ '1'.zfill(450000000) }}",
    "indent": "{{ ('a\\n' * 100000) | indent(100000) }}",
    "wordwrap": "{{ ('a' * 10000000) | wordwrap(1) }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "batch": "{{ range(99999) | batch(1000000000, 0) | list | length }}",
    "slice": "{{ range(9) | slice(1000000000) | list }}",
    "join": "{{ range(99999) | join('a' * 100000) }}",
    "sort": "{% for i in range(99999) %}{% set x = range(99999) | sort | list %}{% endfor %}",
    "cartesian-strings": "{% for a in range(9999) %}{% set x = 'a' * (99999990 + a) %}{% endfor %}",
    "long-output": "{% for a in range(99999) %}{{ '0123456789abcdef' }}{% endfor %}",
    "long-output-in-blocks": "{% for a in range(9) %}{% set x %}{{ 'a' * 900000 }}{% endset %}{{ x }}{% endfor %}",
    "long-refusal": "{{ raise_exception('a' * 50000000) }}",
    "long-name": "{{ nothing." + "a" * 60000 + ".b }}",
    "deep-brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep-lists": "{{ " + "[" * 30000 + "]" * 30000 + " }}",
    "deep-ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep-loops": "{% for a in range(9) %}" * 30 + "x" + "{% endfor %}" * 30,
    "deep-not": "{{ " + "not " * 15000 + "1 }}",
    "long-sum": "{{ 1" + "+1" * 30000 + " }}",
    "many-filters": "{{ 1" + "|string" * 9000 + " }}",
    "over-64-KiB": "a" * (64 * 1024 + 1),
    "over-64-KiB-in-bytes": "é" * (32 * 1024 + 1),
    "deep-over-64-KiB": "{% if 1 %}" * 9000 + "{% endif %}" * 9000,
    "regular-expression": "{{ ('a' * 100000 + '<') | striptags | urlize }}",
    "unterminated": "{% for a in b %}",
    "unknown-tag": "{% frobnicate %}",
    "unknown-filter": "{{ 1 | frobnicate }}",
    "date-bomb": "{{ strftime_now('%Y' * 100000) | length * strftime_now('%1000000000Y') | length }}",
}
HARMLESS = {"deep-not", "long-sum", "many-filters", "long-name", "regular-expression", "multiplied-unwritten",
            "modulo-of-power", "date-bomb", "batch", "deep-loops", "deep-ifs"}  # fmt: skip
# ... may also end well, where Python is quick or lenient enough; the others must end in an error.


def rendered(text: str) -> tuple[str | None, LocalqError | None]:
    """What comes of the template: a text or an error."""
    try:
        return template.render(text, MESSAGES, {"bos_token": "<s>"}), None
    except LocalqError as error:
        return None, error


@pytest.mark.parametrize("name", ESCAPES)
def test_no_template_escapes(name):
    start = time.monotonic()
    text, error = rendered(ESCAPES[name])
    shown = str(error) if text is None else text
    assert not [secret for secret in SECRETS if secret in shown], shown[:500]
    assert error is None or error.exit_code == ExitCode.BAD_FILE
    assert rendered("{{ messages }}") == (str(MESSAGES), None)
    assert time.monotonic() - start < SECONDS


def test_the_secrets_are_what_an_escape_shows():
    """The corpus can fail: without a sandbox many of its templates show what must not be shown."""
    shown = 0
    for text in (text for text in ESCAPES.values() if "open(" not in text):
        environment = jinja2.Environment(extensions=["jinja2.ext.do"])
        environment.globals["raise_exception"] = rendered
        try:
            written = environment.from_string(text).render(messages=copy.deepcopy(MESSAGES))
        except Exception:
            continue
        shown += any(secret in written for secret in SECRETS)
    assert shown >= 15


@pytest.mark.parametrize("name", BOMBS)
def test_no_template_costs_time_or_memory(name):
    start = time.monotonic()
    text, error = rendered(BOMBS[name])
    assert text is None or name in HARMLESS, str(text)[:100]
    assert error is None or (error.exit_code in (ExitCode.BAD_FILE, ExitCode.FAILURE) and len(str(error)) < 1000)
    assert time.monotonic() - start < SECONDS
    assert rendered("{{ messages[0].content }}") == ("SAFE", None)


def test_the_limit_is_processor_time_and_says_so():
    _, error = rendered(BOMBS["nested-ranges"])
    assert isinstance(error, template.LimitExceeded)
    assert error.why == "rendering takes more than 2 s of CPU time"
    assert "`localq run`" not in str(error)  # it renders the template, too


@pytest.mark.parametrize("seconds", [1, 2])
def test_a_limit_of_the_user_is_not_the_fault_of_a_template(seconds):
    user_limit_is_named(under_limit(resource.RLIMIT_CPU, seconds, BOMBS["nested-ranges"]), seconds)


def test_without_cpu_time_nothing_can_be_rendered(monkeypatch):
    """The limit of 0 s is the rendering process's alone: the kernel would end this one too, at any of its ticks."""

    def start_without_time(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        process = start()
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (0, 0))
        return process

    monkeypatch.setattr(template, "_CHILD", template._Child())
    monkeypatch.setattr(template.processes, "start_child", start_without_time)
    monkeypatch.setattr(template, "_user_limit_s", lambda: 0.0)
    said, error = rendered("{{ 1 }}")
    assert said is None
    user_limit_is_named(str(error), 0)


def user_limit_is_named(said: str, seconds: int) -> None:
    assert f"rendering needs more CPU time than this process is allowed to use ({seconds} s)" in said
    assert "ulimit -t" in said
    assert "malicious" not in said


@pytest.mark.parametrize(
    ("kind", "most"), [(resource.RLIMIT_CPU, 1), (resource.RLIMIT_CPU, 100), (resource.RLIMIT_AS, 400 * 2**20)]
)
def test_a_limit_of_the_user_that_is_enough_changes_nothing(kind, most):
    assert under_limit(kind, most, "{{ 1 }}") == "1 " * 3


def under_limit(kind: int, most: int, text: str) -> str:
    """What three renders print in a process that gets this limit, and whose imports do not count against it."""
    code = (
        "import os, resource, sys; from localq.errors import LocalqError; from localq.text import template\n"
        "if os.fork(): sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "resource.setrlimit(int(sys.argv[1]), (int(sys.argv[2]),) * 2)\n"
        "try:\n    for _ in range(3): print(template.render(sys.argv[3], []), end=' ')\n"
        "except LocalqError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(kind), str(most), text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_a_child_that_is_killed_did_not_take_too_long():
    """The kernel ends a process that takes too much processor time with SIGXCPU, and with SIGKILL for its memory."""
    assert rendered("{{ 1 }}") == ("1", None)
    child = template._CHILD._process
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)  # so that it is killed amid the request
    killer = threading.Timer(0.2, os.kill, (child.pid, signal.SIGKILL))
    killer.start()
    _, error = rendered("{{ messages[0].content }}")
    killer.join()
    assert isinstance(error, template.LimitExceeded)
    assert error.why == "rendering ran out of memory or crashed"
    assert rendered("{{ messages[0].content }}") == ("SAFE", None)


def test_a_slow_machine_is_not_a_hostile_template(monkeypatch):
    assert rendered("{{ 1 }}") == ("1", None)
    child = template._CHILD._process
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)  # gets no processor at all
    monkeypatch.setattr(template, "WALL_SECONDS", 0.3)
    _, error = rendered("{{ messages[0].content }}")
    assert isinstance(error, template.LimitExceeded)
    assert error.exit_code == ExitCode.FAILURE
    assert "rendering got only 0.0 s of CPU time in 0 s because the machine is busy" in error.why
    assert "malicious" not in str(error)
    monkeypatch.undo()
    assert rendered("{{ messages[0].content }}") == ("SAFE", None)


def test_a_busy_machine_costs_no_reply_its_end(monkeypatch):
    """The end of a turn and its marks are read from the rendered template: without them nothing is opened."""
    monkeypatch.setattr(template, "render", _busy)
    backend = tiny_tokenizers.byte_level()
    with pytest.raises(template.LimitExceeded):
        end_of_turn.stop_ids(backend, {}, ModelFiles(Path(), "safetensors", {}, {}, {}, "{{ messages }}"))
    with pytest.raises(template.LimitExceeded):
        turn_marks.find(backend, {}, (), "{{ messages }}")


def _busy(*arguments: object, **variables: object) -> str:
    raise template._busy(0.1)

"""The process that runs model-written functions: writes "ready", reads a JSON request, writes the verdict.

A seccomp filter (linux/seccomp.h, linux/filter.h) refuses every system call but `SYSTEM_CALLS`, which reach memory, the
clock and the open pipes: no file, socket or process. Modules are imported before the filter is set.
"""

from __future__ import annotations

import bisect
import collections
import collections.abc
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import heapq
import io
import itertools
import json
import math
import operator
import os
import platform
import random
import re
import resource
import statistics
import string
import struct
import sys
import textwrap
import typing
from typing import Any

from localq import processes

# What functions import; one that needs another module fails.
MODULES = (
    bisect, collections, collections.abc, copy, dataclasses, datetime, decimal, enum, fractions, functools, heapq,
    itertools, math, operator, random, re, statistics, string, textwrap, typing,
)  # fmt: skip
READY, NO_SANDBOX = "ready", "no sandbox"
PASSED, FAILED = "passed", "failed"
CPU_SECONDS = 3
MEMORY_BYTES = 256 * 2**20  # of address space beyond what the started process has

# Linux's numbers of read, write, close, fstat, lseek, mmap, mprotect, munmap, mremap, brk, madvise, rt_sigaction,
# rt_sigprocmask, rt_sigreturn, sigaltstack, futex, sched_yield, getpid, gettimeofday, clock_gettime, clock_getres,
# clock_nanosleep, nanosleep, getrandom, exit, exit_group.
SYSTEM_CALLS = {
    "x86_64": (
        0, 1, 3, 5, 8, 9, 10, 11, 25, 12, 28, 13, 14, 15, 131, 202, 24, 39, 96, 228, 229, 230, 35, 318, 60, 231,
    ),
    "aarch64": (
        63, 64, 57, 80, 62, 222, 226, 215, 216, 214, 233, 134, 135, 139, 132, 98, 124, 172, 169, 113, 114, 115, 101,
        278, 93, 94,
    ),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of linux/audit.h
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # SECCOMP_RET_*; refused calls get EPERM
_CALL_AT, _ARCHITECTURE_AT = 0, 4  # in struct seccomp_data
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def bpf(machine: str) -> bytes:
    """The filter for a machine of `SYSTEM_CALLS`."""
    calls = SYSTEM_CALLS[machine]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _CALL_AT),
        *((_EQUAL, len(calls) - at, 0, call) for at, call in enumerate(calls)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def enter_sandbox() -> bool:
    """Give up all system calls but `SYSTEM_CALLS`, for good. False if this machine cannot do that."""
    machine = platform.machine()
    if machine not in SYSTEM_CALLS:
        return False
    code = bpf(machine)
    kept = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(kept, ctypes.c_void_p))
    call = ctypes.CDLL(None).prctl
    if call(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return not call(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0)


def set_limits() -> None:
    """Limit processor time, memory and files; the kernel ends a process that takes more."""
    with open("/proc/self/statm") as file:
        space = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + CPU_SECONDS + 1
    for name, limit in (("AS", space), ("CPU", seconds), ("FSIZE", 0), ("CORE", 0)):
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]  # it can be lowered only
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, limit))


def judge(source: str, checks: str) -> str:
    """Run `source`, then `checks` in its namespace; `PASSED` if neither raises."""
    names: dict[str, Any] = {"__name__": "reply"}
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for text in (source, checks):
                exec(compile(text, "reply", "exec"), names)
    except BaseException:  # code can raise anything, SystemExit too
        return FAILED
    return PASSED


def main() -> None:
    """Answer one request: {"source", "checks", "nonce"}. The nonce follows the verdict."""
    processes.end_with_parent()
    set_limits()
    out = sys.stdout
    can_run = enter_sandbox()
    out.write(READY if can_run else NO_SANDBOX)
    out.flush()
    if can_run:
        request = json.loads(sys.stdin.readline())
        out.write(f"{judge(request['source'], request['checks'])} {request['nonce']}")
        out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

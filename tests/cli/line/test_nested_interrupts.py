"""Ctrl-C while Ctrl-C is answered: whatever it interrupts, nothing waits for itself."""

from __future__ import annotations

import subprocess
import sys

# At the first to the last thing that the handler of a press does, one more press.
PRESSES = """
import signal, sys, threading
from localq.cli.line.session import stop_on_interrupt

class Session:
    stopped = threading.Event()
    def stop(self):
        self.stopped.set()

def press_within(number):
    session, seen = Session(), 0
    session.stopped = threading.Event()

    def within(frame, event, argument):
        nonlocal seen
        if frame.f_code is handler.__code__ or inside(frame.f_back):
            seen += 1
            if seen == number:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    def inside(frame):
        return frame is not None and (frame.f_code is handler.__code__ or inside(frame.f_back))

    with stop_on_interrupt(session) as pressed:
        handler = signal.getsignal(signal.SIGINT)
        try:
            sys.setprofile(within)
            signal.raise_signal(signal.SIGINT)
            sys.setprofile(None)
        except KeyboardInterrupt:
            pass
        assert pressed.is_requested and session.stopped.wait(10), number
    return seen >= number

number = 1
while press_within(number):
    number += 1
print(number)
"""


def test_a_press_within_a_press_waits_for_nothing():
    done = subprocess.run([sys.executable, "-c", PRESSES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3  # its begin, what it does, its end

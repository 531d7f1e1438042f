"""What a terminal sends, read so that nothing of it ends the chat: bytes that are no text, sequences that are no keys.

Textual's own reading (8.2, drivers/linux_driver.py) ends the app with a traceback on both: a terminal that is not set
to UTF-8, a paste of something binary, a line that drops bytes.
"""

from __future__ import annotations

import codecs
import os
import selectors
from collections.abc import Iterator

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

CHUNK_BYTES = 4096
TICK_S = 0.1  # as often as this it is looked whether a lone Esc is one, and whether to end


class Keys:
    """Bytes in, Textual's messages out."""

    def __init__(self, debug: bool = False) -> None:
        self._debug = debug
        self._decode = codecs.getincrementaldecoder("utf-8")("ignore").decode
        self._parser = XTermParser(debug)

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes; what cannot be read is dropped."""
        text = self._decode(data)
        try:
            yield from self._parser.feed(text) if text else ()
        except (ValueError, OverflowError):  # key codes that are no characters
            self._parser = XTermParser(self._debug)

    def tick(self) -> Iterator[Message]:
        """What is complete because nothing more came."""
        yield from self._parser.tick()


class TerminalDriver(LinuxDriver):
    """Textual's driver with reading of its own."""

    def run_input_thread(self) -> None:
        """Until the app ends, or the terminal is gone."""
        keys = Keys(self._debug)
        with selectors.DefaultSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(TICK_S):
                    try:
                        data = os.read(self.fileno, CHUNK_BYTES)
                    except OSError:
                        return
                    if not data:
                        return
                    for message in keys.feed(data):
                        self.process_message(message)
                for message in keys.tick():
                    self.process_message(message)

"""What `ssh -t 127.0.0.1 COMMAND` is, where there is none: `python ssh_client.py PORT KEY KNOWN_HOSTS COMMAND`.

The terminal is raw meanwhile; keys, windows and the exit status are passed on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty

import asyncssh


async def talk(port: str, key: str, known: str, command: str) -> int:
    """The exit status of `command`; 255 where the connection ended."""
    loop = asyncio.get_running_loop()
    async with asyncssh.connect(
        "127.0.0.1", int(port), username="tester", client_keys=[key], known_hosts=known, config=None, agent_path=None
    ) as connection:
        process = await connection.create_process(
            command, term_type=os.environ["TERM"], term_size=tuple(os.get_terminal_size()), encoding=None
        )

        def resized() -> None:
            process.change_terminal_size(*os.get_terminal_size())

        loop.add_signal_handler(signal.SIGWINCH, resized)
        loop.add_reader(0, lambda: process.stdin.write(os.read(0, 4096)))
        while data := await process.stdout.read(65536):
            os.write(1, data)
        await process.wait_closed()
        return 255 if process.exit_status is None else process.exit_status


def main() -> int:
    """See the module."""
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        return asyncio.run(talk(*sys.argv[1:]))
    except (OSError, asyncssh.Error):
        return 255
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.exit(main())

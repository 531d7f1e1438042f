"""An SSH server for tests, on this machine alone: each session is a shell's command in a pty, as OpenSSH's sshd has it.

What a session is given, is what sshd gives (openssh-portable, session.c: do_setup_env, do_child): nothing of the
server's own environment but what it is told, TERM and the window of the client, and SSH_TTY. When the connection is
cut, the pty is closed, which is what the program hears of it. Keys are made on the fly.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import asyncssh

from tests.support.cli.slow_link import SlowLink

WAIT_S = 20.0
USER = "tester"
OPENSSH = "/usr/bin/ssh"
LEFT_BY = ("iflag", "oflag", "cflag", "lflag", "ispeed", "ospeed", "cc")


class Session(asyncssh.SSHServerSession[bytes]):
    """One channel: a pty with a process in it. `written` bytes came from that."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """gap_s: keys come byte by byte, so far apart; 0 = as the client sends them. `gaps_s`: as they came."""
        self.environment, self.gap_s, self.gaps_s = dict(environment), 0.0, list[float]()
        self.ended, self.written = threading.Event(), 0
        self._next_s = self._last_s = 0.0
        self.on_their_way = 0  # keys, one by one
        self.left = ["it has not ended"]  # what the terminal was not given back
        self.process: subprocess.Popen[bytes] | None = None
        self._master, self._term, self._command = -1, "", ""

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        self._chan, self._loop = chan, asyncio.get_running_loop()

    def pty_requested(self, term_type: str, term_size: tuple[int, int, int, int], term_modes: object) -> bool:
        self._term, self._size = term_type, term_size
        return True

    def exec_requested(self, command: str) -> bool:
        self._command = command
        return bool(self._term)

    def session_started(self) -> None:
        """Run what was asked for by the shell."""
        self._master, slave = pty.openpty()
        self.terminal_size_changed(*self._size)
        self._before = termios.tcgetattr(self._master)
        peer, here = (self._chan.get_extra_info(name)[:2] for name in ("peername", "sockname"))
        sent = {each.decode(): value.decode() for each, value in self._chan.get_environment_bytes().items()}
        given = {
            "USER": USER, "LOGNAME": USER, "SHELL": "/bin/sh", "PATH": "/usr/local/bin:/usr/bin:/bin",
            "TERM": self._term, "SSH_TTY": os.ttyname(slave), "SSH_CLIENT": f"{peer[0]} {peer[1]} {here[1]}",
            "SSH_CONNECTION": f"{peer[0]} {peer[1]} {here[0]} {here[1]}",
            **{name: value for name, value in sent.items() if name == "LANG" or name.startswith("LC_")},
        }  # fmt: skip

        def take() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            ["/bin/sh", "-c", self._command], env={**self.environment, **given}, cwd=self.environment["HOME"],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=take,
        )  # fmt: skip
        os.close(slave)
        self.resume_writing()

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, pixwidth, pixheight))

    def data_received(self, data: bytes, datatype: object) -> None:
        if not self.gap_s:
            self._key(data)
            return
        self._next_s = max(self._next_s, self._loop.time())
        for byte in data:
            self._loop.call_at(self._next_s, self._key, bytes([byte]))
            self._next_s += self.gap_s
            self.on_their_way += 1

    def _key(self, data: bytes) -> None:
        now = self._loop.time()
        self.gaps_s.append(now - self._last_s)
        self._last_s = now
        self.on_their_way = max(0, self.on_their_way - 1)
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._master, data)  # of keys and pastes of tests: less than a pty takes

    def pause_writing(self) -> None:
        self._loop.remove_reader(self._master)

    def resume_writing(self) -> None:
        self._loop.add_reader(self._master, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # nobody has the terminal any more
            self._loop.remove_reader(self._master)
            self._loop.create_task(self._finish())
            return
        self.written += len(data)
        self._chan.write(data)

    async def _finish(self) -> None:
        code = await asyncio.to_thread(self.process.wait)
        after = termios.tcgetattr(self._master)
        self.left = [name for name, a, b in zip(LEFT_BY, self._before, after, strict=True) if a != b]
        self._chan.exit(code)

    def connection_lost(self, exc: Exception | None) -> None:
        """The program's terminal hangs up."""
        if self._master >= 0:
            self._loop.remove_reader(self._master)
            os.close(self._master)
            self._master = -1
        self.ended.set()


class _Server(asyncssh.SSHServer):
    def __init__(self, owner: SshServer) -> None:
        self._owner = owner

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._owner.connections.append(conn)

    def session_requested(self) -> Session:
        return self._owner.new_session()


class SshServer:
    """A server in a thread, at 127.0.0.1 behind a link of `delay_s` each way; `sessions` in the order they came."""

    def __init__(self, folder: Path, environment: Mapping[str, str], delay_s: float = 0.0) -> None:
        """folder: for the keys. environment: of sessions, besides sshd's."""
        self.folder, self.environment = folder, environment
        self.sessions: list[Session] = []
        self.connections: list[asyncssh.SSHServerConnection] = []
        self.key, self.known = folder / "id_test", folder / "known_hosts"
        self._host, self._user = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        self.link = SlowLink(delay_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def new_session(self) -> Session:
        self.sessions.append(Session(self.environment))
        return self.sessions[-1]

    def client(self, name: str, line: str) -> list[str]:
        """The command by which a user has a shell run `line` over there: `name` is "openssh" or "asyncssh"."""
        port = str(self.port)
        if name == "asyncssh":
            return [sys.executable, "-m", "tests.support.cli.ssh_client", port, str(self.key), str(self.known), line]
        options = (f"UserKnownHostsFile={self.known}", "IdentitiesOnly=yes", "GlobalKnownHostsFile=none")
        settings = [word for option in options for word in ("-o", option)]
        place = ["-i", str(self.key), "-p", port, "-l", USER, "-tt", "127.0.0.1"]
        return [OPENSSH, "-F", "none", *settings, *place, line]

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    async def _listen(self) -> int:
        trusted = asyncssh.import_authorized_keys(self._user.export_public_key().decode())
        self._acceptor = await asyncssh.create_server(
            lambda: _Server(self), "127.0.0.1", 0, server_host_keys=[self._host], authorized_client_keys=trusted,
            encoding=None, line_editor=False, keepalive_interval=0,
        )  # fmt: skip
        return await self.link.open(self._acceptor.get_port())

    async def _close(self) -> None:
        self._acceptor.close()
        await self.link.close()
        await asyncio.gather(*(each.wait_closed() for each in self.connections))
        await self._acceptor.wait_closed()

    def __enter__(self) -> SshServer:
        self._thread.start()
        self.port = self._do(self._listen())
        self.key.write_bytes(self._user.export_private_key())
        self.key.chmod(0o600)
        host = self._host.export_public_key().decode()
        self.known.write_text(f"[127.0.0.1]:{self.port} {host}")
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for session in self.sessions:
            if session.process is not None and session.process.poll() is None:
                session.process.kill()
                session.process.wait()

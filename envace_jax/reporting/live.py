"""The report while its runs go on: a small server for this machine, whose page asks every few seconds what is new.

The page is made anew when a file of a run has changed and somebody asks, and not so often that it takes the run's
processors: at most a tenth of the time goes into it. Nothing is written.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from envace_jax.config import UserError
from envace_jax.reporting import page
from envace_jax.reporting.page import Report
from envace_jax.reporting.read import WATCHED

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # what the server may be called: a page that came from elsewhere may not ask it
REST = 9.0  # so many times as long as the last making took, nothing is made


class Current:
    """The newest report of some work folders. For several threads."""

    def __init__(self, workdirs: Sequence[Path]):
        self._workdirs = tuple(workdirs)
        self._lock = threading.Lock()
        self._report = Report({}, {})
        self._version = ""
        self._free_at = 0.0  # of time.monotonic

    def report(self) -> tuple[str, Report]:
        """A name for the files' state, and the report of it. Raises UserError where a folder is no run's (any more)."""
        with self._lock:
            version = self._state()
            began = time.monotonic()
            if version != self._version and (not self._version or began >= self._free_at):
                found = page.build(self._workdirs, live=True)
                self._report = dataclasses.replace(found, data=found.data | {"at": version})
                self._version = version
                self._free_at = time.monotonic() + REST * (time.monotonic() - began)
            return self._version, self._report

    def _state(self) -> str:
        """Changes whenever a file that the report shows does."""
        told = hashlib.sha256()
        for workdir in self._workdirs:
            dumps = sorted((workdir / "rollouts").glob("*"))
            for path in (*(workdir / name for name in WATCHED), *dumps):
                try:
                    known = path.stat()
                except OSError:
                    continue
                told.update(f"{path}\0{known.st_size}\0{known.st_mtime_ns}\0".encode())
        return told.hexdigest()[:16]


class Server(ThreadingHTTPServer):
    """Serves `/`, the page, and `/data?have=VERSION`: what is new as JSON, or 204 where nothing is."""

    daemon_threads = True

    def __init__(self, workdirs: Sequence[Path], port: int):
        self.current = Current(workdirs)
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that has gone away, whatever was being read from it or sent to it, is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if self.headers.get("Host", "").rpartition(":")[0] not in NAMES:
            self._answer(403, "text/plain", "this server answers to its own address only")
            return
        if asked.path not in ("/", "/data"):
            self._answer(404, "text/plain", "there are / and /data here")
            return
        try:
            version, report = self.server.current.report()
        except UserError as error:
            self._answer(503, "text/plain", str(error))
            return
        if asked.path == "/":
            self._answer(200, "text/html", page.html(report, live=True))
        elif parse_qs(asked.query).get("have") == [version]:
            self._answer(204)
        else:
            news = {"version": version, "data": report.data, "viewer": report.viewer}
            self._answer(200, "application/json", page.to_json(news))

    def _answer(self, status: int, kind: str = "", text: str = "") -> None:
        body = text.encode("utf-8")
        packs = "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1000
        body = gzip.compress(body, 1) if packs else body
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        if packs:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


def serve(workdirs: Sequence[Path], port: int) -> int:
    """Serves the report until Ctrl-C. Raises UserError where a folder is no run's or the port cannot be had."""
    try:
        server = Server(workdirs, port)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"--port={port}: {why}; give another --port (0 takes a free one)") from None
    with server:
        server.current.report()  # so that a wrong folder is said at once
        print(f"report at {server.address} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
    return 0

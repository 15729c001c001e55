"""An OpenAI-compatible server in this process whose faults a test chooses, for tests of endpoints and judges."""

from __future__ import annotations

import collections
import contextlib
import http.server
import json
import socket
import struct
import threading
import time


class Heartbeat:
    """Notices a machine on which nothing moves for a while: `longest` is the longest time between two beats, in s."""

    def __init__(self):
        self.longest, self._stop = 0.0, threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _beat(self):
        last = time.monotonic()
        while not self._stop.wait(0.02):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now


class FaultyServer:
    """Answers chat completions with `answer(body) -> text`, unless `fault(number, body)` names what goes wrong with
    request `number` (0, 1, ...): None, "status N", "timeout", "truncated", "types", "reset" or "text TEXT"."""

    def __init__(self, answer, fault=lambda number, body: None, stall_s=1.0):
        self.answer, self.fault, self.stall_s = answer, fault, stall_s
        self.bodies, self.headers = [], []
        self.injected = collections.Counter()
        self.alive = self.most_alive = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self):
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                outer.handle(self)

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_):
                pass  # a client that has given up

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            server.server_close()

    def handle(self, request):
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self.alive += 1
            self.most_alive = max(self.most_alive, self.alive)
            fault = self.fault(number, body)
            self.injected[fault] += 1
        try:
            if fault == "timeout":
                time.sleep(self.stall_s)
        finally:  # before the reply: its reader may ask again before this thread runs on
            with self._lock:
                self.alive -= 1
        self.reply(request, body, fault)

    def reply(self, request, body, fault):
        if fault == "reset":
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
            return
        status = int(fault.split()[1]) if fault and fault.startswith("status") else 200
        text = fault.partition(" ")[2] if fault and fault.startswith("text") else self.answer(body)
        content = [text] if fault == "types" else text
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        data = json.dumps(
            {"choices": [{"message": {"role": "assistant", "content": content}}], "usage": usage}
        ).encode()
        if fault == "truncated":
            data = data[: len(data) // 2]
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

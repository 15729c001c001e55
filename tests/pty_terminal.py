"""A terminal for tests: a program runs on a pseudo-terminal, and what a person would see is kept by an emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pyte
from conftest import REPOSITORY

# The program takes its standard input for the terminal of its session, so that Ctrl-C reaches it. It does so itself:
# what a test's process does between fork and exec would be in the way of jax's threads.
# Ctrl-C is ignored by what a shell starts in the background, and by all that this starts; who types it is in front.
OWN_TERMINAL = (
    "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
)


class PtyTerminal:
    """Runs `code` in a Python process of its own on a terminal of the given size. To be used in a `with`."""

    def __init__(self, code: str, columns: int = 80, rows: int = 24, **environment: str) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._master, slave = pty.openpty()
        self._set_size(columns, rows)
        unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "COLORTERM")
        env = {name: value for name, value in os.environ.items() if name not in unset}
        env |= {"TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL + textwrap.dedent(code)],
            **{name: slave for name in ("stdin", "stdout", "stderr")},
            env=env, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> PtyTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()

    def hang_up(self) -> None:
        """Closes the terminal."""
        self._closing.set()
        self._reader.join()
        if self._master >= 0:
            os.close(self._master)
        self._master = -1

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self.screen.resize(rows, columns)
            self.screen.set_margins()  # as terminals do
            self._set_size(columns, rows)
        os.kill(self.process.pid, signal.SIGWINCH)

    def type(self, text: bytes) -> None:
        os.write(self._master, text)

    @property
    def lines(self) -> list[str]:
        """What the screen shows."""
        with self._lock:
            return [line.rstrip() for line in self.screen.display]

    @property
    def everything(self) -> list[str]:
        """What has left the screen at its top, and what it shows, without empty lines."""
        with self._lock:
            past = ["".join(row[i].data for i in range(self.screen.columns)) for row in self.screen.history.top]
            return [line.rstrip() for line in [*past, *self.screen.display] if line.strip()]

    def until(self, seen: Callable[[list[str]], Any], seconds: float = 120.0) -> list[str]:
        """Waits until the screen's lines are as `seen` wants them, and returns them."""
        end = time.monotonic() + seconds
        while not seen(lines := self.lines):
            assert time.monotonic() < end, "the terminal shows:\n" + "\n".join(lines)
            time.sleep(0.02)
        return lines

    def wait(self, seconds: float = 120.0) -> int:
        """The program's exit code, when all that it wrote is on the screen."""
        code = self.process.wait(seconds)
        self._reader.join(2)  # a guard of the terminal may be the last to write
        return code

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while not self._closing.is_set():
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # nobody has it open any more
                return
            with self._lock:
                self.output += piece
                self._stream.feed(piece)

"""The bottom rows of a terminal, kept apart from the text that scrolls above them.

What anybody else writes meanwhile (a print, a log of a library in C++, a program that was started) goes to the rows
above, since the terminal scrolls only those. The cursor is never left among the kept rows, so a traceback stands above
them too. However this process ends, the terminal is put right again. It knows nothing of what the rows say.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from typing import TextIO

SAVE, RESTORE = "\x1b7", "\x1b8"  # cursor and attributes
WHOLE = f"{SAVE}\x1b[r{RESTORE}\x1b[J"  # everything scrolls again, and what is below the cursor is erased
DOWN = "\x1bD"  # to the next row, where needed by scrolling; unlike a newline it stays in its column
PAUSE_S = 2.0  # so long without a drawing: the process was stopped, and another may have used the terminal

# Waits for this process's end. A line beforehand says that all is in order; else it was killed or aborted.
GUARD = r"read -r line || printf '\0337\033[r\0338\033[J'"


def plain(text: str) -> str:
    """The text without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def is_capable(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that knows of scrolling regions, as all but the dumbest do."""
    if os.name != "posix" or os.environ.get("TERM", "dumb") in ("dumb", "unknown", "emacs"):
        return False
    try:
        return stream.isatty() and min(os.get_terminal_size(stream.fileno())) > 0
    except (OSError, ValueError):  # not a file of the system
        return False


class Bottom:
    """The kept rows of the terminal that `stream` is. Not for several threads at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._file = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._rows = 0
        self._size = os.terminal_size((0, 0))
        self._text, self._looked = "", 0.0
        self._guard: subprocess.Popen[bytes] | None = None

    def size(self) -> os.terminal_size:
        """(columns, rows) of the terminal now."""
        return os.get_terminal_size(self._file)

    def draw(self, lines: Sequence[str]) -> None:
        """Shows `lines`, each narrower than the terminal, in as many rows; fewer than the terminal has.

        Raises OSError where the terminal is gone.
        """
        if self._guard is None:
            self._guard = _start_guard(self._file)
        size, rows, now = self.size(), len(lines), time.monotonic()
        if rows >= size.lines:
            lines, rows = [], 0
        room = ""
        if size != self._size or rows != self._rows or now - self._looked > PAUSE_S:
            # The cursor is always above the kept rows, also after the terminal has moved or folded what it shows.
            room = WHOLE + DOWN * rows + (f"\x1b[{rows}A" if rows else "")
            room += f"{SAVE}\x1b[1;{size.lines - rows}r{RESTORE}"
        first = size.lines - rows + 1
        text = "".join(f"\x1b[{first + number};1H\x1b[2K{line}" for number, line in enumerate(lines))
        if room or text != self._text:
            self._write(f"{room}{SAVE}\x1b[0m{text}{RESTORE}")
        self._size, self._rows, self._text, self._looked = size, rows, text, now

    def close(self) -> None:
        """Gives the rows back, empty."""
        if self._guard is None:
            return
        with contextlib.suppress(OSError):
            self._write(WHOLE)
        guard, self._guard = self._guard, None
        with contextlib.suppress(OSError):  # it was killed
            guard.communicate(b"closed\n")

    def _write(self, text: str) -> None:
        """In one piece, which nobody else's output can come between; not through the stream, which others use."""
        data = text.encode(self._encoding, "replace")
        while data:
            data = data[os.write(self._file, data) :]


def _start_guard(file: int) -> subprocess.Popen[bytes]:
    # Of a session of its own, so that Ctrl-C and the end of a job do not reach it.
    return subprocess.Popen(["/bin/sh", "-c", GUARD], stdin=subprocess.PIPE, stdout=file, start_new_session=True)

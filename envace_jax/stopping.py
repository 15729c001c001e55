"""SIGTERM, the notice before a machine is taken away: the run finishes its step, saves and ends in order.

A thread hears the signals, because Python's own handlers wait for the main thread, which may be busy on a device for
minutes. A second signal, SIGTERM or Ctrl-C, ends the process at once.

Python drops a KeyboardInterrupt that it raises in a destructor or in a callback of its garbage collector, of which jax
has one; such a Ctrl-C is sent again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

AGAIN_S = 0.05  # until a Ctrl-C that came to nothing is sent again


def end_with_reader() -> None:
    """Lets this process end in silence where whoever reads its output has gone (`... | head`). For commands that only
    print: one that writes files would leave them half done."""
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class Stopped(Exception):
    """The run ended in order before its last step, because a process of it was asked to."""

    def __init__(self, step: int):
        super().__init__(f"stopped after step {step}")
        self.step = step


class Signals:
    """What has been asked for so far. `leave` ends the process at once with an exit code."""

    def __init__(self, leave: Callable[[int], object]) -> None:
        self._heard: list[int] = []
        self._again = 0  # signals on their way that were heard before
        self._leave = leave

    def asked(self) -> bool:
        """Whether the run is to end after its step."""
        return signal.SIGTERM in self._heard

    def hear(self, number: int) -> None:
        if number not in (signal.SIGTERM, signal.SIGINT):
            return
        if number == signal.SIGINT and self._again:
            self._again -= 1
            return
        self._heard.append(number)
        if len(self._heard) > 1:
            print("stopped at once by a second signal", file=sys.stderr, flush=True)
            self._leave(128 + number)
        elif number == signal.SIGTERM:
            print("SIGTERM: stops after this step; a second one stops at once", file=sys.stderr, flush=True)

    def send_again(self) -> None:
        """Ctrl-C once more, since the first came to nothing; it is no second one."""
        self._again += 1
        timer = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()


@contextlib.contextmanager
def listening(leave: Callable[[int], object] = os._exit) -> Iterator[Signals]:
    """Hears SIGTERM and Ctrl-C meanwhile; Ctrl-C still interrupts. Outside the main thread it hears nothing."""
    signals = Signals(leave)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_listen, args=(reader, signals), name="signals", daemon=True)
    thread.start()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    tell = sys.unraisablehook

    def dropped(what: Any) -> None:
        if issubclass(what.exc_type, KeyboardInterrupt):
            signals.send_again()
        else:
            tell(what)

    sys.unraisablehook = dropped
    try:
        yield signals
    finally:
        sys.unraisablehook = tell
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        os.close(writer)
        thread.join()
        os.close(reader)


def _listen(reader: int, signals: Signals) -> None:
    while numbers := os.read(reader, 64):
        for number in numbers:
            signals.hear(number)

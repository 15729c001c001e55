"""How many programs XLA has built or loaded, whichever function of the process wanted them.

JAX reports each to its monitoring listeners; the one here counts them from the first use of this module on, and a run
takes differences. A program that comes from the persistent cache is reported and counted too: it also stalls the run.
"""

from __future__ import annotations

import functools
import threading

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts from its making on. Several may be in use; none disturbs another."""

    def __init__(self) -> None:
        self._seen = _process().count

    def take(self) -> int:
        """Programs since the last call, or since this was made."""
        before, self._seen = self._seen, _process().count
        return self._seen - before


class _Process:
    """The count of the whole process."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()  # any thread may compile
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == EVENT:
            with self._lock:
                self.count += 1


@functools.cache
def _process() -> _Process:
    """Made once: a listener stays for as long as the process."""
    return _Process()

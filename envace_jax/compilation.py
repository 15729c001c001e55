"""Compiling several programs side by side. Knows what jax lowers; nothing of what the programs do."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence

import jax

# Each compilation may take gigabytes of the host's memory, and most of it uses more than one thread.
MOST_AT_ONCE = 8

Lowering = tuple[str, Callable[[], Sequence[jax.stages.Lowered]]]  # a name, and what lowers the programs of that name


def compile_together(wanted: Sequence[Lowering], progress: Callable[[str], None] = lambda _: None) -> None:
    """Compiles programs, as many at once as there are processors; later calls of the same functions find them.

    jax keeps what `Lowered.compile` gives for the shapes, dtypes and places that were lowered for. `progress` is told
    each name before its programs are lowered, which Python does in this thread. The longest had best come first.
    """
    pool = concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_AT_ONCE))
    compiled = []
    try:
        for name, lower in wanted:
            progress(name)
            compiled += [pool.submit(program.compile) for program in lower()]
        for future in compiled:
            future.result()
    finally:  # after an error or Ctrl-C, what is being compiled cannot be stopped, and nobody here waits for it
        pool.shutdown(wait=False, cancel_futures=True)

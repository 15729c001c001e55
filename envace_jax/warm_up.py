"""What a run does before its first step: it compiles every program that its padded shapes allow.

They are compiled side by side, and then each is run once on nothing but padding, since only a call fills the table in
which later calls find the program. It changes no result: the sampler is left empty, and the train step's
batches train no token. Knows a sampler, shapes, and an update as a function; nothing of tasks or rewards.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from envace_jax import hosts
from envace_jax.compilation import Lowering, compile_together
from envace_jax.metrics import MetricsWriter
from envace_jax.progress import duration
from envace_jax.rollout import Player
from envace_jax.types import TrainState


def warm_up(
    state: TrainState,
    *,
    players: Callable[[], Sequence[Player]],
    update: Callable[[TrainState, int], TrainState],
    lower_update: Callable[[TrainState, int], Sequence[jax.stages.Lowered]],
    row_shapes: Sequence[int],
    writer: MetricsWriter | None = None,
) -> TrainState:
    """Compiles what sampling and training need, and returns the state as it was, bit by bit.

    Args:
      state: taken over, as by a train step.
      players: gives each sampler that has programs of its own, with parameters as an iteration hands them to it.
        Whatever the samplers run is dropped.
      update: an iteration's update with a batch of so many rows that trains no token.
      lower_update: the programs of that, lowered and not run.
      row_shapes: the numbers of rows that batches may have.
      writer: shows which program is being compiled.
    """
    began, done, samplers = time.time(), 0, players()
    total = sum(player.sampler.buckets.compile_bound() for player in samplers) + len(row_shapes)

    def tell(name: str) -> None:
        nonlocal done
        done += 1
        if writer is not None:
            writer.within(f"compiling {done}/{total}: {name}")

    if writer is not None:
        writer.note(f"warm-up: {total} programs to compile")
    wanted: list[Lowering] = [
        (f"train step of {rows} rows", functools.partial(lower_update, state, rows)) for rows in row_shapes
    ]
    for player in samplers:
        wanted += player.sampler.to_lower(player.params)
    compile_together(wanted, tell)
    for player in samplers:
        player.sampler.run_all(player.params)
    del wanted, samplers, player  # the parameters make room
    # A batch without tokens moves nothing but the count of batches, which the update donates with the rest.
    step = np.array(jax.device_get(state.step))  # its own memory
    for rows in row_shapes:
        state = update(state, rows)
    state = dataclasses.replace(state, step=hosts.put(step, state.step.sharding))
    jax.block_until_ready(state)
    if writer is not None:
        writer.note(f"warm-up: done in {duration(time.time() - began)}")
    return state

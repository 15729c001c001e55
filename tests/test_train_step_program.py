"""The compiled train step: one program for all batches, memory that does not grow with T x V, dtypes that stay."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
from test_train_step import BAG, CONFIG, MODEL, batch_in

from envace_jax.models.qwen import make_policy
from envace_jax.train_step import TrainStepConfig, init_train_state, make_optimizer, make_schedule, make_train_step
from envace_jax.types import TrainBatch


def test_one_program_serves_all_batches_and_nothing_waits_for_the_host():
    optimizer = make_optimizer(make_schedule(1e-3, warmup_steps=3))
    step = make_train_step(BAG, optimizer, CONFIG)
    state, batch = jax.device_put((init_train_state(BAG.init(jax.random.key(0)), optimizer), batch_in("packed")))
    other = jax.device_put(dataclasses.replace(batch, advantages=-batch.advantages))
    with jax.transfer_guard("disallow"):
        for one in (batch, other, batch):
            state, stats = step(state, one)
    assert step._cache_size() == 1 and int(state.step) == 3 and stats["skipped"] == 0


def test_memory_of_the_whole_step_grows_with_the_chunk_and_not_with_time_times_vocabulary():
    """Invariant 9, on the train step with Qwen: forward, backward and AdamW."""
    vocab, rows = 16384, 2
    model = dataclasses.replace(MODEL, vocab_size=vocab, width=8, layers=1, heads=2, kv_heads=1)
    wide = make_policy(model, unroll=False)
    optimizer = make_optimizer(1e-3)
    shapes = jax.eval_shape(lambda: init_train_state(wide.init(jax.random.key(0)), optimizer))

    def temporary_bytes(time, chunk):
        ints, floats = (jax.ShapeDtypeStruct((rows, time), kind) for kind in (jnp.int32, jnp.float32))
        batch = TrainBatch(ints, ints, ints, jax.ShapeDtypeStruct((rows, time), bool), floats, floats, ints)
        config = TrainStepConfig(micro_batch_rows=rows, logprob_chunk=chunk)
        compiled = make_train_step(wide, optimizer, config).lower(shapes, batch).compile()
        # The donated state is written in place: a copy of any of it would take as much memory again.
        assert not re.findall(rf"f32\[{vocab},8\]\S* copy\(", compiled.as_text())
        return compiled.memory_analysis().temp_size_in_bytes

    logits_of_one_token = vocab * 4
    short, long, wider = temporary_bytes(128, 32), temporary_bytes(256, 32), temporary_bytes(256, 128)
    assert long - short < rows * 128 * logits_of_one_token / 10
    assert wider - long > 0.9 * (128 - 32) * logits_of_one_token


def test_bfloat16_parameters_and_moments_keep_their_dtype():
    """Else a resumed run would find other dtypes in its checkpoint than a fresh one has."""
    optimizer = make_optimizer(1e-3)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), BAG.init(jax.random.key(0)))
    state = init_train_state(half, optimizer)
    before = jax.tree.map(lambda leaf: leaf.dtype, state)
    after, stats = make_train_step(BAG, optimizer, CONFIG)(state, batch_in("packed"))
    assert float(stats["update_norm"]) > 0
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == before

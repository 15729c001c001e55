"""The warm-up: a run after it compiles nothing, and it changes no result."""

import dataclasses
import io
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest
from test_train import model_bytes, tiny_config, untimed
from train_helpers import bits

from envace_jax import train
from envace_jax.buckets import Buckets
from envace_jax.compilation import compile_together
from envace_jax.compile_count import CompileCounter
from envace_jax.metrics import MetricsWriter, read_json_lines
from envace_jax.rewards import choose
from envace_jax.rollout import Player
from envace_jax.sharding import make_mesh
from envace_jax.types import TrainState
from envace_jax.warm_up import warm_up


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


def test_a_run_after_the_warm_up_compiles_nothing_and_is_the_same_run(tmp_path, mesh):
    jax.clear_caches()  # what other tests compiled would hide a stray program
    # With a reference to be scored.
    changes = {"steps": 2, "grpo.kl_coef": 0.1, "batch.drop_zero_advantage": False}
    changes |= {"evaluation.heldout_tasks": 2, "evaluation.unseen_tasks": 0, "evaluation.greedy": False}
    summaries, compiled = {}, {}
    for warm in (True, False):
        summaries[warm] = train.run(tiny_config(**changes, warm_up=warm), mesh, tmp_path / str(warm))
        lines = read_json_lines(tmp_path / str(warm) / "metrics.jsonl")
        compiled[warm] = [line["compiled"] for line in lines if "compiled" in line]
    assert compiled[True] == [0, 0]
    assert compiled[False][0] >= 6  # prefill, decode, fresh state, parameters for decoding, score and train step
    assert model_bytes(tmp_path / "True") == model_bytes(tmp_path / "False")
    assert untimed(tmp_path / "True") == untimed(tmp_path / "False")
    assert summaries[True] | {"seconds": 0} == summaries[False] | {"seconds": 0}


def test_what_is_compiled_side_by_side_is_all_that_runs(mesh):
    """Were one program lowered for other shapes or places than it is called with, it would be compiled twice."""
    jax.clear_caches()
    setup, state = train.build(tiny_config(**{"grpo.kl_coef": 0.1, "batch.drop_zero_advantage": False}), mesh)
    compiled = []

    def and_count(*given):
        compile_together(*given)
        compiled.append(counter.take())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("envace_jax.warm_up.compile_together", and_count)
        counter = CompileCounter()
        train.compile_all(setup, state)
    programs = setup.cast.sampler.buckets.compile_bound() + 2 * len(setup.config.batch.row_buckets)  # score and train
    assert compiled[0] >= programs and counter.take() == 0


def test_programs_are_compiled_while_others_are():
    """Two that wait for each other: one after the other they would wait for ever."""
    both, told = threading.Barrier(2, timeout=20), []
    programs = [types.SimpleNamespace(compile=both.wait) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 2)
        compile_together([(name, lambda at=at: [programs[at]]) for at, name in enumerate("ab")], told.append)
    assert told == ["a", "b"]


def test_an_error_and_ctrl_c_do_not_wait_for_what_is_being_compiled():
    end = threading.Event()
    slow = types.SimpleNamespace(compile=lambda: end.wait(60))

    def interrupted():
        raise KeyboardInterrupt

    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("os.cpu_count", lambda: 1)
            began = time.monotonic()
            compile_together([("slow", lambda: [slow]), ("never", interrupted)])
        assert time.monotonic() - began < 30
    finally:
        end.set()


def test_a_program_that_cannot_be_compiled_is_an_error():
    def refuse():
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        compile_together([("a", lambda: [types.SimpleNamespace(compile=refuse)])])


def test_rows_beyond_the_buckets_are_compiled_and_counted_and_a_state_in_midst_of_a_run_stays(mesh):
    setup, state = train.build(tiny_config(**{"batch.row_buckets": (4,)}), mesh)
    before, places = bits(state), jax.tree.map(lambda leaf: leaf.sharding, state)
    state = train.compile_all(setup, state)
    assert bits(state) == before
    counter = CompileCounter()
    state, metrics, _ = train.iterate(setup, state, 0)
    assert metrics["batch_rows"] > 4 and counter.take() == 1  # the train step, at that many rows
    before = bits(state)
    state = train.compile_all(setup, state)
    assert bits(state) == before and int(state.step) == 1 and counter.take() == 0
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == places


def test_a_judges_own_sampler_is_compiled_too(mesh, tmp_path):
    config = tiny_config(**{"reward.kind": "judge", "reward.checkpoint": "asset:tiny_base"})
    with choose.chosen(config.reward, tmp_path) as reward:
        setup, state = train.build(config, mesh, reward)
        compiled = []
        reward.model.sampler.run_all = lambda params: compiled.append(params is reward.model.params)
        train.compile_all(setup, state)
    assert compiled == [True]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress_is_shown(tmp_path, stream):
    programs = Buckets((8,), (4,), (64,))
    sampler = types.SimpleNamespace(
        buckets=programs, run_all=lambda params: None,
        to_lower=lambda params: [(name, list) for name in ("cache", "prefill", "decode")],
    )  # fmt: skip
    state = TrainState(jnp.int32(7), {"w": jnp.ones(2)}, ())
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.start(total=9, done=7, stream=stream)
        state = warm_up(
            state, players=lambda: [Player(sampler, state.params)], row_shapes=(16, 32), writer=writer,
            update=lambda state, rows: dataclasses.replace(state, step=state.step + 1),
            lower_update=lambda state, rows: [],
        )  # fmt: skip
    assert int(state.step) == 7 and state.step.dtype == jnp.int32
    shown = stream.getvalue()
    assert shown.startswith("warm-up: 5 programs to compile\n") and shown.endswith("warm-up: done in 0 s\n")
    steps = [f"step 8/9  compiling {text}" for text in ("1/5: train step of 16 rows", "3/5: cache", "5/5: decode")]
    assert all((text in shown) is stream.isatty() for text in steps)

"""The warm-up: a run after it compiles nothing, and it changes no result."""

import dataclasses
import io
import types

import jax
import jax.numpy as jnp
import pytest
from test_train import model_bytes, tiny_config, untimed
from train_helpers import bits

from envace_jax import train
from envace_jax.buckets import Buckets
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
        reward.model.sampler.warm_up = lambda params, tell: compiled.append(params is reward.model.params)
        train.compile_all(setup, state)
    assert compiled == [True]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress_is_shown(tmp_path, stream):
    programs = Buckets((8,), (4,), (64,))
    sampler = types.SimpleNamespace(
        buckets=programs, warm_up=lambda params, tell: [tell(name) for name in ("cache", "prefill", "decode")]
    )
    state = TrainState(jnp.int32(7), {"w": jnp.ones(2)}, ())
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.start(total=9, done=7, stream=stream)
        state = warm_up(
            state, players=lambda: [Player(sampler, state.params)], row_shapes=(16, 32), writer=writer,
            update=lambda state, rows: dataclasses.replace(state, step=state.step + 1),
        )  # fmt: skip
    assert int(state.step) == 7 and state.step.dtype == jnp.int32
    shown = stream.getvalue()
    assert shown.startswith("warm-up: 5 programs to compile\n") and shown.endswith("warm-up: done in 0 s\n")
    steps = [f"step 8/9  compiling {text}" for text in ("1/5: cache", "4/5: train step of 16 rows", "5/5: train step")]
    assert all((text in shown) is stream.isatty() for text in steps)

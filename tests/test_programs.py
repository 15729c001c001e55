"""What a planner compiles is what the trainer and the sampler run: the same lowered text for the same shapes."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from train_helpers import tiny_config

from envace_jax import learning, programs, train
from envace_jax.config import ConfigError
from envace_jax.sharding import make_mesh

# The layouts and options that change what a step is given: another shape, another argument.
CASES = {
    "shared rows": {},
    "packed rows and a reference policy": {
        "batch.layout": "packed",
        "batch.drop_zero_advantage": False,
        "grpo.kl_coef": 0.01,
    },
    "adapters": {"lora.rank": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_plan_and_run_lower_the_same_programs(name: str) -> None:
    config, mesh = tiny_config(**CASES[name]), make_mesh(devices=jax.devices()[:1])
    setup, state = train.build(config, mesh)
    planned = programs.make(config, mesh)
    asked = {}

    def train_step(*arguments: object) -> tuple[object, dict[str, object]]:
        asked["train"] = text(setup.train_step.lower(*arguments))
        return arguments[0], {}

    def score_step(*arguments: object) -> object:
        asked["score"] = text(setup.score_step.lower(*arguments))
        return jax.device_put(np.zeros((rows, config.batch.row_length), np.float32), planned.batch.tokens.sharding)

    # The run's own call with what it hands over: an iteration's batch, of padding. Nothing is compiled for it.
    rows = programs.rows_of(config, mesh)
    spied = dataclasses.replace(setup, train_step=train_step, score_step=score_step)
    learning.update(spied, state, *learning.make_rows(spied, [], [], (rows,)))
    assert asked["train"] == text(planned.train())
    assert ("score" in asked) == (config.grpo.kl_coef > 0)
    if "score" in asked:
        assert asked["score"] == text(planned.score())
    jax.tree.map(check_alike, (planned.state, planned.base), (state, setup.base))

    # Parameters for decoding, and the sampler's programs with the very arrays.
    player = setup.cast.players(state)[0]
    places = jax.tree.map(lambda leaf: leaf.sharding, player.params)
    decoding = planned.decoding(places)
    assert jax.tree.structure(decoding) == jax.tree.structure(player.params)
    for wanted, lower in planned.sampling(decoding).items():
        assert text(lower) == text(player.sampler.lowered(player.params, wanted=wanted.__eq__)[wanted])


def text(lowered: jax.stages.Lowered) -> str:
    """The lowered program; its functions are numbered as they occur, since jax numbers them by what else was traced."""
    numbers: dict[str, str] = {}
    return re.sub(r"@[\w.]+", lambda name: numbers.setdefault(name[0], f"@f{len(numbers)}"), lowered.as_text())


def check_alike(abstract: jax.ShapeDtypeStruct, real: jax.Array) -> None:
    assert (abstract.shape, abstract.dtype) == (real.shape, real.dtype)
    assert abstract.sharding.is_equivalent_to(real.sharding, real.ndim)


def test_the_largest_shapes_are_planned() -> None:
    config, mesh = tiny_config(**{"sampler.cache_lengths": (256, 512)}), make_mesh(devices=jax.devices()[:1])
    planned = programs.make(config, mesh)
    decoding = planned.decoding(
        jax.tree.map(
            lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
            jax.eval_shape(planned.policy.for_decoding, planned.state.params),
        )
    )
    assert list(planned.sampling(decoding)) == ["prefill of 8 x 256 tokens, cache of 512", "decode, cache of 512"]
    assert planned.batch.tokens.shape == (24, 640)
    free = dataclasses.replace(config, batch=dataclasses.replace(config.batch, row_buckets=()))
    assert programs.rows_of(free, mesh) == 8  # a row for each of 2 x 4 attempts


def test_sizes_of_folders_and_of_published_models() -> None:
    model, vocabulary = programs.sizes("asset:tiny_base")
    assert model.layers == 5 or model.layers > 0
    assert vocabulary.vocab_size <= model.vocab_size and vocabulary.stop_ids
    published, known = programs.sizes("Qwen/Qwen3-8B")
    assert (published.width, known.vocab_size, known.stop_ids) == (4096, 151_669, (151_645, 151_643))
    with pytest.raises(ConfigError, match="known are Qwen/Qwen3-0.6B, .*Qwen/Qwen3-32B"):
        programs.sizes("somebody/else")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollout.players": "separate"}, "only the method itself is planned"),
        ({"reward.kind": "judge", "reward.checkpoint": "asset:tiny_base"}, "a judge of other parameters"),
    ],
)
def test_runs_with_several_models_are_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        programs.make(tiny_config(**changes), make_mesh(devices=jax.devices()[:1]))

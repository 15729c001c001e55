"""GSPO, CISPO and truncated importance weights: numbers worked by hand, and no layout, split or mesh changes them.

PPO's are in test_grpo.py, and the train step around them in test_train_step.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train_step import BAG, CONFIG, LIMIT, ROW, VOCAB, batch_in, compiled_gradient, distance, trajectories

from envace_jax import batching
from envace_jax.batching import make_batch, role_tokens
from envace_jax.grpo import (
    LOSSES,
    TOKENWISE,
    count_denominators,
    policy_loss,
    role_advantages,
    run_means,
    truncated_weights,
)
from envace_jax.train_step import TrainStepConfig, loss_and_gradient, make_score_step
from envace_jax.types import Role, Segment, Trajectory

GSPO = dataclasses.replace(CONFIG, loss="gspo", old_logprobs="sampler", clip_low=0.2, clip_high=0.3)
CISPO = dataclasses.replace(CONFIG, loss="cispo", old_logprobs="sampler", clip_low=1.0, clip_high=0.3)
TIS = dataclasses.replace(CONFIG, tis_cap=1.2)


def loss_of(ratios, advantages, mask=None, weights=None, **options):
    """(loss, statistics) and the gradient in the log-probabilities, of one row at these ratios; old ones are 0."""
    logprobs, advantages = jnp.log(jnp.array([ratios])), jnp.array([advantages])
    mask = jnp.ones(logprobs.shape, bool) if mask is None else jnp.array([mask], bool)
    role = jnp.zeros(logprobs.shape, jnp.int32)
    weights = None if weights is None else jnp.array([weights])

    def loss(values):
        old, counts = jnp.zeros_like(values), count_denominators(mask, role)
        return policy_loss(values, old, advantages, mask, role, None, weights, denominators=counts, **options)

    value, gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
    return value, gradient[0]


def test_gspo_has_one_ratio_for_a_segment_by_hand():
    """Segments [2, 1/2], [1.44, 1, 1] and [1/4] at gaps: ratios 1, 1.44^(1/3) = 1.1292 and 1/4; 6 tokens."""
    ratios, mask = [2.0, 0.5, 9.0, 1.44, 1.0, 1.0, 9.0, 0.25], [1, 1, 0, 1, 1, 1, 0, 1]
    advantages = [0.5, 0.5, 9.0, 1.0, 1.0, 1.0, 9.0, -2.0]
    s = 1.44 ** (1 / 3)
    options = {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.2}
    (loss, stats), gradient = loss_of(ratios, advantages, mask, **options)
    # The last is clipped to 0.9, as its advantage is negative: a loss of 2 x 0.9 without a gradient.
    assert loss == pytest.approx((-0.5 * 2 - s * 3 + 2 * 0.9) / 6, rel=1e-5)
    np.testing.assert_allclose(gradient, np.array([-0.5, -0.5, 0, -s, -s, -s, 0, 0]) / 6, rtol=1e-5)
    assert stats["clip_fraction"] == pytest.approx(1 / 6)
    assert stats["ratio"] == pytest.approx((2 + 3 * s + 0.25) / 6, rel=1e-5)
    assert stats["ratio_deviation_max"] == pytest.approx(0.75)
    # With less room above, the second is clipped too, and all three of its tokens with it.
    (loss, stats), gradient = loss_of(ratios, advantages, mask, **options | {"clip_high": 0.1})
    assert loss == pytest.approx((-0.5 * 2 - 1.1 * 3 + 2 * 0.9) / 6, rel=1e-5)
    assert stats["clip_fraction"] == pytest.approx(4 / 6) and np.flatnonzero(gradient).tolist() == [0, 1]


def test_cispo_clips_the_weight_and_keeps_the_gradient_by_hand():
    ratios, advantages = [1.0, 4.0, 0.1, 1.1], [1.0, 2.0, -1.0, -3.0]
    (loss, stats), gradient = loss_of(ratios, advantages, loss="cispo", clip_low=0.5, clip_high=0.2)
    weights = [1.0, 1.2, 0.5, 1.1]
    each = [-a * w * math.log(r) for a, w, r in zip(advantages, weights, ratios, strict=True)]
    assert loss == pytest.approx(sum(each) / 4, rel=1e-5)
    np.testing.assert_allclose(gradient, [-1 / 4, -2 * 1.2 / 4, 0.5 / 4, 3 * 1.1 / 4], rtol=1e-5)
    assert stats["clip_fraction"] == 0.5 and stats["ratio"] == pytest.approx(6.2 / 4)
    _, gradient = loss_of(ratios, advantages, loss="cispo", clip_low=1.0, clip_high=0.2)
    assert gradient[2] == pytest.approx(0.1 / 4)  # no lower bound
    _, ppo = loss_of(ratios, advantages, clip_low=0.5, clip_high=0.2)
    assert ppo[1] == ppo[2] == 0  # what PPO leaves out


def test_truncated_weights_by_hand():
    """exp(trainer - sampler) is 1/2, 3 and, beyond the mask, nan; the cap is 2."""
    trainer, sampler = jnp.log(jnp.array([[0.1, 0.3, 0.5]])), jnp.log(jnp.array([[0.2, 0.1, jnp.nan]]))
    mask = jnp.array([[True, True, False]])
    weights, stats = truncated_weights(trainer, sampler, mask, cap=2.0, tokens=jnp.float32(2))
    np.testing.assert_allclose(weights, [[0.5, 2.0, 0.0]], rtol=1e-6)
    assert stats["mismatch"] == pytest.approx(3.5 / 2) and stats["mismatch_max"] == pytest.approx(3.0)
    assert stats["mismatch_truncated"] == 0.5
    for loss in LOSSES:
        (_, _), plain = loss_of([1.0, 1.0], [1.0, -2.0], loss=loss)
        (value, _), gradient = loss_of([1.0, 1.0], [1.0, -2.0], weights=[0.5, 2.0], loss=loss)
        np.testing.assert_allclose(gradient, plain * np.array([0.5, 2.0]), rtol=1e-6)
        assert value == (0.0 if loss == "cispo" else pytest.approx((-0.5 + 4) / 2))
    slope = jax.grad(lambda now: truncated_weights(now, sampler, mask, cap=2.0, tokens=jnp.float32(2))[0].sum())
    assert not slope(trainer).any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_means_of_runs(seed):
    rng, rows, time = np.random.default_rng(seed), 3, 17
    mask = rng.random((rows, time)) < rng.choice([0.3, 0.7, 1.0])
    values = np.where(mask, rng.normal(size=mask.shape), np.nan).astype(np.float32)
    want = np.zeros_like(values)
    for row in range(rows):
        begin = None
        for t in range(time + 1):
            inside = t < time and mask[row, t]
            if inside and begin is None:
                begin = t
            elif not inside and begin is not None:
                want[row, begin:t] = values[row, begin:t].mean()
                begin = None
    np.testing.assert_allclose(jax.jit(run_means)(values, mask), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_where_every_ratio_is_one_all_losses_have_one_gradient(loss):
    advantages, mask = [0.5, 0.5, 7.0, -2.0], [1, 1, 0, 1]
    _, gradient = loss_of([1.0] * 4, advantages, mask, loss=loss)
    np.testing.assert_allclose(gradient, [-0.5 / 3, -0.5 / 3, 0, 2 / 3], rtol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nothing_leaks_from_masked_places_and_extremes_stay_finite(loss, poison):
    (want, want_stats), want_gradient = loss_of([2.0, 1.0, 3.0], [1.0, 0.0, -1.0], [1, 0, 1], loss=loss)
    (got, got_stats), gradient = loss_of([2.0, poison, 3.0], [1.0, poison, -1.0], [1, 0, 1], loss=loss)
    assert got == want and got_stats == want_stats
    np.testing.assert_array_equal(gradient, want_gradient)
    (value, _), gradient = loss_of([1e-30, 1e30], [-1.0, -1.0], loss=loss, clip_high=10.0)
    assert jnp.isfinite(value) and jnp.all(jnp.isfinite(gradient))


# --- layouts, splits, meshes ---


def plain_gspo(parameters, low=0.2, high=0.3):
    """GSPO's loss of `trajectories`, a row for each segment, whose tokens all carry its loss; all logits at once."""
    segments = [s for t in trajectories() for s in t.segments]
    rows, own, old = np.zeros((len(segments), ROW), np.int32), *np.zeros((2, len(segments), ROW - 1), np.float32)
    for row, mine, before, segment in zip(rows, own, old, segments, strict=True):
        prompt, end = len(segment.prompt_tokens), len(segment.prompt_tokens) + len(segment.tokens)
        row[:prompt], row[prompt:end] = segment.prompt_tokens, segment.tokens
        mine[prompt - 1 : end - 1], before[prompt - 1 : end - 1] = 1, segment.logprobs
    places = np.broadcast_to(np.arange(ROW), rows.shape)
    hidden, _ = BAG.apply(parameters, rows, places, np.ones_like(rows))
    logprobs = jax.nn.log_softmax(BAG.logits(parameters, hidden[:, :-1])[..., :LIMIT] / CONFIG.temperature)
    picked = jnp.take_along_axis(logprobs, rows[:, 1:, None], axis=-1)[..., 0]
    lengths, advantages = own.sum(1), np.concatenate(role_advantages(trajectories())[0])
    ratios = jnp.exp(jnp.sum(own * (picked - old), axis=1) / lengths)
    losses = jnp.maximum(-advantages * ratios, -advantages * jnp.clip(ratios, 1 - low, 1 + high))
    losses = jnp.where(advantages < 0, jnp.minimum(losses, -advantages * CONFIG.dual_clip), losses)
    return jnp.sum(losses * lengths) / lengths.sum()


@pytest.fixture(scope="module")
def parameters():
    return BAG.init(jax.random.key(5))


def assert_same(got, want, but=()):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-7)
    assert distance(got[1], want[1]) < 1e-5
    for name, value in want[2].items():
        if name not in but:
            np.testing.assert_allclose(got[2][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_gspo_equals_a_plain_reference(parameters):
    loss, gradient, stats = compiled_gradient(GSPO, BAG)(parameters, batch_in("merged"))
    want, want_gradient = jax.jit(jax.value_and_grad(plain_gspo))(parameters)
    assert loss == pytest.approx(float(want), rel=1e-5)
    assert distance(gradient, want_gradient) < 1e-5
    assert 0 < stats["clip_fraction"] < 1


@pytest.mark.parametrize("config", [GSPO, CISPO, TIS], ids=["gspo", "cispo", "tis"])
def test_neither_layout_nor_split_changes_loss_or_gradient(config, parameters):
    """Invariant 3: in a merged stream a row holds several segments, in a packed one several trajectories' segments."""
    want = compiled_gradient(config, BAG)(parameters, batch_in("segment"))
    assert 0 < want[2]["mismatch_truncated" if config.tis_cap else "clip_fraction"] < 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "LEAST_SHARED", 1)
        for layout in ("merged", "packed", "shared"):
            assert_same(compiled_gradient(config, BAG)(parameters, batch_in(layout)), want)
    for rows in (3, 24):
        split = dataclasses.replace(config, micro_batch_rows=rows)
        assert_same(compiled_gradient(split, BAG)(parameters, batch_in("packed")), want)


@pytest.mark.parametrize("config", [GSPO, CISPO, TIS], ids=["gspo", "cispo", "tis"])
def test_leaving_out_what_has_no_advantage_changes_no_gradient(config, parameters):
    advantages, _ = role_advantages(trajectories())
    some = [values * (number % 2) for number, values in enumerate(advantages)]
    options = {"row_length": ROW, "rows_multiple": 24}
    full, _ = make_batch(trajectories(), some, **options)
    short, stats = make_batch(trajectories(), some, **options, drop_zero_advantage=True)
    want = compiled_gradient(config, BAG)(parameters, full)
    got = compiled_gradient(config, BAG)(parameters, short, role_tokens=role_tokens(stats))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert distance(got[1], want[1]) < 1e-5


def test_the_train_step_weighs_by_trainer_over_sampler(parameters):
    """As if each token's advantage were multiplied by its weight, which carries no gradient."""
    batch = batch_in("packed")
    trainer = make_score_step(BAG, CONFIG)(parameters, batch)
    weights = np.minimum(np.exp(np.where(batch.loss_mask, trainer - batch.old_logprobs, 0.0)), TIS.tis_cap)
    loss, gradient, stats = compiled_gradient(TIS, BAG)(parameters, batch)
    weighted = dataclasses.replace(batch, advantages=(batch.advantages * weights).astype(np.float32))
    want, want_gradient, _ = compiled_gradient(CONFIG, BAG)(parameters, weighted)
    assert loss == pytest.approx(float(want), rel=1e-5) and distance(gradient, want_gradient) < 1e-5
    ratio = np.exp(trainer - batch.old_logprobs)[batch.loss_mask]
    assert stats["mismatch"] == pytest.approx(ratio.mean(), rel=1e-4) and stats["ratio"] == pytest.approx(1.0)
    assert stats["mismatch_max"] == pytest.approx(ratio.max(), rel=1e-4)
    assert stats["mismatch_truncated"] == pytest.approx((ratio > TIS.tis_cap).mean(), rel=1e-4)
    assert "mismatch" not in compiled_gradient(CONFIG, BAG)(parameters, batch)[2]


def test_segments_never_touch_in_a_row():
    """A prompt that is the stream before it and no token more: the second segment would go on where the first ends."""
    first = Segment(Role.ACT, np.array([1, 2]), np.array([3, 4]), np.zeros(2, np.float32), "length", 0)
    second = Segment(Role.ACT, np.array([1, 2, 3, 4]), np.array([5]), np.zeros(1, np.float32), "stop", 0)
    third = Segment(Role.ACT, np.array([1, 2, 3, 4, 5, 6]), np.array([7]), np.zeros(1, np.float32), "stop", 0)
    attempt = Trajectory("t", 0, 0, (first, second, third), 1.0, "ok", "done")
    for layout in batching.LAYOUTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batching, "LEAST_SHARED", 1)
            batch, _ = make_batch([attempt], [np.ones(3)], layout=layout, row_length=16)
        assert runs_of(batch.loss_mask) == [1, 1, 2]


def runs_of(mask):
    """Lengths of the runs of True in all rows, sorted."""
    text = "|".join("".join("x" if here else " " for here in row) for row in mask)
    return sorted(map(len, text.replace("|", " ").split()))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(batching.LAYOUTS))
def test_runs_of_the_mask_are_the_segments(seed, layout):
    """Streams over two letters that continue, share beginnings and stop anywhere."""
    rng = np.random.default_rng(seed)

    def some(least=0):
        return rng.integers(0, 2, rng.integers(least, 4)).astype(np.int32)

    found = []
    for attempt in range(3):
        segments, stream = [], some(1)
        for _ in range(rng.integers(0, 5)):
            tokens, role = some(1), Role(rng.integers(0, 2))
            segments.append(Segment(role, stream, tokens, np.zeros(len(tokens), np.float32), "stop", 0))
            stream = np.concatenate([stream, tokens, some()]) if rng.random() < 0.8 else some(1)
        found.append(Trajectory("t", 0, attempt, tuple(segments), 1.0, "ok", "done"))
    values = [np.ones(len(t.segments), np.float32) for t in found]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "LEAST_SHARED", 1)
        batch, _ = make_batch(found, values, layout=layout, row_length=48)
    assert runs_of(batch.loss_mask) == sorted(len(s.tokens) for t in found for s in t.segments)


MESH_CODE = """
    import functools, jax
    from envace_jax.batching import deal_rows
    from envace_jax.sharding import batch_sharding, make_mesh
    from envace_jax.train_step import loss_and_gradient
    from test_losses import CISPO, GSPO, TIS, assert_same
    from test_train_step import BAG, batch_in, compiled_gradient

    parameters, batch, mesh = BAG.init(jax.random.key(5)), batch_in("packed"), make_mesh(2, 2, 1)
    rows = jax.device_put(deal_rows(batch, 4), batch_sharding(mesh))
    for config in (GSPO, CISPO, TIS):
        want = compiled_gradient(config, BAG)(parameters, batch)
        got = jax.jit(functools.partial(loss_and_gradient, BAG, config, mesh=mesh))(parameters, rows)
        assert_same(jax.device_get(got), jax.device_get(want))
        print("same")
"""


def test_no_mesh_changes_loss_or_gradient():
    """Invariant 3: rows over four devices."""
    assert run_python(MESH_CODE, devices=4, timeout=600).count("same") == 3


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_no_layout_changes_loss_or_gradient_of_the_network(loss):
    """Invariant 3 with attention: shared beginnings are read by several segments."""
    from test_train_step import params

    config, results = {"gspo": GSPO, "cispo": CISPO}[loss], {}
    advantages, _ = role_advantages(trajectories())
    for layout in batching.LAYOUTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batching, "LEAST_SHARED", 1)
            batch, _ = make_batch(trajectories(), advantages, layout=layout, row_length=ROW, rows_multiple=24)
        results[layout] = compiled_gradient(config)(params(), batch)
    for layout in ("merged", "packed", "shared"):
        assert_same(results[layout], results["segment"])


def test_losses_of_whole_rows_form_no_array_of_time_times_vocabulary():
    """Invariant 9, on the path that losses outside TOKENWISE take."""
    assert GSPO.loss not in TOKENWISE
    config = dataclasses.replace(GSPO, logprob_chunk=8, micro_batch_rows=8)
    jaxpr = jax.make_jaxpr(functools.partial(loss_and_gradient, BAG, config))(
        BAG.init(jax.random.key(0)), batch_in("packed")
    )

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (math.prod(v.aval.shape) for v in equation.outvars if hasattr(v.aval, "shape"))
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    assert 8 * VOCAB <= max(sizes(jaxpr.jaxpr)) < 8 * ROW * VOCAB / 2


def test_bad_settings_are_errors():
    for options, message in (
        ({"loss": "gspo", "clip_low": 1.0}, "clip_low 1.0 must be in"),
        ({"tis_cap": 0.5}, "tis_cap must be at least 1"),
        ({"tis_cap": 2.0, "old_logprobs": "sampler"}, "needs old_logprobs='trainer'"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainStepConfig(**options)
    assert TrainStepConfig(loss="cispo", clip_low=1.0).clip_low == 1.0

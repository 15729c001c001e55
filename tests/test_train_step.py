"""The train step: the objective does not depend on layout, micro-batches or mesh, and equals a plain reference.

The reference runs every segment alone through `policy.apply` and `policy.logits`, with all logits at once.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.batching import make_batch, role_tokens
from envace_jax.grpo import role_advantages
from envace_jax.models.qwen import QwenConfig, make_policy
from envace_jax.train_step import (
    TrainStepConfig,
    init_train_state,
    loss_and_gradient,
    make_optimizer,
    make_score_step,
    make_train_step,
)
from envace_jax.types import Policy, Role, Segment, TrainBatch, Trajectory

VOCAB, LIMIT, ROW = 48, 40, 48
MODEL = QwenConfig(VOCAB, 16, 2, heads=8, kv_heads=2, head_dim=4, ffn=24, init_std=0.3, rope_theta=100.0)
CONFIG = TrainStepConfig(vocab_limit=LIMIT, temperature=0.8, micro_batch_rows=8, logprob_chunk=64)


@functools.cache
def policy() -> Policy:
    return make_policy(MODEL, unroll=False)


@functools.cache
def params():
    return policy().init(jax.random.key(0))


@functools.cache
def trajectories() -> tuple[Trajectory, ...]:
    """Two tasks, three attempts: act streams that grow by two segments with rehearsals between; random numbers."""
    rng = np.random.default_rng(0)

    def some(low, high):
        return rng.integers(0, LIMIT, rng.integers(low, high + 1)).astype(np.int32)

    def segment(role, prompt):
        tokens = some(1, 6)
        logprobs = -rng.uniform(2.5, 4.5, len(tokens)).astype(np.float32)
        return Segment(role, prompt, tokens, logprobs, "stop", 0)

    found = []
    for number in range(6):
        first = segment(Role.ACT, some(3, 9))
        rehearsals = [segment(Role.REHEARSE, some(5, 20)) for _ in range(rng.integers(0, 3))]
        second = segment(Role.ACT, np.concatenate([first.prompt_tokens, first.tokens, some(1, 9)]))
        segments = (first, *rehearsals, second)
        group, attempt = divmod(number, 3)
        found.append(Trajectory(f"task {group}", group, attempt, segments, float(rng.random()), "ok", "done"))
    return tuple(found)


def batch_in(layout) -> TrainBatch:
    """24 rows in every layout, so that one compiled program serves all."""
    advantages, _ = role_advantages(trajectories())
    return make_batch(trajectories(), advantages, layout=layout, row_length=ROW, rows_multiple=24, pad_id=7)[0]


@functools.cache
def compiled_gradient(config, of=None):
    return jax.jit(functools.partial(loss_and_gradient, of or policy(), config))


def distance(one, other) -> float:
    """|one - other| / |other| over all leaves together."""
    apart = optax.tree.norm(jax.tree.map(lambda a, b: jnp.asarray(a) - jnp.asarray(b), one, other))
    return float(apart / optax.tree.norm(other))


def reference_loss(parameters, temperature=0.8):
    """-mean over sampled tokens of advantage x log-probability: a row for each segment, all logits at once."""
    advantages, _ = role_advantages(trajectories())
    segments = list(zip((s for t in trajectories() for s in t.segments), np.concatenate(advantages), strict=True))
    rows = np.zeros((len(segments), ROW), np.int32)
    weights = np.zeros((len(segments), ROW - 1), np.float32)  # of the prediction of token t + 1 at place t
    for row, weight, (segment, advantage) in zip(rows, weights, segments, strict=True):
        prompt, end = len(segment.prompt_tokens), len(segment.prompt_tokens) + len(segment.tokens)
        row[:prompt], row[prompt:end] = segment.prompt_tokens, segment.tokens
        weight[prompt - 1 : end - 1] = advantage
    places = np.broadcast_to(np.arange(ROW), rows.shape)
    hidden, _ = policy().apply(parameters, rows, places, np.ones_like(rows), None)
    logprobs = jax.nn.log_softmax(policy().logits(parameters, hidden[:, :-1])[..., :LIMIT] / temperature)
    picked = jnp.take_along_axis(logprobs, rows[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(picked * weights) / sum(len(s.tokens) for s, _ in segments)


def test_the_gradient_equals_a_plain_reference():
    _, gradient, stats = compiled_gradient(CONFIG)(params(), batch_in("segment"))
    assert distance(gradient, jax.jit(jax.grad(reference_loss))(params())) < 1e-5
    assert stats["tokens"] == sum(len(s.tokens) for t in trajectories() for s in t.segments)


VARIANTS = [
    {},
    {"old_logprobs": "sampler"},
    {"old_logprobs": "sampler", "denominator": "role", "kl_coef": 0.2, "clip_low": 0.1, "clip_high": 0.3},
]


@pytest.mark.parametrize("options", VARIANTS)
def test_no_layout_changes_loss_or_gradient(options):
    """Invariant 3, layouts."""
    config = dataclasses.replace(CONFIG, **options)
    results = {}
    for layout in ("segment", "merged", "packed"):
        batch = batch_in(layout)
        ref = batch.old_logprobs - 0.3 * np.sin(batch.tokens) if config.kl_coef else None
        results[layout] = compiled_gradient(config)(params(), batch, ref)
    want = results["segment"]
    for layout in ("merged", "packed"):
        loss, gradient, stats = results[layout]
        np.testing.assert_allclose(loss, want[0], rtol=1e-5, atol=1e-7)
        assert distance(gradient, want[1]) < 1e-5
        for name, value in stats.items():
            np.testing.assert_allclose(value, want[2][name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("options", VARIANTS[1:])
def test_sharing_beginnings_changes_neither_loss_nor_gradient(options):
    """Invariant 3: attempts at a task begin alike, and so do what its rehearsals see."""
    config = dataclasses.replace(CONFIG, micro_batch_rows=4, **options)

    def begun(trajectory):
        start = np.arange(30 + trajectory.group_id) % LIMIT
        segments = [
            dataclasses.replace(s, prompt_tokens=np.append(start, s.prompt_tokens)) for s in trajectory.segments
        ]
        return dataclasses.replace(trajectory, segments=tuple(segments))

    found = [begun(trajectory) for trajectory in trajectories()]
    advantages, _ = role_advantages(found)
    results, rows = {}, {}
    for layout in ("segment", "shared"):
        batch, stats = make_batch(found, advantages, layout=layout, row_length=150, rows_multiple=24)
        rows[layout] = stats["tokens"]
        ref = batch.old_logprobs - 0.3 * np.sin(batch.tokens) if config.kl_coef else None
        results[layout] = compiled_gradient(config)(params(), batch, ref)
    assert rows["shared"] < rows["segment"] / 2
    (loss, gradient, stats), want = results["shared"], results["segment"]
    np.testing.assert_allclose(loss, want[0], rtol=1e-5, atol=1e-7)
    assert distance(gradient, want[1]) < 1e-5
    for name, value in stats.items():
        np.testing.assert_allclose(value, want[2][name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_no_micro_batch_split_changes_the_gradient_of_the_network():
    """Invariant 3, micro-batches, on Qwen."""
    batch = batch_in("merged")
    want = compiled_gradient(CONFIG)(params(), batch)
    got = compiled_gradient(dataclasses.replace(CONFIG, micro_batch_rows=24))(params(), batch)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert distance(got[1], want[1]) < 1e-5


def bag_policy() -> Policy:
    """A stand-in without attention, so that many splits compile quickly."""

    def apply(parameters, tokens, positions, sequence_ids, cache=None, last_readers=None):
        return jnp.tanh(parameters["embedding"][tokens] + parameters["place"] * positions[..., None]), cache

    def init(key):
        first, second = jax.random.split(key)
        matrices = {"embedding": jax.random.normal(first, (VOCAB, 6)), "head": jax.random.normal(second, (6, VOCAB))}
        return matrices | {"place": jnp.full((6,), 0.1, jnp.float32)}

    def head(parameters):
        return parameters["head"]

    return Policy(
        init,
        apply,
        lambda p, h: h @ head(p),
        head,
        lambda p: p,
        lambda *a, **k: None,
        lambda *a, **k: (None, None),
        VOCAB,
    )


BAG = bag_policy()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 2**32 - 1))
def test_no_micro_batch_split_changes_anything(rows, seed):
    """Invariant 3: with unevenly spread masks, roles and advantages, and whole rows that train nothing."""
    rng = np.random.default_rng(seed)
    shape = (12, 9)
    mask = rng.random(shape) < rng.random((12, 1)) * (rng.random((12, 1)) < 0.7)
    mask[:, 0] = False
    batch = TrainBatch(
        rng.integers(0, LIMIT, shape).astype(np.int32),
        np.tile(np.arange(9, dtype=np.int32), (12, 1)),
        np.ones(shape, np.int32),
        mask,
        np.where(mask, rng.normal(size=shape), np.nan).astype(np.float32),
        np.where(mask, -4 + rng.normal(size=shape), np.nan).astype(np.float32),
        np.where(mask, rng.integers(0, 2, shape), 99).astype(np.int32),
    )
    config = dataclasses.replace(CONFIG, logprob_chunk=20, old_logprobs="sampler", denominator="role", kl_coef=0.1)
    arguments = BAG.init(jax.random.key(1)), batch, batch.old_logprobs + np.float32(0.1)
    want = compiled_gradient(dataclasses.replace(config, micro_batch_rows=12), BAG)(*arguments)
    got = compiled_gradient(dataclasses.replace(config, micro_batch_rows=rows), BAG)(*arguments)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    scale = max(float(optax.tree.norm(want[1])), 1e-3)
    for one, other in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_allclose(one, other, atol=1e-5 * scale)
    for name, value in want[2].items():
        np.testing.assert_allclose(got[2][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_micro_batch_that_trains_nothing_adds_nothing():
    """Not even zeros: adding is part of what is skipped."""
    config = dataclasses.replace(CONFIG, micro_batch_rows=4)
    jaxpr = jax.make_jaxpr(functools.partial(loss_and_gradient, BAG, config))(
        BAG.init(jax.random.key(0)), batch_in("packed")
    )
    (over_micro_batches,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    primitives = [eqn.primitive.name for eqn in over_micro_batches.params["jaxpr"].eqns]
    assert primitives.count("cond") == 1 and "add" not in primitives


@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
def test_what_is_kept_for_the_backward_pass_changes_no_gradient(remat):
    """Three micro-batches that all train something, so that "full" and "offload" add to sums in place."""
    policy_of = make_policy(MODEL, unroll=False, remat=remat)
    assert policy_of.adds_gradients == (remat != "dots")
    batch = batch_in("segment")
    assert batch.loss_mask.reshape(3, -1).any(axis=1).all()
    loss, gradient, _ = compiled_gradient(CONFIG, policy_of)(params(), batch)
    want = compiled_gradient(CONFIG)(params(), batch)
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    assert distance(gradient, want[1]) < 1e-5


@functools.cache
def compiled_score():
    return make_score_step(policy(), CONFIG)


def new_state(optimizer):
    return init_train_state(jax.tree.map(jnp.copy, params()), optimizer)


def equal(one, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), one, other))


@functools.cache
def compiled_step(config=CONFIG, learning_rate=1e-3):
    optimizer = make_optimizer(learning_rate)
    return optimizer, make_train_step(policy(), optimizer, config)


def test_at_learning_rate_zero_every_ratio_is_one():
    """Invariant 2, trainer's side: log-probabilities of the cached forward pass against the train step."""
    optimizer, step = compiled_step(dataclasses.replace(CONFIG, old_logprobs="sampler"), 0.0)
    batch = batch_in("packed")
    alone = np.zeros_like(batch.old_logprobs)
    lengths = [len(s.prompt_tokens) + len(s.tokens) for t in trajectories() for s in t.segments]
    cached = jax.jit(policy().apply)
    for r in range(batch.tokens.shape[0]):
        for number in range(1, batch.sequence_ids[r].max() + 1):
            (where,) = np.nonzero(batch.sequence_ids[r] == number)
            row = np.zeros((1, max(lengths)), np.int32)
            row[0, : len(where)] = batch.tokens[r, where]
            places, ids = np.arange(row.shape[1])[None], (np.arange(row.shape[1]) < len(where)).astype(np.int32)[None]
            hidden, _ = cached(params(), row, places, ids, policy().init_cache(1, row.shape[1], jnp.float32))
            logprobs = jax.nn.log_softmax(policy().logits(params(), hidden)[0, :, :LIMIT] / CONFIG.temperature)
            alone[r, where[1:]] = logprobs[np.arange(len(where) - 1), row[0, 1 : len(where)]]
    batch = dataclasses.replace(batch, old_logprobs=np.where(batch.loss_mask, alone, 0.0).astype(np.float32))
    np.testing.assert_allclose(compiled_score()(params(), batch), batch.old_logprobs, atol=1e-5)
    state, stats = step(new_state(optimizer), batch)
    assert stats["ratio_deviation_max"] < 1e-5 and stats["logprob_diff_max"] < 1e-5 and stats["clip_fraction"] == 0
    assert stats["tokens"] > 0 and stats["grad_norm"] > 0 and stats["skipped"] == 0
    assert equal(state.params, params())


def test_trainer_and_sampler_old_logprobs_agree_when_they_are_equal():
    batch = batch_in("packed")
    batch = dataclasses.replace(batch, old_logprobs=compiled_score()(params(), batch))
    one = compiled_gradient(CONFIG)(params(), batch)
    other = compiled_gradient(dataclasses.replace(CONFIG, old_logprobs="sampler"))(params(), batch)
    assert distance(one[1], other[1]) < 1e-5


def test_statistics_by_hand():
    batch = batch_in("packed")
    _, step = compiled_step()
    state, stats = step(new_state(compiled_step()[0]), batch)
    assert int(state.step) == 1 and not equal(state.params, params())
    for role in Role:
        own = batch.loss_mask & (batch.role == role)
        name = role.name.lower()
        assert stats[f"tokens_{name}"] == own.sum() > 0
        assert stats[f"advantage_{name}"] == pytest.approx(batch.advantages[own].mean(), rel=1e-4, abs=1e-6)
        assert stats[f"advantage_abs_{name}"] == pytest.approx(np.abs(batch.advantages[own]).mean(), rel=1e-5)
    now = np.asarray(compiled_score()(params(), batch))
    difference = np.abs(now - batch.old_logprobs)[batch.loss_mask]
    assert stats["logprob_diff"] == pytest.approx(difference.mean(), rel=1e-4)
    assert stats["logprob_diff_max"] == pytest.approx(difference.max(), rel=1e-4)
    assert stats["loss"] == pytest.approx(-batch.advantages[batch.loss_mask].mean(), rel=1e-4, abs=1e-6)
    assert stats["ratio"] == pytest.approx(1.0) and stats["skipped"] == 0
    gradient = compiled_gradient(CONFIG)(params(), batch)[1]
    assert stats["grad_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    moved = jax.tree.map(lambda a, b: a - b, state.params, params())
    assert stats["update_norm"] == pytest.approx(float(optax.tree.norm(moved)), rel=1e-3)
    assert all(value.shape == () and value.dtype == jnp.float32 for value in stats.values())


def test_an_empty_batch_leaves_everything_but_the_step():
    """No weight decay, no moment decay, no schedule step either."""
    optimizer, step = compiled_step()
    state, _ = step(new_state(optimizer), batch_in("packed"))
    before = jax.tree.map(jnp.copy, state)
    failed = [dataclasses.replace(t, status="failed") for t in trajectories()]
    empty, _ = make_batch(failed, role_advantages(failed)[0], row_length=ROW, rows_multiple=24)
    state, stats = step(state, empty)
    assert equal(state.params, before.params) and equal(state.opt_state, before.opt_state)
    assert stats["skipped"] == 1 and int(state.step) == 2
    for name in ("loss", "grad_norm", "update_norm", "tokens", "ratio", "logprob_diff_max"):
        assert stats[name] == 0, name
    assert all(bool(jnp.isfinite(value)) for value in stats.values())


@pytest.mark.parametrize("denominator", ["tokens", "role"])
def test_leaving_out_what_has_no_advantage_changes_no_gradient(denominator):
    """The loss is divided by the tokens left out too."""
    advantages, _ = role_advantages(trajectories())
    some = [values * (number % 2) for number, values in enumerate(advantages)]  # every other attempt
    options = {"row_length": ROW, "rows_multiple": 24}
    full, full_stats = make_batch(trajectories(), some, **options)
    short, stats = make_batch(trajectories(), some, **options, drop_zero_advantage=True)
    assert 0 < short.loss_mask.sum() < full.loss_mask.sum() and stats["dropped_tokens"] > 0
    config = dataclasses.replace(CONFIG, denominator=denominator)
    parameters = BAG.init(jax.random.key(2))
    loss, gradient, expected = compiled_gradient(config, BAG)(parameters, full)
    found = compiled_gradient(config, BAG)(parameters, short, role_tokens=role_tokens(stats))
    np.testing.assert_allclose(found[0], loss, rtol=1e-5)
    assert distance(found[1], gradient) < 1e-5
    for name in expected:
        if name.startswith(("tokens", "advantage")):
            np.testing.assert_allclose(found[2][name], expected[name], rtol=1e-5, err_msg=name)
    assert found[2]["ratio"] == pytest.approx(1.0)


def test_a_batch_from_which_everything_was_left_out_takes_the_step_that_the_full_one_takes():
    """AdamW's moments and its weight decay move parameters without a gradient too."""
    optimizer = make_optimizer(1e-3)
    step = make_train_step(BAG, optimizer, CONFIG)
    nothing = [np.zeros(len(t.segments), np.float32) for t in trajectories()]
    states = []
    for drop in (False, True):
        batch, counts = make_batch(trajectories(), nothing, row_length=ROW, rows_multiple=24, drop_zero_advantage=drop)
        assert batch.loss_mask.any() != drop
        state = init_train_state(BAG.init(jax.random.key(0)), optimizer)
        state, _ = step(state, batch_in("packed"), None, role_tokens(counts))
        state, stats = step(state, batch, None, role_tokens(counts))
        assert stats["skipped"] == 0 and stats["loss"] == 0 and stats["update_norm"] > 0
        states.append(state)
    assert equal(*states)


def test_a_gradient_that_is_not_finite_is_not_applied():
    optimizer, step = compiled_step()
    batch = batch_in("packed")
    bad = batch.advantages.copy()
    bad[tuple(np.argwhere(batch.loss_mask)[0])] = np.inf
    state, stats = step(new_state(optimizer), dataclasses.replace(batch, advantages=bad))
    assert equal(state.params, params()) and equal(state.opt_state, optimizer.init(params()))
    assert stats["skipped"] == 1 and stats["update_norm"] == 0 and not jnp.isfinite(stats["grad_norm"])
    state, stats = step(state, batch)
    assert stats["skipped"] == 0 and not equal(state.params, params())
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state))


def test_padding_and_what_masked_places_hold_change_nothing():
    batch = batch_in("packed")
    want = compiled_gradient(CONFIG)(params(), batch)
    free = ~batch.loss_mask
    other = dataclasses.replace(
        batch,
        tokens=np.where(batch.sequence_ids == 0, 3, batch.tokens),
        advantages=np.where(free, np.nan, batch.advantages),
        old_logprobs=np.where(free, np.inf, batch.old_logprobs),
        role=np.where(free, 1, batch.role),
    )
    assert (batch.sequence_ids == 0).any()
    got = compiled_gradient(CONFIG)(params(), other)
    assert got[0] == want[0] and distance(got[1], want[1]) < 1e-6


def test_each_stop_id_gets_gradient():
    """With an advantage on a segment's last token alone, the gradient raises that token, from the state before it."""
    batch = batch_in("packed")
    ends = np.zeros_like(batch.loss_mask)
    ends[:, :-1] = batch.loss_mask[:, :-1] & ~batch.loss_mask[:, 1:]
    ends[:, -1] = batch.loss_mask[:, -1]
    assert ends.sum() == sum(len(t.segments) for t in trajectories())
    r, t = np.argwhere(ends)[2]
    only = np.zeros_like(batch.advantages)
    only[r, t] = 1.0
    parameters = BAG.init(jax.random.key(3))
    gradient = compiled_gradient(CONFIG, BAG)(parameters, dataclasses.replace(batch, advantages=only))[1]
    # -(indicator - probability) x hidden state: only the trained token's own column points against that state.
    state = jnp.tanh(parameters["embedding"][batch.tokens[r, t - 1]] + parameters["place"] * batch.positions[r, t - 1])
    along = np.asarray(state @ gradient["head"])
    assert np.flatnonzero(along < 0).tolist() == [batch.tokens[r, t]] and np.all(along[LIMIT:] == 0)


def test_bad_settings_are_errors():
    for options, message in (
        ({"loss": "dpo"}, "unknown loss 'dpo'; choose one of 'ppo'"),
        ({"old_logprobs": "judge"}, "unknown old_logprobs 'judge'"),
        ({"denominator": "rows"}, "unknown denominator"),
        ({"micro_batch_rows": 0}, "micro_batch_rows must be at least 1"),
        ({"clip_low": 1.0}, "clip_low 1.0 must be in"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1"),
        ({"kl_coef": -1.0}, "kl_coef must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainStepConfig(**options)
    with pytest.raises(ValueError, match="kl_coef=0.1 needs ref_logprobs"):
        compiled_gradient(dataclasses.replace(CONFIG, kl_coef=0.1))(params(), batch_in("packed"))
    with pytest.raises(ValueError, match="24 rows cannot be cut into micro-batches of 7"):
        compiled_gradient(dataclasses.replace(CONFIG, micro_batch_rows=7))(params(), batch_in("packed"))

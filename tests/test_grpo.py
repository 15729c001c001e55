"""Role-wise advantages and losses against numbers worked by hand, and what must never leak into either."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.grpo import count_denominators, low_variance_kl, policy_loss, role_advantages
from envace_jax.types import Role, Segment, Trajectory

A, R = Role.ACT, Role.REHEARSE
NAN = float("nan")


def trajectory(roles, reward, *, group=0, status="ok", length=1):
    segments = tuple(
        Segment(role, np.zeros(2, np.int32), np.zeros(length, np.int32), np.zeros(length, np.float32), "stop", 0)
        for role in roles
    )
    return Trajectory("t", group, 0, segments, reward, status, "done")


# A ragged group: unequal numbers of segments, one trajectory that never rehearsed, one failed, one without a finite
# reward, and a second task between them.
RAGGED = [
    trajectory([A, R, A], 1.0),
    trajectory([A], 0.5),
    trajectory([A, R], 0.25, group=7),
    trajectory([A, R, R, R], 0.0),
    trajectory([A, R, A], NAN, status="failed"),
    trajectory([A, R], NAN),
]
# Group 0 ACT rewards 1, 1, .5, 0; REHEARSE rewards 1, 0, 0, 0. Group 7 has one segment in each role.
TABLE = {
    # mean over segments: ACT 2.5 / 4 = .625, REHEARSE 1 / 4 = .25
    ("segment_mean", "none"): [[0.375, 0.75, 0.375], [-0.125], [0.25, 0.25], [-0.625, -0.25, -0.25, -0.25]],
    # mean over trajectories: ACT 1.5 / 3 = .5, REHEARSE 1 / 2 = .5
    ("trajectory_mean", "none"): [[0.5, 0.5, 0.5], [0.0], [0.25, 0.25], [-0.5, -0.5, -0.5, -0.5]],
    # others: ACT (.5 + 0) / 2, (1 + 0) / 2, (1 + .5) / 2; REHEARSE 0, 1
    ("leave_one_out", "none"): [[0.75, 1.0, 0.75], [0.0], [0.25, 0.25], [-0.75, -1.0, -1.0, -1.0]],
    # ACT variance (2 * .375^2 + .125^2 + .625^2) / 3 = .6875 / 3; REHEARSE (.75^2 + 3 * .25^2) / 3 = .25
    ("segment_mean", "std"): [
        [0.375 / math.sqrt(0.6875 / 3), 1.5, 0.375 / math.sqrt(0.6875 / 3)],
        [-0.125 / math.sqrt(0.6875 / 3)],
        [0.25, 0.25],
        [-0.625 / math.sqrt(0.6875 / 3), -0.5, -0.5, -0.5],
    ],
}


@pytest.mark.parametrize(("baseline", "scale"), TABLE)
def test_a_ragged_group_by_hand(baseline, scale):
    found, stats = role_advantages(RAGGED, baseline=baseline, scale=scale)
    for got, want in zip(found, [*TABLE[baseline, scale], [0.0] * 3, [0.0] * 2], strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert stats["masked_trajectories"] == 1 and stats["nonfinite_rewards"] == 1


def test_the_default_is_the_authors_choice():
    for got, want in zip(role_advantages(RAGGED)[0], TABLE["segment_mean", "none"], strict=False):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_statistics_by_hand():
    _, stats = role_advantages(RAGGED)
    assert stats["segments_act"] == 5 and stats["segments_rehearse"] == 5
    assert stats["groups_act"] == stats["groups_rehearse"] == 2
    assert stats["singleton_groups_act"] == stats["singleton_groups_rehearse"] == 1
    assert stats["zero_variance_groups_act"] == stats["zero_variance_groups_rehearse"] == 0
    assert stats["advantage_abs_act"] == pytest.approx((0.375 * 2 + 0.125 + 0.25 + 0.625) / 5)
    assert stats["advantage_abs_rehearse"] == pytest.approx((0.75 + 0.25 + 3 * 0.25) / 5)
    assert stats["reward_spread_act"] == stats["reward_spread_rehearse"] == 0.5  # (1 + 0) / 2


def test_singletons():
    lone = [trajectory([A, R, R], 0.75)]
    for scale in ("none", "std"):
        raw, _ = role_advantages(lone, scale=scale)
        np.testing.assert_array_equal(raw[0], [0.75, 0, 0])  # two rehearsals are a group of two equal rewards
        zero, _ = role_advantages(lone, singleton="zero", scale=scale)
        np.testing.assert_array_equal(zero[0], [0, 0, 0])
        # One trajectory has no others to be compared with, however many segments it has.
        alone, _ = role_advantages(lone, baseline="leave_one_out", scale=scale)
        np.testing.assert_array_equal(alone[0], [0.75, 0.75, 0.75])
        alone, _ = role_advantages(lone, baseline="leave_one_out", singleton="zero", scale=scale)
        np.testing.assert_array_equal(alone[0], [0, 0, 0])
    # A partner that failed or has no finite reward is no partner.
    for partner in (trajectory([A], 0.0, status="failed"), trajectory([A], NAN), trajectory([A], math.inf)):
        found, _ = role_advantages([trajectory([A], 0.5), partner])
        np.testing.assert_array_equal(np.concatenate(found), [0.5, 0])


def test_zero_variance_is_max_minus_min_below_the_tolerance():
    close = [trajectory([A], 0.3), trajectory([A], 0.3 + 1e-8), trajectory([A], 0.3)]
    for scale in ("none", "std"):
        found, stats = role_advantages(close, scale=scale)
        np.testing.assert_array_equal(np.concatenate(found), [0, 0, 0])
        assert stats["zero_variance_groups_act"] == 1 and stats["groups_rehearse"] == 0
    apart, stats = role_advantages(close, scale="std", tolerance=1e-9)
    assert stats["zero_variance_groups_act"] == 0 and np.all(np.abs(np.concatenate(apart)) > 0.5)


def test_no_trajectories_and_unknown_names():
    found, stats = role_advantages([])
    assert found == [] and all(value == 0 for value in stats.values())
    with pytest.raises(ValueError, match="unknown baseline 'median'; choose one of 'segment_mean'"):
        role_advantages([], baseline="median")
    with pytest.raises(ValueError, match="unknown scale 'mad'; choose one of 'none', 'std'"):
        role_advantages([], scale="mad")
    with pytest.raises(ValueError, match="unknown singleton 'keep'; choose one of 'raw', 'zero'"):
        role_advantages([], singleton="keep")


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 1), st.integers(0, 4), st.integers(0, 4), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["segment_mean", "trajectory_mean", "leave_one_out"]),
    st.sampled_from(["none", "std"]),
    st.data(),
)
def test_act_segments_never_move_rehearse_advantages(rows, baseline, scale, data):
    """Invariant 6, both ways: repeating or lengthening one role's segments leaves the other role's advantages alone."""

    def advantages(acts, rehearsals, length):
        attempts = [
            trajectory([A] * a + [R] * r, reward, group=group, length=length, status="failed" if odd == 9 else "ok")
            for (group, reward, _, _, odd), a, r in zip(rows, acts, rehearsals, strict=True)
        ]
        found, _ = role_advantages(attempts, baseline=baseline, scale=scale)
        act = [f[:a] for f, a in zip(found, acts, strict=True)]
        return act, [f[a:] for f, a in zip(found, acts, strict=True)]

    acts, rehearsals = [row[2] for row in rows], [row[3] for row in rows]
    more = [n + data.draw(st.integers(0, 5)) for n in acts]
    act, rehearse = advantages(acts, rehearsals, 1)
    _, again = advantages(more, rehearsals, 9)
    for one, other in zip(rehearse, again, strict=True):
        np.testing.assert_array_equal(one, other)
    more = [n + data.draw(st.integers(0, 5)) for n in rehearsals]
    again, _ = advantages(acts, more, 9)
    for one, other in zip(act, again, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 4)), min_size=2, max_size=6))
def test_baselines_are_centred_in_their_own_weighting(rows):
    """segment_mean sums to 0 over segments; trajectory_mean and leave_one_out over trajectories."""
    attempts = [trajectory([A] * n, reward) for reward, n in rows]
    by_segment, _ = role_advantages(attempts, tolerance=0.0)
    if sum(n for _, n in rows) > 1:
        assert abs(np.concatenate(by_segment).sum()) < 1e-5
    for baseline in ("trajectory_mean", "leave_one_out"):
        found, _ = role_advantages(attempts, baseline=baseline, tolerance=0.0)
        assert abs(sum(f[0] for f in found)) < 1e-5


# --- losses ---


def loss_of(ratios, advantages, mask=None, role=None, ref=None, denominator="tokens", **options):
    ratios, advantages = jnp.asarray([ratios], jnp.float32), jnp.asarray([advantages], jnp.float32)
    mask = jnp.ones(ratios.shape, bool) if mask is None else jnp.asarray([mask], bool)
    role = jnp.zeros(ratios.shape, jnp.int32) if role is None else jnp.asarray([role], jnp.int32)
    ref = None if ref is None else jnp.asarray([ref], jnp.float32)
    denominators = count_denominators(mask, role, denominator)
    return policy_loss(
        jnp.log(ratios), jnp.zeros_like(ratios), advantages, mask, role, ref, denominators=denominators, **options
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 1.0, -1.0, 0),
        (1.5, 1.0, -1.2, 1),  # above 1 + clip_high: no more reward for going further
        (1.5, -1.0, 1.5, 0),  # the pessimistic side is not clipped
        (0.5, 1.0, -0.5, 0),
        (0.5, -1.0, 0.8, 1),  # below 1 - clip_low
        (4.0, -1.0, 3.0, 1),  # dual clip
        (4.0, -0.5, 1.5, 1),
        (4.0, 0.0, 0.0, 0),
    ],
)
def test_one_token_by_hand(ratio, advantage, expected, clipped):
    loss, stats = loss_of([ratio], [advantage])
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert stats["clip_fraction"] == clipped
    assert stats["ratio"] == pytest.approx(ratio) and stats["ratio_deviation_max"] == pytest.approx(abs(ratio - 1))
    assert "kl" not in stats


def test_options_by_hand():
    assert loss_of([1.3], [1.0], clip_high=0.28)[0] == pytest.approx(-1.28)  # clip-higher
    assert loss_of([1.3], [1.0], clip_high=0.4)[0] == pytest.approx(-1.3)
    assert loss_of([0.5], [-1.0], clip_low=0.3, clip_high=0.9)[0] == pytest.approx(0.7)
    assert loss_of([4.0], [-1.0], dual_clip=0)[0] == pytest.approx(4.0)
    assert loss_of([4.0], [-1.0], dual_clip=2.0)[0] == pytest.approx(2.0)


def test_low_variance_kl_by_hand():
    # ref / policy = 2: 2 - ln 2 - 1; equal: 0; 1/2: 1/2 + ln 2 - 1.
    found = low_variance_kl(jnp.log(jnp.array([0.25, 0.5, 0.5])), jnp.log(jnp.array([0.5, 0.5, 0.25])))
    expected = [1 - math.log(2), 0.0, math.log(2) - 0.5]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    loss, stats = loss_of([1.0, 1.0], [0.5, -1.0], ref=[math.log(2), 0.0], kl_coef=0.1)
    assert stats["kl"] == pytest.approx((1 - math.log(2)) / 2, rel=1e-5)
    assert loss == pytest.approx((-0.5 + 1.0) / 2 + 0.1 * (1 - math.log(2)) / 2, rel=1e-5)
    assert loss_of([1.0], [1.0], ref=[5.0])[0] == pytest.approx(-1.0)  # measured, not trained, at coefficient 0


def test_kl_is_at_least_zero_and_unbiased_in_expectation():
    p, q = jax.nn.softmax(jnp.array([0.3, -1.0, 0.9])), jax.nn.softmax(jnp.array([-0.2, 0.4, 0.1]))
    each = low_variance_kl(jnp.log(p), jnp.log(q))
    assert jnp.all(each >= 0)
    np.testing.assert_allclose(jnp.sum(p * each), jnp.sum(p * jnp.log(p / q)), rtol=1e-4)


def test_denominators_by_hand():
    # Losses -1, -1, -1 (ACT) and +2 (REHEARSE), one masked place.
    ratios, advantages, mask, role = [1.0] * 5, [1.0, 1.0, 1.0, -2.0, 9.0], [1, 1, 1, 1, 0], [0, 0, 0, 1, 1]
    assert loss_of(ratios, advantages, mask, role)[0] == pytest.approx((-3 + 2) / 4)
    assert loss_of(ratios, advantages, mask, role, denominator="role")[0] == pytest.approx((-1 + 2) / 2)
    # With one role only, both are the plain token mean.
    for denominator in ("tokens", "role"):
        assert loss_of(ratios, advantages, [1, 1, 0, 0, 0], role, denominator=denominator)[0] == pytest.approx(-1.0)
    with pytest.raises(ValueError, match="unknown denominator 'rows'; choose one of 'tokens', 'role'"):
        count_denominators(jnp.ones((1, 1), bool), jnp.zeros((1, 1), jnp.int32), "rows")


@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
def test_nothing_leaks_from_masked_places(poison):
    mask = jnp.array([[True, False, True]])
    role = jnp.array([[0, 12345, 1]])
    clean, dirty = jnp.array([[-0.1, 0.0, -0.3]]), jnp.array([[-0.1, poison, -0.3]])
    denominators = count_denominators(mask, role)

    def loss(values, others):
        return policy_loss(values, others, others, mask, role, others, denominators=denominators, kl_coef=0.1)

    (want, want_stats), want_gradient = jax.value_and_grad(loss, has_aux=True)(clean, clean - 0.1)
    (got, got_stats), gradient = jax.value_and_grad(loss, has_aux=True)(dirty, dirty - 0.1)
    assert got == want and {k: float(v) for k, v in got_stats.items()} == {k: float(v) for k, v in want_stats.items()}
    np.testing.assert_array_equal(gradient, want_gradient)
    assert gradient[0, 1] == 0 and gradient[0, 0] != 0 and gradient[0, 2] != 0


def test_an_empty_mask_gives_zero_and_extreme_ratios_stay_finite():
    loss, stats = loss_of([1.0, 2.0], [1.0, 1.0], [0, 0], ref=[0.0, 0.0])
    assert loss == 0 and all(value == 0 for value in stats.values())
    mask, role = jnp.ones((1, 2), bool), jnp.zeros((1, 2), jnp.int32)
    far = jnp.array([[-500.0, 0.0]])

    def loss_far(values):
        counts = count_denominators(mask, role)
        return policy_loss(
            values, far[:, ::-1], -1.0 * mask, mask, role, far[:, ::-1], denominators=counts, kl_coef=1.0
        )[0]

    value, gradient = jax.value_and_grad(loss_far)(far)
    assert jnp.isfinite(value) and jnp.all(jnp.isfinite(gradient))


def test_the_on_policy_gradient_is_the_plain_policy_gradient():
    """At ratio 1 the gradient is -A / tokens for each trained token, whatever the clips."""
    advantages, mask = jnp.array([[0.5, -2.0, 3.0]]), jnp.array([[True, True, False]])
    role = jnp.zeros((1, 3), jnp.int32)
    old = jnp.array([[-1.0, -0.2, -3.0]])
    gradient = jax.grad(
        lambda now: policy_loss(now, old, advantages, mask, role, denominators=count_denominators(mask, role))[0]
    )(old)
    np.testing.assert_allclose(gradient, [[-0.25, 1.0, 0.0]], rtol=1e-6)

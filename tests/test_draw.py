"""The draw is exact: chi-square against the softmax, top-p against brute force, edges worked by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from envace_jax import draw as draw_module
from envace_jax.draw import _first_above, draw, nucleus_threshold, random_words

QWEN3_VOCABULARY = 151_936
QWEN3_TOKENS = 151_669


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def brute_force_nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """bool[V]: most likely first until the mass reaches top_p, and whatever ties with the last one."""
    order = np.argsort(-probabilities, kind="stable")
    mass = np.cumsum(probabilities[order])
    last = order[np.argmax(mass >= top_p * mass[-1])]
    return probabilities >= probabilities[last]


def many_draws(logits: np.ndarray, count: int, temperature: float, top_p: float, limit: int) -> np.ndarray:
    """`count` draws from one row of logits, which is exponentiated once and shared by all of them."""
    row = jnp.asarray(logits, jnp.float32)[None]

    @jax.jit
    def block(first: jax.Array) -> jax.Array:
        def one(position: jax.Array) -> jax.Array:
            key, setting = jnp.array([[7, 11]], jnp.uint32), jnp.ones(1, jnp.float32)
            return draw(row, key, position[None], setting * temperature, setting * top_p, limit)[0][0]

        return jax.vmap(one)(first + jnp.arange(2048))

    blocks = [np.asarray(block(jnp.int32(start))) for start in range(0, count, 2048)]
    return np.concatenate(blocks)[:count]


def chi_square_p(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of the counts; ids are pooled from likely to unlikely so that each pool expects at least 20."""
    expected = probabilities * len(tokens)
    observed = np.bincount(tokens, minlength=len(probabilities)).astype(float)
    order = np.argsort(-expected)
    pool = np.floor(np.cumsum(expected[order]) / 20).astype(int)
    pool = np.minimum(pool, pool[-1] - 1) if pool[-1] > 0 else pool
    used, pool = np.unique(pool, return_inverse=True)
    expected_pools = np.bincount(pool, weights=expected[order], minlength=len(used))
    observed_pools = np.bincount(pool, weights=observed[order], minlength=len(used))
    assert expected_pools.min() > 5
    if len(used) == 1:  # one id has all the mass
        return 1.0
    return float(stats.chisquare(observed_pools, expected_pools * len(tokens) / expected_pools.sum()).pvalue)


def test_first_above_worked_by_hand():
    mass = jnp.tile(jnp.array([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]), (7, 1))
    uniform = jnp.array([0.0, 0.125, 0.25, 0.5, 0.75, 1 - 2.0**-24, 1.0])
    # 1.0 never occurs as a uniform, but uniform * total may round up to the total: the last with mass takes it.
    assert _first_above(mass, uniform).tolist() == [1, 1, 3, 3, 4, 4, 4]


@given(st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.1, 1.0]), min_size=2, max_size=40), st.integers(0, 2**24 - 1))
@settings(max_examples=60, deadline=None)
def test_an_id_without_mass_is_never_chosen(mass, word):
    mass = [*mass, 1.0] + [0.0] * (41 - len(mass))
    chosen = int(_first_above(jnp.array([mass], jnp.float32), jnp.array([word * 2.0**-24], jnp.float32))[0])
    assert mass[chosen] > 0


@pytest.mark.parametrize("edge", [0.0, 1 - 2.0**-24, 1.0])
def test_masked_and_impossible_ids_are_never_drawn_at_the_edges(monkeypatch, edge):
    logits = np.full((1, 300), -np.inf, np.float32)
    logits[0, [5, 130, 261]] = [0.0, 1.0, 2.0]
    logits[0, 290:] = 50.0  # beyond the tokenizer
    rows = jnp.full(1, edge, jnp.float32)
    monkeypatch.setattr(draw_module, "random_words", lambda keys, positions: (rows, rows))
    one = jnp.ones(1, jnp.float32)
    token, logprob = draw(jnp.asarray(logits), jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), one, one, 290)
    assert int(token[0]) in (5, 130, 261) and np.isfinite(float(logprob[0]))


def test_uniforms_depend_on_key_and_position_only():
    keys = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (64, 2), dtype=np.uint32))
    positions = jnp.arange(64, dtype=jnp.int32)
    first, second = random_words(keys, positions)
    order = np.random.default_rng(1).permutation(64)
    again, _ = random_words(keys[order], positions[order])
    assert np.array_equal(again, first[order])
    alone, _ = random_words(keys[3:4], positions[3:4])
    assert alone[0] == first[3]
    assert not np.array_equal(first, second)
    assert not np.array_equal(random_words(keys, positions + 1)[0], first)


def test_uniforms_are_uniform_and_the_two_are_independent():
    count = 65_536
    first, second = random_words(jnp.zeros((count, 2), jnp.uint32), jnp.arange(count, dtype=jnp.int32))
    cells = np.histogram2d(np.asarray(first), np.asarray(second), bins=16, range=[[0, 1], [0, 1]])[0].ravel()
    assert 0 <= float(first.min()) and float(first.max()) < 1
    assert stats.chisquare(cells).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = 2 * np.random.default_rng(3).normal(size=300).astype(np.float32)
    tokens = many_draws(logits, 100_000, temperature, 1.0, 290)
    wanted = np.append(softmax(logits[:290], temperature), np.zeros(10))
    assert tokens.max() < 290
    assert chi_square_p(tokens, wanted) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_draws_follow_the_softmax_over_qwen3s_vocabulary(top_p, scale):
    logits = scale * np.random.default_rng(5).normal(size=QWEN3_VOCABULARY).astype(np.float32)
    tokens = many_draws(logits, 400_000, 1.0, top_p, QWEN3_TOKENS)
    wanted = np.append(softmax(logits[:QWEN3_TOKENS]), np.zeros(QWEN3_VOCABULARY - QWEN3_TOKENS))
    if top_p < 1:
        inside = brute_force_nucleus(wanted, top_p)
        assert inside[tokens].all()
        wanted = np.where(inside, wanted, 0) / wanted[inside].sum()
    assert tokens.max() < QWEN3_TOKENS
    assert chi_square_p(tokens, wanted) > 1e-4


def test_logprobs_and_greedy_of_mixed_rows():
    generator = np.random.default_rng(2)
    logits = 3 * generator.normal(size=(6, 200)).astype(np.float32)
    logits[1, [17, 150]] = 20.0  # a tie: the lowest id wins
    temperature = jnp.array([0.0, 0.0, 1.0, 0.7, 1.5, 1.0])
    top_p = jnp.array([1.0, 0.5, 1.0, 1.0, 1.0, 0.3])
    keys = jnp.asarray(generator.integers(0, 2**32, (6, 2), dtype=np.uint32))
    tokens, logprobs = draw(jnp.asarray(logits), keys, jnp.arange(6, dtype=jnp.int32), temperature, top_p, 180)
    assert tokens[0] == logits[0, :180].argmax() and tokens[1] == 17
    for row, scale in enumerate([1.0, 1.0, 1.0, 0.7, 1.5, 1.0]):  # greedy rows: at temperature 1
        wanted = np.log(softmax(logits[row, :180], scale)[int(tokens[row])])
        assert float(logprobs[row]) == pytest.approx(wanted, abs=2e-6)


def test_top_p_draws_exactly_the_nucleus():
    logits = np.random.default_rng(8).normal(size=100).astype(np.float32)
    probabilities = softmax(logits)
    for top_p in (0.02, 0.5, 0.95):
        inside = brute_force_nucleus(probabilities, top_p)
        tokens = many_draws(logits, 40_960, 1.0, top_p, 100)
        assert set(tokens.tolist()) == set(np.flatnonzero(inside).tolist())
        assert chi_square_p(tokens, np.where(inside, probabilities, 0) / probabilities[inside].sum()) > 1e-4


@functools.partial(jax.jit)
def _threshold(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    return nucleus_threshold(weights, top_p)


@given(st.lists(st.integers(0, 64), min_size=31, max_size=31), st.integers(1, 63))
@settings(max_examples=100, deadline=None)
def test_nucleus_equals_brute_force_with_ties(sixtyfourths, numerator):
    weights = np.array([64, *sixtyfourths], np.float32) / 64  # sums are exact, ties abound
    top_p = numerator / 64
    threshold = float(_threshold(jnp.asarray(weights)[None], jnp.array([top_p], jnp.float32))[0])
    assert np.array_equal(weights >= threshold, brute_force_nucleus(weights.astype(np.float64), top_p))


def test_logits_that_are_not_numbers_stay_inside_the_vocabulary():
    one = jnp.ones(1, jnp.float32)
    token, logprob = draw(
        jnp.full((1, 256), jnp.nan), jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.int32), one, one, 250
    )
    assert 0 <= int(token[0]) < 250 and np.isnan(float(logprob[0]))

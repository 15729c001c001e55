"""Chunked log-probabilities: numbers worked by hand, parity with the dense formula, and no array of all logits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.logprobs import token_logprobs


def dense(hidden, head, targets, temperature, limit):
    logits = (hidden.astype(jnp.float32) @ head.astype(jnp.float32)) / temperature
    logits = logits[..., :limit]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def inputs(rows=3, time=10, width=8, vocab=17, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (rows, time, width), dtype)
    head = jax.random.normal(keys[1], (width, vocab), dtype)
    targets = jax.random.randint(keys[2], (rows, time), 0, vocab - 4)
    return hidden, head, targets, jax.random.normal(keys[3], (rows, time))


def test_worked_by_hand():
    # Logits (ln 1, ln 2, ln 5) are probabilities 1/8, 2/8, 5/8; at temperature 1/2 they go as 1 : 4 : 25.
    head = jnp.log(jnp.array([[1.0, 2.0, 5.0]]))
    hidden = jnp.ones((1, 3, 1))
    targets = jnp.array([[0, 1, 2]])
    plain = token_logprobs(hidden, head, targets)
    np.testing.assert_allclose(plain, [[math.log(1 / 8), math.log(2 / 8), math.log(5 / 8)]], rtol=1e-6)
    sharp = token_logprobs(hidden, head, targets, temperature=0.5)
    np.testing.assert_allclose(sharp, [[math.log(1 / 30), math.log(4 / 30), math.log(25 / 30)]], rtol=1e-6)
    limited = token_logprobs(hidden, head, jnp.array([[0, 1, 1]]), vocab_limit=2)
    np.testing.assert_allclose(limited, [[math.log(1 / 3), math.log(2 / 3), math.log(2 / 3)]], rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 12, 15, 30, 1000])  # 1 position of each row, ragged, whole
@pytest.mark.parametrize(("temperature", "limit"), [(1.0, None), (0.7, 13)])
def test_values_and_gradients_equal_the_dense_formula(chunk, temperature, limit):
    hidden, head, targets, weights = inputs()

    def chunked_loss(hidden, head):
        found = token_logprobs(hidden, head, targets, temperature=temperature, vocab_limit=limit, chunk=chunk)
        return jnp.sum(found * weights), found

    def dense_loss(hidden, head):
        found = dense(hidden, head, targets, temperature, limit)
        return jnp.sum(found * weights), found

    got, found = jax.jit(jax.grad(chunked_loss, (0, 1), has_aux=True))(hidden, head)
    want, expected = jax.grad(dense_loss, (0, 1), has_aux=True)(hidden, head)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_ids_beyond_the_tokenizer_get_no_probability_and_no_gradient():
    hidden, head, targets, _ = inputs()
    gradient = jax.grad(lambda h: token_logprobs(hidden, h, targets, vocab_limit=13, chunk=6).sum())(head)
    assert np.all(np.asarray(gradient)[:, 13:] == 0.0) and np.all(np.isfinite(gradient))
    every = jnp.arange(13)[None].repeat(3, 0)
    total = jnp.exp(token_logprobs(hidden[:, :1].repeat(13, 1), head, every, vocab_limit=13)).sum(1)
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_bfloat16_states_give_float32_log_probabilities():
    hidden, head, targets, weights = inputs(dtype=jnp.bfloat16)
    found = token_logprobs(hidden, head, targets, chunk=6)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, dense(hidden, head, targets, 1.0, None), rtol=1e-5, atol=1e-5)
    gradients = jax.grad(lambda h, w: (token_logprobs(h, w, targets, chunk=6) * weights).sum(), (0, 1))(hidden, head)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16]


def test_memory_grows_with_the_chunk_and_not_with_time_times_vocabulary():
    """Forward and backward together; the logits of all 2 x 512 tokens alone would take 32 MB."""
    vocab, width = 8192, 4

    def temporary_bytes(time, chunk):
        def loss(hidden, head, targets):
            return token_logprobs(hidden, head, targets, chunk=chunk).sum()

        shapes = [
            jax.ShapeDtypeStruct((2, time, width), jnp.float32),
            jax.ShapeDtypeStruct((width, vocab), jnp.float32),
            jax.ShapeDtypeStruct((2, time), jnp.int32),
        ]
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one_token = vocab * 4
    assert temporary_bytes(512, 32) - temporary_bytes(256, 32) < 2 * 256 * one_token / 50
    assert temporary_bytes(512, 32) < 512 * one_token / 3
    assert temporary_bytes(512, 128) - temporary_bytes(512, 32) > 0.9 * (128 - 32) * one_token


def test_bad_arguments_are_errors():
    hidden, head, targets, _ = inputs()
    with pytest.raises(ValueError, match="temperature must be > 0"):
        token_logprobs(hidden, head, targets, temperature=0.0)
    with pytest.raises(ValueError, match="at least 1 token"):
        token_logprobs(hidden, head, targets, chunk=0)

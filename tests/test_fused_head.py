"""The fused head: the numbers of the dense formula, three products with the head, and no work for untrained tokens."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax import train_step
from envace_jax.fused_head import add_stats, head_loss
from envace_jax.grpo import count_denominators, policy_loss
from envace_jax.logprobs import token_logprobs

ROWS, TIME, WIDTH, VOCAB, LIMIT = 4, 12, 8, 19, 15


def token_loss(old, kl_coef, logprobs, mask, inputs, denominators):
    """The library's own loss, and how far sampler and trainer are apart at most."""
    stored = inputs["old_logprobs"]
    before = jax.lax.stop_gradient(logprobs) if old == "trainer" else stored
    arrays = logprobs, before, inputs["advantages"], mask, inputs["role"], inputs["ref_logprobs"]
    loss, stats = policy_loss(*arrays, denominators=denominators, clip_high=0.3, kl_coef=kl_coef)
    apart = jnp.where(mask, jnp.abs(jax.lax.stop_gradient(logprobs) - stored), 0.0)
    # One for each call, so that the sum over chunks is their number.
    return loss, stats | {"apart_max": jnp.max(apart, initial=0.0), "calls": jnp.ones(())}


@dataclasses.dataclass(frozen=True)
class Options:
    temperature: float = 1.0
    limit: int | None = None
    old: str = "sampler"
    kl_coef: float = 0.0
    denominator: str = "tokens"


PLAIN = Options()
OPTIONS = [
    PLAIN,
    Options(temperature=0.7, limit=LIMIT, kl_coef=0.2, denominator="role"),
    Options(limit=LIMIT, old="trainer"),
]


def dense_logprobs(hidden, head, targets, options):
    logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32) / options.temperature
    return jnp.take_along_axis(jax.nn.log_softmax(logits[..., : options.limit]), targets[..., None], axis=-1)[..., 0]


def chunked_logprobs(hidden, head, targets, options):
    """The path that losses of whole sequences take."""
    return token_logprobs(
        hidden, head, targets, temperature=options.temperature, vocab_limit=options.limit, chunk=ROWS * 5
    )


def with_gradients(loss):
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@functools.cache
def separate(options, logprobs_of):
    """((loss, stats), (d_hidden, d_head)) by log-probabilities of all tokens first, then the loss."""

    def loss(hidden, head, targets, mask, inputs):
        denominators = count_denominators(mask, inputs["role"], options.denominator)
        found = logprobs_of(hidden, head, targets, options)
        return token_loss(options.old, options.kl_coef, found, mask, inputs, denominators)

    return with_gradients(loss)


def fused_loss(options, chunk, groups, block, hidden, head, targets, mask, inputs, mesh=None):
    return head_loss(
        hidden,
        head,
        targets,
        mask,
        inputs,
        count_denominators(mask, inputs["role"], options.denominator),
        functools.partial(token_loss, options.old, options.kl_coef),
        temperature=options.temperature,
        vocab_limit=options.limit,
        chunk=chunk,
        vocab_block=block,
        groups=groups,
        mesh=mesh,
    )


@functools.cache
def fused(options, chunk, groups=1, block=VOCAB):
    return with_gradients(functools.partial(fused_loss, options, chunk, groups, block))


def problem(mask, seed=0, dtype=jnp.float32, kl=True):
    """(hidden, head, targets, mask, inputs), random."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(ROWS, TIME, WIDTH)), dtype)
    head = jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), dtype)
    floats = {name: rng.normal(size=mask.shape).astype(np.float32) for name in ("advantages", "noise", "ref")}
    targets = rng.integers(0, LIMIT, mask.shape).astype(np.int32)
    near = np.asarray(dense_logprobs(hidden, head, targets, PLAIN))
    inputs = {
        "advantages": floats["advantages"],
        "old_logprobs": near + 0.4 * floats["noise"],  # near enough that some ratios are clipped and some are not
        "role": rng.integers(0, 2, mask.shape).astype(np.int32),
        "ref_logprobs": near + 0.4 * floats["ref"] if kl else None,
    }
    return hidden, head, targets, np.asarray(mask), inputs


def masks():
    rng = np.random.default_rng(1)
    found = {name: np.zeros((ROWS, TIME), bool) for name in ("none", "one", "uneven", "rows without")}
    found["one"][2, -1] = True
    found["uneven"][0, :] = found["uneven"][1, 3:5] = found["uneven"][3, ::2] = True
    found["rows without"][1:3] = rng.random((2, TIME)) < 0.5
    return found | {"all": np.ones((ROWS, TIME), bool), "random": rng.random((ROWS, TIME)) < 0.3}


def assert_same(got, want, rtol=1e-5):
    (loss, stats), gradients = got
    (expected, expected_stats), expected_gradients = want
    np.testing.assert_allclose(loss, expected, rtol=rtol, atol=1e-6)
    assert stats.keys() == expected_stats.keys()
    for name in stats.keys() - {"calls"}:
        np.testing.assert_allclose(stats[name], expected_stats[name], rtol=rtol, atol=1e-6, err_msg=name)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * max(np.abs(other).max(), 1e-3))


def test_worked_by_hand():
    # Logits (ln 1, ln 2, ln 5) at a state of 1 are probabilities (1, 2, 5) / 8. Two of three tokens are trained.
    head = jnp.log(jnp.array([[1.0, 2.0, 5.0]]))
    arguments = jnp.ones((1, 3, 1)), head, jnp.array([[0, 1, 2]]), jnp.array([[True, False, True]])

    def negative(logprobs, mask, weights, count):
        return -jnp.sum(jnp.where(mask, weights * logprobs, 0.0)) / count, {}

    def loss(hidden, head, *rest):
        return head_loss(hidden, head, *rest, jnp.array([[2.0, 99.0, 1.0]]), jnp.float32(2), negative, chunk=2)[0]

    found, (d_hidden, d_head) = jax.value_and_grad(loss, (0, 1))(*arguments)
    assert found == pytest.approx(-(2 * math.log(1 / 8) + math.log(5 / 8)) / 2, rel=1e-6)
    at_first, at_last = np.array([-7, 2, 5]) / 8, np.array([1, 2, -3]) / 16  # (probability - indicator) x weight / 2
    np.testing.assert_allclose(d_head, [at_first + at_last], rtol=1e-6)
    np.testing.assert_allclose(d_hidden[0, :, 0], [at_first @ head[0], 0, at_last @ head[0]], rtol=1e-6)


@pytest.mark.parametrize(("chunk", "groups"), [(1, 1), (5, 1), (16, 1), (1000, 1), (10, 2), (8, 4)])
def test_every_mask_gives_the_dense_formula_in_any_chunks_and_groups(chunk, groups):
    for name, mask in masks().items():
        arguments = problem(mask)
        got = fused(PLAIN, chunk, groups)(*arguments)
        assert_same(got, separate(PLAIN, dense_logprobs)(*arguments))
        # Chunks end with the last trained token of the fullest group.
        most = mask.reshape(groups, -1).sum(1).max()
        assert got[0][1]["calls"] == -(-most // min(ROWS * TIME // groups, chunk // groups)), name


@pytest.mark.parametrize("block", [1, 4, 7, 10, 18])  # the last block overlaps the one before it, or does not
@pytest.mark.parametrize("options", OPTIONS)
def test_blocks_of_the_vocabulary_change_nothing(options, block):
    """Also where whole blocks lie beyond the limit, and targets in the overlap."""
    for name in ("random", "all"):
        arguments = problem(masks()[name], kl=options.kl_coef > 0)
        assert_same(fused(options, 9, 1, block)(*arguments), separate(options, dense_logprobs)(*arguments))


@pytest.mark.parametrize("options", OPTIONS[1:])
@pytest.mark.parametrize("of", [dense_logprobs, chunked_logprobs])
def test_every_option_gives_what_separate_log_probabilities_give(options, of):
    for name in ("random", "uneven", "none"):
        arguments = problem(masks()[name], kl=options.kl_coef > 0)
        assert_same(fused(options, 9)(*arguments), separate(options, of)(*arguments))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.booleans(), min_size=ROWS * TIME, max_size=ROWS * TIME),
    st.sampled_from([(1, 1), (5, 1), (10, 2), (8, 4)]),
    st.integers(0, 2**32 - 1),
)
def test_random_masks_and_numbers_give_the_dense_formula(trained, cut, seed):
    arguments = problem(np.array(trained).reshape(ROWS, TIME), seed)
    assert_same(fused(PLAIN, *cut)(*arguments), separate(PLAIN, dense_logprobs)(*arguments))


def test_without_gradients_the_numbers_are_the_same():
    options = OPTIONS[1]
    arguments = problem(masks()["random"])
    loss, stats = jax.jit(functools.partial(fused_loss, options, 9, 1, 7))(*arguments)
    (expected, expected_stats), _ = fused(options, 9)(*arguments)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name, value in expected_stats.items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-6, err_msg=name)


def test_the_gradient_scales_with_what_the_loss_is_multiplied_by():
    arguments = problem(masks()["random"])
    doubled = with_gradients(lambda *a: (lambda loss, stats: (-2.5 * loss, stats))(*fused_loss(PLAIN, 9, 1, 7, *a)))
    (_, got), (_, want) = doubled(*arguments), fused(PLAIN, 9)(*arguments)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, -2.5 * other, rtol=1e-6, atol=1e-7)


def test_bfloat16_states_and_head_keep_their_dtype_and_the_product_is_float32():
    options = OPTIONS[1]
    arguments = problem(masks()["random"], dtype=jnp.bfloat16)
    got, want = fused(options, 9)(*arguments), separate(options, dense_logprobs)(*arguments)
    assert_same((got[0], ()), (want[0], ()))
    assert [g.dtype for g in got[1]] == [jnp.bfloat16, jnp.bfloat16]
    assert_same(got, want, rtol=2**-7)  # both round the gradients to bfloat16
    wide = (arguments[0].astype(jnp.float32), arguments[1].astype(jnp.float32), *arguments[2:])
    np.testing.assert_allclose(got[0][0], fused(options, 9)(*wide)[0][0], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_untrained_places_hold_reaches_nothing(bad):
    mask = masks()["uneven"]
    hidden, head, targets, mask, inputs = problem(mask)
    floats = ("advantages", "old_logprobs", "ref_logprobs")
    spoiled = inputs | {name: np.where(mask, inputs[name], bad).astype(np.float32) for name in floats}
    spoiled["role"] = np.where(mask, inputs["role"], 99).astype(np.int32)
    states = jnp.where(mask[..., None], hidden, bad)
    options = OPTIONS[1]
    got = fused(options, 9)(states, head, np.where(mask, targets, VOCAB - 1).astype(np.int32), mask, spoiled)
    want = fused(options, 9)(hidden, head, targets, mask, inputs)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.any(np.asarray(got[1][0])[~mask])


def products(jaxpr, size):
    """Matrix products that have `size` among the dimensions of an operand, in a jaxpr and all that it calls."""
    count = 0
    for equation in jaxpr.eqns:
        shapes = [v.aval.shape for v in equation.invars if hasattr(v.aval, "shape")]
        count += equation.primitive.name == "dot_general" and any(size in shape for shape in shapes)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            count += products(inner, size) if hasattr(inner, "eqns") else 0
    return count


def test_three_products_with_the_head_and_one_without_gradients():
    """Recomputing the logits for the backward pass would make a fourth."""
    arguments = problem(masks()["random"])
    plain = functools.partial(fused_loss, PLAIN, 9, 1, VOCAB)
    gradient = jax.value_and_grad(plain, (0, 1), has_aux=True)
    for function, count in ((plain, 1), (gradient, 3)):
        assert products(jax.make_jaxpr(function)(*arguments).jaxpr, VOCAB) == count
        compiled = jax.jit(function).lower(*arguments).compile().as_text()
        dots = re.findall(rf"^.*\b{VOCAB}\b[^=]* dot\(.*$|^.* dot\([^)]*\b{VOCAB}\b.*$", compiled, re.MULTILINE)
        assert len(dots) >= count - 1  # the one that contracts the vocabulary need not name it in its result
        assert len(re.findall(r" dot\(", compiled)) == count
    recomputed = jax.value_and_grad(lambda *a: separate(PLAIN, chunked_logprobs)(*a)[0][0])
    assert products(jax.make_jaxpr(recomputed)(*arguments).jaxpr, VOCAB) >= 4


def test_the_train_step_forms_three_products_with_the_head_for_each_micro_batch():
    from test_train_step import BAG, CONFIG, batch_in
    from test_train_step import VOCAB as vocabulary

    trace = jax.make_jaxpr(functools.partial(train_step.loss_and_gradient, BAG, CONFIG))
    assert products(trace(BAG.init(jax.random.key(0)), batch_in("packed")).jaxpr, vocabulary) == 3


def test_memory_grows_with_the_chunk_and_not_with_time_times_vocabulary():
    """Forward and gradients together; the logits of all 2 x 512 tokens alone would take 32 MB."""
    vocab, width = 8192, 4

    def temporary_bytes(time, chunk, block=8192):
        def loss(hidden, head, targets, mask):
            return head_loss(
                hidden,
                head,
                targets,
                mask,
                None,
                None,
                lambda x, m, *_: (-jnp.sum(jnp.where(m, x, 0)), {}),
                chunk=chunk,
                vocab_block=block,
            )[0]

        shapes = [
            jax.ShapeDtypeStruct((2, time, width), jnp.float32),
            jax.ShapeDtypeStruct((width, vocab), jnp.float32),
            jax.ShapeDtypeStruct((2, time), jnp.int32),
            jax.ShapeDtypeStruct((2, time), bool),
        ]
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one_token = vocab * 4
    short, long, wider = temporary_bytes(256, 32), temporary_bytes(512, 32), temporary_bytes(512, 128)
    assert long - short < 2 * 256 * one_token / 50
    assert long < 512 * one_token / 3
    assert wider - long > 0.9 * (128 - 32) * one_token
    # What is formed from the logits exists for a block of the vocabulary at a time.
    assert wider - temporary_bytes(512, 128, vocab // 8) > 0.5 * 128 * one_token


def test_a_loss_that_is_not_a_sum_over_tokens_takes_the_other_path_to_the_same_numbers(monkeypatch):
    from test_train_step import BAG, CONFIG, batch_in, distance

    config = dataclasses.replace(CONFIG, old_logprobs="sampler", denominator="role", kl_coef=0.2)
    batch = batch_in("packed")
    arguments = BAG.init(jax.random.key(1)), batch, batch.old_logprobs + np.float32(0.1)
    calls = collections.Counter()

    def counted(name):
        function = getattr(train_step, name)
        return lambda *a, **k: (calls.update([name]), function(*a, **k))[1]

    for name in ("head_loss", "token_logprobs"):
        monkeypatch.setattr(train_step, name, counted(name))

    def run():
        return jax.jit(functools.partial(train_step.loss_and_gradient, BAG, config))(*arguments)

    loss, gradient, stats = run()
    assert calls["head_loss"] > 0 and calls["token_logprobs"] == 0
    calls.clear()
    monkeypatch.setattr(train_step, "TOKENWISE", frozenset())
    other_loss, other_gradient, other_stats = run()
    assert calls["head_loss"] == 0 and calls["token_logprobs"] > 0
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    assert distance(gradient, other_gradient) < 1e-5
    assert stats.keys() == other_stats.keys()
    for name, value in other_stats.items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_with_the_trainers_own_log_probabilities_every_ratio_is_exactly_one():
    arguments = problem(masks()["random"], kl=False)
    stats = fused(OPTIONS[2], 9)(*arguments)[0][1]
    assert stats["ratio_deviation_max"] == 0 and stats["clip_fraction"] == 0


def test_statistics_add_up_by_name():
    both = add_stats({"a": jnp.float32(1), "a_max": jnp.float32(3)}, {"a": jnp.float32(2), "a_max": jnp.float32(2)})
    assert both == {"a": 3, "a_max": 3}


def test_bad_arguments_are_errors():
    arguments = problem(masks()["random"])
    with pytest.raises(ValueError, match="temperature must be > 0"):
        fused_loss(Options(temperature=0.0), 9, 1, 7, *arguments)
    with pytest.raises(ValueError, match="at least 1 token"):
        fused_loss(PLAIN, 0, 1, 7, *arguments)
    with pytest.raises(ValueError, match="4 rows cannot be cut into 3 equal groups"):
        fused_loss(PLAIN, 9, 3, 7, *arguments)

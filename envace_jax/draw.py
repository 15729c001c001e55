"""Exact draws from the float32 softmax of a vocabulary, one row at a time, by inverse CDF.

Knows logits, random words, temperature and top-p; knows nothing of slots, caches or tokens' meaning. The usual way
(`jax.random.categorical`) makes one Gumbel number for every id of every row, which costs more than the output head of a
small model; here a row needs two random words and two passes over its logits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LANES = 128  # ids are dealt to this many groups: group g holds g, g + 128, g + 256, ...
_UNIT = 2.0**-24


def random_words(keys: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two independent uniforms in [0, 1) per row, f32[B] each, with 24 random bits.

    `keys` u32[B, 2] names a segment, `positions` i32[B] the token in it. One Threefry block of the segment's key
    with the position as its counter, so a token's numbers do not depend on slot, batch or chunk.
    """

    def words(key: jax.Array, position: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.key_data(folded)

    bits = jax.vmap(words)(keys, positions)
    unit = (bits >> 8).astype(jnp.float32) * _UNIT
    return unit[:, 0], unit[:, 1]


def _first_above(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index i[B] with probability mass[b, i] / sum(mass[b]); never one whose mass is zero.

    Parallel prefix sums are not monotone in floating point and `uniform * total` may round up to the total, so
    entries without mass are excluded by name, and the last entry with mass takes what rounding leaves over.
    """
    cumulative = jnp.cumsum(mass, axis=-1)
    positive = mass > 0
    target = uniform[:, None] * cumulative[:, -1:]
    above = (cumulative > target) & positive
    size = mass.shape[-1]
    last = size - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    return jnp.where(above.any(-1), jnp.argmax(above, axis=-1), last)


def nucleus_threshold(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """The least weight inside the nucleus, f32[B], for weights f32[B, ...] in [0, 1] and top_p f32[B].

    The nucleus is the smallest set {id: weight >= threshold} whose mass is at least top_p of the total: ids of equal
    probability enter together, so no id is preferred for its number. Found exactly, without a sort, by bisection on
    the bits of the threshold (non-negative floats order like their bits; masked sums of one reduction order are
    monotone in the mask). The largest weight must be 1; `top_p` of 1 or more keeps everything.
    """
    axes = tuple(range(1, weights.ndim))
    expand = (slice(None),) + (None,) * len(axes)

    def mass(threshold_bits: jax.Array) -> jax.Array:
        threshold = jax.lax.bitcast_convert_type(threshold_bits, jnp.float32)
        return jnp.sum(jnp.where(weights >= threshold[expand], weights, 0.0), axis=axes)

    wanted = jnp.maximum(top_p, 0.0) * mass(jnp.zeros(weights.shape[0], jnp.int32))

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # mass(low) suffices, mass(high) does not
        middle = low + (high - low) // 2
        enough = mass(middle) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros(weights.shape[0], jnp.int32)
    one = jnp.int32(0x3F800000)  # the bits of 1.0, the weight of the most likely id, which is always inside
    high = jnp.full_like(low, one + 1)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jnp.where(top_p >= 1.0, 0.0, jax.lax.bitcast_convert_type(jnp.minimum(low, one), jnp.float32))


def draw(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    vocab_limit: int,
) -> tuple[jax.Array, jax.Array]:
    """`draw_with` the random words of keys u32[B, 2] at positions i32[B]."""
    return draw_with(logits, random_words(keys, positions), temperature, top_p, vocab_limit)


def draw_with(
    logits: jax.Array,
    words: tuple[jax.Array, jax.Array],
    temperature: jax.Array,
    top_p: jax.Array,
    vocab_limit: int,
) -> tuple[jax.Array, jax.Array]:
    """Draws one id per row: (tokens i32[B], logprobs f32[B]).

    Args:
      logits: f32[B, V]. Ids at or above `vocab_limit` (rows of a padded embedding) are never drawn.
      words: two uniforms f32[B] per row, see `random_words`.
      temperature: f32[B]; 0 takes the most likely id (the lowest of equals).
      top_p: f32[B]; 1 keeps the whole vocabulary. See `nucleus_threshold` for ties.

    The log-probability is that of the full softmax at the row's temperature (at 1 for a greedy row), before top-p:
    it is what the trainer recomputes. Inverse CDF in two levels: a uniform picks one of 128 groups by its mass, a
    second, independent one picks the id inside the group, so that an unlikely id is resolved within its group and
    not on a 24-bit grid over the whole vocabulary. Exact up to the rounding of float32 sums. Logits that are not
    numbers give the id `vocab_limit - 1` with a log-probability that is not a number either.
    """
    rows, vocab = logits.shape
    padded = -(-vocab // LANES) * LANES
    greedy = temperature <= 0.0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)[:, None]
    if padded != vocab:
        scaled = jnp.pad(scaled, ((0, 0), (0, padded - vocab)), constant_values=-jnp.inf)
    if vocab_limit < padded:
        scaled = jnp.where(jnp.arange(padded) < vocab_limit, scaled, -jnp.inf)
    grouped = scaled.reshape(rows, padded // LANES, LANES)
    # Sums run over the middle axis: neighbouring ids belong to different groups and add up side by side in registers.
    top = jnp.max(jnp.max(grouped, axis=1), axis=-1)
    weights = jnp.exp(grouped - top[:, None, None])
    groups = jnp.sum(weights, axis=1)
    log_total = jnp.log(jnp.sum(groups, axis=-1))

    def whole(_: None) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(rows, jnp.float32), groups

    def nucleus(_: None) -> tuple[jax.Array, jax.Array]:
        threshold = nucleus_threshold(weights, top_p)
        return threshold, jnp.sum(jnp.where(weights >= threshold[:, None, None], weights, 0.0), axis=1)

    def most_likely(_: None) -> jax.Array:
        ids = jnp.where(scaled == top[:, None], jnp.arange(padded, dtype=jnp.int32), padded)
        return jnp.min(ids, axis=-1)

    restricted = jnp.any((top_p < 1.0) & ~greedy)
    threshold, groups = jax.lax.cond(restricted, nucleus, whole, None)
    first, second = words
    group = _first_above(groups, first)
    members = jnp.take_along_axis(grouped, group[:, None, None], axis=2)[:, :, 0]
    inside = jnp.exp(members - top[:, None])
    inside = jnp.where(inside >= threshold[:, None], inside, 0.0)
    tokens = (_first_above(inside, second) * LANES + group).astype(jnp.int32)
    best = jax.lax.cond(jnp.any(greedy), most_likely, lambda _: jnp.zeros(rows, jnp.int32), None)
    tokens = jnp.minimum(jnp.where(greedy, best, tokens), vocab_limit - 1)
    logprobs = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0] - top - log_total
    return tokens, logprobs

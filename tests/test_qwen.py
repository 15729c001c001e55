"""The network: parity with transformers, packing and padding, the cache, and the cost of a decode step."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import VOCAB, full_logits, greedy, loaded, reference_logits, reference_model

from envace_jax.models import layers
from envace_jax.models.attention import looked_up_angles, rotary_angles, rotate
from envace_jax.models.block_attention import attend
from envace_jax.models.qwen import QwenConfig, logical_axes, make_policy, param_shapes, parameter_count
from envace_jax.types import KVCache

SMALL = QwenConfig(vocab_size=61, width=32, layers=3, heads=4, kv_heads=2, head_dim=16, ffn=48, init_std=0.1)


def ids(seed: int, *shape: int, vocab: int = 61) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, shape, dtype=np.int32)


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    policy = make_policy(SMALL)
    return policy, policy.init(jax.random.key(3))


# ---- sizes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "layers", "heads", "ffn", "tied", "published"),
    [
        (1024, 28, 16, 3072, True, 596_049_920),  # Qwen3-0.6B
        (2048, 28, 16, 6144, True, 1_720_574_976),  # 1.7B
        (2560, 36, 32, 9728, True, 4_022_468_096),  # 4B
        (4096, 36, 32, 12288, False, 8_190_735_360),  # 8B
        (5120, 40, 40, 17408, False, 14_768_307_200),  # 14B
        (5120, 64, 64, 25600, False, 32_762_123_264),  # 32B
    ],
)
def test_parameter_counts_are_the_published_ones(
    width: int, layers: int, heads: int, ffn: int, tied: bool, published: int
) -> None:
    config = QwenConfig(151_936, width, layers, heads, 8, 128, ffn, tie_embeddings=tied)
    counted = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(param_shapes(config)))
    assert counted == published == parameter_count(config)


@pytest.mark.parametrize(("qk_norm", "qkv_bias", "tied"), [(True, False, True), (False, True, False), (False,) * 3])
def test_count_axes_and_init_agree_for_every_switch(qk_norm: bool, qkv_bias: bool, tied: bool) -> None:
    config = dataclasses.replace(SMALL, qk_norm=qk_norm, qkv_bias=qkv_bias, tie_embeddings=tied)
    params = make_policy(config).init(jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == parameter_count(config)
    axes = jax.tree.leaves(logical_axes(config), is_leaf=lambda node: isinstance(node, tuple))
    assert [len(names) for names in axes] == [leaf.ndim for leaf in jax.tree.leaves(params)]
    assert jax.tree.structure(params) == jax.tree.structure(param_shapes(config))


def test_fresh_parameters_have_the_asked_spread_and_differ_between_layers() -> None:
    config = dataclasses.replace(SMALL, width=128, ffn=256, init_std=0.05)
    params = make_policy(config).init(jax.random.key(0))
    up = np.asarray(params["layers"]["up"]["kernel"])
    assert abs(up.std() - 0.05) < 0.002 and abs(up.mean()) < 0.002
    assert not np.allclose(up[0], up[1])
    assert np.all(np.asarray(params["norm"]["scale"]) == 1.0)


# ---- arithmetic worked by hand ---------------------------------------------


def test_rotation_by_hand() -> None:
    cos, sin = rotary_angles(jnp.array([[0, 2]], jnp.int32), 4, 100.0)  # frequencies 1 and 1/10
    out = rotate(jnp.array([1.0, 0.0, 0.0, 1.0]).reshape(1, 1, 1, 4).repeat(2, axis=1), cos, sin)
    np.testing.assert_allclose(out[0, 0, 0], [1, 0, 0, 1], atol=1e-6)  # position 0 turns nothing
    # pairs are (x0, x2) at angle 2 and (x1, x3) at angle 0.2
    np.testing.assert_allclose(out[0, 1, 0], [np.cos(2), -np.sin(0.2), np.sin(2), np.cos(0.2)], atol=1e-6)


def test_angles_that_a_cache_holds_are_those_of_the_positions() -> None:
    table, positions = make_policy(SMALL).init_cache(1, 40).by_position, jnp.array([[0, 3, 39], [7, 7, 1]])
    wanted = rotary_angles(positions, SMALL.head_dim, SMALL.rope_theta)
    for found, computed in zip(looked_up_angles(table, positions), wanted, strict=True):
        np.testing.assert_allclose(found, computed, atol=1e-6)


def test_attention_by_hand() -> None:
    q = jnp.ones((1, 3, 2, 1))  # two query heads on one key/value head, head_dim 1
    k = jnp.log(jnp.array([1.0, 3.0, 4.0])).reshape(1, 3, 1, 1)
    v = jnp.array([10.0, 20.0, 40.0]).reshape(1, 3, 1, 1)
    out = attend(q, k, v, jnp.array([[1, 1, 1]]))[0, :, :, 0]
    expected = [10.0, (10 + 60) / 4, (10 + 60 + 160) / 8]
    np.testing.assert_allclose(out, np.array([expected, expected]).T, rtol=1e-6)
    apart = attend(q, k, v, jnp.array([[1, 2, 2]]))[0, :, 0, 0]
    np.testing.assert_allclose(apart, [10.0, 20.0, (60 + 160) / 7], rtol=1e-6)


def test_attention_over_many_blocks_equals_one_dense_softmax() -> None:
    rng = np.random.default_rng(0)
    time, heads, kv_heads, size = 300, 4, 2, 8  # three blocks of queries, the last one short
    q, k, v = (rng.standard_normal((2, time, n, size)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    sequence = np.sort(rng.integers(1, 4, (2, time)), axis=1)
    wide_k, wide_v = k.repeat(heads // kv_heads, axis=2), v.repeat(heads // kv_heads, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", q, wide_k) / np.sqrt(size)
    allowed = np.tril(np.ones((time, time), bool)) & (sequence[:, :, None] == sequence[:, None, :])
    weights = np.where(allowed[:, None], np.exp(scores - scores.max(-1, keepdims=True)), 0)
    expected = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), wide_v)
    np.testing.assert_allclose(attend(q, k, v, jnp.asarray(sequence)), expected, atol=2e-6)


# ---- parity with transformers ----------------------------------------------

CASES = [
    ("qwen3", 4, 4, True),
    ("qwen3", 4, 2, False),
    ("qwen3", 8, 1, True),  # 8 query heads share one key/value head
    ("qwen2", 4, 2, True),
    ("qwen2", 8, 1, False),
    ("llama", 4, 2, True),
]


@pytest.mark.parametrize(("kind", "heads", "kv_heads", "tied"), CASES)
def test_logits_equal_transformers_single_padded_and_packed(
    kind: str, heads: int, kv_heads: int, tied: bool, tmp_path: Any
) -> None:
    pytest.importorskip("torch")
    model = reference_model(kind, heads=heads, kv_heads=kv_heads, tied=tied)
    config, policy, params = loaded(model, tmp_path)
    assert (config.qk_norm, config.qkv_bias, config.tie_embeddings) == (kind == "qwen3", kind == "qwen2", tied)
    one, two = ids(1, 1, 13, vocab=VOCAB), ids(2, 1, 7, vocab=VOCAB)
    expected = [reference_logits(model, one)[0], reference_logits(model, two)[0]]
    assert np.abs(expected[0]).max() > 1.0  # the comparison below is not between zeros

    np.testing.assert_allclose(full_logits(policy, params, one)[0], expected[0], atol=1e-4)

    padded = np.zeros((2, 16), np.int32)
    sequence = np.zeros_like(padded)
    for row, tokens in enumerate((one[0], two[0])):
        padded[row, : len(tokens)], sequence[row, : len(tokens)] = tokens, 1
    got = full_logits(policy, params, padded, sequence_ids=sequence)
    np.testing.assert_allclose(got[0, :13], expected[0], atol=1e-4)
    np.testing.assert_allclose(got[1, :7], expected[1], atol=1e-4)

    packed = np.concatenate([two, one, np.zeros((1, 4), np.int32)], axis=1)
    positions = np.array([[*range(7), *range(13), *range(4)]])
    got = full_logits(policy, params, packed, positions, np.array([[1] * 7 + [2] * 13 + [0] * 4]))[0]
    np.testing.assert_allclose(got[:7], expected[1], atol=1e-4)
    np.testing.assert_allclose(got[7:20], expected[0], atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_greedy_continuation_of_64_tokens_equals_transformers(kind: str, tmp_path: Any) -> None:
    torch = pytest.importorskip("torch")
    model = reference_model(kind)
    config, policy, params = loaded(model, tmp_path)
    prompt = ids(5, 1, 9, vocab=VOCAB)
    with torch.no_grad():
        options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(torch.tensor(prompt), **options)[0, 9:].numpy()
    assert len(set(expected.tolist())) > 5  # not one token over and over
    np.testing.assert_array_equal(greedy(policy, params, prompt, 64)[0], expected)


# ---- padding and packing ---------------------------------------------------


def test_padding_changes_nothing_and_stays_finite(small: Any) -> None:
    policy, params = small
    tokens = ids(0, 2, 12)
    sequence = np.array([[1] * 9 + [0] * 3, [1] * 4 + [2] * 4 + [0] * 4])
    base = full_logits(policy, params, tokens, sequence_ids=sequence)
    other = np.where(sequence == 0, (tokens + 17) % 61, tokens)
    changed = full_logits(policy, params, other, sequence_ids=sequence)
    np.testing.assert_array_equal(base[sequence != 0], changed[sequence != 0])
    assert np.isfinite(base).all() and np.isfinite(changed).all()
    assert not np.allclose(base[sequence == 0], changed[sequence == 0])


def test_padding_gets_no_gradient_and_every_parameter_does(small: Any) -> None:
    policy, params = small
    tokens = jnp.array([[3, 4, 5, 6, 60, 60]])
    sequence = jnp.array([[1, 1, 1, 1, 0, 0]])
    positions = jnp.arange(6)[None]

    def loss(params: Any) -> jax.Array:
        hidden, _ = policy.apply(params, tokens, positions, sequence)
        return jnp.sum(jnp.where(sequence[..., None] != 0, jnp.sin(hidden), 0.0))

    grads = jax.jit(jax.grad(loss))(params)
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
    assert np.all(np.asarray(grads["embedding"])[60] == 0.0)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2**16))
def test_packed_rows_equal_rows_alone(lengths: list[int], seed: int) -> None:
    policy, params = PACKING
    rows = [ids(seed + n, 1, length) for n, length in enumerate(lengths)]
    tokens, positions, sequence = (np.zeros((1, 36), np.int32) for _ in range(3))
    start = 0
    for number, row in enumerate(rows):
        end = start + row.shape[1]
        tokens[:, start:end], positions[:, start:end] = row, np.arange(row.shape[1])
        sequence[:, start:end] = number + 1
        start = end
    packed = full_logits(policy, params, tokens, positions, sequence)
    start = 0
    for row in rows:
        alone = np.zeros((1, 36), np.int32)
        alone[:, : row.shape[1]] = row
        expected = full_logits(policy, params, alone, sequence_ids=(np.arange(36) < row.shape[1])[None])
        end = start + row.shape[1]
        np.testing.assert_allclose(packed[:, start:end], expected[:, : row.shape[1]], atol=2e-5)
        start = end


PACKING = (make_policy(SMALL), make_policy(SMALL).init(jax.random.key(9)))


# ---- choices that must not change the numbers ------------------------------


@pytest.mark.parametrize("options", [{"unroll": False}, {"remat": "full"}, {"remat": "dots", "unroll": False}])
def test_unrolling_and_recomputation_change_neither_value_nor_gradient(small: Any, options: dict[str, Any]) -> None:
    plain, params = small
    tokens, positions = jnp.asarray(ids(1, 2, 10)), jnp.broadcast_to(jnp.arange(10), (2, 10))

    def loss(policy: Any, params: Any) -> jax.Array:
        hidden, _ = policy.apply(params, tokens, positions, jnp.ones_like(tokens))
        return jnp.mean(jnp.square(policy.logits(params, hidden)))

    value, grads = jax.jit(jax.value_and_grad(partial(loss, plain)))(params)
    other_value, other_grads = jax.jit(jax.value_and_grad(partial(loss, make_policy(SMALL, **options))))(params)
    np.testing.assert_allclose(value, other_value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), grads, other_grads)


@pytest.mark.parametrize(("layers", "unroll", "loops"), [(8, None, 0), (9, None, 1), (9, True, 0), (3, False, 1)])
def test_layers_are_written_out_or_scanned_as_asked(layers: int, unroll: bool | None, loops: int) -> None:
    config = dataclasses.replace(SMALL, layers=layers)
    tokens = (jax.ShapeDtypeStruct((1, 4), jnp.int32),) * 3
    program = str(jax.make_jaxpr(make_policy(config, unroll=unroll).apply)(param_shapes(config), *tokens))
    assert len(re.findall(rf"\blength={layers}\b", program)) == loops  # attention loops over blocks too


def test_recomputation_lowers_the_memory_of_a_gradient() -> None:
    config = dataclasses.replace(SMALL, layers=12)

    def temporary(remat: str) -> int:
        policy = make_policy(config, remat=remat)

        def loss(params: Any) -> jax.Array:
            hidden, _ = policy.apply(params, *(jnp.ones((8, 64), jnp.int32),) * 3)
            return jnp.sum(hidden)

        return jax.jit(jax.grad(loss)).lower(param_shapes(config)).compile().memory_analysis().temp_size_in_bytes

    none, dots, full = temporary("none"), temporary("dots"), temporary("full")
    assert full < dots < none and full < none / 3


def test_bfloat16_computes_in_bfloat16_from_float32_masters(small: Any) -> None:
    policy, params = small
    half = make_policy(SMALL, compute_dtype="bfloat16")
    tokens = ids(1, 1, 10)
    arrays = (jnp.asarray(tokens), jnp.arange(10)[None], jnp.ones((1, 10), jnp.int32))
    hidden, _ = jax.jit(half.apply)(params, *arrays)
    assert hidden.dtype == jnp.bfloat16 and half.logits(params, hidden).dtype == jnp.float32
    grads = jax.jit(jax.grad(lambda params: jnp.sum(half.apply(params, *arrays)[0].astype(jnp.float32))))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    exact, rough = full_logits(policy, params, tokens), full_logits(half, params, tokens)
    assert 1e-6 < np.abs(exact - rough).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("options", [{"remat": "some"}, {"compute_dtype": "float16"}])
def test_unknown_choices_are_named(options: dict[str, str]) -> None:
    ((field, value),) = options.items()
    with pytest.raises(ValueError, match=f"{field} is '{value}'; accepted are "):
        make_policy(SMALL, **options)  # type: ignore[arg-type]


# ---- parameters for decoding -----------------------------------------------


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("switches", [{}, {"qk_norm": False, "qkv_bias": True, "tie_embeddings": False}])
def test_parameters_for_decoding_compute_the_same(switches: Any, dtype: str, unroll: bool) -> None:
    """Invariant 2, at bfloat16 too, with norm scales off the bfloat16 grid: only sums may run in another order."""
    config = QwenConfig(96, 32, 4, 4, 2, 16, 48, init_std=0.1, **switches)
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(1.0, 0.1, leaf.shape), jnp.float32), param_shapes(config)
    )
    policy = make_policy(config, compute_dtype=dtype, unroll=unroll)
    ready = policy.for_decoding(params)
    layers = ready["layers"][0] if unroll else ready["layers"]
    assert layers["gate_up"]["kernel"].dtype == dtype and layers["ffn_norm"]["scale"].dtype == jnp.float32
    assert "up" not in layers and "query" not in layers
    tokens = jnp.asarray(generator.integers(0, 96, (2, 24)), jnp.int32)
    positions, same = jnp.broadcast_to(jnp.arange(24), (2, 24)), jnp.ones((2, 24), jnp.int32)

    def forward(params: Any) -> tuple[jax.Array, jax.Array]:
        hidden, _ = policy.apply(params, tokens, positions, same)
        return hidden, policy.logits(params, hidden)

    (hidden, logits), (ready_hidden, ready_logits) = jax.jit(forward)(params), jax.jit(forward)(ready)
    rounding = 1e-5 if dtype == "float32" else 0.0  # at bfloat16 the order of float32 sums is rounded away here
    np.testing.assert_allclose(
        hidden.astype(jnp.float32), ready_hidden.astype(jnp.float32), rtol=rounding, atol=rounding
    )
    np.testing.assert_allclose(logits, ready_logits, rtol=1e-5)


def test_parameters_for_decoding_are_compiled_once() -> None:
    policy = make_policy(SMALL)
    params = policy.init(jax.random.key(0))
    policy.for_decoding(params)
    compiled: list[str] = []
    listener = lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        policy.for_decoding(params)
        assert not compiled
        make_policy(SMALL).for_decoding(params)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


PROJECTIONS = [(1, (6, 3, 2)), (1, (6, 2)), (1, (3, 8)), (2, (3, 2, 10)), (2, (3, 4, 2))]


@pytest.mark.parametrize(("inputs", "shape"), PROJECTIONS)
def test_a_projections_gradient_is_what_autodiff_gives(inputs: int, shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    x = jnp.asarray(generator.normal(size=(2, 5, *shape[:inputs])), jnp.float32)
    kernel = jnp.asarray(generator.normal(size=shape), jnp.float32)
    weight = jnp.asarray(generator.normal(size=(2, 5, *shape[inputs:])), jnp.float32)

    def loss(product: Any) -> Any:
        return jax.grad(lambda x, kernel: jnp.sum(weight * product(x, kernel)), (0, 1))(x, kernel)

    for got, want in zip(
        loss(lambda x, kernel: layers._product(x, kernel, inputs)),
        loss(lambda x, kernel: jnp.tensordot(x, kernel, axes=inputs)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


# ---- the cache -------------------------------------------------------------


def noisy_cache(policy: Any, rows: int, length: int, lengths: list[int]) -> KVCache:
    cache = policy.init_cache(rows, length)
    leaves, structure = jax.tree.flatten((cache.k, cache.v))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return KVCache(*jax.tree.unflatten(structure, noise), jnp.array(lengths, jnp.int32))


def by_position(cache: KVCache) -> list[np.ndarray]:
    """Every layer's keys and values as [B, S, K, H], from either layout."""
    if not isinstance(cache.k, tuple):
        return [np.asarray(layer) for array in (cache.k, cache.v) for layer in array]
    keys = [np.asarray(layer).transpose(0, 3, 1, 2) for layer in cache.k]
    return keys + [np.asarray(layer).transpose(0, 2, 1, 3) for layer in cache.v]


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize(("length", "scale"), [(40, 1), (300, 17)])  # one block of the cache, and three overlapping
def test_ragged_turns_through_the_cache_equal_one_full_forward(length: int, scale: int, unroll: bool) -> None:
    policy = make_policy(SMALL, unroll=unroll)
    params = policy.init(jax.random.key(3))
    turns = [[7, 4], [1, 1], [1, 1], [0, 1], [5, 9], [1, 1]]  # tokens of row 0 and 1: prefill, decode, delta prefill
    counts = np.array(turns) * scale
    tokens = ids(8, 2, int(counts.sum(0).max()))
    whole = full_logits(policy, params, tokens)
    apply = jax.jit(policy.apply)
    cache = policy.init_cache(2, length)
    done = np.zeros(2, int)
    for count in counts:
        width = int(count.max())
        piece, sequence = ids(99, 2, width), np.zeros((2, width), np.int32)  # padding holds noise
        for row in range(2):
            piece[row, : count[row]] = tokens[row, done[row] : done[row] + count[row]]
            sequence[row, : count[row]] = 1
        positions = done[:, None] + np.arange(width)[None]
        hidden, cache = apply(params, piece, jnp.asarray(positions, jnp.int32), sequence, cache)
        logits = np.asarray(policy.logits(params, hidden))
        assert np.isfinite(logits).all()
        for row in range(2):
            expected = whole[row, done[row] : done[row] + count[row]]
            np.testing.assert_allclose(logits[row, : count[row]], expected, atol=1e-5)
        done += count
        np.testing.assert_array_equal(cache.lengths, done)


def test_padded_tokens_and_idle_rows_write_nothing(small: Any) -> None:
    policy, params = small
    before = noisy_cache(policy, 3, 10, [2, 5, 9])
    sequence = jnp.array([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    _, after = jax.jit(policy.apply)(params, jnp.asarray(ids(0, 3, 3)), jnp.zeros((3, 3), jnp.int32), sequence, before)
    np.testing.assert_array_equal(after.lengths, [4, 5, 10])
    for old, new in zip(by_position(before), by_position(after), strict=True):
        changed = np.any(old != new, axis=(2, 3))
        expected = np.zeros((3, 10), bool)
        expected[0, 2:4] = expected[2, 9] = True
        np.testing.assert_array_equal(changed, expected)
    _, idle = jax.jit(policy.apply)(params, *(jnp.zeros((3, 1), jnp.int32),) * 3, before)
    jax.tree.map(np.testing.assert_array_equal, idle, before)


def test_slots_beyond_a_rows_length_are_never_read(small: Any) -> None:
    policy, params = small
    one = jnp.ones((2, 1), jnp.int32)
    filled = noisy_cache(policy, 2, 12, [3, 7])
    used = jnp.arange(12)[None] <= filled.lengths[:, None]  # the place behind the last is written before it is read

    def spoil(array: jax.Array) -> jax.Array:
        at = array.shape.index(12)
        shape = [size if axis in (at, at - 1 if array.ndim == 5 else 0) else 1 for axis, size in enumerate(array.shape)]
        return jnp.where(used.reshape(shape), array, 1e4)

    outputs = []
    for cache in (filled, KVCache(*jax.tree.map(spoil, (filled.k, filled.v)), filled.lengths)):
        hidden, _ = jax.jit(policy.apply)(params, one, cache.lengths[:, None], one, cache)
        outputs.append(np.asarray(hidden))
    np.testing.assert_array_equal(*outputs)


def decode_loop(config: QwenConfig, unroll: bool) -> Any:
    policy = make_policy(config, unroll=unroll)

    @partial(jax.jit, donate_argnums=1)
    def run(params: Any, cache: KVCache, token: jax.Array) -> Any:
        def step(carry: Any) -> Any:
            count, cache, token = carry
            hidden, cache = policy.apply(params, token, cache.lengths[:, None], jnp.ones_like(token), cache)
            return count + 1, cache, jnp.argmax(policy.logits(params, hidden[:, 0]), -1).astype(jnp.int32)[:, None]

        return jax.lax.while_loop(lambda carry: carry[0] < 8, step, (0, cache, token))[1:]

    return run


@pytest.mark.parametrize("unroll", [True, False])
def test_decode_updates_the_cache_in_place(unroll: bool) -> None:
    """No instruction of the compiled loop copies the cache, and temporary memory does not grow with it."""
    temporary, size = {}, {}
    for length in (1024, 8192):
        cache = jax.eval_shape(lambda length=length: make_policy(SMALL, unroll=unroll).init_cache(4, length))
        token = jax.ShapeDtypeStruct((4, 1), jnp.int32)
        compiled = decode_loop(SMALL, unroll).lower(param_shapes(SMALL), cache, token).compile()
        temporary[length] = compiled.memory_analysis().temp_size_in_bytes
        leaves = jax.tree.leaves((cache.k, cache.v))
        size[length] = sum(leaf.size * 4 for leaf in leaves)
        for leaf in leaves:
            shape = ",".join(map(str, leaf.shape))
            whole = re.findall(rf"= f32\[{shape}\]\S* ([\w-]+)\(", compiled.as_text())
            assert "copy" not in whole, whole
    # Scores of one token over its row's positions may grow; they are a head_dim-th of the cache.
    assert temporary[8192] - temporary[1024] < 0.2 * (size[8192] - size[1024])

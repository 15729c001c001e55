"""8-bit matrices: bounds of the rounding, the product of the dequantised matrix, and a quarter of the memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import full_logits
from train_helpers import ROOT

from envace_jax import lora as adapters
from envace_jax.models import hf, int8, layers
from envace_jax.models.qwen import make_policy, param_shapes

BASE = ROOT / "envace_jax" / "assets" / "tiny_base"


def test_by_hand():
    """Columns of largest magnitude 254, 0 and 1: steps of 2, 1 / 127 (unused) and 1 / 127."""
    kernel = jnp.array([[254.0, 0.0, -1.0], [3.1, 0.0, 0.5], [-100.0, 0.0, 0.003]])
    whole, scale = int8.quantized(kernel, 1)
    assert whole.dtype == jnp.int8 and scale.dtype == jnp.float32
    assert whole.tolist() == [[127, 0, -127], [2, 0, 64], [-50, 0, 0]]
    np.testing.assert_allclose(scale, [2.0, 1 / 127, 1 / 127], rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 1.0, 1e6]), st.booleans())
def test_nothing_moves_by_more_than_half_a_step(seed, size, heavy):
    rng = np.random.default_rng(seed)
    kernel = size * (rng.standard_cauchy if heavy else rng.standard_normal)((2, 6, 3, 5)).astype(np.float32)
    kernel[0, :, 1, 2] = 0
    whole, scale = (np.asarray(x) for x in int8.quantized(jnp.asarray(kernel), 1, stacked=True))
    assert whole.shape == kernel.shape and scale.shape == (2, 3, 5)
    for layer in range(2):
        back = int8.dequantized(whole[layer], scale[layer])
        assert (np.abs(back - kernel[layer]) <= 0.5001 * scale[layer] + 1e-30).all()
        largest = np.abs(kernel[layer]).max(axis=0)
        np.testing.assert_allclose(np.abs(back).max(axis=0), largest, rtol=1e-6)  # the largest is kept
        assert (scale[layer] <= largest / 127 * 1.0001)[largest > 0].all()


@pytest.mark.parametrize("inputs", [1, 2])
def test_the_product_and_its_gradient_are_those_of_the_dequantised_matrix(inputs):
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.standard_normal((4, 6, 5), np.float32))
    whole, scale = int8.quantized(kernel, inputs)
    x = jnp.asarray(rng.standard_normal((2, 3, *kernel.shape[:inputs]), np.float32))
    plain = int8.dequantized(whole, scale)

    def loss(x, product):
        return jnp.sum(jnp.sin(product(x)))

    got = jax.value_and_grad(loss)(x, lambda x: layers._frozen_product(x, whole, scale, inputs))
    want = jax.value_and_grad(loss)(x, lambda x: jnp.tensordot(x, plain, inputs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    half = layers._frozen_product(x.astype(jnp.bfloat16), whole, scale, inputs)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(np.float32), jnp.tensordot(x, plain, inputs), rtol=0.05, atol=0.1)


def test_a_model_loaded_as_int8(tmp_path):
    """Its matrices take a quarter, its logits are the dequantised model's, decoded or not, and so is what is saved."""
    config, plain = hf.load(BASE)
    _, loaded = hf.load(BASE, quantize=True)
    shapes = param_shapes(config, quantized=True)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), loaded) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    matrices = [name for name, part in plain["layers"].items() if "kernel" in part]

    def size(params):
        return sum(leaf.nbytes for name in matrices for leaf in jax.tree.leaves(params["layers"][name]))

    assert len(matrices) == 7 and 0.25 < size(loaded) / size(plain) < 0.27  # with the scales
    by_hand = dict(plain["layers"])
    for name in matrices:
        part = loaded["layers"][name]
        kernel = np.stack([int8.dequantized(*pair) for pair in zip(*map(np.asarray, part.values()), strict=True)])
        assert list(part) == ["kernel", int8.SCALE]
        assert 0 < np.abs(kernel - plain["layers"][name]["kernel"]).max() <= 0.5001 * np.asarray(part[int8.SCALE]).max()
        by_hand[name] = {"kernel": jnp.asarray(kernel)}
    tokens = np.random.default_rng(0).integers(0, 300, (2, 7))
    want = full_logits(make_policy(config), plain | {"layers": by_hand}, tokens)
    for unroll in (True, False):
        policy = make_policy(config, unroll=unroll)
        decoding = policy.for_decoding(loaded)
        fused = decoding["layers"][0] if unroll else decoding["layers"]
        assert fused["gate_up"]["kernel"].dtype == fused["query_key_value"]["kernel"].dtype == jnp.int8
        for params in (loaded, decoding):
            np.testing.assert_allclose(full_logits(policy, params, tokens), want, rtol=1e-3, atol=2e-4)
    hf.save(tmp_path / "model", config, loaded, dtype="float32")
    saved = hf.load(tmp_path / "model")[1]
    assert jax.tree.all(jax.tree.map(np.array_equal, saved, plain | {"layers": by_hand}))
    assert not adapters.has_adapters(loaded["layers"])

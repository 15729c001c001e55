"""Small moments: close to float32 Adam on average, and nothing that rounding would hold back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import run_python

from envace_jax import moments
from envace_jax.train_step import make_optimizer


def adam(dtype):
    return moments.adam(moments.Storage(dtype), b1=0.9, b2=0.999, eps=1e-8)


def gradients(count):
    """Of two leaves; numbers that share a block differ by a factor of 400."""
    rng = np.random.default_rng(0)
    spread = np.exp(3 * np.sin(np.arange(256)))
    return [
        {
            "wide": (rng.normal(size=(4, 256)) * spread).astype(np.float32),
            "odd": rng.normal(size=(3, 5)).astype(np.float32),
        }
        for _ in range(count)
    ]


def after(optimizer, seen):
    update = jax.jit(lambda g, state: optimizer.update(g, state))
    state = optimizer.init(jax.tree.map(jnp.zeros_like, seen[0]))
    for gradient in seen:
        direction, state = update(gradient, state)
    return direction, state


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-6), ("bfloat16", 0.02), ("int8", 0.15)])
def test_the_direction_stays_close_to_float32_adam(dtype, apart):
    seen = gradients(40)
    (got, state), (want, _) = after(adam(dtype), seen), after(optax.scale_by_adam(), seen)
    for name in got:
        assert np.linalg.norm(got[name] - want[name]) < apart * np.linalg.norm(want[name])
        assert dtype == "float32" or not np.array_equal(got[name], want[name])
    stored = {leaf.dtype.name for leaf in jax.tree.leaves(state.nu) if leaf.ndim == 2 and leaf.shape[1] > 2}
    assert stored == {dtype}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_second_moment_falls_by_a_thousandth_at_a_time(dtype):
    """Rounded to the nearest it would stay where it was for ever."""
    seen = gradients(1)
    zero = [jax.tree.map(np.zeros_like, seen[0])] * 500
    _, state = after(adam(dtype), seen + zero)
    left = moments._read(state.nu["wide"], signed=False)
    assert float(jnp.mean(left) / np.mean(0.001 * seen[0]["wide"] ** 2)) == pytest.approx(0.999**500, rel=0.03)


def test_rounding_is_right_on_average():
    values = jnp.asarray(np.random.default_rng(1).normal(size=(1, 128)).astype(np.float32))
    for dtype, signed in (("bfloat16", True), ("int8", True), ("int8", False)):
        wanted = values if signed else values**2
        like = moments._empty(values.shape, dtype)
        written = jax.jit(lambda key, w=wanted, s=signed, e=like: moments._read(moments._written(w, e, key, s), s))
        mean = jnp.mean(jax.vmap(written)(jax.random.split(jax.random.key(0), 4000)), axis=0)
        np.testing.assert_allclose(mean, wanted, rtol=0.005, atol=1e-4)


def test_eight_bits_take_two_bytes_a_parameter_and_zero_stays_zero():
    state = adam("int8").init({"w": jnp.zeros((512, 1024))})
    assert sum(leaf.nbytes for leaf in jax.tree.leaves((state.mu, state.nu))) < 2.1 * 512 * 1024
    written = moments._written(jnp.zeros((2, 256)), moments._empty((2, 256), "int8"), jax.random.key(0), False)
    assert not np.any(moments._read(written, signed=False))


def test_a_model_is_fitted_as_fast_with_eight_bits():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64, 128)).astype(np.float32) * np.logspace(-1, 0.5, 128)
    targets = inputs @ rng.normal(size=(128, 4)).astype(np.float32)

    def final(dtype):
        optimizer = make_optimizer(0.05, clip_norm=1e9, weight_decay=0.0, moments_dtype=dtype)

        @jax.jit
        def step(params, state):
            loss, gradient = jax.value_and_grad(lambda p: jnp.mean((inputs @ p["w"] - targets) ** 2))(params)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, loss

        params = {"w": jnp.zeros((128, 4))}
        state = optimizer.init(params)
        losses = [float(loss) for params, state, loss in [step(params, state)]]
        for _ in range(150):
            params, state, loss = step(params, state)
        return losses[0], float(loss)

    first, want = final("float32")
    for dtype in ("bfloat16", "int8"):
        assert final(dtype)[1] < max(1.3 * want, first / 200), dtype


def test_an_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="moments_dtype is 'int4'; accepted are float32, bfloat16, int8"):
        make_optimizer(1e-3, moments_dtype="int4")


@pytest.mark.slow
def test_moments_on_the_host_give_the_same_steps():
    """Three updates and a skipped one; the moments lie in pinned host memory between them, and the noise is one."""
    out = run_python(
        """
        import dataclasses
        import jax, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec
        from test_train_step import BAG, CONFIG, batch_in
        from envace_jax.sharding import batch_sharding, fitted, make_mesh
        from envace_jax.train_step import init_train_state, make_optimizer, make_train_step

        mesh = make_mesh(1, 2, 2)
        own = BAG.init(jax.random.key(0))
        cut = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
        places = jax.tree.map(lambda x: fitted(cut, x.shape), own)
        rows = batch_in("packed")
        nothing = dataclasses.replace(rows, loss_mask=np.zeros_like(rows.loss_mask))

        def run(dtype, offload):
            optimizer = make_optimizer(1e-3, moments_dtype=dtype, offload=offload)
            state = init_train_state(jax.device_put(jax.device_get(own), places), optimizer, mesh, places)
            kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
            step = make_train_step(BAG, optimizer, CONFIG, mesh, places)
            skipped = []
            for batch in (rows, rows, nothing, rows):
                state, stats = step(state, jax.device_put(batch, batch_sharding(mesh)))
                skipped.append(float(stats["skipped"]))
            assert skipped == [0, 0, 1, 0], skipped
            assert kinds == {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
            return kinds, jax.device_get(state)

        for dtype in ("float32", "int8"):
            (here, one), (there, other) = run(dtype, False), run(dtype, True)
            assert there == {"pinned_host"} and here == {"device"}, (here, there)
            close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
            jax.tree.map(close, one.params, other.params)
            count = lambda s: [int(x) for x in jax.tree.leaves(s.opt_state) if x.ndim == 0]
            assert set(count(one)) == set(count(other)) == {3}
            print("same", dtype)
        """,
        devices=4,
        timeout=900,
    )
    assert out.count("same") == 2

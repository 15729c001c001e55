"""The train step on meshes of simulated devices: the numbers of one device, and everything where it was."""

from __future__ import annotations

import pytest
from conftest import run_python

# Plain gradient descent at rate 1 moves the parameters by the gradient itself, so one program shows everything.
MESH_CODE = """
    import dataclasses, jax, numpy as np, optax
    from envace_jax.models import qwen
    from envace_jax.sharding import batch_sharding, make_mesh
    from envace_jax.train_step import init_train_state, make_train_step
    from test_train_step import CONFIG, MODEL, batch_in, compiled_gradient, distance, params

    config = dataclasses.replace(CONFIG, old_logprobs="sampler", denominator="role")
    batch = batch_in("segment")
    loss, gradient, expected = compiled_gradient(config)(params(), batch)
    for sizes in SIZES:
        mesh = make_mesh(*sizes)
        shardings = qwen.shardings(MODEL, mesh)
        # "full": sums of gradients are added to in place, layer by layer (layer_scan.py).
        policy = qwen.make_policy(MODEL, mesh=mesh, unroll=False, remat="full")
        rows = jax.device_put(batch, batch_sharding(mesh))
        step = make_train_step(policy, optax.sgd(1.0), config, mesh, shardings)
        placed = jax.device_put(jax.device_get(params()), shardings)
        state, stats = step(init_train_state(placed, optax.sgd(1.0), mesh, shardings), rows)
        moved = jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), params(), state.params)
        assert distance(moved, jax.device_get(gradient)) < 1e-5, sizes
        np.testing.assert_allclose(stats["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(stats["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)
        for name, value in expected.items():
            np.testing.assert_allclose(stats[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        print("same on", sizes)
"""

PLACEMENT_CODE = """
    import jax, numpy as np
    from envace_jax.models import qwen
    from envace_jax.sharding import batch_sharding, make_mesh
    from envace_jax.train_step import init_train_state, make_optimizer, make_score_step, make_train_step
    from test_train_step import CONFIG, MODEL, batch_in, params, policy

    batch, mesh = batch_in("packed"), make_mesh(2, 2, 2)
    shardings = qwen.shardings(MODEL, mesh)
    sharded = qwen.make_policy(MODEL, mesh=mesh, unroll=False)
    parameters = jax.device_put(jax.device_get(params()), shardings)
    rows = jax.device_put(batch, batch_sharding(mesh))
    scores = make_score_step(policy(), CONFIG)(params(), batch)
    np.testing.assert_allclose(make_score_step(sharded, CONFIG, mesh)(parameters, rows), scores, atol=1e-5)
    optimizer = make_optimizer(1e-3)
    step = make_train_step(sharded, optimizer, CONFIG, mesh, shardings)
    state = init_train_state(parameters, optimizer, mesh, shardings)
    where = jax.tree.map(lambda x: x.sharding, state)
    for _ in range(2):
        state, _ = step(state, rows)
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, where))
    assert step._cache_size() == 1 and int(state.step) == 2
    moments = state.opt_state[1][0].mu["layers"]["gate"]["kernel"]
    assert moments.addressable_shards[0].data.size * 4 == moments.size
    print("stays in place")
"""


@pytest.mark.parametrize(
    "sizes",
    [[(2, 2, 2)], pytest.param([(8, 1, 1), (1, 8, 1), (1, 1, 8), (1, 2, 4)], marks=pytest.mark.slow)],
    ids=["all axes", "others"],
)
def test_no_mesh_changes_loss_or_gradient(sizes):
    """Invariant 3, meshes: 8 simulated devices."""
    out = run_python(MESH_CODE.replace("SIZES", repr(sizes)), devices=8, timeout=900)
    assert out.count("same on") == len(sizes)


@pytest.mark.slow
def test_a_sharded_state_stays_where_it_is_and_compiles_once():
    assert "stays in place" in run_python(PLACEMENT_CODE, devices=8, timeout=900)

"""Meshes and layouts: the numbers of one device on eight simulated ones, and one line for an impossible mesh."""

from __future__ import annotations

import jax
import pytest
from conftest import run_python
from jax.sharding import PartitionSpec

from envace_jax.models.qwen import QwenConfig, logical_axes, shardings
from envace_jax.sharding import AXES, RULES, batch_sharding, make_mesh, param_shardings, partition_spec, replicated

CONFIG = QwenConfig(vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=48, tie_embeddings=False)


def one_device() -> jax.sharding.Mesh:
    return make_mesh(devices=jax.devices()[:1])


def test_the_default_mesh_is_one_device_with_all_axes() -> None:
    mesh = one_device()
    assert mesh.axis_names == AXES == ("data", "fsdp", "tensor")
    assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp"))
    assert replicated(mesh).spec == PartitionSpec()


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"data": 3}, "needs 3 devices, but there are 1"),
        ({"tensor": 0}, "mesh axis 'tensor' has size 0; a positive integer"),
        ({"fsdp": -1}, "mesh axis 'fsdp' has size -1"),
        ({"data": 1.0}, "mesh axis 'data' has size 1.0"),
    ],
)
def test_an_impossible_mesh_is_one_line(sizes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        make_mesh(**sizes, devices=jax.devices()[:1])  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_every_logical_axis_has_a_rule_and_parameters_land_by_it() -> None:
    axes = logical_axes(CONFIG)
    used = {name for leaf in jax.tree.leaves(axes, is_leaf=lambda node: isinstance(node, tuple)) for name in leaf}
    assert used <= set(RULES)
    specs = jax.tree.map(lambda place: place.spec, param_shardings(one_device(), axes))
    assert specs["embedding"] == PartitionSpec("tensor", "fsdp")
    assert specs["head"]["kernel"] == PartitionSpec("fsdp", "tensor")
    assert specs["layers"]["query"]["kernel"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert specs["layers"]["down"]["kernel"] == PartitionSpec(None, "tensor", "fsdp")
    assert jax.tree.structure(shardings(CONFIG, one_device())) == jax.tree.structure(specs)
    with pytest.raises(ValueError, match="unknown logical axis 'depth'"):
        partition_spec(one_device(), ("depth",))


def test_eight_devices_in_every_shape_give_the_numbers_of_one() -> None:
    """Forward, gradient, cached decoding and sharded initialisation; kv_heads 8 divide over tensor 8, 2 do not."""
    out = run_python(
        """
        import functools, jax, jax.numpy as jnp, numpy as np
        from envace_jax.models.qwen import QwenConfig, make_policy, shardings
        from envace_jax.sharding import batch_sharding, make_mesh

        jax.config.update("jax_disable_most_optimizations", True)  # compiling is what takes the time here
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, 64, (8, 12)).astype(np.int32)
        sequence = np.sort(rng.integers(1, 3, (8, 12)), axis=1).astype(np.int32)
        sequence[:, 10:] = 0
        positions = np.broadcast_to(np.arange(12, dtype=np.int32), (8, 12))

        def run(config, mesh):
            policy = make_policy(config, mesh=mesh, unroll=False)
            params = policy.init(jax.random.key(0))
            put = (lambda x: x) if mesh is None else functools.partial(jax.device_put, device=batch_sharding(mesh))
            batch = [put(x) for x in (tokens, positions, sequence)]
            def loss(params, tokens, positions, sequence):
                hidden, _ = policy.apply(params, tokens, positions, sequence)
                logits = policy.logits(params, hidden)
                return jnp.mean(jnp.where(sequence[..., None] != 0, jnp.sin(logits), 0)), logits
            (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *batch)
            def decode(params, cache, tokens, positions, ones):
                _, cache = policy.apply(params, tokens, positions, ones, cache)
                hidden, cache = policy.apply(params, tokens[:, :1], positions[:, :1] + 12, ones[:, :1], cache)
                return policy.logits(params, hidden), cache
            step = jax.jit(decode, donate_argnums=1)
            decoded, cache = step(params, policy.init_cache(8, 16), *batch[:2], put(np.ones_like(tokens)))
            if mesh is not None:
                for leaf, place in zip(jax.tree.leaves(params), jax.tree.leaves(shardings(config, mesh))):
                    assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
                rows = mesh.shape["data"] * mesh.shape["fsdp"]
                assert cache.k.addressable_shards[0].data.shape[1] == 8 // rows, cache.k.sharding
            return jax.tree.map(np.asarray, (params, value, logits, grads, decoded, cache))

        for kv_heads, shapes in ((8, [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]), (2, [(1, 1, 8)])):
            config = QwenConfig(64, 32, 2, 8, kv_heads, 16, 48, init_std=0.1, tie_embeddings=kv_heads == 8)
            single = run(config, None)
            for shape in shapes:
                close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)
                jax.tree.map(close, run(config, make_mesh(*shape)), single)
                print("same", kv_heads, shape)
        """,
        devices=8,
    )
    assert out.count("same") == 5

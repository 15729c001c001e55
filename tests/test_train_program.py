"""The train step compiled for many devices: nothing of the vocabulary's width, no whole tree, the state in place."""

from __future__ import annotations

import importlib.util

import pytest
from conftest import run_python

PROGRAM = """
    import math
    import jax, jax.numpy as jnp
    from jax.experimental import topologies
    from envace_jax import hlo
    from envace_jax.models import qwen
    from envace_jax.models.config import QwenConfig
    from envace_jax.sharding import batch_sharding, make_mesh
    from envace_jax.train_step import TrainStepConfig, init_train_state, make_optimizer, make_train_step
    from envace_jax.train_step import state_shardings
    from envace_jax.types import TrainBatch

    VOCAB, LAYERS, TIME, WIDTH = 8192, 12, 256, 512  # sizes that nothing else has
    MODEL = QwenConfig(VOCAB, WIDTH, LAYERS, heads=8, kv_heads=4, head_dim=128, ffn=1536, tie_embeddings=False)

    def compiled(mesh, rows=16, **optimizer):
        places = qwen.shardings(MODEL, mesh)
        policy = qwen.make_policy(MODEL, mesh=mesh, compute_dtype="bfloat16", remat="full")
        config = TrainStepConfig(vocab_limit=VOCAB - 7, micro_batch_rows=rows // 2, logprob_chunk=64)
        optimizer = make_optimizer(1e-3, **optimizer)
        step = make_train_step(policy, optimizer, config, mesh, places)
        shapes = jax.eval_shape(lambda: init_train_state(policy.init(jax.random.key(0)), optimizer))
        where = state_shardings(optimizer, qwen.param_shapes(MODEL), mesh, places)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)
        of = lambda kind: jax.ShapeDtypeStruct((rows, TIME), kind, sharding=batch_sharding(mesh))
        ints, floats = of(jnp.int32), of(jnp.float32)
        batch = TrainBatch(ints, ints, ints, of(bool), floats, floats, ints)
        with jax.set_mesh(mesh):
            lowered = step.lower(state, batch)
        return lowered.compile(), state

    def check(program, state, mesh):
        memory = program.memory_analysis()
        leaves = jax.tree.leaves(state)
        held = sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
        assert memory.alias_size_in_bytes + memory.host_alias_size_in_bytes > 0.95 * held, (memory, held)
        text = program.as_text()
        # Every device holds its share of the vocabulary and never the whole, of any array.
        assert not [s for s in hlo.shapes(text) if VOCAB in s[1]]
        assert [s for s in hlo.shapes(text) if VOCAB // mesh.shape["tensor"] in s[1]]
        found = hlo.collectives(text, mesh.size)
        gathers = [one for one in found if one.kind == "all-gather"]
        assert gathers and max(one.times for one in gathers) >= LAYERS
        # Weights are gathered one layer at a time: nothing that is sent has the layers' axis.
        sent = [s[1] for one in found for s in hlo.shapes(one.shape)]
        assert not [s for s in sent if len(s) > 1 and s[0] == LAYERS and WIDTH in s[1:]], sent
        # Neither is the embedding, [VOCAB / tensor, WIDTH], brought together to look tokens up: the head alone is.
        whole = VOCAB // mesh.shape["tensor"] * WIDTH
        times = [one.times for one in gathers if math.prod(next(hlo.shapes(one.shape))[1]) >= whole]
        assert sum(times) <= 2, times  # in both micro-batches
        tokens = 16 * TIME
        print("bytes per token", hlo.total_bytes(found) / tokens)
        return text
"""


@pytest.mark.slow
def test_a_program_for_eight_cpu_devices():
    out = run_python(
        PROGRAM
        + """
    mesh = make_mesh(2, 2, 2)
    check(*compiled(mesh), mesh)
    """,
        devices=8,
        timeout=900,
    )
    assert "bytes per token" in out


TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.slow
@needs_libtpu
def test_a_program_for_a_tpu_topology_uses_the_kernel_and_the_host():
    out = run_python(
        PROGRAM
        + """
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = make_mesh(1, 2, 4, devices=devices)
    program, state = compiled(mesh)
    assert "splash_mha_fwd" in check(program, state, mesh)
    for dtype in ("float32", "int8"):
        offloaded, held = compiled(mesh, moments_dtype=dtype, offload=True)
        memory = offloaded.memory_analysis()
        assert memory.host_argument_size_in_bytes > 0 and memory.host_alias_size_in_bytes > 0, memory
        assert memory.argument_size_in_bytes < 0.6 * program.memory_analysis().argument_size_in_bytes
        print("moments on the host", dtype, memory.peak_memory_in_bytes, program.memory_analysis().peak_memory_in_bytes)
    """,
        env=TPU,
        timeout=1800,
    )
    assert out.count("moments on the host") == 2


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_the_kernel_compiles_with_its_gradients(topology):
    out = run_python(
        f"""
        import jax, jax.numpy as jnp
        from jax.experimental import topologies
        from jax.sharding import NamedSharding, PartitionSpec as P
        from envace_jax.models import kernels
        from envace_jax.sharding import make_mesh

        devices = topologies.get_topology_desc(platform="tpu", topology_name={topology!r}).devices
        mesh = make_mesh(1, 2, len(devices) // 2, devices=devices)
        attend = kernels.make_attend("kernel", mesh)
        of = lambda heads: jax.ShapeDtypeStruct(
            (2, 1000, heads, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp", None, "tensor")))
        ids = jax.ShapeDtypeStruct((2, 1000), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
        loss = lambda q, k, v, ids: attend(q, k, v, ids).astype(jnp.float32).sum()
        with jax.set_mesh(mesh):
            lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(of(32), of(8), of(8), ids)
        print("compiled", lowered.compile().memory_analysis().temp_size_in_bytes)
        """,
        env=TPU,
        timeout=900,
    )
    assert "compiled" in out

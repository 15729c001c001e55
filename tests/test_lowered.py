"""`Sampler.lowered` gives the programs of a run, for parameters that are not there and devices that need not be."""

from __future__ import annotations

import re
import subprocess
import sys

import jax
import pytest
from conftest import REPOSITORY, run_python
from test_sampling import BUCKETS, CONFIG, LENGTH, LIMIT, PARAMS, POLICY, STOP, ragged, run

from envace_jax.sampling import Sampler

__all__ = ["CONFIG"]  # of the code below
CODE = """
    import jax
    import test_lowered as t
    from envace_jax.models.qwen import make_policy, shardings
    from envace_jax.sharding import make_mesh
    mesh = make_mesh(2, 2, 2)
    for pages in (0, 64):
        policy = make_policy(t.CONFIG, mesh=mesh, unroll=False)
        params = policy.for_decoding(jax.device_put(t.PARAMS, shardings(t.CONFIG, mesh)))
        print("programs", t.check(policy, params, t.abstract(params), slots=8, mesh=mesh, pages=pages))
"""


def make(policy, slots=4, **changes) -> Sampler:
    options = dict(max_length=LENGTH, buckets=BUCKETS, vocab_limit=LIMIT, stop_ids=STOP, page_size=8)
    return Sampler(policy, slots=slots, **(options | changes))


def abstract(params):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)


def lines(lowered):
    """The program's lines without the names of functions and values: which functions a text shares, and how they are
    numbered, depends on what was traced before."""
    return frozenset(re.sub(r"@[\w.]+", "@", re.sub(r"%[\w#:]+", "%", lowered.as_text())).splitlines())


def check(policy, params, shapes, **changes) -> int:
    """Every program that a run calls has the text of one that was lowered for shapes alone."""
    sampler = make(policy, **changes)
    told = {lines(low) for low in sampler.lowered(shapes).values()}
    used: set[frozenset[str]] = set()

    def spied(function):
        def call(*arguments, **named):
            used.add(lines(function.lower(*arguments, **named)))
            return function(*arguments, **named)

        return call

    programs = sampler.programs
    for name in ("fresh", "load", "prefill", "decode"):
        if hasattr(programs, name):
            object.__setattr__(programs, name, spied(getattr(programs, name)))
    run(sampler, ragged(10), params=params)
    assert used <= told and len(used) >= 3
    return len(used)


@pytest.mark.parametrize("pages", [pytest.param(0, marks=pytest.mark.slow), 40])
def test_a_run_uses_what_was_lowered(pages):
    params = POLICY.for_decoding(PARAMS)
    shapes = jax.eval_shape(POLICY.for_decoding, PARAMS)
    check(POLICY, params, shapes, pages=pages)
    sampler, names = make(POLICY, pages=pages), []
    assert len(sampler.lowered(shapes)) == sampler.buckets.compile_bound()
    assert [*sampler.lowered(shapes, lambda name: "decode" in name)][-1].startswith("decode, ")
    sampler.warm_up(params, names.append)
    assert names == list(sampler.lowered(shapes))


@pytest.mark.slow
def test_a_run_on_a_mesh_uses_what_was_lowered():
    assert run_python(CODE, devices=8, timeout=900).count("programs") == 2


def test_a_sampler_takes_nothing_before_it_is_used():
    before = len(jax.live_arrays())
    sampler = make(POLICY, cache_rows=10**6)
    paged = make(POLICY, pages=10**6)
    assert len(jax.live_arrays()) == before  # 16 GB, if they were made
    shapes = jax.eval_shape(POLICY.for_decoding, PARAMS)
    assert sampler.lowered(shapes, lambda name: "decode" in name) and paged.lowered(shapes, lambda name: "dec" in name)
    assert len(jax.live_arrays()) == before


TPU_CODE = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from envace_jax.buckets import Buckets
    from envace_jax.models.qwen import QwenConfig, make_policy, param_shapes, shardings
    from envace_jax.sampling import Sampler
    from envace_jax.sharding import make_mesh
    from test_decode_mesh import collectives, for_decoding

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    mesh = make_mesh(1, 2, 4, devices=topology.devices)
    config = QwenConfig(vocab_size=2048, width=512, layers=10, heads=16, kv_heads=8, head_dim=128, ffn=1024)
    policy = make_policy(config, mesh=mesh, compute_dtype="bfloat16")
    places = shardings(config, mesh)
    masters = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), param_shapes(config), places
    )
    compiled, params = for_decoding(policy, masters)
    sent = collectives(compiled.as_text(), "all-gather")
    assert sent and max(numbers for _, dtype, numbers in sent if dtype == "f32") <= config.width, sent
    sampler = Sampler(
        policy, slots=8, max_length=20000, buckets=Buckets((512,), (1,), (20000,)), vocab_limit=2000, stop_ids=(1,),
        mesh=mesh, cache_dtype=jnp.bfloat16, pages=2048, page_size=64,
    )
    pool = 10 * 1024 * 64 * 4 * 128 * 2  # layers, pages, positions, a kv head's keys and values twice, width, bytes
    for name, lowered in sampler.lowered(params).items():
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        if "empty" not in name:
            assert memory.alias_size_in_bytes >= pool, name
            assert memory.temp_size_in_bytes < pool / 8, (name, memory)
            assert "ragged_paged_attention" in compiled.as_text(), name
            gathered = [numbers for _, _, numbers in collectives(compiled.as_text(), "all-gather")]
            assert max(gathered, default=0) <= 8 * 128, (name, gathered)
        print("compiled", name)
"""


def has_libtpu() -> bool:
    command = [sys.executable, "-c", "import libtpu"]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_programs_compile_for_a_tpu_that_is_not_there():
    if not has_libtpu():
        pytest.skip("libtpu is not installed")
    environment = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    out = run_python(TPU_CODE, timeout=900, env=environment)
    assert out.count("compiled") == 3

"""The fused head on 8 simulated devices: the numbers of one device, and nothing large sent around for a chunk."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from conftest import run_python
from test_fused_head import LIMIT, fused_loss

CHUNK_STATES = 32 * 16  # numbers in the hidden states of a chunk; every piece of the head has more
MESH_CODE = """
    import functools
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from envace_jax.sharding import batch_sharding, make_mesh
    from test_fused_head import OPTIONS, assert_same, with_gradients
    from test_fused_head_mesh import CHUNK_STATES, largest_collective_in_loops, mesh_loss, mesh_problem

    options = OPTIONS[1]
    alone = mesh_problem()
    want = with_gradients(functools.partial(mesh_loss, options, 1, None))(*alone)
    for sizes in SIZES:
        mesh = make_mesh(*sizes)
        rows = batch_sharding(mesh)
        embedding = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
        placed = [jax.device_put(x, embedding if i == 1 else rows) for i, x in enumerate(alone)]
        loss = functools.partial(mesh_loss, options, sizes[0] * sizes[1], mesh)
        compiled = with_gradients(loss).lower(*placed).compile()
        got = compiled(*placed)
        assert_same(jax.device_get(got), jax.device_get(want))
        d_hidden, d_embedding = got[1]
        assert d_embedding.sharding.is_equivalent_to(embedding, 2) and d_hidden.sharding.is_equivalent_to(rows, 3)
        # In the loop nothing of the head's size, nor a chunk's logits, goes from device to device.
        assert largest_collective_in_loops(compiled.as_text()) <= CHUNK_STATES, sizes
        print("same on", sizes)
"""


def mesh_problem():
    """8 rows and a tied embedding [V, D] that every mesh axis divides."""
    rng = np.random.default_rng(4)
    mask = rng.random((8, 32)) < 0.3 * rng.random((8, 1))
    embedding = rng.normal(size=(512, 16)).astype(np.float32)
    inputs = {name: rng.normal(size=mask.shape).astype(np.float32) for name in ("advantages", "ref_logprobs")}
    inputs |= {"old_logprobs": inputs["ref_logprobs"] - 3, "role": rng.integers(0, 2, mask.shape).astype(np.int32)}
    hidden = rng.normal(size=(8, 32, 16)).astype(np.float32)
    return hidden, embedding, rng.integers(0, LIMIT, mask.shape).astype(np.int32), mask, inputs


def mesh_loss(options, groups, mesh, hidden, embedding, *rest):
    return fused_loss(options, 32, groups, 8192, hidden, embedding.T, *rest, mesh=mesh)


def largest_collective_in_loops(text):
    """The most numbers that one collective inside a while loop of a compiled program gives."""
    computations = dict(re.findall(r"^%?(\S+) \(.*?\{$(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    most = 0
    for body in re.findall(r"body=%?([\w.\-]+)", text):
        for line in computations[body].splitlines():
            if re.search(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(", line):
                shapes = re.findall(r"\[([\d,]*)\]", line.split("=", 1)[1].split("(")[0])
                most = max([most, *(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)])
    return most


@pytest.mark.parametrize(
    "sizes",
    [[(2, 2, 2)], pytest.param([(8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 1, 2)], marks=pytest.mark.slow)],
    ids=["all axes", "others"],
)
def test_no_mesh_changes_anything_and_no_chunk_moves_the_head(sizes):
    out = run_python(MESH_CODE.replace("SIZES", repr(sizes)), devices=8, timeout=900)
    assert out.count("same on") == len(sizes)

"""Rollouts on 8 simulated devices: the tokens of one, weights gathered once and narrow, then nothing large sent."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import run_python
from test_sampling import LIMIT, STOP, ragged, request, run

from envace_jax.buckets import Buckets
from envace_jax.models.qwen import QwenConfig, make_policy, param_shapes, shardings
from envace_jax.sampling import Sample, Sampler
from envace_jax.sharding import make_mesh

# 4 kv heads: tensor 2 and 4 divide them, 8 does not.
CONFIG = QwenConfig(
    vocab_size=300, width=32, layers=2, heads=8, kv_heads=4, head_dim=16, ffn=48, init_std=0.3, rope_theta=1e4,
    tie_embeddings=False,
)  # fmt: skip
LENGTH, SLOTS = 64, 16
MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 2, 4)]
CODE = """
    import test_decode_mesh as t
    alone = t.rollout(None, 0, False)
    for shape, pages, unroll in CASES:
        t.assert_same(alone, t.rollout(shape, pages, unroll))
        print("same on", shape, pages, unroll)
"""


def make_sampler(shape: tuple[int, int, int] | None, pages: int, unroll: bool) -> tuple[Sampler, object]:
    mesh = None if shape is None else make_mesh(*shape)
    policy = make_policy(CONFIG, mesh=mesh, unroll=unroll)
    params = make_policy(CONFIG).init(jax.random.key(0))
    if mesh is not None:
        params = jax.device_put(params, shardings(CONFIG, mesh))
    sampler = Sampler(
        policy, slots=SLOTS, max_length=LENGTH, buckets=Buckets((32,), (2,), (LENGTH,)), vocab_limit=LIMIT,
        stop_ids=STOP, mesh=mesh, pages=pages, page_size=8,
    )  # fmt: skip
    return sampler, policy.for_decoding(params)


def rollout(shape: tuple[int, int, int] | None, pages: int, unroll: bool) -> dict[int, Sample]:
    sampler, params = make_sampler(shape, pages, unroll)
    requests = [*ragged(14), request(20, temperature=0.0), request(21, temperature=0.6, top_p=0.7)]
    requests += [request(30, prompt=25, tokens=9, request_id=30 + i, key_ids=(30, i)) for i in range(4)]
    return run(sampler, requests, params=params)


def assert_same(want: dict[int, Sample], got: dict[int, Sample]) -> None:
    for number, sample in want.items():
        assert got[number].tokens.tolist() == sample.tokens.tolist(), number
        np.testing.assert_allclose(got[number].logprobs, sample.logprobs, atol=1e-5)


# With pages on every mesh (2, 2, 2 is the quick one), without on each axis by itself and on two, unrolled too.
ALL = [(shape, 96, False) for shape in MESHES if shape != (2, 2, 2)]
ALL += [(shape, 0, False) for shape in MESHES[:3]] + [((2, 2, 2), 96, True), ((1, 2, 4), 0, True)]


@pytest.mark.parametrize(
    "cases", [[((2, 2, 2), 96, False)], pytest.param(ALL, marks=pytest.mark.slow)], ids=["all axes, pages", "all"]
)
def test_no_mesh_changes_a_sample(cases):
    out = run_python(CODE.replace("CASES", repr(cases)), devices=8, timeout=1500)
    assert out.count("same on") == len(cases)


# --- what is sent between devices ---


def collectives(text: str, kinds: str = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"):
    """(kind, dtype, numbers) of every collective of a compiled program; of a tuple, each part."""
    found = []
    for line in text.splitlines():
        match = re.search(rf" = (.*?) ({kinds})(-start)?\(", line)
        if match:
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                found.append((match[2], dtype, math.prod(int(n) for n in shape.split(",") if n)))
    return found


HLO_CODE = """
    import jax, jax.numpy as jnp
    import test_decode_mesh as t
    from envace_jax.sharding import make_mesh
    mesh = make_mesh(1, 4, 2)
    policy = t.make_policy(t.CONFIG, mesh=mesh, compute_dtype="bfloat16", unroll=UNROLL)
    masters = t.masters(mesh)
    compiled, params = t.for_decoding(policy, masters)
    t.check_for_decoding(compiled, params, mesh)
    t.check_steps(policy, params, mesh, PAGES)
    print("as it should be")
"""


def for_decoding(policy, masters):
    """The compiled step from parameters of training to those of decoding, and the latter's shapes and places."""
    compiled = jax.jit(policy.for_decoding).lower(masters).compile()
    made = jax.eval_shape(policy.for_decoding, masters)
    places = compiled.output_shardings
    return compiled, jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), made, places)


def masters(mesh):
    places = shardings(CONFIG, mesh)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), param_shapes(CONFIG), places)


def gathered_wide(text):
    """Numbers of every all-gather whose operand was float32 all along.

    A CPU has no bfloat16 collectives: XLA widens their operands, which then come of numbers that were bfloat16.
    """
    bodies = dict(re.findall(r"^%?(\S+) \(.*?\{$(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    found = []
    for dtype, shape, operand in re.findall(r" = (\w+)\[([\d,]*)\]\S* all-gather\(%?([\w.\-]+)", text):
        made = re.search(rf"%{re.escape(operand)} = .*", text)[0]
        called = re.search(r"calls=%?([\w.\-]+)", made)
        if dtype == "f32" and "bf16[" not in made + (bodies[called[1]] if called else ""):
            found.append(math.prod(int(n) for n in shape.split(",") if n))
    return found


def check_for_decoding(compiled, shapes, mesh):
    """What goes in is cut over fsdp and float32; matrices are sent as bfloat16 and end cut over tensor alone."""
    text = compiled.as_text()
    assert 0 < max(gathered_wide(text)) <= CONFIG.layers * CONFIG.width  # norm scales
    sent = sum(numbers for kind, _, numbers in collectives(text, "all-gather"))
    matrices = sum(x.size // mesh.shape["tensor"] for x in jax.tree.leaves(shapes) if x.dtype == jnp.bfloat16)
    assert sent >= 0.9 * matrices / CONFIG.layers  # in a loop over the layers each gather counts once
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        scale = path[-1].key == "scale"
        assert leaf.dtype == (jnp.float32 if scale else jnp.bfloat16), path
        axes = [axis for axis in leaf.sharding.spec if axis is not None]
        assert axes == ([] if scale else ["tensor"]), path
    assert shapes["embedding"].shape == (512, 32) and shapes["embedding"].sharding.spec[0] == "tensor"  # 2 x 128 ids
    assert shapes["head"]["kernel"].shape == (32, 512) and shapes["head"]["kernel"].sharding.spec[1] == "tensor"


def check_steps(policy, params, mesh, sizes):
    for pages in sizes:
        sampler = Sampler(
            policy, slots=SLOTS, max_length=LENGTH, buckets=Buckets((32,), (2,), (LENGTH,)), vocab_limit=LIMIT,
            stop_ids=STOP, mesh=mesh, pages=pages, page_size=8, cache_dtype=jnp.bfloat16,
        )  # fmt: skip
        # Without pages a prefill's cache rows go round: a mesh wants pages.
        wanted = ("decode", "prefill") if pages else ("decode",)
        for name, lowered in sampler.lowered(params, lambda name, wanted=wanted: name.startswith(wanted)).items():
            sent = collectives(lowered.compile().as_text())
            rows = SLOTS // 4 * (32 if "prefill" in name else 1)  # of hidden states on a device
            # Hidden states are summed; no weight is gathered, nor the logits: their groups' sums, and one group.
            assert max(numbers for _, _, numbers in sent) <= max(rows * CONFIG.width, SLOTS * 128), (name, sent)
            gathers = [numbers for kind, _, numbers in sent if kind == "all-gather"]
            # Without pages the new keys and values go round too: 2 layers, 2 heads of 16 on a device.
            assert max(gathers, default=0) <= SLOTS * (40 if pages else 64), (name, sent)


@pytest.mark.parametrize(
    ("unroll", "pages"),
    [
        (False, [96]),
        pytest.param(False, [0], marks=pytest.mark.slow),
        pytest.param(True, [0, 96], marks=pytest.mark.slow),
    ],
)
def test_weights_are_cast_before_they_are_gathered_and_stay(unroll, pages):
    out = run_python(HLO_CODE.replace("UNROLL", str(unroll)).replace("PAGES", str(pages)), devices=8, timeout=900)
    assert "as it should be" in out

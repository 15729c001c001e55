"""Adapters: the formula, its gradients by the chain rule, nothing of the base's size trained or kept, every mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import run_python
from model_helpers import full_logits, random_params
from test_train_step import CONFIG, MODEL, batch_in, distance

from envace_jax import lora as adapters
from envace_jax.lora import TARGETS, Lora, joined, split
from envace_jax.models.names import LAYER_NAMES
from envace_jax.models.qwen import make_policy, param_shapes
from envace_jax.train_step import (
    TrainStepConfig,
    init_train_state,
    loss_and_gradient,
    make_optimizer,
    make_score_step,
    make_train_step,
)
from envace_jax.types import TrainBatch

ALL = Lora(3, 6.0)  # scale 2
SOME = Lora(2, 1.0, ("q_proj", "o_proj", "down_proj"))
INPUTS = {"out": 2}  # axes that a kernel contracts, where not 1
TOKENS = np.random.default_rng(5).integers(0, 40, (2, 9))


@functools.cache
def base(bias=False):
    config = dataclasses.replace(MODEL, qkv_bias=bias)
    return jax.tree.map(lambda leaf: 0.3 * leaf, random_params(config))


@functools.cache
def random_adapters(lora=ALL, bias=False):
    """A and B that are both other than what they begin as."""
    shapes = split(param_shapes(dataclasses.replace(MODEL, qkv_bias=bias), lora))[1]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.standard_normal(leaf.shape, np.float32)), shapes)


def by_hand(params, own, lora):
    """The base with alpha / rank * A B added to every adapted kernel, in float64."""
    layers = dict(params["layers"])
    for name, pair in own["layers"].items():
        a, b = (np.asarray(pair[key], np.float64) for key in ("lora_a", "lora_b"))
        product = np.stack([np.tensordot(one, other, 1) for one, other in zip(a, b, strict=True)])
        kernel = np.asarray(layers[name]["kernel"]) + lora.alpha / lora.rank * product
        layers[name] = {**layers[name], "kernel": jnp.asarray(kernel, jnp.float32)}
    return params | {"layers": layers}


@pytest.mark.parametrize(("lora", "bias", "unroll"), [(ALL, False, True), (SOME, True, False)])
def test_outputs_are_those_of_the_merged_matrices(lora, bias, unroll):
    config = dataclasses.replace(MODEL, qkv_bias=bias)
    policy = make_policy(config, unroll=unroll, lora=lora)
    own, plain = random_adapters(lora, bias), make_policy(config, unroll=unroll)
    want = full_logits(plain, by_hand(base(bias), own, lora), TOKENS)
    got = full_logits(policy, joined(base(bias), own), TOKENS)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.abs(want - full_logits(plain, base(bias), TOKENS)).max() > 0.1
    # The base alone computes as with no `lora`, and merged parameters decode by the same programs as any others.
    assert np.array_equal(full_logits(policy, base(bias), TOKENS), full_logits(plain, base(bias), TOKENS))
    decoding, usual = policy.for_decoding(joined(base(bias), own)), plain.for_decoding(base(bias))
    assert jax.tree.map(jnp.shape, decoding) == jax.tree.map(jnp.shape, usual)
    np.testing.assert_allclose(full_logits(policy, decoding, TOKENS), want, rtol=1e-4, atol=1e-4)


def test_adapters_begin_as_peft_begins_them():
    policy = make_policy(dataclasses.replace(MODEL, width=64, ffn=96), lora=Lora(16, 16.0))
    own = policy.init_adapters(jax.random.key(3))
    assert set(own) == {"layers"} and set(own["layers"]) == set(TARGETS.values())
    for name, pair in own["layers"].items():
        a, b = np.asarray(pair["lora_a"]), np.asarray(pair["lora_b"])
        bound = 1 / math.sqrt(math.prod(a.shape[1:-1]))  # of U(-1 / sqrt(in), 1 / sqrt(in))
        assert not b.any() and np.abs(a).max() <= bound and a.dtype == b.dtype == np.float32
        assert np.abs(a).max() > 0.97 * bound and a.std() == pytest.approx(bound / math.sqrt(3), rel=0.08), name
        assert not np.array_equal(a[0], a[1])
    again, other = policy.init_adapters(jax.random.key(3)), policy.init_adapters(jax.random.key(4))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), own, again))
    assert not np.array_equal(own["layers"]["up"]["lora_a"], other["layers"]["up"]["lora_a"])


def test_trees_are_taken_apart_and_put_together():
    whole = joined(base(), random_adapters(SOME))
    one, other = split(whole)
    assert jax.tree.structure(one) == jax.tree.structure(base())
    assert jax.tree.structure(other) == jax.tree.structure(random_adapters(SOME))
    assert whole["layers"]["up"]["kernel"] is base()["layers"]["up"]["kernel"]  # nothing is copied
    assert adapters.has_adapters(whole["layers"]) and not adapters.has_adapters(base()["layers"])
    with pytest.raises(ValueError, match="both trees have a leaf 'kernel'"):
        joined(base(), {"layers": {"up": {"kernel": 1}}})
    for wrong in ({"rank": 0}, {"alpha": 0.0}, {"targets": ()}, {"targets": ("q_proj", "lm_head")}):
        with pytest.raises(ValueError, match="LoRA"):
            dataclasses.replace(ALL, **wrong)
    assert {f"{peft}.weight": ours for peft, ours in TARGETS.items()} == {
        name.split(".", 1)[1]: path[0] for name, path in LAYER_NAMES.items() if path[1] == "kernel"
    }


VARIANTS = [
    (True, "none", {}),
    (False, "full", {"old_logprobs": "sampler", "denominator": "role"}),
    (False, "dots", {"old_logprobs": "sampler", "loss": "gspo"}),
]


@pytest.mark.parametrize(("unroll", "remat", "options"), VARIANTS)
def test_gradients_are_those_of_the_matrices_by_the_chain_rule(unroll, remat, options):
    """With dW of the merged model's own gradient: dA = s dW B^T and dB = s A^T dW."""
    config, batch = dataclasses.replace(CONFIG, **options), batch_in("packed")
    policy = make_policy(MODEL, unroll=unroll, remat=remat, lora=SOME)
    own = random_adapters(SOME)
    gradient = jax.jit(lambda p, base: loss_and_gradient(policy, config, p, batch, base=base))
    loss, got, stats = gradient(own, base())
    plain = make_policy(MODEL, unroll=unroll, remat=remat)
    want_loss, full, want_stats = jax.jit(lambda p: loss_and_gradient(plain, config, p, batch))(
        by_hand(base(), own, SOME)
    )
    np.testing.assert_allclose(loss, want_loss, rtol=1e-4, atol=1e-6)
    want = {}
    for name, pair in own["layers"].items():
        a, b = (np.asarray(pair[key], np.float64) for key in ("lora_a", "lora_b"))
        d = np.asarray(full["layers"][name]["kernel"], np.float64)
        layers, inputs = len(d), INPUTS.get(name, 1)
        d = d.reshape(layers, math.prod(d.shape[1 : 1 + inputs]), -1)
        scale = SOME.alpha / SOME.rank
        d_a = scale * np.einsum("lio,lro->lir", d, b.reshape(layers, SOME.rank, -1))
        d_b = scale * np.einsum("lir,lio->lro", a.reshape(layers, -1, SOME.rank), d)
        want[name] = {"lora_a": d_a.reshape(a.shape), "lora_b": d_b.reshape(b.shape)}
    assert distance(got["layers"], want) < 1e-4
    for name, value in stats.items():
        np.testing.assert_allclose(value, want_stats[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_step_moves_adapters_alone_and_scores_the_reference_without_them():
    policy, optimizer, batch = make_policy(MODEL, unroll=False, lora=ALL), make_optimizer(1e-2), batch_in("packed")
    before = jax.device_get(base())
    state = init_train_state(policy.init_adapters(jax.random.key(0)), optimizer)
    assert jax.tree.structure(state.params) == jax.tree.structure(random_adapters())
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(leaf.size for leaf in jax.tree.leaves(state.params))
    step = make_train_step(policy, optimizer, dataclasses.replace(CONFIG, kl_coef=0.1))
    reference = make_score_step(policy, CONFIG)(base(), batch)
    kls = []
    for _ in range(3):
        state, stats = step(state, batch, reference, None, base())
        kls.append(float(stats["kl"]))
    assert kls[0] < 1e-7 < kls[2] and step._cache_size() == 1  # they begin as nothing
    assert all(np.asarray(pair["lora_b"]).any() for pair in state.params["layers"].values())
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), before, jax.device_get(base())))


WIDE = dataclasses.replace(MODEL, vocab_size=2048, width=72, ffn=136, heads=6, kv_heads=3, head_dim=20, layers=3)


@pytest.mark.parametrize(("unroll", "loss"), [(False, "ppo"), (True, "gspo")])
def test_no_gradient_of_the_bases_size_exists(unroll, loss):
    """In the program as it is handed to the compiler, and in the memory of what that makes of it."""
    ints, floats = (jax.ShapeDtypeStruct((2, 32), kind) for kind in (jnp.int32, jnp.float32))
    batch = TrainBatch(ints, ints, ints, jax.ShapeDtypeStruct((2, 32), bool), floats, floats, ints)
    old = "trainer" if loss == "ppo" else "sampler"
    config = TrainStepConfig(micro_batch_rows=1, logprob_chunk=8, loss=loss, old_logprobs=old)
    shapes = param_shapes(WIDE)
    sizes = {tuple(sorted(leaf.shape[1:])) for leaf in jax.tree.leaves(shapes["layers"]) if leaf.ndim > 2}
    sizes.add(tuple(sorted(shapes["embedding"].shape)))
    policy, optimizer = make_policy(WIDE, unroll=unroll, remat="full", lora=Lora(2, 2.0)), make_optimizer(1e-3)
    step = make_train_step(policy, optimizer, config)

    def products_and_memory(params, base):
        state = jax.eval_shape(lambda params: init_train_state(params, optimizer), params)
        lowered = step.lower(state, batch, None, None, base)
        found = re.findall(r"dot_general.*-> tensor<([\dx]+)xf32>", lowered.as_text())
        made = {tuple(sorted(int(n) for n in shape.split("x") if n != "1")) for shape in found}
        return made & sizes, lowered.compile().memory_analysis().temp_size_in_bytes

    bytes_ = 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes))
    full, full_memory = products_and_memory(shapes, None)
    none, memory = products_and_memory(split(param_shapes(WIDE, Lora(2, 2.0)))[1], shapes)
    assert len(full) >= 4 and not none  # query and key/value, out, feed-forward, head
    assert memory < full_memory - 0.8 * bytes_


MESH_CODE = """
    import jax, numpy as np, optax
    from envace_jax.lora import split
    from envace_jax.models import int8, qwen
    from envace_jax.sharding import batch_sharding, make_mesh
    from envace_jax.train_step import init_train_state, make_train_step
    from test_lora import ALL, base, random_adapters
    from test_train_step import CONFIG, MODEL, batch_in, distance

    def quantized(params):
        layers = {}
        for name, part in params["layers"].items():
            if "kernel" in part:
                whole, scale = int8.quantized(part["kernel"], 2 if name == "out" else 1, True)
                part = part | {"kernel": whole, "kernel_scale": scale}
            layers[name] = part
        return params | {"layers": layers}

    batch, frozen = batch_in("packed"), jax.jit(quantized)(base())
    def moved(mesh):
        policy = qwen.make_policy(MODEL, mesh=mesh, unroll=False, lora=ALL)
        own, rest, rows, places = random_adapters(), frozen, batch, None
        if mesh is not None:
            all_places = qwen.shardings(MODEL, mesh, ALL, True)
            rest_places, places = split(all_places)
            own, rest = jax.device_put(jax.device_get((own, rest)), (places, rest_places))
            rows = jax.device_put(batch, batch_sharding(mesh))
            begun = policy.init_adapters(jax.random.key(0))
            assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), begun, places))
            for name, part in rest["layers"].items():  # A is cut as the inputs are, B as the outputs
                if "kernel" in part and name in own["layers"]:
                    pair, inputs = own["layers"][name], 2 if name == "out" else 1
                    cut = part["kernel"].sharding.spec
                    assert pair["lora_a"].sharding.spec == jax.P(*cut[: 1 + inputs], None), name
                    assert pair["lora_b"].sharding.spec == jax.P(None, None, *cut[1 + inputs :]), name
        before = jax.device_get(own)
        step = make_train_step(policy, optax.sgd(1.0), CONFIG, mesh, places)
        state = init_train_state(jax.tree.map(lambda x: x + 0, own), optax.sgd(1.0), mesh, places)
        state, stats = step(state, rows, None, None, rest)
        decoding = policy.for_decoding({**rest, "layers": {k: {**v, **own["layers"].get(k, {})}
                                                           for k, v in rest["layers"].items()}})
        return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), before, state.params), decoding, stats["loss"]

    want, merged, loss = moved(None)
    for sizes in SIZES:
        got, decoding, other = moved(make_mesh(*sizes))
        assert distance(got, want) < 1e-5, sizes
        np.testing.assert_allclose(other, loss, rtol=1e-5)
        decoding["embedding"] = decoding["embedding"][: MODEL.vocab_size]  # padded where the mesh cuts it
        decoding.pop("transposed_head", None), merged.pop("transposed_head", None)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), decoding, merged)
        print("same on", sizes)
"""


@pytest.mark.parametrize(
    "sizes",
    [[(2, 2, 2)], pytest.param([(8, 1, 1), (1, 8, 1), (1, 1, 8), (1, 2, 4)], marks=pytest.mark.slow)],
    ids=["all axes", "other meshes"],
)
def test_no_mesh_changes_adapters_on_an_int8_base(sizes):
    """Invariant 3, meshes: the gradient, where everything lies, and what is decoded from."""
    out = run_python(MESH_CODE.replace("SIZES", repr(sizes)), devices=8, timeout=900)
    assert out.count("same on") == len(sizes)

"""Attention by kernels: the TPU's, interpreted on a CPU, and cuDNN's formula, against the plain path."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import run_python

from envace_jax.models import block_attention, kernels
from envace_jax.models.qwen import QwenConfig, make_policy

SPLASH = functools.partial(kernels.attend_splash, interpret=True)
CUDNN = functools.partial(kernels.attend_cudnn, implementation="xla")


def packed(time, heads, kv_heads, head_dim=16):
    """q, k, v, a weight that is 0 at padding, and the ids of two packed rows whose ends are padding."""
    ids = np.zeros((2, time), np.int32)
    ids[0, : time // 3], ids[0, time // 3 : time - 10] = 1, 2
    ids[1, : time // 2], ids[1, time // 2 : time // 2 + 5], ids[1, time // 2 + 5 : -1] = 1, 2, 3
    keys = jax.random.split(jax.random.key(time), 4)
    sizes = (heads, kv_heads, kv_heads, heads)
    q, k, v, weight = (jax.random.normal(one, (2, time, n, head_dim)) for one, n in zip(keys, sizes, strict=True))
    return q, k, v, jnp.where(ids[..., None, None] != 0, weight, 0), ids


def result(attend, q, k, v, weight, ids):
    """What attention gives at real tokens, and the gradients of a weighted sum of it."""

    def loss(q, k, v):
        out = attend(q, k, v, ids)
        return jnp.sum(out * weight), jnp.where(ids[..., None, None] != 0, out, 0)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)


@pytest.mark.parametrize("attend", [SPLASH, CUDNN], ids=["splash", "cudnn"])
@pytest.mark.parametrize(("time", "heads", "kv_heads"), [(256, 4, 2), (300, 2, 2)], ids=["grouped", "odd length"])
def test_a_kernel_computes_what_the_plain_path_does(attend, time, heads, kv_heads):
    arguments = packed(time, heads, kv_heads)
    got, want = result(attend, *arguments), result(block_attention.attend, *arguments)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(other).max()))


def test_the_largest_block_that_pads_least_is_taken():
    assert [kernels._block(time) for time in (20480, 512, 300, 768, 100)] == [512, 512, 128, 256, 128]


def test_the_switch_by_platform():
    resolved = {(c, p): kernels.resolve(c, p) for c in ("auto", "plain") for p in ("cpu", "gpu", "tpu")}
    assert resolved == {
        ("auto", "cpu"): "plain", ("auto", "gpu"): "cudnn", ("auto", "tpu"): "splash",
        ("plain", "cpu"): "plain", ("plain", "gpu"): "plain", ("plain", "tpu"): "plain",
    }  # fmt: skip
    assert kernels.resolve("kernel", "tpu") == "splash"
    with pytest.raises(ValueError, match=r"kernel needs devices with one \(tpu, gpu\), and these are cpu"):
        kernels.make_attend("kernel", None)
    with pytest.raises(ValueError, match="attention is 'flash'; accepted are auto, plain, kernel"):
        make_policy(QwenConfig(8, 8, 1, 1, 1, 4, 8), attention="flash")


def test_auto_falls_back_where_a_kernel_cannot_and_kernel_refuses(monkeypatch):
    monkeypatch.setattr(kernels, "platform_of", lambda mesh: "gpu")
    q, k, v, _, ids = packed(64, 2, 2)
    plain = block_attention.attend(q, k, v, ids)
    np.testing.assert_array_equal(kernels.make_attend("auto", None)(q, k, v, ids), plain)  # float32 on GPU
    with pytest.raises(ValueError, match="model.attention: kernel cannot do float32 on GPU"):
        kernels.make_attend("kernel", None)(q, k, v, ids)
    monkeypatch.setattr(kernels, "platform_of", lambda mesh: "tpu")
    np.testing.assert_array_equal(kernels.make_attend("auto", None)(q, k, v, ids, ids), plain)
    with pytest.raises(ValueError, match="kernel cannot do rows of layout 'shared'"):
        kernels.make_attend("kernel", None)(q, k, v, ids, ids)
    half = [jax.ShapeDtypeStruct((1, 9000, 2, 8), jnp.bfloat16)] * 3
    assert kernels._cannot("cudnn", half[0], None) == "rows beyond 8192 tokens on GPU"
    assert kernels._cannot("splash", half[0], None) == ""


def test_each_device_computes_its_own_rows_and_heads():
    """8 devices, and heads that the mesh divides, those that it does not, and fewer key/value heads than devices."""
    out = run_python(
        """
        import functools
        import numpy as np
        from envace_jax.models import block_attention, kernels
        from envace_jax.sharding import make_mesh
        from test_kernels import CUDNN, packed, result

        for sizes, heads, kv_heads in (((2, 1, 4), 8, 4), ((1, 2, 4), 8, 2), ((1, 1, 8), 12, 2), ((1, 1, 8), 16, 8)):
            arguments = packed(32, heads, kv_heads, 4)
            own = functools.partial(kernels.over_mesh, CUDNN, make_mesh(*sizes))
            got, want = result(own, *arguments), result(block_attention.attend, *arguments)
            for one, other in zip((*got[0], got[1]), (*want[0], want[1])):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            print("same")
        """,
        devices=8,
    )
    assert out.count("same") == 4

"""The modules of the network: one decoder layer, and what surrounds the layers.

Each may be in one of several layouts: fused for decoding, with adapters beside frozen matrices, or int8. Knows widths
and logical axes; nothing of meshes, caches or how many layers there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from envace_jax.lora import Lora
from envace_jax.models import attention
from envace_jax.models.config import QwenConfig

Move = Callable[[jax.Array], jax.Array]  # to another layout on the mesh


def _same(x: jax.Array) -> jax.Array:
    return x


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32; scale f32[size]."""

    def __init__(self, size: int, axis: str, eps: float) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, kernel: jax.Array, inputs: int) -> jax.Array:
    """x [..., *in] with kernel [*in, *out] -> [..., *out]; `inputs` is the number of axes in."""
    return jnp.tensordot(x, kernel, axes=inputs)


def _product_forward(x: jax.Array, kernel: jax.Array, inputs: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel, inputs), (x, kernel)


def _product_backward(
    inputs: int, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What autodiff gives, but in the gradient of the kernel the narrower factor is the one to be transposed.

    Autodiff transposes the cotangent; where that is a wide feed-forward activation, computed in the same fusion, a CPU
    spends more on it than on the product.
    """
    x, kernel = residuals
    outputs = kernel.ndim - inputs
    d_x = jnp.tensordot(cotangent, kernel, axes=(tuple(range(-outputs, 0)),) * 2)
    rows = tuple(range(x.ndim - inputs))
    if math.prod(kernel.shape[:inputs]) <= math.prod(kernel.shape[inputs:]):
        return d_x, jnp.tensordot(x, cotangent, axes=(rows, rows))
    d_kernel = jnp.tensordot(cotangent, x, axes=(rows, rows))
    return d_x, jnp.moveaxis(d_kernel, range(outputs), range(-outputs, 0))


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _frozen_product(x: jax.Array, kernel: jax.Array, scale: jax.Array | None, inputs: int) -> jax.Array:
    """`_product` with a kernel that has no gradient: any dtype, or int8 with scale f32[*out].

    Integers are exact in either compute dtype, and the scale multiplies what comes out: no dequantised kernel is kept.
    """
    out = jnp.tensordot(x, kernel.astype(x.dtype), axes=inputs)
    return out if scale is None else (out * scale).astype(x.dtype)


def _frozen_forward(
    x: jax.Array, kernel: jax.Array, scale: jax.Array | None, inputs: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    return _frozen_product(x, kernel, scale, inputs), (kernel, scale)


def _frozen_backward(
    inputs: int, residuals: tuple[jax.Array, jax.Array | None], cotangent: jax.Array
) -> tuple[jax.Array, None, None]:
    kernel, scale = residuals
    outputs = kernel.ndim - inputs
    scaled = cotangent if scale is None else (cotangent * scale).astype(cotangent.dtype)
    d_x = jnp.tensordot(scaled, kernel.astype(cotangent.dtype), axes=(tuple(range(-outputs, 0)),) * 2)
    return d_x, None, None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)


def _adapter_in(
    shape: tuple[int, ...], axes: tuple[str | None, ...], inputs: int, rank: int, rngs: nnx.Rngs
) -> nnx.Param:
    """A [*in, rank] as PEFT begins it: Kaiming's uniform distribution with a = sqrt(5)."""
    bound = math.prod(shape[:inputs]) ** -0.5
    uniform = jax.random.uniform(rngs.params(), (*shape[:inputs], rank), jnp.float32, -bound, bound)
    return nnx.Param(uniform, axes=(*axes[:inputs], None))


class Matrix(nnx.Module):
    """A projection whose input and output may have several axes; `inputs` of the kernel's axes are contracted.

    With a `lora` the kernel is frozen, and an adapter is added where `adapted`; `quantized` is the layout of `int8`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        inputs: int,
        std: float,
        rngs: nnx.Rngs,
        bias: bool = False,
        lora: Lora | None = None,
        adapted: bool = False,
        quantized: bool = False,
    ) -> None:
        self.inputs = inputs
        self.frozen = quantized or lora is not None
        self.lora_scale = 0.0 if lora is None else lora.scale
        key = rngs.params()
        kernel = jnp.zeros(shape, jnp.int8) if quantized else std * jax.random.normal(key, shape, jnp.float32)
        self.kernel = nnx.Param(kernel, axes=axes)
        self.kernel_scale = nnx.Param(jnp.ones(shape[inputs:], jnp.float32), axes=axes[inputs:]) if quantized else None
        self.bias = nnx.Param(jnp.zeros(shape[inputs:], jnp.float32), axes=axes[inputs:]) if bias else None
        self.lora_a = _adapter_in(shape, axes, inputs, lora.rank, rngs) if lora is not None and adapted else None
        second = (0 if lora is None else lora.rank, *shape[inputs:])
        self.lora_b = nnx.Param(jnp.zeros(second, jnp.float32), axes=(None, *axes[inputs:])) if adapted else None

    def __call__(self, x: jax.Array) -> jax.Array:
        out = checkpoint_name(self._times(x), "projection")
        return out if self.bias is None else out + self.bias[...].astype(x.dtype)

    def _times(self, x: jax.Array) -> jax.Array:
        if not self.frozen:
            return _product(x, self.kernel[...].astype(x.dtype), self.inputs)
        scale = None if self.kernel_scale is None else self.kernel_scale[...]
        out = _frozen_product(x, self.kernel[...], scale, self.inputs)
        if self.lora_a is None or self.lora_b is None:
            return out
        low = _product(x, self.lora_a[...].astype(x.dtype), self.inputs) * self.lora_scale
        return out + _product(low, self.lora_b[...].astype(x.dtype), 1)


class Layer(nnx.Module):
    """One decoder layer: attention and SwiGLU feed-forward, each behind a norm and added to its input.

    `fused` is the layout for decoding: the projections that read the same input are one matrix (`_fuse`).
    """

    def __init__(
        self,
        config: QwenConfig,
        rngs: nnx.Rngs,
        fused: bool = False,
        lora: Lora | None = None,
        quantized: bool = False,
    ) -> None:
        width, ffn = config.width, config.ffn

        def matrix(
            name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], inputs: int = 1, bias: bool = False
        ) -> Matrix:
            adapted = lora is not None and lora.adapts(name)
            return Matrix(shape, axes, inputs, config.init_std, rngs, bias, lora, adapted, quantized)

        def heads_in(name: str, *shape: int, axes: tuple[str | None, ...]) -> Matrix:
            axes = ("embed", *axes, "head_dim")
            return matrix(name, (width, *shape, config.head_dim), axes, bias=config.qkv_bias)

        self.fused = fused
        self.attention_norm = RMSNorm(width, "embed", config.norm_eps)
        if fused:
            group = config.heads // config.kv_heads + 2
            self.query_key_value = heads_in("query_key_value", config.kv_heads, group, axes=("kv_heads", None))
        else:
            self.query = heads_in("query", config.heads, axes=("heads",))
            self.key = heads_in("key", config.kv_heads, axes=("kv_heads",))
            self.value = heads_in("value", config.kv_heads, axes=("kv_heads",))
        self.query_norm = RMSNorm(config.head_dim, "head_dim", config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, "head_dim", config.norm_eps) if config.qk_norm else None
        out_shape = (config.heads, config.head_dim, width)
        self.out = matrix("out", out_shape, ("heads", "head_dim", "embed"), 2)
        self.ffn_norm = RMSNorm(width, "embed", config.norm_eps)
        if fused:
            self.gate_up = matrix("gate_up", (width, 2, ffn), ("embed", None, "mlp"))
        else:
            self.gate = matrix("gate", (width, ffn), ("embed", "mlp"))
            self.up = matrix("up", (width, ffn), ("embed", "mlp"))
        self.down = matrix("down", (ffn, width), ("mlp", "embed"))

    def project(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, whole: Move = _same
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B,T,N,H], rotated keys and values [B,T,K,H] of hidden states [B,T,D].

        `whole` brings all positions to every device where the hidden states are spread over them.
        """
        normed = whole(self.attention_norm(x))
        if self.fused:
            together = self.query_key_value(normed)  # [B, T, K, G + 2, H]
            query = together[..., :-2, :].reshape(*x.shape[:2], -1, together.shape[-1])
            key, value = together[..., -2, :], together[..., -1, :]
        else:
            query, key, value = self.query(normed), self.key(normed), self.value(normed)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return attention.rotate(query, cos, sin), attention.rotate(key, cos, sin), value

    def finish(self, x: jax.Array, attended: jax.Array, whole: Move = _same, spread: Move = _same) -> jax.Array:
        """Adds the attention's result [B,T,N,H] and the feed-forward to hidden states [B,T,D].

        `spread` is `whole`'s inverse, for what is added to the hidden states.
        """
        x = x + spread(self.out(attended))
        normed = whole(self.ffn_norm(x))
        if self.fused:
            both = self.gate_up(normed)  # [B, T, 2, F]
            gate, up = both[..., 0, :], both[..., 1, :]
        else:
            gate, up = self.gate(normed), self.up(normed)
        return x + spread(self.down(jax.nn.silu(gate) * up))


class Ends(nnx.Module):
    """What surrounds the layers: token embedding [V, D], final norm, and the output projection where it is not tied."""

    def __init__(self, config: QwenConfig, rngs: nnx.Rngs) -> None:
        size = (config.vocab_size, config.width)
        self.embedding = nnx.Param(
            config.init_std * jax.random.normal(rngs.params(), size, jnp.float32), axes=("vocab", "embed")
        )
        self.norm = RMSNorm(config.width, "embed", config.norm_eps)
        self.head = None if config.tie_embeddings else Matrix(size[::-1], ("embed", "vocab"), 1, config.init_std, rngs)

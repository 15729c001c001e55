"""Attention within packed rows by a platform's own kernel: splash attention on TPU, cuDNN on GPU, else plain XLA.

One switch, `model.attention`, decides; the platform is that of the mesh's devices, so that a program for TPUs can be
made on a machine without one. Knows arrays, the mesh and platforms; knows no parameters. Shape letters as in
`types.py`; N query heads.

What the kernels leave out, beside `block_attention`: they compute every pair of blocks under the diagonal, also those
that no sequence joins, and they know sequence ids alone, not the trees of the "shared" row layout (`last_readers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import Mesh, PartitionSpec

from envace_jax.models import block_attention
from envace_jax.sharding import RULES, axis_size, partition_spec, platform_of

CHOICES = ("auto", "plain", "kernel")
KERNELS = {"tpu": "splash", "gpu": "cudnn"}  # by platform
BLOCKS = (512, 256, 128)  # tokens of a block of splash attention; the largest that pads the row least is taken
# cuDNN is told of packing by a mask of T x T; beyond this many tokens that outgrows what the kernel saves.
LONGEST_MASK = 8192

Attend = Callable[..., jax.Array]  # (q, k, v, sequence_ids, last_readers=None), as block_attention.attend


def resolve(choice: str, platform: str) -> str:
    """One of "plain", "splash", "cudnn". Raises ValueError for an unknown choice, and for "kernel" where none is."""
    if choice not in CHOICES:
        raise ValueError(f"attention is {choice!r}; accepted are {', '.join(CHOICES)}")
    if choice == "kernel" and platform not in KERNELS:
        raise ValueError(
            f"model.attention: kernel needs devices with one ({', '.join(KERNELS)}), and these are {platform}; set it "
            "to auto or plain"
        )
    return "plain" if choice == "plain" else KERNELS.get(platform, "plain")


def make_attend(choice: str, mesh: Mesh | None) -> Attend:
    """`block_attention.attend`, or what computes the same by the kernel that `choice` means on this mesh.

    It raises ValueError, while tracing, where `choice` is "kernel" and none can do it; "auto" is plain there: for rows
    with last_readers, and on GPU in float32 or beyond `LONGEST_MASK` tokens.
    """
    kind = resolve(choice, platform_of(mesh))
    if kind == "plain":
        return block_attention.attend
    kernel = attend_splash if kind == "splash" else attend_cudnn

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, sequence_ids: jax.Array, last_readers: jax.Array | None = None
    ) -> jax.Array:
        reason = _cannot(kind, q, last_readers)
        if reason and choice == "kernel":
            raise ValueError(f"model.attention: kernel cannot do {reason}; set it to auto or plain")
        if reason:
            return block_attention.attend(q, k, v, sequence_ids, last_readers)
        return over_mesh(kernel, mesh, q, k, v, sequence_ids)

    return attend


def _cannot(kind: str, q: jax.Array, last_readers: jax.Array | None) -> str:
    """Why a kernel cannot take these arrays, or nothing."""
    if last_readers is not None:
        return "rows of layout 'shared'"
    if kind == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype} on GPU"
    if kind == "cudnn" and q.shape[1] > LONGEST_MASK:
        return f"rows beyond {LONGEST_MASK} tokens on GPU"
    return ""


def over_mesh(
    kernel: Callable[..., jax.Array],
    mesh: Mesh | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sequence_ids: jax.Array,
) -> jax.Array:
    """`kernel` on every device's own rows and heads: no word between devices. Shapes as in `attend_splash`.

    Key/value heads that the mesh does not divide are whole on every device, which takes those of its query heads; where
    a device's query heads would need parts of several, all heads are on every device.
    """
    if mesh is None or mesh.size == 1:
        return kernel(q, k, v, sequence_ids)
    heads, kv_heads = q.shape[2], k.shape[2]
    pieces = axis_size(mesh, RULES["heads"])
    cut = heads % pieces == 0 and (kv_heads % pieces == 0 or pieces % kv_heads == 0)
    rows = partition_spec(mesh, ("batch", None), sequence_ids.shape)
    query = PartitionSpec(rows[0], None, RULES["heads"] if cut else None, None)
    whole = not cut or kv_heads % pieces != 0
    key = PartitionSpec(rows[0], None, None if whole else RULES["kv_heads"], None)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        if cut and whole:
            own = jax.lax.axis_index(RULES["heads"]) * kv_heads // pieces
            k, v = (jax.lax.dynamic_slice_in_dim(x, own, 1, 2) for x in (k, v))
        return kernel(q, k, v, ids)

    return jax.shard_map(local, mesh=mesh, in_specs=(query, key, key, rows), out_specs=query, check_vma=False)(
        q, k, v, sequence_ids
    )


def attend_splash(
    q: jax.Array, k: jax.Array, v: jax.Array, sequence_ids: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Token t reads tokens s <= t of its own sequence id. q [B,T,N,H]; k, v [B,T,K,H]; i32[B,T] -> [B,T,N,H].

    Padding (id 0) reads padding. Keys and values are not repeated. `interpret` runs the kernel without a TPU.
    """
    time, heads = q.shape[1], q.shape[2]
    block = _block(time)
    kernel = _splash_kernel(time + -time % block, heads, block, interpret)
    # The kernel does not scale; in the queries' dtype this is one rounding more than the plain path has.
    scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)

    def turned(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -time % block), (0, 0), (0, 0))).swapaxes(1, 2)

    def row(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return kernel(q, k, v, segment_ids=splash.SegmentIds(q=ids, kv=ids))  # type: ignore[return-value]

    ids = jnp.pad(sequence_ids, ((0, 0), (0, -time % block)))
    return jax.vmap(row)(turned(scaled), turned(k), turned(v), ids).swapaxes(1, 2)[:, :time]


def _block(time: int) -> int:
    return min(BLOCKS, key=lambda block: (-time % block, -block))


def _splash_kernel(time: int, heads: int, block: int, interpret: bool) -> splash.SplashAttentionKernel:
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((time, time)) for _ in range(heads)])
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)


def attend_cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, sequence_ids: jax.Array, *, implementation: str = "cudnn"
) -> jax.Array:
    """As `attend_splash`, by cuDNN's fused attention; float16 or bfloat16. `implementation` "xla" runs anywhere."""
    same = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    return attend(q, k, v, mask=same)

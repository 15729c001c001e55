"""The network: Qwen3's dense decoder, with switches that also give Qwen2.5 and Llama-layout models.

Flax modules define one layer and what surrounds the layers (`layers.py`); `make_policy` splits them into definitions
and returns pure functions over a nested dict of arrays, layers stacked on axis 0 (`trees.py`). Knows nothing of
tokenizers, sampling or losses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from envace_jax import lora as adapters
from envace_jax import sharding
from envace_jax.lora import Lora
from envace_jax.models import attention, decode_layout, embedding, int8, kernels, layer_scan, paged_attention, trees
from envace_jax.models.config import QwenConfig, parameter_count
from envace_jax.models.layers import Ends, Layer
from envace_jax.models.trees import logical_axes, param_shapes, shardings
from envace_jax.types import KVCache, PagedCache, Params, Policy

__all__ = [
    "QwenConfig",
    "logical_axes",
    "make_policy",
    "param_shapes",
    "parameter_count",
    "shardings",
]

UNROLL_UP_TO = 8  # layers; beyond, a scan keeps compile time flat

# What a layer keeps for the backward pass; the rest is computed again.
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names("projection"),  # recomputes attention and elementwise work
    "full": jax.checkpoint_policies.nothing_saveable,
    # As "full"; what is kept lies in the host's memory meanwhile.
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
TRANSPOSED_HEAD = decode_layout.TRANSPOSED_HEAD
COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, eq=False)
class _Network:
    """What `make_policy` has settled; its methods are the policy's functions and read nothing else."""

    config: QwenConfig
    mesh: Mesh | None
    dtype: Any
    written_out: bool
    remat: str
    attend: kernels.Attend
    layer_axes: dict[str, sharding.LogicalAxes]  # of one layer's parameters, by path
    kernel: bool  # attention over pages by the TPU's kernel
    lora: Lora | None
    ends_definition: Any

    def init(self, key: jax.Array) -> Params:
        places = None if self.mesh is None else shardings(self.config, self.mesh)
        return jax.jit(lambda key: trees.init(self.config, key), out_shardings=places)(key)

    def init_adapters(self, key: jax.Array) -> Params:
        def own(tree: Params) -> Params:
            return adapters.split(tree)[1]

        places = None if self.mesh is None else own(shardings(self.config, self.mesh, self.lora))
        return jax.jit(lambda key: own(trees.init(self.config, key, self.lora)), out_shardings=places)(key)

    def apply(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        sequence_ids: jax.Array,
        cache: KVCache | PagedCache | None = None,
        last_readers: jax.Array | None = None,
        totals: Params | None = None,
    ) -> tuple[jax.Array, KVCache | PagedCache | None]:
        if cache is None:
            return self._without_cache(params, tokens, positions, sequence_ids, last_readers, totals), None
        config, ends = self.config, self._ends(params)
        x = self._rows(jnp.take(ends.embedding[...], tokens, axis=0, mode="clip").astype(self.dtype))
        if cache.by_position is not None:
            cos, sin = attention.looked_up_angles(cache.by_position, positions)
        else:
            cos, sin = attention.rotary_angles(positions, config.head_dim, config.rope_theta)
        valid = sequence_ids != 0
        if isinstance(cache, PagedCache):
            x, cache = self._over_pages(params["layers"], x, cos, sin, cache, valid)
            return ends.norm(x), cache

        def body(x: jax.Array, inputs: tuple[Params, Any]) -> tuple[jax.Array, Any]:
            """One layer; `inputs[1]` is its number where the cache is stacked, its own (k, v) where it is not."""
            layer = self._module(inputs[0])
            query, key, value = layer.project(x, cos, sin)
            if self.written_out:
                attended, new = self._attend_layer(query, key, value, inputs[1], cache.lengths, valid)
            else:
                assert isinstance(cache, KVCache)
                read, new = attention.stacked_reader(cache, inputs[1]), (key, value)
                attended = attention.attend_cached(query, key, value, cache.lengths, cache.k.shape[2], read)
            return self._rows(layer.finish(x, attended)), new

        if not self.written_out:
            # The cache is only read in the loop and written once after it, so that XLA updates it in place.
            x, (keys, values) = jax.lax.scan(body, x, (params["layers"], jnp.arange(config.layers)))
            return ends.norm(x), attention.write_stacked(cache, keys, values, valid)
        written = []
        for layer, cached in zip(self._apart(params["layers"]), zip(cache.k, cache.v, strict=True), strict=True):
            x, new = body(x, (layer, cached))
            written.append(new)
        keys, values = zip(*written, strict=True)
        lengths = cache.lengths + valid.sum(axis=1, dtype=cache.lengths.dtype)
        return ends.norm(x), KVCache(keys, values, lengths, cache.by_position)

    def _without_cache(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        sequence_ids: jax.Array,
        last_readers: jax.Array | None,
        totals: Params | None,
    ) -> jax.Array:
        """Hidden states [B, T, D] of whole rows."""
        config, ends = self.config, self._ends(params)
        x = self._rows(self._embedded(ends.embedding[...], tokens), "sequence")
        angles = attention.rotary_angles(positions, config.head_dim, config.rope_theta)
        constants = (*angles, sequence_ids, last_readers)
        if totals is not None:
            if not self.adds_gradients:
                raise ValueError("totals need layers in a scan that keeps only their inputs (remat full or offload)")
            offload = self.remat == "offload"
            x = layer_scan.scan_adding(self._layer, offload, x, params["layers"], totals, constants)
            return self._whole(ends.norm(x))

        def body(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
            return self._layer(x, layer, constants), None

        policy = REMAT[self.remat]
        if policy is not None:
            body = jax.checkpoint(body, policy=policy, prevent_cse=self.written_out)
        if not self.written_out:
            return self._whole(ends.norm(jax.lax.scan(body, x, params["layers"])[0]))
        for layer in self._apart(params["layers"]):
            x, _ = body(x, layer)
        return self._whole(ends.norm(x))

    def _layer(self, x: jax.Array, weights: Params, constants: Any) -> jax.Array:
        """One layer over whole rows; between layers their positions are spread over `tensor` where it divides them."""
        cos, sin, sequence_ids, last_readers = constants
        if self.remat == "offload":
            x = checkpoint_name(x, "layer_input")
        layer = self._module(self._gathered(weights))
        query, key, value = layer.project(x, cos, sin, self._whole)
        attended = self.attend(query, key, value, sequence_ids, last_readers)
        return self._rows(layer.finish(x, attended, self._whole, self._spread), "sequence")

    def _apart(self, layers: Any) -> Any:
        return layers if isinstance(layers, tuple) else trees.unstack(layers, self.config.layers)

    @property
    def adds_gradients(self) -> bool:
        """Whether `apply` takes totals: of gradients in all parameters, so not where some are frozen."""
        return not self.written_out and self.remat in ("full", "offload") and self.lora is None

    def _embedded(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Rows of the embedding in the compute dtype; on a mesh that cuts the table, without putting it together."""
        if self.mesh is not None and embedding.cut(self.mesh, table.shape, tokens.shape):
            return embedding.look_up(self.mesh, table, tokens, self.dtype)
        return jnp.take(table, tokens, axis=0, mode="clip").astype(self.dtype)

    def _gathered(self, weights: Params) -> Params:
        """One layer's parameters as its products read them, whole over `fsdp`: cast first, so that half is sent.

        Their gradients are summed to where the parameters lie, and not on every device.
        """
        mesh = self.mesh
        if mesh is None or mesh.size == 1:
            return weights

        def gather(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            axes = self.layer_axes.get(jax.tree_util.keystr(path))
            if axes is None:
                return leaf
            if path[-1].key in ("kernel", "bias") and jnp.issubdtype(leaf.dtype, jnp.floating):
                # Behind a barrier, else XLA casts all layers before the loop and keeps that copy too.
                leaf = sharding.constrain(jax.lax.optimization_barrier(leaf).astype(self.dtype), mesh, *axes)
            return sharding.moved(leaf, mesh, tuple(None if name == "embed" else name for name in axes), axes)

        return jax.tree_util.tree_map_with_path(gather, weights)

    def _whole(self, x: jax.Array) -> jax.Array:
        """All positions of [B, T, D] on every device of `tensor`."""
        return self._between(x, "sequence", "length")

    def _spread(self, x: jax.Array) -> jax.Array:
        """Each device's own positions, of what the devices of `tensor` hold parts of a sum of."""
        return self._between(x, "length", "sequence")

    def _between(self, x: jax.Array, here: str, there: str) -> jax.Array:
        if self.mesh is None or sharding.axis_size(self.mesh, sharding.RULES["sequence"]) == 1:
            return x
        return sharding.moved(x, self.mesh, ("batch", there, None), ("batch", here, None))

    def _module(self, params: Params) -> Layer:
        """The module of one layer, of the kind that its parameters are."""
        lora = self.lora if adapters.has_adapters(params) else None
        quantized = int8.SCALE in params["down"]
        return nnx.merge(trees.split_layer(self.config, "gate_up" in params, lora, quantized)[0], params)

    def _over_pages(
        self, layers: Any, x: jax.Array, cos: jax.Array, sin: jax.Array, cache: PagedCache, valid: jax.Array
    ) -> tuple[jax.Array, PagedCache]:
        """All layers; each writes its keys and values to the pages before it reads them."""

        def body(carry: tuple[jax.Array, jax.Array], inputs: tuple[Params, Any]) -> tuple[Any, None]:
            (x, pages), layer = carry, self._module(inputs[0])
            query, key, value = layer.project(x, cos, sin)
            attended, pages = paged_attention.attend(
                query, key, value, inputs[1], dataclasses.replace(cache, pages=pages), valid,
                mesh=self.mesh, kernel=self.kernel,
            )  # fmt: skip
            return (self._rows(layer.finish(x, attended)), pages), None

        carry = (x, cache.pages)
        if self.written_out:
            for number, layer in enumerate(self._apart(layers)):
                carry, _ = body(carry, (layer, number))
        else:
            carry, _ = jax.lax.scan(body, carry, (layers, jnp.arange(self.config.layers, dtype=jnp.int32)))
        lengths = cache.lengths + valid.sum(axis=1, dtype=cache.lengths.dtype)
        return carry[0], dataclasses.replace(cache, pages=carry[1], lengths=lengths)

    def _attend_layer(
        self, query: jax.Array, key: jax.Array, value: jax.Array, own: Any, lengths: jax.Array, valid: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Attention over a layer's own cached keys and values, and those with the new ones written."""
        old_keys, old_values = own
        keys, values = attention.write_layer(old_keys, old_values, key, value, lengths, valid)
        if query.shape[1] == 1:
            return attention.attend_one(query, keys, values, lengths), (keys, values)
        read = attention.layer_reader(old_keys, old_values)
        return attention.attend_cached(query, key, value, lengths, old_values.shape[2], read), (keys, values)

    def decoding_layers(self, layers: Params) -> Any:
        """Layers (stacked) as parameters for decoding have them."""
        fused = decode_layout.fuse(layers, self.config) if decode_layout.fuses(self.mesh) else layers
        return tuple(trees.unstack(fused, self.config.layers)) if self.written_out else fused

    def decoding_parts(self, layers: Params, embedding: jax.Array) -> Params:
        """What parameters for decoding hold in place of, or beside, the others."""
        made = {"layers": self.decoding_layers(self._cast(layers))}
        return made | ({TRANSPOSED_HEAD: embedding.T} if self.config.tie_embeddings else {})

    def _cast(self, layers: Params) -> Params:
        if not adapters.has_adapters(layers):
            return decode_layout.cast_matrices(layers, self.dtype)
        # Layer by layer, so that one at a time is in float32.
        return jax.lax.map(lambda layer: decode_layout.cast_matrices(self._merged(layer), self.dtype), layers)

    def _merged(self, layer: Params) -> Params:
        """One layer with its adapters merged, where it has any."""
        if not adapters.has_adapters(layer):
            return layer
        assert self.lora is not None  # there are adapters
        scale = self.lora.scale
        return {name: adapters.merged(part, scale, jnp) if "kernel" in part else part for name, part in layer.items()}

    def gathered(self, params: Params) -> Params:
        """All parameters for decoding on a mesh of several devices, or of others than a CPU."""
        layout = self.decoding_layout(_stays_int8(params))
        made = layout.gathered(params, self.config, self.dtype, self._merged)
        if self.written_out:
            made["layers"] = self.decoding_layers(made["layers"])
        if self.config.tie_embeddings and decode_layout.fuses(self.mesh):
            made[TRANSPOSED_HEAD] = made["embedding"].T  # a TPU multiplies by a transposed matrix as fast
        return made

    def decoding_layout(self, quantized: bool) -> decode_layout.Layout:
        """Where `gathered` takes parameters from and puts them; `quantized`: their layers stay int8."""
        assert self.mesh is not None
        return decode_layout.Layout(
            mesh=self.mesh,
            training=shardings(self.config, self.mesh, None, quantized),
            ends=trees.names_of(trees.split_ends(self.config)[1]),
            layer=trees.names_of(trees.split_layer(self.config, decode_layout.fuses(self.mesh), None, quantized)[1]),
            apart=self.config.layers if self.written_out else 0,
        )

    def head(self, params: Params) -> jax.Array:
        if TRANSPOSED_HEAD in params:
            return params[TRANSPOSED_HEAD]
        ends = self._ends(params)
        return ends.embedding[...].T if ends.head is None else ends.head.kernel[...]

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        head = self.head(params)
        if head.dtype == hidden.dtype:  # products of narrow numbers are exact in float32: no need to widen the head
            out = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
        else:
            out = jnp.matmul(hidden.astype(jnp.float32), head.astype(jnp.float32))
        if out.ndim != 2 or decode_layout.alone(self.mesh):
            return out
        return sharding.constrain(out, self.mesh, "batch", "vocab")

    def init_cache(self, slots: int, length: int, dtype: Any = None) -> KVCache:
        config = self.config
        sizes = {"layers": config.layers, "batch": slots, "length": length}
        sizes |= {"kv_heads": config.kv_heads, "head_dim": config.head_dim}

        def zeros(*layout: str) -> jax.Array:
            shape = tuple(sizes[name] for name in layout)
            return sharding.constrain(jnp.zeros(shape, self.dtype if dtype is None else dtype), self.mesh, *layout)

        def make() -> KVCache:
            lengths = sharding.constrain(jnp.zeros((slots,), jnp.int32), self.mesh, "batch")
            positions = jnp.arange(length, dtype=jnp.int32)[None]
            angles = attention.rotary_angles(positions, config.head_dim, config.rope_theta)
            table = tuple(sharding.constrain(part[0, :, 0], self.mesh, None, None) for part in angles)
            if self.written_out:
                keys = tuple(zeros("batch", "kv_heads", "head_dim", "length") for _ in range(config.layers))
                values = tuple(zeros("batch", "kv_heads", "length", "head_dim") for _ in range(config.layers))
                return KVCache(keys, values, lengths, table)
            stacked = ("layers", "batch", "length", "kv_heads", "head_dim")
            return KVCache(zeros(*stacked), zeros(*stacked), lengths, table)

        return jax.jit(make)()

    def init_pages(self, pages: int, page_size: int, length: int, dtype: Any = None) -> tuple[jax.Array, Any]:
        config = self.config
        shape = (config.layers, pages, page_size, 2 * config.kv_heads, config.head_dim)
        angles = attention.rotary_angles(jnp.arange(length, dtype=jnp.int32)[None], config.head_dim, config.rope_theta)
        table = tuple(sharding.constrain(part[0, :, 0], self.mesh, None, None) for part in angles)
        return jnp.zeros(shape, self.dtype if dtype is None else dtype), table

    def _ends(self, params: Params) -> Ends:
        ends = {name: value for name, value in params.items() if name not in ("layers", TRANSPOSED_HEAD)}
        return nnx.merge(self.ends_definition, ends)

    def _rows(self, x: jax.Array, positions: str = "length") -> jax.Array:
        return sharding.constrain(x, self.mesh, "batch", positions, None)


def _stays_int8(params: Params) -> bool:
    """Whether the layers are int8 with no adapters to be merged into them."""
    return int8.SCALE in params["layers"]["down"] and not adapters.has_adapters(params["layers"])


def _for_decoding(network: _Network) -> Callable[[Params], Params]:
    if not decode_layout.alone(network.mesh):

        @functools.cache
        def program(quantized: bool) -> Callable[[Params], Params]:
            made = jax.eval_shape(network.gathered, param_shapes(network.config, None, quantized))
            return jax.jit(network.gathered, out_shardings=network.decoding_layout(quantized).places(made))

        return lambda params: program(_stays_int8(params))(params)
    parts = jax.jit(network.decoding_parts)  # one function, so that it is compiled once

    def for_decoding(params: Params) -> Params:
        return params | parts(params["layers"], params["embedding"])

    return for_decoding


def make_policy(
    config: QwenConfig,
    *,
    mesh: Mesh | None = None,
    compute_dtype: str = "float32",
    unroll: bool | None = None,
    remat: str = "none",
    attention: str = "auto",
    lora: Lora | None = None,
) -> Policy:
    """The network as pure functions (see `types.Policy`). Raises ValueError for an unknown choice.

    compute_dtype  "float32" or "bfloat16": parameters are cast inside, so float32 masters stay masters. Norms, rotary
                   angles, softmax and logits are float32 either way.
    unroll         True writes the layers out, False scans them, None writes out up to 8. The cache follows: arrays of
                   its own for each layer, or one stacked array.
    remat          "none", "dots" (keep projections, recompute attention), "full" (keep only each layer's input) or
                   "offload" (keep that in the host's memory).
    attention      "auto", "plain" or "kernel": over whole rows as in `kernels.make_attend`; over pages all but "plain"
                   take the kernel where the mesh is of TPUs.
    mesh           lays activations and fresh parameters out over (data, fsdp) x tensor.
    lora           what adapters the parameters may have (`lora.joined`). Matrices beside adapters, and int8 ones, have
                   no gradient; parameters without any compute as they would with no `lora`.
    """
    if compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(f"compute_dtype is {compute_dtype!r}; accepted are {', '.join(COMPUTE_DTYPES)}")
    if remat not in REMAT:
        raise ValueError(f"remat is {remat!r}; accepted are {', '.join(REMAT)}")
    layer_axes = jax.tree_util.tree_flatten_with_path(
        logical_axes(config, lora)["layers"], is_leaf=lambda node: isinstance(node, tuple)
    )[0]
    network = _Network(
        config=config,
        mesh=mesh,
        dtype=COMPUTE_DTYPES[compute_dtype],
        written_out=config.layers <= UNROLL_UP_TO if unroll is None else unroll,
        remat=remat,
        attend=kernels.make_attend(attention, mesh),
        layer_axes={jax.tree_util.keystr(path): axes[1:] for path, axes in layer_axes},
        kernel=paged_attention.use_kernel(attention, mesh, config.head_dim),
        lora=lora,
        ends_definition=trees.split_ends(config)[0],
    )
    return Policy(
        init=network.init,
        apply=network.apply,
        logits=network.logits,
        head=network.head,
        for_decoding=_for_decoding(network),
        init_cache=network.init_cache,
        init_pages=network.init_pages,
        vocab_size=config.vocab_size,
        adds_gradients=network.adds_gradients,
        init_adapters=None if lora is None else network.init_adapters,
    )

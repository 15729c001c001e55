"""Where weights lie while a mesh decodes: cut over `tensor` alone, whole on every shard of the slots.

Training cuts each weight over `fsdp` as well and gathers a layer at a time, which a decode step, with a token a slot,
cannot pay. So parameters for decoding are gathered once an update, after they are cast to the dtype of computation.
Knows the names of a layer's parameters and their logical axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envace_jax import sharding
from envace_jax.models import int8
from envace_jax.models.config import QwenConfig
from envace_jax.types import Params

RULES = {**sharding.RULES, "embed": None}
TRANSPOSED_HEAD = "transposed_head"  # [D, V], beside a tied embedding in parameters for decoding
LANES = 128  # as ids are dealt in draw.py


def cast_matrices(layers: Params, dtype: Any) -> Params:
    """The layers with their matrices and biases in `dtype`, norm scales as they are.

    Those are what a policy of this compute dtype casts at every use, so it computes the same, bit by bit.
    """

    def cast(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        matrix = path[-1].key in ("kernel", "bias") and leaf.dtype != jnp.int8  # the parameters of `Matrix`
        return leaf.astype(dtype) if matrix else leaf

    return jax.tree_util.tree_map_with_path(cast, layers)


def fuse(layers: Params, config: QwenConfig) -> Params:
    """The layers (stacked) in the layout of a fused `Layer`.

    Query heads lie with the key/value head that they share, and gate and up on an axis of their own, so that a mesh
    cuts the fused matrices where it cuts the separate ones.
    """
    rest = {name: value for name, value in layers.items() if name not in ("query", "key", "value", "gate", "up")}

    def grouped(name: str, part: str) -> jax.Array:
        array = layers[name][part]  # [.., heads, H]
        return array.reshape(*array.shape[:-2], config.kv_heads, -1, array.shape[-1])

    parts = layers["query"].keys()  # kernel, and bias or scale where there is one
    fused = {part: jnp.concatenate([grouped(n, part) for n in ("query", "key", "value")], axis=-2) for part in parts}
    gate_up = {part: jnp.stack([layers[n][part] for n in ("gate", "up")], axis=-2) for part in layers["gate"]}
    return rest | {"query_key_value": fused, "gate_up": gate_up}


def alone(mesh: Mesh | None) -> bool:
    """Whether the ends of the network stay as they are, on a CPU without others."""
    return mesh is None or (mesh.size == 1 and sharding.platform_of(mesh) == "cpu")


def fuses(mesh: Mesh | None) -> bool:
    """Whether projections of the same input are one matrix. A TPU would copy such a matrix into another order."""
    return mesh is None or sharding.platform_of(mesh) != "tpu"


def padded_vocabulary(size: int, mesh: Mesh) -> int:
    """Rows of embedding and head, so that every shard has whole groups of ids and draws among them where they are."""
    pieces = sharding.axis_size(mesh, RULES["vocab"])
    return size if pieces == 1 else -(-size // (LANES * pieces)) * LANES * pieces


def _padded_ends(params: Params, mesh: Mesh) -> Params:
    """What surrounds the layers, with as many rows of embedding and head."""
    rows = padded_vocabulary(params["embedding"].shape[0], mesh)
    ends = {name: value for name, value in params.items() if name != "layers"}
    ends["embedding"] = _pad(ends["embedding"], 0, rows)
    if "head" in ends:
        ends["head"] = {"kernel": _pad(ends["head"]["kernel"], 1, rows)}
    return ends


def _pad(array: jax.Array, axis: int, size: int) -> jax.Array:
    return jnp.pad(array, [(0, size - array.shape[i] if i == axis else 0) for i in range(array.ndim)])


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


@dataclasses.dataclass(frozen=True)
class Layout:
    """From where training has the parameters to where decoding has them."""

    mesh: Mesh
    training: Any  # `NamedSharding` of every parameter
    ends: Any  # logical axes of what surrounds the layers
    layer: Any  # those of one layer for decoding
    apart: int  # layers, where each has a tree of its own; 0 where they are stacked

    def gathered(
        self, params: Params, config: QwenConfig, dtype: Any, merged: Callable[[Params], Params] = lambda layer: layer
    ) -> Params:
        """The parameters cast and, if they are stacked, their layers fused, to be laid out by `places`.

        `merged` comes first, for a layer at a time: what a layer of this layout is made of.
        """
        ends = {name: value for name, value in params.items() if name != "layers"}
        cast = _cast_in_place(ends, dtype, {name: self.training[name] for name in ends})
        made = _padded_ends(cast, self.mesh)
        if self.apart:
            layers = jax.lax.map(merged, params["layers"])
            return made | {"layers": _cast_in_place(layers, dtype, self.training["layers"])}
        one = jax.tree.map(lambda at: NamedSharding(self.mesh, PartitionSpec(*at.spec[1:])), self.training["layers"])

        def gather(_: None, layer: Params) -> tuple[None, Params]:
            cast = _cast_in_place(merged(layer), dtype, one)
            made = fuse(cast, config) if fuses(self.mesh) else cast
            return None, jax.lax.with_sharding_constraint(made, self._places(self.layer, made))

        # A layer at a time, so that no other copy of all of them is made.
        return made | {"layers": jax.lax.scan(gather, None, params["layers"])[1]}

    def places(self, shapes: Params) -> Any:
        """A tree like the parameters for decoding, which have these shapes, of `NamedSharding`."""
        stacked = jax.tree.map(lambda names: ("layers", *names), self.layer, is_leaf=_is_axes)
        layers = (self.layer,) * self.apart if self.apart else stacked
        axes = self.ends | {"layers": layers, TRANSPOSED_HEAD: ("embed", "vocab")}
        return self._places({name: axes[name] for name in shapes}, shapes)

    def _places(self, axes: Any, shapes: Any) -> Any:
        def place(names: sharding.LogicalAxes, leaf: Any) -> NamedSharding:
            return NamedSharding(self.mesh, sharding.partition_spec(self.mesh, names, leaf.shape, RULES))

        return jax.tree.map(place, axes, shapes, is_leaf=_is_axes)


def _cast_in_place(params: Any, dtype: Any, layout: Any) -> Any:
    """Weights in `dtype` in the layout they have, so that what is sent afterwards is of that size.

    Scales stay in float32, and int8 matrices as they are.
    """

    def cast(path: tuple[Any, ...], leaf: jax.Array, place: NamedSharding) -> jax.Array:
        if path[-1].key in ("scale", int8.SCALE) or leaf.dtype == jnp.int8:
            return leaf
        # The barrier keeps XLA from gathering first and casting then.
        return jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(leaf.astype(dtype), place))

    return jax.tree_util.tree_map_with_path(cast, params, layout)

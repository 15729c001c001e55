"""Parameters as trees: their shapes, their logical axes, and where they lie on a mesh. Nothing is allocated here but by
`init`.

Layers are stacked on axis 0. Knows the modules of `layers.py`; nothing of what is computed with them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from envace_jax import sharding
from envace_jax.lora import Lora
from envace_jax.models.config import QwenConfig
from envace_jax.models.layers import Ends, Layer
from envace_jax.types import Params


@functools.cache
def split_layer(
    config: QwenConfig, fused: bool = False, lora: Lora | None = None, quantized: bool = False
) -> tuple[Any, Any]:
    """(definition, abstract state) of one layer; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Layer(config, nnx.Rngs(params=0), fused, lora, quantized)))


def split_ends(config: QwenConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Ends(config, nnx.Rngs(params=0))))


def init(config: QwenConfig, key: jax.Array, lora: Lora | None = None, quantized: bool = False) -> Params:
    layers_key, ends_key = jax.random.split(key)

    def one_layer(layer_key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(Layer(config, nnx.Rngs(params=layer_key), False, lora, quantized)))

    layers = jax.vmap(one_layer)(jax.random.split(layers_key, config.layers))
    return nnx.to_pure_dict(nnx.state(Ends(config, nnx.Rngs(params=ends_key)))) | {"layers": layers}


def param_shapes(config: QwenConfig, lora: Lora | None = None, quantized: bool = False) -> Params:
    """The parameters as `jax.ShapeDtypeStruct` (float32); nothing is allocated.

    With a `lora` its adapters are among them, to be told apart by `lora.split`. `quantized`: the layers' matrices are
    int8, with scales.
    """
    return jax.eval_shape(lambda key: init(config, key, lora, quantized), jax.random.key(0))


def names_of(state: Any) -> Params:
    """Logical axes of a module's parameters."""

    def axes(variable: nnx.Variable) -> tuple[str, ...]:
        return variable.get_metadata("axes")

    return nnx.to_pure_dict(jax.tree.map(axes, state, is_leaf=lambda node: isinstance(node, nnx.Variable)))


def logical_axes(config: QwenConfig, lora: Lora | None = None, quantized: bool = False) -> Params:
    """A tree like the parameters whose leaves are tuples of logical axis names (`sharding.RULES`)."""
    layer, ends = names_of(split_layer(config, False, lora, quantized)[1]), names_of(split_ends(config)[1])
    stacked = jax.tree.map(lambda leaf: ("layers", *leaf), layer, is_leaf=lambda node: isinstance(node, tuple))
    return ends | {"layers": stacked}


def shardings(config: QwenConfig, mesh: Mesh, lora: Lora | None = None, quantized: bool = False) -> Params:
    """A tree like the parameters of `NamedSharding`; a dimension that its mesh axis does not divide stays whole."""
    shapes = param_shapes(config, lora, quantized)
    return sharding.param_shardings(mesh, logical_axes(config, lora, quantized), shapes)


def unstack(layers: Params, count: int) -> list[Params]:
    """One tree per layer. A split, because its gradient is one concatenation instead of a sum of padded arrays."""
    leaves, structure = jax.tree.flatten(layers)
    pieces = [[piece[0] for piece in jax.lax.split(leaf, (1,) * count, axis=0)] for leaf in leaves]
    return [jax.tree.unflatten(structure, [piece[index] for piece in pieces]) for index in range(count)]

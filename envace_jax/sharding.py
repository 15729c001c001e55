"""Where arrays live: the device mesh and the table from a parameter's logical axes to mesh axes.

Knows axis names and sizes only; it knows no model, no batch and no optimizer. Nothing here touches a device at import.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # rows of a batch are split over both

LogicalAxes = tuple[str | None, ...]

# One mesh axis, or none (None), for each logical axis of a parameter or of the KV cache.
RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "layers": None,  # the axis that lax.scan walks
    "vocab": "tensor",
    "embed": "fsdp",  # the model width: gathered layer by layer, as in fully sharded data parallelism
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "batch": BATCH_AXES,
    "length": None,
    "sequence": "tensor",  # positions between layers in training: every device keeps its share of them
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `AXES`, over `devices` or over all devices of all processes.

    Raises ValueError when an axis size is not a positive integer or the product is not the number of devices.
    """
    sizes = (data, fsdp, tensor)
    for name, size in zip(AXES, sizes, strict=True):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"mesh axis {name!r} has size {size!r}; a positive integer is needed")
    found = list(jax.devices() if devices is None else devices)
    if math.prod(sizes) != len(found):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {math.prod(sizes)} devices, but there are "
            f"{len(found)}: the product of the three sizes must equal the number of devices"
        )
    if devices is None:  # jax.make_mesh orders devices by how they are wired together
        return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Mesh(np.array(found, dtype=object).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def platform_of(mesh: Mesh | None) -> str:
    """Of the devices that a program for this mesh runs on: "cpu", "gpu" or "tpu". They may be of a topology that is not
    there; without a mesh they are this process's."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def chosen_chip(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """In which kernels are made for the chips of `mesh`; elsewhere they ask what chip this process runs on."""
    here = mesh is None or platform_of(mesh) == jax.default_backend()
    return contextlib.nullcontext() if here else jax.set_mesh(mesh)


def axis_size(mesh: Mesh, axis: str | tuple[str, ...] | None) -> int:
    """The number of pieces that a dimension mapped to `axis` is cut into."""
    if axis is None:
        return 1
    names = (axis,) if isinstance(axis, str) else axis
    return math.prod(mesh.shape[name] for name in names)


def partition_spec(
    mesh: Mesh,
    logical_axes: LogicalAxes,
    shape: Sequence[int] | None = None,
    rules: Mapping[str, str | tuple[str, ...] | None] = RULES,
) -> PartitionSpec:
    """The partition of one array. With a `shape`, a dimension that its mesh axis does not divide stays whole.

    That is how a model with 8 key/value heads runs on tensor=16: those projections are replicated.
    Raises ValueError for a logical axis that `RULES` does not list.
    """
    axes: list[str | tuple[str, ...] | None] = []
    for index, name in enumerate(logical_axes):
        if name is not None and name not in rules:
            raise ValueError(f"unknown logical axis {name!r} in {logical_axes}; known are {', '.join(rules)}")
        axis = None if name is None else rules[name]
        if shape is not None and shape[index] % axis_size(mesh, axis):
            axis = None
        axes.append(axis)
    return PartitionSpec(*axes)


def param_shardings(mesh: Mesh, logical_axes: Any, shapes: Any = None) -> Any:
    """A pytree of `NamedSharding` for a pytree of logical-axis tuples.

    `shapes`, a pytree of the same structure whose leaves have `.shape` (arrays or `jax.ShapeDtypeStruct`), makes
    dimensions that do not divide fall back to whole; without it every rule is applied as it stands.
    """

    def is_axes(node: Any) -> bool:
        return isinstance(node, tuple)

    if shapes is None:
        return jax.tree.map(lambda axes: NamedSharding(mesh, partition_spec(mesh, axes)), logical_axes, is_leaf=is_axes)
    return jax.tree.map(
        lambda axes, leaf: NamedSharding(mesh, partition_spec(mesh, axes, leaf.shape)),
        logical_axes,
        shapes,
        is_leaf=is_axes,
    )


def fitted(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """The same layout for another shape of as many dimensions: those that do not divide stay whole."""
    mesh: Any = sharding.mesh
    sizes = zip(shape, sharding.spec, strict=False)
    return NamedSharding(mesh, PartitionSpec(*(None if size % axis_size(mesh, axis) else axis for size, axis in sizes)))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows (axis 0) over `data` and `fsdp`, everything else whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(array: jax.Array, mesh: Mesh | None, *logical_axes: str | None) -> jax.Array:
    """Inside jit: ask for the layout of `logical_axes`; no-op without a mesh, and for dimensions that do not divide."""
    if mesh is None:
        return array
    sharding = NamedSharding(mesh, partition_spec(mesh, logical_axes, array.shape))
    return jax.lax.with_sharding_constraint(array, sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def moved(array: jax.Array, mesh: Mesh, there: LogicalAxes, back: LogicalAxes) -> jax.Array:
    """As `constrain` to the layout `there`; the gradient is asked for in the layout `back`.

    The gradient of a plain constraint has that constraint too: what is gathered going forward would be summed whole on
    every device going backward, where each needs its share of the sum.
    """
    return constrain(array, mesh, *there)


def _moved_forward(array: jax.Array, mesh: Mesh, there: LogicalAxes, back: LogicalAxes) -> tuple[jax.Array, None]:
    return constrain(array, mesh, *there), None


def _moved_backward(
    mesh: Mesh, there: LogicalAxes, back: LogicalAxes, residuals: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    return (constrain(cotangent, mesh, *back),)


moved.defvjp(_moved_forward, _moved_backward)

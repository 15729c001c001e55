"""Frozen matrices as 8-bit integers with a float32 scale for each output, made once when a model is loaded.

Symmetric and without calibration: a column's largest magnitude becomes 127, everything else is rounded to the nearest
step, so no entry moves by more than half a step. Knows arrays only.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SCALE = "kernel_scale"  # beside a matrix's "kernel"
LARGEST = 127


def quantized(kernel: jax.Array, inputs: int, stacked: bool = False) -> tuple[jax.Array, jax.Array]:
    """(int8 [*in, *out], scale f32[*out]) of a float kernel; `inputs` counts the axes in.

    stacked  all arrays have an axis of layers in front, and each layer has scales of its own.
    """
    wide = kernel.astype(jnp.float32)
    first = int(stacked)
    magnitude = jnp.max(jnp.abs(wide), axis=tuple(range(first, first + inputs)), keepdims=True)
    step = jnp.where(magnitude > 0, magnitude, 1.0) / LARGEST  # a column of zeros stays one
    whole = jnp.clip(jnp.round(wide / step), -LARGEST, LARGEST).astype(jnp.int8)
    return whole, jnp.squeeze(step, tuple(range(first, first + inputs)))


def dequantized(kernel: Any, scale: Any) -> Any:
    """f32[*in, *out] of one layer's kernel and scale [*out]; a kernel without a scale is only widened."""
    wide = kernel.astype(np.float32)
    return wide if scale is None else wide * scale

"""Low-rank adapters (LoRA): small trained factors beside frozen matrices, initialised and named as PEFT does.

A matrix W [*in, *out] with an adapter gives x W + (x A) B * alpha / rank, with A [*in, rank] and B [rank, *out]. The
base and the adapters are two trees, put together only to compute. Knows trees of arrays by their names; the network is
in `models/qwen.py`, PEFT's files in `models/peft.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from envace_jax.models import int8
from envace_jax.types import Params

# PEFT's names of what may have an adapter, and ours.
TARGETS: Mapping[str, str] = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
A, B = "lora_a", "lora_b"  # beside a matrix's "kernel"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which matrices have adapters, and of what size. Raises ValueError for sizes or targets that there are not."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(TARGETS)  # PEFT's names

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(
                f"a LoRA of rank {self.rank} and alpha {self.alpha}; the rank must be at least 1, alpha > 0"
            )
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"LoRA targets {list(self.targets)}; there are {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        """What an adapter's product is multiplied by."""
        return self.alpha / self.rank

    def adapts(self, matrix: str) -> bool:
        """Whether the matrix of this name of ours has an adapter."""
        return any(TARGETS[name] == matrix for name in self.targets)


def split(params: Params) -> tuple[Params, Params]:
    """A tree with adapters as (base, adapters); either has only the nodes under which it has leaves."""

    def part(tree: Params, adapters: bool) -> Params:
        found: Params = {}
        for name, value in tree.items():
            if isinstance(value, Mapping):
                if inside := part(dict(value), adapters):
                    found[name] = inside
            elif (name in (A, B)) == adapters:
                found[name] = value
        return found

    return part(params, False), part(params, True)


def joined(base: Params, adapters: Params) -> Params:
    """The tree that a policy computes with. Nothing is copied or computed, so it may be made anywhere.

    Raises ValueError where an adapter would take the place of something else.
    """
    together = dict(base)
    for name, value in adapters.items():
        if isinstance(value, Mapping):
            together[name] = joined(together.get(name, {}), dict(value))
        elif name in together:
            raise ValueError(f"both trees have a leaf {name!r}; adapters are named {A} and {B}")
        else:
            together[name] = value
    return together


def has_adapters(layers: Params) -> bool:
    """Whether any matrix of the layers has an adapter."""
    return any(A in matrix for matrix in layers.values())


def merged(matrix: Mapping[str, Any], scale: float, xp: Any = np) -> dict[str, Any]:
    """A matrix of one layer as a plain one: dequantised, float32, its adapter added; a bias stays.

    xp  numpy, or jax.numpy inside jit.
    """
    kernel = int8.dequantized(matrix["kernel"], matrix.get(int8.SCALE))
    if A in matrix:
        a, b = (matrix[name].astype(np.float32) for name in (A, B))
        # The sum is exact to float32 on every platform: a TPU's default would round the factors to bfloat16.
        product = np.tensordot(a, b, 1) if xp is np else xp.tensordot(a, b, 1, precision="highest")
        kernel = kernel + product * np.float32(scale)
    return {"kernel": kernel} | ({"bias": matrix["bias"]} if "bias" in matrix else {})

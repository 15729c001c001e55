"""The names, shapes and layouts that transformers gives the tensors of Qwen3, Qwen2 and Llama models.

A table from each tensor of a file to its place among the parameters of `qwen.py`. Knows no files and holds no weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from envace_jax import lora as adapters
from envace_jax.lora import Lora
from envace_jax.models import qwen
from envace_jax.models.config import QwenConfig

# Parts of a name that wrappers of a training framework leave behind.
WRAPPERS = frozenset({"_orig_mod", "module", "base_model", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a Hugging Face file and its place among the parameters.

    `inputs` counts the leading axes of our array [*in, *out] that a torch Linear's matrix [out, in] contracts; None for
    tensors that keep their axes (embedding, norms, biases).
    """

    name: str
    path: tuple[str, ...]
    layer: int | None
    ours: tuple[int, ...]  # shape of our array, without the layer axis
    inputs: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        if self.inputs is None:
            return self.ours if self.name.endswith("embed_tokens.weight") else (math.prod(self.ours),)
        return math.prod(self.ours[self.inputs :]), math.prod(self.ours[: self.inputs])

    def to_ours(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return (array if self.inputs is None else array.T).reshape(shape)

    def to_file(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self.shape) if self.inputs is None else array.reshape(self.shape[::-1]).T

    def file_index(self, bounds: list[tuple[int, int]]) -> tuple[slice, ...]:
        """Where a box of our array lies in the file's self. Of axes that the file joins, only the first may be cut."""

        def joined(first: int, last: int) -> slice:
            if first == last:
                return slice(None)
            tail = math.prod(self.ours[first + 1 : last])
            if any(bounds[axis] != (0, self.ours[axis]) for axis in range(first + 1, last)):
                raise ValueError(f"{self.name}: cannot be cut along axes {bounds} of {self.ours}")
            return slice(bounds[first][0] * tail, bounds[first][1] * tail)

        if self.inputs is None:
            if len(self.shape) == len(self.ours):
                return tuple(slice(*bound) for bound in bounds)
            return (joined(0, len(self.ours)),)
        return joined(self.inputs, len(self.ours)), joined(0, self.inputs)


LAYER_NAMES: Mapping[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("attention_norm", "scale"),
    "self_attn.q_proj.weight": ("query", "kernel"),
    "self_attn.q_proj.bias": ("query", "bias"),
    "self_attn.k_proj.weight": ("key", "kernel"),
    "self_attn.k_proj.bias": ("key", "bias"),
    "self_attn.v_proj.weight": ("value", "kernel"),
    "self_attn.v_proj.bias": ("value", "bias"),
    "self_attn.q_norm.weight": ("query_norm", "scale"),
    "self_attn.k_norm.weight": ("key_norm", "scale"),
    "self_attn.o_proj.weight": ("out", "kernel"),
    "post_attention_layernorm.weight": ("ffn_norm", "scale"),
    "mlp.gate_proj.weight": ("gate", "kernel"),
    "mlp.up_proj.weight": ("up", "kernel"),
    "mlp.down_proj.weight": ("down", "kernel"),
}
END_NAMES: Mapping[str, tuple[str, ...]] = {
    "model.embed_tokens.weight": ("embedding",),
    "model.norm.weight": ("norm", "scale"),
    "lm_head.weight": ("head", "kernel"),
}


def tensors(config: QwenConfig) -> list[Tensor]:
    """Every tensor of the model's file, in the order of the network."""
    shapes = qwen.param_shapes(config)

    def find(path: tuple[str, ...]) -> tuple[int, ...] | None:
        node: Any = shapes
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        return None if node is None else tuple(node.shape)

    def make(name: str, path: tuple[str, ...], layer: int | None) -> Tensor | None:
        shape = find(path)
        if shape is None:  # this model has no such parameter
            return None
        ours = shape if layer is None else shape[1:]
        inputs = None if path[-1] != "kernel" else 2 if path[-2] == "out" else 1
        return Tensor(name, path, layer, ours, inputs)

    found = [make("model.embed_tokens.weight", END_NAMES["model.embed_tokens.weight"], None)]
    for layer in range(config.layers):
        found += [make(f"model.layers.{layer}.{name}", ("layers", *path), layer) for name, path in LAYER_NAMES.items()]
    found += [make(name, END_NAMES[name], None) for name in ("model.norm.weight", "lm_head.weight")]
    return [tensor for tensor in found if tensor is not None]


def adapter_tensors(config: QwenConfig, lora: Lora) -> list[Tensor]:
    """Every tensor of a PEFT adapter file of this model, in the order of the network: of each matrix A, then B."""
    found = []
    for tensor in tensors(config):
        if tensor.inputs is None or tensor.layer is None or not lora.adapts(tensor.path[1]):
            continue
        stem, place, ours = "base_model.model." + tensor.name.removesuffix("weight"), tensor.path[:-1], tensor.ours
        first, second = (*ours[: tensor.inputs], lora.rank), (lora.rank, *ours[tensor.inputs :])
        found.append(Tensor(f"{stem}lora_A.weight", (*place, adapters.A), tensor.layer, first, tensor.inputs))
        found.append(Tensor(f"{stem}lora_B.weight", (*place, adapters.B), tensor.layer, second, 1))
    return found


def canonical_name(name: str) -> str:
    """The name transformers would give, without what wrappers of training frameworks put into it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[:1] == ["model"]:
        parts = parts[1:]
    return ".".join(parts if parts[:1] == ["lm_head"] else ["model", *parts])

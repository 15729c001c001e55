"""Small transformers models on random weights, and our view of them, for the parity tests of `models/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.models import hf
from envace_jax.models.qwen import QwenConfig, make_policy, param_shapes
from envace_jax.types import Params, Policy

VOCAB = 97


def random_params(config: QwenConfig, seed: int = 0) -> Params:
    """Parameters that are all different numbers, made by numpy (nothing is compiled)."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32)), param_shapes(config))


def reference_model(kind: str, *, heads: int = 4, kv_heads: int = 2, tied: bool = True, layers: int = 3) -> Any:
    """A torch model of `kind` ("qwen3", "qwen2", "llama") in float32, every weight random (norms and biases too)."""
    import torch
    import transformers

    name = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[kind]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 512}
    if kind == "qwen3":
        sizes["head_dim"] = 32  # unlike width / heads, as in Qwen3-0.6B
    torch.set_num_threads(1)  # tiny matrices; more threads only wait for each other
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, tie_word_embeddings=tied, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.15 if parameter.ndim > 1 else 0.3
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def loaded(model: Any, folder: Path, **options: Any) -> tuple[QwenConfig, Policy, Params]:
    """The same model through a Hugging Face folder."""
    model.save_pretrained(folder)
    config, params = hf.load(folder)
    return config, make_policy(config, **options), params


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """f32[B, T, V] of whole rows without padding."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def full_logits(
    policy: Policy, params: Params, tokens: np.ndarray, positions: Any = None, sequence_ids: Any = None
) -> np.ndarray:
    """f32[B, T, V] of one uncached forward; by default each row is one sequence."""
    if positions is None:
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    if sequence_ids is None:
        sequence_ids = np.ones_like(tokens)
    arrays = [jnp.asarray(array, jnp.int32) for array in (tokens, positions, sequence_ids)]
    hidden, _ = jax.jit(policy.apply)(params, *arrays)
    return np.asarray(jax.jit(policy.logits)(params, hidden))


def greedy(policy: Any, params: Any, prompt: np.ndarray, count: int) -> np.ndarray:
    """Cached greedy continuation, i32[B, count], of rows without padding."""
    rows, length = prompt.shape
    ones = jnp.ones(prompt.shape, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length), prompt.shape)

    @jax.jit
    def run(params: Any) -> jax.Array:
        hidden, cache = policy.apply(params, prompt, positions, ones, policy.init_cache(rows, length + count))

        def step(carry: Any, _: None) -> Any:
            cache, hidden = carry
            token = jnp.argmax(policy.logits(params, hidden), axis=-1).astype(jnp.int32)[:, None]
            hidden, cache = policy.apply(params, token, cache.lengths[:, None], ones[:, :1], cache)
            return (cache, hidden[:, 0]), token[:, 0]

        return jax.lax.scan(step, (cache, hidden[:, -1]), length=count)[1].T

    return np.asarray(run(params))

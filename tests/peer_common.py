"""The part of the peers' harness that `experiments/bench_adapter.py` reads: its module `common`, with one size more.

Weights and inputs are drawn in the same order from the same seeds, which is what its same-work gate rests on.
"""

from __future__ import annotations

import numpy as np

SIZES = {
    "S": dict(V=4096, D=256, L=4, H=4, K=2, hd=64, F=768),
    "tiny": dict(V=96, D=32, L=2, H=2, K=1, hd=16, F=48),
}
ROLL = dict(B=16, P=128, N=128)
TRAIN = dict(B=8, P=128, C=384)
LR, WD, B1, B2, EPS = 1e-6, 0.01, 0.9, 0.999, 1e-8
THETA, NEPS = 1e6, 1e-6


def weights(size: str, seed: int = 0) -> dict[str, np.ndarray]:
    c, rng = SIZES[size], np.random.default_rng(seed)
    width, query, key = c["D"], c["H"] * c["hd"], c["K"] * c["hd"]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)

    def ones(count: int) -> np.ndarray:
        return np.ones(count, np.float32)

    made = {"model.embed_tokens.weight": normal(c["V"], width), "model.norm.weight": ones(width)}
    for layer in range(c["L"]):
        parts = {
            "self_attn.q_proj": normal(query, width),
            "self_attn.k_proj": normal(key, width),
            "self_attn.v_proj": normal(key, width),
            "self_attn.o_proj": normal(width, query),
            "self_attn.q_norm": ones(c["hd"]),
            "self_attn.k_norm": ones(c["hd"]),
            "mlp.gate_proj": normal(c["F"], width),
            "mlp.up_proj": normal(c["F"], width),
            "mlp.down_proj": normal(width, c["F"]),
            "input_layernorm": ones(width),
            "post_attention_layernorm": ones(width),
        }
        made |= {f"model.layers.{layer}.{name}.weight": array for name, array in parts.items()}
    return made


def prompts(size: str, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, SIZES[size]["V"], (ROLL["B"], ROLL["P"])).astype(np.int32)


def batch(size: str, seed: int = 2) -> dict[str, np.ndarray]:
    rng, (rows, prompt, completion) = np.random.default_rng(seed), TRAIN.values()
    return dict(
        prompt=rng.integers(10, SIZES[size]["V"], (rows, prompt)).astype(np.int32),
        completion=rng.integers(10, SIZES[size]["V"], (rows, completion)).astype(np.int32),
        adv=rng.standard_normal(rows).astype(np.float32),
        mask=np.ones((rows, completion), np.int32),
    )

"""What the machine can do, measured, and what a piece of work needs at least, counted: the two halves of a fraction.

Nominal work is counted as the peers' harness counts it: matrix products of the parameters, attention over the positions
that may be read, and the bytes that have to pass at least once. Padding and recomputation are nobody's work.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from envace_jax.models.qwen import QwenConfig, parameter_count

GEMM_SIZE = 2048
COPY_FLOATS = 1 << 27  # 512 MiB, far beyond any cache


@dataclasses.dataclass(frozen=True)
class Work:
    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Rates of the machine: float32 operations per second of a matrix product, bytes per second of a copy."""

    gemm: float
    copy: float

    def best(self, other: Limits) -> Limits:
        return Limits(max(self.gemm, other.gemm), max(self.copy, other.copy))

    def fractions(self, work: Work, seconds: float) -> tuple[float, float]:
        """Shares of the two rates that doing `work` in `seconds` amounts to."""
        return work.flops / seconds / self.gemm, work.bytes / seconds / self.copy


def measure_limits(gemm_size: int = GEMM_SIZE, copy_floats: int = COPY_FLOATS, tries: int = 5) -> Limits:
    """The best of a few tries: a float32 product of two squares, and reading and writing an array in place."""
    a, b = jax.random.normal(jax.random.key(0), (2, gemm_size, gemm_size))
    product = jax.jit(jnp.matmul)
    touch = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    array = jnp.ones(copy_floats, jnp.float32)

    def copy() -> None:
        nonlocal array
        array = touch(array)
        array.block_until_ready()

    gemm_seconds = _fastest(lambda: product(a, b).block_until_ready(), tries)
    return Limits(2 * gemm_size**3 / gemm_seconds, 2 * 4 * copy_floats / _fastest(copy, tries))


def _fastest(run: Callable[[], object], tries: int) -> float:
    run()  # compiles
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _body(config: QwenConfig) -> int:
    """Parameters that every token passes through: all but embedding and head."""
    return parameter_count(config) - config.vocab_size * config.width * (1 if config.tie_embeddings else 2)


def _head(config: QwenConfig) -> int:
    return config.vocab_size * config.width


def _weights(config: QwenConfig) -> int:
    """Bytes (float32) that any pass reads: the body and the head."""
    return 4 * (_body(config) + _head(config))


def _kv_bytes(config: QwenConfig) -> int:
    """Bytes of the float32 keys and values of one position."""
    return 2 * 4 * config.layers * config.kv_heads * config.head_dim


def prefill_work(config: QwenConfig, rows: int, length: int) -> Work:
    """Encoding `rows` prompts of `length` tokens from nothing, and drawing the first token of each."""
    tokens, attention = rows * length, config.layers * config.heads * config.head_dim
    flops = 2 * _body(config) * tokens + 2 * _head(config) * rows + 2 * attention * tokens * length
    return Work(flops, _weights(config) + _kv_bytes(config) * tokens)


def delta_prefill_work(config: QwenConfig, tokens: int, prompts: int) -> Work:
    """Encoding `tokens` tokens that end `prompts` prompts, without their attention."""
    flops = 2 * _body(config) * tokens + 2 * _head(config) * prompts
    return Work(flops, _kv_bytes(config) * tokens)


def decode_work(config: QwenConfig, tokens: int, steps: int, read: float) -> Work:
    """Drawing `tokens` tokens in `steps` steps; `read` is the positions that they attend to, summed over tokens."""
    attention = config.layers * config.heads * config.head_dim
    flops = 2 * (_body(config) + _head(config)) * tokens + 4 * attention * read
    return Work(flops, _weights(config) * steps + _kv_bytes(config) * read)


def train_work(config: QwenConfig, sequences: Sequence[int]) -> Work:
    """One step on sequences of so many tokens each: forward, backward and AdamW.

    Bytes: weights read forwards and backwards, the gradient written and read, parameters and both moments read and
    written.
    """
    attention = config.layers * config.heads * config.head_dim
    tokens, squares = sum(sequences), sum(length * length for length in sequences)
    flops = 6 * (_body(config) + _head(config)) * tokens + 6 * attention * squares
    return Work(flops, 2 * _weights(config) + 4 * parameter_count(config) * 8)

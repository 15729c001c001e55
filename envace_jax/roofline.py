"""How long a step should take: the work counted by hand, over what a chip can do, with stated shares of its peaks.

Work is counted from sizes, never read off a compiler's estimate, which counts a scan's body once and a Pallas kernel
not at all. Nothing here was measured on a TPU: the result orders settings and tells what bounds a phase, no more.
Knows sizes and rates only; no program, no mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from envace_jax.chips import Chip
from envace_jax.config import RunConfig
from envace_jax.models.config import QwenConfig

# The share of a peak that is taken to be reached, and the time that a collective takes whatever it carries.
MATMUL_SHARE = 0.5
HBM_SHARE = 0.7
ICI_SHARE = 0.6
COLLECTIVE_SECONDS = 2e-6
SLOTS_BUSY = 0.8  # of the decoding slots, over a rollout

ASSUMPTIONS = (
    f"products reach {MATMUL_SHARE:.0%} of the peak, memory {HBM_SHARE:.0%}, the interconnect {ICI_SHARE:.0%}, and a "
    f"collective takes {COLLECTIVE_SECONDS * 1e6:.0f} us at least",
    "products and collectives of training overlap (the longer counts); decoding waits for memory, then for collectives",
    f"{SLOTS_BUSY:.0%} of the slots draw, with caches half full; judges, tools and the host take no time",
)


@dataclasses.dataclass(frozen=True)
class Work:
    """What one step has to do, in tokens. `of_config` says where the defaults come from."""

    trajectories: int
    trained: int  # tokens of rows that hold a trained token, padding included, for each trajectory
    sampled: int  # tokens drawn, for each trajectory
    prefilled: int  # tokens of prompts that no kept cache holds, for each trajectory
    row_length: int  # of a training row
    context: int  # of a stream, at its longest

    @classmethod
    def of_config(cls, config: RunConfig, trained: int = 0, sampled: int = 0) -> Work:
        """A full training row for each trajectory, half of its tokens drawn and the others prefilled, unless said."""
        trained = trained or config.batch.row_length
        sampled = sampled or trained // 2
        return cls(
            trajectories=config.data.tasks_per_step * config.data.attempts,
            trained=trained,
            sampled=sampled,
            prefilled=max(0, trained - sampled),
            row_length=config.batch.row_length,
            context=config.sampler.max_length,
        )


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of a step, a product of n pairs counted as 2 n."""

    train: float
    score: float
    prefill: float
    decode: float


def matrix_parameters(model: QwenConfig) -> int:
    """Parameters of the layers' matrices: what each token is multiplied by, the output projection left out."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return model.layers * (2 * model.width * (query + key) + 3 * model.width * model.ffn)


def attention_flops(model: QwenConfig, keys: float) -> float:
    """Of one token that attends to so many keys, in all layers, forward: scores and weighted values."""
    return 4.0 * model.layers * model.heads * model.head_dim * keys


def flops(model: QwenConfig, work: Work, remat: str, frozen_base: bool = False, scored: bool = False) -> Flops:
    """Of one step. A row is taken to be one sequence, half of whose keys a token attends to on average.

    remat: "none" and "dots" run each product of the layers forwards once, everything else twice.
    frozen_base: the gradient of the matrices is not computed (LoRA).
    scored: the reference policy's log-probabilities are computed too.
    """
    layers, head = 2.0 * matrix_parameters(model), 2.0 * model.vocab_size * model.width
    row = attention_flops(model, work.row_length / 2)
    tokens = float(work.trajectories * work.trained)
    forwards = 1.0 if remat in ("none", "dots") else 2.0
    backwards = 1.0 if frozen_base else 2.0
    attention_again = 0.0 if remat == "none" else 1.0
    # A fused attention's backward pass is five products to the forward's two: it computes the scores again.
    per_token = (forwards + backwards) * layers + (1 + attention_again + 2.5) * row
    # The head's logits are computed again in the backward pass; a frozen one still passes gradients to the states.
    per_token += (2.0 + backwards) * head
    cached = attention_flops(model, work.context / 2)
    return Flops(
        train=tokens * per_token,
        score=tokens * (layers + row + head) if scored else 0.0,
        prefill=work.trajectories * work.prefilled * (layers + cached),
        decode=work.trajectories * work.sampled * (layers + cached + head),
    )


def compute_seconds(operations: float, chip: Chip, chips: int) -> float:
    return operations / (chips * chip.flops * MATMUL_SHARE)


def memory_seconds(bytes_per_chip: float, chip: Chip) -> float:
    return bytes_per_chip / (chip.hbm_bandwidth * HBM_SHARE)


def collective_seconds(bytes_per_chip: float, count: float, chip: Chip) -> float:
    return bytes_per_chip / (chip.ici_bandwidth * ICI_SHARE) + count * COLLECTIVE_SECONDS


@dataclasses.dataclass(frozen=True)
class Measured:
    """What of the compiled programs the times depend on; bytes are those of one chip."""

    chips: int
    slots: int
    state_bytes: float  # parameters and optimizer state
    decoding_bytes: float  # parameters for decoding
    cache_bytes: float  # of the caches of all slots, each full
    train_collectives: tuple[float, float]  # bytes and number, of a step's micro-batches together
    decode_collectives: tuple[float, float]  # of one token of every slot
    prefill_collectives: tuple[float, float]  # of a step's prefills together
    reshard_collectives: tuple[float, float]


def seconds(work: Work, done: Flops, measured: Measured, chip: Chip) -> Mapping[str, Any]:
    """Seconds of each phase of a step, what bounds it, and their sum."""
    chips = measured.chips
    # The update reads parameters, gradient and moments and writes parameters and moments.
    update = memory_seconds(2.5 * measured.state_bytes, chip)
    train = {
        "products": compute_seconds(done.train + done.score, chip, chips),
        "collectives": collective_seconds(*measured.train_collectives, chip),
    }
    prefill = {
        "products": compute_seconds(done.prefill, chip, chips),
        "collectives": collective_seconds(*measured.prefill_collectives, chip),
    }
    steps = work.trajectories * work.sampled / (measured.slots * SLOTS_BUSY)
    read = measured.decoding_bytes + SLOTS_BUSY * measured.cache_bytes / 2
    decode = {
        "memory": steps * memory_seconds(read, chip),
        "products": compute_seconds(done.decode, chip, chips),
    }
    waits = steps * collective_seconds(*measured.decode_collectives, chip)
    reshard = memory_seconds(measured.state_bytes, chip) + collective_seconds(*measured.reshard_collectives, chip)
    phases = {
        "train": max(train.values()) + update,
        "reshard": reshard,
        "prefill": max(prefill.values()),
        "decode": max(decode.values()) + waits,
    }
    bounds = {
        "train": max(train, key=train.__getitem__),
        "reshard": "memory",
        "prefill": max(prefill, key=prefill.__getitem__),
        "decode": "collectives" if waits > max(decode.values()) else max(decode, key=decode.__getitem__),
    }
    return {
        "seconds": phases,
        "bound_by": bounds,
        "step": sum(phases.values()),
        "trained_tokens_per_second": work.trajectories * work.trained / sum(phases.values()),
        "sampled_tokens_per_second": work.trajectories * work.sampled / (phases["prefill"] + phases["decode"]),
        "model_flops_share": (done.train + done.score + done.prefill + done.decode)
        / (sum(phases.values()) * chips * chip.flops),
    }

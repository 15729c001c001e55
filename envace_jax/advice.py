"""What to change where a run does not fit, and which settings to try on a topology: estimates in numbers, no compiling.

Each suggestion is a setting to paste with the bytes of a chip that it should save; the estimates order candidates, and
the compiler has the last word (`planning.make`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from envace_jax.config import RunConfig
from envace_jax.planning import Plan

MOMENT_BYTES: Mapping[str, float] = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.07}  # int8 has a scale for each block
WIDTH: Mapping[str, int] = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """One change: the settings as one would paste them, the bytes of a chip it should save, and what it costs."""

    change: str
    saves: int
    costs: str


def suggestions(plan: Plan) -> list[Suggestion]:
    """Changes for the phases that do not fit, those that save most first; [] where all fit."""
    found: list[Suggestion] = []
    over = plan.over()
    if "train" in over:
        found += _training(plan)
    if "rollout" in over:
        found += _rollout(plan)
    if "reshard" in over or "rollout" in over:
        found += _resident(plan)
    if over:
        found.append(_more_chips(plan, over))
    unique = {one.change: one for one in sorted(found, key=lambda one: one.saves)}
    return sorted((one for one in unique.values() if one.saves > 0), key=lambda one: -one.saves)


def _training(plan: Plan) -> Iterator[Suggestion]:
    config, moments = plan.config, plan.parts["optimizer"].device
    step = next(program for program in plan.programs if program.name.startswith("train"))
    # Where the compiler refused, only its sum is known: what is not state is taken to be temporary.
    state = plan.parts["parameters"].device + moments
    temporary = step.temporaries or max(0, step.peak - state)
    now = config.optimizer.moments_dtype
    for dtype, width in MOMENT_BYTES.items():
        if width < MOMENT_BYTES[now] and not config.optimizer.offload:
            saves = int(moments * (1 - width / MOMENT_BYTES[now]))
            yield Suggestion(f"--config.optimizer.moments_dtype={dtype}", saves, "moments are rounded")
    rows = config.batch.micro_batch_rows
    if rows > 1:
        yield Suggestion(
            "--config.batch.micro_batch_rows=1", int(temporary * (1 - 1 / rows) * 0.7), "more, smaller micro-batches"
        )
    if config.model.remat in ("none", "dots"):
        yield Suggestion("--config.model.remat=full", int(temporary * 0.6), "each layer's forward pass runs twice")
    if config.batch.logprob_chunk > 256:
        chunk = config.batch.logprob_chunk
        yield Suggestion(
            "--config.batch.logprob_chunk=256",
            _logits(plan, chunk) - _logits(plan, 256),
            "smaller products of the head",
        )
    mesh = config.mesh
    if mesh.fsdp % 2 == 0:
        yield Suggestion(
            f"--config.mesh.fsdp={mesh.fsdp // 2} --config.mesh.tensor={mesh.tensor * 2}", temporary // 4,
            "more collectives in each layer",
        )  # fmt: skip
    length = config.batch.row_length
    yield Suggestion(
        f"shorter rows: limits.act_context, sampler.max_length and batch.row_length of {length // 2}", temporary // 3,
        "longer trajectories end early",
    )  # fmt: skip


def _logits(plan: Plan, chunk: int) -> int:
    """Bytes of float32 logits of a chunk, on one chip; a little more than a step keeps of them."""
    return chunk * 152_000 * 4 // plan.config.mesh.tensor


def _rollout(plan: Plan) -> Iterator[Suggestion]:
    config, cache = plan.config, plan.parts.get("key-value cache")
    kept = cache.device if cache is not None else 0
    slots, shards = config.sampler.slots, config.mesh.data * config.mesh.fsdp
    if config.sampler.pages:
        least = least_pages(config)
        fewer = max(least, config.sampler.pages // 2 // shards * shards)
        saves = int(kept * (1 - fewer / config.sampler.pages))
        yield Suggestion(f"--config.sampler.pages={fewer}", saves, "fewer streams keep their caches, or draw at once")
    else:
        fewer = slots // 2 // shards * shards
        if fewer:
            yield Suggestion(f"--config.sampler.slots={fewer}", kept // 2, "fewer sequences decode side by side")
        rows = config.sampler.cache_rows or 2 * slots
        share = (rows - slots) / (rows + slots)
        yield Suggestion(
            f"--config.sampler.cache_rows={slots}", int(kept * share), "prompts that continue are prefilled again"
        )
    most = config.sampler.prefill_rows[-1]
    program = next((program for program in plan.programs if program.name.startswith("prefill")), None)
    if most > 1 and program is not None:
        saves = int(program.temporaries * (1 - 1 / most))
        yield Suggestion("--config.sampler.prefill_rows=(1,)", saves, "prompts are prefilled one at a time")
    mesh = config.mesh
    if mesh.fsdp % 2 == 0:
        weights = plan.parts["decoding parameters"].device
        yield Suggestion(
            f"--config.mesh.fsdp={mesh.fsdp // 2} --config.mesh.tensor={mesh.tensor * 2}", weights // 2,
            "more collectives in each layer",
        )  # fmt: skip


def least_pages(config: RunConfig) -> int:
    """The fewest pages that the settings' own rules allow."""
    shards = config.mesh.data * config.mesh.fsdp
    return (-(-config.sampler.max_length // config.sampler.page_size) + 1) * shards


def _resident(plan: Plan) -> Iterator[Suggestion]:
    moments = plan.parts["optimizer"].device
    if moments and not plan.config.optimizer.offload:  # the counts of updates stay on the chip
        yield Suggestion(
            "--config.optimizer.offload=True", moments, "the optimizer's state goes to host memory and back each step"
        )


def _more_chips(plan: Plan, over: Mapping[str, int]) -> Suggestion:
    wanting = max(over.values())
    factor = 2 ** math.ceil(math.log2((plan.chip.hbm_bytes + wanting) / plan.chip.hbm_bytes))
    return Suggestion(
        f"a topology of {plan.chips * factor} {plan.chip.name} chips in place of {plan.chips}",
        (plan.chip.hbm_bytes + wanting) * (factor - 1) // factor, "more chips",
    )  # fmt: skip

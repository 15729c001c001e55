"""Settings for a topology: an estimate by hand orders many candidates, and the compiler has the last word on a few.

What is varied: the mesh, rows of a micro-batch, remat, the dtype of the moments, where they lie during a rollout, slots
and pages. Everything else is as the configuration says. Knows the estimate's formulas, and `planning` for the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

from envace_jax import chips, config_checks, planning, programs, roofline
from envace_jax.advice import MOMENT_BYTES, WIDTH
from envace_jax.chips import GIB, Chip
from envace_jax.config import RunConfig
from envace_jax.models.config import QwenConfig, parameter_count
from envace_jax.planning import Plan

TRIED = 4  # candidates that are compiled
ROOM = 0.92  # of the HBM that an estimate may take, since it leaves things out
MICRO_BATCH_ROWS = (1, 2)
REMAT: tuple[Literal["dots", "full"], ...] = ("dots", "full")
TENSOR = (1, 2, 4, 8, 16, 32)
SLOTS = (8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration, with its estimated bytes on a chip in training and in a rollout, and seconds of a step."""

    config: RunConfig
    train_bytes: float
    rollout_bytes: float
    seconds: float
    plan: Plan | None = None  # of those that were compiled

    def settings(self) -> list[str]:
        """What differs from the library's other settings, to be pasted after a command."""
        mesh, chosen = self.config.mesh, self.config
        return [
            f"--config.mesh.data={mesh.data}", f"--config.mesh.fsdp={mesh.fsdp}", f"--config.mesh.tensor={mesh.tensor}",
            f"--config.batch.rows_multiple={chosen.batch.rows_multiple}",
            f"--config.batch.micro_batch_rows={chosen.batch.micro_batch_rows}",
            f"--config.model.remat={chosen.model.remat}",
            f"--config.optimizer.moments_dtype={chosen.optimizer.moments_dtype}",
            f"--config.optimizer.offload={chosen.optimizer.offload}", f"--config.sampler.slots={chosen.sampler.slots}",
            f"--config.sampler.pages={chosen.sampler.pages}", f"--config.sampler.page_size={chosen.sampler.page_size}",
        ]  # fmt: skip


def search(
    config: RunConfig, topology: str, work: roofline.Work, tell: Callable[[str], None] = lambda _: None
) -> list[Candidate]:
    """The candidates that were compiled, those that fit first, then the fastest. Stops at the second that fits."""
    chip, _ = chips.parse(topology)
    count = len(chips.devices(topology))
    model, _ = programs.sizes(config.model.path)
    ordered = ranked(config, model, chip, count, work)
    compiled: list[Candidate] = []
    for one in ordered[:TRIED]:
        tell(" ".join(one.settings()))
        plan = planning.make(one.config, topology, work, tell)
        compiled.append(dataclasses.replace(one, plan=plan))
        if sum(other.plan is not None and other.plan.fits for other in compiled) == 2:
            break
    return sorted(compiled, key=_order)


def _order(one: Candidate) -> tuple[bool, float]:
    assert one.plan is not None
    return not one.plan.fits, one.plan.time["step"] if one.plan.time else one.seconds


def ranked(config: RunConfig, model: QwenConfig, chip: Chip, count: int, work: roofline.Work) -> list[Candidate]:
    """Candidates whose estimates fit, the fastest first and one for each mesh; without any, those that need least."""
    found = [estimate(one, model, chip, count, work) for one in candidates(config, model, count)]
    room = ROOM * chip.hbm_bytes
    fitting = [one for one in found if max(one.train_bytes, one.rollout_bytes) <= room]
    if not fitting:
        return sorted(found, key=lambda one: max(one.train_bytes, one.rollout_bytes))
    best: dict[Any, Candidate] = {}
    for one in sorted(fitting, key=lambda one: (one.seconds, one.train_bytes)):
        best.setdefault(one.config.mesh, one)
    return list(best.values())


def candidates(config: RunConfig, model: QwenConfig, count: int) -> Iterator[RunConfig]:
    """Every combination that the model's heads and the configuration's own rules allow."""
    meshes = [(count // tensor, tensor) for tensor in TENSOR if count % tensor == 0 and model.heads % tensor == 0]
    choices = itertools.product(meshes, MICRO_BATCH_ROWS, REMAT, MOMENT_BYTES, (False, True), SLOTS)
    for (fsdp, tensor), rows, remat, moments, offload, slots in choices:
        if slots % fsdp or slots > config.data.tasks_per_step * config.data.attempts:
            continue
        changed = dataclasses.replace(
            config,
            mesh=dataclasses.replace(config.mesh, data=1, fsdp=fsdp, tensor=tensor),
            batch=dataclasses.replace(config.batch, micro_batch_rows=rows, rows_multiple=rows),
            model=dataclasses.replace(config.model, remat=remat),
            optimizer=dataclasses.replace(config.optimizer, moments_dtype=cast(Any, moments), offload=offload),
            sampler=dataclasses.replace(
                config.sampler, slots=slots, cache_rows=0, pages=pages_for(config, slots, fsdp)
            ),
        )
        if not list(config_checks.problems(changed)):
            yield changed


def pages_for(config: RunConfig, slots: int, shards: int) -> int:
    """Pages for `slots` streams that draw, three quarters full, and as many that wait for their next turn."""
    size = config.sampler.page_size
    least = (-(-config.sampler.max_length // size) + 1) * shards
    return max(least, -(-slots * 3 * config.sampler.max_length // (2 * size * shards)) * shards)


def estimate(config: RunConfig, model: QwenConfig, chip: Chip, count: int, work: roofline.Work) -> Candidate:
    """Bytes on a chip and seconds of a step, by hand: good to a quarter or so, which is enough to order candidates."""
    parameters, fsdp, tensor = parameter_count(model), config.mesh.fsdp, config.mesh.tensor
    moments = 2 * MOMENT_BYTES[config.optimizer.moments_dtype] * parameters / count
    masters = WIDTH[config.model.param_dtype] * parameters / count
    tokens = config.batch.micro_batch_rows * config.batch.row_length
    train = masters + moments + 4 * parameters / count + activations(config, model, tokens)
    # One layer's matrices are gathered over fsdp, and their gradient is there before it is scattered.
    train += 6 * roofline.matrix_parameters(model) / model.layers / tensor
    kept = 2 * model.layers * model.kv_heads * model.head_dim * WIDTH[config.sampler.cache_dtype]
    cache = config.sampler.pages * config.sampler.page_size * kept / fsdp / min(tensor, model.kv_heads)
    decoding = 2 * parameters / tensor
    rollout = masters + decoding + cache + (0 if config.optimizer.offload else moments)
    done = roofline.flops(model, work, config.model.remat)
    batches = work.trajectories * work.trained / (tokens * fsdp)
    # Each micro-batch gathers the layers twice (forward and again backward) and scatters gradients; with tensor
    # parallelism each layer exchanges its residuals four times forward, as often backward, once more when recomputed.
    gathered = batches * 4 * 2 * parameters / tensor * (fsdp - 1) / fsdp
    exchanged = batches * model.layers * 12 * tokens * model.width * 2 * (tensor - 1) / tensor
    measured = roofline.Measured(
        chips=count, slots=config.sampler.slots, state_bytes=masters + moments, decoding_bytes=decoding,
        cache_bytes=config.sampler.slots * work.context * kept / fsdp / min(tensor, model.kv_heads),
        train_collectives=(gathered + exchanged, batches * model.layers * 12 * (count > 1)),
        decode_collectives=(0.0, 2.0 * model.layers * (tensor > 1)),
        prefill_collectives=(0.0, 0.0), reshard_collectives=(decoding, 1.0),
    )  # fmt: skip
    return Candidate(config, train, rollout, roofline.seconds(work, done, measured, chip)["step"])


def activations(config: RunConfig, model: QwenConfig, tokens: int) -> float:
    """Bytes on a chip that the forward pass of `tokens` tokens keeps, and the largest working set of a layer."""
    tensor, width = config.mesh.tensor, WIDTH[config.model.compute_dtype]
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    kept = model.width + (2 * query + 2 * key + 2 * model.ffn + model.width if config.model.remat == "dots" else 0)
    working = 4 * model.ffn + 6 * query + 8 * model.width
    logits = 3 * 4 * config.batch.logprob_chunk * model.vocab_size
    return (tokens * width * (model.layers * kept + working) + logits) / tensor


def lines(found: Sequence[Candidate]) -> Iterator[str]:
    """The candidates as text, the best as settings to paste."""
    yield f"\nsearch: {len(found)} candidates compiled"
    for one in found:
        assert one.plan is not None
        most = max(phase.bytes for phase in one.plan.phases)
        verdict = "fits" if one.plan.fits else "does not fit"
        seconds = f"{one.plan.time['step']:.0f} s a step" if one.plan.time else "no time"
        yield f"  {verdict}, {most / GIB:.2f} GiB a chip, {seconds}: {' '.join(one.settings())}"
    if found and found[0].plan is not None and found[0].plan.fits:
        yield "paste: " + " ".join(found[0].settings())
    else:
        yield "none of them fits"


def to_list(found: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The candidates as JSON values, with their estimates beside what was compiled."""
    return [
        {
            "settings": one.settings(),
            "estimate": {"train_bytes": one.train_bytes, "rollout_bytes": one.rollout_bytes, "seconds": one.seconds},
            "fits": one.plan is not None and one.plan.fits,
            "phases": {phase.program: phase.bytes for phase in one.plan.phases} if one.plan else {},
            "time": one.plan.time if one.plan else None,
        }
        for one in found
    ]

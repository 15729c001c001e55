"""What a run needs of a TPU topology, found by compiling its programs for it, and what a step of it should cost.

Knows programs, chips and the compiler's figures; prints nothing and gives no advice (`plan.py`, `advice.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from envace_jax import chips, hlo, programs, roofline, sharding
from envace_jax.chips import Chip
from envace_jax.config import ConfigError, RunConfig
from envace_jax.models.config import parameter_count
from envace_jax.programs import Programs
from envace_jax.sharding import AXES

# --- what lies where ---


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Of some arrays, on one chip: in its HBM, and in its share of the host's memory."""

    device: int = 0
    host: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host)


def bytes_of(tree: Any) -> Bytes:
    """Of a tree of shapes with shardings: the largest part that any device holds of each array."""
    total = Bytes()
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        size = math.prod(shape) * np.dtype(leaf.dtype).itemsize if not _is_key(leaf) else 8 * math.prod(shape)
        on_host = "host" in (getattr(leaf.sharding, "memory_kind", None) or "device")
        total += Bytes(0, size) if on_host else Bytes(size, 0)
    return total


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one execution of a program: how many, and the bytes that leave a chip."""

    count: int
    bytes: float


def traffic_of(text: str, devices: int) -> dict[str, Traffic]:
    """Of each kind that a compiled program's text has."""
    found: dict[str, Traffic] = {}
    for one in hlo.collectives(text, devices):
        before = found.get(one.kind, Traffic(0, 0.0))
        found[one.kind] = Traffic(before.count + one.times, before.bytes + one.times * one.sent)
    return found


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as the compiler laid it out; bytes are those of one chip.

    error: what the compiler said where it refused, and then `peak` is what it says it would need, or 0.
    """

    name: str
    phase: str
    peak: int
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0  # of the outputs, those that take an argument's place
    temporaries: int = 0
    code: int = 0
    host: int = 0  # arguments in host memory
    seconds: float = 0.0
    traffic: Mapping[str, Traffic] | None = None  # None where the compiled text cannot be read
    error: str = ""

    def sent(self) -> tuple[float, float]:
        """Bytes that leave a chip in one execution, and the number of collectives."""
        found = (self.traffic or {}).values()
        return sum(total.bytes for total in found), float(sum(total.count for total in found))


def compile_program(name: str, phase: str, lowered: jax.stages.Lowered, devices: int = 1) -> tuple[Compiled, Any]:
    """The program's figures, and what was compiled (None where the compiler refused it for its size)."""
    began = time.time()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        needed = re.search(r"\(([\d.]+)([GMK])\) exceeds", text) or re.search(r"Used ([\d.]+)([GMK])", text)
        peak = int(float(needed[1]) * 1024 ** (1 + "KMG".index(needed[2]))) if needed else 0
        return Compiled(name, phase, peak, seconds=time.time() - began, error=text), None
    took, memory = time.time() - began, compiled.memory_analysis()
    assert memory is not None  # every compiler that is planned for states it
    traffic = None
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # libtpu cannot print the modules of every topology
        traffic = traffic_of(compiled.as_text() or "", devices)
    # A compiler that states no peak (a CPU's) is taken to hold all that it states at once.
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    whole += memory.temp_size_in_bytes
    return Compiled(
        name=name, phase=phase, seconds=took, traffic=traffic,
        # Arguments are the run's, and stay there even where the program is done with them earlier.
        peak=max(memory.peak_memory_in_bytes or whole, memory.argument_size_in_bytes),
        arguments=memory.argument_size_in_bytes, outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes, temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes, host=memory.host_argument_size_in_bytes,
    ), compiled  # fmt: skip


def _given(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    return lowered


# --- the plan ---


@dataclasses.dataclass(frozen=True)
class Phase:
    """The most that one program of a phase needs of a chip, and what stays there beside its own arrays."""

    name: str  # "train", "reshard" or "rollout"
    program: str
    program_bytes: int
    beside: Mapping[str, int]  # bytes in HBM by what they are

    @property
    def bytes(self) -> int:
        return self.program_bytes + sum(self.beside.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """What was found out. Bytes are those of one chip."""

    config: RunConfig
    topology: str
    chip: Chip
    chips: int
    parameters: int
    rows: int  # of the largest training batch, which is what was compiled
    parts: Mapping[str, Bytes]
    programs: Sequence[Compiled]
    phases: Sequence[Phase]
    work: roofline.Work
    flops: roofline.Flops
    time: Mapping[str, Any] | None  # None where a program could not be compiled

    @property
    def fits(self) -> bool:
        return not any(program.error for program in self.programs) and not self.over()

    def over(self) -> dict[str, int]:
        """By phase, the bytes of a chip that are wanting; where the compiler refused a program, by its own account."""
        wanting: dict[str, int] = {}
        for phase in self.phases:
            missing = phase.bytes - self.chip.hbm_bytes
            if missing > 0:
                wanting[phase.name] = max(wanting.get(phase.name, 0), missing)
        return wanting


def mesh_of(config: RunConfig, topology: str) -> Mesh:
    """The run's mesh over the devices of a topology, ordered as the run would order them."""
    devices, chosen = chips.devices(topology), config.mesh
    sizes = (chosen.data, chosen.fsdp, chosen.tensor)
    if math.prod(sizes) != len(devices):
        raise ConfigError(
            f"mesh: data={sizes[0]} x fsdp={sizes[1]} x tensor={sizes[2]} are {math.prod(sizes)} devices, but "
            f"{topology} has {len(devices)}; set config.mesh.data, .fsdp and .tensor to sizes whose product that is"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def make(
    config: RunConfig,
    topology: str,
    work: roofline.Work | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Compiles the programs of `config` for `topology`. `tell` hears which is being compiled (a minute or so each)."""
    chip, _ = chips.parse(topology)
    mesh = mesh_of(config, topology)
    made = programs.make(config, mesh)
    compiled, parts = _compile_all(made, tell)
    work = roofline.Work.of_config(config) if work is None else work
    operations = roofline.flops(
        made.model, work, config.model.remat, frozen_base=made.base is not None, scored=config.grpo.kl_coef > 0
    )
    failed = any(program.error for program in compiled)
    return Plan(
        config=config, topology=topology, chip=chip, chips=mesh.size, parameters=parameter_count(made.model),
        rows=made.batch.tokens.shape[0], parts=parts, programs=compiled, phases=phases_of(compiled, parts),
        work=work, flops=operations,
        time=None if failed else _time(made, compiled, parts, work, operations, chip),
    )  # fmt: skip


def _compile_all(made: Programs, tell: Callable[[str], None]) -> tuple[list[Compiled], dict[str, Bytes]]:
    """The programs' figures, and the parts of memory."""
    found = []

    def one(name: str, phase: str, lower: Callable[[], jax.stages.Lowered]) -> Any:
        tell(name)
        figures, executable = compile_program(name, phase, lower(), made.mesh.size)
        found.append(figures)
        return executable

    state = made.state
    parts = {
        "parameters": bytes_of(state.params), "optimizer": bytes_of((state.step, state.opt_state)),
        "batch": bytes_of(made.batch),
    }  # fmt: skip
    if made.base is not None:
        parts["frozen base"] = bytes_of(made.base)
    scored = made.config.grpo.kl_coef > 0
    if scored and made.base is None:  # a base without its adapters is the reference itself
        parts["reference parameters"] = parts["parameters"]
    resharded = one("reshard", "reshard", made.reshard)
    if resharded is not None:
        decoding = made.decoding(resharded.output_shardings)
        parts["decoding parameters"] = bytes_of(decoding)
        for name, lowered in made.sampling(decoding).items():
            executable = one(name, "rollout", functools.partial(_given, lowered))
            if executable is not None:
                parts["key-value cache"] = _donated(lowered, executable)
    shape = made.batch.tokens.shape
    one(f"train step, {shape[0]} rows of {shape[1]} tokens", "train", made.train)
    if scored:
        one("score step of the reference", "train", made.score)
    return found, parts


def _donated(lowered: jax.stages.Lowered, executable: Any) -> Bytes:
    """Of the arguments that a program takes over: a sampler's caches and what its slots draw."""
    leaves = jax.tree.leaves(lowered.args_info[0])
    places = jax.tree.leaves(executable.input_shardings[0])
    total = Bytes()
    for leaf, place in zip(leaves, places, strict=True):
        if leaf.donated:
            total += bytes_of(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place))
    return total


def phases_of(compiled: Sequence[Compiled], parts: Mapping[str, Bytes]) -> list[Phase]:
    """For each phase the program that needs most, with what the run keeps on the chip meanwhile.

    Train: the sampler's caches and the parameters for decoding are dropped before it. Reshard: the optimizer's state
    stays, where it is not in host memory. Rollout: parameters and optimizer state stay.
    """
    reference = {name: size.device for name, size in parts.items() if name == "reference parameters"}
    state = {name: parts[name].device for name in ("parameters", "frozen base", "optimizer") if name in parts}
    phases = []
    for program in compiled:
        beside = dict(reference)
        if program.name.startswith("score"):
            # What it scores by is its argument: the reference, which with LoRA is the base.
            beside = {name: size for name, size in state.items() if name != "frozen base"}
        elif program.phase == "reshard":
            beside["optimizer"] = state["optimizer"]
        elif program.phase == "rollout":
            beside |= state
        if program.error:  # the compiler's account is of the program alone
            beside = {}
        phases.append(Phase(program.phase, program.name, program.peak, {k: v for k, v in beside.items() if v}))
    return phases


def _time(
    made: Programs, compiled: Sequence[Compiled], parts: Mapping[str, Bytes], work: roofline.Work,
    operations: roofline.Flops, chip: Chip,
) -> Mapping[str, Any]:  # fmt: skip
    by_name = {re.split(r"[ ,]", program.name)[0]: program for program in compiled}
    rows, length = made.batch.tokens.shape
    filled = min(1.0, work.trajectories * work.trained / (rows * length))
    sampler, model = made.config.sampler, made.model
    row_shards, tensor = sharding.axis_size(made.mesh, sharding.BATCH_AXES), made.config.mesh.tensor
    call = sampler.prefill_rows[-1] * row_shards * sampler.prefill_lengths[-1]
    kept = 2 * model.layers * model.kv_heads * model.head_dim * np.dtype(sampler.cache_dtype).itemsize

    def times(name: str, factor: float) -> tuple[float, float]:
        sent, count = by_name[name].sent()
        return sent * factor, count * factor

    measured = roofline.Measured(
        chips=made.mesh.size, slots=sampler.slots,
        state_bytes=parts["parameters"].device + parts["optimizer"].device + parts["optimizer"].host,
        decoding_bytes=parts["decoding parameters"].device,
        cache_bytes=sampler.slots * work.context * kept / (row_shards * math.gcd(tensor, model.kv_heads)),
        train_collectives=times("train", filled), decode_collectives=times("decode", 1.0),
        prefill_collectives=times("prefill", work.trajectories * work.prefilled / call),
        reshard_collectives=times("reshard", 1.0),
    )  # fmt: skip
    return roofline.seconds(work, operations, measured, chip)

"""Says whether a run fits a TPU topology, and what a step should cost, by compiling its programs without a TPU.

    python -m envace_jax.plan --config=configs/qwen3_8b.py --topology=v5e:4x4 [--config.KEY=VALUE ...] [--json=FILE]
                              [--trained_tokens=N] [--sampled_tokens=N] [--search]

The programs are the run's own, for the largest shapes that it has; the compiler says what memory they take. Exit code
0: it fits; 1: it does not, and what to change is said; 2: bad input. With --search, other settings for the topology are
tried, and the best that fit are printed to be pasted. GPUs are not planned.

Needs libtpu: pip install 'envace-jax[plan]'.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# A planner needs no device of this machine, and one that is in use by a run must be left alone.
os.environ["JAX_PLATFORMS"] = "cpu"

from absl import flags

from envace_jax import advice, chips, main, planning, roofline, stopping
from envace_jax.chips import GIB
from envace_jax.config import ConfigError, RunConfig, to_json
from envace_jax.metrics import write_json_atomic
from envace_jax.planning import Compiled, Plan

FITS, TOO_LARGE, BAD_INPUT = 0, 1, 2  # exit codes
NO_DATA = "none"  # stands for data.source where a config leaves it to the user: no task is read


def run(arguments: Sequence[str]) -> int:
    """Runs the command with `arguments` (the program's name first) and returns its exit code."""
    try:
        values = read_flags(arguments)
        plan = planning.make(values.config, values.topology, values.work(), _tell)
        print("\n".join(lines(plan)))
        result = to_dict(plan, values.config_file)
        code = FITS if plan.fits else TOO_LARGE
        if values.search:
            from envace_jax import plan_search

            found = plan_search.search(values.config, values.topology, values.work(), _tell)
            print("\n".join(plan_search.lines(found)))
            result["search"] = plan_search.to_list(found)
        if values.json:
            write_json_atomic(values.json, result)
    except (ValueError, OSError) as error:
        if not main.is_message(error):
            raise
        main.report(error, None)
        return BAD_INPUT
    return code


@dataclasses.dataclass(frozen=True)
class Flags:
    config: RunConfig
    config_file: str
    topology: str
    json: str
    search: bool
    trained_tokens: int
    sampled_tokens: int

    def work(self) -> roofline.Work:
        return roofline.Work.of_config(self.config, self.trained_tokens, self.sampled_tokens)


def read_flags(arguments: Sequence[str]) -> Flags:
    """The command line. Raises ConfigError or UserError saying what is wrong with it."""
    own = flags.FlagValues()
    flags.DEFINE_string("topology", "", "Chip and shape of the slice, such as v5e:4x4.", own)
    flags.DEFINE_string("json", "", "A file for everything that was found out.", own)
    flags.DEFINE_bool("search", False, "Try other settings for the topology.", own)
    flags.DEFINE_integer(
        "trained_tokens", 0, "Of a trajectory, padding included; by default a full training row.", flag_values=own
    )
    flags.DEFINE_integer("sampled_tokens", 0, "Of a trajectory; by default half of the trained ones.", flag_values=own)
    if any(argument in ("-h", "-help", "--help") for argument in arguments[1:]):
        print(f"{__doc__}\n{own.get_help()}")
        raise SystemExit(0)
    try:
        rest = own(list(arguments), known_only=True)
    except flags.Error as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    if not own["topology"].value:
        raise ConfigError(f"--topology is missing; it is one of {chips.EXAMPLES}, or another slice of those chips")
    chips.parse(own["topology"].value)
    try:
        config, _ = main.read_flags(rest)
    except ConfigError as error:
        if "data.source: empty" not in str(error):
            raise
        config, _ = main.read_flags([*rest, f"--config.data.source={NO_DATA}"])
    pairs = zip(rest, [*rest[1:], ""], strict=True)  # --config=FILE, or --config FILE
    file = [a.partition("=")[2] or after for a, after in pairs if a.lstrip("-").partition("=")[0] == "config"][-1]
    given: dict[str, Any] = {
        name: own[name].value for name in ("topology", "json", "search", "trained_tokens", "sampled_tokens")
    }
    return Flags(config, file, **given)


def _tell(what: str) -> None:
    print(f"compiling: {what}", file=sys.stderr, flush=True)


# --- for a person ---


def lines(plan: Plan) -> Iterator[str]:
    """The plan as text: what lies where, the programs, the phases, the expected time, and the verdict."""
    mesh = plan.config.mesh
    yield (
        f"{plan.config.model.path}: {plan.parameters / 1e9:.2f} B parameters on {plan.topology}, {plan.chips} chips of "
        f"{_gib(plan.chip.hbm_bytes)} GiB, mesh data={mesh.data} fsdp={mesh.fsdp} tensor={mesh.tensor}"
    )
    yield "\nGiB a chip              in HBM  in host memory"
    for name, size in plan.parts.items():
        yield f"  {name:<20}{_gib(size.device):>9}{_gib(size.host):>12}"
    yield "\nprograms, GiB a chip      peak  arguments  temporary  compiled in s"
    for program in plan.programs:
        yield f"  {program.name}"
        if program.error:
            yield f"{_gib(program.peak):>30}  refused: {program.error}"
        else:
            numbers = f"{_gib(program.arguments):>11}{_gib(program.temporaries):>11}{program.seconds:>15.0f}"
            yield f"{_gib(program.peak):>30}{numbers}"
            yield f"{'':>26}{_traffic(program)}"
    yield "\nat the same time, GiB a chip"
    for phase in plan.phases:
        beside = "".join(f" + {name} {_gib(size)}" for name, size in phase.beside.items())
        verdict = "fits" if phase.bytes <= plan.chip.hbm_bytes else "does not fit"
        yield (
            f"  {phase.name:<8}{_gib(phase.bytes):>7} of {_gib(plan.chip.hbm_bytes)} {verdict}: {phase.program}{beside}"
        )
    yield from _time_lines(plan)
    yield "\nfits" if plan.fits else "\ndoes not fit; what to change, by the bytes of a chip that it should save:"
    for one in advice.suggestions(plan):
        yield f"  {_gib(one.saves):>6} GiB  {one.change}  ({one.costs})"


def _time_lines(plan: Plan) -> Iterator[str]:
    done, work, found = plan.flops, plan.work, plan.time
    yield (
        f"\na step, taken to be {work.trajectories} trajectories of {work.trained} trained, {work.sampled} sampled and "
        f"{work.prefilled} prefilled tokens"
    )
    yield (
        f"  operations (counted by hand, loops included): train {done.train:.2e}, prefill {done.prefill:.2e}, decode "
        f"{done.decode:.2e}" + (f", score {done.score:.2e}" if done.score else "")
    )
    if found is None:
        yield "  no time is estimated, since not all programs compile"
        return
    for name, seconds in found["seconds"].items():
        yield f"  {name:<8}{seconds:>9.1f} s  bound by {found['bound_by'][name]}"
    yield f"  {'step':<8}{found['step']:>9.1f} s  {found['model_flops_share']:.1%} of the chips' peak"
    for line in roofline.ASSUMPTIONS:
        yield f"  assumed: {line}"


def _traffic(program: Compiled) -> str:
    if program.traffic is None:
        return "collectives: the compiler does not print this program"
    if not program.traffic:
        return "no collectives"
    kinds = (f"{kind} {total.count} x, {total.bytes / 1e9:.2f} GB" for kind, total in program.traffic.items())
    return "collectives: " + "; ".join(kinds)


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}"


# --- for a program ---


def to_dict(plan: Plan, config_file: str) -> dict[str, Any]:
    """Everything as JSON values. Bytes are those of one chip, seconds and operations those of one step."""
    return {
        "config_file": config_file,
        "config": to_json(plan.config),
        "topology": plan.topology,
        "chip": dataclasses.asdict(plan.chip),
        "chips": plan.chips,
        "parameters": plan.parameters,
        "rows": plan.rows,
        "parts": {name: dataclasses.asdict(size) for name, size in plan.parts.items()},
        "programs": [_program(program) for program in plan.programs],
        "phases": [dataclasses.asdict(phase) | {"bytes": phase.bytes} for phase in plan.phases],
        "work": dataclasses.asdict(plan.work),
        "flops": dataclasses.asdict(plan.flops),
        "time": plan.time,
        "assumptions": list(roofline.ASSUMPTIONS),
        "fits": plan.fits,
        "suggestions": [dataclasses.asdict(one) for one in advice.suggestions(plan)],
        "versions": {name: _version(name) for name in ("jax", "jaxlib", "libtpu")},
    }


def _program(program: Compiled) -> dict[str, Any]:
    traffic = program.traffic
    plain = None if traffic is None else {kind: dataclasses.asdict(total) for kind, total in traffic.items()}
    return {**{f.name: getattr(program, f.name) for f in dataclasses.fields(program)}, "traffic": plain}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    stopping.end_with_reader()
    sys.exit(run(sys.argv))

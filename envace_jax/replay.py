"""Runs a dumped step of a run again, and says of every quantity whether it came out as it was, bit by bit.

    python -m envace_jax.replay WORKDIR --step=N [--config.KEY=VALUE ...]
    python -m envace_jax.replay WORKDIR --step=N --explain=TASK [--config.KEY=VALUE ...]

The run must have written dumps (logging.dump_every). With --explain no model is loaded: it is said how each advantage
and each mask of a task (its id, or ID:ATTEMPT) came about. With settings of learning given, such as
--config.grpo.baseline=leave_one_out, the step is run as it would have been with them, and what differs is shown.
What lies elsewhere on this machine, or must be another mesh, may be said as well: --config.model.path and the like.

Exit code 0: all is equal, or other settings were given; 1: something differs, and it is named; 2: bad input, in one
line. Nothing in the work folder is changed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from envace_jax import config as configuration
from envace_jax import config_checks, explaining, main, replaying, rescoring, stopping
from envace_jax.config import ConfigError, RunConfig
from envace_jax.dumps import Dump, program
from envace_jax.rewards import Reward, choose

EQUAL, DIFFERS, BAD_INPUT = 0, 1, 2  # exit codes
# What may be asked of a step that is over: settings of learning alone, which leave the state's arrays what they are.
WHAT_IF = (
    "grpo.", "batch.", "optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.b1",
    "optimizer.b2", "optimizer.eps", "optimizer.weight_decay", "optimizer.clip_norm", "fidelity.weight",
    "data.filter_zero_variance",
)  # fmt: skip
# Where things are on this machine; they ask nothing.
PLACES = ("model.path", "lora.path", "compilation_cache", "mesh.data", "mesh.fsdp", "mesh.tensor")


def run(arguments: Sequence[str], reward: Reward | None = None) -> int:
    """Runs the command with `arguments` (the program's name first) and returns its exit code.

    `reward` is the run's own where that is not chosen by its settings, for a script that has this command's flags.
    """
    try:
        asked = read_flags(arguments)
        dump = replaying.find_dump(asked.workdir, asked.step)
        config, wanted = _settings(dump, arguments[0], asked.overrides)
        if asked.explain:
            print("\n".join(explaining.explain(_filtered(dump, wanted), wanted, asked.explain)))
            return EQUAL
        return _replay(asked.workdir, dump, config, wanted, reward)
    except (ValueError, OSError) as error:
        if not main.is_message(error):
            raise
        main.report(error, None)
        return BAD_INPUT


@dataclasses.dataclass(frozen=True)
class Flags:
    """The command line."""

    workdir: Path
    step: int
    explain: str
    overrides: tuple[str, ...]  # --config.KEY=VALUE as they were given


def read_flags(arguments: Sequence[str]) -> Flags:
    """The command line. Raises ConfigError saying what is wrong with it."""
    own = flags.FlagValues()
    flags.DEFINE_integer("step", None, "Which step, as metrics.jsonl counts them.", flag_values=own)
    flags.DEFINE_string("explain", "", "A task's id, or ID:ATTEMPT: how its advantages and masks came about.", own)
    if any(argument in ("-h", "-help", "--help") for argument in arguments[1:]):
        print(f"{__doc__}\n{own.get_help()}")
        raise SystemExit(0)
    try:
        rest = own(list(arguments), known_only=True)[1:]
    except flags.Error as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    overrides = [argument for argument in rest if argument.lstrip("-").startswith(("config.", "noconfig."))]
    overrides = [argument for argument in overrides if argument.startswith("-")]
    places = [argument for argument in rest if argument not in overrides]
    unknown = [argument for argument in places if argument.startswith("-")]
    if unknown:
        raise ConfigError(f"there is no flag {unknown[0].partition('=')[0]}; --help says which there are")
    if len(places) != 1:
        raise ConfigError(f"{len(places)} work folders are given; one is replayed: replay WORKDIR --step=N")
    if own["step"].value is None:
        raise ConfigError("--step is missing: the step to replay, as metrics.jsonl counts them, from 1")
    values: dict[str, Any] = {name: own[name].value for name in ("step", "explain")}
    return Flags(workdir=configuration.local_path(places[0]), overrides=tuple(overrides), **values)


def _settings(dump: Dump, name: str, overrides: Sequence[str]) -> tuple[RunConfig, RunConfig]:
    """The settings that the step was learned with, and those that are asked for, both with the places that are given.

    Raises ConfigError for settings that a replay cannot change.
    """
    main.check_overrides([name, *overrides])
    saved = configuration.from_config_dict(dump.settings)
    values, given, known = flags.FlagValues(), [name, *overrides], configuration.to_config_dict(saved)
    config_flags.DEFINE_config_dict("config", known, flag_values=values, sys_argv=given)
    try:
        values(given)
    except (flags.Error, ValueError, TypeError) as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    wanted = configuration.from_config_dict(known)
    here = configuration.to_config_dict(saved)
    for key, line in configuration.differing_settings(dump.settings, configuration.to_json(wanted)).items():
        if key in PLACES:
            here.update_from_flattened_dict({key: config_checks.get(wanted, key)})
        elif not key.startswith(WHAT_IF):
            raise ConfigError(
                f"{line}: what the step was rolled out and began with is done; a replay may change "
                f"{', '.join(entry + '*' if entry.endswith('.') else entry for entry in (*WHAT_IF, *PLACES))}"
            )
    return configuration.from_config_dict(here), wanted


def _filtered(dump: Dump, config: RunConfig) -> replaying.Rollouts:
    """The dump's rollouts, with the groups that these settings train on."""
    return rescoring.rescored(dump.rollouts, None, filtered=config.data.filter_zero_variance)[0]


def _replay(workdir: Path, dump: Dump, config: RunConfig, wanted: RunConfig, reward: Reward | None) -> int:
    start = replaying.find_start(workdir, dump.step)
    main.use_compilation_cache(config.compilation_cache)
    mesh = main.prepare_devices(config)
    learner, state = replaying.load(config, mesh)
    origin = f"the checkpoint of step {start.checkpoint}" if start.checkpoint else "the model that the run began with"
    dumped = f" and the dump{'s' * (len(start.between) > 1)} of {replaying.listed(start.between)}"
    print(f"step {dump.step} of {workdir}, from {origin}{dumped if start.between else ''}", flush=True)
    if dump.written_by != program():
        print(f"the dump was written by {dump.written_by}; this is {program()}: bits may differ")
    state = replaying.state_before(workdir, start, learner, state, dump.settings, lambda line: print(line, flush=True))
    if wanted != config:
        learner = replaying.load(wanted, mesh)[0]
    found = replaying.replay(dump, learner, state, reward or _same_reward(workdir, dump, config))
    return _tell(workdir, found, whole=wanted == config)


def _same_reward(workdir: Path, dump: Dump, config: RunConfig) -> Reward | None:
    """The reward that the run's settings choose, asking nobody; None where the run had another one."""
    reward = choose.kept(config.reward, workdir)
    return reward if type(reward).__name__ == dump.scored_by else None


def _tell(workdir: Path, found: replaying.Replayed, whole: bool) -> int:
    """Prints what came out; `whole` where it should be as dumped. Returns the exit code."""
    scored = [f"{count} {source}" for source, count in found.scored.items()]
    print(f"turns scored: {', '.join(scored) or 'none'}")
    different = [row.name for row in found.rows if not row.equal]
    if whole or different:
        print("\n".join(replaying.table(found.rows, whole)))
    same = len(found.rows) - len(different)
    print(f"{same} of {len(found.rows)} quantities are equal, bit by bit")
    if not whole:
        return EQUAL
    if different:
        print(f"error: {workdir}: differs: {', '.join(different)}", file=sys.stderr)
    return DIFFERS if different else EQUAL


if __name__ == "__main__":
    stopping.end_with_reader()
    try:
        sys.exit(run(sys.argv))
    except KeyboardInterrupt:
        sys.exit(130)

"""The command line of `python -m envace_jax.evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from envace_jax import benchmarks, main
from envace_jax.benchmarks.policies import TOKENIZER
from envace_jax.config import ConfigError, RunConfig, UserError

DEFAULT_CONFIG = Path(__file__).with_name("default_config.py")
SCRIPTS = ("gold", "noop", "garbage")


@dataclasses.dataclass(frozen=True)
class Flags:
    """The command line."""

    benchmark: str
    model: str
    policy: str
    server: str
    rehearsal: str
    subset: str
    categories: tuple[str, ...]
    trials: int
    seed: int
    temperature: float
    top_p: float
    out: Path
    data: str
    vita_path: str
    context: int
    response: int
    spelled_tags: bool
    baselines: bool
    own_config: bool  # whether --config names the settings, lengths among them
    config: RunConfig


def read_flags(arguments: Sequence[str], told: str = "") -> Flags:
    """The command line; --help prints `told` and the flags. Raises ConfigError or UserError for what is wrong."""
    own = flags.FlagValues()
    text: dict[str, tuple[str, str]] = {
        "benchmark": ("", f"One of {', '.join(benchmarks.names())}."),
        "model": ("", "A folder in Hugging Face layout, a hub id, or asset:NAME; with --server its name there."),
        "policy": ("", f"A script instead of a model: {', '.join(SCRIPTS)}."),
        "server": ("", "An OpenAI-compatible address that is asked instead of a model in this process."),
        "rehearsal": ("none", "none, parallel:N or sequential:N."),
        "subset": ("all", "all, small, first:N of each category, or a file with an id on each line."),
        "out": ("", "Folder of the results; by default runs/evaluate/BENCHMARK-POLICY."),
        "data": ("", "tasks: your file of executable tasks; finmcp: your data file."),
        "vita_path": ("", "vita: your checkout of VitaBench."),
    }
    for name, (default, hint) in text.items():
        flags.DEFINE_string(name, default, hint, own)
    flags.DEFINE_list("categories", [], "Some of the benchmark's categories.", flag_values=own)
    flags.DEFINE_integer("trials", 1, "Attempts at each case; trial t has seed + t.", flag_values=own, lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the random numbers.", flag_values=own)
    flags.DEFINE_float("temperature", 0.6, "0 is greedy.", flag_values=own, lower_bound=0.0)
    flags.DEFINE_float("top_p", 0.95, "Share of the probability that may be sampled.", flag_values=own)
    flags.DEFINE_integer(
        "context",
        0,
        "Tokens of a conversation; by default --config's, or 20000, or the model's positions.",
        flag_values=own,
    )
    flags.DEFINE_integer(
        "response",
        0,
        "Tokens of a message; by default --config's, or 8000, or two fifths of the context.",
        flag_values=own,
    )
    flags.DEFINE_bool("spelled_tags", False, "Take a tokenizer without Qwen3's tags: they are spelled out.", own)
    flags.DEFINE_bool("baselines", True, "Also say what doing nothing and the gold solution score.", own)
    if any(argument in ("-h", "-help", "--help") for argument in arguments[1:]):
        print(f"{told}\n{own.get_help()}\nSettings are given as --config.KEY=VALUE, and --config=FILE.")
        raise SystemExit(0)
    try:
        rest = own(list(arguments), known_only=True)
    except flags.Error as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    values: dict[str, Any] = {
        name: own[name].value for name in own if name not in ("help", "helpfull", "helpshort", "helpxml")
    }
    _check(values)
    where = values["out"] or f"runs/evaluate/{values['benchmark']}-{_policy_name(values)}"
    values |= {"categories": tuple(values["categories"]), "out": Path(where).expanduser()}
    own_config = any(argument.lstrip("-").partition("=")[0] == "config" for argument in rest[1:])
    return Flags(config=_config(rest, values, own_config), own_config=own_config, **values)


def _policy_name(values: dict[str, Any]) -> str:
    return (values["policy"] or Path(values["model"]).name or "server").replace(":", "-")


def _check(values: dict[str, Any]) -> None:
    """Raises UserError for flags that are missing or do not go together."""
    if not values["benchmark"]:
        raise UserError(f"--benchmark is missing; there are: {', '.join(benchmarks.names())}")
    benchmarks.load(values["benchmark"])
    if values["policy"] and values["policy"] not in SCRIPTS:
        raise UserError(f"--policy={values['policy']}: no such script; there are: {', '.join(SCRIPTS)}")
    if values["policy"] and (values["server"] or values["rehearsal"] != "none"):
        raise UserError(f"--policy={values['policy']} is a script: it needs no --server, and rehearses nothing")
    if not values["model"] and not values["policy"]:
        raise UserError("--model is missing: a folder or hub id, or with --server the model's name there")
    if not 0 < values["top_p"] <= 1:
        raise UserError(f"--top_p={values['top_p']}: must be above 0 and at most 1")
    for name in ("context", "response"):
        if values[name] < 0:
            raise UserError(f"--{name}={values[name]}: must be at least 1")


def _config(rest: Sequence[str], values: dict[str, Any], named: bool) -> RunConfig:
    """The run's settings: the config file, then what the flags say, then --config.KEY=VALUE, which counts most."""
    unknown = [argument for argument in rest[1:] if argument.startswith("-")]
    unknown = [argument for argument in unknown if not argument.lstrip("-").startswith(("config", "noconfig"))]
    if unknown:
        raise ConfigError(f"there is no flag {unknown[0].partition('=')[0]}; --help says which there are")
    given = iter(rest[1:])
    file, others = [] if named else [f"--config={DEFAULT_CONFIG}"], []
    for argument in given:
        if argument.lstrip("-") == "config":
            file.append(f"--config={next(given, '')}")
        elif argument.lstrip("-").startswith("config="):
            file.append(argument)
        else:
            others.append(argument)
    here = values["model"] and not values["server"]
    implied = [f"--config.model.path={values['model'] if here else TOKENIZER}", "--config.rollout.responder=real"]
    config, _ = main.read_flags([rest[0], *file, *implied, *others])
    return config

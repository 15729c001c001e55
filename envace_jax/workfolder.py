"""The folder of one run: what stands in it, and what a start there may do.

A start that is refused changes no file: `check` and `check_continued` only look, and `claim` comes after every refusal.
Knows files and settings; no device, task or parameter.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envace_jax import config as configuration
from envace_jax import config_checks, environment, hosts
from envace_jax.config import ConfigError, RunConfig, differing_keys
from envace_jax.environment import ENVIRONMENT_FILE
from envace_jax.metrics import METRICS_FILE, TENSORBOARD_FOLDER, TRAJECTORIES_FILE, last_step, write_json_atomic

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
MODEL = "model"  # the trained policy
MODEL_REHEARSE = "model_rehearse"  # what plays REHEARSE where that is trained apart
ADAPTER, ADAPTER_REHEARSE = "adapter", "adapter_rehearse"  # the same as PEFT's files, with LoRA
EXPORTS = {MODEL: "config.json", MODEL_REHEARSE: "config.json"}  # and a file by which each is known
EXPORTS |= {ADAPTER: "adapter_config.json", ADAPTER_REHEARSE: "adapter_config.json"}
ROLLOUTS = "rollouts"  # dumps of whole steps
SUMMARY_FILE = "summary.json"
CURVES_FILE = "curves.png"
OUR_GROUPS = ("model", "data", "sampler", "checkpoint")  # by which a run's config.json is known from a model's


def steps_done(workdir: Path) -> int:
    """The step of the newest checkpoint, by its folder's name; 0 without one."""
    names = [entry.name for entry in (workdir / CHECKPOINTS).glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def check(workdir: Path, config: RunConfig) -> None:
    """Raises ConfigError, or ValueError for unreadable metrics, where a start would lose what is not this run's.

    A start that never came to a checkpoint (a wrong path, say) binds nobody, as long as it left no results.
    """
    _check_base(workdir, config)
    continued = steps_done(workdir) > 0
    saved = _saved_settings(workdir / CONFIG_FILE)
    different = [] if saved is None else differing_keys(saved, config)
    if continued and different:
        raise _other_settings(workdir, different)
    if not continued:
        _check_no_results(workdir, saved, different)
    _check_places(workdir, continued)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:
        raise ConfigError(f"--workdir={workdir}: cannot be written: {error.strerror}") from error


def check_shared(workdir: Path) -> None:
    """Raises ConfigError where not all processes see one folder: else the first checkpoint waits for parts that never
    come. A collective."""
    told = hosts.exchange(f".shared.{uuid.uuid4().hex}")[0]
    if hosts.first() and hosts.count() > 1:
        (workdir / told).touch()
    hosts.exchange("it is there")
    missing = [process for process, seen in enumerate(hosts.exchange((workdir / told).exists())) if not seen]
    (workdir / told).unlink(missing_ok=True)
    if missing and hosts.count() > 1:
        raise ConfigError(
            f"--workdir={workdir}: process {missing[0]} does not see what process 0 writes there; with several hosts "
            "it must be one folder that all share (docs/hosts.md)"
        )


def check_continued(
    workdir: Path, config: RunConfig, known: Mapping[str, Any], fingerprints: Mapping[str, Any]
) -> None:
    """Raises ConfigError where the run of a checkpoint cannot go on: other settings, other inputs, or nothing to do.

    `known` is what the checkpoint keeps beside the state; `fingerprints` are those of the inputs that this start read.
    """
    if "fingerprints" not in known:
        raise ConfigError(f"{workdir}: its checkpoints are of an earlier version; choose another --workdir")
    different = differing_keys(known["config"], config)
    if different:
        raise _other_settings(workdir, different)
    done, before = known["step"], known["fingerprints"]
    if done > config.steps:
        raise ConfigError(f"steps: {config.steps} is below the {done} steps that {workdir} has done already")
    if done == config.steps:
        _check_evaluation(workdir, config, known["config"]["evaluation"])
    otherwise = f"the run in {workdir} began; put back what was there, or choose another --workdir"
    problems = []
    if before["tasks"] != fingerprints["tasks"]:
        earlier = known["config"]["evaluation"]
        held = [
            0 if source else count  # those of a source of their own are not taken out of what is trained on
            for source, count in (
                (earlier.get("source", ""), earlier.get("heldout_tasks", 0)),
                (config.evaluation.source, config.evaluation.heldout_tasks),
            )
        ]
        if config.data.source != "tiny" and held[0] != held[1]:  # of a benchmark's tasks, those are not trained on
            problems.append(
                f"evaluation.heldout_tasks: {held[0]} -> {held[1]} tasks of data.source changes what is trained on: "
                f"{otherwise}"
            )
        else:
            problems.append(f"data.source: the tasks of {config.data.source} are not what they were when {otherwise}")
    names = before["model"].keys() | fingerprints["model"].keys()
    changed = sorted(name for name in names if before["model"].get(name) != fingerprints["model"].get(name))
    if changed:
        problems.append(
            f"model.path: {', '.join(changed)} of {config.model.path} {'is' if len(changed) == 1 else 'are'} not as "
            f"when {otherwise}"
        )
    read = {
        "frozen": config_checks.cast(config)[1:],
        "judge": ("reward.checkpoint", config.reward.checkpoint),
        "adapters": ("lora.path", config.lora.path),
        "environments": ("data.environments", ", ".join(config.data.environments)),
    }
    for name, (setting, path) in read.items():
        if before.get(name) != fingerprints.get(name):
            problems.append(f"{setting}: files of {path} are not as when {otherwise}")
    if problems:
        raise ConfigError("\n".join(problems))


def _check_evaluation(workdir: Path, config: RunConfig, before: Mapping[str, Any]) -> None:
    """Raises ConfigError for a finished run with other evaluation settings: its summary would give the old numbers."""
    now = configuration.to_json(config)["evaluation"]
    different = [f"{key}: {before.get(key)!r} -> {now[key]!r}" for key in now if before.get(key) != now[key]]
    different = [line for line in different if not line.startswith("every:")]
    if different:
        raise ConfigError(
            f"evaluation.{different[0]}: the run in {workdir} has done its {config.steps} steps, so nothing would be "
            "evaluated; set it back, or raise steps"
        )


def claim(workdir: Path, config: RunConfig, step: int = 0) -> None:
    """Keeps the configuration in the folder, which makes it this run's; and where it starts anew after `step`."""
    if hosts.first():
        write_json_atomic(workdir / CONFIG_FILE, configuration.to_json(config))
        environment.record(workdir, step)


def _saved_settings(path: Path) -> dict[str, Any] | None:
    """The settings that the folder's run was last started with; None without the file."""
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON; choose another --workdir") from error
    if not isinstance(saved, dict) or not all(isinstance(saved.get(group), dict) for group in OUR_GROUPS):
        raise ConfigError(f"{path}: not the settings of a run (a model's, maybe); choose another --workdir")
    return saved


def _other_settings(workdir: Path, different: list[str]) -> ConfigError:
    start = f"{workdir} holds a run with other settings; set them back or choose another --workdir:"
    return ConfigError("\n".join([start, *different]))


def _check_base(workdir: Path, config: RunConfig) -> None:
    """Raises ConfigError where the run would write over the model that it starts from."""
    read = (("model.path", config.model.path), ("lora.path", config.lora.path), config_checks.cast(config)[1:])
    for setting, path in read:
        base = Path(configuration.model_path(path, setting)).resolve()
        targets = [(workdir / name).resolve() for name in EXPORTS]
        if path and (base == workdir.resolve() or any(target in (base, *base.parents) for target in targets)):
            raise ConfigError(f"{setting}: {path} lies where this run writes its own; choose another --workdir")


def _check_no_results(workdir: Path, saved: Mapping[str, Any] | None, different: list[str]) -> None:
    """Raises ConfigError where a start from nothing would empty the files of a run that is more than a start."""
    files = [workdir / name for name in (METRICS_FILE, TRAJECTORIES_FILE)]
    results = [path for path in files if path.is_file() and path.stat().st_size]
    reason = ""
    if (workdir / SUMMARY_FILE).is_file():
        reason = f"{workdir} holds the results of a finished run without its checkpoints"
    elif results and (saved is None or different):
        reason = f"{results[0]} is of a run with other settings, and without a checkpoint"
    elif results and saved is not None:
        last, every = last_step(files[0]), saved["checkpoint"].get("every")
        # Metrics run ahead of a checkpoint that is still being written, but the one after waits for it.
        if type(every) is int and last > 2 * every:
            reason = f"{files[0]} reaches step {last}, but there is no checkpoint to continue from"
    if reason:
        raise ConfigError(f"{reason}; choose another --workdir, or move what is there away")


def _check_places(workdir: Path, continued: bool) -> None:
    """Raises ConfigError where something else stands in the place of a file or folder of the run."""
    for name in (METRICS_FILE, TRAJECTORIES_FILE, SUMMARY_FILE, CURVES_FILE, ENVIRONMENT_FILE):
        if (workdir / name).is_dir():
            raise ConfigError(f"{workdir / name}: a folder, where the run writes a file; choose another --workdir")
    for name in (CHECKPOINTS, TENSORBOARD_FOLDER, ROLLOUTS):
        if (workdir / name).is_file():
            raise ConfigError(f"{workdir / name}: a file, where the run has a folder; choose another --workdir")
    for name, file in EXPORTS.items():
        target = workdir / name
        # The summary is written before the models, so a model without one is somebody else's.
        ours = continued and (workdir / SUMMARY_FILE).is_file() and (target / file).is_file()
        empty = target.is_dir() and not any(target.iterdir())
        if target.exists() and not empty and not ours:
            raise ConfigError(f"{target}: not a model that this run wrote; move it away or choose another --workdir")

"""What a run reads before anything large is loaded: its tasks and its model's folder, and every reason to refuse them.

Knows no device and no parameters. All that is said here is said within seconds of the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envace_jax import config as configuration
from envace_jax import config_checks, envs, fingerprint, parts, prompt_lengths
from envace_jax.chat import Chat, load_tokenizer
from envace_jax.config import ConfigError, RunConfig
from envace_jax.data import check_disjoint, read_corpus
from envace_jax.envs import tiny
from envace_jax.fidelity import rehearsable, tells_reference
from envace_jax.models import hf, peft
from envace_jax.rewards import Reward, choose
from envace_jax.task_store import StoredTasks
from envace_jax.tool_schemas import refusal
from envace_jax.types import Need, Task

HELDOUT_STREAM = 1  # of random numbers, beside those of the order of tasks


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tasks to train on, held-out tasks, tasks of the domain that training never sees, the model's folder and its
    tokenizer."""

    tasks: Sequence[Task]
    heldout: tuple[Task, ...]
    unseen: tuple[Task, ...]
    folder: Path
    chat: Chat
    frozen: Path | None = None  # the folder of the checkpoint that plays a role and is never trained
    judge: Path | None = None  # the folder of a judge in this process that is not the policy
    environments: tuple[Path, ...] = ()  # files of environments outside the package
    adapters: Path | None = None  # the folder of the adapters that LoRA starts from

    def fingerprints(self) -> dict[str, Any]:
        """What a resumed run must find again, as JSON values; the evaluation's tasks may change."""
        found = {"tasks": fingerprint.of_tasks(self.tasks), "model": fingerprint.of_model(self.folder)}
        folders = {"frozen": self.frozen, "judge": self.judge, "adapters": self.adapters}
        found |= {name: fingerprint.of_model(folder) for name, folder in folders.items() if folder is not None}
        files = {str(path): fingerprint.of_file(path) for path in self.environments}
        return found | ({"environments": files} if files else {})


def read_inputs(config: RunConfig, reward: Reward) -> Inputs:
    """Reads the tasks and finds the model. Raises ConfigError, ValueError or FileNotFoundError, one line each."""
    environments = tuple(map(configuration.local_path, config.data.environments))
    for file in environments:
        envs.add_file(file)
    tasks, heldout, unseen = _tasks(config)
    check_disjoint(tasks, (*heldout, *unseen), "data.source and the evaluation")
    _check_tasks(config, tasks, reward)
    _check_heldout(config, heldout, reward)
    _check_fidelity(config, tasks)
    _check_user(config, tasks, heldout)
    folder = hf.resolve(configuration.model_path(config.model.path))
    _check_positions(config, folder)
    frozen, adapters = _frozen(config, folder), _adapters(config, folder)
    chat = load_tokenizer(folder)
    kept = _short_enough(config, chat, tasks)
    heldout = _can_be_evaluated(config, chat, heldout)
    judge = choose.judge_folder(config.reward)
    return Inputs(kept, heldout, unseen, folder, chat, frozen, judge, environments, adapters)


def _short_enough(config: RunConfig, chat: Chat, tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks whose prompts fit; says which do not. Raises ConfigError where too few are left."""
    kept, left_out = prompt_lengths.leave_out_long(
        tasks, parts.make_prompts(config, chat), parts.make_limits(config),
        answered_by=Need.RESPONSE if config.rollout.responder == "real" else Need.REHEARSE,
        longest=config.data.longest_prompt,
    )  # fmt: skip
    if not kept:
        raise ConfigError(
            f"data.source: none of the {len(tasks)} tasks of {config.data.source} is short enough; task 0: "
            f"{left_out[0].reason}"
        )
    for line in prompt_lengths.said(left_out, len(tasks)):
        print(line, flush=True)
    _check_enough(config, kept)
    return kept


def _can_be_evaluated(config: RunConfig, chat: Chat, heldout: tuple[Task, ...]) -> tuple[Task, ...]:
    """The held-out tasks whose prompts fit; says which do not: every attempt at one would be masked, so an evaluation
    would tell of the short ones alone without a word. Raises ConfigError where none is left."""
    kept, left_out = prompt_lengths.leave_out_long(
        heldout, parts.make_prompts(config, chat), parts.make_limits(config), answered_by=Need.RESPONSE
    )
    if left_out and not kept:
        raise ConfigError(
            f"evaluation.heldout_tasks: none of the {len(heldout)} is short enough; task 0: {left_out[0].reason}"
        )
    for line in prompt_lengths.said(left_out, len(heldout)):
        print(line.replace("data.source", "evaluation.heldout_tasks"), flush=True)
    return tuple(kept)


def _frozen(config: RunConfig, folder: Path) -> Path | None:
    """The folder of the frozen checkpoint, if any plays. Raises ConfigError where it has another tokenizer."""
    _, setting, path = config_checks.cast(config)
    if not path:
        return None
    frozen = hf.resolve(configuration.model_path(path, setting))
    _check_positions(config, frozen, setting)
    # Prompts are made of the policy's token ids, and answers read by them.
    if frozen != folder and _vocabulary(frozen) != _vocabulary(folder):
        raise ConfigError(
            f"{setting}: {frozen} has another vocabulary than model.path, {folder}; prompts are token ids, so give a "
            "checkpoint with the same tokenizer"
        )
    return frozen


def _adapters(config: RunConfig, folder: Path) -> Path | None:
    """The folder of the adapters to start from, if any. Raises ValueError where they are not the configuration's."""
    lora = parts.make_lora(config)
    if lora is None or not config.lora.path:
        return None
    found = hf.resolve(configuration.model_path(config.lora.path, "lora.path"))
    peft.check(found, hf.read_config(folder), lora)
    return found


def _vocabulary(folder: Path) -> dict[str, int]:
    return load_tokenizer(folder).tokenizer.get_vocab(with_added_tokens=True)


def _tasks(config: RunConfig) -> tuple[Sequence[Task], tuple[Task, ...], tuple[Task, ...]]:
    """Those to train on, to evaluate on, and of the domain that training never sees."""
    data, wanted = config.data, config.evaluation
    tasks: Sequence[Task]
    heldout = _evaluated(config) if wanted.source else None
    if data.source == "tiny":
        if heldout is None:
            heldout = tuple(tiny.tasks("heldout", wanted.heldout_tasks, data.seed))
        tasks = tuple(tiny.tasks(data.split, data.count, data.seed))
        return tasks, heldout, tuple(tiny.tasks("unseen", wanted.unseen_tasks, data.seed))
    own = _own_tasks(data.source)
    tasks = read_file_tasks(data) if own is None else own
    if heldout is None:
        tasks, heldout = _hold_out(tasks, wanted.heldout_tasks, data.seed)
    return (tasks[: data.count] if data.count else tasks), heldout, ()


def _own_tasks(source: str) -> tuple[Task, ...] | None:
    """The tasks of a benchmark of this package, BENCHMARK:PART; None for any other source."""
    benchmark, _, part = source.partition(":")
    process = envs.load_process(benchmark)
    return None if process is None else tuple(process.tasks(part))


def _evaluated(config: RunConfig) -> tuple[Task, ...]:
    """The first tasks of `evaluation.source`. Raises ConfigError where there are fewer than wanted."""
    source, count = config.evaluation.source, config.evaluation.heldout_tasks
    if source == "tiny":
        return tuple(tiny.tasks("heldout", count, config.data.seed))
    found: Sequence[Task] | None = _own_tasks(source)
    if found is None:
        found = read_corpus(configuration.local_path(source), config.data.checklist).tasks
    if count > len(found):
        raise ConfigError(f"evaluation.heldout_tasks: {count} is more than the {len(found)} tasks of {source}")
    return tuple(found[:count])


def _hold_out(tasks: Sequence[Task], count: int, seed: int) -> tuple[Sequence[Task], tuple[Task, ...]]:
    """Those to train on and `count` drawn by the seed to evaluate on, both in their order."""
    if count and count >= len(tasks):
        raise ConfigError(
            f"evaluation.heldout_tasks: {count} of the {len(tasks)} tasks there are leave none to train on"
        )
    if not count:
        return tasks, ()
    held = set(np.random.default_rng((seed, HELDOUT_STREAM)).permutation(len(tasks))[:count].tolist())
    places = [place for place in range(len(tasks)) if place not in held]
    kept = tasks.chosen(places) if isinstance(tasks, StoredTasks) else tuple(tasks[place] for place in places)
    return kept, tuple(tasks[place] for place in sorted(held))


def read_file_tasks(data: configuration.DataConfig) -> StoredTasks:
    """The tasks of `data.source`; says what is left out. Raises as `read_corpus` does."""
    corpus = read_corpus(configuration.local_path(data.source), data.checklist, data.bad_records)
    total = len(corpus.tasks) + len(corpus.bad)
    for kind, found in corpus.reasons():
        first = found[0]
        reason = f"{kind} (the first: {first.where}, record {first.index})"
        print(f"data.source: left out {len(found)} of {total} records: {reason}", flush=True)
    return corpus.tasks


def _check_tasks(config: RunConfig, tasks: Sequence[Task], reward: Reward) -> None:
    """Raises ConfigError for tasks from which nothing could be learned, and says how many cannot be scored."""
    _check_enough(config, tasks)
    can_score = getattr(reward, "can_score", lambda task: True)  # only some rewards know
    lost = sum(not can_score(task) for task in tasks)
    if lost == len(tasks):
        raise ConfigError(
            f"data.source: every task of {config.data.source} has checklist items without a program check, which need "
            "a judge: give one (--config.reward.kind=judge, reward.urls, reward.model); none could be scored without"
        )
    if lost:
        print(
            f"{lost} of {len(tasks)} tasks have items that need a judge; turns with one mask the trajectory", flush=True
        )
    if config.rollout.schema_check:
        refused = sum(any(refusal(task.tools, call) for call, _ in task.reference) for task in tasks)
        if 2 * refused > len(tasks):
            raise ConfigError(
                f"rollout.schema_check: it would refuse the reference calls of {refused} of the {len(tasks)} tasks of "
                f"{config.data.source}, whose tools are not all listed at first; set it to False"
            )
        if refused:
            print(f"rollout.schema_check: it refuses reference calls of {refused} of {len(tasks)} tasks", flush=True)
    if config.rollout.responder == "real":
        for task in tasks:
            if task.environment is None:
                raise ConfigError(f"rollout.responder: real needs an environment, and task {task.task_id!r} names none")
            if envs.load_process(task.environment["name"]) is None:
                envs.load_domain(task.environment["name"])


def _check_heldout(config: RunConfig, heldout: Sequence[Task], reward: Reward) -> None:
    """Raises ConfigError for held-out tasks whose success, or whose results, could not be told."""
    if not heldout:
        return
    where = config.evaluation.source or config.data.source
    for task in heldout:
        if task.environment is None:
            raise ConfigError(
                f"evaluation.heldout_tasks: task {task.task_id!r} of {where} has no executable environment; name "
                "a source whose tasks have one (--config.evaluation.source=FILE), or set it to 0"
            )
        if envs.load_process(task.environment["name"]) is None:
            envs.load_domain(task.environment["name"])
    can_score = getattr(reward, "can_score", lambda task: True)  # only some rewards know
    own = [task for task in heldout if envs.load_process((task.environment or {})["name"]) is None]
    lost = sum(not can_score(task) for task in own)
    if own and lost == len(own) == len(heldout):
        raise ConfigError(
            f"evaluation.heldout_tasks: every one of {where} has checklist items that need a judge (reward.kind=judge)"
        )
    if lost:
        print(f"{lost} of {len(heldout)} held-out tasks have items that need a judge, so they are masked", flush=True)
    if config.evaluation.fidelity_calls and not any(map(tells_reference, heldout)):
        raise ConfigError(
            f"evaluation.fidelity_calls: no held-out task of {where} has a reference conversation (`conversation`) "
            "that makes the calls of its `reference`; set it to 0"
        )


def _check_user(config: RunConfig, *sources: Sequence[Task]) -> None:
    """Raises ConfigError where tasks have a simulated user and no model is to play it."""
    simulated = sum(bool(task.scenario) for tasks in sources for task in tasks)
    if simulated and not config.user.urls:
        raise ConfigError(
            f"data.source: {simulated} of {sum(map(len, sources))} tasks of {config.data.source} have a simulated "
            "user, which a model plays: give one (--config.user.urls, user.model)"
        )


def _check_fidelity(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Raises ConfigError where fewer tasks than wanted have a reference call whose result a rehearsal could give."""
    wanted = config.fidelity.calls_per_step
    known = len(rehearsable(config, tasks))
    if known < wanted:
        raise ConfigError(
            f"fidelity.calls_per_step: {wanted} needs as many tasks with a reference conversation whose calls have "
            f"JSON results; {known} of the {len(tasks)} tasks of {config.data.source} have one"
        )


def _check_enough(config: RunConfig, tasks: Sequence[Task]) -> None:
    if len(tasks) < config.data.tasks_per_step:
        raise ConfigError(
            f"data.tasks_per_step: {config.data.tasks_per_step} is more than the {len(tasks)} tasks there are"
        )


def _check_positions(config: RunConfig, folder: Path, setting: str = "model.path") -> None:
    """Raises ConfigError where a sequence may be longer than the positions that the model knows.

    Positions restart in every sequence of a packed row, so neither a row nor a slot's cache counts.
    """
    positions, longest = hf.read_config(folder).max_positions, config_checks.longest_sequence(config)
    if longest > positions:
        raise ConfigError(
            f"{setting}: {folder} knows {positions} positions (max_position_embeddings), and the limits allow "
            f"sequences of {longest} tokens; lower limits.act_context and prompts.max_rehearse_prompt + "
            f"limits.rehearse_response to {positions}, or choose another model"
        )

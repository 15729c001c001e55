"""`python -m envace_jax.evaluate`: measures a policy on a benchmark.

    python -m envace_jax.evaluate --benchmark=bfcl|tau2|vita|finmcp|tiny|tasks --model=FOLDER [...]

The same command continues a run that was interrupted, and tries again what something outside had failed. The folder of
--out gets results.json, the attempts (trajectories.jsonl) and those of the baselines. docs/benchmarks.md says what the
figures mean. Bad input is answered by lines on stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envace_jax import benchmarks, fingerprint, main
from envace_jax import config as configuration
from envace_jax.benchmarks import Options, Suite, loading, policies, runner, table
from envace_jax.benchmarks.flags import Flags, read_flags
from envace_jax.benchmarks.policies import Policy
from envace_jax.config import UserError
from envace_jax.metrics import write_json_atomic
from envace_jax.progress import Progress
from envace_jax.rewards import Reward, choose

RESULTS, SETTINGS, ATTEMPTS = "results.json", "settings.json", "trajectories.jsonl"


def run(arguments: Sequence[str]) -> int:
    """Runs the command with `arguments` (the program's name first) and returns its exit code."""
    try:
        chosen = read_flags(arguments, __doc__ or "")
        results = evaluate(chosen, " ".join(["python -m envace_jax.evaluate", *arguments[1:]]))
        print("\n".join(table.lines(results)), flush=True)
    except (ValueError, OSError) as error:
        if not main.is_message(error):
            raise
        main.report(error, None)
        return main.BAD_INPUT
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return main.INTERRUPTED
    return 0


def evaluate(chosen: Flags, command: str) -> dict[str, Any]:
    """Plays the benchmark and writes all files; returns what results.json holds."""
    module = benchmarks.load(chosen.benchmark)
    if not _judges(module):
        return _evaluate(chosen, command, module, None)
    if chosen.config.reward.checkpoint:
        raise UserError("reward.checkpoint: an evaluation asks its judge by an address; give reward.urls instead")
    with choose.chosen(chosen.config.reward, chosen.out, chosen.seed) as reward:
        return _evaluate(chosen, command, module, reward)


def _judges(module: types.ModuleType) -> bool:
    """Whether the settings' reward judges the benchmark; the others have checkers of their own."""
    return getattr(module, "JUDGED", False)


def _evaluate(chosen: Flags, command: str, module: types.ModuleType, reward: Reward | None) -> dict[str, Any]:
    began = time.time()
    options = _options(chosen, reward)
    if not benchmarks.is_suite(module):
        _check_same(chosen.out, module.about(options) | _settings(chosen))
        results = {"benchmark": chosen.benchmark, "command": command, **module.run(options)}
        write_json_atomic(chosen.out / RESULTS, results)
        return results
    suite: Suite = module.read(options)
    print(f"{chosen.benchmark}: {suite.package}; {sum(case.scored for case in suite.cases)} cases", flush=True)
    with _policy(chosen, module, suite) as (policy, chat, played):
        settings = {
            "policy": dict(policy.about),
            "package": suite.package,
            **_settings(chosen),
            **_cases(chosen, played),
        }
        _check_same(chosen.out, settings)
        results = {
            "benchmark": chosen.benchmark, "command": command, **settings,
            "seeds": [chosen.seed + trial for trial in range(chosen.trials)], "missing": dict(suite.missing),
        }  # fmt: skip
        if chosen.baselines and not chosen.policy:
            results["baselines"] = _baselines(chosen, module, suite, chat)
        shown = Shown()
        attempts = figures_of(chosen.out / ATTEMPTS, module, played, policy, chosen.trials, chosen.seed, shown)
        results["results"] = attempts
    results["seconds_of_this_start"] = time.time() - began
    write_json_atomic(chosen.out / RESULTS, results)
    return results


class Shown:
    """How far a run is: on a terminal in one line that is rewritten, elsewhere a line now and then."""

    def __init__(self, every_s: float = 60.0):
        self._progress, self._every_s = Progress(1), every_s
        self._terminal, self._last = sys.stdout.isatty(), time.monotonic()

    def within(self, text: str) -> None:
        if self._terminal:
            self._progress.within(text)
        elif time.monotonic() - self._last > self._every_s:
            self._last = time.monotonic()
            self._progress.note(text)

    def note(self, text: str) -> None:
        self._progress.note(text)

    def close(self) -> None:
        self._progress.close()


def figures_of(
    path: Path, module: types.ModuleType, suite: Suite, policy: Policy, trials: int, seed: int, shown: Shown
) -> dict[str, Any]:
    """The figures of a policy, whose attempts are kept in a file."""
    with contextlib.closing(runner.Store(path)) as store:
        there = sum(store.done(case.case_id, trial) for case in suite.cases for trial in range(trials))
        if there:
            shown.note(f"{path}: {there} of {len(suite.cases) * trials} attempts are done")
        played = runner.measure(module, suite, policy, store, trials=trials, seed=seed, progress=shown.within)
        shown.close()
        return runner.figures(module, played, store, trials)


def _baselines(chosen: Flags, module: types.ModuleType, suite: Suite, chat: Any) -> dict[str, Any]:
    """What doing nothing and the gold solution score on the same cases: little is said by a score without them."""
    found = {}
    for name, script in (("noop", policies.noop), ("gold", module.gold)):
        policy, cases = policies.scripted(name, suite.cases, script, chat)
        if cases:
            print(f"baseline {name}", flush=True)
            own = dataclasses.replace(suite, cases=cases)
            found[name] = figures_of(chosen.out / f"baseline_{name}.jsonl", module, own, policy, 1, 0, Shown())
    return found


def _options(chosen: Flags, reward: Reward | None) -> Options:
    user = chosen.config.user
    return Options(
        categories=chosen.categories, subset=chosen.subset, seed=chosen.seed,
        with_user=bool(user.urls) or bool(chosen.policy), data=chosen.data, vita_path=chosen.vita_path,
        environments=chosen.config.data.environments, reward=reward,
        server=chosen.server, model=chosen.model,
        request={"temperature": chosen.temperature, "top_p": chosen.top_p, **loading.request_of(chosen)},
        user_url=user.urls[0] if user.urls else "", user_model=user.model, out=chosen.out, trials=chosen.trials,
    )  # fmt: skip


def _settings(chosen: Flags) -> dict[str, Any]:
    """What a continued run must have in common with the one before, as JSON values: beside the policy and the cases the
    user, but not at which address that is."""
    user = dataclasses.asdict(chosen.config.user)
    free = configuration.FREE_OF_ENDPOINT
    found: dict[str, Any] = {
        "trials": chosen.trials, "seed": chosen.seed,
        "user": {name: value for name, value in user.items() if name not in free},
    }  # fmt: skip
    if _judges(benchmarks.load(chosen.benchmark)) and chosen.config.reward.kind != "checklist":
        judge = dataclasses.asdict(chosen.config.reward)
        found["judge"] = {name: value for name, value in judge.items() if name not in configuration.FREE_OF_REWARD}
    return found


def _cases(chosen: Flags, suite: Suite) -> dict[str, Any]:
    """The same of the cases: their ids, and a hash of all that is in their tasks."""
    return {
        "subset": {"name": chosen.subset, "ids": [case.case_id for case in suite.cases if case.scored]},
        "tasks": fingerprint.of_tasks([case.task for case in suite.cases]),
    }


def _check_same(folder: Path, settings: dict[str, Any]) -> None:
    """Raises UserError where the folder is another run's; claims an empty one. More trials may be asked for."""
    path = folder / SETTINGS
    if path.is_file():
        known = json.loads(path.read_text())
        now = json.loads(json.dumps(settings))
        different = configuration.differing_settings({**known, "trials": 0}, {**now, "trials": 0})
        if different:
            line = next(iter(different.values()))
            raise UserError(f"--out={folder} holds a run that differs: {line[:300]}; give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, settings)


@contextlib.contextmanager
def _policy(chosen: Flags, module: types.ModuleType, suite: Suite) -> Iterator[tuple[Policy, Any, Suite]]:
    """Who plays, the chat format for baselines, and the suite of the cases that it can play."""
    if chosen.policy:
        chat = loading.chat_of(chosen.model or policies.TOKENIZER, chosen.spelled_tags)
        scripts = {"gold": module.gold, "noop": policies.noop, "garbage": policies.garbage}
        policy, cases = policies.scripted(chosen.policy, suite.cases, scripts[chosen.policy], chat)
        yield policy, chat, dataclasses.replace(suite, cases=cases)
        return
    opened = loading.remote if chosen.server else loading.local
    with opened(chosen) as (found, chat):
        yield found, chat, suite

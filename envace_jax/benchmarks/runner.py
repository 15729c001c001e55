"""Plays a suite by a policy, case by case and trial by trial, and keeps what came of it in a file of JSON lines.

A run that is killed goes on where it was: what the file holds is not played again, except attempts that something
outside had failed. An attempt draws the same random numbers in either case. Knows no benchmark and no model.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import os
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from envace_jax.benchmarks import Case, Outcome, Suite
from envace_jax.benchmarks.policies import Policy
from envace_jax.benchmarks.scores import Attempt, category_figures
from envace_jax.metrics import json_line, read_json_lines, trajectory_record
from envace_jax.types import Json, Task, Trajectory

BEFORE_FAILED = "fault: the conversation that this one goes on from was not finished"
MOST_FAULTS = 5  # that results tell
Progress = Callable[[str], None]


class Store:
    """Attempts in a file of JSON lines, each written before anybody counts it. To be closed."""

    def __init__(self, path: Path):
        records = read_json_lines(path)  # without a last line that a kill has cut off
        self._records: dict[tuple[str, int], dict[str, Any]] = {}
        for record in records:
            self._keep(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            whole = path.read_bytes()
            with path.open("r+b") as file:
                file.truncate(whole.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(json_line(record) + "\n")
            self._file.flush()
            self._keep(record)

    def _keep(self, record: Mapping[str, Any]) -> None:
        """What is needed later of an attempt; a later line counts instead of an earlier one."""
        kept = ("case", "category", "trial", "scored", "status", "reason", "score", "detail", "carried", "tokens")
        memory = (record.get("rehearsed") or {}).get("memory")
        self._records[record["case"], record["trial"]] = {
            **{name: record.get(name) for name in kept}, "empty_memory": memory == "",
        }  # fmt: skip

    def unscored(self, trials: int) -> list[Mapping[str, Any]]:
        """What was played for what it leaves to others."""
        return [record for record in self._records.values() if not record["scored"] and record["trial"] < trials]

    def get(self, case_id: str, trial: int) -> Mapping[str, Any] | None:
        return self._records.get((case_id, trial))

    def done(self, case_id: str, trial: int) -> bool:
        """Whether an attempt came to an end that was its own."""
        found = self.get(case_id, trial)
        return found is not None and found["status"] == "ok"

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def measure(
    module: types.ModuleType,
    suite: Suite,
    policy: Policy,
    store: Store,
    *,
    trials: int,
    seed: int,
    progress: Progress = lambda text: None,
) -> list[Attempt]:
    """Plays what the store lacks, and gives all attempts, in the order of cases and trials. Trial t has seed + t."""
    for trial in range(trials):
        pending = [case for case in suite.cases if not store.done(case.case_id, trial)]
        while pending:
            ready = [case for case in pending if not case.after or store.done(case.after, trial)]
            if not ready:  # what they come after failed
                for case in pending:
                    store.add(_record(case, trial, seed + trial, status="failed", reason=BEFORE_FAILED))
                break
            _play(module, suite, policy, store, ready, trial, seed + trial, progress)
            ids = {case.case_id for case in ready}
            pending = [case for case in pending if case.case_id not in ids]
    return attempts(suite.cases, store, trials)


def _play(
    module: types.ModuleType,
    suite: Suite,
    policy: Policy,
    store: Store,
    cases: Sequence[Case],
    trial: int,
    seed: int,
    progress: Progress,
) -> None:
    """Plays cases that wait for nothing, and waits for what the benchmark says of them."""
    written: list[Future[None]] = []
    begun = _begun(module, store, cases, trial, seed)

    def on_end(case: Case, trajectory: Trajectory, state: Json, rehearsed: Json) -> None:
        written.append(_settled(module, store, case, trial, seed, trajectory, state, rehearsed))

    def tell(finished: int, total: int, tokens: int) -> None:
        progress(f"trial {trial + 1}: {finished}/{total} conversations, {tokens:,} tokens sampled")

    for one_message in (True, False):
        group = sorted((case for case in begun if case.one_message == one_message), key=_beginning)
        if group:
            policy.play(group, seed=seed, steps=suite.steps, reward=suite.reward, on_end=on_end, progress=tell)
    for future in concurrent.futures.as_completed(written):
        future.result()


def _beginning(case: Case) -> str:
    """What the case's prompt begins with. Those that share it are played one after another, for the kept caches."""
    system = [message["content"] for message in case.task.messages if message["role"] == "system"]
    return json.dumps([system, case.task.tools], ensure_ascii=False)


def _begun(module: types.ModuleType, store: Store, cases: Sequence[Case], trial: int, seed: int) -> list[Case]:
    """The cases with the tasks that are played, which may depend on what other cases have left. One whose task cannot
    be had is written down as failed."""
    if not hasattr(module, "begin"):
        return list(cases)
    left = [(store.get(case.after, trial) or {}).get("carried") if case.after else None for case in cases]
    asked: list[Future[Task]] = [module.begin(case, carried) for case, carried in zip(cases, left, strict=True)]
    begun = []
    for case, future in zip(cases, asked, strict=True):
        try:
            begun.append(dataclasses.replace(case, task=future.result()))
        except Exception as error:  # whatever failed outside masks this attempt and no other
            store.add(_record(case, trial, seed, status="failed", reason=_fault(error)))
    return begun


def _fault(error: BaseException) -> str:
    return " ".join(f"fault: {type(error).__name__}: {error}".split())[:300]


def _settled(
    module: types.ModuleType,
    store: Store,
    case: Case,
    trial: int,
    seed: int,
    trajectory: Trajectory,
    state: Json,
    rehearsed: Json,
) -> Future[None]:
    """Asks the benchmark about a conversation and writes it down; a fault of either is written and not scored."""
    done: Future[None] = Future()
    common: dict[str, Any] = {"rehearsed": rehearsed, "trajectory": trajectory_record(trajectory)}
    common["tokens"] = sum(len(segment.tokens) for segment in trajectory.segments)

    def write(**fields: Any) -> None:
        try:
            store.add(_record(case, trial, seed, **common, **fields))
            done.set_result(None)
        except BaseException as error:  # a full disk: whoever waits is to hear of it
            done.set_exception(error)

    def settle(asked: Future[Outcome]) -> None:
        try:
            found = asked.result()
        except BaseException as error:
            write(status="failed", reason=_fault(error))
        else:
            told = {"score": found.score, "detail": found.detail, "carried": found.carried}
            write(status="ok", reason=trajectory.reason, **told)

    if trajectory.status != "ok":
        write(status="failed", reason=trajectory.reason)
    else:
        try:
            module.outcome(case, trajectory, state).add_done_callback(settle)
        except Exception as error:
            write(status="failed", reason=_fault(error))
    return done


def _record(case: Case, trial: int, seed: int, **fields: Any) -> dict[str, Any]:
    known = {"case": case.case_id, "category": case.category, "trial": trial, "seed": seed, "scored": case.scored}
    return {**known, "score": None, **fields}


def attempts(cases: Iterable[Case], store: Store, trials: int) -> list[Attempt]:
    """The scored cases' attempts that the store has."""
    found = []
    for case in cases:
        for trial in range(trials):
            record = store.get(case.case_id, trial)
            if case.scored and record is not None:
                masked = record["status"] != "ok"
                score = None if masked else record["score"]
                found.append(Attempt(case.case_id, case.category, trial, score, masked, record["detail"]))
    return found


def figures(module: types.ModuleType, played: Sequence[Attempt], store: Store, trials: int) -> dict[str, Any]:
    """What a policy's attempts come to: each category's figures, the benchmark's own, how conversations ended."""
    by_category: dict[str, list[Attempt]] = {}
    for attempt in played:
        by_category.setdefault(attempt.category, []).append(attempt)
    records = [store.get(attempt.case_id, attempt.trial) or {} for attempt in played]
    return {
        "categories": {name: category_figures(own, trials) for name, own in by_category.items()},
        **module.summary(played),
        "ended": _reasons(records),
        "unscored_ended": _reasons(store.unscored(trials)),
        "masked": sum(attempt.masked for attempt in played),
        "faults": _faults(records),
        "empty_memories": sum(bool(record.get("empty_memory")) for record in records),
        "sampled_tokens": sum(record.get("tokens") or 0 for record in records),
    }


def _faults(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Why attempts are masked, in full, the most frequent reasons first."""
    found = collections.Counter(str(record.get("reason")) for record in records if record.get("status") == "failed")
    return dict(found.most_common(MOST_FAULTS))


def _reasons(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often conversations ended why; a fault's message is left out."""
    return dict(sorted(collections.Counter(str(record.get("reason")).split(":")[0] for record in records).items()))

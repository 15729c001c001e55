"""What the gold solution and doing nothing score in a benchmark's environments, through this package's own:

    python experiments/environment_baselines.py --environment bfcl|tau2 [--sets multi_turn_base] [--out FOLDER]

Prints a table and writes `environment_baselines_NAME.json`. A score means little without what doing nothing scores. The
BFCL sets take 10 seconds on two cores, the tau2 sets 97 seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from envace_jax.envs import bfcl, make_environment, tau2
from envace_jax.metrics import write_json_atomic
from envace_jax.types import Message, Task, ToolCall

ROOT = Path(__file__).resolve().parents[1]
MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
PWD = ToolCall("pwd", {})


def bfcl_rows(sets: Sequence[str]) -> dict[str, Any]:
    """Every turn's gold calls in one message; `pwd` alone in every turn; and no call at all."""
    rows = []
    for name in sets:
        tasks, started = bfcl.tasks(name), time.time()
        gold = _bfcl_scores(tasks, [_gold_calls(task) for task in tasks])
        pwd = _bfcl_scores(tasks, [[[PWD] for _ in task.user_turns] for task in tasks])
        nothing = _bfcl_scores(tasks, [[[] for _ in task.user_turns] for task in tasks])
        rows.append({
            "set": name, "tasks": len(tasks), "calls": sum(len(task.reference) for task in tasks),
            "gold": sum(gold), "nothing": sum(nothing), "pwd": sum(pwd), "seconds": time.time() - started,
            "gold_fails": [task.task_id for task, value in zip(tasks, gold, strict=True) if value < 1],
        })  # fmt: skip
    return {"package": bfcl.package(), "rows": rows}


def _gold_calls(task: Task) -> list[list[ToolCall]]:
    """The reference calls turn by turn; a turn has an item for each of its own."""
    calls = [call for call, _ in task.reference]
    counts = [sum((item.check or {}).get("kind") == "call" for item in turn) for turn in task.checklist]
    starts = [sum(counts[:turn]) for turn in range(len(counts))]
    assert sum(counts) == len(calls), task.task_id
    return [calls[start : start + count] for start, count in zip(starts, counts, strict=True)]


def _bfcl_scores(tasks: Sequence[Task], plans: Sequence[Sequence[Sequence[ToolCall]]]) -> list[float]:
    """The outcomes of conversations whose calls are fixed, executed in the tasks' environments.

    A turn's calls are side by side in one message: two turns of multi_turn_long_context have 34, and BFCL fails whoever
    takes more than 20 messages for them.
    """
    scores = []
    for task, plan in zip(tasks, plans, strict=True):
        assert task.environment is not None
        environment = make_environment(task.environment)
        messages: list[Message] = list(task.messages)
        for text, calls in zip(task.user_turns, plan, strict=True):
            messages.append({"role": "user", "content": text})
            results = [environment.call(call.name, call.arguments) for call in calls]
            if calls:
                written = [{"name": call.name, "arguments": call.arguments} for call in calls]
                messages.append({"role": "assistant", "content": "", "tool_calls": written})
            for call, result in zip(calls, results, strict=True):
                messages.append({"role": "tool", "name": call.name, "content": json.dumps(result.result())})
            messages.append({"role": "assistant", "content": "Done."})
        environment.close()
        scores.append(bfcl.score(task, messages))
    return [future.result() for future in scores]


def tau2_rows(sets: Sequence[str]) -> dict[str, Any]:
    """Gold actions, then a reply with all that is to be said; and a reply alone."""
    rows = []
    for name in sets:
        tasks, started = tau2.tasks(name), time.time()
        gold = [tau2.score(task, _tau2_gold(task)) for task in tasks]
        nothing = [tau2.score(task, [*task.messages, *_tau2_reply("I have done nothing.")]) for task in tasks]
        rows.append(_tau2_row(name, tasks, gold, nothing) | {"seconds": time.time() - started})
    return {"package": tau2.package(), "rows": rows}


def _tau2_gold(task: Task) -> list[Message]:
    """The task's conversation with its gold calls, whose results its environment gives."""
    assert task.environment is not None
    environment = make_environment(task.environment)
    answers = [environment.call(call.name, call.arguments) for call, _ in task.reference]
    messages = list(task.messages)
    for (call, _), answer in zip(task.reference, answers, strict=True):
        written = [{"name": call.name, "arguments": call.arguments}]
        messages.append({"role": "assistant", "content": "", "tool_calls": written})
        messages.append({"role": "tool", "name": call.name, "content": json.dumps(answer.result())})
    environment.close()
    said = [word for item in task.checklist[0] for word in (item.check or {}).get("words", ())]
    return [*messages, *_tau2_reply("\n".join(said) or "It is done.")]


def _tau2_reply(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _tau2_row(
    name: str, tasks: Sequence[Task], gold: Sequence[Future[float]], nothing: Sequence[Future[float]]
) -> dict[str, Any]:
    ids = [task.task_id for task in tasks]
    gold_scores, nothing_scores = ([future.result() for future in futures] for futures in (gold, nothing))
    return {
        "set": name, "tasks": len(tasks), "calls": sum(len(task.reference) for task in tasks),
        "with_simulated_user": sum(bool(task.scenario) for task in tasks),
        "gold": sum(gold_scores), "nothing": sum(nothing_scores),
        "gold_fails": [i for i, value in zip(ids, gold_scores, strict=True) if value < 1],
        "nothing_solves": [i for i, value in zip(ids, nothing_scores, strict=True) if value == 1],
    }  # fmt: skip


ENVIRONMENTS: dict[str, tuple[Callable[[Sequence[str]], dict[str, Any]], tuple[str, ...]]] = {
    "bfcl": (bfcl_rows, MULTI_TURN),
    "tau2": (tau2_rows, ("mock", "telecom_small", "airline", "retail")),
}  # name -> (what plays them, their sets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", choices=list(ENVIRONMENTS), required=True)
    parser.add_argument("--sets", nargs="+", help="some of its sets of tasks, by default all")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results")
    args = parser.parse_args()
    play, sets = ENVIRONMENTS[args.environment]
    result = play(args.sets or sets)
    columns = [name for name in ("gold", "nothing", "pwd") if name in result["rows"][0]]
    print(f"\n{args.environment}: {result['package']}")
    print(f"{'set':26s}{'tasks':>7s}" + "".join(f"{name:>9s}" for name in columns) + f"{'seconds':>9s}")
    for row in result["rows"]:
        scores = "".join(f"{row[name]:9g}" for name in columns)
        print(f"{row['set']:26s}{row['tasks']:7d}{scores}{row['seconds']:9.1f}")
        if row["gold_fails"]:
            print(f"  gold fails on {', '.join(row['gold_fails'])}")
    args.out.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python experiments/environment_baselines.py", *sys.argv[1:]])
    write_json_atomic(args.out / f"environment_baselines_{args.environment}.json", {"command": command, **result})


if __name__ == "__main__":
    main()

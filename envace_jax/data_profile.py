"""What a data set holds: `python -m envace_jax.data --path=tasks.jsonl` (or a pattern, a folder, a hub id).

Prints how many records there are, how long they are, their turns, calls and tools, and what is wrong with which.
Knows no policy; lengths are in characters, or in tokens where a tokenizer is given.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envace_jax import data
from envace_jax.chat import load_tokenizer
from envace_jax.records import record_from_task
from envace_jax.types import Task

SHOWN_TOOLS = 10
SHOWN_BAD = 3  # places of each reason
QUANTILES = (0.0, 0.5, 0.95, 1.0)  # of every number of a task


def profile(corpus: data.Corpus, measure: Callable[[str], int] = len) -> dict[str, Any]:
    """Counts of a corpus as JSON values; `measure` says how long a text is."""
    tasks = corpus.tasks
    tools = collections.Counter(tool["function"]["name"] for task in tasks for tool in task.tools)
    called = collections.Counter(call.name for task in tasks for call, _ in task.reference)
    numbers: dict[str, list[int]] = {
        "user turns": [len(task.user_turns) for task in tasks],
        "tools": [len(task.tools) for task in tasks],
        "reference calls": [len(task.reference) for task in tasks],
        "checklist items": [sum(map(len, task.checklist)) for task in tasks],
        "length of tools": [measure(json.dumps(task.tools, ensure_ascii=False)) for task in tasks],
        "length of conversation": [measure(_conversation(task)) for task in tasks],
    }
    places: dict[str, list[str]] = {}
    for record, reason in zip(corpus.bad, corpus.kinds(), strict=True):
        places.setdefault(reason, []).append(f"{record.where}: {record.reason}")
    return {
        "records": len(tasks) + len(corpus.bad),
        "tasks": len(tasks),
        "with an environment": sum(task.environment is not None for task in tasks),
        "with program checks alone": sum(all(i.check for turn in task.checklist for i in turn) for task in tasks),
        "numbers": {name: _quantiles(values) for name, values in numbers.items()},
        "tools": [[name, count, called[name]] for name, count in tools.most_common()],
        "calls of tools that their task does not list": sum(_unlisted_calls(task) for task in tasks),
        "bad": [
            {"reason": reason, "count": count, "examples": places[reason][:SHOWN_BAD]}
            for reason, count in corpus.reasons()
        ],
    }


def _conversation(task: Task) -> str:
    if not task.conversation:
        return "".join(task.user_turns)
    return json.dumps(record_from_task(task)["extra_info"]["messages"], ensure_ascii=False)


def _unlisted_calls(task: Task) -> int:
    listed = {tool["function"]["name"] for tool in task.tools}
    return sum(call.name not in listed for call, _ in task.reference)


def _quantiles(values: Sequence[int]) -> dict[str, float]:
    ordered = sorted(values)
    named = {f"{share:.0%}": ordered[round(share * (len(ordered) - 1))] for share in QUANTILES} if ordered else {}
    return {"mean": statistics.fmean(ordered), **named} if ordered else {}


def lines(result: dict[str, Any], unit: str) -> list[str]:
    """The profile as text."""
    shown = [f"{result['records']} records, {result['tasks']} tasks, {result['records'] - result['tasks']} left out"]
    for name in ("with an environment", "with program checks alone", "calls of tools that their task does not list"):
        shown.append(f"  {result[name]:6d} {name}")
    shown.append(f"{'a task has':24s}" + "".join(f"{name:>10s}" for name in ("mean", *(f"{q:.0%}" for q in QUANTILES))))
    for name, values in result["numbers"].items():
        label = f"{name}, {unit}" if name.startswith("length") else name
        shown.append(f"  {label:22s}" + "".join(f"{value:10.0f}" for value in values.values()))
    shown.append(f"{len(result['tools'])} tools; the most frequent (tasks that list it, reference calls):")
    shown += [f"  {count:6d} {calls:6d}  {name}" for name, count, calls in result["tools"][:SHOWN_TOOLS]]
    for entry in result["bad"]:
        shown.append(f"left out {entry['count']} x: {entry['reason']}")
        shown += [f"    {example}" for example in entry["examples"]]
    return shown


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m envace_jax.data", description=__doc__.partition("\n")[0])
    parser.add_argument("--path", required=True, help="file, folder, pattern or hub id (owner/name:split)")
    parser.add_argument("--variant", type=int, default=0, help="which of a record's checklists")
    parser.add_argument("--tokenizer", type=Path, help="folder of a model: lengths in its tokens")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(given)
    try:
        corpus = data.read_corpus(args.path, args.variant, "skip", most_bad=1.0)
        chat = None if args.tokenizer is None else load_tokenizer(args.tokenizer)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    result = profile(corpus, len if chat is None else lambda text: len(chat.encode(text)))
    print(
        json.dumps(result, ensure_ascii=False, indent=1)
        if args.json
        else "\n".join(lines(result, "characters" if chat is None else "tokens"))
    )
    return 0

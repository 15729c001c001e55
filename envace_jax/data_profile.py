"""What a data set holds: `python -m envace_jax.data --path=tasks.jsonl` (or a pattern, a folder, a hub id).

Prints how many records there are, how long they are, their turns, calls and tools, and what is wrong with which.
Knows no policy; lengths are in characters, or in tokens where a tokenizer is given.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
import referencing

from envace_jax import config as configuration
from envace_jax import data, envs
from envace_jax.chat import Chat, load_tokenizer
from envace_jax.prompt_lengths import first_prompt_tokens
from envace_jax.records import record_from_task
from envace_jax.roles import canonical_result
from envace_jax.task_store import TaskWriter
from envace_jax.types import Json, Task

SHOWN_TOOLS = 10
SHOWN_BAD = 3  # places of each reason
COUNTS = (
    "tasks with an environment",
    "tasks with program checks alone",
    "tools whose parameters are no JSON Schema",
    "reference calls whose arguments do not fit their tool's schema",
    "reference results that are no JSON array or object with members",
)
QUANTILES = (0.0, 0.5, 0.95, 1.0)  # of every number of a task


def profile(corpus: data.Corpus, chat: Chat | None = None) -> dict[str, Any]:
    """Counts of a corpus as JSON values. Lengths are in characters, or in the tokens of `chat`."""
    listed, called = collections.Counter[str](), collections.Counter[str]()
    numbers: dict[str, list[int]] = collections.defaultdict(list)
    counts = dict.fromkeys(COUNTS, 0)
    for task in corpus.tasks:  # once: every task is read from disk
        listed.update(tool["function"]["name"] for tool in task.tools)
        called.update(call.name for call, _ in task.reference)
        for name, number in _numbers(task, chat).items():
            numbers[name].append(number)
        for name, number in zip(COUNTS, _counts(task), strict=True):
            counts[name] += number
    return {
        "records": len(corpus.tasks) + len(corpus.bad),
        "tasks": len(corpus.tasks),
        **counts,
        "numbers": {name: _quantiles(values) for name, values in numbers.items()},
        "tools": [[name, count, called[name]] for name, count in listed.most_common()],
        "bad": [
            {
                "reason": kind,
                "count": len(found),
                "examples": [f"{bad.where} (record {bad.index}): {bad.reason}" for bad in found[:SHOWN_BAD]],
            }
            for kind, found in corpus.reasons()
        ],
    }


def _numbers(task: Task, chat: Chat | None) -> dict[str, int]:
    """What a task has so many of."""

    def measure(text: str) -> int:
        return len(text) if chat is None else len(chat.encode(text))

    numbers = {
        "user turns": len(task.user_turns),
        "tools": len(task.tools),
        "reference calls": len(task.reference),
        "checklist items": sum(map(len, task.checklist)),
        "length of tools": measure(json.dumps(task.tools, ensure_ascii=False)),
        "length of conversation": measure(_conversation(task)),
    }
    return numbers if chat is None else numbers | {"first prompt, tokens": first_prompt_tokens(chat, task)}


def _counts(task: Task) -> tuple[int, ...]:
    """What a task adds to each of `COUNTS`."""
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in task.tools}
    schemas = {name: _validator(json.dumps(schema or {})) for name, schema in parameters.items()}
    return (
        task.environment is not None,
        all(item.check for turn in task.checklist for item in turn),
        sum(validator is None for validator in schemas.values()),
        # A benchmark's task may tell of a tool only later in the conversation.
        sum(not _fits(schemas.get(call.name), call.arguments) for call, _ in task.reference),
        sum(not _can_be_rehearsed(result) for _, result in task.reference),
    )


@functools.lru_cache(maxsize=4096)
def _validator(schema: str) -> jsonschema.Draft202012Validator | None:
    """What checks arguments against a schema; None where it is no JSON Schema."""
    try:
        jsonschema.Draft202012Validator.check_schema(json.loads(schema))
    except jsonschema.SchemaError:
        return None
    return jsonschema.Draft202012Validator(json.loads(schema), registry=referencing.Registry())  # fetches nothing


def _fits(validator: jsonschema.Draft202012Validator | None, arguments: Json) -> bool:
    """Whether arguments fit; they do where the schema cannot say."""
    try:
        return validator is None or validator.is_valid(dict(arguments))
    except Exception:  # a reference to a schema elsewhere, or a pattern that is none
        return True


def _can_be_rehearsed(result: str) -> bool:
    """Whether REHEARSE may answer so: an array, or an object that is not empty."""
    try:
        return canonical_result(result) != "{}"
    except ValueError:
        return False


def _conversation(task: Task) -> str:
    if not task.conversation:
        return "".join(task.user_turns)
    return json.dumps(record_from_task(task)["extra_info"]["messages"], ensure_ascii=False)


def _quantiles(values: Sequence[int]) -> dict[str, float]:
    ordered = sorted(values)
    named = {f"{share:.0%}": ordered[round(share * (len(ordered) - 1))] for share in QUANTILES} if ordered else {}
    return {"mean": statistics.fmean(ordered), **named} if ordered else {}


def lines(result: dict[str, Any], unit: str) -> list[str]:
    """The profile as text."""
    shown = [f"{result['records']} records, {result['tasks']} tasks, {result['records'] - result['tasks']} left out"]
    for name in COUNTS:
        shown.append(f"  {result[name]:6d} {name}")
    shown.append(f"{'a task has':33s}" + "".join(f"{name:>10s}" for name in ("mean", *(f"{q:.0%}" for q in QUANTILES))))
    for name, values in result["numbers"].items():
        label = f"{name}, {unit}" if name.startswith("length") else name
        shown.append(f"  {label:31s}" + "".join(f"{value:10.5g}" for value in values.values()))
    shown.append(f"{len(result['tools'])} tools; the most frequent (tasks that list it, reference calls):")
    shown += [f"  {count:6d} {calls:6d}  {name}" for name, count, calls in result["tools"][:SHOWN_TOOLS]]
    if result["bad"]:
        share = 1 - result["tasks"] / result["records"]
        verdict = "refuses them" if share > data.MOST_BAD else "leaves them out"
        shown.append(f"{share:.1%} of the records are bad; a run with data.bad_records=skip {verdict}")
    for entry in result["bad"]:
        shown.append(f"left out {entry['count']} x: {entry['reason']}")
        shown += [f"    {example}" for example in entry["examples"]]
    return shown


def _corpus(path: str, variant: int) -> data.Corpus:
    """What is at `path`, or a benchmark's tasks (`bfcl:multi_turn_base`)."""
    name, _, part = path.partition(":")
    if (process := envs.load_process(name)) is None:
        return data.read_corpus(path, variant, "skip", most_bad=1.0)
    stored = TaskWriter()
    with contextlib.redirect_stdout(sys.stderr):  # the profile alone is the output
        for task in process.tasks(part):
            stored.add(task)
    return data.Corpus(stored.finish(), ())


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m envace_jax.data", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--path", required=True, help="file, folder, pattern, hub id (owner/name:split) or benchmark's part"
    )
    parser.add_argument("--variant", type=int, default=0, help="which of a record's checklists")
    parser.add_argument("--model", help="folder of a model, or asset:NAME: lengths in its tokens, first prompts too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(given)
    try:
        corpus = _corpus(args.path, args.variant)
        chat = None if args.model is None else load_tokenizer(configuration.model_path(args.model))
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    result = profile(corpus, chat)
    print(
        json.dumps(result, ensure_ascii=False, indent=1)
        if args.json
        else "\n".join(lines(result, "characters" if chat is None else "tokens"))
    )
    return 0

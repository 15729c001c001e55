"""How far a judge agrees with program checks, on checklist items that have one: the judge is asked all the same.

    python experiments/judge_agreement.py --source=tiny --count=64 --url=http://host:8000/v1 --model=NAME
    python experiments/judge_agreement.py --source=TASKS.jsonl --trajectories=runs/NAME/trajectories.jsonl ...
    python experiments/judge_agreement.py --checkpoint=FOLDER_OR_HUB_ID ...     (a judge in this process)

The conversations are a run's (`--trajectories`, turns that were scored there) or the tasks' reference conversations and
spoilt copies of them (`--spoilt` of each). A program check is taken for the truth, each item by itself: what an item
depends on is left out. Prints a table and writes `judge_agreement.json` to `--out`; verdicts are kept beside it, so the
same command goes on where it was stopped and asks nothing twice. A judge's fault counts as a fault, not as a verdict.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np

from envace_jax import fingerprint
from envace_jax.buckets import Buckets
from envace_jax.chat import load_tokenizer
from envace_jax.config import DataConfig, model_path
from envace_jax.endpoint import Endpoint, EndpointSettings
from envace_jax.envs import tiny
from envace_jax.inputs import read_file_tasks
from envace_jax.local_model import LocalModel
from envace_jax.metrics import read_json_lines, write_json_atomic
from envace_jax.models import hf, qwen
from envace_jax.rewards import RewardUnavailable
from envace_jax.rewards.checklist import passes, read_turn
from envace_jax.rewards.judge import JudgedReward
from envace_jax.sampling import Sampler
from envace_jax.sharding import make_mesh
from envace_jax.types import Json, Message, Task, TurnScore

VERDICTS_FILE, RESULT_FILE = "verdicts.jsonl", "judge_agreement.json"
RESAMPLES, SEED = 2000, 0  # of the bootstrap


@dataclasses.dataclass(frozen=True)
class Case:
    """A turn to judge: its items that have a program check, and what the checks say of it."""

    task: Task
    turn: int
    messages: tuple[Message, ...]
    kinds: tuple[str, ...]  # what each item focuses on
    truth: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One item: what its program check says and what the judge says. `cluster` numbers the turn it belongs to."""

    cluster: int
    kind: str
    truth: bool
    judged: bool


# --- what is judged ---


def case_of(task: Task, turn: int, messages: Sequence[Message]) -> Case | None:
    """The case of a turn, from its user message on; None where no item has a check or the assistant said nothing."""
    items = [item for item in task.checklist[turn] if item.check is not None]
    if not items or not any(message["role"] == "assistant" for message in messages):
        return None
    steps, reply = read_turn(messages)
    bare = tuple(dataclasses.replace(item, check=None, dependence=()) for item in items)
    checklist = tuple(bare if place == turn else () for place in range(len(task.checklist)))
    kinds = tuple(item.focus_on or "(not stated)" for item in items)
    truth = tuple(passes(item, steps, reply) for item in items)
    return Case(dataclasses.replace(task, checklist=checklist), turn, tuple(messages), kinds, truth)


def cases_of(task: Task, conversation: Iterable[Message], turns: int | None = None) -> list[Case]:
    """The cases of a conversation's turns, of the first `turns` where given."""
    parts: list[list[Message]] = []
    for message in conversation:
        if message["role"] == "user":
            parts.append([])
        if parts:
            parts[-1].append(message)
    found = [case_of(task, turn, part) for turn, part in enumerate(parts[:turns])]
    return [case for case in found if case is not None]


def of_trajectories(tasks: Mapping[str, Task], path: Path) -> list[Case]:
    """The scored turns of a run's trajectories. Raises ValueError for a task that the source does not have."""
    cases = []
    for number, record in enumerate(read_json_lines(path), start=1):
        if record["task_id"] not in tasks:
            raise ValueError(f"{path}, line {number}: task {record['task_id']!r} is not among the tasks of --source")
        cases += cases_of(tasks[record["task_id"]], record["messages"], len(record["turns"]))
    return cases


def of_references(tasks: Iterable[Task], spoilt: int) -> list[Case]:
    """The turns of the tasks' reference conversations, and those that differ in `spoilt` spoilt copies of each."""
    cases = []
    for task in tasks:
        draw = random.Random(f"spoil {task.task_id}")
        copies = [task.conversation, *(spoil(task.conversation, draw) for _ in range(spoilt))]
        seen: list[Case] = []
        for case in (case for conversation in copies for case in cases_of(task, conversation)):
            if case not in seen:
                seen.append(case)
        cases += seen
    return cases


def spoil(conversation: Sequence[Message], draw: random.Random) -> list[Message]:
    """A copy in which one thing is wrong, as it goes wrong in rollouts: an argument, a result, a reply, or a call that
    was not made."""
    messages = [copy.deepcopy(dict(message)) for message in conversation]
    ways: list[tuple[Callable[[list[Message], int, random.Random], None], int]] = []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            ways.append((_spoil_result, place))
        elif message["role"] == "assistant":
            ways += [(_spoil_argument, place), (_drop_calls, place)] if message.get("tool_calls") else []
            ways += [] if message.get("tool_calls") else [(_spoil_reply, place)]
    if ways:
        way, place = draw.choice(ways)
        way(messages, place, draw)
    return messages


def _other(value: Json, draw: random.Random) -> Json:
    """A value of the same kind that is another one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + draw.randint(1, 9)
    return f"{value}x" if isinstance(value, str) else "other"


def _spoil_argument(messages: list[Message], place: int, draw: random.Random) -> None:
    call = draw.choice(messages[place]["tool_calls"])
    holder = call.get("function", call)
    arguments = holder["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    if arguments:
        name = draw.choice(sorted(arguments))
        arguments[name] = _other(arguments[name], draw)
    holder["arguments"] = arguments


def _drop_calls(messages: list[Message], place: int, draw: random.Random) -> None:
    end = place + 1
    while end < len(messages) and messages[end]["role"] == "tool":
        end += 1
    del messages[place:end]


def _spoil_result(messages: list[Message], place: int, draw: random.Random) -> None:
    try:
        value = json.loads(messages[place]["content"])
    except ValueError:
        value = None
    if isinstance(value, dict) and value:
        name = draw.choice(sorted(value))
        value[name] = _other(value[name], draw)
    else:
        value = {"value": "other"}
    messages[place]["content"] = json.dumps(value, ensure_ascii=False)


def _spoil_reply(messages: list[Message], place: int, draw: random.Random) -> None:
    messages[place]["content"] = draw.choice(["I am not sure.", "Done.", "0"])


# --- asking ---


def judge(
    reward: JudgedReward, cases: Sequence[Case], wait: Callable[[Sequence[Future[Any]]], None]
) -> tuple[list[Pair], list[str]]:
    """Pairs of truth and verdict, and why turns could not be judged. `wait` returns when all futures are done."""
    futures = [reward.score_turn(case.task, case.turn, case.messages) for case in cases]
    wait(futures)
    pairs: list[Pair] = []
    reasons: list[str] = []
    for cluster, (case, future) in enumerate(zip(cases, futures, strict=True)):
        try:
            score: TurnScore = future.result()
        except RewardUnavailable as fault:
            reasons.append(str(fault))
            continue
        for kind, truth, judged in zip(case.kinds, case.truth, score.verdicts, strict=True):
            pairs.append(Pair(cluster, kind, truth, judged))
    return pairs, reasons


# --- counting ---


def agreement(pairs: Sequence[Pair]) -> dict[str, float | int | None]:
    """Counts and rates of one set of pairs; a positive is an item that holds. A rate over nothing is None."""
    cells = collections.Counter((pair.truth, pair.judged) for pair in pairs)
    right, wrong = cells[True, True] + cells[False, False], cells[True, False] + cells[False, True]
    said, held = cells[True, True] + cells[False, True], cells[True, True] + cells[True, False]
    return {
        "items": right + wrong,
        "hold": held,
        "judged_to_hold": said,
        "accuracy": _share(right, right + wrong),
        "precision": _share(cells[True, True], said),
        "recall": _share(cells[True, True], held),
        "kappa": kappa(np.array([[cells[False, False], cells[False, True]], [cells[True, False], cells[True, True]]])),
    }


def kappa(cells: np.ndarray) -> float | None:
    """Cohen's kappa of counts [truth, judged]: agreement beyond chance. None where chance alone agrees always."""
    total = cells.sum()
    if total == 0:
        return None
    observed, expected = np.trace(cells) / total, float(cells.sum(0) @ cells.sum(1)) / total**2
    return None if expected == 1 else float((observed - expected) / (1 - expected))


def kappa_interval(pairs: Sequence[Pair], resamples: int = RESAMPLES) -> tuple[float, float] | None:
    """95% bootstrap interval of kappa. Turns are drawn, not items: those of a turn stand or fall together."""
    clusters = sorted({pair.cluster for pair in pairs})
    places = {cluster: place for place, cluster in enumerate(clusters)}
    cells = np.zeros((len(clusters), 2, 2), np.int64)
    for pair in pairs:
        cells[places[pair.cluster], int(pair.truth), int(pair.judged)] += 1
    draw = np.random.default_rng(SEED)
    drawn = (
        kappa(cells[draw.integers(0, len(clusters), len(clusters))].sum(0)) for _ in range(resamples if pairs else 0)
    )
    found = [value for value in drawn if value is not None]
    return None if not found else (float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975)))


def report(pairs: Sequence[Pair], turns: int, not_judged: int, counts: Mapping[str, int]) -> dict[str, Any]:
    """All that is written: over all items, by what they focus on, what it cost and what went wrong."""
    kinds = sorted({pair.kind for pair in pairs})
    return {
        "turns": turns,
        "turns_not_judged": not_judged,
        "all": agreement(pairs) | {"kappa_interval": kappa_interval(pairs)},
        "by_focus": {kind: agreement([pair for pair in pairs if pair.kind == kind]) for kind in kinds},
        "judge": dict(sorted(counts.items())),  # of this start: what was kept from earlier ones cost nothing now
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as text."""
    lines = [
        "{:40s} {:>6s} {:>6s} {:>9s} {:>10s} {:>7s} {:>7s}".format(
            "items that focus on", "items", "hold", "accuracy", "precision", "recall", "kappa"
        )
    ]
    for name, row in [*result["by_focus"].items(), ("all", result["all"])]:
        rates = (_shown(row[rate]) for rate in ("accuracy", "precision", "recall", "kappa"))
        lines.append("{:40s} {:6d} {:6d} {:>9s} {:>10s} {:>7s} {:>7s}".format(name, row["items"], row["hold"], *rates))
    interval, counts = result["all"]["kappa_interval"], collections.Counter(result["judge"])
    if interval is not None:
        lines.append("kappa, 95% interval over turns: {:.3f} to {:.3f}".format(*interval))
    lines.append(f"{result['turns']} turns, {result['turns_not_judged']} of them not judged")
    lines.append(
        f"asked now: {counts['answers']} answers, {counts['prompt_tokens']} tokens in, {counts['completion_tokens']} "
        f"out; {counts['cache_hits']} known before"
    )
    lines += [f"{name}: {count}" for name, count in counts.items() if name.startswith("fault")]
    return "\n".join(lines)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# --- the command ---


def read_tasks(source: str, split: str, count: int) -> list[Task]:
    if source == "tiny":
        return tiny.tasks(split, count, 0)
    tasks = list(read_file_tasks(DataConfig(source=source)))
    return tasks[:count] if count else tasks


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="tiny", help="tiny, or tasks as data.source names them")
    parser.add_argument("--split", default="heldout", help="of the tiny world")
    parser.add_argument("--count", type=int, default=64, help="tasks; 0 is all of a file")
    parser.add_argument(
        "--trajectories", type=Path, help="a run's trajectories.jsonl instead of reference conversations"
    )
    parser.add_argument("--spoilt", type=int, default=2, help="spoilt copies of each reference conversation")
    parser.add_argument("--url", action="append", default=[], help="of the judge; may be given several times")
    parser.add_argument("--model", default="", help="its name there")
    parser.add_argument("--checkpoint", default="", help="instead of --url: a judge in this process")
    parser.add_argument("--max_length", type=int, default=16384, help="tokens of a checkpoint's question and answer")
    parser.add_argument("--slots", type=int, default=16, help="questions that a checkpoint answers side by side")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top_p", type=float, default=0.8)
    parser.add_argument("--max_tokens", type=int, default=4096)
    parser.add_argument("--timeout_s", type=float, default=120.0)
    parser.add_argument("--retries", type=int, default=7)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs") / "judge_agreement")
    return parser


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    args = make_parser().parse_args(arguments)
    tasks = read_tasks(args.source, args.split, args.count)
    if args.trajectories is None:
        cases = of_references(tasks, args.spoilt)
    else:
        cases = of_trajectories({task.task_id: task for task in tasks}, args.trajectories)
    if not cases:
        raise SystemExit("nothing to judge: no turn has a checklist item with a program check")
    options = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    with contextlib.ExitStack() as opened:
        name, asked, wait = asked_model(args, opened)
        cache = args.out / VERDICTS_FILE
        reward = JudgedReward(asked.ask, name=name, cache=cache, options=options, counts=asked.counts)
        opened.callback(reward.close)
        pairs, reasons = judge(reward, cases, wait)
    result = report(pairs, len(cases), len(reasons), asked.counts)
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"judge_name": args.model or args.checkpoint, "options": options}
    write_json_atomic(args.out / RESULT_FILE, about | result)
    print(table(result), *(f"for example: {reason}" for reason in reasons[:1]), sep="\n")
    return result


def asked_model(
    args: argparse.Namespace, opened: contextlib.ExitStack
) -> tuple[str, Endpoint | LocalModel, Callable[[Sequence[Future[Any]]], None]]:
    """The judge's name in the file of verdicts, who is asked, and how to wait for the answers."""
    if args.checkpoint:
        folder = hf.resolve(model_path(args.checkpoint))
        model = local_model(folder, args)
        return json.dumps(fingerprint.of_model(folder)), model, lambda futures: finish(model)
    try:
        settings = EndpointSettings(
            tuple(args.url), args.model, concurrency=args.concurrency, timeout_s=args.timeout_s, retries=args.retries
        )
    except ValueError as error:
        raise SystemExit(f"{error} (--url, --model; or --checkpoint)") from None
    endpoint = Endpoint(settings)
    opened.callback(endpoint.close)
    return args.model, endpoint, show_progress


def local_model(folder: Path, args: argparse.Namespace) -> LocalModel:
    """The checkpoint with a sampler of its own, over all devices."""
    mesh, chat = make_mesh(), load_tokenizer(folder)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"  # CPUs have no fast bfloat16
    config, params = hf.load(folder, mesh, dtype=dtype)
    policy = qwen.make_policy(config, mesh=mesh, compute_dtype=dtype)
    sampler = Sampler(
        policy, slots=args.slots, max_length=args.max_length, mesh=mesh, cache_dtype=dtype,
        buckets=Buckets(tuple(size for size in (128, 512, 2048) if size <= args.max_length), (4,), (args.max_length,)),
        vocab_limit=chat.vocab_size, stop_ids=chat.stop_ids,
    )  # fmt: skip
    model = LocalModel(retries=args.retries)
    model.bind(chat, max_length=args.max_length, thinking=True, sampler=sampler, params=policy.for_decoding(params))
    return model


def finish(model: LocalModel) -> None:
    """Answers all that was asked, and says how far it is."""
    shown = 0
    while model.busy:
        model.step()
        done = model.counts["answers"] + model.counts["given_up"]
        if done >= shown + 100:
            shown = done
            print(f"{done} answers", flush=True)


def show_progress(futures: Sequence[Future[Any]]) -> None:
    """Waits for all, and says how far it is every tenth."""
    for number, future in enumerate(futures, start=1):
        future.exception()
        if number % max(len(futures) // 10, 1) == 0:
            print(f"{number} of {len(futures)} turns", flush=True)


if __name__ == "__main__":
    main()

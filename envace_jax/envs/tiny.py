"""The tiny world: a seeded generator of executable tasks with gold conversations and checklists.

Knows the domains only through their `TOOLS`, `REQUESTS` and `sample_state`; knows nothing of policies or tokens.
Splits: "train" and "heldout" (the domains of RL), "unseen" (the domain that RL never sees) and "pretrain" (all domains,
for the base model). A hash of a task's user texts decides its side, so neither "train" nor "pretrain" shares a request
sequence with "heldout" or "unseen".
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from types import ModuleType

from envace_jax import records
from envace_jax.envs import load_domain, make_environment
from envace_jax.envs.scenes import Scene, Turn
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.types import CheckItem, Json, Message, Task, ToolCall

RL_DOMAINS = ("accounts", "calendar", "shop")
UNSEEN_DOMAINS = ("library",)
SPLITS = {
    "train": (RL_DOMAINS, False),
    "heldout": (RL_DOMAINS, True),
    "unseen": (UNSEEN_DOMAINS, True),
    "pretrain": (RL_DOMAINS + UNSEEN_DOMAINS, False),
}  # split -> (its domains, is it for evaluation)
CALLS = range(2, 6)  # calls over a whole task
TURN_WEIGHTS = {1: 0.35, 2: 0.40, 3: 0.25}
EVALUATION_SHARE = 0.15  # of all request sequences


def tasks(split: str, count: int, seed: int) -> list[Task]:
    """`count` different tasks of a split. The first n of a longer list are the list of n (same split and seed)."""
    if split not in SPLITS:
        raise ValueError(f"no split is called {split!r}; there are: {', '.join(SPLITS)}")
    domains, evaluation = SPLITS[split]
    rng = random.Random(f"{split} {seed}")
    modules = [load_domain(name) for name in domains]
    found: dict[str, Task] = {}
    attempts = 0
    while len(found) < count:
        attempts += 1
        if attempts > 1000 + 200 * count:
            raise ValueError(f"split {split} has too few different tasks for {count}; {len(found)} were found")
        name, module = rng.choice(list(zip(domains, modules, strict=True)))
        state = module.sample_state(rng)
        turns = _write_turns(module, state, rng)
        if turns is None or is_evaluation([turn.text for turn in turns]) != evaluation:
            continue
        task = _make_task(name, module, state, turns)
        found.setdefault(task.task_id, task)
    return list(found.values())


def is_evaluation(user_turns: Sequence[str]) -> bool:
    """Whether these user texts belong to the evaluation side; depends on nothing else."""
    digest = hashlib.sha256("\n".join(user_turns).encode()).digest()
    return int.from_bytes(digest[:4], "big") < EVALUATION_SHARE * 2**32


def conversation(task: Task) -> tuple[Message, ...]:
    """The gold conversation: user, assistant (`tool_calls` of name and arguments) and tool messages in order."""
    if not task.conversation:
        raise ValueError(f"task {task.task_id} has no reference conversation")
    return task.conversation


def final_state(task: Task) -> Json:
    """The environment's state after the gold calls, executed now."""
    environment = make_environment(_environment_of(task))
    for call, _ in task.reference:
        environment.call(call.name, call.arguments)
    return environment.state()


def turn_messages(messages: Iterable[Message]) -> list[list[Message]]:
    """Splits a conversation into what follows each user message."""
    turns: list[list[Message]] = []
    for message in messages:
        if message["role"] == "user":
            turns.append([])
        elif turns:
            turns[-1].append(message)
    return turns


def validate(checked: Iterable[Task]) -> None:
    """Proves, without a model, that tasks are sound; raises ValueError naming the first that is not.

    For every task: executing the gold calls gives exactly the reference results and the gold conversation's tool
    messages, its record can be read again, the gold conversation scores 1 in every turn, and an empty reply scores 0 in
    every turn. A turn with items for a judge is not scored.
    """
    reward = ChecklistReward()
    for task in checked:
        _check_execution(task)
        _check_lengths(task)
        _check_record(task)
        _check_scores(task, reward)


def _check_lengths(task: Task) -> None:
    if not len(turn_messages(conversation(task))) == len(task.user_turns) == len(task.checklist):
        raise ValueError(f"task {task.task_id}: its user turns, checklist and conversation differ in length")


def _check_record(task: Task) -> None:
    """What a file of tasks is refused for: weights, dependences, kinds of checks, and all else of the format."""
    try:
        records.task_from_record(records.record_from_task(task), 0)
    except ValueError as error:
        raise ValueError(f"task {task.task_id}: {str(error).removeprefix('record 0: ')}") from None


def _check_execution(task: Task) -> None:
    """The gold conversation is what the executable environment gives, and ends in the gold state."""
    environment = make_environment(_environment_of(task))
    executed: list[tuple[ToolCall, str]] = []
    for message in conversation(task):
        for call in message.get("tool_calls", ()):
            result = environment.call(call["name"], call["arguments"])
            executed.append((ToolCall(call["name"], call["arguments"]), json.dumps(result, ensure_ascii=False)))
    told = [message["content"] for message in conversation(task) if message["role"] == "tool"]
    if tuple(executed) != tuple(task.reference) or told != [text for _, text in task.reference]:
        raise ValueError(f"task {task.task_id}: its reference calls and results are not what executing them gives")
    if environment.state() != final_state(task):
        raise ValueError(f"task {task.task_id}: its gold conversation does not end in the gold state")


def _check_scores(task: Task, reward: ChecklistReward) -> None:
    """The gold conversation scores 1 in every turn and an empty reply 0."""
    parts = turn_messages(conversation(task))
    for turn, part in enumerate(parts):
        if any(item.check is None for item in task.checklist[turn]):
            continue
        gold = reward.score_turn(task, turn, part).result()
        if abs(gold.reward - 1) > 1e-6 or not gold.proceed:
            raise ValueError(f"task {task.task_id}: the gold solution scores {gold.reward} in turn {turn}")
        idle = reward.score_turn(task, turn, [{"role": "assistant", "content": ""}]).result()
        if idle.reward != 0:
            raise ValueError(
                f"task {task.task_id}: doing nothing scores {idle.reward} in turn {turn}; let items that it "
                "earns, such as no_call, depend on one about the reply (dependence)"
            )


def _environment_of(task: Task) -> Json:
    if task.environment is None:
        raise ValueError(f"task {task.task_id} has no executable environment")
    return task.environment


def _write_turns(module: ModuleType, state: Json, rng: random.Random) -> list[Turn] | None:
    """One to three turns played on a fresh scene, or None where they do not make a task."""
    scene = Scene(module.execute, state, rng)
    (count,) = rng.choices(list(TURN_WEIGHTS), list(TURN_WEIGHTS.values()))
    weights, requests = zip(*module.REQUESTS, strict=True)
    while len(scene.turns) < count:
        (request,) = rng.choices(requests, weights)
        request(scene)
    calls = sum(len(step) for turn in scene.turns for step in turn.steps)
    return scene.turns if calls in CALLS else None


def _make_task(domain: str, module: ModuleType, state: Json, turns: Sequence[Turn]) -> Task:
    messages: list[Message] = []
    reference: list[tuple[ToolCall, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.text})
        for step in turn.steps:
            calls = [{"name": call.name, "arguments": call.arguments} for call, _ in step]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            for call, result in step:
                text = json.dumps(result, ensure_ascii=False)
                messages.append({"role": "tool", "name": call.name, "content": text})
                reference.append((call, text))
        messages.append({"role": "assistant", "content": turn.reply})
    identity = json.dumps([domain, state, messages], sort_keys=True)
    return Task(
        task_id=f"{domain}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}",
        messages=(),
        tools=module.TOOLS,
        user_turns=tuple(turn.text for turn in turns),
        checklist=tuple(_checklist(turn, several=len(turns) > 1) for turn in turns),
        reference=tuple(reference),
        environment={"name": domain, "state": state},
        conversation=tuple(messages),
    )


def _checklist(turn: Turn, several: bool) -> tuple[CheckItem, ...]:
    """Items: each call (0.4 together), each field of its result (0.2 together), the reply (0.4).

    Items about results depend on their call and the reply depends on every call, so that neither counts by luck. In a
    turn without calls, calling nothing counts only together with the right reply.
    """
    pairs = [pair for step in turn.steps for pair in step]
    if not pairs:
        return (
            _reply_item(turn, 0.5, (), several),
            CheckItem(
                question="Did the assistant leave the tools alone?",
                weight=0.5,
                focus_on="assistant.tool_calls",
                pass_condition="No tool is called in this turn.",
                dependence=(0,),
                check={"kind": "no_call"},
            ),
        )
    items = [_call_item(call, 0.4 / len(pairs), several) for call, _ in pairs]
    fields = [(index, field) for index, (_, result) in enumerate(pairs) for field in result]
    for index, field in fields:
        call, result = pairs[index]
        items.append(_result_item(call, field, result[field], 0.2 / len(fields), index))
    items.append(_reply_item(turn, 0.4, tuple(range(len(pairs))), False))
    return tuple(items)


def _call_item(call: ToolCall, weight: float, required: bool) -> CheckItem:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return CheckItem(
        question=f"Did the assistant call {call.name} with {arguments}?",
        weight=weight,
        focus_on="assistant.tool_calls",
        pass_condition="A call has this name and exactly these arguments.",
        required_for_next_turn=required,
        check={"kind": "call", "name": call.name, "arguments": call.arguments},
    )


def _result_item(call: ToolCall, field: str, value: Json, weight: float, index: int) -> CheckItem:
    return CheckItem(
        question=f"Did {call.name} give {field} {json.dumps(value, ensure_ascii=False)}?",
        weight=weight,
        focus_on="tool.content",
        pass_condition="A result of this tool has this field with this value.",
        dependence=(index,),
        check={"kind": "result", "name": call.name, "field": field, "value": value},
    )


def _reply_item(turn: Turn, weight: float, dependence: tuple[int, ...], required: bool) -> CheckItem:
    return CheckItem(
        question=f"Does the final reply say: {' '.join(turn.words)}?",
        weight=weight,
        focus_on="assistant.content.user_visible_reply",
        pass_condition="The final reply of the turn holds every one of these words and numbers.",
        evidence=(turn.reply,),
        required_for_next_turn=required,
        dependence=dependence,
        check={"kind": "reply", "words": list(turn.words)},
    )

"""Records of trajectories as trajectories.jsonl holds them, made up: for tests of the viewer, and for its picture.

PYTHONPATH=. python tests/viewer_records.py WORKDIR [STEPS]
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ITEMS = ("lamp", "sofa", "mirror", "drum", "bucket", "chair")
SYSTEM = "You run a shop. Use the tools; tell the user what was done, in one sentence."
TOKEN = re.compile(r"</?\w+>\n?|<\|im_end\|>|\s?\w{1,5}|\s|[^\w\s]")
EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> "
    "\u202ereversed\u202c \u200f\x00\x07\x1b[31m \u05e9\u05dc\u05d5\u05dd \u2028 &amp; \ufeff \ud83d\ude00 end"
)


def pieces_of(text: str) -> list[str]:
    return TOKEN.findall(text)


def segment(role: str, turn: int, text: str, rng: random.Random, **fields: Any) -> dict[str, Any]:
    pieces = pieces_of(text + "<|im_end|>")
    logprobs = [round(-(rng.random() ** 6) * 4 if piece.strip() else -0.001, 4) for piece in pieces]
    return {
        "role": role, "turn": turn, "finish_reason": "stop", "policy_version": 0, "prompt_length": 120 + 40 * turn,
        "tokens": [sum(map(ord, piece)) % 50_000 for piece in pieces], "logprobs": logprobs, "pieces": pieces,
        "advantage": None, "trained": False, **fields,
    }  # fmt: skip


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def task_of(number: int) -> dict[str, Any]:
    """A task of two turns with its checklist and reference. The first turn's result is a nested value."""
    rng = random.Random(number)
    one, other = rng.sample(ITEMS, 2)
    price, stock = rng.randrange(20, 90, 5), rng.randrange(2, 9)
    listed = {
        "item": one,
        "price": {"amount": price, "currency": "EUR"},
        "stock": [{"place": "front", "count": stock}, {"place": "store", "count": 2 * stock}],
        "note": f"the {one} ships within two days of the order",
    }
    ordered = {"order": {"item": other, "count": 2}, "total": 2 * price, "left": stock}
    said = (f"How much is the {one}, and how many are there?", f"Then order two {other}s.")
    item = {"focus_on": "", "required_for_next_turn": False}
    call = {"kind": "call", "name": "look_up", "arguments": {"item": one}}
    checklist = [
        [
            {"question": f"Is the {one} looked up?", "weight": 0.5, "check": call, **item},
            {"question": f"Does the reply name the price of {price} EUR?", "weight": 0.5, "check": None, **item},
        ],
        [
            {"question": f"Are two {other}s ordered?", "weight": 0.6, "check": None, **item},
            {"question": "Does the reply name the total?", "weight": 0.4, "check": None, **item},
        ],
    ]
    reference = [
        [{"name": "look_up", "arguments": {"item": one}}, json.dumps(listed)],
        [{"name": "order", "arguments": {"item": other, "count": 2}}, json.dumps(ordered)],
    ]
    return {"user_turns": list(said), "checklist": checklist, "reference": reference}


def attempt_of(step: int, number: int, attempt: int) -> dict[str, Any]:
    """One attempt at a task: rehearsed results are sometimes wrong, replies sometimes lack what was asked."""
    rng = random.Random(f"{step} {number} {attempt}")
    task = task_of(number)
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    segments, turns = [], []
    failed = rng.random() < 0.06
    for turn, (said, (call, result)) in enumerate(zip(task["user_turns"], task["reference"], strict=True)):
        value = json.loads(result)
        if rng.random() < 0.35:
            if turn == 0:
                value["price"]["amount"] += rng.choice((-10, 5, 15))
                value["note"] = value["note"].replace("two days", rng.choice(("five days", "one week")))
            else:
                value = {"order": {"item": call["arguments"]["item"], "count": 2, "state": "open"}, "total": 10}
        told = json.dumps(value)
        messages.append({"role": "user", "content": said})
        entry = {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [entry]})
        segments.append(segment("act", turn, call_text(call["name"], call["arguments"]), rng))
        messages.append({"role": "tool", "name": call["name"], "content": told, "rehearsed": True})
        segments.append(segment("rehearse", turn, f"<execution_result>\n{told}\n</execution_result>", rng))
        if failed and turn == 1:
            break
        number_told = value["price"]["amount"] if turn == 0 else value["total"]
        named = rng.random() < 0.7
        reply = f"It costs {number_told} EUR in all." if named else "That is done."
        messages.append({"role": "assistant", "content": reply})
        segments.append(segment("act", turn, reply, rng))
        right = named and told == result
        verdicts = [True, right]
        weights = [item["weight"] for item in task["checklist"][turn]]
        words = "The total is named as asked." if right else f"The reply says {reply!r}, not what was asked for."
        turns.append(
            {
                "reward": sum(w for w, held in zip(weights, verdicts, strict=True) if held),
                "verdicts": verdicts,
                "proceed": True,
                "words": ["", words],
            }
        )
    reward = None if failed else sum(turn["reward"] for turn in turns) / 2
    reason = "fault: EndpointError: no answer within 60 s" if failed else "done"
    return {
        "step": step, "task_id": f"shop-{number:04x}", "group_id": number, "attempt": attempt, "reward": reward,
        "status": "failed" if failed else "ok", "reason": reason, "turns": turns, "messages": messages, "task": task,
        "segments": segments,
    }  # fmt: skip


def group_of(step: int, number: int, attempts: int = 4) -> list[dict[str, Any]]:
    """All attempts at one task, with advantages as rewards less their mean; a group without signal is not trained."""
    alike = number % 7 == 3
    group = [attempt_of(step, number, 0 if alike else attempt) | {"attempt": attempt} for attempt in range(attempts)]
    rewards = [record["reward"] for record in group if record["reward"] is not None]
    mean = sum(rewards) / max(len(rewards), 1)
    for record in group:
        for part in record["segments"] if record["reward"] is not None else ():
            part["advantage"] = record["reward"] - mean
            part["trained"] = abs(part["advantage"]) > 1e-6
            part["policy_version"] = step - 1
    return group


def old(record: dict[str, Any]) -> dict[str, Any]:
    """The record as it was before tasks, pieces, advantages and masks were written."""
    new = {"group_id", "task"}
    kept = {name: value for name, value in record.items() if name not in new}
    kept["turns"] = [{key: value for key, value in turn.items() if key != "words"} for turn in record["turns"]]
    kept["segments"] = [
        {key: value for key, value in part.items() if key not in ("pieces", "advantage", "trained")}
        for part in record["segments"]
    ]
    return kept


def write(workdir: Path, records: Sequence[dict[str, Any]]) -> Path:
    workdir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (workdir / "trajectories.jsonl").write_text("".join(lines))
    return workdir


def run_of(steps: int, groups: int, attempts: int = 4) -> list[dict[str, Any]]:
    return [
        record
        for step in range(1, steps + 1)
        for number in range(groups)
        for record in group_of(step, 16 * step + number, attempts)
    ]


if __name__ == "__main__":
    write(Path(sys.argv[1]), run_of(int((sys.argv[2:] or ["6"])[0]), 4))

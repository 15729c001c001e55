"""Small stand-ins for the rollout's tests: a tiny tokenizer, ids no encoder gives, a task, a bank, a judge."""

from __future__ import annotations

import functools
import re
import tempfile
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from envace_jax.chat import Chat, load_tokenizer, render_call
from envace_jax.episode import Request
from envace_jax.roles import Prompts, rehearsal_target
from envace_jax.types import CheckItem, Segment, Task, ToolCall, TurnScore

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]


@functools.cache
def tiny_chat() -> Chat:
    """A byte-level BPE of a few merges, with Qwen3's control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = "user assistant system name arguments balance transfer done hello error"
    tokenizer.train_from_iterator([words] * 5, trainer)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        return load_tokenizer(folder)


def spelled(text: str) -> list[int]:
    """Ids of the text one byte at a time: it decodes to the text, but encoding the text gives other ids."""
    tokenizer = tiny_chat().tokenizer
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, CONTROL)) + ")", text):
        if part in CONTROL:
            ids.append(tokenizer.token_to_id(part))
        elif part:
            characters = pre_tokenizer.pre_tokenize_str(part)[0][0]
            ids += [tokenizer.token_to_id(character) for character in characters]
    return ids


def prompts(**changes) -> Prompts:
    settings = {"style": "compact", "thinking": False, "max_act_prompt": 50_000, "max_rehearse_prompt": 50_000}
    return Prompts(tiny_chat(), **{**settings, **changes})


def tool(name: str, *arguments: str) -> dict:
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": f"the tool {name}", "parameters": schema}}


def task(turns: int = 1, task_id: str = "bank", **changes) -> Task:
    settings = {
        "messages": ({"role": "system", "content": "You serve a bank."},),
        "tools": (tool("balance", "owner"), tool("deposit", "owner", "amount")),
        "user_turns": tuple(f"turn {turn}, please" for turn in range(turns)),
        "checklist": tuple((CheckItem("did it?", 1.0),) for _ in range(turns)),
        "reference": ((ToolCall("balance", {"owner": "ann"}), '{"balance": 5}'),),
        "environment": {"name": "bank", "state": {"ann": 5}},
    }
    return Task(task_id, **{**settings, **changes})


def calling(*calls: ToolCall, before: str = "") -> str:
    return before + "\n".join(f"<tool_call>\n{render_call(call)}\n</tool_call>" for call in calls)


def answering(result: str) -> str:
    return rehearsal_target(result)


def segment(request: Request, text: str, finish_reason: str = "stop") -> Segment:
    """What a sampler would make of the request by writing `text`, spelled out."""
    tokens = spelled(text) + ([tiny_chat().end_of_message] if finish_reason == "stop" else [])
    logprobs = np.full(len(tokens), -0.5, np.float32)
    return Segment(request.role, request.prompt_tokens, np.asarray(tokens, np.int32), logprobs, finish_reason, 0)


class Bank:
    """An environment of balances; `broken` raises, as a faulty environment does."""

    def __init__(self, spec):
        self.balances = dict(spec["state"])

    def call(self, name, arguments):
        if name == "broken":
            raise ConnectionError("the bank\nis on fire")
        if name == "vague":
            return "not an object"
        if name not in ("balance", "deposit"):
            return {"error_tool_call": {"code": "unknown_tool", "message": name, "details": ""}}
        owner = arguments["owner"]
        if name == "deposit":
            self.balances[owner] = self.balances.get(owner, 0) + int(arguments["amount"])
        return {"balance": self.balances.get(owner, 0)}

    def state(self):
        return dict(self.balances)

    def close(self):
        pass


class Judge:
    """Gives every turn the same score, at once, and remembers what it was asked."""

    def __init__(self, reward: float = 1.0, proceed: bool = True):
        self.score = TurnScore(reward, (proceed,), proceed)
        self.asked: list[tuple[str, int, tuple]] = []

    def score_turn(self, task, turn, messages):
        self.asked.append((task.task_id, turn, tuple(messages)))
        return finished(self.score)


def finished(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future

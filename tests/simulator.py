"""A model outside that plays the tiny world's tools: it reads a REHEARSE prompt and executes the environment."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence

from envace_jax import roles
from envace_jax.envs import make_environment
from envace_jax.types import Task


def played(tasks: Sequence[Task], question: str) -> str:
    """The true result, as JSON text, of the call that a compact prompt's text asks for.

    The task is the one whose first user message and reference examples the text shows; the calls of its history are
    executed first.
    """
    history, call = question.partition("\nHISTORY\n")[2].rpartition("\nCALL\n")[::2]
    history, _, examples = history.partition("\nEXAMPLES\n")
    for task in tasks:
        shown = {f"{roles.render_call(known)} => {result}" for known, result in task.reference}
        if history.split("\n")[0] == f"user: {task.user_turns[0]}" and shown == set(examples.split("\n")):
            environment = make_environment(task.environment)
            for past in re.findall(r'(?m)^(\{"name".*\}) => ', history):
                execute(environment, past)
            return json.dumps(execute(environment, call), ensure_ascii=False)
    raise LookupError(f"no task has this prompt: {question}")


def execute(environment, text: str):
    call = json.loads(text)
    return environment.call(call["name"], call["arguments"])


def answer(tasks: Sequence[Task], body) -> str:
    return roles.rehearsal_target(played(tasks, body["messages"][1]["content"]))


def drawn(text: str) -> int:
    """A number that a text decides."""
    return zlib.crc32(text.encode())

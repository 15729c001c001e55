"""Teaches the tiny base to read notes: `python experiments/make_tiny_reader.py [--out=FOLDER]`.

The shipped base has never seen a note (`Task.note`) and passes it over, so rehearsal at test time cannot help it. Here
its pre-training goes on for some hundred steps in which most walks have one: the calls of the first user turn as
`memory.py` lays them out, in the system text or in the user's message. Notes err at a stated rate, and so does the
demonstrator. Where its own step is another than the note's it looks again: it then finds the right one, or goes by the
note. So a right note spares mistakes and a wrong one makes some; that there is a note says nothing until it is read.
In the last phase notes err as those of rehearsals do, and are read as these deserve: the first message is seldom wrong
and always followed; later ones, whose calls may rest on results that were invented, are often wrong, and never followed
against what the real results say.

The asset stays as it is. A finished phase is kept: an interrupted command goes on after it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import jax
import make_tiny_base as base

from envace_jax import memory, roles
from envace_jax.chat import load_tokenizer
from envace_jax.config import model_path
from envace_jax.envs import imperfect, tiny
from envace_jax.metrics import write_json_atomic
from envace_jax.models import hf
from envace_jax.models.qwen import make_policy
from envace_jax.types import Message, Task, Trajectory

SHIPPED = "asset:tiny_base"
OUT = Path("runs") / "tiny_reader"
ROWS, ROW_LENGTH = 12, 464  # of a batch; the longest walk has 396 tokens, its note some 40
PROGRESS = "phases.json"


@dataclasses.dataclass(frozen=True)
class Phase(base.Phase):
    """A stretch of pre-training with notes. `act_error` is the demonstrator's own rate, with and without a note."""

    turns: int  # of a task that are walked at most; a note tells of the first
    note_share: float  # of walks
    note_error: float  # share of the first messages told of in a note that err
    later_error: float  # share of the messages after them that do
    # Of the steps at which demonstrator and note differ: done as the note says; else the right one is. In the first
    # message of a turn, and in later ones.
    follow: float
    later_follow: float


# First to read at all, from notes that are often wrong and always followed, in the end nearly always: what they say is
# then found nowhere else. Then what notes are worth, and in the end what those of rehearsals are.
PHASES = (
    Phase(
        steps=250, horizon=350, peak=0.5, act_error=0.12, rehearse_error=0.1,
        rehearsed_share=0.05, rehearse_weight=2.0, examples=0.9, accounts=0.35,
        turns=3, note_share=0.9, note_error=0.4, later_error=0.4, follow=1.0, later_follow=1.0,
    ),
    Phase(
        steps=200, horizon=300, peak=0.8, act_error=0.12, rehearse_error=0.1,
        rehearsed_share=0.05, rehearse_weight=2.0, examples=0.9, accounts=0.35,
        turns=1, note_share=0.9, note_error=0.8, later_error=0.8, follow=1.0, later_follow=1.0,
    ),
    Phase(
        steps=700, horizon=700, peak=0.6, act_error=0.12, rehearse_error=0.1,
        rehearsed_share=0.2, rehearse_weight=2.0, examples=0.9, accounts=0.35,
        turns=3, note_share=0.6, note_error=0.2, later_error=0.2, follow=0.5, later_follow=0.5,
    ),
    Phase(
        steps=1200, horizon=1200, peak=0.6, act_error=0.12, rehearse_error=0.1,
        rehearsed_share=0.2, rehearse_weight=2.0, examples=0.9, accounts=0.35,
        turns=2, note_share=0.6, note_error=0.05, later_error=0.6, follow=1.0, later_follow=0.0,
    ),
)  # fmt: skip


def first_turn_steps(task: Task) -> list[Message]:
    """The messages with calls by which the task's own conversation carries out its first user turn."""
    (first, *_) = tiny.turn_messages(tiny.conversation(task))
    return [message for message in first if message.get("tool_calls")]


def noted_steps(task: Task, rng: random.Random, error: float, later: float | None = None) -> list[Message]:
    """What a note tells of the first turn: its messages with calls, the first with probability `error` with a mistake
    and each after it with probability `later` (as the first where it is None).

    One that errs by calling nothing ends the turn, as in an attempt, so those after it are missing too.
    """
    found: list[Message] = []
    for step in first_turn_steps(task):
        told = imperfect.imperfect_step(step, task, rng, later if found and later is not None else error)
        if not told.get("tool_calls"):
            break
        found.append(told)
    return found


def note_text(steps: Sequence[Message]) -> str:
    return memory.compact_lines([call for step in steps for call in roles.message_calls(step)])


def walked_steps(task: Task, noted: Sequence[Message], rng: random.Random, phase: Phase) -> list[Message]:
    """The users' and the assistant's messages of a demonstration by someone who has these notes, or none."""
    found: list[Message] = []
    place, turns, ended = 0, 0, False
    for right in tiny.conversation(task):
        if right["role"] == "user":
            if turns == phase.turns:
                break
            turns, ended = turns + 1, False
            found.append(right)
        elif right["role"] == "assistant" and not ended:
            own = imperfect.imperfect_step(right, task, rng, phase.act_error)
            if place < len(noted) and own.get("tool_calls") != noted[place]["tool_calls"]:
                follow = phase.later_follow if place else phase.follow
                own = noted[place] if rng.random() < follow else right
            found.append(own)
            place += 1
            ended = not own.get("tool_calls")
    return found


def demonstration(prompts: roles.Prompts, task: Task, rng: random.Random, phase: Phase) -> Trajectory:
    """One walk through a task, in the phase's share of cases with a note, which stands in either place."""
    noted = noted_steps(task, rng, phase.note_error, phase.later_error) if rng.random() < phase.note_share else []
    task = dataclasses.replace(task, note=note_text(noted), note_place=rng.choice(("system", "user")))
    return base.demonstration(prompts, task, rng, phase, walked_steps(task, noted, rng, phase))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    shipped, progress = hf.resolve(model_path(SHIPPED)), args.out / PROGRESS
    done = json.loads(progress.read_text())["done"] if progress.is_file() else 0
    config, params = hf.load(args.out if done else shipped)
    chat, policy = load_tokenizer(shipped), make_policy(config)
    prompts = roles.Prompts(chat, style="compact", thinking=False)
    tasks = tiny.tasks("pretrain", 25_000, args.seed)
    params = jax.device_put(params)
    for number, phase in list(enumerate(PHASES))[done:]:
        print(f"phase {number + 1} of {len(PHASES)}", flush=True)
        data = base.batches(prompts, tasks, args.seed + number, phase, demonstration, ROWS, ROW_LENGTH)
        params = base.train(policy, params, data, phase, chat.vocab_size, lambda _: None)
        hf.save(args.out, config, params, tokenizer_dir=shipped)
        write_json_atomic(progress, {"done": number + 1})
    print(f"the reader is in {args.out}")


if __name__ == "__main__":
    main()

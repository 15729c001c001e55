"""The multi-turn workload's script, a pure function of a seed: how long generations are and what stands between them.

A trajectory is ACT (a call), REHEARSE (its result), ACT, ..., ACT (the reply). Scripted are the prompts' parts and the
length of every generation; what is generated comes from the policy. Knows token ids only, no sampler and no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from envace_jax.types import Role

# Glue: what a chat template puts between the parts of a prompt. The two roles frame the same history differently, so
# their prompts share the tools part and no more. Scripted parts use only ids from FIRST_ID on; samples use any.
ACT_OPEN, REHEARSE_OPEN = (1, 2), (1, 3)
ACT_GLUE, REHEARSE_GLUE = ((4, 1, 5), (6, 1, 2)), ((4, 1), (5, 1))  # after (a call, its result)
ANSWER = (7, 1, 3)  # ends a REHEARSE prompt
FIRST_ID = 8


# --- the script ---


@dataclasses.dataclass(frozen=True)
class Ranges:
    """Smallest and largest of each scripted number, both possible, all between them equally likely."""

    prompt: tuple[int, int] = (300, 1500)  # tokens of the first ACT prompt
    calls: tuple[int, int] = (2, 6)  # of an attempt
    act: tuple[int, int] = (16, 256)  # tokens of an ACT segment
    rehearse: tuple[int, int] = (16, 192)  # tokens of a REHEARSE segment
    examples: tuple[int, int] = (32, 128)  # tokens that follow the history in a REHEARSE prompt
    tools_share: tuple[float, float] = (0.5, 0.8)  # of the first prompt


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One trajectory's script. The token parts are the task's; the lengths are the attempt's own."""

    task: int
    attempt: int
    tools: tuple[int, ...]
    question: tuple[int, ...]
    examples: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens to sample in each segment: ACT, REHEARSE, ACT, ..., ACT


def make_script(
    seed: int, *, vocab_size: int, tasks: int = 32, attempts: int = 4, ranges: Ranges | None = None
) -> tuple[Attempt, ...]:
    """The attempts, task by task; neither a task nor an attempt changes with the number of others.

    Raises ValueError for a vocabulary without ids for the scripted parts, or fewer than one task or attempt.
    """
    if vocab_size <= FIRST_ID or tasks < 1 or attempts < 1:
        raise ValueError(
            f"vocab_size {vocab_size}, tasks {tasks}, attempts {attempts}; needs vocab_size > {FIRST_ID}, others >= 1"
        )
    ranges = ranges or Ranges()
    script = []
    for task in range(tasks):
        rng = np.random.default_rng([seed, task])
        body = _between(rng, ranges.prompt) - len(ACT_OPEN)
        shared = max(1, min(body - 1, round(body * rng.uniform(*ranges.tools_share))))
        sizes = (shared, body - shared, _between(rng, ranges.examples))
        tools, question, examples = (tuple(rng.integers(FIRST_ID, vocab_size, size).tolist()) for size in sizes)
        for attempt in range(attempts):
            own = np.random.default_rng([seed, task, attempt])
            count = 2 * _between(own, ranges.calls) + 1
            lengths = tuple(_between(own, ranges.rehearse if i % 2 else ranges.act) for i in range(count))
            script.append(Attempt(task, attempt, tools, question, examples, lengths))
    return tuple(script)


def _between(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))


def role_of(index: int) -> Role:
    return Role.REHEARSE if index % 2 else Role.ACT


def build_prompt(attempt: Attempt, samples: Sequence[np.ndarray]) -> np.ndarray:
    """i32[P], the prompt of segment `len(samples)` after samples i32[C_i] of all segments before it.

    ACT: the append-only stream. REHEARSE: tools, the history before this call, examples, this call; so the prompts of a
    trajectory share a growing prefix.
    """
    index = len(samples)
    if role_of(index) is Role.ACT:
        return _history(attempt, ACT_OPEN, samples, ACT_GLUE)
    history = _history(attempt, REHEARSE_OPEN, samples[:-1], REHEARSE_GLUE)
    return _join([history, attempt.examples, samples[-1], ANSWER])


def _history(
    attempt: Attempt, opening: tuple[int, ...], samples: Sequence[np.ndarray], glue: tuple[tuple[int, ...], ...]
) -> np.ndarray:
    after = [piece for index, tokens in enumerate(samples) for piece in (tokens, glue[index % 2])]
    return _join([attempt.tools, opening, attempt.question, *after])


def _join(pieces: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(piece, np.int32) for piece in pieces])


def segment_sizes(attempt: Attempt) -> list[tuple[int, int]]:
    """(prompt tokens, tokens to sample) of every segment: known before anything is sampled."""
    blanks = [np.zeros(length, np.int32) for length in attempt.lengths]
    return [(len(build_prompt(attempt, blanks[:index])), length) for index, length in enumerate(attempt.lengths)]


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

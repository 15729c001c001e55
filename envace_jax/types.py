"""The data types that pass between modules: frozen, plain, and free of behaviour.

Host types hold Python and numpy values; device types are pytrees whose array fields carry shape and
dtype in a comment. Shape letters: B batch, T time, S cache length, L layers, K kv heads, H head dim,
P prompt tokens, C completion tokens, V vocabulary, D model width.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

Json = Any  # a value that json.dumps accepts
Message = Mapping[str, Any]  # one chat message: {"role": ..., "content": ..., ...}
Params = Any  # pytree of arrays


class Role(enum.IntEnum):
    """Which of the policy's two roles wrote a segment (never a chat message's `role`)."""

    ACT = 0
    REHEARSE = 1


class Need(enum.Enum):
    """What an episode waits for."""

    ACT = "act"  # the policy's next assistant message
    REHEARSE = "rehearse"  # results of the pending calls, played by the policy
    RESPONSE = "response"  # results of the pending calls, from outside
    USER = "user"  # the simulated user's next message
    JUDGE = "judge"  # the score of the user turn that just ended
    NOTHING = "nothing"  # the episode is over


FinishReason = Literal["stop", "length"]
Status = Literal["ok", "failed"]


@dataclasses.dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Json]


@dataclasses.dataclass(frozen=True)
class CheckItem:
    """One checklist item, the authors' fields plus an optional program check.

    `check` is None (needs a judge) or one of
      {"kind": "call", "name": str, "arguments": {...}}            a call with exactly these arguments
      {"kind": "call_among", "name": str, "arguments": {name: [accepted, ...]}}  a call with one of those for each
      {"kind": "result", "name": str, "field": str, "value": json}  a field of that tool's result
      {"kind": "reply", "words": [str, ...]}                        words of the turn's final reply
      {"kind": "no_call"}                                           no tool is called in the turn
      {"kind": "not_called", "names": [str, ...]}                   none of these tools is called in the turn
    """

    question: str
    weight: float
    focus_on: str = ""
    pass_condition: str = ""
    failure_examples: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()  # the snippets
    required_for_next_turn: bool = False
    dependence: tuple[int, ...] = ()
    check: Mapping[str, Json] | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """A conversation to solve. `reference` holds (call, result text) in order, all turns together.

    With a `scenario` a simulated user answers every reply, all of it one turn that its end or a limit ends:
    `user_turns` is then only the opening message, or one empty text where the simulated user gives that too.
    Without `user_turns` the task is to go on from where `messages` end, a user's message or tool results: one turn.
    """

    task_id: str
    messages: tuple[Message, ...]  # the system message, if any, and what was said before the first user turn
    tools: tuple[Mapping[str, Json], ...]  # OpenAI function schemas
    user_turns: tuple[str, ...]
    checklist: tuple[tuple[CheckItem, ...], ...]  # [turn][item]
    reference: tuple[tuple[ToolCall, str], ...] = ()
    environment: Mapping[str, Json] | None = None  # {"name": ..., "state": ...} where executable
    conversation: tuple[Message, ...] = ()  # the full reference conversation after the system message, if known
    scenario: str = ""  # what a simulated user is told, its system message; "" where user turns are fixed
    # What the policy alone reads, in its prompts to ACT: no message of the conversation, which tools, users and judges
    # are told. At the end of the system text, or of what the user or the tools said last.
    note: str = ""
    note_place: Literal["system", "user"] = "system"


@dataclasses.dataclass(frozen=True)
class TurnScore:
    """A judged user turn: weights held (in [0, 1]), one verdict per item, may the next turn begin."""

    reward: float
    verdicts: tuple[bool, ...]
    proceed: bool
    # What a judge said of each item, "" where a program checked; () where nobody told. No part of the score.
    words: tuple[str, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Segment:
    """One generation by the policy in one role."""

    role: Role
    prompt_tokens: np.ndarray  # i32[P]
    tokens: np.ndarray  # i32[C], the sampled ids, the stop id included
    logprobs: np.ndarray  # f32[C], the sampler's, at the sampling temperature
    finish_reason: FinishReason
    policy_version: int
    turn: int = 0
    cached_tokens: int = 0  # of the prompt, found in a kept cache


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """All segments of one attempt at a task. `failed`: an outside fault; masked, never scored 0."""

    task_id: str
    group_id: int  # attempts at one task share it
    attempt: int
    segments: tuple[Segment, ...]
    reward: float  # in [0, 1]; nan when status is "failed"
    status: Status
    reason: str  # why it ended: "done", "malformed_call", "rehearsal_error", "required_item", "length", ...
    messages: tuple[Message, ...] = ()  # the conversation as it went, user messages included
    turn_scores: tuple[TurnScore, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of B sequences. Sequence b holds positions 0 .. lengths[b]-1.

    The layout of k and v is the policy's: stacked [L, B, S, K, H] where it scans its layers; where they are written
    out, an array for each layer, k [B, K, H, S] and v [B, K, S, H], as a single query reads them fastest.
    """

    k: Any
    v: Any
    lengths: jax.Array  # i32[B]
    # What the policy looks up by position instead of computing it for every token; it covers as many as the cache or
    # more. None: it computes.
    by_position: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of B sequences in pages that they may share. Sequence b holds positions 0 .. lengths[b]-1.

    Numbers of pages count within the part that a shard of the sequences has; those below 0 name none.
    """

    pages: jax.Array  # [L, pages, positions of a page, 2 K, H], keys at even and values at odd heads
    table: jax.Array  # i32[B, M], the pages of each sequence in order
    head: jax.Array  # i32[B], holds what the first page that is written keeps: itself, or one to copy from
    lengths: jax.Array  # i32[B]
    by_position: Any = None  # as in KVCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Packed training rows. Entry t of the per-token fields speaks of *predicting* tokens[:, t]."""

    tokens: jax.Array  # i32[B, T]
    positions: jax.Array  # i32[B, T], restart at 0 in every packed sequence
    sequence_ids: jax.Array  # i32[B, T], 1, 2, ... within a row; 0 is padding
    loss_mask: jax.Array  # bool[B, T]; each run of True is one whole segment
    advantages: jax.Array  # f32[B, T]
    old_logprobs: jax.Array  # f32[B, T], the sampler's; 0 where loss_mask is False
    role: jax.Array  # i32[B, T], a Role where loss_mask is True
    # i32[B, T], the last sequence that reads a token: those numbered from its own to this one do. None where no row
    # shares a beginning, so that a token is read by its own sequence alone.
    last_readers: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    step: jax.Array  # i32[]
    params: Params
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Policy:
    """A language model as pure functions.

    `apply(params, tokens, positions, sequence_ids, cache, last_readers=None) -> (hidden, cache)`: tokens, positions,
    sequence_ids and last_readers are i32[B, T]; hidden is [B, T, D]. Without a cache a token attends to earlier tokens
    of its own sequence id, and to those that last_readers lets its sequence read (`TrainBatch`). With a cache each row
    is one sequence, the tokens with a non-zero sequence id (a prefix of the row) are written at cache.lengths[b]
    onwards, and lengths grow by their number.
    `logits(params, hidden) -> f32[..., V]`. `head(params) -> [D, V]` gives the output projection for
    chunked log-probabilities. `init_cache(slots, length, dtype) -> KVCache`.
    `init_pages(pages, page_size, length, dtype) -> (pages, by_position)` gives what a PagedCache of empty pages and
    sequences of up to `length` is made of; `apply` takes that as well.
    `for_decoding(params) -> params` gives what the functions above read fastest, with the same results, while the
    parameters stay: cast, fused, a tied head transposed, layers apart. To be made once per update, not to be
    differentiated.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[..., tuple[jax.Array, Any]]
    logits: Callable[[Params, jax.Array], jax.Array]
    head: Callable[[Params], jax.Array]
    for_decoding: Callable[[Params], Params]
    init_cache: Callable[..., KVCache]
    init_pages: Callable[..., tuple[jax.Array, Any]]
    vocab_size: int  # V, rows of the embedding (at least the tokenizer's length)
    # Whether `apply` takes `totals`, sums of gradients like params["layers"] in float32: then, without a cache, what
    # differentiation gives for params["layers"] is the totals plus the gradient, added where the totals lie.
    adds_gradients: bool = False
    # With LoRA: key -> adapters, which are trained while the other parameters stay (`lora.joined` puts them together).
    init_adapters: Callable[[jax.Array], Params] | None = None


MessageList = Sequence[Message]

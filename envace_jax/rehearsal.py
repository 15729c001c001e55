"""Private rehearsal at test time: attempts that the policy plays and answers itself, their memory, then one real run.

    memories = rehearse(player, tasks, settings, prompts=prompts, limits=limits, seed=0)
    ready = [with_memory(task, memory.text, settings) for task, memory in zip(tasks, memories)]
    rollout(..., ready, responder=Real(make_environment), ...)

Parallel attempts know nothing of each other and are summed up together. Sequential ones each read the memory of those
before, which the policy revises after every attempt. Only the user turn that is due is rehearsed: later ones are not
known. A rehearsal gets what the policy itself may read of a task and nothing else (`private_view`); it calls no
environment, asks no judge and no user, and all that comes of it is the memory, in the committed run's ACT prompt.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from envace_jax import memory as written
from envace_jax.episode import Limits
from envace_jax.responders import Rehearsed
from envace_jax.rewards import Unscored
from envace_jax.roles import Prompts, message_calls
from envace_jax.rollout import Player, Progress, rollout
from envace_jax.sampling import SampleRequest, sample_all
from envace_jax.types import Json, Message, Segment, Task, Trajectory

MODES = ("none", "parallel", "sequential")
# Streams of random numbers that no training step, evaluation or judge uses.
ATTEMPT_STREAM, MEMORY_STREAM = -4, -5

OnSegment = Callable[[str, int, Segment], None]  # (task id, attempt, what was just sampled)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a task is rehearsed.

    `max_tokens` bounds what is sampled for one task, attempts and memory together; 0: only the limits do. `memory` says
    who writes it: "written", the policy; "transcript", nobody: the attempts as they went. Where the memory stands in
    the committed run's prompt is `placement`: at the end of the system text, or of what the user or the tools said
    last.
    """

    mode: Literal["none", "parallel", "sequential"] = "parallel"
    n: int = 4  # attempts
    placement: Literal["system", "user"] = "system"
    memory: Literal["written", "transcript"] = "written"
    max_tokens: int = 0
    memory_tokens: int = 1024  # the most that a memory may have, in the compact style that are sampled for it
    temperature: float = 1.0  # of attempts
    top_p: float = 1.0
    memory_temperature: float = 0.0  # of the memory; 0 is greedy

    def __post_init__(self) -> None:
        accepted = {"mode": MODES, "placement": ("system", "user"), "memory": ("written", "transcript")}
        for name, values in accepted.items():
            if getattr(self, name) not in values:
                raise ValueError(f"rehearsal {name}={getattr(self, name)!r} is unknown; accepted: {', '.join(values)}")
        for name, least in (("n", 1), ("max_tokens", 0), ("memory_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"rehearsal {name}={getattr(self, name)} must be at least {least}")
        if not (self.temperature >= 0 and self.memory_temperature >= 0 and 0 < self.top_p <= 1):
            raise ValueError("a rehearsal needs temperatures of at least 0, and 0 < top_p <= 1")

    @property
    def reserve(self) -> int:
        """Tokens of the budget that attempts leave to the memory."""
        return min(self.memory_tokens, self.max_tokens // (self.n + 1)) if self.memory == "written" else 0


@dataclasses.dataclass(frozen=True)
class Memory:
    """What came of a rehearsal. An empty text is no memory: no attempt began, or nothing readable was written."""

    text: str
    attempts: tuple[Trajectory, ...] = ()
    prompt_tokens: int = 0  # read by all generations together
    completion_tokens: int = 0  # sampled
    cached_tokens: int = 0  # of the prompts', found in kept caches


def parse(text: str, **changes: Any) -> Settings:
    """Settings from a command line's MODE[:N], such as "parallel:4". Raises ValueError."""
    mode, colon, count = text.partition(":")
    if mode not in MODES or (colon and not (count.isdecimal() and int(count))):
        raise ValueError(f"rehearsal {text!r} is not MODE or MODE:N; MODE is one of {', '.join(MODES)}, N at least 1")
    return Settings(mode=mode, **({"n": int(count)} if colon else {}), **changes)  # type: ignore[arg-type]


def rehearse(
    player: Player,
    tasks: Sequence[Task],
    settings: Settings,
    *,
    prompts: Prompts,
    limits: Limits,
    seed: int,
    progress: Progress | None = None,
    on_segment: OnSegment | None = None,
    cache: Cache | None = None,
    after: Sequence[Memory] | None = None,
) -> list[Memory]:
    """A memory for each task, by the player's own attempts at all of them in one batch.

    A memory depends on the task, the settings, the seed and the policy alone, not on the tasks beside it. A task that
    stands twice is rehearsed once, and those that `cache` holds are not rehearsed again. With `after`, what came of the
    same tasks, mode and seed with fewer attempts and without a budget, only the further attempts are made; the result
    is the same. Mode "none" gives empty memories. Raises ValueError for a task whose first user message is still to
    come, and for different tasks of one id: their random numbers would depend on which comes first.
    """
    if settings.mode == "none":
        return [Memory("") for _ in tasks]
    if after is not None and len({len(memory.attempts) for memory in after}) > 1:
        raise ValueError("a rehearsal cannot go on from memories of different numbers of attempts")
    keys = [_key(task, settings, seed) for task in tasks]
    names = {key: task.task_id for key, task in zip(keys, tasks, strict=True)}
    repeated = [name for name, count in collections.Counter(names.values()).items() if count > 1]
    if repeated:
        raise ValueError(f"different tasks to rehearse have one id, {repeated[0]!r}")
    known = {} if cache is None else {key: memory for key in names if (memory := cache.get(key)) is not None}
    new = {
        key: _Rehearsal(private_view(task), settings).after(None if after is None else after[place])
        for place, (key, task) in enumerate(zip(keys, tasks, strict=True))
        if key not in known
    }
    stage = _Stage(player, settings, prompts, limits, seed, progress, on_segment)
    stage.rehearse(list(new.values()))
    known |= {key: rehearsal.result() for key, rehearsal in new.items()}
    if cache is not None:
        for key in names:
            cache.put(key, known[key])
    return [known[key] for key in keys]


def _key(task: Task, settings: Settings, seed: int) -> str:
    """Of all that a memory depends on beside the policy."""
    known = json.dumps([private_view(task), settings, seed], default=vars, sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()


def private_view(task: Task) -> Task:
    """The task as far as a policy that is about to answer may know it: what was said, and the turn that is due.

    Without checklist, reference, environment, the conversation that was recorded and what users say later.
    """
    if task.user_turns and not task.user_turns[0]:
        raise ValueError(
            f"task {task.task_id!r} begins with a user who has not spoken; there is nothing to rehearse yet"
        )
    return Task(task.task_id, task.messages, task.tools, task.user_turns[:1], checklist=((),))


def with_memory(task: Task, memory_text: str, settings: Settings) -> Task:
    """The task that is then played for real, once: the same, with the memory for the policy alone to read."""
    return dataclasses.replace(task, note=memory_text, note_place=settings.placement)


def task_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Json]], task_id: str) -> Task:
    """The task to go on with an OpenAI-style conversation that ends with a user's message or with tool results.

    Contents are texts, or lists of text parts; arguments of calls are objects or their JSON text. Raises ValueError for
    anything else.
    """
    system: list[str] = []
    said: list[Message] = []
    for place, message in enumerate(messages):
        role, content = message.get("role"), _text(message.get("content"), f"messages[{place}].content")
        if role == "assistant":
            _check_calls(message, f"messages[{place}].tool_calls")
        if role in ("system", "developer"):
            system.append(content)
        elif role in ("user", "assistant", "tool"):
            said.append({**message, "content": content})
        else:
            raise ValueError(f"messages[{place}].role is {role!r}; accepted: system, developer, user, assistant, tool")
    if not said or said[-1]["role"] not in ("user", "tool"):
        raise ValueError("messages must end with a user's message or with tool results")
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return Task(task_id, (*head, *said), tuple(tools), (), checklist=((),))


def _check_calls(message: Message, where: str) -> None:
    try:
        fine = all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in message_calls(message))
    except (ValueError, KeyError, TypeError, AttributeError):
        fine = False
    if not fine:
        raise ValueError(f"{where} are not calls with a name and an object of arguments, or its JSON text")


def _text(content: Json, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ValueError(f"{where} is neither a text nor a list of text parts")


class Cache:
    """Memories for one policy, by all else that they depend on; the least recently used go first.

    Args:
      most: memories that are kept.
      most_tokens: sampled tokens that these may have together, attempts counted in.
    """

    def __init__(self, most: int = 4096, most_tokens: int = 1 << 22):
        self._most, self._most_tokens = most, most_tokens
        self._memories: collections.OrderedDict[str, Memory] = collections.OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._memories)

    def get(self, key: str) -> Memory | None:
        if key in self._memories:
            self._memories.move_to_end(key)
        return self._memories.get(key)

    def put(self, key: str, memory: Memory) -> None:
        self._drop(key)
        self._memories[key] = memory
        self._tokens += memory.completion_tokens
        while len(self._memories) > self._most or self._tokens > self._most_tokens:
            self._drop(next(iter(self._memories)))

    def _drop(self, key: str) -> None:
        if key in self._memories:
            self._tokens -= self._memories.pop(key).completion_tokens


@dataclasses.dataclass
class _Rehearsal:
    """One task's rehearsal under way."""

    task: Task
    settings: Settings
    text: str = ""
    attempts: list[Trajectory] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def after(self, earlier: Memory | None) -> _Rehearsal:
        """The same, with what an earlier one with fewer attempts left. Raises ValueError where it had more."""
        if earlier is None:
            return self
        if len(earlier.attempts) > self.settings.n or self.settings.max_tokens:
            raise ValueError(
                f"a rehearsal of n={self.settings.n} cannot go on from {len(earlier.attempts)} attempts, "
                f"or with max_tokens={self.settings.max_tokens}"
            )
        self.attempts = list(earlier.attempts)
        if self.settings.mode == "sequential":
            self.text = earlier.text
            self.count(earlier.prompt_tokens, earlier.completion_tokens, earlier.cached_tokens)
        else:  # the earlier memory is no part of this one
            self.count_attempts(self.attempts)
        return self

    def count_attempts(self, attempts: Sequence[Trajectory]) -> None:
        for segment in (segment for attempt in attempts for segment in attempt.segments):
            self.count(len(segment.prompt_tokens), len(segment.tokens), segment.cached_tokens)

    def share(self, attempts: int) -> int | None:
        """The budget of each of the next attempts; 0: no bound, None: there is nothing left for them."""
        if not self.settings.max_tokens:
            return 0
        left = self.settings.max_tokens - self.settings.reserve - self.completion_tokens
        return max(left, 0) // attempts or None

    def count(self, read: int, sampled: int, cached: int) -> None:
        self.prompt_tokens += read
        self.completion_tokens += sampled
        self.cached_tokens += cached

    def result(self) -> Memory:
        counts = (self.prompt_tokens, self.completion_tokens, self.cached_tokens)
        return Memory(self.text, tuple(self.attempts), *counts)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """Where rehearsals are played, many tasks at once."""

    player: Player
    settings: Settings
    prompts: Prompts
    limits: Limits
    seed: int
    progress: Progress | None
    on_segment: OnSegment | None

    def rehearse(self, rehearsals: Sequence[_Rehearsal]) -> None:
        """All attempts that the settings ask for, and the memories."""
        made = min((len(rehearsal.attempts) for rehearsal in rehearsals), default=0)
        if self.settings.mode == "parallel":
            if made < self.settings.n:
                self.play(rehearsals, self.settings.n - made, made)
            self.remember(rehearsals)
            return
        for attempt in range(made, self.settings.n):
            self.play(rehearsals, 1, attempt)
            self.remember([rehearsal for rehearsal in rehearsals if len(rehearsal.attempts) > attempt])

    def play(self, rehearsals: Sequence[_Rehearsal], attempts: int, first: int = 0) -> None:
        """Attempts at all tasks whose budget allows any, each with what is remembered so far."""
        shares = [(rehearsal, rehearsal.share(attempts)) for rehearsal in rehearsals]
        able = [(rehearsal, share) for rehearsal, share in shares if share is not None]
        if not able:
            return
        played = self._rollout(
            [rehearsal for rehearsal, _ in able], [share for _, share in able], attempts=attempts, first_attempt=first,
            prompts=self.prompts, step=ATTEMPT_STREAM, temperature=self.settings.temperature,
            top_p=self.settings.top_p, on_segment=self._told([rehearsal.task for rehearsal, _ in able]),
        )  # fmt: skip
        for place, (rehearsal, _) in enumerate(able):
            own = played[place * attempts : (place + 1) * attempts]
            rehearsal.attempts += own
            rehearsal.count_attempts(own)

    def _rollout(self, rehearsals: Sequence[_Rehearsal], budgets: Sequence[int], **how: Any) -> list[Trajectory]:
        """Attempts in the rehearsed world, each with what is remembered so far."""
        ready = [with_memory(rehearsal.task, rehearsal.text, self.settings) for rehearsal in rehearsals]
        return rollout(
            self.player.sampler, self.player.params, ready, responder=Rehearsed(), reward=Unscored(),
            limits=self.limits, seed=self.seed, token_budgets=budgets, progress=self.progress, **how,
        )  # fmt: skip

    def remember(self, rehearsals: Sequence[_Rehearsal]) -> None:
        """Makes or revises the memory of all attempts so far."""
        begun = [rehearsal for rehearsal in rehearsals if _begun(rehearsal)]
        if self.settings.memory == "transcript" or self.prompts.style == "compact":
            for rehearsal in begun:
                rehearsal.text = written.transcript(rehearsal.task, _begun(rehearsal), self.prompts)
        if self.settings.memory == "written":
            (self.replay if self.prompts.style == "compact" else self.write)(begun)

    def write(self, rehearsals: Sequence[_Rehearsal]) -> None:
        """Has the policy write the memories."""
        requests = {}
        for place, rehearsal in enumerate(rehearsals):
            request = self._memory_request(place, rehearsal)
            if request is not None:
                requests[place] = request
        for sample in sample_all(self.player.sampler, self.player.params, list(requests.values())):
            rehearsal = rehearsals[sample.request_id]
            read = len(requests[sample.request_id].prompt_tokens)
            rehearsal.count(read, len(sample.tokens), sample.cached_tokens)
            said = self.prompts.chat.decode(sample.tokens.tolist())
            rehearsal.text = written.read(said) or rehearsal.text

    def replay(self, rehearsals: Sequence[_Rehearsal]) -> None:
        """Has a policy that can only act play its task once more with the memory so far, whose place the calls take.

        A whole turn: of what follows from a first result the first message alone would tell nothing.
        """
        able = [rehearsal for rehearsal in rehearsals if self._memory_room(rehearsal) > 0]
        if not able:
            return
        played = self._rollout(
            able, [self._memory_room(rehearsal) for rehearsal in able], attempts=1,
            first_attempt=len(able[0].attempts), prompts=dataclasses.replace(self.prompts, thinking=False),
            step=MEMORY_STREAM, temperature=self.settings.memory_temperature, top_p=1.0,
        )  # fmt: skip
        for rehearsal, last in zip(able, played, strict=True):
            rehearsal.count_attempts([last])
            rehearsal.text = written.replayed(rehearsal.task, last, rehearsal.text)

    def _memory_room(self, rehearsal: _Rehearsal) -> int:
        """The most tokens that may be sampled for its memory."""
        room = min(self.settings.memory_tokens, self.limits.act_context // 2)  # the attempts must have room too
        if self.settings.max_tokens:
            room = min(room, self.settings.max_tokens - rehearsal.completion_tokens)
        return room

    def _memory_request(self, place: int, rehearsal: _Rehearsal) -> SampleRequest | None:
        """What asks the policy for its memory; None where no token is left or no prompt fits."""
        room, attempts = self._memory_room(rehearsal), _begun(rehearsal)
        if room < 1:
            return None
        prompt = written.question(
            rehearsal.task, attempts, rehearsal.text, self.prompts, self.limits.act_context - room
        )
        if prompt is None:
            return None
        task_hash = zlib.crc32(rehearsal.task.task_id.encode("utf-8")) & 0x7FFFFFFF
        key = (self.seed, MEMORY_STREAM, task_hash, len(rehearsal.attempts))
        return SampleRequest(place, prompt, room, key, self.settings.memory_temperature, 1.0)

    def _told(self, tasks: Sequence[Task]) -> Callable[[int, int, Segment], None] | None:
        tell = self.on_segment
        if tell is None:
            return None
        return lambda position, attempt, segment: tell(tasks[position].task_id, attempt, segment)


def _begun(rehearsal: _Rehearsal) -> list[Trajectory]:
    return [attempt for attempt in rehearsal.attempts if attempt.segments]

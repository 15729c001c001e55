"""Who plays a benchmark's conversations in this process: a model's sampler, or a script; both by `rollout()`.

A policy's `play` takes cases, and tells of each conversation when it is over. Knows no benchmark and no scores.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from envace_jax.benchmarks import Case, Step
from envace_jax.chat import Chat
from envace_jax.envs import Environment, load_process, make_environment
from envace_jax.episode import Limits
from envace_jax.evaluate import SUCCESS_STREAM
from envace_jax.futures import done, then
from envace_jax.rehearsal import Settings, rehearse, with_memory
from envace_jax.responders import Real
from envace_jax.rewards import Reward, Unscored
from envace_jax.roles import ERROR_KEY, Prompts
from envace_jax.rollout import Player, Progress, rollout
from envace_jax.sampling import Sample, SampleRequest, SamplerStats
from envace_jax.types import Json, MessageList, Need, Task, ToolCall, Trajectory
from envace_jax.users import User

TOKENIZER = "asset:tiny_base"  # of scripts, where no model brings one
NOT_EXECUTED = '{"result": "not executed"}'  # of a message that is the last one anyway
ROOM = 1 << 22  # tokens that a script may take: limits are no matter of what it shows
# A conversation that is over: (its case, it, the final state of an environment in this process, what was rehearsed).
OnEnd = Callable[[Case, Trajectory, Json, Json], None]


class Policy(Protocol):
    """Who is measured. `about` says which one it is, as JSON values: runs that differ in it are different runs."""

    @property
    def about(self) -> Mapping[str, Json]: ...

    def play(
        self, cases: Sequence[Case], *, seed: int, steps: int, reward: Reward | None, on_end: OnEnd, progress: Progress
    ) -> None:
        """Plays every case once; all of `cases` are asked for one message, or none is."""


class TrialUser(Protocol):
    """A simulated user of several trials."""

    def of_trial(self, seed: int) -> User:
        """The user of the trial with that seed, who owes nothing to what was said in another."""
        ...


@dataclasses.dataclass(frozen=True)
class Local:
    """A policy in this process; with `rehearsal` it rehearses every case before it plays it."""

    about: Mapping[str, Json]
    player: Player
    prompts: Prompts
    limits: Limits
    temperature: float = 0.6
    top_p: float = 0.95
    user: TrialUser | None = None
    rehearsal: Settings | None = None

    def play(
        self, cases: Sequence[Case], *, seed: int, steps: int, reward: Reward | None, on_end: OnEnd, progress: Progress
    ) -> None:
        """As `Policy.play`. With rehearsal a few slots full of cases at a time, so that a run that is killed loses
        little: first all of their rehearsals, then all of their conversations."""
        size = len(cases) if self.rehearsal is None else 4 * self.player.sampler.slots
        user = None if self.user is None else self.user.of_trial(seed)
        for first in range(0, len(cases), max(size, 1)):
            self._play_some(cases[first : first + size], seed, steps, reward, on_end, progress, user)

    def _play_some(
        self, cases: Sequence[Case], seed: int, steps: int, reward: Reward | None, on_end: OnEnd, progress: Progress,
        user: User | None,
    ) -> None:  # fmt: skip
        one_message = bool(cases) and cases[0].one_message
        tasks = [case.task for case in cases]
        notes: list[Json] = [None] * len(cases)
        if self.rehearsal is not None:
            tasks, notes = self._rehearsed(tasks, seed, progress, user)
        responder = Unexecuted() if one_message else Real(benign_environment)
        limits = dataclasses.replace(
            self.limits, assistant_turns=1 if one_message else steps, generations=max(steps, self.limits.generations)
        )

        def ended(number: int, trajectory: Trajectory) -> None:
            state = final_state(responder, number, cases[number].task, trajectory)
            on_end(cases[number], trajectory, state, notes[number])

        try:
            rollout(
                self.player.sampler, self.player.params, tasks, attempts=1, responder=responder,
                reward=Unscored() if reward is None else reward, prompts=self.prompts, limits=limits, seed=seed,
                step=SUCCESS_STREAM, temperature=self.temperature, top_p=self.top_p if self.temperature else 1.0,
                user=user, progress=progress, on_end=ended,
            )  # fmt: skip
        finally:
            responder.close()

    def _rehearsed(
        self, tasks: Sequence[Task], seed: int, progress: Progress, user: User | None
    ) -> tuple[list[Task], list[Json]]:
        """The tasks with what the policy remembers of rehearsing them, and what is to be told of that.

        A task whose user could not be had is left as it is: it will meet the same fault where that masks it alone.
        """
        played: list[Task] = _begun(tasks, user)
        told: list[Json] = [None] * len(tasks)
        places = [place for place, task in enumerate(played) if not task.user_turns or task.user_turns[0]]
        assert self.rehearsal is not None
        memories = rehearse(
            self.player, [played[place] for place in places], self.rehearsal, prompts=self.prompts, limits=self.limits,
            seed=seed, progress=progress,
        )  # fmt: skip
        for place, found in zip(places, memories, strict=True):
            played[place] = with_memory(played[place], found.text, self.rehearsal)
            counts = {name: getattr(found, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
            told[place] = {"memory": found.text, **counts}
        return played, told


def _begun(tasks: Sequence[Task], user: User | None) -> list[Task]:
    """The tasks with their first user messages, which a simulated user may have to say: what is not known yet cannot
    be rehearsed."""
    begun = list(tasks)
    asked = {
        place: user.answer(task, task.messages)
        for place, task in enumerate(tasks)
        if user is not None and task.scenario and not task.user_turns[0]
    }
    for place, future in asked.items():
        try:
            begun[place] = dataclasses.replace(begun[place], user_turns=(future.result() or "",))
        except Exception:  # of whatever the user is
            continue
    return begun


def final_state(responder: Any, number: int, task: Task, trajectory: Trajectory) -> Json:
    """The state of a trajectory's environment, where it is one in this process and nothing failed: an environment that
    did not open, or could not say its state, has masked the trajectory."""
    if (
        trajectory.status != "ok"
        or task.environment is None
        or load_process(task.environment["name"]) is not None
        or isinstance(responder, Unexecuted)
    ):
        return None
    return responder.final_state(number)


class Unexecuted:
    """Answers calls that nobody reads the results of."""

    needs = Need.RESPONSE
    prompted = False

    def respond(
        self, trajectory_index: int, task: Task, call: ToolCall, messages: MessageList, act_text: str = ""
    ) -> Future[str]:
        return done(NOT_EXECUTED)

    def end(self, trajectory_index: int, task: Task) -> None:
        pass

    def close(self) -> None:
        pass


def benign_environment(spec: Mapping[str, Json]) -> Environment:
    """A task's environment. Where it is a benchmark's, a call that cannot be executed has an ordinary error for a
    result, as in the benchmark: in a rollout for training it would end the conversation."""
    environment = make_environment(spec)
    return _Benign(environment) if load_process(spec["name"]) is not None else environment


class _Benign:
    def __init__(self, environment: Environment):
        self._environment = environment

    def call(self, name: str, arguments: Mapping[str, Json]) -> Json | Future[Json]:
        result = self._environment.call(name, arguments)
        return then(result, _ordinary) if isinstance(result, Future) else _ordinary(result)

    def state(self) -> Json | Future[Json]:
        return self._environment.state()

    def close(self) -> None:
        self._environment.close()


def _ordinary(result: Json) -> Json:
    if isinstance(result, dict) and isinstance(result.get(ERROR_KEY), dict):
        return {"error": result[ERROR_KEY].get("message") or "the call cannot be executed"}
    return result


# --- scripts ---


def noop(case: Case) -> list[Step]:
    """A policy that never does anything."""
    return ["I have done nothing."]


def garbage(case: Case) -> list[Step]:
    """A policy that calls what is not there, and says nothing of use."""
    return [(ToolCall("qzx_garbage", {"zzz": -1}),), "qzx zzz"]


def scripted(
    name: str, cases: Sequence[Case], script: Callable[[Case], Sequence[Step] | None], chat: Chat
) -> tuple[Local, tuple[Case, ...]]:
    """The policy called `name` that writes what `script` says of each case, a message after the other and then the last
    one again, and the cases that it has words for."""
    written = {case.case_id: script(case) for case in cases}
    known = tuple(case for case in cases if written[case.case_id] is not None)
    sampler = Script({_hash(case.task.task_id): written[case.case_id] or () for case in known}, chat)
    prompts = Prompts(chat, thinking=False, max_act_prompt=ROOM, max_rehearse_prompt=ROOM)
    limits = Limits(user_turns=1000, parallel_calls=1000, act_context=ROOM, act_response=ROOM // 2, rehearse_response=1)
    player = Player(sampler, None)  # type: ignore[arg-type]  # all of a sampler that a rollout asks for
    return Local({"policy": name}, player, prompts, limits, 0.0, 1.0, Curt()), known


def _hash(task_id: str) -> int:
    return zlib.crc32(task_id.encode("utf-8")) & 0x7FFFFFFF  # as a rollout names a task in its keys


class Script:
    """In place of a sampler: writes messages that are known beforehand. A request's keys say which task's and which."""

    slots, max_length = 64, 2 * ROOM

    def __init__(self, messages: Mapping[int, Sequence[Step]], chat: Chat):
        self._messages, self._chat = messages, chat
        self.stop_ids = chat.stop_ids
        self.stats = SamplerStats()
        self._waiting: collections.deque[SampleRequest] = collections.deque()

    def reset(self) -> None:
        self._waiting.clear()

    def free(self) -> int:
        return self.slots - len(self._waiting)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self._waiting += requests

    def step(self, params: Any) -> list[Sample]:
        done = [self._written(request) for request in self._waiting]
        self._waiting.clear()
        return done

    def _written(self, request: SampleRequest) -> Sample:
        _, _, task, _, segment = request.key_ids
        messages = self._messages[task]
        step = messages[min(segment, len(messages) - 1)]
        tokens = self._chat.assistant(step) if isinstance(step, str) else self._chat.assistant("", calls=step)
        return Sample(request.request_id, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop")


class Curt:
    """A simulated user for scripts: says one thing, and has nothing more to say to the answer."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def answer(self, task: Task, messages: MessageList) -> Future[str | None]:
        spoken = any(message["role"] == "user" for message in messages[len(task.messages) :])
        return done(None if spoken else "Please help me.")

    def of_trial(self, seed: int) -> Curt:
        return self

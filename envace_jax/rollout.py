"""One rollout for training, evaluation, the baselines and test-time rehearsal; who answers tool calls is an argument.

The host loop keeps every decoding slot busy with whatever any trajectory waits for, both roles side by side, and moves
each trajectory on as soon as its own answers are there: no lockstep, and no trajectory waits for another. It knows
neither prompts nor token ids (`episode.py`) nor devices (`sampling.py`).

What a trajectory samples depends on (seed, step, task, attempt, segment, position) alone, and the order of the result
on the order of the tasks alone.

Several processes run this loop in step (`hosts.py`). Each owns the attempts at its share of the tasks: it alone reads
what they sampled, writes their prompts, and asks environments, judges and users for them. Once a round all tell each
other which generations theirs now wait for, and which are over (`_Run.share`); everything that leads to a device call
follows from that and from sampled ids, which all know.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import heapq
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from envace_jax import hosts
from envace_jax.episode import (
    Episode,
    Limits,
    Request,
    as_trajectory,
    on_act,
    on_fault,
    on_rehearsed,
    on_results,
    on_score,
    on_too_long,
    on_user,
    start,
)
from envace_jax.local_model import LocalModel
from envace_jax.responders import Responder
from envace_jax.rewards import Reward
from envace_jax.roles import Prompts, PromptTooLong
from envace_jax.sampling import Sample, Sampler, SampleRequest
from envace_jax.types import Need, Params, Role, Segment, Task, Trajectory
from envace_jax.users import User

Progress = Callable[[int, int, int], None]  # (trajectories finished, trajectories in all, tokens sampled so far)
OnSegment = Callable[[int, int, Segment], None]  # (place of the task, attempt, what was just sampled)
OnEnd = Callable[[int, Trajectory], None]  # (its place in the result, a trajectory that is over)
# With several processes, seconds that one waits for its own outside answers before it asks after the others'.
PATIENCE_S = 0.2


@dataclasses.dataclass(frozen=True)
class Player:
    """Who generates: a sampler, and parameters in the form that it decodes from (`Policy.for_decoding`)."""

    sampler: Sampler
    params: Params


def rollout(
    sampler: Sampler,
    params: Params,
    tasks: Sequence[Task],
    *,
    attempts: int,
    responder: Responder,
    reward: Reward,
    prompts: Prompts,
    limits: Limits,
    seed: int,
    step: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    policy_version: int = 0,
    group_offset: int = 0,
    user: User | None = None,
    on_end: OnEnd | None = None,
    future_timeout_s: float | None = 600.0,
    schema_check: bool = False,
    progress: Progress | None = None,
    rehearser: Player | None = None,
    first_attempt: int = 0,
    token_budgets: Sequence[int] | None = None,
    on_segment: OnSegment | None = None,
) -> list[Trajectory]:
    """Plays every task `attempts` times and gives the trajectories, task by task, attempt by attempt.

    Args:
      sampler, params: who plays ACT, and REHEARSE too unless there is a `rehearser`.
      responder: who answers tool calls; asked and told of ends by trajectory index, which is the place in the result.
      seed, step: with the task's id, the attempt and the segment they decide every sampled token. Attempts are numbered
        on where a task stands in `tasks` more than once.
      temperature: 0 is greedy. top_p: share of the probability that may be sampled, in (0, 1].
      policy_version: written into every segment.
      group_offset: group ids are group_offset + position of the task.
      user: who answers replies in tasks with a simulated user.
      on_end: told of each of this process's own trajectories once it is over, its environment closed.
      future_timeout_s: seconds that a responder, a judge or a user may take; None waits without end.
      schema_check: calls that do not fit their tool's schema end the trajectory without being put to anybody.
      progress: called after every round of the loop.
      rehearser: who plays REHEARSE instead, with a sampler of its own. Who plays decides no random number.
      first_attempt: what the first attempt at each task is numbered.
      token_budgets: for each task, the most tokens that an attempt at it may sample in both roles; 0: no bound.
      on_segment: told of every segment as it comes.

    With several processes all call this at the same point, with the same arguments, and all get all trajectories. Own
    attempts are those at tasks whose positions `hosts.owns`; only for these are responder, reward and user called.

    A fault of a responder, judge or user (exception, time-out, unreadable result, impossible score, empty message)
    fails its trajectory alone, and a task that the limits cannot hold fails all of its own: status "failed", reward
    nan, reason "fault: ...". Errors of the sampler are raised. Raises ValueError for attempts below 1, and for a task
    without user turns whose messages do not end with a user's message or tool results.
    """
    if attempts < 1:
        raise ValueError(f"attempts={attempts} must be at least 1")
    act = _Seat(sampler, params)
    seats = {Role.ACT: act, Role.REHEARSE: act if rehearser is None else _Seat(rehearser.sampler, rehearser.params)}
    run = _Run(
        seats, responder, reward, (seed, step), temperature, top_p, policy_version, limits.generations,
        future_timeout_s, user, on_segment, on_end,
    )  # fmt: skip
    run.forget()
    begin = functools.partial(
        start, prompts, limits, answered_by=responder.needs, prompted=responder.prompted, schema_check=schema_check
    )
    for known in _all_attempts(tasks, attempts, first_attempt, group_offset):
        budget = 0 if token_budgets is None else token_budgets[known.position]
        own = hosts.owns(known.position)
        run.add(known, begin(known.task, known.group_id, known.attempt, most_tokens=budget) if own else None)
    run.share()

    while run.unfinished:
        run.feed_slots()
        if run.drawing:
            run.take_samples(run.decode())
        else:
            run.wait_for_answers()
        run.take_answers()
        run.share()
        if progress is not None:
            progress(len(run.attempts) - run.unfinished, len(run.attempts), run.tokens)
    return run.trajectories()


def _advanced(episode: Episode, answers: list[Any]) -> Episode:
    """The episode after the outside answers that it waited for."""
    if episode.needs is Need.JUDGE:
        return on_score(episode, *answers)
    return on_user(episode, *answers) if episode.needs is Need.USER else on_results(episode, answers)


@dataclasses.dataclass
class _Attempt:
    """What all processes know of a trajectory."""

    task: Task
    group_id: int
    attempt: int
    position: int  # of the task
    turn: int = 0
    waits_for: dict[int, Request] = dataclasses.field(
        default_factory=dict
    )  # by segment index; empty: not for a sampler
    segments: dict[int, Segment] = dataclasses.field(default_factory=dict)  # by index


def _all_attempts(tasks: Sequence[Task], attempts: int, first: int, group_offset: int) -> Iterator[_Attempt]:
    """Those of a rollout, in order. A task that stands twice draws anew: its attempts are numbered on."""
    repeats: collections.Counter[str] = collections.Counter()
    for position, task in enumerate(tasks):
        for attempt in range(attempts):
            number = first + attempts * repeats[task.task_id] + attempt
            yield _Attempt(task, group_offset + position, number, position)
        repeats[task.task_id] += 1


# What a trajectory's owner tells: its number, its user turn, and the generations it waits for; none: it is over.
_News = tuple[int, int, tuple[Request, ...]]


@dataclasses.dataclass(frozen=True)
class _Outside:
    """Answers from outside that a trajectory waits for, and when waiting ends (seconds of `time.monotonic`)."""

    futures: tuple[Future[Any], ...]
    deadline: float


@dataclasses.dataclass
class _Seat:
    """A player, and the requests that wait for a slot of its sampler."""

    sampler: Sampler
    params: Params
    # A heap of (number, segment index). The lowest number goes first, so that trajectories under way finish, and reuse
    # their kept caches, before new ones begin.
    waiting: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @property
    def drawing(self) -> bool:
        """Whether any slot is taken."""
        return self.sampler.free() < self.sampler.slots


@dataclasses.dataclass
class _Run:
    """The loop's state. A trajectory's number is its place in `attempts`."""

    seats: dict[Role, _Seat]  # one and the same where one player has both roles
    responder: Responder
    reward: Reward
    key: tuple[int, int]  # (seed, step)
    temperature: float
    top_p: float
    policy_version: int
    generations: int  # the most that a trajectory may have
    future_timeout_s: float | None
    user: User | None
    on_segment: OnSegment | None
    on_end: OnEnd | None
    attempts: list[_Attempt] = dataclasses.field(default_factory=list)
    unfinished: int = 0
    tokens: int = 0
    # Of this process alone: its episodes by number, what it waits for outside, and what it has not told yet.
    episodes: dict[int, Episode] = dataclasses.field(default_factory=dict)
    outside: dict[int, _Outside] = dataclasses.field(default_factory=dict)
    news: list[_News] = dataclasses.field(default_factory=list)

    @property
    def judge(self) -> LocalModel | None:
        """The model in this process that the reward asks, if it does."""
        return getattr(self.reward, "model", None)

    @functools.cached_property
    def judge_seat(self) -> _Seat | None:
        """Where the judge's questions are answered: in the seat of ACT, or in one of its own."""
        if self.judge is None or self.judge.sampler is None:
            return None if self.judge is None else self.seats[Role.ACT]
        return _Seat(self.judge.sampler, self.judge.params)

    def forget(self) -> None:
        """Empties the samplers: kept caches may be of other weights."""
        if self.judge is not None:
            self.judge.reset()
        for seat in self.different_seats():
            seat.sampler.reset()

    def add(self, attempt: _Attempt, episode: Episode | None) -> None:
        """A new trajectory, with its episode where it is this process's own."""
        self.attempts.append(attempt)
        self.unfinished += 1
        if episode is not None:
            self.enter(len(self.attempts) - 1, episode)

    def share(self) -> None:
        """Tells all processes what became of this one's trajectories, and does what all have told: a collective."""
        told, self.news = self.news, []
        questions = [] if self.judge is None else self.judge.told()
        for process, (news, asked) in enumerate(hosts.exchange((told, questions))):
            for number, turn, requests in news:
                attempt = self.attempts[number]
                attempt.turn, attempt.waits_for = turn, {request.index: request for request in requests}
                if not requests:
                    self.unfinished -= 1
                    if self.on_end is not None and number in self.episodes:
                        self.on_end(number, as_trajectory(self.episodes[number]))
                for request in requests:
                    heapq.heappush(self.seats[request.role].waiting, (number, request.index))
            if self.judge is not None:
                self.judge.queue(asked, own=process == hosts.index())

    def trajectories(self) -> list[Trajectory]:
        """All of them, finished, in order: a collective."""
        # Everybody has the segments, which are most of it.
        own = {
            number: dataclasses.replace(as_trajectory(episode), segments=())
            for number, episode in self.episodes.items()
        }
        known = {number: trajectory for theirs in hosts.exchange(own) for number, trajectory in theirs.items()}
        return [
            dataclasses.replace(
                known[number], segments=tuple(segment for _, segment in sorted(attempt.segments.items()))
            )
            for number, attempt in enumerate(self.attempts)
        ]

    def enter(self, number: int, episode: Episode) -> None:
        """Records what became of a trajectory and asks whoever it waits for now."""
        self.episodes[number] = episode
        try:
            if episode.needs is Need.RESPONSE:
                self.ask_outside(number, self.respond(number, episode))
            elif episode.needs is Need.USER:
                self.ask_outside(number, (self.user_says(episode),))
            elif episode.needs is Need.JUDGE:
                self.ask_outside(number, (self.reward.score_turn(episode.task, episode.turn, episode.turn_messages),))
            else:  # for the sampler, or for nothing
                self.news.append((number, episode.turn, episode.requests))
                if episode.needs is Need.NOTHING:
                    self.responder.end(number, episode.task)
        except Exception as error:  # raised where a future should carry it: the same fault
            self.fail(number, error)

    def fail(self, number: int, error: BaseException) -> None:
        """Masks a trajectory. One that was over already, and failed to close, stays over.

        A prompt that does not fit may be the policy's doing; then nothing is masked.
        """
        was_over = self.episodes[number].needs is Need.NOTHING
        too_long = isinstance(error, PromptTooLong) and not was_over
        failed = on_too_long(self.episodes[number]) if too_long else on_fault(self.episodes[number], error)
        if was_over:
            self.episodes[number] = failed
        else:
            self.enter(number, failed)

    def respond(self, number: int, episode: Episode) -> tuple[Future[str], ...]:
        told = (episode.messages, episode.act_text)
        return tuple(self.responder.respond(number, episode.task, call, *told) for call in episode.pending_calls)

    def user_says(self, episode: Episode) -> Future[str | None]:
        if self.user is None:
            raise ValueError(f"task {episode.task.task_id!r} needs a simulated user, and there is none")
        return self.user.answer(episode.task, episode.messages)

    def ask_outside(self, number: int, futures: tuple[Future[Any], ...]) -> None:
        own = self.judge is not None and self.episodes[number].needs is Need.JUDGE  # no clock decides that wait
        limit = float("inf") if own or self.future_timeout_s is None else self.future_timeout_s
        self.outside[number] = _Outside(futures, time.monotonic() + limit)

    def different_seats(self) -> list[_Seat]:
        seats = (*self.seats.values(), self.judge_seat)
        return list({id(seat): seat for seat in seats if seat is not None}.values())

    def feed_slots(self) -> None:
        """Gives free slots to waiting requests, a judge's questions first: what they end makes room."""
        for seat in self.different_seats():
            requests = self.judge.requests(seat.sampler.free()) if self.judge and seat is self.judge_seat else []
            for _ in range(min(seat.sampler.free() - len(requests), len(seat.waiting))):
                number, index = heapq.heappop(seat.waiting)
                requests.append(self.sample_request(number, self.attempts[number].waits_for[index]))
            if requests:
                seat.sampler.submit(requests)

    @property
    def drawing(self) -> bool:
        """Whether any sampler has something to draw."""
        return any(seat.drawing for seat in self.different_seats())

    def decode(self) -> list[Sample]:
        """A call of every sampler that has something to draw; what finished."""
        return [sample for seat in self.different_seats() if seat.drawing for sample in seat.sampler.step(seat.params)]

    def sample_request(self, number: int, request: Request) -> SampleRequest:
        attempt = self.attempts[number]
        # A hash of the task's name, not its position: a task draws the same numbers wherever it stands in a batch.
        task_hash = zlib.crc32(attempt.task.task_id.encode("utf-8")) & 0x7FFFFFFF
        return SampleRequest(
            request_id=number * self.generations + request.index,  # an index is below `generations`
            prompt_tokens=request.prompt_tokens.tolist(),
            max_tokens=request.max_tokens,
            key_ids=(*self.key, task_hash, attempt.attempt, request.index),
            temperature=self.temperature,
            top_p=self.top_p,
        )

    def take_samples(self, samples: Sequence[Sample]) -> None:
        """Keeps finished generations; a trajectory whose requests are all answered moves on."""
        for sample in sorted(samples, key=lambda sample: sample.request_id):
            if self.judge is not None and sample.request_id < 0:
                self.judge.take(sample)
                continue
            number, index = divmod(sample.request_id, self.generations)
            attempt = self.attempts[number]
            request = attempt.waits_for.pop(index)
            self.tokens += len(sample.tokens)
            attempt.segments[index] = Segment(
                role=request.role,
                prompt_tokens=request.prompt_tokens,
                tokens=np.asarray(sample.tokens, np.int32),
                logprobs=np.asarray(sample.logprobs, np.float32),
                finish_reason=sample.finish_reason,
                policy_version=self.policy_version,
                turn=attempt.turn,
                cached_tokens=sample.cached_tokens,
            )
            if self.on_segment is not None:
                self.on_segment(attempt.position, attempt.attempt, attempt.segments[index])
            if number in self.episodes and not attempt.waits_for:
                episode = self.episodes[number]
                segments = [attempt.segments[request.index] for request in episode.requests]  # in call order
                advanced = on_act(episode, *segments) if episode.needs is Need.ACT else on_rehearsed(episode, segments)
                self.enter(number, advanced)

    def wait_for_answers(self) -> None:
        """Sleeps until an outside answer comes or is overdue; only for when there is nothing to decode.

        With several processes not for long: others' answers may come first.
        """
        open_futures = [future for asked in self.outside.values() for future in asked.futures if not future.done()]
        if open_futures and not self.answered():
            left = min(asked.deadline for asked in self.outside.values()) - time.monotonic()
            left = left if hosts.count() == 1 else min(left, PATIENCE_S)
            timeout = None if left == float("inf") else max(left, 0.0)
            concurrent.futures.wait(open_futures, timeout, concurrent.futures.FIRST_COMPLETED)

    def take_answers(self) -> None:
        """Moves on the trajectories whose outside answers have all come, or can no longer come."""
        for number in self.answered():
            asked, episode = self.outside.pop(number), self.episodes[number]
            try:
                if not all(future.done() for future in asked.futures):
                    raise TimeoutError(f"no answer within {self.future_timeout_s} s")
                answers = [future.result() for future in asked.futures]
                advanced = _advanced(episode, answers)
            except Exception as error:  # whatever failed outside masks this trajectory and no other
                for future in asked.futures:
                    future.cancel()
                self.fail(number, error)
            else:
                self.enter(number, advanced)

    def answered(self) -> list[int]:
        """Trajectories whose outside answers have come or are overdue, in order: the only view of the world outside."""
        now = time.monotonic()
        return [
            number
            for number, asked in sorted(self.outside.items())
            if now >= asked.deadline or all(future.done() for future in asked.futures)
        ]

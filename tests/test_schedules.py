"""Whole workloads under any schedule: the real sampler gives every trajectory what it would draw alone.

A trajectory here is what `episode.py` makes of one, without text: an ACT stream that grows by what was sampled and by
tokens of the host, and REHEARSE prompts, several side by side, which share a long beginning. Its reference plays alone,
with a full forward pass without a cache for each token (invariants 4 and 5).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.buckets import Buckets
from envace_jax.chat import ParsedAssistant
from envace_jax.draw import draw
from envace_jax.episode import Limits
from envace_jax.models import attention
from envace_jax.models.qwen import QwenConfig, make_policy
from envace_jax.responders import Rehearsed
from envace_jax.rollout import rollout
from envace_jax.sampling import Sampler, SampleRequest, SamplerStats, segment_key
from envace_jax.types import Params, Role, ToolCall, Trajectory

CONFIG = QwenConfig(
    vocab_size=48, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=48, init_std=0.3, rope_theta=1e4
)
LIMIT = 45  # ids 45..47 are rows of the embedding without a token
LENGTH = 160
STOP, REHEARSE_STOP = (1, 2, 3, 4), (7, 11)
POLICIES = {layout: make_policy(CONFIG, unroll=layout == "written out") for layout in ("written out", "scanned")}
WEIGHTS = [POLICIES["scanned"].init(jax.random.key(seed)) for seed in (0, 1)]
MODES = {"greedy": (0.0, 1.0), "sampled": (1.0, 1.0), "nucleus": (0.8, 0.6)}  # temperature, top-p


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a sampler. Each is compiled once, for all tests."""

    layout: str
    slots: int
    rows: int
    chunk: int
    buckets: Buckets


SHAPES = [
    Shape("written out", 1, 1, 4, Buckets((24,), (1,), (LENGTH,))),
    Shape("written out", 2, 2, 3, Buckets((16,), (2,), (64, LENGTH))),
    Shape("written out", 3, 12, 16, Buckets((8, 32), (3,), (LENGTH,))),
    Shape("scanned", 4, 5, 1, Buckets((24,), (2,), (96, LENGTH))),
]
TIGHT, PLENTY = SHAPES[0], SHAPES[2]


def make_sampler(shape: Shape, **changes) -> Sampler:
    return Sampler(
        POLICIES[shape.layout], slots=shape.slots, cache_rows=shape.rows, decode_chunk=shape.chunk, max_length=LENGTH,
        buckets=shape.buckets, vocab_limit=LIMIT, stop_ids=STOP, **changes,
    )  # fmt: skip


shared_sampler = functools.cache(make_sampler)


@pytest.fixture(autouse=True, scope="module")
def short_blocks():
    """Attention reads the caches of these tests in several blocks, the last of which overlaps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "CACHE_BLOCK", 64)
        yield


@functools.cache
def for_decoding(layout: str, weights: int):
    return POLICIES[layout].for_decoding(WEIGHTS[weights])


# --- trajectories without text ---


def host_tokens(count: int, *seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, LIMIT, count).tolist()


SYSTEM, RULES = host_tokens(12, 0), host_tokens(24, 1)  # what all ACT and all REHEARSE prompts begin with
EXAMPLES = host_tokens(6, 2)  # what all REHEARSE prompts have near the end


@dataclasses.dataclass(frozen=True)
class Part:
    """Who plays: attempts of one group share their first prompt."""

    group: int
    attempt: int
    mode: str


@dataclasses.dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


class Play:
    """A trajectory under way. `open` names the requests it waits for; every token it samples changes what follows."""

    def __init__(self, part: Part):
        self.part = part
        self.act = [*SYSTEM, *host_tokens(8 + 45 * part.group, 3, part.group)]
        self.history: list[int] = []
        self.requests: list[SampleRequest] = []
        self.answers: dict[int, Answer] = {}
        self.open: list[int] = []
        self.acts, self.calls = 0, 0
        self._ask_act([])

    def take(self, index: int, answer: Answer) -> None:
        self.open.remove(index)
        self.answers[index] = answer
        if self.open:
            return
        if self.calls:
            results = [self.answers[len(self.requests) - self.calls + call].tokens for call in range(self.calls)]
            self.calls = 0
            self._ask_act([token for result in results for token in (5, *result, 6)])
            return
        self.act += answer.tokens
        self.calls = sum(answer.tokens) % 3
        if not self.calls:
            self._ask_act(host_tokens(5, 4, self.part.group, self.acts))  # the user's next turn
        shared = [*RULES, *host_tokens(16, 5, self.part.group), *self.history, *EXAMPLES, *answer.tokens[-2:]]
        for call in range(self.calls):
            self._ask([*shared, 5 + call], 8, REHEARSE_STOP)
        self.history += answer.tokens[-3:]

    def _ask_act(self, told: list[int]) -> None:
        self.act += told
        self.acts += 1
        if self.acts <= 4 and len(self.act) < LENGTH:
            self._ask(self.act, 12, None)

    def _ask(self, prompt: list[int], most: int, stop_ids: tuple[int, ...] | None) -> None:
        index, part = len(self.requests), self.part
        temperature, top_p = MODES[part.mode]
        key_ids = (7, 3, part.group, part.attempt, index)
        self.requests.append(SampleRequest(index, tuple(prompt), most, key_ids, temperature, top_p, stop_ids))
        self.open.append(index)


@jax.jit
def _next_token(params: Params, tokens: jax.Array, length, key: jax.Array, settings: jax.Array, count: jax.Array):
    policy = POLICIES["scanned"]
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    hidden, _ = policy.apply(params, tokens, positions, (positions < length).astype(jnp.int32), None)
    logits = policy.logits(params, hidden[:, length - 1])
    return draw(logits, key[None], count[None], settings[:1], settings[1:], LIMIT)


def reference(wanted: SampleRequest, weights: int) -> Answer:
    """What a plain loop draws, without a cache."""
    prompt, drawn, logprobs = list(wanted.prompt_tokens), [], []
    stops = STOP if wanted.stop_ids is None else wanted.stop_ids
    key, settings = segment_key(wanted.key_ids), np.array([wanted.temperature, wanted.top_p], np.float32)
    while len(drawn) < min(wanted.max_tokens, LENGTH - len(prompt)) and not (drawn and drawn[-1] in stops):
        length = len(prompt) + len(drawn)
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, :length] = prompt + drawn
        token, logprob = _next_token(WEIGHTS[weights], tokens, length, key, settings, np.int32(len(drawn)))
        drawn.append(int(token[0]))
        logprobs.append(float(logprob[0]))
    return Answer(drawn, logprobs, "stop" if drawn[-1] in stops else "length")


@functools.cache
def alone(part: Part, weights: int) -> Play:
    play = Play(part)
    while play.open:
        index = play.open[0]
        play.take(index, reference(play.requests[index], weights))
    return play


# --- schedules ---


def perform(sampler: Sampler, params, cast: list[Part], schedule: random.Random, reset_at: int = 0) -> list[Play]:
    """Plays the cast side by side; `schedule` says when requests arrive, how many and which.

    After step `reset_at` the sampler forgets everything; what ran is asked for again.
    """
    plays = [Play(part) for part in cast]
    waiting = [(number, index) for number, play in enumerate(plays) for index in play.open]
    running: dict[int, tuple[int, int]] = {}  # by request id
    steps = submitted = 0
    while waiting or running:
        if waiting and sampler.free() and (not running or schedule.random() < 0.6):
            schedule.shuffle(waiting)
            requests = []
            for _ in range(schedule.randint(1, min(sampler.free(), len(waiting)))):
                submitted += 1
                number, index = running[submitted] = waiting.pop()
                requests.append(dataclasses.replace(plays[number].requests[index], request_id=submitted))
            sampler.submit(requests)
            continue
        for sample in sampler.step(params):
            number, index = running.pop(sample.request_id)
            play, asked = plays[number], len(plays[number].requests)
            play.take(index, Answer(sample.tokens.tolist(), sample.logprobs.tolist(), sample.finish_reason))
            waiting += [(number, new) for new in range(asked, len(play.requests))]
        steps += 1
        if steps == reset_at:
            sampler.reset()
            waiting += running.values()
            running.clear()
    return plays


def check(plays: list[Play], weights: int) -> None:
    for play in plays:
        expected = alone(play.part, weights)
        assert len(play.requests) == len(expected.requests)
        for index, wanted in enumerate(expected.requests):
            got, answer = play.answers[index], expected.answers[index]
            assert play.requests[index].prompt_tokens == wanted.prompt_tokens
            assert (got.tokens, got.finish_reason) == (answer.tokens, answer.finish_reason)
            np.testing.assert_allclose(got.logprobs, answer.logprobs, atol=1e-5)


PARTS = st.builds(Part, st.integers(0, 2), st.integers(0, 2), st.sampled_from(sorted(MODES)))


@given(
    shape=st.sampled_from(SHAPES),
    cast=st.lists(PARTS, min_size=1, max_size=8),
    refill_share=st.sampled_from([0.01, 0.5, 1.0]),
    weights=st.sampled_from([(0, 1), (1, 0), (0,), (1,)]),
    reset_at=st.integers(0, 20),
    schedule=st.integers(0, 10_000),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_any_schedule_gives_what_a_trajectory_draws_alone(shape, cast, refill_share, weights, reset_at, schedule):
    """Greedy, sampled and top-p side by side; with two sets of weights one plays after the other, as in training."""
    sampler = shared_sampler(shape)
    sampler.refill_share = refill_share
    for chosen in weights:
        sampler.reset()
        order = random.Random(schedule)
        check(perform(sampler, for_decoding(shape.layout, chosen), cast, order, reset_at), chosen)


def test_streams_that_were_dropped_are_prefilled_again():
    """A row for all trajectories forces eviction: more is prefilled than there is, and the same comes out."""
    cast = [Part(1, 0, "greedy"), Part(1, 1, "sampled"), Part(2, 0, "nucleus"), Part(0, 0, "sampled")]
    prefilled = []
    for shape in (TIGHT, PLENTY):
        sampler = shared_sampler(shape)
        sampler.reset()
        sampler.stats = SamplerStats()
        plays = perform(sampler, for_decoding(shape.layout, 0), cast, random.Random(1))
        check(plays, 0)
        prefilled.append(sampler.stats.prefilled_tokens)
    # As if streams shared nothing: each ACT stream once, sampled tokens too, and each REHEARSE prompt once.
    rehearsals = [r.prompt_tokens for play in plays for r in play.requests if r.stop_ids == REHEARSE_STOP]
    once = sum(len(play.act) for play in plays) + sum(map(len, rehearsals))
    assert prefilled[0] > once > prefilled[1]


def test_the_workloads_reach_what_they_are_for():
    plays = [alone(Part(group, attempt, mode), 0) for group in range(3) for attempt in range(3) for mode in MODES]
    requests = [request for play in plays for request in play.requests]
    assert {answer.finish_reason for play in plays for answer in play.answers.values()} == {"stop", "length"}
    assert {play.acts for play in plays} >= {4, 5}  # one that has no room for more, and one that ended
    assert max(len(request.prompt_tokens) for request in requests) > 128  # two blocks of a cache
    assert sum(request.stop_ids == REHEARSE_STOP for request in requests) > len(plays)


@pytest.mark.slow
def test_any_schedule_on_a_mesh(run_python):
    """Rows and slots in four parts: reuse, copies and eviction stay within one."""
    run_python(
        """
        import random
        import jax
        import test_schedules as t
        from envace_jax.models import attention
        from envace_jax.models.qwen import make_policy, shardings
        from envace_jax.sharding import make_mesh
        attention.CACHE_BLOCK = 64
        mesh = make_mesh(2, 2, 2)
        t.POLICIES["mesh"] = make_policy(t.CONFIG, mesh=mesh)
        params = jax.device_put(t.WEIGHTS[0], shardings(t.CONFIG, mesh))
        sampler = t.make_sampler(t.Shape("mesh", 8, 12, 5, t.Buckets((24,), (2,), (96, t.LENGTH))), mesh=mesh)
        cast = [t.Part(group, attempt, mode) for group in range(3) for attempt in range(2) for mode in t.MODES]
        for seed in range(3):
            sampler.reset()
            t.check(t.perform(sampler, params, cast, random.Random(seed), reset_at=9), 0)
        assert sampler.stats.reused_tokens > sampler.stats.prefilled_tokens / 4
        """,
        devices=8,
    )


# --- the same through `rollout` ---

CHAT = scripted.tiny_chat()
ENDS = (*CHAT.stop_ids, 20, 30)  # of a message


def noise_number(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "replace"))


def noisy_assistant(text: str) -> ParsedAssistant:
    """Up to two calls in any text, so that a network of random weights plays both roles."""
    number = noise_number(text)
    calls = [ToolCall("balance", {"owner": str(number % 1000 + place)}) for place in range((number % 4 + 1) // 2)]
    return ParsedAssistant("", f"{number}", tuple(calls), None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rollouts_do_not_depend_on_slots_rows_or_the_order_of_tasks(monkeypatch, temperature):
    monkeypatch.setattr("envace_jax.episode.parse_assistant", noisy_assistant)
    monkeypatch.setattr("envace_jax.episode.parse_rehearsal", lambda text: (json.dumps([noise_number(text)]), True))
    turns = [(f"{name}, please", "and again") for name in ("one", "two", "three")]
    tasks = [scripted.task(2, turn[0], tools=(), user_turns=turn) for turn in turns]
    played, prefilled = [], []
    for slots, rows, chunk, order in ((5, 20, 16, tasks), (2, 2, 3, tasks[::-1])):
        sampler, params = rollout_sampler(slots, rows, chunk)
        sampler.stats = SamplerStats()
        trajectories = rollout(
            sampler, params, order, attempts=2, responder=Rehearsed(), reward=scripted.Judge(),
            prompts=scripted.prompts(), seed=1, step=0, temperature=temperature,
            limits=Limits(assistant_turns=4, act_context=1_000, act_response=150, rehearse_response=150),
        )  # fmt: skip
        played.append(sorted(trajectories, key=lambda trajectory: (trajectory.task_id, trajectory.attempt)))
        prefilled.append(sampler.stats.prefilled_tokens)
    for one, other in zip(*played, strict=True):
        same_trajectory(one, other)
    segments = [segment for trajectory in played[0] for segment in trajectory.segments]
    assert sum(segment.role is Role.REHEARSE for segment in segments) > 6
    attempts = [trajectory.segments[0].tokens.tolist() for trajectory in played[0]]
    assert all((one == other) == (temperature == 0) for one, other in zip(attempts[::2], attempts[1::2], strict=True))
    assert prefilled[1] > 1.1 * prefilled[0]  # with as few rows, streams are dropped before they go on


@functools.cache
def rollout_policy():
    config = dataclasses.replace(CONFIG, vocab_size=336, layers=1, init_std=0.2, tie_embeddings=False)
    policy = make_policy(config)
    params = policy.init(jax.random.key(0))
    params["head"]["kernel"] = params["head"]["kernel"].at[:, jnp.array(ENDS)].multiply(2.0)  # short messages
    return policy, params


@functools.cache
def rollout_sampler(slots: int, rows: int, chunk: int) -> tuple[Sampler, Params]:
    policy, params = rollout_policy()
    sampler = Sampler(
        policy, slots=slots, cache_rows=rows, decode_chunk=chunk, max_length=1024, vocab_limit=CHAT.vocab_size,
        stop_ids=ENDS, buckets=Buckets((128,), (1,), (1024,)),
    )  # fmt: skip
    return sampler, params


def same_trajectory(left: Trajectory, right: Trajectory) -> None:
    def content(trajectory: Trajectory):
        segments = [
            (segment.role, segment.turn, segment.prompt_tokens.tolist(), segment.tokens.tolist(), segment.finish_reason)
            for segment in trajectory.segments
        ]
        return trajectory.task_id, trajectory.attempt, trajectory.reason, trajectory.messages, segments

    assert content(left) == content(right)
    for one, other in zip(left.segments, right.segments, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)

"""The sampler: what is drawn depends on the request alone (invariants 4 and 5), shapes are bounded (invariant 8).

The model is the real network at toy size. The reference is a plain loop: a full forward pass without a cache for each
token.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax import decoding, drawing
from envace_jax.buckets import Buckets
from envace_jax.compile_count import CompileCounter
from envace_jax.draw import draw
from envace_jax.models.qwen import QwenConfig, make_policy
from envace_jax.sampling import Sample, Sampler, SampleRequest, SamplerStats, segment_key
from envace_jax.types import Params

CONFIG = QwenConfig(
    vocab_size=96, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=48, init_std=0.3, rope_theta=1e4
)
LIMIT = 90  # ids 90..95 are rows of the embedding without a token
LENGTH = 64
STOP = (3, 4)
POLICY = make_policy(CONFIG)
PARAMS = POLICY.init(jax.random.key(0))
BUCKETS = Buckets((8, 32), (2, 8), (32, LENGTH))
ONE_SHAPE = Buckets((32,), (3,), (LENGTH,))  # compiles one prefill and one decode


def make_sampler(slots: int = 8, chunk: int = 4, **changes) -> Sampler:
    settings = dict(max_length=LENGTH, buckets=BUCKETS, vocab_limit=LIMIT, stop_ids=STOP, decode_chunk=chunk)
    return Sampler(POLICY, slots=slots, **(settings | changes))


@functools.cache
def shared_sampler(slots: int = 8, chunk: int = 4) -> Sampler:
    """One sampler for all tests of a shape, so that it compiles once; callers `reset` it."""
    return make_sampler(slots, chunk, buckets=BUCKETS if slots > 3 else ONE_SHAPE)


def fresh(slots: int = 8, chunk: int = 4) -> Sampler:
    sampler = shared_sampler(slots, chunk)
    sampler.reset()
    sampler.stats = SamplerStats()
    return sampler


def run(
    sampler: Sampler, requests: list[SampleRequest], at_once: int | None = None, params: Params | None = None
) -> dict[int, Sample]:
    """Feeds requests in order, at most `at_once` before each step, until all are done."""
    waiting, done = list(requests), {}
    while waiting or sampler.free() < sampler.slots:
        take = min(len(waiting), sampler.free(), at_once or len(requests))
        sampler.submit([waiting.pop(0) for _ in range(take)])
        done |= {sample.request_id: sample for sample in sampler.step(PARAMS if params is None else params)}
    return done


def request(number: int, prompt: int = 6, tokens: int = 12, **changes) -> SampleRequest:
    prompt_tokens = np.random.default_rng(number).integers(5, LIMIT, prompt).tolist()
    return dataclasses.replace(SampleRequest(number, prompt_tokens, tokens, (0, 1, number)), **changes)


def ragged(count: int, first: int = 0) -> list[SampleRequest]:
    generator = np.random.default_rng(first)
    prompts, tokens = generator.integers(1, 32, count), generator.integers(1, 30, count)
    return [request(first + i, int(prompts[i]), int(tokens[i])) for i in range(count)]


@jax.jit
def _reference_step(tokens: jax.Array, length: jax.Array, key: jax.Array, settings: jax.Array, position: jax.Array):
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    hidden, _ = POLICY.apply(PARAMS, tokens, positions, (positions < length).astype(jnp.int32), None)
    logits = POLICY.logits(PARAMS, hidden[:, length - 1])
    return draw(logits, key[None], position[None], settings[:1], settings[1:], LIMIT)


def reference(wanted: SampleRequest) -> tuple[list[int], list[float]]:
    prompt, drawn, logprobs = list(wanted.prompt_tokens), [], []
    stops = STOP if wanted.stop_ids is None else wanted.stop_ids
    key = segment_key(wanted.key_ids)
    settings = np.array([wanted.temperature, wanted.top_p], np.float32)
    while len(drawn) < min(wanted.max_tokens, LENGTH - len(prompt)) and not (drawn and drawn[-1] in stops):
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(prompt) + len(drawn)] = prompt + drawn
        token, logprob = _reference_step(tokens, len(prompt) + len(drawn), key, settings, jnp.int32(len(drawn)))
        drawn.append(int(token[0]))
        logprobs.append(float(logprob[0]))
    return drawn, logprobs


def same(one: Sample, other: Sample, tolerance: float = 1e-5) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.finish_reason == other.finish_reason
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=tolerance)


def test_equals_a_plain_loop_without_a_cache():
    requests = ragged(6) + [
        request(20, temperature=0.0),
        request(21, temperature=0.6, top_p=0.7),
        request(22, prompt=60, tokens=30),
        request(23, stop_ids=tuple(range(5, 9))),
    ]
    samples = run(fresh(), requests)
    for wanted in requests:
        tokens, logprobs = reference(wanted)
        assert samples[wanted.request_id].tokens.tolist() == tokens
        np.testing.assert_allclose(samples[wanted.request_id].logprobs, logprobs, atol=1e-5)


def test_a_sample_does_not_depend_on_batch_slot_chunk_or_order():  # invariant 4
    requests = ragged(14)
    together = run(fresh(), requests)
    one_by_one = run(fresh(), requests[::-1], at_once=1)
    other_shape = run(fresh(slots=3, chunk=7), requests[5:] + requests[:5])
    alone = {}
    for wanted in requests[:4]:
        alone |= run(fresh(), [wanted])
    for number, sample in together.items():
        same(sample, one_by_one[number])
        same(sample, other_shape[number])
        if number in alone:
            same(sample, alone[number])


def test_keys_matter():
    twice = run(fresh(), [request(1), request(1, request_id=2, key_ids=(0, 2, 1))])
    assert twice[1].tokens.tolist() != twice[2].tokens.tolist()


def second_turn(wanted: SampleRequest, sample: Sample, number: int) -> SampleRequest:
    added = np.random.default_rng(number).integers(5, LIMIT, 5).tolist()
    prompt = [*wanted.prompt_tokens, *sample.tokens.tolist(), *added]
    return SampleRequest(number, prompt, 8, (9, number))


def test_a_second_turn_prefills_only_what_is_new():  # invariant 5
    sampler = fresh()
    first = [request(i, prompt=5 + i) for i in range(5)]
    samples = run(sampler, first)
    turns = [second_turn(wanted, samples[wanted.request_id], 50 + i) for i, wanted in enumerate(first)]
    sampler.stats = SamplerStats()
    continued = run(sampler, turns)
    # A slot keeps the prompt and all drawn tokens but the last one, which was never fed.
    kept = sum(len(wanted.prompt_tokens) + len(samples[wanted.request_id].tokens) - 1 for wanted in first)
    assert sampler.stats.reused_tokens == kept
    assert sampler.stats.prefilled_tokens == sum(len(turn.prompt_tokens) for turn in turns) - kept
    from_scratch = run(fresh(), turns)
    for turn in turns:
        same(continued[turn.request_id], from_scratch[turn.request_id])


@given(st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_any_history_of_a_slot_gives_the_same_sample(data):  # invariants 4 and 5
    sampler = fresh(slots=3, chunk=7)
    base = np.random.default_rng(0).integers(5, LIMIT, 40)
    done: dict[int, Sample] = {}
    requests = []
    for number in range(data.draw(st.integers(2, 7))):
        shared, fresh_tokens = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 12))
        own = np.random.default_rng(number).integers(5, LIMIT, fresh_tokens)
        start = base[:shared].tolist()
        if done and data.draw(st.booleans()):  # the next turn of a finished one
            earlier = requests[data.draw(st.sampled_from(sorted(done)))]
            start = [*earlier.prompt_tokens, *done[earlier.request_id].tokens.tolist()][:45]
        requests.append(SampleRequest(number, [*start, *own], data.draw(st.integers(1, 15)), (number,)))
        if sampler.free() == 0 or data.draw(st.booleans()):
            while sampler.free() == 0:
                done |= {s.request_id: s for s in sampler.step(PARAMS)}
        sampler.submit(requests[-1:])
        if data.draw(st.booleans()):
            done |= {s.request_id: s for s in sampler.step(PARAMS)}
    done |= run(sampler, [])
    for wanted in requests:
        tokens, logprobs = reference(wanted)
        assert done[wanted.request_id].tokens.tolist() == tokens
        np.testing.assert_allclose(done[wanted.request_id].logprobs, logprobs, atol=1e-5)


def test_finish_reasons():
    sampler = fresh()
    samples = run(
        sampler,
        [
            request(1, tokens=1),
            request(2, tokens=9, stop_ids=()),
            request(3, prompt=62, tokens=30, stop_ids=()),
            request(4, tokens=30, stop_ids=tuple(run(fresh(), [request(4, tokens=30)])[4].tokens[2:3].tolist())),
        ],
    )
    assert [len(samples[i].tokens) for i in (1, 2, 3)] == [1, 9, 2]  # 62 + 2 = max_length
    assert [samples[i].finish_reason for i in (2, 3, 4)] == ["length", "length", "stop"]
    ended = samples[4].tokens.tolist()
    assert ended[-1] not in ended[:-1] and len(ended) <= 3  # the stop id is kept, nothing after it


def test_ids_beyond_the_tokenizer_are_never_drawn():
    samples = run(fresh(), [request(i, tokens=25, stop_ids=(), temperature=50.0) for i in range(8)])
    drawn = np.concatenate([sample.tokens for sample in samples.values()])
    assert drawn.max() < LIMIT and len(set(drawn.tolist())) > 60


def test_long_prompts_are_prefilled_in_pieces():
    wanted = request(5, prompt=50)
    pieces = run(make_sampler(slots=2, buckets=Buckets((8,), (2,), (LENGTH,))), [wanted])
    same(pieces[5], run(fresh(), [wanted])[5])


def test_decoding_stops_when_all_rows_are_done():
    sampler = fresh(slots=3, chunk=7)
    sampler.submit([request(i, tokens=3, stop_ids=()) for i in range(2)])
    assert len(sampler.step(PARAMS)) == 2
    assert sampler.stats.decode_steps == 2  # the first token is drawn by the prefill
    assert sampler.stats.busy_slot_steps == 4 and sampler.stats.decoded_tokens == 6


def test_a_run_compiles_no_more_than_the_buckets_allow():  # invariant 8
    sampler = fresh()  # shared with the other tests: whatever they compiled counts too
    for batch in range(20):
        run(sampler, ragged(int(np.random.default_rng(batch).integers(1, 9)), first=100 * batch))
    assert sampler.compile_count <= BUCKETS.compile_bound()
    before = sampler.compile_count
    changed = [
        request(1, temperature=0.3, top_p=0.5, stop_ids=(8,), key_ids=(5,)),
        request(2, temperature=0.0, key_ids=(1, 2, 3, 4, 5, 2**40)),
    ]
    run(sampler, changed)
    run(sampler, [dataclasses.replace(r, temperature=1.3, top_p=1.0, stop_ids=()) for r in changed])
    assert sampler.compile_count == before


@pytest.mark.parametrize(
    ("buckets", "bound"),
    [(Buckets((8, 32), (1, 4), (LENGTH,)), False), (Buckets((32,), (4,), (32, LENGTH)), True)],
    ids=["many prefills", "many lengths, parameters bound to a device"],
)
def test_after_the_warm_up_nothing_is_compiled(buckets, bound):
    params = jax.device_put(PARAMS, jax.devices()[0]) if bound else PARAMS
    sampler, told = make_sampler(slots=4, buckets=buckets), []
    sampler.submit([request(1)])
    sampler.warm_up(params, told.append)
    assert sampler.free() == 4 and sampler.stats == SamplerStats()
    assert len(told) == len(set(told)) == buckets.compile_bound()
    assert sampler.compile_count == buckets.compile_bound() or bound
    before, counter = sampler.compile_count, CompileCounter()
    for number, prompt in enumerate((4, 40, 4, 20, 60, 9)):  # the cache grows and shrinks; calls of one row and more
        few = [request(10 * number + i, prompt=prompt + i) for i in range(1 + number % 3)]
        samples = run(sampler, few, at_once=1 + number % 2, params=params)
        if number < 2:
            for wanted in few:
                assert samples[wanted.request_id].tokens.tolist() == reference(wanted)[0]
            counter.take()  # of the reference
    sampler.reset()
    run(sampler, ragged(20), params=params)
    assert counter.take() == 0 and sampler.compile_count == before


def test_decoding_works_on_the_cache_in_place():
    sampler = make_sampler(max_length=4096, buckets=Buckets((8,), (8,), (1024, 4096)))

    def compiled(length: int) -> tuple[int, int, int]:
        state = jax.eval_shape(lambda: sampler.programs.fresh(length=length))
        rows, limits = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
        memory = sampler.programs.decode.lower(PARAMS, state, rows, limits).compile().memory_analysis()
        size = sum(leaf.size * 4 for leaf in jax.tree.leaves((state.pool, state.working)))
        return size, memory.temp_size_in_bytes, memory.alias_size_in_bytes

    (size, temporary, _), (longer_size, longer_temporary, aliased) = compiled(1024), compiled(4096)
    assert aliased >= longer_size
    assert longer_temporary - temporary < 0.1 * (longer_size - size)


@pytest.mark.parametrize("unroll", [True, False])
def test_no_call_copies_the_pool(unroll):
    """A pool of 64 long rows beside two slots with short ones: no program has room for another of it."""
    policy = make_policy(CONFIG, unroll=unroll)
    settings = {"slots": 2, "cache_rows": 64, "max_length": 4096, "buckets": Buckets((8,), (2,), (64, 4096))}
    sampler = Sampler(policy, **settings, vocab_limit=LIMIT, stop_ids=STOP)
    state = jax.eval_shape(lambda: sampler.programs.fresh(length=64))
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    params = jax.eval_shape(policy.for_decoding, PARAMS)
    calls = (
        sampler.programs.decode.lower(params, state, integers((2,)), integers((2,))),
        sampler.programs.prefill.lower(params, state, integers((2, drawing.HEADER + 8))),
        sampler.programs.load.lower(dataclasses.replace(state, working=None), integers((2,)), 64),
    )
    pool = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.pool))
    for call in calls:
        memory = call.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool and memory.temp_size_in_bytes < pool / 8


def test_no_implicit_transfer():
    sampler = fresh()
    run(sampler, ragged(3))
    with jax.transfer_guard("disallow"):
        run(sampler, ragged(5))


def test_reset_forgets_caches_and_drops_what_runs():
    sampler = fresh()
    wanted = request(1, prompt=20)
    run(sampler, [wanted])
    sampler.submit([request(2)])
    sampler.reset()
    assert sampler.free() == sampler.slots
    sampler.stats = SamplerStats()
    run(sampler, [wanted])
    assert sampler.stats.reused_tokens == 0 and sampler.stats.prefilled_tokens == 20


def test_a_stream_is_not_given_up_for_a_short_shared_prefix():
    sampler = fresh()
    system = list(range(10, 18))
    long = SampleRequest(1, system + list(range(30, 60)), 1, (1,))
    run(sampler, [long])
    sampler.stats = SamplerStats()
    run(sampler, [SampleRequest(2, [*system, 20, 21], 1, (2,))])  # shares 8 of 38 held: copies them to an unused row
    assert sampler.stats.reused_tokens == 8
    sampler.stats = SamplerStats()
    run(sampler, [SampleRequest(3, [*long.prompt_tokens, 70], 1, (3,))])
    assert sampler.stats.reused_tokens == 38


def test_each_request_takes_the_slot_that_holds_most_of_it():
    sampler = fresh()
    streams = [request(i, prompt=20, tokens=1) for i in range(8)]
    run(sampler, streams)
    sampler.stats = SamplerStats()
    run(sampler, [dataclasses.replace(s, prompt_tokens=[*s.prompt_tokens, 7]) for s in streams[::-1]])
    assert sampler.stats.reused_tokens == 8 * 20 and sampler.stats.prefilled_tokens == 8
    sampler.stats = SamplerStats()
    run(sampler, [dataclasses.replace(streams[2], request_id=99)])  # the same prompt: its last token is prefilled
    assert sampler.stats.reused_tokens == 19 and sampler.stats.prefilled_tokens == 1


def test_segment_keys_differ():
    ids = [(1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (2**32 + 1, 2), (1, 2 + 2**32), (-1, 2), (), (0,), (0, 0)]
    assert len({segment_key(key).tobytes() for key in ids}) == len(ids)
    assert segment_key((1, 2)).tobytes() == segment_key((1, 2)).tobytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(prompt_tokens=[]), r"request 7: a prompt of 0 tokens, max_tokens 12; needs 1\.\.63"),
        (dict(prompt_tokens=[5] * 64), r"request 7: a prompt of 64 tokens"),
        (dict(max_tokens=0), "max_tokens of at least 1"),
        (dict(temperature=-0.1), "temperature -0.1 and top_p 1.0; needs temperature >= 0"),
        (dict(temperature=float("nan")), "temperature nan"),
        (dict(top_p=0.0), "0 < top_p <= 1"),
        (dict(stop_ids=(1, 2, 3, 4, 5)), r"at most 4 stop ids, got \[1, 2, 3, 4, 5\]"),
    ],
)
def test_bad_requests_are_refused_before_any_is_taken(changes, message):
    sampler = fresh()
    with pytest.raises(ValueError, match=message):
        sampler.submit([request(1), request(7, **changes)])
    assert sampler.free() == sampler.slots


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(slots=0), "slots must be a positive multiple of 1"),
        (dict(cache_rows=7), "cache_rows must be at least 8 and a multiple of 1, got 7"),
        (dict(refill_share=0.0), "refill_share must be above 0 and at most 1, got 0.0"),
        (dict(max_length=65), "cache_lengths end at 64, below max_length 65"),
        (dict(vocab_limit=97), r"vocab_limit must lie in 1\.\.96"),
        (dict(chunk=0), "decode_chunk must be at least 1"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(**changes)


def test_too_many_requests_are_refused():
    with pytest.raises(ValueError, match="9 requests submitted, but 8 of 8 slots are free"):
        fresh().submit([request(i) for i in range(9)])


@pytest.mark.parametrize("unroll", [True, False])
def test_cache_axes_are_read_off_the_shapes(unroll):
    policy = make_policy(CONFIG, unroll=unroll)
    cache = policy.init_cache(5, 7, jnp.float32)
    axes = jax.tree.leaves(decoding.cache_axes(policy))
    for leaf, at in zip(jax.tree.leaves((cache.k, cache.v)), axes, strict=True):
        assert (leaf.shape[at.rows], leaf.shape[at.length], leaf.shape[at.heads]) == (5, 7, CONFIG.kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_a_mesh_of_eight_devices_gives_the_same_tokens(run_python, shape):
    requests = ragged(20)
    expected = run(fresh(), requests)
    output = run_python(
        f"""
        import test_sampling as t
        from envace_jax.models.qwen import make_policy, shardings
        from envace_jax.sharding import make_mesh
        import jax
        mesh = make_mesh(*{shape})
        t.PARAMS = jax.device_put(t.PARAMS, shardings(t.CONFIG, mesh))
        t.POLICY = make_policy(t.CONFIG, mesh=mesh)
        buckets = t.Buckets((8, 32), (1, 2), (32, t.LENGTH))
        sampler = t.make_sampler(slots=16, mesh=mesh, buckets=buckets)
        sampler.warm_up(t.PARAMS)
        assert sampler.compile_count == buckets.compile_bound()
        counter = t.CompileCounter()
        with jax.transfer_guard("disallow"):
            samples = t.run(sampler, t.ragged(20))
        assert counter.take() == 0
        for number in range(20):
            print(*samples[number].tokens)
        """,
        devices=8,
    )
    lines = [[int(word) for word in line.split()] for line in output.splitlines()]
    assert lines == [expected[number].tokens.tolist() for number in range(20)]

"""A sampler with pages draws what one without them draws, whatever is shared, evicted and prefilled again."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import LENGTH, LIMIT, PARAMS, POLICY, STOP, ragged, reference, request, run

from envace_jax.buckets import Buckets
from envace_jax.compile_count import CompileCounter
from envace_jax.sampling import Sample, Sampler, SampleRequest, SamplerStats

ONE_SHAPE = Buckets((32,), (3,), (LENGTH,))
SHAPES = {  # (slots, streams, pages, positions of a page, chunk)
    "as few pages as there may be": (3, 6, 9, 8, 7),
    "pages of odd size, two streams more than slots": (5, 7, 25, 5, 3),
    "room for all": (3, 12, 200, 8, 7),
    "pages of one position": (2, 4, 90, 1, 5),
}


def make_sampler(
    slots: int = 3, rows: int = 6, pages: int = 40, page_size: int = 8, chunk: int = 7, **changes
) -> Sampler:
    options = dict(
        slots=slots, cache_rows=rows, pages=pages, page_size=page_size, decode_chunk=chunk, max_length=LENGTH,
        buckets=ONE_SHAPE, vocab_limit=LIMIT, stop_ids=STOP,
    )  # fmt: skip
    return Sampler(POLICY, **(options | changes))


@functools.cache
def shared(shape: str) -> Sampler:
    return make_sampler(*SHAPES[shape])


def empty(shape: str) -> Sampler:
    sampler = shared(shape)
    sampler.reset()
    sampler.stats = SamplerStats()
    return sampler


def check_pages(sampler: Sampler) -> None:
    """None is lost, and nobody draws into a page that another has."""
    cache = sampler._cache
    pages, settings_ = cache._pages, cache.settings
    for part in range(settings_.shards):
        rows = [row for row in range(settings_.rows) if cache._streams.part(row) == part]
        assert pages.distinct(rows) + pages.free(part) == settings_.pages // settings_.shards
    for slot in cache._drawing & set(sampler._running):
        item = sampler._running[slot]
        number = (len(item.prompt) + item.count - 1) // settings_.page_size  # of the page that is written next
        own = pages.numbers(item.row, 100)[number]
        part = [row for row in range(settings_.rows) if cache._streams.part(row) == cache._part(slot)]
        assert own < 0 or sum(own in pages.numbers(row, 100)[: number + 1] for row in part) == 1


def finished(sampler: Sampler) -> dict[int, Sample]:
    samples = {sample.request_id: sample for sample in sampler.step(PARAMS)}
    check_pages(sampler)
    return samples


def play(data: st.DataObject, sampler: Sampler) -> tuple[list[SampleRequest], dict[int, Sample]]:
    """Prompts that share beginnings, groups of equal prompts, next turns; steps whenever."""
    base = np.random.default_rng(0).integers(5, LIMIT, 40)
    done: dict[int, Sample] = {}
    requests: list[SampleRequest] = []
    for number in range(data.draw(st.integers(2, 6))):
        own = np.random.default_rng(number).integers(5, LIMIT, data.draw(st.integers(1, 12)))
        start = base[: data.draw(st.integers(0, 30))].tolist()
        if done and data.draw(st.booleans()):  # the next turn of a finished one
            earlier = requests[data.draw(st.sampled_from(sorted(done)))]
            start = [*earlier.prompt_tokens, *done[earlier.request_id].tokens.tolist()][: data.draw(st.integers(1, 45))]
        budget = data.draw(st.sampled_from([1, 4, 20, 60]))
        for _ in range(data.draw(st.sampled_from([1, 1, 3]))):
            while sampler.free() == 0:
                done |= finished(sampler)
            requests.append(SampleRequest(len(requests), [*start, *own], budget, (len(requests),)))
            sampler.submit(requests[-1:])
        if data.draw(st.booleans()):
            done |= finished(sampler)
    while sampler.free() < sampler.slots:
        done |= finished(sampler)
    return requests, done


def check_samples(requests: list[SampleRequest], samples: dict[int, Sample]) -> None:
    for wanted in requests:
        tokens, logprobs = reference(wanted)
        assert samples[wanted.request_id].tokens.tolist() == tokens
        np.testing.assert_allclose(samples[wanted.request_id].logprobs, logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=[pytest.mark.slow] * (index > 1)) for index, name in enumerate(SHAPES)]
)
@given(st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_any_history_gives_the_samples_of_a_loop_without_a_cache(shape, data):  # invariants 4 and 5
    requests, done = play(data, empty(shape))
    check_samples(requests, done)


def test_greedy_and_restricted_draws_equal_those_without_pages():
    requests = [*ragged(8), request(20, temperature=0.0), request(21, temperature=0.6, top_p=0.7)]
    check_samples(requests, run(empty("room for all"), requests))


def test_segments_that_lose_their_pages_go_on_where_they_were():
    """Three segments that would fill 8 pages each, in 9 pages."""
    sampler = empty("as few pages as there may be")
    requests = [request(number, prompt=10, tokens=50, stop_ids=()) for number in range(3)]
    samples = run(sampler, requests)
    assert sampler.stats.paused >= 2 and sampler.stats.decoded_tokens == 150
    check_samples(requests, samples)


def test_a_group_shares_the_pages_of_its_prompt():
    sampler = empty("room for all")
    prompt = request(0, prompt=29).prompt_tokens
    sampler.submit([SampleRequest(number, prompt, 4, (number,), stop_ids=()) for number in range(3)])
    sampler.step(PARAMS)
    assert sampler.stats.prefilled_tokens == 29 + 1 + 1 and sampler.stats.reused_tokens == 28 + 28
    cache = sampler._cache
    tables = np.array([cache._pages.numbers(row, 4) for row in range(12) if cache._pages.cached(row) > 28])
    assert len(tables) == 3 and (tables[:, :3] == tables[0, :3]).all()  # 24 positions
    assert len(set(tables[:, 3].tolist())) == 3  # the rest was copied


def test_a_second_turn_prefills_only_what_is_new():
    sampler = empty("room for all")
    first = [request(number, prompt=5 + number) for number in range(3)]
    samples = run(sampler, first)
    turns = [
        SampleRequest(50 + i, [*one.prompt_tokens, *samples[one.request_id].tokens.tolist(), 7, 8], 8, (9, i))
        for i, one in enumerate(first)
    ]
    kept = sum(len(one.prompt_tokens) + len(samples[one.request_id].tokens) - 1 for one in first)
    sampler.stats = SamplerStats()
    continued = run(sampler, turns)
    assert sampler.stats.reused_tokens == kept
    assert sampler.stats.prefilled_tokens == sum(len(turn.prompt_tokens) for turn in turns) - kept
    for turn in turns:
        assert continued[turn.request_id].tokens.tolist() == reference(turn)[0]


def test_the_stream_not_used_for_longest_gives_up_its_pages():
    sampler = empty("as few pages as there may be")
    streams = [request(number, prompt=15, tokens=1) for number in range(3)]  # 2 pages each
    for one in streams:
        run(sampler, [one])
    run(sampler, [request(10, prompt=38, tokens=1)])  # 5 pages: 3 are free
    for number, reused in ((2, 15), (1, 15), (0, 0)):
        sampler.stats = SamplerStats()
        run(sampler, [SampleRequest(20 + number, [*streams[number].prompt_tokens, 9], 1, (number,))])
        assert sampler.stats.reused_tokens == reused, number


def test_a_run_compiles_no_more_than_the_buckets_allow():  # invariant 8
    sampler = make_sampler(slots=2, rows=4, pages=20, buckets=Buckets((8, 32), (2,), (LENGTH,)))
    told: list[str] = []
    sampler.warm_up(PARAMS, told.append)
    bound = sampler.buckets.compile_bound()
    assert len(told) == len(set(told)) == sampler.compile_count == bound == 2 + 2
    counter = CompileCounter()
    with jax.transfer_guard("disallow"):
        run(sampler, ragged(12), at_once=2)
    assert counter.take() == 0 and sampler.compile_count == bound


def test_pages_are_written_in_place():
    sampler = make_sampler(pages=4000, buckets=Buckets((8,), (2,), (LENGTH,)))
    for name, lowered in sampler.lowered(jax.eval_shape(POLICY.for_decoding, PARAMS)).items():
        if "empty" in name:
            continue
        memory = lowered.compile().memory_analysis()
        pages = 4000 * 8 * 2 * 16 * 2 * 4  # positions, keys and values, width, layers, bytes
        assert memory.alias_size_in_bytes >= pages and memory.temp_size_in_bytes < pages / 8, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(pages=8), "8 pages of 8 leave 8 to each of 1 parts, but a stream of max_length 64 and one page to copy"),
        (dict(page_size=0), "page_size at least 1, got 40 of 0"),
        (dict(pages=-1), "pages must be a positive multiple of 1"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(**changes)

"""Requests that are taken out of their slots, and what is seen of those still in one."""

from __future__ import annotations

import numpy as np
import pytest
import test_paged_sampling as paged
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import LIMIT, PARAMS, fresh, reference, request, run

from envace_jax.sampling import Sample, Sampler, SampleRequest


def samplers() -> list:
    return [
        pytest.param(lambda: fresh(slots=3, chunk=7), id="rows"),
        pytest.param(lambda: paged.empty("room for all"), id="pages"),
    ]


def crowded() -> list:
    """Where what is in slots waits for pages as well, until others are done or cancelled."""
    return [*samplers(), pytest.param(lambda: paged.empty("as few pages as there may be"), id="few pages")]


def check(done: dict[int, Sample], requests: list[SampleRequest]) -> None:
    for wanted in requests:
        tokens, logprobs = reference(wanted)
        assert done[wanted.request_id].tokens.tolist() == tokens
        np.testing.assert_allclose(done[wanted.request_id].logprobs, logprobs, atol=1e-5)


@pytest.mark.parametrize("make", samplers())
def test_a_cancelled_request_leaves_its_slot_at_once_and_its_cache_to_others(make):
    sampler = make()
    requests = [request(number, prompt=10, tokens=40, stop_ids=()) for number in range(3)]
    sampler.submit(requests)
    sampler.step(PARAMS)
    drawn = sampler.drawn()[1][0].tolist()
    assert sampler.free() == 0 and len(drawn) > 1
    assert sampler.cancel(1) and sampler.free() == 1 and 1 not in sampler.drawn()
    assert not sampler.cancel(1) and not sampler.cancel(99)
    follower = SampleRequest(7, [*requests[1].prompt_tokens, *drawn, 5], 4, (7,), stop_ids=())
    done = run(sampler, [follower])
    assert set(done) == {0, 2, 7}
    check(done, [requests[0], requests[2], follower])
    assert done[7].cached_tokens == 10 + len(drawn) - 1  # all that was cached: the last token was not fed yet


def test_a_slot_that_was_cancelled_draws_no_longer():
    sampler = fresh(slots=3, chunk=7)
    sampler.submit([request(number, tokens=40, stop_ids=()) for number in range(2)])
    sampler.step(PARAMS)
    sampler.cancel(0)
    sampler.step(PARAMS)
    active = np.asarray(sampler._cache._state.drawing.active)
    assert active.sum() == 1  # on the device, where it would cost steps and keep calls of decode from ending


def test_what_waits_to_copy_from_a_cancelled_request_is_prefilled_itself():
    prompt = request(0, prompt=30).prompt_tokens
    for make in (samplers()[0].values[0], lambda: paged.empty("room for all")):
        sampler = make()
        requests = [SampleRequest(number, prompt, 5, (number,), stop_ids=()) for number in range(3)]
        sampler.submit(requests)
        sampler.cancel(0)
        done = run(sampler, [])
        assert set(done) == {1, 2}
        check(done, requests[1:])
        assert sampler.stats.prefilled_tokens + sampler.stats.reused_tokens == 60
        assert sorted(sample.cached_tokens for sample in done.values())[0] == 0


@pytest.mark.parametrize("make", crowded())
@given(st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_cancelling_anything_at_any_time_changes_no_other_sample(make, data):
    sampler = make()
    base = np.random.default_rng(0).integers(5, LIMIT, 40)
    requests: list[SampleRequest] = []
    done: dict[int, Sample] = {}
    seen: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    cancelled: set[int] = set()

    def step() -> None:
        done.update({sample.request_id: sample for sample in sampler.step(PARAMS)})
        for number, (tokens, _, cached[number]) in sampler.drawn().items():
            seen.setdefault(number, []).extend(tokens.tolist())

    for number in range(data.draw(st.integers(2, 9))):
        own = np.random.default_rng(number).integers(5, LIMIT, data.draw(st.integers(1, 12)))
        start = base[: data.draw(st.sampled_from([0, 12, 30, 30]))].tolist()
        while sampler.free() == 0:
            step()
        requests.append(SampleRequest(number, [*start, *own], data.draw(st.sampled_from([1, 4, 20])), (number,)))
        sampler.submit(requests[-1:])
        if data.draw(st.booleans()):
            step()
        under_way = [item.request_id for item in requests if item.request_id not in done.keys() | cancelled]
        if under_way and data.draw(st.booleans()):
            victim = data.draw(st.sampled_from(under_way))
            assert sampler.cancel(victim)
            cancelled.add(victim)
    while sampler.free() < sampler.slots:
        step()
    assert set(done) == {wanted.request_id for wanted in requests} - cancelled
    check(done, [wanted for wanted in requests if wanted.request_id in done])
    for number, tokens in seen.items():
        whole = reference(requests[number])[0]
        assert tokens == whole[: len(tokens)]
    assert all(cached[number] == done[number].cached_tokens for number in done.keys() & cached.keys())
    assert isinstance(sampler, Sampler) and sampler.free() == sampler.slots

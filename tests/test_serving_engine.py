"""The engine's thread: first come first served, pieces as they come, requests given up, faults, and the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import numpy as np
import pytest
import scripted
import serving

from envace_jax.sampling import SampleRequest
from envace_jax.serving.engine import Engine, EngineStopped, Handle, merged

CHAT = scripted.tiny_chat()


def request(text: str, number: int = 0, max_tokens: int = 1000) -> SampleRequest:
    return SampleRequest(number, CHAT.encode(text), max_tokens, (number,))


def said(tokens) -> str:
    return CHAT.decode(tokens.tolist()).removesuffix("<|im_end|>")


@pytest.fixture
def engine():
    sampler = serving.ScriptedSampler(lambda prompt, request: prompt * 5, slots=3, pace_s=0.002)
    made = Engine(sampler, None)
    made.start()
    yield made
    made.stop()


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def test_more_requests_than_slots_are_all_answered_in_order_of_arrival(engine):
    handles = [engine.submit(request(f"{letter}{letter}", 7)) for letter in "abcdefgh"]
    assert [said(handle.result(20).tokens) for handle in handles] == [letter * 10 for letter in "abcdefgh"]
    assert all(handle.result().request_id == 7 for handle in handles)  # the sender's own id, whatever the engine's
    assert engine._sampler.most == 3 and engine._sampler.prompts == [letter * 2 for letter in "abcdefgh"]
    starts = [handle.started for handle in handles]
    assert starts == sorted(starts) and engine.running == engine.waiting == 0


def test_pieces_together_are_the_sample(engine):
    async def read():
        handles = [engine.submit(request(text)) for text in ("one", "two", "three", "four")]
        pieces = {place: [] for place in range(4)}
        async for place, piece in merged(handles):
            pieces[place].append(piece)
        return handles, pieces

    handles, pieces = asyncio.run(read())
    for place, handle in enumerate(handles):
        whole = handle.result()
        assert [token for piece in pieces[place] for token in piece.tokens] == whole.tokens.tolist()
        assert [value for piece in pieces[place] for value in piece.logprobs] == whole.logprobs.tolist()
        assert [piece.finish_reason for piece in pieces[place]] == [None] * (len(pieces[place]) - 1) + ["stop"]
        assert {piece.cached_tokens for piece in pieces[place]} == {whole.cached_tokens} != {0}
        assert len(pieces[place]) > 3  # they came as they were drawn


def test_a_request_that_is_given_up_frees_its_slot_or_its_place(engine):
    long = [engine.submit(request("x" * 300)) for _ in range(3)]
    queued, last = engine.submit(request("never")), engine.submit(request("ab"))
    until(lambda: engine.running == 3)
    engine.cancel(queued)
    engine.cancel(long[1])
    assert said(last.result(20).tokens) == "ab" * 5
    assert "never" not in engine._sampler.prompts and not long[0].sample.done()
    for handle in (queued, long[1]):
        with pytest.raises(concurrent.futures.CancelledError):
            handle.result(20)
    for handle in long:
        engine.cancel(handle)
    until(lambda: engine.running == engine.waiting == 0)
    engine.cancel(last)  # it is over: nothing happens
    assert said(engine.submit(request("on")).result(20).tokens) == "on" * 5


def test_a_fault_of_the_device_fails_what_was_in_slots_and_no_more():
    with serving.scripted_model(lambda prompt, request: prompt, slots=2) as model:
        bad, beside = model.engine.submit(request("fault")), model.engine.submit(request("good" * 50))
        later = [model.engine.submit(request("later")) for _ in range(3)]
        with pytest.raises(EngineStopped, match="RESOURCE_EXHAUSTED: out of memory while"):
            bad.result(20)
        with pytest.raises(EngineStopped):
            beside.result(20)
        assert [said(handle.result(20).tokens) for handle in later] == ["later"] * 3
        assert model.engine.faults == 1 and model.engine.alive


def test_the_end_fails_what_is_left_and_takes_nothing_more(engine):
    handles = [engine.submit(request("x" * 300)) for _ in range(5)]

    async def read():
        with pytest.raises(EngineStopped, match="the engine has stopped"):
            async for _ in merged(handles):
                if not engine._stopping:
                    threading.Thread(target=engine.stop).start()

    asyncio.run(read())
    until(lambda: all(handle.sample.done() for handle in handles))
    with pytest.raises(EngineStopped):
        engine.submit(request("more"))
    assert not engine.alive


def test_a_fault_that_comes_together_with_pieces_is_raised_after_them():
    handle = Handle(request("one"), 1)
    handle.drawn(np.array([5], np.int32), np.array([-1.0], np.float32), 0)
    handle.failed(EngineStopped("gone"))

    async def read():
        pieces = []
        with pytest.raises(EngineStopped, match="gone"):
            async for _, piece in merged([handle]):
                pieces.append(piece)
        return pieces

    assert [piece.tokens.tolist() for piece in asyncio.run(asyncio.wait_for(read(), 20))] == [[5]]


def test_a_fault_while_one_is_given_up_leaves_nobody_waiting(engine):
    def cancel(request_id):
        raise RuntimeError("DATA_LOSS: no such device")

    long = [engine.submit(request("x" * 300)) for _ in range(3)]
    until(lambda: engine.running == 3)
    before, engine._sampler.cancel = engine._sampler.cancel, cancel
    follower = engine.submit(request("ab"))  # which gets the slot that is left
    engine.cancel(long[1])
    with pytest.raises(EngineStopped, match="DATA_LOSS"):
        follower.result(20)
    for handle, error in zip(long, (EngineStopped, concurrent.futures.CancelledError, EngineStopped), strict=True):
        with pytest.raises(error):
            handle.result(20)
    engine._sampler.cancel = before
    assert said(engine.submit(request("on")).result(20).tokens) == "on" * 5 and engine.faults == 1


def test_what_no_sampler_takes_is_refused_at_once(engine):
    with pytest.raises(ValueError, match="no sampler takes"):
        engine.submit(request("x" * 5000))
    assert engine.waiting == engine.running == 0


def test_two_threads_share_it_as_samplers(engine):
    def work(letter):
        sampler = engine.as_sampler()
        assert (sampler.slots, sampler.free(), sampler.step()) == (3, 3, [])
        found = {}
        for batch in range(3):
            sampler.submit([request(letter * 2, number) for number in range(3 * batch, 3 * batch + 3)])
            assert sampler.free() == 0
            sampler.reset()  # drops nothing
            while sampler.free() < sampler.slots:
                found |= {sample.request_id: said(sample.tokens) for sample in sampler.step()}
        assert sampler.stats.decoded_tokens == sum(len(text) + 1 for text in found.values())
        return found

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for letter, found in zip("ab", threads.map(work, "ab"), strict=True):
            assert found == {number: letter * 10 for number in range(9)}
    assert engine._sampler.most == 3


def test_a_thread_that_is_given_up_ends_and_leaves_no_slot(engine):
    given_up = threading.Event()
    sampler = engine.as_sampler(given_up)
    sampler.submit([request("x" * 300, number) for number in range(2)])
    until(lambda: engine.running == 2)
    threading.Timer(0.05, given_up.set).start()
    with pytest.raises(concurrent.futures.CancelledError):
        sampler.step()
    until(lambda: engine.running == engine.waiting == 0)

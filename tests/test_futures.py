"""Answers that follow from others: values, exceptions of either side, and those that nobody waits for any longer."""

from concurrent.futures import Future

import pytest

from envace_jax.futures import done, then


def test_what_follows_is_read_of_what_comes():
    asked = Future()
    answer = then(asked, lambda value: value + 1)
    assert not answer.done()
    asked.set_result(1)
    assert answer.result(0) == 2 and then(done("a"), str.upper).result(0) == "A"


def test_an_exception_of_either_is_told():
    asked = Future()
    asked.set_exception(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        then(asked, str).result(0)
    with pytest.raises(ValueError):
        then(done("x"), int).result(0)


def test_an_answer_that_is_no_longer_waited_for_is_let_go(caplog):
    """The rollout cancels what took too long; what comes later must not be set, nor complained of."""
    asked = Future()
    answer = then(asked, str)
    assert answer.cancel()
    asked.set_result(1)
    assert answer.cancelled() and not caplog.records

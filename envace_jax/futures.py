"""Futures of answers that are there already, and of what follows from answers that are still to come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def done(value: Answer) -> Future[Answer]:
    """An answer that nobody has to wait for."""
    answer: Future[Answer] = Future()
    answer.set_result(value)
    return answer


def then(asked: Future[Any], read: Callable[[Any], Answer]) -> Future[Answer]:
    """`read` of what was asked for, or whatever exception comes instead, of either."""
    answer: Future[Answer] = Future()

    def settle(finished: Future[Any]) -> None:
        if answer.set_running_or_notify_cancel():  # a rollout cancels what it no longer waits for
            try:
                answer.set_result(read(finished.result()))
            except BaseException as fault:  # also where a pool was closed
                answer.set_exception(fault)

    asked.add_done_callback(settle)
    return answer

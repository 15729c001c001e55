"""Who answers: `Real` executes in order, in one environment per trajectory; `Rehearsed` never answers outside."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import scripted

from envace_jax.envs import load_process, make_environment
from envace_jax.responders import Real, Rehearsed
from envace_jax.types import Need, ToolCall

DEPOSIT, BALANCE = ToolCall("deposit", {"owner": "ann", "amount": "3"}), ToolCall("balance", {"owner": "ann"})


def test_rehearsed_is_never_asked():
    responder = Rehearsed()
    assert responder.needs is Need.REHEARSE
    responder.end(0, scripted.task())
    with pytest.raises(RuntimeError, match="'balance' of task 'bank' was to be rehearsed"):
        responder.respond(0, scripted.task(), BALANCE, ())


def test_real_executes_calls_in_order_in_one_environment_per_trajectory():
    opened = []
    task, responder = scripted.task(), Real(lambda spec: opened.append(spec) or scripted.Bank(spec))
    assert responder.needs is Need.RESPONSE and opened == []  # opened at the first call
    answers = [responder.respond(0, task, call, ()) for call in (BALANCE, DEPOSIT, BALANCE)]
    assert [answer.result(0) for answer in answers] == ['{"balance": 5}', '{"balance": 8}', '{"balance": 8}']
    assert responder.respond(1, task, BALANCE, ()).result(0) == '{"balance": 5}'
    assert responder.calls == 4 and opened == [task.environment] * 2
    assert task.environment == {"name": "bank", "state": {"ann": 5}}


def test_final_states_stay_until_closed():
    task, responder = scripted.task(), Real(scripted.Bank)
    responder.respond(0, task, DEPOSIT, ())
    with pytest.raises(KeyError, match="trajectory 0 has no final state"):
        responder.final_state(0)
    responder.end(0, task)
    responder.end(1, task)  # nothing was called there
    assert responder.final_state(0) == {"ann": 8} and responder.final_state(1) == {"ann": 5}
    assert responder.respond(0, task, BALANCE, ()).result(0) == '{"balance": 5}'  # the old environment is gone
    responder.close()
    assert responder.calls == 2
    with pytest.raises(KeyError):
        responder.final_state(0)


def test_what_an_environment_raises_is_in_the_future():
    task, responder = scripted.task(), Real(scripted.Bank)
    with pytest.raises(ConnectionError):
        responder.respond(0, task, ToolCall("broken", {}), ()).result(0)
    with pytest.raises(ValueError, match="task 'bank' has no environment"):
        responder.respond(0, scripted.task(environment=None), BALANCE, ()).result(0)
    responder.end(0, scripted.task(environment=None))
    assert responder.calls == 1  # the call that broke was executed, the other was not


def test_real_runs_the_environments_of_this_package():
    responder = Real(make_environment)
    with pytest.raises(ValueError, match="no environment is called 'bank'"):
        responder.respond(0, scripted.task(), BALANCE, ()).result(0)


class Slow(scripted.Bank):
    """A bank in another process: its answers come when the test says so."""

    made: list[Slow] = []

    def __init__(self, spec):
        super().__init__({"state": {"ann": 5}})
        self.asked, self.closed = [], False
        self.made.append(self)

    def call(self, name, arguments):
        self.asked.append((name, Future()))
        return self.asked[-1][1]

    def state(self):
        raise AssertionError("no state of a process module is kept")

    def close(self):
        self.closed = True


def test_real_hands_futures_through_and_closes_what_it_opened():
    task = scripted.task(environment={"name": "bfcl", "state": {}})
    assert load_process("bfcl") is not None
    Slow.made, responder = [], Real(Slow)
    texts = [responder.respond(0, task, call, ()) for call in (BALANCE, DEPOSIT, BALANCE, BALANCE)]
    (bank,) = Slow.made
    assert [name for name, _ in bank.asked] == ["balance", "deposit", "balance", "balance"]
    assert responder.calls == 4 and not any(text.done() for text in texts)
    texts[3].cancel()
    for (_, future), value in zip(bank.asked, ({"n": "é"}, {"n": float("nan")}, None, {}), strict=True):
        future.set_result(value) if value is not None else future.set_exception(OSError("gone"))
    assert texts[0].result(0) == '{"n": "é"}' and texts[3].cancelled()
    with pytest.raises(ValueError, match="JSON compliant"):
        texts[1].result(0)
    with pytest.raises(OSError, match="gone"):
        texts[2].result(0)
    responder.end(1, task)  # nothing was called, so nothing is opened
    assert len(Slow.made) == 1 and not bank.closed
    responder.end(0, task)
    assert bank.closed
    responder.respond(2, task, BALANCE, ())
    responder.close()
    assert Slow.made[1].closed

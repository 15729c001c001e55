"""Questions to a model behind an address: retries, faults by kind, and what is not tried again."""

from __future__ import annotations

import json
import time

import pytest
from endpoint_server import FaultyServer

from envace_jax.endpoint import Endpoint, EndpointFault, EndpointSettings

ASKED = [{"role": "user", "content": "2 + 2?"}]


def settings(*urls, **changes):
    return EndpointSettings(urls, "judge", **({"timeout_s": 0.3, "backoff_s": 0.01, "retries": 2} | changes))


def ask(server, read=str, options=None, **changes):
    """The answer, or the fault, and the counts."""
    with server.running() as url:
        endpoint = Endpoint(settings(url, **changes))
        try:
            found = endpoint.ask(ASKED, read, **(options or {})).result(20)
        except EndpointFault as fault:
            found = fault
        finally:
            endpoint.close()
        return found, dict(endpoint.counts)


def test_a_question_goes_out_as_openai_has_it_and_its_tokens_are_counted(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = FaultyServer(lambda body: "4")
    schema = {"type": "integer"}
    options = {"schema": schema, "temperature": 0.6, "top_p": 0.8, "max_tokens": 5, "seed": 3}
    answer, counts = ask(server, int, options)
    assert answer == 4 and counts == {"tries": 1, "answers": 1, "prompt_tokens": 7, "completion_tokens": 3}
    assert server.bodies == [
        {
            "model": "judge", "messages": ASKED, "temperature": 0.6, "top_p": 0.8, "max_tokens": 5, "seed": 3,
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema},
            },
        }
    ]  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("status 500", "status 500"),
        ("status 429", "status 429"),
        ("timeout", "timeout"),
        ("truncated", "body"),
        ("types", "body"),
        ("reset", "connection"),
        ("text four", "answer"),
    ],
)
def test_a_fault_is_tried_again_counted_and_named_in_the_end(fault, kind):
    once = FaultyServer(lambda body: "4", lambda number, body: fault if number == 0 else None)
    answer, counts = ask(once, int)
    assert answer == 4 and counts["tries"] == 2 and counts[f"fault_{kind.replace(' ', '_')}"] == 1
    always, counts = ask(FaultyServer(lambda body: "4", lambda number, body: fault), int)
    assert isinstance(always, EndpointFault) and always.kind == kind and "\n" not in str(always)
    assert (
        counts["tries"] == counts[f"fault_{kind.replace(' ', '_')}"] == 3
        and counts["given_up"] == 1
        and "answers" not in counts
    )


def test_what_stays_wrong_is_not_tried_again():
    found, counts = ask(FaultyServer(lambda body: "4", lambda number, body: "status 401"))
    assert found.kind == "status 401" and "HTTP status 401" in str(found) and counts["tries"] == 1


def test_another_address_is_tried_next():
    with FaultyServer(lambda body: "up").running() as up, FaultyServer(str, lambda *_: "status 503").running() as down:
        endpoint = Endpoint(settings(down, up))
        assert [endpoint.ask(ASKED, str).result(20) for _ in range(4)] == ["up"] * 4
        assert endpoint.counts["fault_status_503"] == 2  # they take turns
        endpoint.close()
        gone = Endpoint(settings("http://127.0.0.1:9/v1"))
        with pytest.raises(EndpointFault) as fault:
            gone.ask(ASKED, str).result(20)
        assert fault.value.kind == "connection"
        gone.close()


def test_no_more_questions_than_allowed_are_under_way():
    server = FaultyServer(lambda body: "4", lambda number, body: "timeout", stall_s=0.05)
    with server.running() as url:
        endpoint = Endpoint(settings(url, concurrency=3, timeout_s=5.0))
        futures = [endpoint.ask(ASKED, int) for _ in range(12)]
        assert [future.result(20) for future in futures] == [4] * 12
        assert server.most_alive == 3
        endpoint.close()


def test_closing_gives_up_at_once():
    with FaultyServer(str, lambda *_: "status 500").running() as url:
        endpoint = Endpoint(settings(url, retries=9, backoff_s=9.0))
        future = endpoint.ask(ASKED, str)
        while not endpoint.counts["fault_status_500"]:
            time.sleep(0.01)
        begin = time.monotonic()
        endpoint.close()
        assert time.monotonic() - begin < 3
        with pytest.raises(EndpointFault):
            future.result(1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"urls": ()}, "must be addresses such as"),
        ({"urls": ("host:8000",)}, "must be addresses such as"),
        ({"model": ""}, "endpoint model is empty"),
        ({"concurrency": 0}, "endpoint concurrency is 0; must be at least 1"),
        ({"timeout_s": 0.0}, "endpoint timeout_s is 0.0; must be greater than 0"),
    ],
)
def test_settings_that_cannot_work_are_named(changes, reason):
    with pytest.raises(ValueError, match=reason):
        EndpointSettings(**({"urls": ("http://a/v1",), "model": "m"} | changes))


def test_the_question_is_utf8():
    server = FaultyServer(lambda body: json.dumps(body["messages"][0]["content"]))
    with server.running() as url:
        endpoint = Endpoint(settings(url))
        assert endpoint.ask([{"role": "user", "content": "短く é"}], json.loads).result(20) == "短く é"
        endpoint.close()

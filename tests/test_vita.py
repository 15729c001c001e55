"""VitaBench by a checkout: what is missing is said, and on a small fake one its program is run and its results read."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from envace_jax.benchmarks import Options, command, vita
from envace_jax.config import UserError

DUMPLINGS = {
    "order_type": "delivery",
    "store_id": "s1",
    "products": [{"product_id": "p1", "quantity": 2, "price": 9.0}],
}
TEA = {"order_type": "delivery", "store_id": "s2", "products": [{"product_id": "p7", "quantity": 1}], "address": "home"}

# In place of vita.cli: writes what the test has put beside it, and how it was called.
CLI = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
(here / "asked.json").write_text(json.dumps([sys.argv[1:], json.load(open(os.environ["VITA_MODEL_CONFIG_PATH"]))]))
if given["--domain"] == "ota":
    sys.exit("no model answers")
pathlib.Path(given["--save-to"]).write_text((here / "results.json").read_text())
"""


def results(*rows):
    """Results as VitaBench writes them, of (id, required, final orders, reward)."""
    tasks = [
        {"id": name, "evaluation_criteria": {"expected_states": [{"required_orders": required}]}}
        for name, required, *_ in rows
    ]
    simulations = [
        {"task_id": name, "trial": 0, "states": {"new_orders": final}, "reward_info": reward and {"reward": reward[0]}}
        for name, _, final, reward in rows
    ]
    return {"tasks": tasks, "simulations": simulations}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "vitabench" / "src" / "vita"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "cli.py").write_text(CLI)
    monkeypatch.setenv(vita.PYTHON_VARIABLE, sys.executable)
    return tmp_path / "vitabench"


def options(checkout, tmp_path, **changes):
    given = {
        "vita_path": str(checkout), "server": "http://127.0.0.1:8000/v1", "model": "m", "user_url": "http://u:1/v1",
        "user_model": "big", "categories": ("delivery",), "out": tmp_path / "out", "subset": "first:4",
    }  # fmt: skip
    return Options(**{**given, **changes})


def test_a_checkouts_program_is_run_and_its_results_are_read(checkout, tmp_path):
    made = {**DUMPLINGS, "order_id": "x", "status": "paid", "total_price": 18.0}  # what tells nothing apart
    rows = [
        ("right", [DUMPLINGS], {"x": made}, [1.0]), ("extra", [DUMPLINGS], [made, TEA], [0.0]),
        ("other", [TEA], [{**TEA, "address": "office"}], [1.0]), ("unjudged", [DUMPLINGS, TEA], [TEA, made], None),
    ]  # fmt: skip
    (checkout / "src" / "vita" / "results.json").write_text(json.dumps(results(*rows)))
    found = vita.run(options(checkout, tmp_path))
    proxy, judged = found["proxy"]["delivery"], found["judged"]["delivery"]
    assert (proxy["score"], proxy["cases"], proxy["masked"]) == (50.0, 4, 0)  # right, and unjudged
    assert (judged["cases_scored"], judged["masked"]) == (3, 1) and judged["score"] == pytest.approx(200 / 3)
    arguments, models = json.loads((checkout / "src" / "vita" / "asked.json").read_text())
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert (given["--agent-llm"], given["--user-llm"], given["--evaluator-llm"]) == ("m", "big", "big")
    assert given["--num-tasks"] == "4" and given["--num-trials"] == "1"
    addresses = {model["name"]: model["base_url"] for model in models["models"]}
    assert addresses == {"m": "http://127.0.0.1:8000/v1/chat/completions", "big": "http://u:1/v1/chat/completions"}


def test_how_the_policy_is_to_sample_goes_with_every_request_to_it_alone(checkout, tmp_path, capsys):
    (checkout / "src" / "vita" / "results.json").write_text(json.dumps(results(("a", [TEA], [TEA], [1.0]))))
    flags = [
        "--benchmark=vita", f"--vita_path={checkout}", "--server=http://h:1/v1", "--model=m", "--categories=delivery",
        "--config.user.urls=http://u:1/v1", "--config.user.model=big", f"--out={tmp_path / 'out'}",
    ]  # fmt: skip
    given = ["--temperature=0.3", "--top_p=0.5", "--response=77", "--rehearsal=parallel:2"]
    assert command.run(["evaluate", *flags, *given]) == 0
    _, models = json.loads((checkout / "src" / "vita" / "asked.json").read_text())
    own, user = models["models"]
    rehearsal = {"mode": "parallel", "n": 2, "reuse": True}
    asked = {"temperature": 0.3, "top_p": 0.5, "max_tokens": 77, "rehearsal": rehearsal}
    assert own == {"name": "m", "base_url": "http://h:1/v1/chat/completions", **asked}
    assert user == {"name": "big", "base_url": "http://u:1/v1/chat/completions", "max_tokens": 8000}
    held = json.loads((tmp_path / "out" / "results.json").read_text())
    assert held["policy"]["rehearsal"] == rehearsal and held["trials"] == 1
    for other in (["--temperature=0.4"], ["--seed=3"], ["--config.user.model=small"], ["--categories=instore"]):
        assert command.run(["evaluate", *flags, *given, *other]) == 2
        assert "holds a run that differs" in capsys.readouterr().err
    assert command.run(["evaluate", *flags, *given, "--trials=2", "--config.user.urls=http://v:1/v1"]) == 0


@pytest.mark.parametrize(
    ("final", "required", "same"),
    [
        ([DUMPLINGS], [DUMPLINGS], True), ([], [], True), ([], [DUMPLINGS], False), ([DUMPLINGS], [], False),
        ([DUMPLINGS, DUMPLINGS], [DUMPLINGS], False), ([DUMPLINGS, TEA], [TEA, DUMPLINGS], True),
        ([{**DUMPLINGS, "products": [{"product_id": "p1", "quantity": 3}]}], [DUMPLINGS], False),
        ([{**DUMPLINGS, "store_id": "s9"}], [DUMPLINGS], False),
        ([{**DUMPLINGS, "total_price": 1.0}], [DUMPLINGS], True),
    ],
)  # fmt: skip
def test_orders_are_the_same_by_what_tells_them_apart(final, required, same):
    assert vita.same_orders(final, required) is same


def test_a_simulation_without_a_state_is_masked_not_scored(tmp_path):
    held = results(("a", [TEA], [], [1.0]))
    del held["simulations"][0]["states"]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(held))
    (attempt,) = vita.read_results(path, "delivery")["proxy"]
    assert attempt.score is None and attempt.masked


def test_what_is_missing_is_said_plainly(checkout, tmp_path):
    whole = options(checkout, tmp_path)
    (checkout / "src" / "vita" / "results.json").write_text("{}")
    for changes, reason in [
        ({"vita_path": ""}, "VitaBench has no package: clone .*--vita_path=FOLDER"),
        ({"vita_path": str(tmp_path)}, "no checkout of VitaBench, which has src/vita/"),
        ({"server": ""}, "start `python -m envace_jax.serve"), ({"user_url": ""}, "its user and its judge are"),
        ({"user_model": "m"}, "tells its models apart by their names"),
        ({"categories": ("trains",)}, "there is no 'trains'; there are"), ({"subset": "x"}, "an id on each line"),
        ({"categories": ("ota",)}, "ended with exit status 1: no model answers"), ({}, "no results of VitaBench"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=reason):
            vita.run(dataclasses.replace(whole, **changes))

"""The executable domains: results and states worked by hand, refusals, purity, and the count of executions."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax import config as configuration
from envace_jax import envs, inputs
from envace_jax.data import write_tasks
from envace_jax.envs import domain_names, execution_count, load_domain, make_environment, tiny
from envace_jax.rewards.checklist import ChecklistReward

ACCOUNTS = {"bob": 120, "ann": 30}
SHOP = {"lamp": {"price": 15, "stock": 3}}
CALENDAR = {"mon": {"9": None, "10": "eve", "14": None}}
LIBRARY = {"dune": {"copies": 1, "lent": ["eve"]}}


def play(name, state, *steps):
    """Plays (tool, arguments, expected result) in order and returns the final state."""
    environment = make_environment({"name": name, "state": state})
    for tool, arguments, expected in steps:
        assert environment.call(tool, arguments) == expected, (tool, arguments)
    return environment.state()


def test_the_domains_are_found_by_module_name():
    assert domain_names() == ("accounts", "calendar", "library", "shop")
    for name in domain_names():
        assert len(load_domain(name).TOOLS) == 3


def test_accounts_results_reflect_earlier_writes():
    state = play(
        "accounts",
        ACCOUNTS,
        ("balance", {"name": "bob"}, {"balance": 120}),
        ("transfer", {"source": "bob", "target": "ann", "amount": 50}, {"balance": 70}),
        ("balance", {"name": "ann"}, {"balance": 80}),
        ("transfer", {"source": "bob", "target": "ann", "amount": 75}, {"error": "not enough"}),
        ("transfer", {"source": "bob", "target": "ann", "amount": 70}, {"balance": 0}),
        ("deposit", {"name": "bob", "amount": 5}, {"balance": 5}),
        ("balance", {"name": "zoe"}, {"error": "unknown account"}),
        ("deposit", {"name": "zoe", "amount": 5}, {"error": "unknown account"}),
        ("transfer", {"source": "bob", "target": "zoe", "amount": 5}, {"error": "unknown account"}),
        ("transfer", {"source": "zoe", "target": "bob", "amount": 5}, {"error": "unknown account"}),
        ("transfer", {"source": "bob", "target": "ann", "amount": -5}, {"error": "bad amount"}),
        ("transfer", {"source": "bob", "target": "bob", "amount": 5}, {"balance": 5}),
    )
    assert state == {"bob": 5, "ann": 150}


def test_shop_results_reflect_earlier_writes():
    state = play(
        "shop",
        SHOP,
        ("price", {"item": "lamp"}, {"price": 15}),
        ("stock", {"item": "lamp"}, {"stock": 3}),
        ("order", {"item": "lamp", "count": 2}, {"total": 30, "left": 1}),
        ("stock", {"item": "lamp"}, {"stock": 1}),
        ("order", {"item": "lamp", "count": 2}, {"error": "out of stock"}),
        ("order", {"item": "lamp", "count": 0}, {"error": "bad count"}),
        ("price", {"item": "desk"}, {"error": "unknown item"}),
    )
    assert state == {"lamp": {"price": 15, "stock": 1}}


def test_calendar_results_reflect_earlier_writes():
    state = play(
        "calendar",
        CALENDAR,
        ("free", {"day": "mon"}, {"free": [9, 14]}),
        ("book", {"day": "mon", "hour": 9, "name": "bob"}, {"booked": "bob"}),
        ("book", {"day": "mon", "hour": 9, "name": "ann"}, {"error": "taken"}),
        ("book", {"day": "mon", "hour": 11, "name": "ann"}, {"error": "closed"}),
        ("cancel", {"day": "mon", "hour": 10}, {"cancelled": "eve"}),
        ("cancel", {"day": "mon", "hour": 10}, {"error": "not booked"}),
        ("free", {"day": "mon"}, {"free": [10, 14]}),
        ("free", {"day": "sun"}, {"error": "unknown day"}),
    )
    assert state == {"mon": {"9": "bob", "10": None, "14": None}}


def test_library_results_reflect_earlier_writes():
    state = play(
        "library",
        LIBRARY,
        ("find", {"book": "dune"}, {"copies": 1}),
        ("borrow", {"book": "dune", "name": "eve"}, {"error": "has it"}),
        ("borrow", {"book": "dune", "name": "bob"}, {"left": 0}),
        ("borrow", {"book": "dune", "name": "ann"}, {"error": "none left"}),
        ("return", {"book": "dune", "name": "ann"}, {"error": "not lent"}),
        ("return", {"book": "dune", "name": "eve"}, {"left": 1}),
        ("find", {"book": "emma"}, {"error": "unknown book"}),
    )
    assert state == {"dune": {"copies": 1, "lent": ["bob"]}}


@pytest.mark.parametrize(
    ("tool", "arguments", "code", "told"),
    [
        ("steal", {"name": "bob"}, "unknown_tool", "['balance', 'deposit', 'transfer']"),
        ("balance", {}, "invalid_arguments", "'name' is a required property"),
        ("balance", {"name": "bob", "pin": 1}, "invalid_arguments", "'pin' was unexpected"),
        ("balance", {"name": 7}, "invalid_arguments", "7 is not of type 'string'"),
        ("deposit", {"name": "bob", "amount": "5"}, "invalid_arguments", "'5' is not of type 'integer'"),
        ("deposit", {"name": "bob", "amount": True}, "invalid_arguments", "True is not of type 'integer'"),
        ("deposit", {"name": "bob", "amount": 5.5}, "invalid_arguments", "5.5 is not of type 'integer'"),
        ("balance", ["bob"], "invalid_arguments", "['bob'] is not of type 'object'"),
    ],
)
def test_a_call_that_is_not_well_formed_is_a_structured_error_and_changes_nothing(tool, arguments, code, told):
    environment = make_environment({"name": "accounts", "state": ACCOUNTS})
    result = environment.call(tool, arguments)
    assert set(result) == {"error_tool_call"} and set(result["error_tool_call"]) == {"code", "message", "details"}
    assert result["error_tool_call"]["code"] == code
    assert told in str(result["error_tool_call"]["details"])
    assert environment.state() == ACCOUNTS


def test_integral_floats_are_integers_all_the_way():
    environment = make_environment({"name": "accounts", "state": ACCOUNTS})
    assert json.dumps(environment.call("deposit", {"name": "bob", "amount": 5.0})) == '{"balance": 125}'


def test_environments_share_nothing_and_leave_the_given_state_alone():
    given_state = copy.deepcopy(CALENDAR)
    one = make_environment({"name": "calendar", "state": given_state})
    two = make_environment({"name": "calendar", "state": given_state})
    one.call("book", {"day": "mon", "hour": 9, "name": "bob"})
    one.state()["mon"]["14"] = "somebody"
    assert given_state == CALENDAR and two.state() == CALENDAR
    assert one.state() == {"mon": {"9": "bob", "10": "eve", "14": None}}


def test_every_execution_is_counted_refused_ones_too():
    environment = make_environment({"name": "accounts", "state": ACCOUNTS})
    before = execution_count()
    environment.call("balance", {"name": "bob"})
    environment.call("balance", {})
    environment.call("steal", {})
    assert execution_count() - before == 3
    environment.state()
    load_domain("accounts").execute(ACCOUNTS, "balance", {"name": "bob"})  # writing tasks is not an execution
    assert execution_count() - before == 3


@pytest.mark.parametrize("spec", [{"name": "bank", "state": {}}, {"name": "tiny", "state": {}}])
def test_an_unknown_domain_is_an_error_that_names_those_there_are(spec):
    with pytest.raises(ValueError, match=f"'{spec['name']}'; there are: accounts, calendar, library, shop"):
        make_environment(spec)


@pytest.mark.parametrize("spec", [{"name": "shop"}, {"name": "shop", "state": {}, "seed": 1}, "shop", None])
def test_a_malformed_spec_is_an_error(spec):
    with pytest.raises(ValueError, match="an environment is"):
        make_environment(spec)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["accounts", "calendar", "library", "shop"]), st.randoms(use_true_random=False))
def test_execute_is_pure_total_and_gives_declared_results(name, rng):
    """Over random well-formed calls: same in, same out; the state passed in stays; results are as declared."""
    domain = load_domain(name)
    state = domain.sample_state(rng)
    for _ in range(20):
        tool = rng.choice(domain.TOOLS)["function"]
        arguments = {key: rng.choice(domain.VALUES[key]) for key in tool["parameters"]["properties"]}
        before = json.dumps(state)
        first, second = (domain.execute(state, tool["name"], arguments) for _ in range(2))
        assert json.dumps(first) == json.dumps(second) and json.dumps(state) == before
        state, result = first
        assert result.get("error") in domain.ERRORS if "error" in result else set(result) <= set(domain.FIELDS)


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False))
def test_transfers_neither_make_nor_lose_money(rng):
    domain = load_domain("accounts")
    state = domain.sample_state(rng)
    total = sum(state.values())
    for _ in range(20):
        source, target = rng.choice(sorted(state)), rng.choice(sorted(state))
        arguments = {"source": source, "target": target, "amount": rng.randint(-5, 300)}
        state, _ = domain.execute(state, "transfer", arguments)
        assert sum(state.values()) == total and min(state.values()) >= 0


OWN = """
from __future__ import annotations
import dataclasses
from envace_jax.envs import function_schema

@dataclasses.dataclass
class Step:
    amount: int

TOOLS = [function_schema("add", amount={"type": "integer"})]

def execute(state, name, arguments):
    count = state["count"] + Step(**arguments).amount
    return {"count": count}, {"count": count}
"""


def test_a_file_from_outside_is_an_environment_once_the_settings_name_it(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "_own", {})
    (tmp_path / "counter.py").write_text(OWN)
    with pytest.raises(ValueError, match="no environment is called 'counter'"):  # a task alone cannot have it loaded
        load_domain("counter")
    envs.add_file(tmp_path / "counter.py")
    assert play("counter", {"count": 1}, ("add", {"amount": 2}, {"count": 3})) == {"count": 3}
    with pytest.raises(ValueError, match="no environment is called 'other'; there are: .*shop.*counter"):
        load_domain("other")
    envs.add_file(tmp_path / "counter.py")  # the same file again, as a second start does
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "counter.py").write_text(OWN)
    with pytest.raises(ValueError, match="an environment is called 'counter' already"):
        envs.add_file(tmp_path / "twin" / "counter.py")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("shop.py", OWN, "an environment is called 'shop' already; rename the file"),
        ("a.py", "TOOLS = []", "no environment, which has TOOLS and execute"),
        ("a.py", "1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("a.py", "def", "cannot be loaded: SyntaxError"),
        ("a.txt", OWN, "not a Python file; an environment's name ends in .py"),
        ("a.py", None, "there is no environment file"),
    ],
)
def test_a_file_that_is_no_environment_is_refused(name, text, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "_own", {})
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        envs.add_file(tmp_path / name)
    assert reason in str(refused.value) and "\n" not in str(refused.value) and envs._own == {}


def test_a_runs_settings_load_the_files_they_name(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "_own", {})
    (tmp_path / "counter.py").write_text(OWN)
    task = dataclasses.replace(tiny.tasks("train", 1, 0)[0], environment={"name": "counter", "state": {"count": 1}})
    write_tasks(tmp_path / "t.jsonl", [task])
    data = {"source": str(tmp_path / "t.jsonl"), "tasks_per_step": 1}
    settings = {"data": data, "rollout": {"responder": "real"}, "model": {"path": "asset:tiny_base"}}
    lengths = {"prompts": {"max_act_prompt": 900, "max_rehearse_prompt": 900}, "sampler": {"max_length": 2000}}
    lengths |= {"limits": {"act_context": 1000, "act_response": 100, "rehearse_response": 100}}
    run = configuration.from_config_dict(settings | lengths)
    with pytest.raises(ValueError, match="no environment is called 'counter'"):
        inputs.read_inputs(run, ChecklistReward())
    named = dataclasses.replace(run.data, environments=(str(tmp_path / "counter.py"),))
    assert len(inputs.read_inputs(dataclasses.replace(run, data=named), ChecklistReward()).tasks) == 1

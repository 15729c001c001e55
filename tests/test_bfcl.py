"""BFCL through our environment: gold and idle conversations, what is refused, tasks from its files, and rollouts.

What needs the package runs where ENVACE_BFCL_PYTHON names an interpreter that has it (docs/environments.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import environment_baselines
import numpy as np
import pytest

from envace_jax import envs
from envace_jax.envs import bfcl, bfcl_child, tiny, worker
from envace_jax.records import record_from_task, task_from_record
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.types import ToolCall

PYTHON = os.environ.get(bfcl.PYTHON_VARIABLE)
with_package = pytest.mark.skipif(
    not PYTHON, reason=f"BFCL has an interpreter of its own: set {bfcl.PYTHON_VARIABLE} (docs/environments.md)"
)
WAIT = 60
SIMULATORS = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils"


@pytest.fixture(scope="module")
def base():
    return bfcl.tasks("multi_turn_base")


def call(environment, name, arguments):
    answer = environment.call(name, arguments)
    return answer.result(WAIT) if hasattr(answer, "result") else answer


# --- what is executed, with a stand-in for the package ---


class MathAPI:
    def add(self, a, b=1):
        return {"result": a + b}

    def fill(self):
        raise MemoryError

    def _hidden(self):
        return "hidden"


@pytest.fixture
def simulators(monkeypatch):
    module = types.ModuleType(SIMULATORS)
    vars(module).update(run1_x_MathAPI_instance=MathAPI(), run10_x_MathAPI_instance=MathAPI(), os=os, secret=["s"])
    monkeypatch.setitem(sys.modules, SIMULATORS, module)
    return module


def test_a_call_of_a_simulator_with_literals_is_executed(simulators):
    assert bfcl_child.execute("run1_x_MathAPI_instance.add(a=2,b=-3)") == {"result": -1}
    assert bfcl_child.execute("run1_x_MathAPI_instance.add([1], b=[{'c': 'd()'}])") == {"result": [1, {"c": "d()"}]}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "open('/etc/passwd')", "print('x')", "os.getcwd()", "secret.pop()", "secret",
        "run1_x_MathAPI_instance", "run1_x_MathAPI_instance.add", "run1_x_MathAPI_instance._hidden()",
        "run1_x_MathAPI_instance.__class__()", "run1_x_MathAPI_instance.add.__call__(1)", "nobody.add(1)",
        "run1_x_MathAPI_instance.add(a=open('/etc/passwd'))", "run1_x_MathAPI_instance.add(a=secret)",
        "run1_x_MathAPI_instance.add(a=run1_x_MathAPI_instance.add(a=1))", "run1_x_MathAPI_instance.add(*[1])",
        "run1_x_MathAPI_instance.add(**{'a': 1})", "run1_x_MathAPI_instance.add(a=(lambda: 1)())",
        "run1_x_MathAPI_instance.add(a=1) or secret.pop()", "[run1_x_MathAPI_instance.add(a=1), secret.pop()]",
        "run1_x_MathAPI_instance.add(a=[secret for _ in 'ab'])", "run1_x_MathAPI_instance.add(a=f'{secret}')",
        "(x := secret)", "run1_x_MathAPI_instance.add(a=1); secret.pop()", "vars()", "getattr(os, 'system')('true')",
    ],
)  # fmt: skip
def test_nothing_else_is_executed(simulators, text, monkeypatch):
    monkeypatch.setattr(MathAPI, "add", lambda *_, **__: pytest.fail("executed"))
    with pytest.raises((NameError, ValueError, SyntaxError, TypeError)):
        bfcl_child.execute(text)
    assert simulators.secret == ["s"]


def test_running_out_of_memory_is_not_turned_into_a_result(simulators):
    with pytest.raises(bfcl_child.OutOfMemory):  # which `except Exception` of BFCL's executor lets through
        bfcl_child.execute("run1_x_MathAPI_instance.fill()")
    assert not issubclass(bfcl_child.OutOfMemory, Exception)


def test_forgetting_a_run_leaves_the_others(simulators):
    bfcl_child.forget("run1")
    assert [name for name in vars(simulators) if name.startswith("run")] == ["run10_x_MathAPI_instance"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("eval", {}), ("__class__", {}), ("_load_scenario", {}), ("os.system", {"command": "true"}), ("add()", {}),
        ("math.add", {}), ("", {}), ("add\n", {}),
        ("add", {"a=secret, b": 1}), ("add", {"": 1}), ("add", {"class": 1}), ("add", {"a b": 1}), ("add", {"*a": 1}),
        ("add", {"ａ": 1}), ("add", {"a": float("nan")}), ("add", {"a": [{"b": float("inf")}]}),
        ("add", {"a": 1 << 2000}), ("add", {"a": {"b": [-(1 << 2000)]}}),
    ],
)  # fmt: skip
def test_unlisted_names_and_arguments_that_cannot_be_written_are_refused(name, arguments):
    refusal = bfcl_child.refused({"add": "add", "math_add": "math.add"}, name, arguments)
    assert set(refusal) == {"error_tool_call"} and refusal["error_tool_call"]["code"] in (
        "unknown_tool",
        "invalid_arguments",
    )
    assert bfcl_child.refused({"add": "add"}, "add", {"a": [1.5, None, True, {"x y": "class"}]}) is None


@pytest.mark.parametrize(
    "entry",
    [
        {"id": "multi_turn_base_1'+x+'"}, {"id": "multi_turn_base_1 "}, {"id": "memory_vector_1"},
        {"id": "simple_java_1"},
        {"id": "multi_turn_base_1", "involved_classes": ["WebSearchAPI"]},
        {"id": "multi_turn_base_1", "involved_classes": ["os"]},
    ],
)  # fmt: skip
def test_entries_whose_names_would_become_code_are_refused(entry):
    with pytest.raises(RuntimeError):
        bfcl_child.check_entry(entry)
    bfcl_child.check_entry({"id": "multi_turn_base_1", "involved_classes": ["MathAPI"]})


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('{"a": 1}', {"a": 1}), ("[1]", [1]), ("done", {"result": "done"}), ("None", {"result": "None"}),
        ("3.5", {"result": 3.5}), ("NaN", {"result": "NaN"}), ("Error during execution: x", {"error": "x"}),
    ],
)  # fmt: skip
def test_results_become_json_objects_or_lists(text, result):
    if "error" in result:
        result = {"error": text}
    assert bfcl_child.as_result(text) == result


# --- tasks, without the package ---

DOCUMENT = {
    "name": "math.mean",
    "description": "Mean.",
    "parameters": {
        "type": "dict",
        "required": ["numbers"],
        "properties": {
            "numbers": {"type": "array", "items": {"type": "float"}, "description": "Which."},
            "options": {"type": "dict", "properties": {"weight": {"type": "float", "description": "How much."}}},
            "pair": {"type": "tuple", "items": {"type": "integer"}, "description": "Two."},
            "other": {"type": "any", "description": "Any."},
        },
    },
    "response": {"type": "dict"},
}
ENTRY = {
    "id": "simple_python_1",
    "question": [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]],
    "function": [DOCUMENT], "missed": {}, "involved_classes": [], "initial_config": {},
    "ground_truth": [{"math.mean": {"numbers": [[1, 2], [2, 1]], "options": [{"weight": [1.0]}, ""]}}],
}  # fmt: skip


def test_functions_become_openai_schemas():
    tool = bfcl.tool_of(DOCUMENT)["function"]
    assert tool["name"] == "math_mean" and tool["response"] == {"type": "dict"}
    assert tool["parameters"]["type"] == "object" and tool["parameters"]["required"] == ["numbers"]
    properties = tool["parameters"]["properties"]
    assert properties["numbers"] == {"type": "array", "items": {"type": "number"}, "description": "Which."}
    assert properties["options"]["type"] == "object" and properties["pair"]["type"] == "array"
    assert properties["options"]["properties"]["weight"] == {
        "type": "number", "format": "float", "description": "How much. This is a float type value.",
    }  # fmt: skip
    assert properties["other"]["type"] == "string"
    assert DOCUMENT["parameters"]["type"] == "dict"  # the document stays as it was


def test_single_turn_entries_are_scored_by_what_their_answers_accept():
    task = bfcl.task_of(ENTRY, None)
    assert (task.task_id, task.messages, task.user_turns) == (
        "bfcl:simple_python_1",
        ({"role": "system", "content": "Be brief."},),
        ("?",),
    )
    assert task.reference == () and task.environment["name"] == "bfcl"

    def reward(name, arguments):
        called = {"role": "assistant", "content": "", "tool_calls": [{"name": name, "arguments": arguments}]}
        messages = [{"role": "user", "content": "?"}, called, {"role": "tool", "name": name, "content": "{}"}]
        return ChecklistReward().score_turn(task, 0, messages).result().reward

    assert reward("math_mean", {"numbers": [2, 1]}) == 1.0  # the optional one may be left out
    assert reward("math_mean", {"numbers": [1, 2.0], "options": {"weight": 1}}) == 1.0
    assert reward("math_mean", {"numbers": [1, 1]}) == 0.0
    assert reward("math_mean", {"numbers": [1, 2], "options": {"weight": 2}}) == 0.0
    assert reward("math_mean", {"numbers": [1, 2], "pair": [1, 2]}) == 0.0
    assert reward("math.mean", {"numbers": [1, 2]}) == 0.0 and reward("math_mean", {}) == 0.0


def test_irrelevant_entries_ask_for_no_call():
    task = bfcl.task_of({**ENTRY, "id": "irrelevance_3", "ground_truth": None}, None)
    assert task.checklist[0][0].check == {"kind": "no_call"}


def test_functions_that_are_held_back_are_told_of_in_their_turn():
    user = [{"role": "user", "content": "first"}]
    entry = {
        **ENTRY, "id": "multi_turn_miss_func_1", "question": [user, []],
        "missed": {"1": [{**DOCUMENT, "name": "late"}]},
        "involved_classes": ["MathAPI"], "ground_truth": [[], ["late([1])"]],
    }  # fmt: skip
    task = bfcl.task_of(entry, [[], [["late", {"numbers": [1]}, {"result": 1}]]])
    assert [tool["function"]["name"] for tool in task.tools] == ["math_mean"]
    told, words = task.user_turns[1].split("\n")
    assert json.loads(told)[0]["name"] == "late" and words == bfcl.NEW_FUNCTIONS
    assert bfcl_child.names_of(task.environment["state"]).keys() == {"math_mean", "late"}
    assert [items[0].check["kind"] for items in task.checklist] == ["no_call", "call"]
    assert task.reference == ((ToolCall("late", {"numbers": [1]}), '{"result": 1}'),)


def test_a_package_that_is_missing_is_said_in_one_line(monkeypatch):
    monkeypatch.setenv(bfcl.PYTHON_VARIABLE, sys.executable)
    bfcl._pool.cache_clear()
    try:
        with pytest.raises(ValueError) as caught:
            bfcl.tasks("multi_turn_base")
    finally:
        bfcl._pool.cache_clear()
    line = str(caught.value)
    assert "lacks bfcl-eval" in line and "pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0 filelock" in line
    assert bfcl.PYTHON_VARIABLE in line and "\n" not in line


# --- with the package ---


@with_package
def test_gold_solves_every_entry_and_pwd_none():
    (row,) = environment_baselines.bfcl_rows(["multi_turn_base"])["rows"]
    assert (row["tasks"], row["gold"], row["pwd"], row["nothing"]) == (200, 200, 0, 0)


@with_package
def test_results_are_those_of_the_packages_own_executor(base):
    """Its `eval` instead of ours, in a process of its own, on all gold calls."""
    program = f"""
import json, sys
from {SIMULATORS} import execute_multi_turn_func_call as run
assert "eval" not in sys.modules["{SIMULATORS}"].__dict__
for line in sys.stdin:
    e = json.loads(line)
    turns = [run(t, e["initial_config"], e["involved_classes"], "m", e["id"])[0] for t in e["ground_truth"]]
    print(json.dumps([text for turn in turns for text in turn]))
"""
    lines = "".join(json.dumps(task.environment["state"]) + "\n" for task in base)
    done = subprocess.run([PYTHON, "-c", program], input=lines, capture_output=True, text=True, check=True)
    theirs = [json.loads(line) for line in done.stdout.splitlines()]
    ours = [[json.loads(result) for _, result in task.reference] for task in base]
    assert len(theirs) == 200 and ours == [list(map(bfcl_child.as_result, texts)) for texts in theirs]


@with_package
def test_attempts_have_states_of_their_own(base):
    task = next(task for task in base if task.environment["state"]["involved_classes"] == ["GorillaFileSystem"])
    spec = json.dumps(task.environment)
    one, *others = [envs.make_environment(task.environment) for _ in range(bfcl.WORKERS + 1)]  # two in one child
    before = others[0].state().result(WAIT)
    counted = envs.execution_count()
    assert call(one, "mkdir", {"dir_name": "fresh"}) != call(one, "mkdir", {"dir_name": "fresh"})  # it exists by then
    assert envs.execution_count() == counted + 2
    assert "fresh" in str(one.state().result(WAIT)) and all(other.state().result(WAIT) == before for other in others)
    one.close()
    three = envs.make_environment(task.environment)
    assert three.state().result(WAIT) == before and json.dumps(task.environment) == spec


@with_package
def test_attacks_reach_nothing(base, tmp_path):
    task = next(task for task in base if task.environment["state"]["involved_classes"] == ["GorillaFileSystem"])
    environment = envs.make_environment(task.environment)
    before, canary = environment.state().result(WAIT), tmp_path / "canary"
    code = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    for name, arguments in [
        (code, {}), (f"cd({code})", {}), ("ls.__globals__", {}), ("__import__", {"name": "os"}), ("print", {}),
        ("_load_scenario", {"scenario": {}}), ("exec", {"source": code}), ("cd", {f"folder={code}, x": 1}),
        ("cd", {"folder": float("nan")}), ("cd", {"folder": 10**5000}), ("cd", {"folder": "\ud800"}),
        ("cd", {"folder": json.loads("[" * 150 + "]" * 150)}), ("add", {"a": 1, "b": 2}),
        ("post_tweet", {"content": "x"}),
    ]:  # fmt: skip
        assert set(call(environment, name, arguments)) == {"error_tool_call"}, name
    for folder in (f"{code}", f"'), {code}, ('", f'"), {code}, ("', f"\\'), {code}#", f"' + {code} + '"):
        assert "error" in call(environment, "cd", {"folder": folder})  # no such folder
    assert "error" in call(environment, "cd", {"folder": {"__class__": code}})
    assert "unexpected keyword" in call(environment, "cd", {"unheard_of": code})["error"]
    assert environment.state().result(WAIT) == before and not canary.exists()


@with_package
def test_a_call_without_end_is_a_fault_of_its_episode_alone(base, tmp_path):
    task = next(task for task in base if "MathAPI" in task.environment["state"]["involved_classes"])
    pool = worker.WorkerPool(
        Path(bfcl_child.__file__), PYTHON, workers=1, timeout_s=4, memory_bytes=bfcl.MEMORY_BYTES,
        variables={"BFCL_PROJECT_ROOT": str(tmp_path)},
    )  # fmt: skip
    try:
        guilty, innocent = pool.open(task.environment["state"]), pool.open(task.environment["state"])
        first = innocent.call("add", {"a": 1, "b": 2}).result(WAIT)
        endless = guilty.call("power", {"base": 7, "exponent": 10**9})
        second = innocent.call("add", {"a": 1, "b": 2})
        with pytest.raises(worker.EnvironmentFault, match="no answer within 4 s"):
            endless.result(WAIT)
        assert second.result(WAIT) == first == {"result": 3}
    finally:
        pool.close()


@with_package
def test_more_than_twenty_steps_in_a_turn_fail(base):
    task = base[0]
    plan = environment_baselines._gold_calls(task)
    conversation = []
    for text, calls in zip(task.user_turns, plan, strict=True):
        conversation.append({"role": "user", "content": text})
        written = [{"name": called.name, "arguments": dict(called.arguments)} for called in calls]
        conversation.append({"role": "assistant", "content": "", "tool_calls": written})
    looking = {"role": "assistant", "content": "", "tool_calls": [{"name": "pwd", "arguments": {}}]}
    assert bfcl.score(task, conversation).result(WAIT) == 1.0
    assert bfcl.score(task, conversation + [looking] * 19).result(WAIT) == 1.0
    assert bfcl.score(task, conversation + [looking] * 20).result(WAIT) == 0.0
    assert bfcl.score(task, conversation[:-2]).result(WAIT) == 0.0  # the last user turn was not reached
    odd = {"role": "assistant", "content": "", "tool_calls": [{"name": "pwd", "arguments": {"x": float("nan")}}]}
    assert bfcl.score(task, [*conversation, odd]).result(WAIT) == 1.0  # refused, so it never ran


@with_package
@pytest.mark.parametrize(
    ("category", "count"), [("simple_python", 400), ("multiple", 200), ("parallel", 200), ("irrelevance", 240)]
)
def test_single_turn_entries_are_scored_by_bfcls_own_checker(category, count):
    tasks = bfcl.tasks(category)
    assert len(tasks) == count and len({task.task_id for task in tasks}) == count

    def outcome(task, calls):
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        return bfcl.score(task, [*task.messages, {"role": "user", "content": task.user_turns[0]}, said])

    answered = [
        [
            {"name": item.check["name"], "arguments": accepted(item.check["arguments"])}
            for item in task.checklist[0]
            if item.check["kind"] == "call_among"
        ]
        for task in tasks
    ]
    gold = [outcome(task, calls) for task, calls in zip(tasks, answered, strict=True)]
    share = np.mean([future.result(WAIT) for future in gold])
    assert share == 1.0 if category == "irrelevance" else share > 0.98  # a few answers are not of the declared type
    other = [{"name": "unheard_of", "arguments": {}}]
    idle = [outcome(task, [] if category != "irrelevance" else answer_to(task)) for task in tasks[:50]]
    assert not any(future.result(WAIT) for future in idle)
    assert {outcome(task, other).result(WAIT) for task in tasks[:5]} == {0.0}  # an unlisted function is a call too


def accepted(arguments):
    """The first value that an answer accepts for each argument, without those that need not be given."""
    return {
        name: accepted(options[0]) if isinstance(options[0], dict) else options[0]
        for name, options in arguments.items()
        if "" not in options
    }


def answer_to(task):
    return [{"name": task.tools[0]["function"]["name"], "arguments": {}}]


@with_package
def test_files_of_ones_own_are_read_and_what_is_wrong_is_said(tmp_path, base):
    (tmp_path / "possible_answer").mkdir()
    entry = {
        "id": "multi_turn_base_900", "question": [[{"role": "user", "content": "Add 1 and 2."}]],
        "initial_config": {}, "involved_classes": ["MathAPI"],
    }  # fmt: skip
    answer = {"id": "multi_turn_base_900", "ground_truth": [["add(1,b=2)"]]}

    def read(entry, answer):
        path = tmp_path / "mine.json"
        path.write_text(entry if isinstance(entry, str) else json.dumps(entry) + "\n")
        (tmp_path / "possible_answer" / "mine.json").write_text(json.dumps(answer))
        return bfcl.tasks(str(path))

    (task,) = read(entry, answer)
    assert task.reference == ((ToolCall("add", {"a": 1, "b": 2}), '{"result": 3}'),)
    assert {tool["function"]["name"] for tool in task.tools} >= {"add", "mean"} and "ls" not in str(task.reference)
    for broken, given, reason in [
        ("{", answer, "line 1: no JSON object"), ('{"id": 1}', answer, "line 1: no JSON object"),
        ({**entry, "question": None}, answer, "has no question"), ({**entry, "id": "x_1"}, answer, "of no category"),
        ({**entry, "involved_classes": ["Nothing"]}, answer, "'Nothing' is no simulator"),
        (entry, {**answer, "id": "multi_turn_base_1"}, "has no answer"),
        (entry, {**answer, "ground_truth": [["open('x')"]]}, "is of no function of the entry"),
        ({**entry, "question": [[]]}, answer, "turn 0 has no user message"),
        ({**entry, "question": [[{"role": "user"}]]}, answer, r"not as BFCL writes messages or functions \(KeyError"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            read(broken, given)
    canary = tmp_path / "canary"
    for gold in (f"__import__('pathlib').Path({str(canary)!r}).touch()", f"open({str(canary)!r}, 'w')"):
        with pytest.raises(ValueError, match="is of no function of the entry"):
            read(entry, {**answer, "ground_truth": [[gold]]})
    assert not canary.exists()
    with pytest.raises(ValueError, match="no category or file nothing; categories are simple_python"):
        bfcl.tasks("nothing")


def test_checks_of_accepted_values_are_read_from_records(tmp_path):
    task = tiny.tasks("train", 1, 0)[0]
    record = record_from_task(task)
    item = record["extra_info"]["interaction_kwargs"]["checklist_list"][0][0][0]
    item["check"] = {"kind": "call_among", "name": task.tools[0]["function"]["name"], "arguments": {"a": [1, ""]}}
    assert task_from_record(record, 0).checklist[0][0].check == item["check"]
    item["check"] = {"kind": "call_among", "name": "f", "arguments": {"a": 1}}
    with pytest.raises(ValueError, match="call_among check are not lists of what is accepted"):
        task_from_record(record, 0)

"""A judge against program checks: figures worked by hand, a judge of known errors, and a start that was stopped."""

from __future__ import annotations

import dataclasses
import json

import judge_agreement
import numpy as np
import pytest
import simulator
from endpoint_server import FaultyServer
from judge_agreement import Pair

from envace_jax.envs import tiny
from envace_jax.metrics import json_line
from envace_jax.rewards import judge as rewards_judge
from envace_jax.rewards.judge import question, read_steps
from envace_jax.types import CheckItem, Task

CALLS, REPLY = "assistant.tool_calls", "assistant.content.user_visible_reply"


def pairs(cells: dict[tuple[bool, bool], int], kind: str = CALLS, cluster: int = 0) -> list[Pair]:
    return [Pair(cluster, kind, *cell) for cell, count in cells.items() for _ in range(count)]


def test_rates_worked_by_hand():
    found = judge_agreement.agreement(
        pairs({(True, True): 20, (True, False): 5, (False, True): 10, (False, False): 15})
    )
    # observed 35/50; by chance (30 * 25 + 20 * 25) / 50^2 = 0.5
    assert found == {
        "items": 50, "hold": 25, "judged_to_hold": 30, "accuracy": 0.7, "precision": 20 / 30, "recall": 0.8,
        "kappa": pytest.approx(0.4),
    }  # fmt: skip
    assert judge_agreement.agreement([])["accuracy"] is None
    always = judge_agreement.agreement(pairs({(True, True): 3, (False, True): 1}))
    assert (always["accuracy"], always["recall"], always["kappa"]) == (0.75, 1.0, 0.0)
    alike = judge_agreement.agreement(pairs({(True, True): 3}))
    assert alike["accuracy"] == 1.0 and alike["kappa"] is None  # chance alone agrees


def test_the_interval_draws_whole_turns():
    right = pairs({(True, True): 1, (False, False): 1})
    wrong = pairs({(True, False): 1, (False, True): 1}, cluster=1)
    # A turn twice gives 1 or -1, each in a quarter of the draws; drawn item by item, such ends would be rare.
    assert judge_agreement.kappa_interval(right + wrong) == (-1.0, 1.0)
    assert judge_agreement.kappa_interval(right) == (1.0, 1.0)
    assert judge_agreement.kappa_interval([]) is None
    many = [pair for turn in range(40) for pair in pairs({(True, True): 1, (False, turn % 4 == 0): 1}, cluster=turn)]
    low, high = judge_agreement.kappa_interval(many)
    assert judge_agreement.agreement(many)["kappa"] == pytest.approx(0.75)
    assert 0.55 < low < 0.75 < high < 0.9
    assert judge_agreement.kappa_interval(many) == (low, high)


def test_items_without_a_check_and_what_items_depend_on_are_left_out():
    reply = {"kind": "reply", "words": ["yes"]}
    items = (
        CheckItem("called?", 0.5, CALLS, check={"kind": "call", "name": "f", "arguments": {}}),
        CheckItem("polite?", 0.25),
        CheckItem("yes?", 0.25, REPLY, dependence=(0,), check=reply),
    )
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes."})
    task = Task("t", (), (), ("?",), (items,), conversation=messages)
    (case,) = judge_agreement.of_references([task], 0)
    assert case.truth == (False, True) and case.kinds == (CALLS, REPLY)
    assert [item.question for item in case.task.checklist[0]] == ["called?", "yes?"]
    assert judge_agreement.case_of(task, 0, messages[:1]) is None
    bare = dataclasses.replace(task, checklist=(items[1:2],))
    assert judge_agreement.of_references([bare], 0) == []


def test_spoilt_copies_fail_checks_and_leave_the_reference_alone():
    tasks = tiny.tasks("heldout", 30, 0)
    before = [json.dumps(task.conversation) for task in tasks]
    references, cases = judge_agreement.of_references(tasks, 0), judge_agreement.of_references(tasks, 3)
    assert [json.dumps(task.conversation) for task in tasks] == before
    assert all(all(case.truth) for case in references) and cases == judge_agreement.of_references(tasks, 3)
    spoilt = [case for case in cases if case not in references]
    # Each spoils one thing of its turn; a changed argument that no item names, say, may go unseen.
    assert len(spoilt) > 60 and sum(not all(case.truth) for case in spoilt) > 0.9 * len(spoilt)
    lost = {kind for case in spoilt for kind, truth in zip(case.kinds, case.truth, strict=True) if not truth}
    assert lost == {kind for case in references for kind in case.kinds}


def asked_text(case) -> str:
    return question(case.messages, read_steps(case.messages), case.task.checklist[case.turn])[1]["content"]


def errs(text: str, item: int) -> bool:
    """Whether the scripted judge is wrong about an item: one in five."""
    return simulator.drawn(f"{text} {item}") % 5 == 0


def scripted_judge(cases, fault=lambda number, body: None) -> FaultyServer:
    truths = {asked_text(case): case for case in cases}

    def answer(body):
        text = body["messages"][1]["content"]
        case = truths[text]
        row = [truth != errs(text, item) for item, truth in enumerate(case.truth)]
        return json.dumps({"verdicts": [row] * len(read_steps(case.messages))})

    return FaultyServer(answer, fault)


def run(tmp_path, server, *arguments):
    with server.running() as url:
        common = ["--url", url, "--model", "j", "--out", str(tmp_path), "--timeout_s", "20", "--retries", "1"]
        return judge_agreement.main([*common, *arguments])


def test_the_errors_of_a_judge_are_found_again(tmp_path, capsys):
    arguments = ("--source", "tiny", "--count", "25", "--spoilt", "2")
    cases = judge_agreement.of_references(tiny.tasks("heldout", 25, 0), 2)
    server = scripted_judge(cases)
    result = run(tmp_path, server, *arguments)
    flat = [
        (kind, truth, errs(asked_text(case), item))
        for case in cases
        for item, (kind, truth) in enumerate(zip(case.kinds, case.truth, strict=True))
    ]
    for name, row in [("all", result["all"]), *result["by_focus"].items()]:
        own = [(truth, wrong) for kind, truth, wrong in flat if name in ("all", kind)]
        held, wrongly = sum(truth for truth, _ in own), sum(wrong for _, wrong in own)
        missed = sum(truth and wrong for truth, wrong in own)
        right = held - missed
        assert row["items"] == len(own) and row["hold"] == held
        assert row["accuracy"] == pytest.approx(1 - wrongly / len(own))
        assert row["recall"] == pytest.approx(right / held)
        assert row["precision"] == pytest.approx(right / (right + wrongly - missed))
    low, high = result["all"]["kappa_interval"]
    assert 0.1 < low < result["all"]["kappa"] < high < 0.8
    assert result["turns"] == len(cases) and result["turns_not_judged"] == 0
    asked = len(server.bodies)
    assert result["judge"]["prompt_tokens"] == 7 * asked and result["judge"]["completion_tokens"] == 3 * asked
    written = json.loads((tmp_path / judge_agreement.RESULT_FILE).read_text())
    assert written["all"]["kappa"] == result["all"]["kappa"] and written["judge_name"] == "j"
    (shown,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("all ")]
    assert shown[1:4] == [str(len(flat)), str(result["all"]["hold"]), f"{result['all']['accuracy']:.3f}"]
    # Stopped half-way and started again: nothing is asked twice, and the figures are those of one start.
    kept = (tmp_path / judge_agreement.VERDICTS_FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / judge_agreement.VERDICTS_FILE).write_bytes(b"".join(kept[: asked // 2]) + kept[-1][:20])
    again = scripted_judge(cases)
    repeated = run(tmp_path, again, *arguments)
    assert len(again.bodies) == asked - asked // 2 and repeated["all"] == result["all"]


def test_faults_are_no_verdicts(tmp_path):
    cases = judge_agreement.of_references(tiny.tasks("heldout", 10, 0), 0)
    lost = {asked_text(case) for case in cases[::4]}

    def fault(number, body):
        return "status 503" if body["messages"][1]["content"] in lost else None

    result = run(tmp_path, scripted_judge(cases, fault), "--source", "tiny", "--count", "10", "--spoilt", "0")
    gone = [case for case in cases if asked_text(case) in lost]
    assert result["turns_not_judged"] == len(gone) > 0
    assert result["all"]["items"] == sum(len(case.truth) for case in cases) - sum(len(case.truth) for case in gone)
    assert result["judge"]["fault_status_503"] == 2 * result["judge"]["given_up"] == 2 * len(lost)


def test_a_runs_trajectories_are_judged_up_to_where_they_were_scored(tmp_path):
    tasks = [task for task in tiny.tasks("heldout", 30, 0) if len(task.user_turns) > 1][:5]
    lines = [
        {"step": 1, "task_id": task.task_id, "messages": task.conversation, "turns": [{}] * (1 + place % 2)}
        for place, task in enumerate(tasks)
    ]
    path = tmp_path / "trajectories.jsonl"
    path.write_text("".join(json_line(line) + "\n" for line in lines))
    cases = judge_agreement.of_trajectories({task.task_id: task for task in tasks}, path)
    assert [(case.task.task_id, case.turn) for case in cases] == [
        (task.task_id, turn) for place, task in enumerate(tasks) for turn in range(1 + place % 2)
    ]
    result = run(tmp_path / "out", scripted_judge(cases), "--count", "30", "--trajectories", str(path))
    assert result["turns"] == len(cases) == 7 and np.isfinite(result["all"]["accuracy"])
    with pytest.raises(ValueError, match=r"line 1: task .* is not among the tasks of --source"):
        judge_agreement.of_trajectories({}, path)


@pytest.mark.slow
def test_a_checkpoint_in_this_process_is_asked_and_its_verdicts_are_kept(tmp_path, monkeypatch):
    """The shipped base cannot write verdicts, so whatever it writes is read as some."""
    arguments = ["--checkpoint", "asset:tiny_base", "--count", "1", "--spoilt", "0", "--out", str(tmp_path)]
    arguments += ["--max_length", "2048", "--slots", "2", "--max_tokens", "4", "--retries", "0"]
    (first, *_) = cases = judge_agreement.of_references(tiny.tasks("heldout", 1, 0), 0)
    monkeypatch.setattr(rewards_judge, "read_verdicts", lambda text, steps, items: ((True,) * items,) * steps)
    result = judge_agreement.main(arguments)
    assert result["turns"] == len(cases) and result["turns_not_judged"] == 0 and all(first.truth)
    assert result["all"]["accuracy"] == 1.0 and result["judge"]["completion_tokens"] <= 4 * len(cases)
    assert judge_agreement.main(arguments)["judge"] == {"cache_hits": len(cases)}
    monkeypatch.undo()
    (tmp_path / judge_agreement.VERDICTS_FILE).unlink()
    unreadable = judge_agreement.main(arguments)
    assert unreadable["turns_not_judged"] == unreadable["judge"]["given_up"] == len(cases)
    assert unreadable["all"]["accuracy"] is None


def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(SystemExit, match="must be addresses such as .*--url"):
        judge_agreement.main(["--model", "j", "--out", str(tmp_path), "--count", "1"])

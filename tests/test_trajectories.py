"""The trajectories that the viewer is given: what is worked out of each, and which are chosen where not all fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import viewer_records as made

from envace_jax import dumps
from envace_jax.reporting import compact
from envace_jax.reporting.trajectories import packed_size, viewer_data

LARGE = 10_000_000  # bytes: everything fits


def data_of(folder: Path, records: Sequence[Mapping[str, Any]], most: int = LARGE) -> dict[str, Any]:
    return viewer_data(made.write(folder, records), most)


def shown(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows and bodies of the data, joined."""
    rows = [dict(zip(data["columns"], values, strict=True)) for values in zip(*data["columns"].values(), strict=True)]
    return [row | json.loads(body) for row, body in zip(rows, data["bodies"], strict=True)]


# --- what is worked out ---


def assistant(*calls: tuple[str, dict], content: str = "") -> dict[str, Any]:
    entries = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": entries} if entries else {})}


def result(name: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": content, **fields}


def test_messages_are_given_their_segments():
    """Also where the task's own messages come first, a call is answered from outside, and a rehearsal is cut off."""
    roles = ["act", "rehearse", "rehearse", "act", "act", "rehearse"]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        assistant(("a", {})),  # given by the task
        result("a", "{}"),
        assistant(("a", {}), ("b", {})),
        result("a", "{}", rehearsed=True),
        result("b", "{}", rehearsed=True),
        assistant(("c", {})),
        result("c", "{}", rehearsed=False),
        assistant(("d", {})),  # its rehearsal was cut off, so nothing follows
    ]
    steps = compact.align(messages, [{"role": role} for role in roles])
    assert [step.get("segment") for step in steps] == [None, None, None, None, 0, 1, 2, 3, None, 4]
    assert [step.get("call") for step in steps] == [None, None, None, 0, None, 0, 1, None, 0, None]


def test_recorded_results_are_found_by_call():
    """The first of two equal calls is compared with the first; numbers and order count as JSON has them."""
    record = made.attempt_of(1, 1, 0)
    call = ("look_up", {"item": "lamp", "n": 1})
    record["task"]["reference"] = [
        [{"name": "look_up", "arguments": {"n": 1.0, "item": "lamp"}}, '{"a": 1, "b": 2}'],
        [{"name": "order", "arguments": {}}, '{"done": true}'],
        [{"name": "look_up", "arguments": {"item": "lamp", "n": 1}}, '{"a": 3}'],
    ]
    record["messages"] = [
        {"role": "user", "content": "u"},
        assistant(call),
        result("look_up", '{"b": 2.0, "a": 1}', rehearsed=True),
        assistant(call, ("order", {"n": True})),
        result("look_up", '{"a": 1, "b": 2}', rehearsed=True),
        result("order", '{"done": true}', rehearsed=True),
        assistant(call),
        result("look_up", '{"a": 3}', rehearsed=False),
    ]
    tables = compact.Tables()
    one = compact.compact(record, tables)
    steps = json.loads(one.body)["steps"]
    assert [step.get("reference") for step in steps] == [None, None, 0, None, 2, None, None, None]
    assert [step.get("differs") for step in steps] == [None, None, False, None, True, None, None, None]
    assert (one.row["compared"], one.row["differing"]) == (2, 1)
    assert compact.same_result("not JSON", "not JSON") and not compact.same_result("[1]", "[true]")


def test_what_attempts_share_is_kept_once_and_numbers_are_short(tmp_path):
    records = made.group_of(3, 5)
    records[0]["segments"][0]["pieces"][0] = "\U0001f600<tool_call>\n"  # two units in a browser's count
    data = data_of(tmp_path, records)
    assert len(data["tasks"]) == 1 and len(data["messages"]) == 3  # the system's and two users'
    first = shown(data)[0]
    part, source = first["segments"][0], records[0]["segments"][0]
    assert part["text"] == "".join(source["pieces"]) and "tokens" not in part
    assert part["lengths"][:2] == [14, len(source["pieces"][1])]
    assert part["logprobs"] == [round(100 * value) for value in source["logprobs"]]
    assert part["advantage"] == pytest.approx(source["advantage"], abs=1e-4)
    trained = {part["trained"] for part in records[0]["segments"]}
    assert first["trained"] == ("all" if trained == {True} else "none")
    assert first["act_tokens"] == sum(len(one["tokens"]) for one in records[0]["segments"] if one["role"] == "act")
    plain = len(json.dumps(records))
    assert len(json.dumps(data)) < 0.65 * plain  # and that before compression


def test_old_records_are_taken_as_they_are(tmp_path):
    data = data_of(tmp_path, [made.old(record) for record in made.group_of(1, 2)])
    for row in shown(data):
        assert (row["group"], row["trained"], row["compared"]) == (None, None, 0)
        assert row["segments"][0]["tokens"] and "text" not in row["segments"][0]
    assert data["tasks"] == [{"task_id": "shop-0002"}] and data["left_out"]["text"] == ""


# --- what is chosen ---


def test_what_does_not_fit_is_left_out_fairly_and_said(tmp_path):
    records = made.run_of(40, 4)
    whole = data_of(tmp_path, records)
    most = packed_size(whole) // 4
    data = viewer_data(tmp_path, most)
    assert 0.8 * most < packed_size(data) <= most
    rows = shown(data)
    assert len(rows) + data["left_out"]["trajectories"] == len(records)
    assert f"{data['left_out']['trajectories']:,} trajectories" in data["left_out"]["text"]
    steps = sorted({row["step"] for row in rows})
    low, high = [step for step in steps if step <= 20], [step for step in steps if step > 20]
    assert low == list(range(1, len(low) + 1)) and high == list(range(41 - len(high), 41))  # both ends
    assert abs(len(low) - len(high)) <= 2
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault((row["step"], row["group"]), []).append(row)
    assert {len(group) for group in groups.values()} == {4}  # whole groups
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)


def test_failed_groups_come_before_others_of_their_step(tmp_path):
    records = [record for number in range(30) for record in made.group_of(1, number)]
    failed = {record["group_id"] for record in records if record["status"] == "failed"}
    untrained = {record["group_id"] for record in records if not record["segments"][0]["trained"]}
    assert 2 <= len(failed) < 15
    data = data_of(tmp_path, records, packed_size(data_of(tmp_path, records)) // 2)
    kept = {row["group"] for row in shown(data)}
    assert failed <= kept and len(kept) < 30
    assert (untrained <= kept) or kept <= untrained | failed


def test_a_trajectory_larger_than_the_space_keeps_no_other_out(tmp_path):
    records = made.run_of(4, 2)
    large = copy.deepcopy(records[-1])
    large["messages"][-1]["content"] = "".join(chr(33 + (7919 * i * i) % 9000) for i in range(400_000))
    data = data_of(tmp_path, [*records[:-1], large], 60_000)
    assert packed_size(data) <= 60_000
    assert data["left_out"]["trajectories"] == 4 and len(data["bodies"]) == len(records) - 4  # its group


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path):
    records = made.run_of(2, 1)
    folder = made.write(tmp_path, records)
    file = folder / "trajectories.jsonl"
    broken = copy.deepcopy(records[0])
    del broken["segments"]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, json.dumps(broken) + "\n", '{"step": 2, "x\n', "[]\n", '{"step": 3, "task_']))
    data = viewer_data(folder, LARGE)
    assert len(data["bodies"]) == len(records)
    notes = "\n".join(data["notes"])
    assert "step 1: a trajectory was left out, no 'segments'" in notes
    assert "line 11: left out" in notes and "Expecting" in notes or "Invalid" in notes or "Unterminated" in notes
    assert len(data["notes"]) == 3  # the last line was cut off by a kill, which is no fault
    assert viewer_data(tmp_path / "nothing", LARGE)["bodies"] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"group_id": [1]}, {"group_id": {"a": 1}}, {"group_id": "a"}, {"group_id": 0.5}, {"attempt": float("inf")},
        {"messages": [[[[]]]] * 3}, {"logprobs": [float("-inf")]},
        {"task": {"user_turns": json.loads("[" * 300 + "]" * 300)}},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_no_run_wrote_keeps_no_other_out(tmp_path, changes):
    records = made.run_of(2, 1, 2)
    broken = copy.deepcopy(records[0])
    (broken["segments"][0] if "logprobs" in changes else broken).update(changes)
    data = data_of(tmp_path, [broken, *records[1:]])
    assert len(data["bodies"]) == 3 and len(data["notes"]) == 1 and "a trajectory was left out" in data["notes"][0]


def test_a_step_beyond_a_browsers_numbers_is_no_step(tmp_path):
    folder = made.write(tmp_path, made.run_of(1, 1, 2))
    with open(folder / "trajectories.jsonl", "a") as file:
        for step in ("1" * 5000, "1" * 30, "-1"):
            file.write(f'{{"step": {step}, "segments": []}}\n')
    data = viewer_data(folder, LARGE)
    assert len(data["bodies"]) == 2 and [note.partition(":")[0][-6:] for note in data["notes"]] == [
        "line 3", "line 4", "line 5"
    ]  # fmt: skip


def test_a_dumped_step_takes_the_place_of_its_samples(tmp_path, monkeypatch):
    records = made.run_of(3, 2)
    samples = [record for record in records if record["attempt"] == 0]

    def of_step(path: Path) -> list[dict[str, Any]]:
        if path.name == "3":
            raise ValueError("3: a dump that is damaged")
        return [record for record in records if record["step"] == int(path.name)]

    monkeypatch.setattr(dumps, "steps", lambda workdir: [2, 3])
    monkeypatch.setattr(dumps, "file_of", lambda workdir, step: Path(str(step)))
    monkeypatch.setattr(dumps, "records", of_step)
    data = data_of(tmp_path, samples)
    assert [data["columns"]["step"].count(step) for step in (1, 2, 3)] == [2, 8, 2]
    assert data["notes"] == ["3: a dump that is damaged"]

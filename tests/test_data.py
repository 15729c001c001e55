"""Records in and out, every refusal by its reason, and the order of tasks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest
from data_helpers import TOOL, authors_record

from envace_jax.data import TaskStream, read_tasks, write_tasks
from envace_jax.envs import tiny
from envace_jax.records import record_from_task, task_from_record
from envace_jax.types import CheckItem, Task, ToolCall


def test_an_authors_record_becomes_a_task():
    task = task_from_record(authors_record(), 0)
    assert task.task_id == "cm2/12"
    assert task.messages == ({"role": "system", "content": "Be brief."},)
    assert task.tools == (TOOL,)
    assert task.user_turns == ("bob ?", "thanks")
    assert task.reference == ((ToolCall("balance", {"name": "bob"}), '{"balance": 120}'),)
    assert task.environment is None
    assert task.checklist[0][0] == CheckItem(
        question="Was the balance looked up?",
        weight=0.75,
        focus_on="assistant.tool_calls",
        pass_condition="balance is called for bob",
        failure_examples=("balance of ann",),
        evidence=("balance(bob)",),
        required_for_next_turn=True,
    )
    assert task.checklist[0][1] == CheckItem(question="Is 120 said?", weight=0.25, dependence=(0,))
    assert [message["role"] for message in task.conversation] == [
        "user", "assistant", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert task.conversation[1]["tool_calls"] == [{"name": "balance", "arguments": {"name": "bob"}}]
    assert task_from_record(record_from_task(task), 0) == task


def test_another_checklist_variant_can_be_asked_for():
    assert [len(turn) for turn in task_from_record(authors_record(), 0, variant=1).checklist] == [1, 1]
    with pytest.raises(ValueError, match="record 0: checklist variant 2 was asked for; the record has 2"):
        task_from_record(authors_record(), 0, variant=2)


def with_damage(path, value):
    """The record with one place, however deep, replaced or dropped."""
    record = authors_record()
    place = record
    for key in path[:-1]:
        place = place[key]
    if value is DROP:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return record


INFO = "extra_info"
ITEM = (INFO, "interaction_kwargs", "checklist_list", 0, 0, 0)
DROP = object()
CHECKS = [
    ({"kind": "vibes"}, "unknown check kind 'vibes'; there are: call, result, reply, no_call, call_among, not_called"),
    ({"kind": "not_called", "names": ["pay", 3]}, "the names of a not_called check are not texts"),
    ({"kind": "not_called", "names": []}, "the names of a not_called check are not texts, or there are none"),
    ({"name": "f"}, "check has no field 'kind'"),
    ({"kind": "call", "name": "f"}, "check has no field 'arguments'"),
    ({"kind": "call", "name": "f", "arguments": []}, "arguments is of type list, not dict"),
    ({"kind": "result", "name": "f", "field": "x"}, "check has no field 'value'"),
    ({"kind": "reply", "words": []}, "the words of a reply check"),
    ({"kind": "reply", "words": [120]}, "the words of a reply check"),
    ({"kind": "no_call", "name": "f"}, "a check of kind no_call has no field 'name'"),
]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ((INFO,), DROP, "the record has no field 'extra_info'"),
        ((INFO, "index"), DROP, "extra_info has no field 'index'"),
        ((INFO, "tools"), DROP, "extra_info has no field 'tools'"),
        ((INFO, "tools"), [TOOL], "tools is of type list, not str"),
        ((INFO, "tools"), "[{", "extra_info.tools is not JSON"),
        ((INFO, "tools"), '[{"name": "f"}]', "not a list of OpenAI function schemas"),
        ((INFO, "messages", 3), DROP, "extra_info.messages[3]: the call of balance before it has no result"),
        ((INFO, "messages", 2), DROP, "a message of role 'tool' where assistant is due"),
        ((INFO, "messages", 4), DROP, "a message of role 'user' where assistant is due"),
        ((INFO, "messages", 6), DROP, "does not end with an assistant message"),
        ((INFO, "messages", 5), DROP, "a message of role 'assistant' where user is due"),
        ((INFO, "messages", 1, "role"), "system", "a message of role 'system' where user is due"),
        ((INFO, "messages", 4, "content"), " ", "the assistant message is empty"),
        ((INFO, "messages", 3, "content"), 120, "content is of type int, not str"),
        ((INFO, "messages", 3, "name"), "stock", "a result of stock where one of balance is due"),
        ((INFO, "messages", 2, "tool_calls"), "balance", "tool_calls is of type str, not list"),
        ((INFO, "messages", 2, "tool_calls", 0, "function", "arguments"), "{bob}", "arguments of balance is not JSON"),
        ((INFO, "messages", 2, "tool_calls", 0, "function", "arguments"), "[]", "are not a JSON object"),
        ((INFO, "messages", 2, "tool_calls", 0, "function", "name"), DROP, "has no field 'name'"),
        (("messages", 1, "content"), "ann ?", "messages is not the system message"),
        (("messages",), DROP, "the record has no field 'messages'"),
        ((INFO, "interaction_kwargs"), DROP, "extra_info has no field 'interaction_kwargs'"),
        ((INFO, "interaction_kwargs", "checklist_list", 0, 1), DROP, "one list of items for each of the 2 user turns"),
        ((INFO, "interaction_kwargs", "checklist_list", 0, 1), [], "the checklist of turn 1 is empty"),
        ((*ITEM, "weight"), 0.7499, "the weights of the checklist of turn 0 sum to 0.9999"),
        ((*ITEM, "weight"), float("nan"), "checklist_list[0][0][0].weight: nan is not a JSON number"),
        ((*ITEM, "weight"), True, "the weight True is not a number"),
        ((*ITEM, "weight"), "0.75", "weight is of type str"),
        ((*ITEM, "question"), DROP, "checklist of turn 0, item 0 has no field 'question'"),
        ((*ITEM, "required_for_next_turn"), "false", "required_for_next_turn is of type str, not bool"),
        ((*ITEM, "dependence"), [2], "dependence [2] does not name items of the same turn"),
        ((*ITEM, "dependence"), [0], "depend on each other in a circle"),
        ((*ITEM, "dependence"), [1], "depend on each other in a circle"),
        ((*ITEM, "evidence"), ["text"], "evidence is not a JSON object"),
        ((INFO, "environment"), {"name": "shop"}, "is not {'name': ..., 'state': ...}"),
        *[((*ITEM, "check"), check, reason) for check, reason in CHECKS],
    ],
)
def test_a_malformed_record_is_an_error_with_its_index_and_reason(path, value, reason):
    record = with_damage(path, value)
    with pytest.raises(ValueError) as error:
        task_from_record(record, 41)
    assert str(error.value).startswith("record 41: ") and reason in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_may_be_off_by_rounding():
    record = authors_record()
    record[INFO]["interaction_kwargs"]["checklist_list"][0][0][0]["weight"] = 0.75 + 9e-7
    assert task_from_record(record, 0).checklist[0][0].weight == 0.75 + 9e-7


def places(value, path=()):
    """Every path into a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from places(child, (*path, key))


PLACES = [path for path in places(authors_record()) if path]


def at(path):
    place = authors_record()
    for key in path:
        place = place[key]
    return place


def test_any_damage_at_any_place_gives_a_task_or_a_value_error():
    refused = 0
    for path, value in itertools.product(PLACES, [DROP, None, 5, "x", [], {}, True, [[]], [5], float("nan")]):
        try:
            assert isinstance(task_from_record(with_damage(path, value), 0), Task)
        except ValueError as error:
            assert str(error).startswith("record 0: ")
            refused += 1
    assert refused > 300


def test_tiny_tasks_survive_the_round_trip(tmp_path):
    tasks = tiny.tasks("pretrain", 60, seed=5)
    for index, task in enumerate(tasks):
        assert task_from_record(record_from_task(task, index), index) == task
    path = tmp_path / "deep" / "tasks.jsonl"
    write_tasks(path, tasks)
    assert read_tasks(path) == tasks
    tiny.validate(read_tasks(path))
    assert [entry.name for entry in path.parent.iterdir()] == ["tasks.jsonl"]
    record = json.loads(path.read_text().splitlines()[7])
    assert record["extra_info"]["index"] == 7 and isinstance(record["extra_info"]["tools"], str)
    assert set(record) == {"data_source", "messages", "extra_info"}


def test_a_system_message_and_letters_beyond_ascii_survive(tmp_path):
    (task,) = tiny.tasks("train", 1, seed=0)
    task = dataclasses.replace(task, messages=({"role": "system", "content": "Sé breve — 短く."},))
    write_tasks(tmp_path / "t.jsonl", [task])
    assert read_tasks(tmp_path / "t.jsonl") == [task]
    assert "短く" in (tmp_path / "t.jsonl").read_text(encoding="utf-8")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "t.jsonl"
    good = tiny.tasks("train", 2, seed=0)
    write_tasks(path, good)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="has no reference conversation"):
        write_tasks(path, [good[0], dataclasses.replace(good[1], conversation=())])
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_bad_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "t.jsonl"
    with pytest.raises(FileNotFoundError, match="there is no task file .*t.jsonl; expected a file, folder or pattern"):
        read_tasks(path)
    row = json.dumps(authors_record())
    for text, reason in [
        ("", "no records"),
        (f"{row}\n\n{{oops\n", "line 3: not JSON"),
        (f"{row}\n[1]\n", "line 2: record 1: the record is not a JSON object"),
        (f"{row}\n{row}\n", "line 2: record 1: the task id 'cm2/12' is already taken"),
        (row.replace("0.75", "NaN"), "line 1: not JSON"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError) as error:
            read_tasks(path)
        assert "t.jsonl" in str(error.value) and reason in str(error.value)


def test_a_file_that_is_no_utf8_is_an_error_of_its_line(tmp_path):
    path, row = tmp_path / "t.jsonl", json.dumps(authors_record())
    cases = [
        (row.encode() + b'\n{"a": "' + "é".encode("latin-1") + b'"}', "line 2: not UTF-8 text (byte 0xe9 at place 7)"),
        (row.encode("utf-16"), "line 1: not UTF-8 text (byte 0xff at place 0); save the file as UTF-8"),
        (row.encode("utf-16-le"), "line 1: not JSON"),
        (row.encode() + b"\n" + row.encode("utf-8-sig"), "line 2: not JSON"),  # a mark that is not at the start
        (row.encode()[:-40] + b"\xf0\x9f", "line 1: not UTF-8 text (byte 0xf0"),  # cut within a character
    ]
    for content, reason in cases:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"t.jsonl, {reason}")):
            read_tasks(path)


def test_a_byte_order_mark_at_the_start_is_passed_over(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(authors_record()) + "\r\n\r\n", encoding="utf-8-sig", newline="")
    assert [task.task_id for task in read_tasks(tmp_path / "t.jsonl")] == ["cm2/12"]


def test_nesting_that_python_could_not_follow_later_is_an_error_of_its_line(tmp_path):
    path, deep = tmp_path / "t.jsonl", "[" * 100_000 + "]" * 100_000
    path.write_text(f'{{"extra_info": {deep}}}')
    with pytest.raises(ValueError, match="line 1: not JSON that can be read .nested too deeply"):
        read_tasks(path)
    for levels, refused in ((90, False), (150, True), (100_000, True)):
        nested = "[" * levels + "]" * levels
        call = with_damage((INFO, "messages", 2, "tool_calls", 0, "function", "arguments"), f'{{"a": {nested}}}')
        tool = with_damage(
            (INFO, "tools"), json.dumps([TOOL])[:-1] + f', {{"function": {{"name": "f", "x": {nested}}}}}]'
        )
        for record, place in ((call, "arguments of balance"), (tool, "extra_info.tools")):
            if refused:
                with pytest.raises(
                    ValueError, match=f"record 0: .*{place}.*nested (deeper than 100 levels|too deeply)"
                ):
                    task_from_record(record, 0)
            else:
                assert task_from_record(record, 0).reference


def test_a_lone_surrogate_anywhere_is_refused_with_its_line_and_place(tmp_path):
    """It parses, but could be written to no file and hashed under no name: the run would end at some later step."""
    path = tmp_path / "t.jsonl"
    texts = [place for place in PLACES if isinstance(at(place), str)]
    for place in texts:
        record = with_damage(place, at(place).replace("b", "\ud800", 1) if "b" in at(place) else "x\udfff")
        path.write_text(json.dumps(record))
        with pytest.raises(ValueError) as error:
            read_tasks(path)
        named = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)[1:]
        assert f"t.jsonl, line 1: record 0: {named}: '\\ud" in str(error.value), str(error.value)
        assert str(error.value).isascii() and "\n" not in str(error.value)
    for place, text, named in [
        ((INFO, "task_id"), "a\ud800", "extra_info.task_id"),
        (
            (INFO, "environment"),
            {"name": "shop", "state": {"a b": ["\ud800"]}},
            'extra_info.environment.state["a b"][0]',
        ),
        (
            (INFO, "environment"),
            {"name": "shop", "state": {"\ud800": 1}},
            "extra_info.environment.state (the name of a",
        ),
        ((INFO, "tools"), '[{"function": {"name": "\\ud800"}}]', "extra_info.tools[0].function.name"),
        (
            (INFO, "messages", 2, "tool_calls", 0, "function", "arguments"),
            '{"\\ud800": 1}',
            "arguments of balance (the",
        ),
        ((INFO, "more"), {"n": [0, float("inf")]}, "extra_info.more.n[1]: inf is not a JSON number"),
    ]:
        with pytest.raises(ValueError, match=re.escape(named)):
            task_from_record(with_damage(place, text), 3)


def numbered(count):
    return [Task(str(number), (), (), ("hi",), ()) for number in range(count)]


def ids(batch):
    return [int(task.task_id) for task in batch]


def test_the_stream_shows_every_task_once_an_epoch_and_never_ends():
    stream = TaskStream(numbered(10), batch_size=4, seed=3)
    seen = [number for step in range(10) for number in ids(stream.batch_at(step))]  # 40 = 4 epochs
    epochs = [seen[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4  # each in another order
    assert len(stream.batch_at(10**9)) == 4


def test_a_batch_depends_on_the_step_and_the_seed_alone():
    one, two = (TaskStream(numbered(50), 8, seed=1) for _ in range(2))
    forward = [ids(one.batch_at(step)) for step in range(20)]
    assert [ids(two.batch_at(step)) for step in reversed(range(20))][::-1] == forward
    assert [ids(TaskStream(numbered(50), 8, seed=2).batch_at(step)) for step in range(20)] != forward


def test_the_order_is_fixed_across_versions():
    assert ids(TaskStream(numbered(6), 6, seed=0).batch_at(0)) == ORDER_OF_SEED_0


ORDER_OF_SEED_0 = [3, 2, 5, 4, 0, 1]


@pytest.mark.parametrize("size", [0, -1, 7])
def test_an_impossible_batch_size_is_an_error(size):
    with pytest.raises(ValueError, match=f"from 1 to the number of tasks, 6, not {size}"):
        TaskStream(numbered(6), size, seed=0)


def test_a_simulated_user_is_kept_and_only_the_opening_is_a_user_turn():
    record = authors_record()
    extra = record["extra_info"]
    extra["scenario"] = "You are Ann and want to know what Bob has."
    with pytest.raises(ValueError, match="one list of items for each of the 1 user turns"):
        task_from_record(record, 0)
    extra["interaction_kwargs"]["checklist_list"] = [extra["interaction_kwargs"]["checklist_list"][0][:1]]
    task = task_from_record(record, 0)
    assert (task.scenario, task.user_turns) == (extra["scenario"], ("bob ?",))
    assert len(task.conversation) == 6 and task_from_record(record_from_task(task), 0) == task
    extra["scenario"] = 3
    with pytest.raises(ValueError, match="scenario is of type int"):
        task_from_record(record, 0)

"""Ways in which a record or a file of records can be broken, and the reason that must be given for each.

`RECORDS`: (name, what breaks a good record, part of the reason). What breaks it changes the record in place, or gives
a tuple with what stands in its place. `LINES` break the bytes of a record's line, `ROWS` a row of a table, `TABLES` all
rows of one, `FILES` a whole file.
"""

from __future__ import annotations

import base64
import json

from data_helpers import TOOL

DROP = object()
INFO = "extra_info"
MESSAGES = (INFO, "messages")
CALL = (*MESSAGES, 2, "tool_calls", 0)
CHECKLISTS = (INFO, "interaction_kwargs", "checklist_list")
ITEM = (*CHECKLISTS, 0, 0, 0)
DEEP = '{"a": ' * 150 + "1" + "}" * 150


def put(*path_and_value):
    """Puts a value at a place of the record, or takes out what stands there (DROP)."""
    *path, last, value = path_and_value

    def damage(record):
        place = record
        for key in path:
            place = place[key]
        if value is DROP:
            del place[last]
        else:
            place[last] = value

    return damage


def instead(value):
    return lambda record: (value,)


def swapped(*path_and_places):
    *path, one, two = path_and_places

    def damage(record):
        place = record
        for key in path:
            place = place[key]
        place[one], place[two] = place[two], place[one]

    return damage


def tools(*schemas):
    return put(INFO, "tools", json.dumps(schemas))


def two_calls(first_id, second_id):
    """Two calls side by side, answered in the order `first_id`, `second_id`."""

    def damage(record):
        messages = record[INFO]["messages"]
        call = messages[2]["tool_calls"][0]
        messages[2]["tool_calls"] = [{**call, "id": "a"}, {**call, "id": "b"}]
        messages[3:4] = [{**messages[3], "tool_call_id": name} for name in (first_id, second_id)]

    return damage


def inserted(place, message):
    return lambda record: record[INFO]["messages"].insert(place, message)


def more_turns(record):
    record[INFO]["interaction_kwargs"]["checklist_list"][0].append([1])


def check(**fields):
    return put(*ITEM, "check", fields)


RECORDS = [
    # the record
    ("a list instead of the record", instead([1]), "the record is not a JSON object"),
    ("null instead of the record", instead(None), "the record is not a JSON object"),
    ("a text instead of the record", instead("record"), "the record is not a JSON object"),
    ("a number instead of the record", instead(5), "the record is not a JSON object"),
    ("an empty object", instead({}), "the record has no field 'extra_info'"),
    ("extra_info missing", put(INFO, DROP), "the record has no field 'extra_info'"),
    ("extra_info as JSON text", lambda r: put(INFO, json.dumps(r[INFO]))(r), "extra_info is of type str, not dict"),
    ("extra_info null", put(INFO, None), "extra_info is of type NoneType, not dict"),
    ("messages missing", put("messages", DROP), "the record has no field 'messages'"),
    ("messages an object", put("messages", {}), "messages is of type dict, not list"),
    ("messages empty", put("messages", []), "messages is not the system message"),
    ("messages of another conversation", put("messages", 1, "content", "ann ?"), "messages is not the system message"),
    ("a message that is a text", put("messages", 0, "Be brief."), "messages is not a JSON object"),
    # its name
    ("index missing", put(INFO, "index", DROP), "extra_info has no field 'index'"),
    ("index a list", put(INFO, "index", [7]), "index is of type list, not int or str"),
    ("index true", put(INFO, "index", True), "extra_info.index is true"),
    ("data_source a number", put("data_source", 5), "data_source is of type int, not str"),
    ("task_id a number", put(INFO, "task_id", 5), "task_id is of type int, not str"),
    ("task_id empty", put(INFO, "task_id", " "), "extra_info.task_id is empty"),
    ("task id taken", put(INFO, "index", 0), "the task id 'cm2/0' is already taken"),
    # tools
    ("tools missing", put(INFO, "tools", DROP), "extra_info has no field 'tools'"),
    ("tools as a list, not as text", put(INFO, "tools", [TOOL]), "tools is of type list, not str"),
    ("tools not JSON", put(INFO, "tools", "[{"), "extra_info.tools is not JSON"),
    ("tools in Python's notation", put(INFO, "tools", str([TOOL])), "extra_info.tools is not JSON"),
    ("tools empty text", put(INFO, "tools", ""), "extra_info.tools is not JSON"),
    ("tools an object", put(INFO, "tools", json.dumps(TOOL)), "not a list of OpenAI function schemas"),
    ("a tool without function", tools({"name": "balance"}), "not a list of OpenAI function schemas"),
    ("a tool without a name", tools({"function": {"parameters": {}}}), "not a list of OpenAI function schemas"),
    ("a tool whose name is a number", tools({"function": {"name": 5}}), "not a list of OpenAI function schemas"),
    ("a tool with an empty name", tools(TOOL, {"function": {"name": ""}}), "extra_info.tools[1]: the name is empty"),
    ("two tools of one name", tools(TOOL, TOOL), "extra_info.tools[1]: the name 'balance' is already taken"),
    ("a tool of another type", tools({**TOOL, "type": "retrieval"}), "type is \"retrieval\", not 'function'"),
    (
        "a tool whose parameters are a text",
        tools({"function": {"name": "balance", "parameters": "none"}}),
        "parameters is of type str, not dict",
    ),
    (
        "a tool whose description is a list",
        tools({"function": {"name": "balance", "description": []}}),
        "description is of type list, not str",
    ),
    ("tools with NaN", put(INFO, "tools", '[{"function": {"name": "f", "x": NaN}}]'), "NaN is not a JSON value"),
    ("tools with a member twice", put(INFO, "tools", '[{"a": 1, "a": 2}]'), "the name 'a' stands twice in an object"),
    ("tools nested deeply", put(INFO, "tools", f"[{DEEP}]"), "extra_info.tools.*nested deeper than 100 levels"),
    ("a call of a tool that is not listed", tools({"function": {"name": "price"}}), "'balance' is called, and"),
    ("no tools, and a call", tools(), "'balance' is called, and extra_info.tools has no such tool"),
    # the conversation
    ("conversation missing", put(*MESSAGES, DROP), "extra_info has no field 'messages'"),
    ("conversation empty", put(*MESSAGES, []), "does not end with an assistant message"),
    ("conversation null", put(*MESSAGES, None), "messages is of type NoneType, not list"),
    ("a message that is a list", put(*MESSAGES, 4, ["assistant"]), "extra_info.messages[4] is not a JSON object"),
    ("a message without a role", put(*MESSAGES, 4, "role", DROP), "extra_info.messages[4] has no field 'role'"),
    ("a message of an unknown role", put(*MESSAGES, 4, "role", "model"), "role 'model' where assistant is due"),
    ("a message whose role is a number", put(*MESSAGES, 4, "role", 1), "role is of type int, not str"),
    ("assistant first", put(*MESSAGES, 1, "role", "assistant"), "role 'assistant' where user is due"),
    ("system message in the middle", put(*MESSAGES, 5, "role", "system"), "role 'system' where user is due"),
    ("two system messages", inserted(1, {"role": "system", "content": "x"}), "role 'system' where user is due"),
    ("two user messages in a row", inserted(2, {"role": "user", "content": "x"}), "role 'user' where assistant is due"),
    ("two replies in a row", put(*MESSAGES, 5, "role", "assistant"), "role 'assistant' where user is due"),
    ("call and result swapped", swapped(*MESSAGES, 2, 3), "role 'tool' where assistant is due"),
    ("a call without a result", put(*MESSAGES, 3, DROP), "[3]: the call of balance before it has no result"),
    ("a result without a call", put(*MESSAGES, 2, DROP), "role 'tool' where assistant is due"),
    ("two results for one call", inserted(4, {"role": "tool", "content": "1"}), "role 'tool' where assistant is due"),
    ("a call at the end", lambda r: r[INFO]["messages"].__delitem__(slice(3, None)), "the last call of balance has no"),
    ("ends with a user message", put(*MESSAGES, 6, DROP), "does not end with an assistant message"),
    ("an empty reply", put(*MESSAGES, 4, "content", "  "), "[4]: the assistant message is empty"),
    ("an empty user message", put(*MESSAGES, 5, "content", ""), "[5]: the user message is empty"),
    ("an empty system message", put(*MESSAGES, 0, "content", ""), "[0]: the system message is empty"),
    ("content in parts", put(*MESSAGES, 5, "content", [{"text": "hi"}]), "content is of type list, not str"),
    ("content null in a reply", put(*MESSAGES, 4, "content", None), "content is of type NoneType, not str"),
    ("a result that is a number", put(*MESSAGES, 3, "content", 120), "content is of type int, not str"),
    ("a result that is an object", put(*MESSAGES, 3, "content", {"b": 1}), "content is of type dict, not str"),
    ("a result of another tool", put(*MESSAGES, 3, "name", "stock"), "a result of stock where one of balance is due"),
    ("a result of another call", put(*MESSAGES, 3, "tool_call_id", "call_2"), "result of the call 'call_2' where"),
    ("results in another order", two_calls("b", "a"), "a result of the call 'b' where one of 'a' is due"),
    ("a surrogate", put(*MESSAGES, 4, "content", "\ud800"), "lone surrogate, no character"),
    # calls
    ("tool_calls a text", put(*MESSAGES, 2, "tool_calls", "balance"), "tool_calls is of type str, not list"),
    ("a call that is a text", put(*CALL, "balance(bob)"), "tool_calls is not a JSON object"),
    ("a call without function", put(*CALL, "function", DROP), "tool_calls has no field 'function'"),
    ("a call without a name", put(*CALL, "function", "name", DROP), "tool_calls.function has no field 'name'"),
    ("a call whose name is a list", put(*CALL, "function", "name", ["f"]), "name is of type list, not str"),
    ("a call without arguments", put(*CALL, "function", "arguments", DROP), "the call of balance has no field"),
    ("arguments as an object", put(*CALL, "function", "arguments", {"name": "bob"}), "is of type dict, not str"),
    ("arguments not JSON", put(*CALL, "function", "arguments", "{bob}"), "arguments of balance is not JSON"),
    ("arguments cut off", put(*CALL, "function", "arguments", '{"name": "bo'), "arguments of balance is not JSON"),
    ("arguments a list", put(*CALL, "function", "arguments", "[]"), "arguments of balance are not a JSON object"),
    ("arguments with Infinity", put(*CALL, "function", "arguments", '{"a": Infinity}'), "Infinity is not a JSON value"),
    ("arguments beyond floats", put(*CALL, "function", "arguments", '{"a": 1e999}'), "inf is not a JSON number"),
    ("arguments with a surrogate", put(*CALL, "function", "arguments", '{"a": "\\udc00"}'), "lone surrogate"),
    ("arguments with a member twice", put(*CALL, "function", "arguments", '{"a": 1, "a": 2}'), "'a' stands twice"),
    ("arguments nested deeply", put(*CALL, "function", "arguments", DEEP), "nested deeper than 100 levels"),
    ("arguments of many digits", put(*CALL, "function", "arguments", f'{{"a": {"9" * 5000}}}'), "is not JSON"),
    # the checklist
    ("interaction_kwargs missing", put(INFO, "interaction_kwargs", DROP), "has no field 'interaction_kwargs'"),
    ("no checklist", put(*CHECKLISTS, []), "checklist variant 0 was asked for; the record has 0"),
    ("a checklist that is an object", put(*CHECKLISTS, 0, {}), "one list of items for each of the 2 user turns"),
    ("fewer checklists than turns", put(*CHECKLISTS, 0, 1, DROP), "one list of items for each of the 2 user turns"),
    ("more checklists than turns", more_turns, "one list of items for each of the 2"),
    ("an empty checklist", put(*CHECKLISTS, 0, 1, []), "the checklist of turn 1 is empty"),
    ("a checklist that is a text", put(*CHECKLISTS, 0, 1, "ok"), "the checklist of turn 1 is empty or not a list"),
    ("an item that is a text", put(*ITEM, "Was it?"), "checklist of turn 0, item 0 is not a JSON object"),
    ("weights that do not sum to 1", put(*ITEM, "weight", 0.5), "the weights of the checklist of turn 0 sum to 0.75"),
    ("weights that are all 0", put(*CHECKLISTS, 0, 1, 0, "weight", 0), "sum to 0.0, not 1"),
    ("a weight that is NaN", put(*ITEM, "weight", float("nan")), "NaN is not a JSON value"),
    ("a weight below 0", put(*ITEM, "weight", -0.75), "the weight -0.75 is not a number from 0 to 1"),
    ("a weight above 1", put(*ITEM, "weight", 1.5), "the weight 1.5 is not a number from 0 to 1"),
    ("a weight of 400 digits", put(*ITEM, "weight", 10**400), "is not a number from 0 to 1"),
    ("a weight that is a text", put(*ITEM, "weight", "0.75"), "weight is of type str, not int or float"),
    ("a weight that is true", put(*ITEM, "weight", True), "the weight True is not a number from 0 to 1"),
    ("a weight missing", put(*ITEM, "weight", DROP), "item 0 has no field 'weight'"),
    ("a question missing", put(*ITEM, "question", DROP), "item 0 has no field 'question'"),
    ("an empty question", put(*ITEM, "question", ""), "item 0: the question is empty"),
    ("an unknown focus", put(*ITEM, "focus_on", "assistant.calls"), "focus_on is 'assistant.calls'; accepted: assist"),
    ("failure examples that are numbers", put(*ITEM, "failure_examples", [5]), "failure_examples are not texts"),
    ("evidence of texts", put(*ITEM, "evidence", ["said"]), "evidence is not a JSON object"),
    ("required as a text", put(*ITEM, "required_for_next_turn", "no"), "required_for_next_turn is of type str"),
    ("a dependence on nothing", put(*ITEM, "dependence", [2]), "dependence [2] does not name items of the same turn"),
    ("a dependence on a text", put(*ITEM, "dependence", ["1"]), "does not name items of the same turn"),
    ("dependence in a circle", put(*ITEM, "dependence", [1]), "depend on each other in a circle"),
    # ours
    ("a check that is a text", put(*ITEM, "check", "call"), "item 0: check is not a JSON object"),
    ("a check of an unknown kind", check(kind="vibes"), "unknown check kind 'vibes'"),
    ("a check without its fields", check(kind="call", name="balance"), "check has no field 'arguments'"),
    ("a check with another's field", check(kind="no_call", words=["x"]), "of kind no_call has no field 'words'"),
    ("a check of no words", check(kind="reply", words=[]), "the words of a reply check are not texts"),
    ("a check of a tool that is not listed", check(kind="call", name="f", arguments={}), "the check is of 'f', and"),
    ("an environment that is a text", put(INFO, "environment", "shop"), "extra_info.environment is not a JSON object"),
    ("an environment without a state", put(INFO, "environment", {"name": "shop"}), "is not {'name': ...,"),
    ("line breaks in what is quoted", put(*MESSAGES, 3, "name", "a\nb" * 900), "a result of a ba b.* is due"),
]  # fmt: skip

LINES = [
    ("a cut line", lambda line: line[:-30], "not JSON"),
    ("two records on one line", lambda line: line + b" " + line, "not JSON"),
    ("not JSON at all", lambda line: b"index,question,answer", "not JSON"),
    ("a NUL byte", lambda line: b"\0" + line, "not JSON"),
    ("Latin-1", lambda line: line.replace(b"brief", "brève".encode("latin-1")), "not UTF-8 text (byte 0xe8"),
    ("UTF-16", lambda line: line.decode().replace("\n", " ").encode("utf-16"), "not UTF-8 text (byte 0xff"),
    ("a surrogate as bytes", lambda line: line.replace(b"brief", b"\xed\xa0\x80"), "not UTF-8 text (byte 0xed"),
    ("base64", base64.b64encode, "not JSON"),
    ("nested without end", lambda line: b'{"a":' * 200_000, "not JSON that can be read (nested too deeply)"),
    ("a number of too many digits", lambda line: line.replace(b"0.75", b"9" * 5000), "not JSON"),
    ("a member twice", lambda line: b'{"data_source": "x", ' + line[1:], "the name 'data_source' stands twice"),
    ("a weight beyond floats", lambda line: line.replace(b"0.75", b"1e999"), "inf is not a JSON number"),
    ("single quotes", lambda line: line.replace(b'"', b"'"), "not JSON"),
    ("a comma at the end", lambda line: line[:-1] + b",}", "not JSON"),
]

# A row of a table: every other row has these columns too, so a missing member is a null.
ROWS = [
    ("a row of nulls", instead({"data_source": None, "messages": None, INFO: None}), "has no field 'extra_info'"),
    ("a null tools text", put(INFO, "tools", None), "extra_info has no field 'tools'"),
    ("a null conversation", put(*MESSAGES, None), "extra_info has no field 'messages'"),
    ("a null message", put(*MESSAGES, 4, None), "extra_info.messages[4] is not a JSON object"),
    ("null content", put(*MESSAGES, 4, "content", None), "extra_info.messages[4] has no field 'content'"),
    ("a null role", put(*MESSAGES, 5, "role", None), "extra_info.messages[5] has no field 'role'"),
    ("a null index", put(INFO, "index", None), "extra_info has no field 'index'"),
    ("null checklists", put(*CHECKLISTS, None), "has no field 'checklist_list'"),
    ("a null checklist of a turn", put(*CHECKLISTS, 0, 1, None), "the checklist of turn 1 is empty or not a list"),
    ("a null item", put(*ITEM, None), "checklist of turn 0, item 0 is not a JSON object"),
    ("a null weight", put(*ITEM, "weight", None), "item 0 has no field 'weight'"),
    ("a weight that is NaN", put(*ITEM, "weight", float("nan")), "nan is not a JSON number"),
    ("a null call", put(*CALL, None), "tool_calls is not a JSON object"),
    ("an empty tools text", put(INFO, "tools", ""), "extra_info.tools is not JSON"),
]


def without_column(rows, name):
    return [{key: value for key, value in row.items() if key != name} for row in rows]


def with_column(rows, name, make):
    return [{**row, name: make(row)} for row in rows]


# A whole table: all of its rows are bad in one way.
TABLES = [
    ("no extra_info column", lambda rows: without_column(rows, INFO), "the record has no field 'extra_info'"),
    ("no messages column", lambda rows: without_column(rows, "messages"), "the record has no field 'messages'"),
    ("messages as texts", lambda rows: with_column(rows, "messages", json.dumps), "messages is of type str, not list"),
    ("extra_info as texts", lambda rows: with_column(rows, INFO, json.dumps), "extra_info is of type str"),
    ("columns of bytes", lambda rows: with_column(rows, "data_source", lambda r: b"\xff"), "a bytes is not a JSON"),
    ("another table", lambda rows: [{"prompt": "a", "answer": "b"} for _ in rows], "has no field 'extra_info'"),
]  # fmt: skip

# A whole file: (name, suffix, its bytes made of good lines, part of the message).
FILES = [
    ("an empty file", ".jsonl", lambda lines: b"", "no records"),
    ("blank lines", ".jsonl", lambda lines: b"\n \n\t\n", "no records"),
    ("an empty list", ".json", lambda lines: b"[]", "no records"),
    ("a cut list", ".json", lambda lines: b"[" + b",".join(lines)[:-9], "not JSON"),
    ("a list in Latin-1", ".json", lambda lines: b'["\xe8"]', "not UTF-8 text (byte 0xe8"),
    ("a list nested deeply", ".json", lambda lines: b"[" * 200_000, "not JSON that can be read"),
    ("an empty Parquet file", ".parquet", lambda lines: b"", "cannot be read as Parquet"),
    ("JSON lines named Parquet", ".parquet", lambda lines: b"\n".join(lines), "cannot be read as Parquet"),
    ("a cut Parquet file", ".parquet", lambda lines: b"PAR1" + bytes(2000), "cannot be read as Parquet"),
    ("a record over many lines", ".json", lambda lines: lines[0].replace(b",", b",\n"), "not JSON"),
    ("a compressed file", ".jsonl", lambda lines: b"\x1f\x8b\x08" + bytes(50) + b"\xff", "not UTF-8 text (byte 0x8b"),
]  # fmt: skip

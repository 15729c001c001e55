"""Records for tests of task data."""

from __future__ import annotations

import json

TOOL = {"type": "function", "function": {"name": "balance", "parameters": {"type": "object"}}}


def authors_record(index: int = 12) -> dict:
    """A row as the authors' data has it: no program checks, no environment, calls as JSON text."""
    call = {"id": "call_1", "type": "function", "function": {"name": "balance", "arguments": '{"name": "bob"}'}}
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "bob ?"}
    items = [
        {
            "question": "Was the balance looked up?",
            "weight": 0.75,
            "focus_on": "assistant.tool_calls",
            "pass_condition": "balance is called for bob",
            "failure_examples": ["balance of ann"],
            "evidence": [{"snippet": "balance(bob)"}],
            "required_for_next_turn": True,
            "dependence": [],
        },
        {"question": "Is 120 said?", "weight": 0.25, "dependence": [0]},
    ]
    last = [{"question": "Is it polite?", "weight": 1}]
    record = {
        "data_source": "cm2",
        "messages": [system, user],
        "extra_info": {
            "index": index,
            "original_index": 3,
            "tools": json.dumps([TOOL]),
            "messages": [
                system,
                user,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": '{"balance": 120}'},
                {"role": "assistant", "content": "bob has 120."},
                {"role": "user", "content": "thanks"},
                {"role": "assistant", "content": "welcome"},
            ],
            "interaction_kwargs": {"checklist_list": [[items, last], [last, last]]},
        },
    }
    return json.loads(json.dumps(record))  # no two places share an object

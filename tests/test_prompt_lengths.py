"""Tasks that the limits cannot hold are found before a run, exactly those that an attempt would mask, and are named."""

from __future__ import annotations

import dataclasses
import json

import pytest
from data_helpers import authors_record
from train_helpers import judged, tiny_config

from envace_jax import config as configuration
from envace_jax import data_profile, fingerprint, inputs, parts, prompt_lengths
from envace_jax.chat import load_tokenizer
from envace_jax.data import TaskStream, read_tasks, write_tasks
from envace_jax.envs import tiny
from envace_jax.episode import start
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.types import Need

NONE = {"evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0}
TASKS = tiny.tasks("train", 40, 0)
CHAT = load_tokenizer(configuration.model_path("asset:tiny_base"))


def tokens(task):
    """Tokens of the first prompt, by writing it as one text and encoding that."""
    config = tiny_config()
    prompts = dataclasses.replace(parts.make_prompts(config, CHAT), max_act_prompt=10**6)
    opened = start(prompts, dataclasses.replace(parts.make_limits(config), act_context=10**6), task, 0, 0)
    return len(opened.requests[0].prompt_tokens)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompts.max_act_prompt": 75},
        {"limits.act_context": 145},
        {"limits.user_turns": 1, "limits.act_context": 120, "prompts.max_act_prompt": 75},
        {"prompts.max_rehearse_prompt": 75},
        {"prompts.max_rehearse_prompt": 75, "rollout.responder": "real"},
        {"prompts.thinking": True, "prompts.max_act_prompt": 70},
        {"prompts.style": "full", "prompts.max_rehearse_prompt": 910},
    ],
)
def test_what_is_left_out_is_what_an_attempt_would_mask(changes):
    """Against the state machine itself, which decides during a run."""
    config = tiny_config()
    for name, value in changes.items():  # not by from_config_dict: some of these limits waste what others allow
        group, _, key = name.partition(".")
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **{key: value})})
    need = Need.RESPONSE if config.rollout.responder == "real" else Need.REHEARSE
    prompts, limits = parts.make_prompts(config, CHAT), parts.make_limits(config)
    opened = [start(prompts, limits, task, 0, 0, answered_by=need) for task in TASKS]
    fits = [index for index, episode in enumerate(opened) if episode.status == "ok"]
    assert (0 < len(fits) < len(TASKS)) == bool(changes and "rollout.responder" not in changes)
    kept, left_out = prompt_lengths.leave_out_long(TASKS, prompts, limits, answered_by=need)
    assert list(kept) == [TASKS[index] for index in fits]
    assert [task.index for task in left_out] == [index for index in range(len(TASKS)) if index not in fits]
    for task in left_out:  # the reason is what the trajectory would have said
        assert task.reason[:200] in opened[task.index].reason and repr(TASKS[task.index].task_id) in task.reason


def test_the_longest_prompt_is_exact_to_the_token(tmp_path):
    lengths = [tokens(task) for task in TASKS]
    write_tasks(tmp_path / "t.jsonl", TASKS)
    for source in ("tiny", str(tmp_path / "t.jsonl")):
        for longest in (max(lengths), max(lengths) - 1, sorted(lengths)[5]):
            settings = {"data.source": source, "data.longest_prompt": longest, "data.count": 40}
            read = inputs.read_inputs(tiny_config(**NONE, **settings), ChecklistReward())
            short = [task for task, length in zip(TASKS, lengths, strict=True) if length <= longest]
            assert list(read.tasks) == short and (len(short) == 40) == (longest == max(lengths))
            assert read.fingerprints()["tasks"] == fingerprint.of_tasks(short)  # of what is used
            order = [task.task_id for task in TaskStream(read.tasks, 2, 0).batch_at(3)]
            assert order == [task.task_id for task in TaskStream(short, 2, 0).batch_at(3)]


def test_they_are_named_and_are_no_bad_records(tmp_path, capsys):
    """30 of 40 tasks are too long, and no record is bad: `stop` does not stop."""
    lengths = [tokens(task) for task in TASKS]
    write_tasks(tmp_path / "t.jsonl", TASKS)
    longest = sorted(lengths)[9]
    config = tiny_config(**NONE, **{"data.source": str(tmp_path / "t.jsonl"), "data.longest_prompt": longest})
    left = [index for index, length in enumerate(lengths) if length > longest]
    inputs.read_inputs(config, ChecklistReward())
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"data.source: left out {len(left)} of 40 tasks that are too long" and said[4] == "    ..."
    for line, index in zip(said[1:4], left, strict=False):
        assert line == (
            f"    task {index}: the first prompt of task {TASKS[index].task_id!r} has {lengths[index]} tokens; "
            f"data.longest_prompt is {longest}"
        )


def test_a_run_of_which_nothing_is_left_is_refused(tmp_path):
    with pytest.raises(configuration.ConfigError, match=r"none of the 40 tasks of tiny is short enough; task 0: the f"):
        inputs.read_inputs(tiny_config(**{"data.longest_prompt": 20}), ChecklistReward())
    with pytest.raises(configuration.ConfigError, match="data.tasks_per_step: 16 is more than the . tasks there are"):
        shortest = sorted(map(tokens, TASKS))[0]
        inputs.read_inputs(
            tiny_config(**{"data.longest_prompt": shortest, "data.tasks_per_step": 16}), ChecklistReward()
        )
    with pytest.raises(configuration.ConfigError, match="data.longest_prompt: 161 has no effect above prompts.max_act"):
        tiny_config(**{"data.longest_prompt": 161})


def test_it_is_said_how_far_it_has_come_where_there_are_many(monkeypatch, capsys):
    prompts, limits = parts.make_prompts(tiny_config(), CHAT), parts.make_limits(tiny_config())
    monkeypatch.setattr(prompt_lengths, "EVERY_S", -1.0)
    prompt_lengths.leave_out_long(TASKS, prompts, limits, answered_by=Need.REHEARSE)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(prompt_lengths, "MANY", 39)
    prompt_lengths.leave_out_long(TASKS, prompts, limits, answered_by=Need.REHEARSE)
    assert capsys.readouterr().out.splitlines() == [
        f"data.source: measured {index} of 40 prompts" for index in range(40)
    ]


def test_the_profile_gives_prompts_in_the_models_tokens(tmp_path, capsys):
    write_tasks(tmp_path / "t.jsonl", [judged(task) for task in TASKS])
    assert data_profile.main([f"--path={tmp_path / 't.jsonl'}", "--model=asset:tiny_base", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    lengths = sorted(len_thinking(task) for task in TASKS)
    found = result["numbers"]["first prompt, tokens"]
    assert (found["0%"], found["50%"], found["100%"]) == (lengths[0], lengths[round(0.5 * 39)], lengths[-1])
    assert data_profile.main([f"--path={tmp_path / 't.jsonl'}", "--model=asset:tiny_base"]) == 0
    assert "  first prompt, tokens " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        data_profile.main([f"--path={tmp_path / 't.jsonl'}", "--model=asset:nothing"])
    assert capsys.readouterr().err.count("\n") == 1


def len_thinking(task):
    """The first prompt with thinking, whose answer is opened by fewer tokens."""
    return tokens(task) - len(CHAT.assistant_prefix(thinking=False)) + len(CHAT.assistant_prefix(thinking=True))


def test_the_profile_counts_what_is_odd_but_no_error(tmp_path, capsys):
    """Arguments outside a schema, a schema that is none, and results that could not be rehearsed, each by hand."""
    strict = {"type": "object", "properties": {"name": {"type": "integer"}}}
    records = [authors_record(index) for index in range(6)]
    for record, parameters in zip(records, (strict, {"type": "dict"}, {"$ref": "http://nowhere/x"}), strict=False):
        record["extra_info"]["tools"] = json.dumps([{"function": {"name": "balance", "parameters": parameters}}])
    for record, result in zip(records[3:], ("120 euros", "{}", "[]"), strict=True):
        record["extra_info"]["messages"][3]["content"] = result
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(read_tasks(tmp_path / "t.jsonl")) == 6
    assert data_profile.main([f"--path={tmp_path / 't.jsonl'}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [result[name] for name in data_profile.COUNTS] == [0, 0, 1, 1, 2]

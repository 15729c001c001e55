"""Where tasks may come from, what becomes of bad records, and the profile of a data set."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import datasets
import pytest
from data_helpers import authors_record

from envace_jax import config as configuration
from envace_jax import data_profile, inputs
from envace_jax.data import check_disjoint, read_corpus, read_entries, read_tasks, write_tasks
from envace_jax.envs import tiny
from envace_jax.records import record_from_task, task_from_record

RECORDS = [authors_record(index) for index in range(40)]
TASKS = [task_from_record(record, 0) for record in RECORDS]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(path, records):
    datasets.Dataset.from_list(records).to_parquet(path)
    return path


def test_lines_lists_and_parquet_give_the_same_tasks(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps(RECORDS))
    for path in (
        write_lines(tmp_path / "a.jsonl", RECORDS),
        write_lines(tmp_path / "lines.json", RECORDS),
        tmp_path / "list.json",
        write_parquet(tmp_path / "a.parquet", RECORDS),
    ):
        assert read_tasks(path) == TASKS


def test_a_table_adds_nothing_to_records_of_unlike_shapes(tmp_path):
    """A table gives every row the members of every other, as nulls; checks and environments are kept as they are."""
    plain = [task for task in tiny.tasks("train", 40, seed=3) if task.environment["name"] == "accounts"][:1]
    rows = [RECORDS[0], record_from_task(plain[0])]
    assert read_tasks(write_parquet(tmp_path / "b.parquet", [RECORDS[0]])) == TASKS[:1]
    first, _ = [entry for _, entry in read_entries(write_parquet(tmp_path / "a.parquet", rows))]
    assert task_from_record(first, 0) == TASKS[0]


def test_a_hub_id_is_streamed_from_its_split(monkeypatch):
    asked = []

    def load_dataset(name, **options):
        asked.append((name, options))
        return iter([RECORDS[0], RECORDS[1] | {"another": None}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_tasks("owner/name") == read_tasks("owner/name:test") == TASKS[:2]
    assert asked == [("owner/name", {"split": split, "streaming": True}) for split in ("train", "test")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match="^owner/name cannot be read from the hub: ZeroDivisionError"):
        read_tasks("owner/name")


def test_a_folder_and_a_pattern_are_their_files_in_order(tmp_path):
    write_lines(tmp_path / "b.jsonl", RECORDS[:3])
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[3:5]))
    (tmp_path / "notes.txt").write_text("not a task")
    assert read_tasks(tmp_path) == [*TASKS[3:5], *TASKS[:3]]
    assert read_tasks(tmp_path / "*.jsonl") == TASKS[:3]


def test_what_cannot_be_read_gets_one_line(tmp_path):
    for name, text, reason in [
        ("a.parquet", "PAR1 and nothing", "a.parquet cannot be read as Parquet: "),
        ("a.json", "[{]", "a.json: not JSON"),
        ("b.json", "[]", "b.json: no records"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError) as error:
            read_tasks(tmp_path / name)
        assert reason in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="owner/name:split"):
        read_tasks(tmp_path / "*.parquets")


def damaged(count):
    """Records of which the first `count` are bad, each in its own way."""
    records = [authors_record(index) for index in range(40)]
    for number, damage in zip(range(count), ["weights", "tools", "result"] * count, strict=False):
        extra = records[number]["extra_info"]
        if damage == "weights":
            extra["interaction_kwargs"]["checklist_list"][0][0][0]["weight"] = 0.5
        elif damage == "tools":
            extra["tools"] = "[{"
        else:
            del extra["messages"][3]
    return records


def test_bad_records_stop_or_are_left_out_and_named(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", damaged(2))
    with pytest.raises(ValueError, match=r"t.jsonl, line 1: record 0: the weights of .* sum to 0.75, not 1"):
        read_corpus(path)
    corpus = read_corpus(path, on_bad="skip")
    assert list(corpus.tasks) == TASKS[2:]
    assert [record.where for record in corpus.bad] == [f"{path}, line 1", f"{path}, line 2"]
    assert corpus.bad[0].reason == "the weights of the checklist of turn 0 sum to 0.75, not 1"
    path.write_text(path.read_text() + "{half\n")  # what is no JSON counts too: 3 of 41 are more than 5%
    with pytest.raises(ValueError, match=r"3 of 41 records .7.3%. are bad, more than 5%: 1 x the weights .*line 1"):
        read_corpus(path, on_bad="skip")


def test_a_run_says_what_it_leaves_out(tmp_path, capsys):
    path = write_lines(tmp_path / "t.jsonl", damaged(2))
    settings = configuration.DataConfig(source=str(path), tasks_per_step=2)
    with pytest.raises(ValueError, match="line 1: record 0: the weights"):
        inputs.read_file_tasks(settings)
    assert list(inputs.read_file_tasks(dataclasses.replace(settings, bad_records="skip"))) == TASKS[2:]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and "left out 1 of 40 records: the weights of the checklist" in printed[0]
    other = inputs.read_file_tasks(dataclasses.replace(settings, bad_records="skip", checklist=1))
    assert [len(turn) for turn in other[0].checklist] == [1, 1]


def test_tasks_that_are_trained_are_not_evaluated():
    check_disjoint(TASKS[:3], TASKS[3:], "a and b")
    with pytest.raises(ValueError, match="a and b: 2 tasks are both trained on and evaluated, among them 'cm2/1'"):
        check_disjoint(TASKS[:3], TASKS[1:], "a and b")


def test_the_profile_counts_by_hand(tmp_path, capsys):
    path = write_lines(tmp_path / "t.jsonl", damaged(4))
    assert data_profile.main(["--path", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["records"], result["tasks"]) == (40, 36)
    assert result["tasks with an environment"] == result["tasks with program checks alone"] == 0
    assert result["numbers"]["user turns"] == {"mean": 2, "0%": 2, "50%": 2, "95%": 2, "100%": 2}
    assert result["numbers"]["checklist items"]["mean"] == 3
    assert result["tools"] == [["balance", 36, 36]]
    assert [(entry["count"], len(entry["examples"])) for entry in result["bad"]] == [(2, 2), (1, 1), (1, 1)]
    assert "line 1" in result["bad"][0]["examples"][0] and "line 4" in result["bad"][0]["examples"][1]
    assert data_profile.main(["--path", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "40 records, 36 tasks, 4 left out" in printed and "left out 2 x: the weights of the checklist" in printed
    with pytest.raises(SystemExit) as ended:
        data_profile.main(["--path", str(tmp_path / "nothing.jsonl")])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_output_that_nobody_reads_any_more_ends_the_command_in_silence(tmp_path):
    write_tasks(tmp_path / "tasks.jsonl", tiny.tasks("train", 4, 0))
    told = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m envace_jax.data --path={tmp_path}/tasks.jsonl | head -c 1 > /dev/null"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert told.stderr == ""

"""Every kind of malformed record, through the real path: named by place and reason, never silent, never a crash."""

from __future__ import annotations

import json
import re

import datasets
import malformed
import pytest
from data_helpers import authors_record

from envace_jax import data_profile
from envace_jax.data import read_corpus
from envace_jax.records import task_from_record

BAD = 7  # the place of the bad record among the good ones
GOOD = 30
CORPUS = (malformed.RECORDS, malformed.LINES, malformed.ROWS, malformed.TABLES, malformed.FILES)


def named(kinds):
    return pytest.mark.parametrize(("damage", "reason"), [kind[1:] for kind in kinds], ids=[kind[0] for kind in kinds])


def records():
    return [authors_record(index) for index in range(GOOD)]


def broken(record, damage):
    replaced = damage(record)
    return replaced[0] if isinstance(replaced, tuple) else record


def holds(reason, text):
    """Whether the text holds the reason, in which `.*` stands for anything."""
    return re.search(".*".join(map(re.escape, reason.split(".*"))), text) is not None


def check_one_bad(path, place, reason, capsys):
    """A file whose record BAD is bad and whose others are good: `read_corpus` both ways, then the profile command."""
    with pytest.raises(ValueError) as stopped:
        read_corpus(path)
    said = str(stopped.value)
    assert said.startswith(f"{path}, {place}: ") and holds(reason, said) and "\n" not in said
    corpus = read_corpus(path, on_bad="skip")
    assert [task.task_id for task in corpus.tasks] == [f"cm2/{n}" for n in range(GOOD) if n != BAD]
    (bad,) = corpus.bad
    assert (bad.index, bad.where) == (BAD, f"{path}, {place}") and holds(reason, bad.reason) and len(said) < 600
    assert data_profile.main([f"--path={path}"]) == 0
    printed = capsys.readouterr().out
    assert f"{GOOD} records, {GOOD - 1} tasks, 1 left out" in printed
    assert any(f"{place} (record {BAD}): " in line and holds(reason, line) for line in printed.splitlines()), (
        f"{printed}\nlacks {reason}"
    )


def check_all_bad(path, count, reason, capsys):
    """A file of bad records alone is refused with skip too, saying the share and the reason; the profile shows it."""
    for on_bad in ("stop", "skip"):
        with pytest.raises(ValueError) as refused:
            read_corpus(path, on_bad=on_bad)
        assert holds(reason, str(refused.value)) and "\n" not in str(refused.value)
    assert f"{count} of {count} records (100.0%) are bad, more than 5%: {count} x " in str(refused.value)
    assert data_profile.main([f"--path={path}"]) == 0
    printed = capsys.readouterr().out
    assert "100.0% of the records are bad; a run with data.bad_records=skip refuses them" in printed
    assert holds(reason, printed)


def test_there_are_kinds_enough_and_each_once():
    assert sum(map(len, CORPUS)) >= 40
    for kinds in CORPUS:
        assert len({kind[0] for kind in kinds}) == len(kinds)
    for record in records():  # unbroken they are fine: what is refused is refused for what was broken
        task_from_record(record, 0)


@named(malformed.RECORDS)
def test_a_malformed_record(damage, reason, tmp_path, capsys):
    rows = records()
    rows[BAD] = broken(rows[BAD], damage)
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_one_bad(path, f"line {BAD + 1}", reason, capsys)


@named(malformed.LINES)
def test_a_malformed_line(damage, reason, tmp_path, capsys):
    lines = [json.dumps(row).encode() for row in records()]
    lines[BAD] = damage(lines[BAD])
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n".join(lines))
    check_one_bad(path, f"line {BAD + 1}", reason, capsys)


@named(malformed.ROWS)
def test_a_malformed_row(damage, reason, tmp_path, capsys):
    rows = records()
    rows[BAD] = broken(rows[BAD], damage)
    path = tmp_path / "t.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    check_one_bad(path, f"record {BAD}", reason, capsys)


@named(malformed.TABLES)
def test_a_malformed_table(damage, reason, tmp_path, capsys):
    path = tmp_path / "t.parquet"
    datasets.Dataset.from_list(damage(records())).to_parquet(path)
    check_all_bad(path, GOOD, reason, capsys)


@pytest.mark.parametrize(("suffix", "make", "reason"), [kind[1:] for kind in malformed.FILES],
                         ids=[kind[0] for kind in malformed.FILES])  # fmt: skip
def test_a_malformed_file(suffix, make, reason, tmp_path, capsys):
    path = tmp_path / f"t{suffix}"
    path.write_bytes(make([json.dumps(row).encode() for row in records()]))
    for on_bad in ("stop", "skip"):
        with pytest.raises(ValueError) as refused:
            read_corpus(path, on_bad=on_bad)
        assert str(refused.value).startswith(str(path)) and holds(reason, str(refused.value))
        assert "\n" not in str(refused.value)
    try:
        code = data_profile.main([f"--path={path}"])
        said = capsys.readouterr().out
    except SystemExit as ended:
        code, said = ended.code, capsys.readouterr().err
        assert said.count("\n") == 1
    assert code in (0, 2) and holds(reason, said)


def test_five_in_a_hundred_may_be_bad_and_six_may_not(tmp_path):
    rows = [authors_record(index) for index in range(100)]
    path = tmp_path / "t.jsonl"
    for place, (_, damage, _) in enumerate(malformed.RECORDS[13:18]):
        rows[place] = broken(rows[place], damage)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (len(read_corpus(path, on_bad="skip").tasks), len(read_corpus(path, on_bad="skip").bad)) == (95, 5)
    rows[50] = rows[51] = {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError) as refused:
        read_corpus(path, on_bad="skip")
    said = str(refused.value)
    assert "7 of 100 records (7.0%) are bad, more than 5%: 2 x the record has no field 'extra_info' (" in said
    assert said.count(" x ") == 5 and said.endswith("; and 1 more reasons")

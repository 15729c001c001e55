"""Tasks on disk: the same tasks in the same order as from a list, in bounded memory, from any thread, and no traces."""

from __future__ import annotations

import json
import tempfile
import threading
import tracemalloc

import pytest
from data_helpers import authors_record

from envace_jax import data, fingerprint
from envace_jax.data import TaskStream, read_corpus, write_tasks
from envace_jax.envs import tiny
from envace_jax.task_store import TaskWriter

TASKS = tiny.tasks("train", 50, 0)


def stored(tasks):
    writer = TaskWriter()
    for task in tasks:
        writer.add(task)
    assert len(writer) == len(tasks)
    return writer.finish()


def test_it_is_a_sequence_like_a_list():
    kept = stored(TASKS)
    assert list(kept) == TASKS and len(kept) == 50 and kept[7] == TASKS[7] and kept[-1] == TASKS[-1]
    assert list(kept[3:9:2]) == TASKS[3:9:2] and list(kept[40:]) == TASKS[40:] and len(kept[60:]) == 0
    places = [5, 0, 49]
    assert list(kept.chosen(places)) == [TASKS[place] for place in places]
    assert list(kept[10:].chosen([1])) == [TASKS[11]] and list(kept.chosen([])) == [] == list(stored([]))
    with pytest.raises(IndexError):
        kept[50]


def test_a_run_sees_what_it_saw_from_memory():
    kept = stored(TASKS)
    assert fingerprint.of_tasks(kept) == fingerprint.of_tasks(TASKS) != fingerprint.of_tasks(kept[1:])
    one, two = (TaskStream(tasks, 8, seed=3) for tasks in (kept, TASKS))
    for step in (0, 1, 5, 6, 7, 100):  # any step, also across epochs, without those before it
        assert one.batch_at(step) == two.batch_at(step)


def test_threads_may_read_at_once():
    kept, wrong = stored(TASKS), []

    def read(first):
        wrong.extend(place for place in range(first, 2000, 4) if kept[place % 50] != TASKS[place % 50])

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def large_record(index):
    """A record of about 50,000 characters, as many as 12,000 tokens may have."""
    record = authors_record(index)
    record["extra_info"]["messages"][3]["content"] = json.dumps({"rows": [f"{index} {n}" * 4 for n in range(2500)]})
    return record


def test_memory_does_not_grow_with_the_source(tmp_path):
    """12 MB of records: a list of their tasks holds all of it, the store a few records at a time."""
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(large_record(index)) + "\n" for index in range(240)))
    size = path.stat().st_size
    list(data.read_entries(path))  # imports and the like
    tracemalloc.start()
    try:
        corpus = read_corpus(path)
        digest = fingerprint.of_tasks(corpus.tasks)
        held, peak = tracemalloc.get_traced_memory()
        assert size > 10e6 and held < size / 50 and peak < size / 10, (size, held, peak)
        everything = list(corpus.tasks)
        assert tracemalloc.get_traced_memory()[0] > size / 2
    finally:
        tracemalloc.stop()
    assert fingerprint.of_tasks(everything) == digest


def test_nothing_is_left_behind_and_a_full_disk_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    write_tasks(tmp_path / "t.jsonl", TASKS)
    tasks = read_corpus(tmp_path / "t.jsonl").tasks
    (tmp_path / "t.jsonl").unlink()  # the source may change or go: what was read stays
    assert list(tasks) == TASKS and not list((tmp_path / "temporary").iterdir())

    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        flush = write

    writer = TaskWriter()
    monkeypatch.setattr(writer, "_file", Full())
    with pytest.raises(ValueError, match="the tasks cannot be kept in .*temporary .No space left on device.; set TMPD"):
        writer.add(TASKS[0])

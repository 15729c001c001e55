"""Lines for who watches a run: steps that are compiled, and steps from which nothing is learned."""

from __future__ import annotations

import io
import math

from envace_jax.display import MOST_REASONS, Lines, step_text
from envace_jax.notes import Notes


class Shown:
    def __init__(self):
        self.notes, self.now = [], []
        self.note, self.within = self.notes.append, self.now.append


def metrics(reward=0.0, solved=0.0, act=0.0, rehearse=0.0):
    return {"reward": reward, "solved": solved, "advantage_abs_act": act, "advantage_abs_rehearse": rehearse}


def test_a_number_of_rows_is_told_of_once_and_not_where_the_warm_up_compiled_it():
    shown = Shown()
    notes = Notes(shown, compiled=(8, 16))
    for rows in (8, 12, 16, 12, 8, 24):
        notes.rows(rows)
    assert [note.partition(" is ")[0] for note in shown.notes] == [
        "the first train step of 12 rows", "the first train step of 24 rows",
    ]  # fmt: skip
    assert len(shown.now) == 6 and shown.now[-1] == "learning from 24 rows"


def test_steps_without_anything_learned_are_told_of_after_three_and_again_after_25():
    shown = Shown()
    notes = Notes(shown)
    for _ in range(50):
        notes.learned(metrics())
    assert [note.split(":")[0] for note in shown.notes] == [f"{count} steps in a row" for count in (3, 25, 50)]
    assert "no attempt earned anything" in shown.notes[0]


def test_a_step_that_learns_begins_the_count_anew():
    shown = Shown()
    notes = Notes(shown)
    for learned in (0.0, 0.0, 0.1, 0.0, 0.0):
        notes.learned(metrics(act=learned))
    assert shown.notes == []
    notes.learned(metrics(reward=0.5))
    assert "all attempts at a task earned the same" in shown.notes[0]


def test_why_nothing_is_learned_is_told_apart():
    for values, reason in (
        (metrics(1.0, 1.0), "every attempt solved its task"),
        (metrics(math.nan, math.nan), "every attempt is masked"),
    ):
        shown = Shown()
        notes = Notes(shown)
        for _ in range(3):
            notes.learned(values)
        assert reason in shown.notes[0]


def test_a_progress_line_leaves_out_what_is_not_known():
    text = step_text({"reward": 0.5, "agreement": math.nan, "masked": 0.0})
    assert text == "reward 0.500  masked 0"


def test_why_attempts_are_masked_is_a_line_once_for_each_reason():
    stream = io.StringIO()
    shown = Lines(5, 0, stream)
    for tokens in (625, 700):
        shown.masked({f"judge: a question of {tokens} tokens": 4, "fault: RuntimeError: boom": 2})
        shown.step(1, {}, "masked 6")
    text = stream.getvalue()
    assert text.count("judge: a question of") == 1 and text.count("boom") == 1 and "4 x (told once)" in text
    for number in range(100):
        shown.masked({f"fault: {chr(97 + number % 26)}{chr(97 + number // 26)}": 1})
    assert stream.getvalue().count("told once") == MOST_REASONS


def test_masked_attempts_are_named_where_nothing_is_learned():
    shown = Shown()
    notes = Notes(shown)
    for _ in range(3):
        notes.learned(metrics() | {"masked": 4.0})
    assert "4 attempts of the last step" in shown.notes[0] and "why they are masked" in shown.notes[0]

"""Metrics files, their resume rule, the progress line and the curves."""

from __future__ import annotations

import io
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace_jax import curves
from envace_jax.metrics import MetricsWriter, drop_lines_after, json_line, read_json_lines, write_json_atomic
from envace_jax.progress import Progress, duration
from envace_jax.types import Role, Segment, Trajectory, TurnScore


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_trajectory(reward: float = 0.5) -> Trajectory:
    tokens, logprobs = np.array([5, 6], np.int32), np.array([-0.5, -1.25], np.float32)
    segment = Segment(Role.REHEARSE, np.arange(7, dtype=np.int32), tokens, logprobs, "stop", policy_version=4, turn=1)
    score = TurnScore(0.5, (True, False), True)
    said = ({"role": "user", "content": "hé"},)
    return Trajectory("task-1", 3, 2, (segment,), reward, "ok", "done", said, (score,))


# --- JSON ---


def test_json_is_strict_and_takes_numpy() -> None:
    values = {"nan": math.nan, "inf": [np.float32("inf"), 1], "np": np.int64(3), "array": np.array([1.5, np.nan])}
    assert json_line(values) == '{"nan": null, "inf": [null, 1], "np": 3, "array": [1.5, null]}'


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_finite_json_is_written_unchanged_on_one_line(value: Any) -> None:
    line = json_line({"value": value})
    assert "\n" not in line and json.loads(line) == {"value": value}


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


# --- metrics.jsonl and trajectories.jsonl ---


def test_one_line_per_write_is_on_disk_at_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"reward": np.float32(0.5), "note": "x", "missing": math.nan})
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.5, "note": "x", "missing": None}]
        writer.write_trajectories(1, [(make_trajectory(), None), (make_trajectory(math.nan), None)])
        first, second = lines(tmp_path / "trajectories.jsonl")
    assert first["step"] == 1 and first["task_id"] == "task-1" and first["messages"][0]["content"] == "hé"
    assert first["turns"] == [{"reward": 0.5, "verdicts": [True, False], "proceed": True, "words": ["", ""]}]
    assert first["segments"] == [
        {
            "role": "rehearse",
            "turn": 1,
            "finish_reason": "stop",
            "policy_version": 4,
            "prompt_length": 7,
            "tokens": [5, 6],
            "logprobs": [-0.5, -1.25],
        }
    ]
    assert second["reward"] is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "trajectories.jsonl"])
def test_resume_drops_later_steps_and_a_cut_off_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    kept = b'{"step": 0}\n{"step": 1,  "odd":  "spacing"}\n{"step": 2}\n{"step": 2, "again": true}\n'
    path.write_bytes(kept + b'{"step": 3}\n{"step": 4}\n{"step": 5, "rewa')
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=2) as writer:
        assert path.read_bytes() == kept
        writer.write(3, {"new": 1})
        writer.write_trajectories(3, [(make_trajectory(), None)])
    assert [record["step"] for record in lines(path)] == [0, 1, 2, 2, 3]


def test_a_fresh_start_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "x": 1}\n{"step": 1}\n')
    MetricsWriter(tmp_path, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@given(st.binary(max_size=30), st.integers(0, 4))
def test_any_cut_off_end_is_survived(tail: bytes, step: int) -> None:
    whole = b"".join(b'{"step": %d}\n' % i for i in range(5))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_bytes(whole + tail.replace(b"\n", b""))
        drop_lines_after(path, step)
        assert [record["step"] for record in read_json_lines(path)] == list(range(step + 1))


def test_a_foreign_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        drop_lines_after(path, 1)
    path.write_text('{"step": 1}\n{"stop": 2}\n')
    with pytest.raises(ValueError, match=r'line 2: no integer "step"'):
        drop_lines_after(path, 1)
    assert path.read_text().endswith('{"stop": 2}\n')


def test_a_foreign_file_keeps_a_writer_from_cutting_the_others(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "trajectories.jsonl").write_text("hello\n")
    with pytest.raises(ValueError, match=r"trajectories\.jsonl, line 1"):
        MetricsWriter(tmp_path, tensorboard=False, resume_step=1)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_disabled_writer_touches_and_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsWriter(tmp_path / "run", enabled=False) as writer:
        writer.start(total=3)
        writer.write(1, {"reward": 1.0})
        writer.write_trajectories(1, [(make_trajectory(), None)])
        writer.progress(1, 2, 3)
        writer.curves(tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_tensorboard_gets_the_finite_numbers(tmp_path: Path) -> None:
    from tensorboardX.proto import event_pb2

    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(7, {"reward": np.float32(0.5), "missing": math.nan, "note": "x"})
    (path,) = (tmp_path / "tensorboard").iterdir()
    content, found = path.read_bytes(), []
    while content:  # a record: length u64, its checksum u32, the event, its checksum u32
        length = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        content = content[16 + length :]
    assert found == [(7, "reward", 0.5)]


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_clock(*seconds: float) -> Any:
    times = iter(seconds)
    return lambda: next(times)


def test_plain_progress_is_one_line_a_step_with_the_time_left() -> None:
    out = io.StringIO()
    progress = Progress(total=100, done=90, stream=out, clock=make_clock(0, 20, 22, 24, 30, 33))
    progress.step(91, "reward 0.1")  # compiles: 20 s
    progress.within("not shown")
    progress.step(92, "reward 0.2")
    progress.step(93, "reward 0.3")
    progress.note("evaluation")  # its 6 s are no step's
    progress.step(94, "reward 0.4")
    progress.close()
    assert out.getvalue().splitlines() == [
        "step 91/100  reward 0.1  20.0 s/step  3 min 00 s left",
        "step 92/100  reward 0.2  2.0 s/step  1 min 28 s left",
        "step 93/100  reward 0.3  2.0 s/step  14 s left",
        "evaluation",
        "step 94/100  reward 0.4  3.0 s/step  15 s left",
    ]


def test_terminal_progress_rewrites_its_line_and_clears_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    progress = Progress(total=2, stream=out, clock=make_clock(*range(9)))
    progress.within("a long text about sampling")
    progress.step(1, "x")
    progress.note("kept")
    progress.step(2, "y" * 100)
    progress.close()
    assert out.getvalue() == (
        "\rstep 1/2  a long text about sampling"
        "\rstep 1/2  x  1.0 s/step  1 s left   "
        "\nkept\n"
        "\r" + "step 2/2  " + "y" * 29 + "\n"
    )


def test_durations() -> None:
    seconds = (0, 59.4, 59.6, 3599, 7800)
    assert [duration(s) for s in seconds] == ["0 s", "59 s", "1 min 00 s", "59 min 59 s", "2 h 10 min"]


def test_writer_shows_steps_and_evaluations(tmp_path: Path) -> None:
    out = io.StringIO()
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.start(total=2, stream=out)
        writer.write(0, {"eval_real_success": 0.4321, "eval_fidelity": 0.5})
        writer.write(1, {"reward": 0.25, "tokens_act": 10.0, "tokens_rehearse": 20.0, "logprob_diff": 1e-6})
    first, second = out.getvalue().splitlines()
    assert first == "step 0 evaluation: real_success 0.432  fidelity 0.500"
    assert second.startswith("step 1/2  reward 0.250  tokens 10 act 20 rehearse  ")


# --- curves ---


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_curves_are_drawn_from_any_part_of_a_run(tmp_path: Path, steps: int) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, steps + 1):
            writer.write(step, {"reward": 0.1, "logprob_diff": 0.0, "tokens_act": math.nan})
        writer.curves(tmp_path / "curves.png")
    assert png_size(tmp_path / "curves.png") == (1650, 880)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl", "trajectories.jsonl"]


def test_smoothing_looks_back_only() -> None:
    assert curves._smooth([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


def test_the_writer_alone_imports_no_plotting(run_python: Any, tmp_path: Path) -> None:
    code = f"""
        import sys
        from envace_jax.metrics import MetricsWriter
        MetricsWriter({str(tmp_path)!r}, tensorboard=False).close()
        assert "matplotlib" not in sys.modules and "tensorboardX" not in sys.modules
        print("light")
    """
    assert run_python(code).strip() == "light"

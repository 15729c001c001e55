"""What a run tells the world: metrics.jsonl, TensorBoard, samples of trajectories and a progress line.

Values come as plain numbers under names; nothing here knows where they come from, or a device. A resumed run cuts the
files back to the step it continues from, so that no step appears twice.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

import numpy as np

from envace_jax.display import Display, evaluation_text, is_evaluation, open_display, step_text

if TYPE_CHECKING:
    from envace_jax.trackers import Tracker
    from envace_jax.types import Segment, Task, Trajectory, TurnScore  # brings jax, which takes seconds to import

METRICS_FILE = "metrics.jsonl"
TRAJECTORIES_FILE = "trajectories.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


def json_line(value: Any) -> str:
    """One line of strict JSON: numpy values become Python's, and NaN or infinity becomes null."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Writes indented JSON; a reader sees the whole old file or the whole new one. NaN and infinity become null."""
    text = json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text_atomic(path, text)


def write_text_atomic(path: Path | str, text: str) -> None:
    """Writes a file of UTF-8 text; a reader sees the whole old file or the whole new one."""
    write_atomic(Path(path), text.encode())


def read_json_lines(path: Path | str) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line that was cut off by a kill is left out. A missing file has none.

    Raises ValueError naming the line when any other line is not a JSON object.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    records = (_record(path, number, line, len(lines)) for number, line in enumerate(lines))
    return [record for record in records if record is not None]


class MetricsWriter:
    """Writes a run's numbers to the files in `workdir`, each line on its way to the disk before the call returns.

    All lines of steps after `resume_step`, the step of the checkpoint that the run continues from, are dropped first;
    0 is a fresh start and drops the lines of step 0 too. With several processes only the first is `enabled`; the others
    write and print nothing.
    """

    def __init__(
        self,
        workdir: Path | str,
        tensorboard: bool = True,
        resume_step: int = 0,
        *,
        enabled: bool = True,
        tracker: Tracker | None = None,
    ) -> None:
        self.workdir = Path(workdir)
        self._files: dict[str, IO[str]] = {}
        self._board: Any = None
        self._tracker = tracker
        self._display: Display | None = None
        self._enabled = enabled
        if not enabled:
            return
        self.workdir.mkdir(parents=True, exist_ok=True)
        names = (METRICS_FILE, TRAJECTORIES_FILE)
        cut = _cut([self.workdir / name for name in names], resume_step if resume_step > 0 else -1)
        for path, content in cut.items():  # all are readable, or none is rewritten
            write_atomic(path, content)
        for name in names:
            self._files[name] = open(self.workdir / name, "a", encoding="utf-8")
        if tensorboard:
            from tensorboardX import SummaryWriter  # slow to import, and not needed without it

            self._board = SummaryWriter(str(self.workdir / TENSORBOARD_FOLDER), purge_step=resume_step + 1)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        """Begins to show progress: `done` of `total` steps are behind. Without this call nothing is printed."""
        if self._enabled:
            evaluations = [record for record in read_json_lines(self.workdir / METRICS_FILE) if is_evaluation(record)]
            self._display = open_display(total, done, str(self.workdir), stream, evaluations)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Records and shows numbers of one step. Those of an evaluation have names that begin with "eval_"."""
        if not self._enabled:
            return
        self._append(METRICS_FILE, {"step": step, **values})
        known = {name: float(value) for name, value in values.items() if _is_finite(value)}
        if self._board is not None:
            for name, value in known.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        if self._tracker is not None:
            self._tracker.log(step, known)
        if self._display is None:
            return
        if is_evaluation(values):
            self._display.evaluation(step, values, evaluation_text(step, values))
        else:
            self._display.step(step, values, step_text(values))

    def masked(self, reasons: Mapping[str, int]) -> None:
        """Shows how many trajectories of the step that is written next are masked, by reason."""
        if self._display is not None:
            self._display.masked(reasons)

    def write_trajectories(self, step: int, trajectories: Iterable[tuple[Trajectory, Lesson | None]]) -> None:
        """Appends samples of a step's trajectories: the conversation, how it was judged, every segment's tokens, and
        what was learned from them."""
        if self._enabled:
            for trajectory, lesson in trajectories:
                self._append(TRAJECTORIES_FILE, {"step": step, **trajectory_record(trajectory, lesson)})

    def curves(self, path: Path | str) -> None:
        """Draws all steps so far as a PNG."""
        if self._enabled:
            from envace_jax.curves import write_curves  # matplotlib is slow to import

            write_curves(self.workdir / METRICS_FILE, path)

    def note(self, text: str) -> None:
        """Shows a line that stays."""
        if self._display is not None:
            self._display.note(text)

    def within(self, text: str) -> None:
        """Shows how far the run is within a step, on a terminal."""
        if self._display is not None:
            self._display.within(text)

    def progress(self, finished: int, total: int, tokens: int) -> None:
        """Shows how far a rollout is, on a terminal."""
        self.within(f"{finished}/{total} trajectories, {tokens:,} tokens sampled")

    def close(self) -> None:
        """Closes the files and ends the progress line."""
        for file in self._files.values():
            file.close()
        if self._board is not None:
            self._board.close()
        if self._display is not None:
            self._display.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        file = self._files[name]
        file.write(json_line(record) + "\n")
        file.flush()


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a trajectory was to the step that learned from it, and the texts that tell of it without a tokenizer."""

    task: Task
    advantages: np.ndarray  # f32[segments]
    trained: np.ndarray  # bool[segments]: all tokens of the segment are in the loss mask, or none is
    piece: Callable[[int], str]  # the text of a token


def trajectory_record(trajectory: Trajectory, lesson: Lesson | None = None) -> dict[str, Any]:
    """A trajectory as JSON values. Prompts are given by their length: they follow from the conversation.

    With a lesson it has the group, the task, and of each segment the advantage (None where it is not trained) and the
    tokens' texts. Without one the group says only where a task stood among those played with it.
    """
    record = {
        "task_id": trajectory.task_id,
        "attempt": trajectory.attempt,
        "reward": trajectory.reward,
        "status": trajectory.status,
        "reason": trajectory.reason,
        "turns": [_turn(score) for score in trajectory.turn_scores],
        "messages": list(trajectory.messages),
    }
    if lesson is not None:
        record |= {"group_id": trajectory.group_id, "task": _task(lesson.task)}
    return record | {
        "segments": [_segment(segment, place, lesson) for place, segment in enumerate(trajectory.segments)]
    }


def _turn(score: TurnScore) -> dict[str, Any]:
    words = score.words or [""] * len(score.verdicts)
    return {"reward": score.reward, "verdicts": score.verdicts, "proceed": score.proceed, "words": words}


def _task(task: Task) -> dict[str, Any]:
    return {
        "user_turns": task.user_turns,
        "checklist": [
            [{"question": item.question, "weight": item.weight, "check": item.check} for item in turn]
            for turn in task.checklist
        ],
        "reference": [[{"name": call.name, "arguments": call.arguments}, result] for call, result in task.reference],
    }


def _segment(segment: Segment, place: int, lesson: Lesson | None) -> dict[str, Any]:
    record = {
        "role": segment.role.name.lower(),
        "turn": segment.turn,
        "finish_reason": segment.finish_reason,
        "policy_version": segment.policy_version,
        "prompt_length": len(segment.prompt_tokens),
        "tokens": segment.tokens,
        "logprobs": np.round(segment.logprobs.astype(np.float64), 4),
    }
    if lesson is None:
        return record
    trained = bool(lesson.trained[place])
    return record | {
        "pieces": [lesson.piece(token) for token in segment.tokens.tolist()],
        "advantage": float(lesson.advantages[place]) if trained else None,
        "trained": trained,
    }


def last_step(path: Path | str) -> int:
    """The highest step that a JSONL file speaks of, 0 for none. Raises ValueError as `drop_lines_after` does."""
    return max((step for step, _ in _lines_of_steps(Path(path))), default=0)


def drop_lines_after(path: Path | str, step: int) -> None:
    """Rewrites a JSONL file without the lines of steps above `step`, and without a cut-off last line; atomic.

    Lines that stay are kept byte by byte. Raises ValueError naming the line when one has no integer "step".
    """
    for file, content in _cut([Path(path)], step).items():
        write_atomic(file, content)


def _cut(paths: Iterable[Path], step: int) -> dict[Path, bytes]:
    """What each file should hold that has to change, for `drop_lines_after`."""
    kept = {path: b"".join(line for number, line in _lines_of_steps(path) if number <= step) for path in paths}
    return {path: content for path, content in kept.items() if path.exists() and path.read_bytes() != content}


def _lines_of_steps(path: Path) -> list[tuple[int, bytes]]:
    """(step, line) of a JSONL file's lines, their newlines included; a cut-off last line is left out."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = []
    for number, line in enumerate(lines):
        record = _record(path, number, line, len(lines))
        if record is None:
            continue
        if type(record.get("step")) is not int:
            raise ValueError(f'{path}, line {number + 1}: no integer "step"; the file is not one of this program')
        found.append((record["step"], line + b"\n"))
    return found


def _record(path: Path, number: int, line: bytes, count: int) -> dict[str, Any] | None:
    """The object on one line of a file split at newlines; None for the last, unfinished or empty, piece."""
    if number == count - 1:
        return None
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number + 1}: not a JSON object")
    return record


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and math.isfinite(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # numpy and jax arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_atomic(path: Path, content: bytes) -> None:
    """A reader sees the whole old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

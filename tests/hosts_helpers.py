"""Several processes of `envace_jax.main` on this machine that are one run, for tests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from train_helpers import ROOT, SETTINGS

from envace_jax.metrics import read_json_lines

# Little to do: two tasks, two attempts each, and no evaluation unless a test asks for one. Twelve rows suit every mesh.
SMALL = SETTINGS | {
    "data.attempts": 2, "model.unroll": False, "sampler.slots": 4, "sampler.cache_rows": 8,
    "sampler.prefill_lengths": (256,), "sampler.prefill_rows": (4,),
    "batch.rows_multiple": 1, "batch.micro_batch_rows": 1, "batch.row_buckets": (12,), "warm_up": False,
    "evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0, "steps": 2,
    "batch.layout": "packed", "logging.trajectories_per_step": 4,
}  # fmt: skip
TIMES = ("seconds", "train_seconds", "tokens_per_second", "time", "compiled", "slot_use")
MAIN = "import sys; from envace_jax.main import main; sys.exit(main(sys.argv))"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Run:
    """The processes of one run; their output goes to files."""

    def __init__(
        self,
        processes: int,
        workdir: Path,
        cache: Path,
        *,
        devices: int = 1,
        code: str = MAIN,
        flags: Sequence[Sequence[str]] | None = None,
        environments: Sequence[dict[str, str]] | None = None,
        **settings: object,
    ):
        self.workdir, self.processes = workdir, []
        self._files = [workdir.with_name(f"{workdir.name}.{time.monotonic_ns()}.{i}") for i in range(processes)]
        port = free_port()
        values = {**SMALL, **settings, "compilation_cache": str(cache)}
        for number, file in enumerate(self._files):
            command = [sys.executable, "-c", code, f"--config={ROOT / 'configs' / 'tiny.py'}", f"--workdir={workdir}"]
            command += [f"--config.{name}={value}" for name, value in values.items()]
            if flags is not None:
                command += flags[number]
            elif processes > 1 and environments is None:
                command += [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process={number}"]
            environment = {
                **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                **(environments[number] if environments else {}),
            }  # fmt: skip
            with (
                open(file.with_suffix(f".{number}.out"), "wb") as out,
                open(file.with_suffix(f".{number}.err"), "wb") as err,
            ):
                self.processes.append(
                    subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=err, start_new_session=True)
                )

    def output(self, number: int, kind: str = "err") -> str:
        return self._files[number].with_suffix(f".{number}.{kind}").read_text(errors="replace")

    def last_line(self, number: int, timeout: float = 60) -> str:
        """The last line on stderr, which a process beside may write a moment after the end."""
        until = time.monotonic() + timeout
        while not (said := self.output(number).splitlines()[-1:]) or not said[0].startswith("error: "):
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)
        return said[0]

    def codes(self, timeout: float = 900) -> list[int]:
        """The exit codes of all, once all have ended."""
        until = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.kill()
                pytest.fail(f"still running after {timeout} s\n{self.said()}", pytrace=False)
        return [process.returncode for process in self.processes]

    def succeed(self, timeout: float = 900) -> Run:
        assert self.codes(timeout) == [0] * len(self.processes), self.said()
        return self

    def wait_for_step(self, step: int, timeout: float = 900) -> None:
        """Returns when the run has written that step's checkpoint."""
        until = time.monotonic() + timeout
        while not (self.workdir / "checkpoints" / str(step)).is_dir():
            assert time.monotonic() < until and all(p.poll() is None for p in self.processes), self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return "\n".join(
            f"--- process {number}, {kind}\n{self.output(number, kind)[-3000:]}"
            for number in range(len(self.processes))
            for kind in ("out", "err")
        )

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextlib.contextmanager
def started(*args, **options) -> Iterator[Run]:
    """A run that leaves no process behind."""
    run = Run(*args, **options)
    try:
        yield run
    finally:
        run.kill()


def finished(*args, **options) -> Run:
    with started(*args, **options) as run:
        return run.succeed()


def lines(workdir: Path) -> list[dict]:
    """What the run's metrics say of its steps, without times."""
    found = read_json_lines(workdir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


def assert_same_run(one: Path, other: Path, *, rel: float = 1e-5, but: Sequence[str] = ()) -> None:
    """The same trajectories, and the same numbers in every step up to rounding."""
    ours, theirs = lines(one), lines(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for left, right in zip(ours, theirs, strict=True):
        assert left.keys() == right.keys()
        for name in left.keys() - set(but):
            # Differences of logprobs and of ratios are rounding themselves.
            near = pytest.approx(
                right[name], rel=rel, abs=2e-5 if name.endswith(("diff", "_max")) else 1e-7, nan_ok=True
            )
            assert left[name] == near, f"step {left['step']}, {name}"
    assert drawn(one) == drawn(other)


def drawn(workdir: Path) -> list:
    """The trajectories that were written out, without log-probabilities, which may differ by rounding."""
    return [
        (line["step"], line["task_id"], line["attempt"], line["reward"], line["reason"], line["messages"])
        + tuple((segment["role"], segment["tokens"]) for segment in line["segments"])
        for line in read_json_lines(workdir / "trajectories.jsonl")
    ]

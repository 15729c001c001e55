"""Trackers: a package of the same calls stands in for them, and they themselves where they are installed."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from train_helpers import model_bytes, tiny_config

from envace_jax import main, trackers, train
from envace_jax.config import ConfigError, RunConfig, default_config_dict, from_config_dict, to_json
from envace_jax.metrics import MetricsWriter, read_json_lines
from envace_jax.sharding import make_mesh

FAKE = """
import json, os, pathlib
CALLS = pathlib.Path(os.environ["FAKE_TRACKER"])

def note(kind, **values):
    with open(CALLS, "a") as file:
        file.write(json.dumps({"call": kind, **values}) + "\\n")
    if kind == os.environ.get("FAKE_BREAKS"):
        raise ConnectionError("no\\nnetwork")

class Settings(dict):
    pass

class Run:
    def log(self, values, step):
        note("log", values=values, step=step)

    def finish(self, **values):
        note("finish", **values)

def init(**values):
    note("init", **values)
    return Run()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder of packages wandb and trackio that note how they are called; gives the calls so far."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for name in ("wandb", "trackio"):
        (folder / f"{name}.py").write_text(FAKE)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("FAKE_TRACKER", str(tmp_path / "calls.jsonl"))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield lambda: read_json_lines(tmp_path / "calls.jsonl")
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)


def run(name: str, workdir: Path, first: int, last: int) -> None:
    """A run's steps from its checkpoint at `first` on."""
    config = to_json(RunConfig())
    with (
        trackers.following(name, workdir, config, resumed=first > 0) as tracker,
        MetricsWriter(workdir, tensorboard=False, resume_step=first, tracker=tracker) as writer,
    ):
        for step in range(first + 1, last + 1):
            writer.write(step, {"reward": step / 10, "note": "x", "missing": float("nan")})
        writer.write(last, {"eval_real_success": 0.5})


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_every_metric_and_the_config_go_there_by_their_names(fake: Any, tmp_path: Path, name: str) -> None:
    workdir = tmp_path / "a run"
    run(name, workdir, 0, 2)
    init, *logs, finish = fake()
    assert init["config"] == to_json(RunConfig()) and init["project"] == "envace_jax" and init["resume"] == "allow"
    assert init["name"].startswith("a run")
    assert [(log["step"], log["values"]) for log in logs] == [
        (1, {"reward": 0.1}), (2, {"reward": 0.2}), (2, {"eval_real_success": 0.5}),
    ]  # fmt: skip
    assert finish == {"call": "finish"}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_continues_the_trackers_and_repeats_no_step(fake: Any, tmp_path: Path, name: str) -> None:
    """Six steps were told of; the checkpoint is of step 3."""
    run(name, tmp_path / "run", 0, 6)
    run(name, tmp_path / "run", 3, 8)
    run(name, tmp_path / "other" / "run", 0, 1)
    calls = fake()
    first, second, other = [call for call in calls if call["call"] == "init"]
    key = "id" if name == "wandb" else "name"
    assert first == second and first[key] != other[key]
    steps = [call["step"] for call in calls if call["call"] == "log" and "reward" in call["values"]]
    assert steps == [1, 2, 3, 4, 5, 6, 6, 7, 8, 1]  # the last may not have arrived
    metrics = [line["step"] for line in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "reward" in line]
    assert metrics == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_start_anew_has_a_run_of_its_own(fake: Any, tmp_path: Path) -> None:
    run("wandb", tmp_path / "run", 0, 1)
    run("wandb", tmp_path / "run", 0, 1)
    first, second = [call for call in fake() if call["call"] == "init"]
    assert first["id"] != second["id"]


def test_an_account_s_settings_in_the_environment_hold(fake: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run("wandb", tmp_path / "run", 0, 1)
    assert fake()[0]["project"] == "mine"


@pytest.mark.parametrize("breaks", ["log", "finish"])
def test_a_fault_warns_once_and_the_run_goes_on(
    fake: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, breaks: str
) -> None:
    monkeypatch.setenv("FAKE_BREAKS", breaks)
    run("wandb", tmp_path / "run", 0, 4)
    warning = "warning: logging.tracker: wandb failed, and the run goes on without it: ConnectionError: no network\n"
    assert capsys.readouterr().err == warning
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == 5
    assert [call["call"] for call in fake()].count("log") == (1 if breaks == "log" else 5)


def test_a_tracker_that_does_not_start_refuses_a_new_run_and_spares_a_resumed_one(
    fake: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    run("wandb", tmp_path / "run", 0, 2)
    kept = (tmp_path / "run" / "tracker.json").read_text()
    monkeypatch.setenv("FAKE_BREAKS", "init")
    with pytest.raises(
        ConfigError, match="logging.tracker: wandb does not start: ConnectionError: no network; .*login"
    ):
        run("wandb", tmp_path / "new", 0, 2)
    assert not (tmp_path / "new" / "metrics.jsonl").exists()
    run("wandb", tmp_path / "run", 2, 4)
    assert "goes on without it" in capsys.readouterr().err
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == 6
    monkeypatch.delenv("FAKE_BREAKS")  # and the next start has the same run again
    assert (tmp_path / "run" / "tracker.json").read_text() == kept


def test_a_run_that_fails_is_told_so(fake: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), trackers.following("wandb", tmp_path, {}, resumed=False):
        raise KeyboardInterrupt
    assert fake()[-1] == {"call": "finish", "exit_code": 1}


def test_a_missing_package_is_one_line_before_anything_else(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()  # what W&B leaves behind is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    trackers.check("")
    with pytest.raises(ConfigError, match=r"logging\.tracker: the package wandb is not installed; pip install"):
        trackers.check("wandb")


def test_the_command_says_that_a_package_is_missing(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    arguments = ["main", f"--config={REPOSITORY}/configs/tiny.py", f"--workdir={tmp_path / 'run'}"]
    assert main.main([*arguments, "--config.logging.tracker=trackio", "--config.compilation_cache=off"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: logging.tracker: the package trackio is not installed; pip install")
    assert not (tmp_path / "run").exists()


def test_other_trackers_are_unknown() -> None:
    values = default_config_dict()
    values.update_from_flattened_dict({"logging.tracker": "mlflow", "model.path": "m", "data.source": "d"})
    with pytest.raises(ConfigError, match="logging.tracker: expected one of '', wandb, trackio, got 'mlflow'"):
        from_config_dict(values)


def test_no_tracker_is_imported_unasked(fake: Any, tmp_path: Path) -> None:
    run("", tmp_path / "run", 0, 1)
    assert not {"wandb", "trackio"} & set(sys.modules) and not (tmp_path / "run" / "tracker.json").exists()


@pytest.mark.slow
def test_a_training_run_tells_its_tracker_and_is_the_same(fake: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Bit by bit, also where the tracker fails in the end."""
    changes = {"steps": 2, "warm_up": False, "evaluation.heldout_tasks": 0, "evaluation.fidelity_calls": 0}
    changes |= {"evaluation.unseen_tasks": 0}
    train.run(tiny_config(**changes), make_mesh(), tmp_path / "without")
    assert fake() == []
    monkeypatch.setenv("FAKE_BREAKS", "finish")
    train.run(tiny_config(**changes, **{"logging.tracker": "wandb"}), make_mesh(), tmp_path / "with")
    assert model_bytes(tmp_path / "with") == model_bytes(tmp_path / "without")
    init, first, second, finish = fake()
    assert init["config"] == json.loads((tmp_path / "with" / "config.json").read_text()) and finish["call"] == "finish"
    metrics = read_json_lines(tmp_path / "with" / "metrics.jsonl")
    assert [{"step": call["step"], **call["values"]} for call in (first, second)] == [
        {name: value for name, value in line.items() if value is not None} for line in metrics
    ]


# --- the packages themselves, where they are ---

REAL = """
    import sys
    sys.path.insert(0, "tests")
    from pathlib import Path
    import test_trackers
    test_trackers.run({name!r}, Path({workdir!r}), 0, 3)
    test_trackers.run({name!r}, Path({workdir!r}), 2, 5)
"""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_has_the_metrics(run_python: Any, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    run_python(REAL.format(name="wandb", workdir=str(workdir)), env={"WANDB_MODE": "offline"})
    kept = json.loads((workdir / "tracker.json").read_text())
    assert kept["tracker"] == "wandb" and kept["step"] == 5
    files = sorted((workdir / "wandb").glob(f"offline-run-*/run-{kept['run']}.wandb"))  # each start has one
    assert files and b"eval_real_success" in b"".join(path.read_bytes() for path in files)


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_has_the_metrics(run_python: Any, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    run_python(REAL.format(name="trackio", workdir=str(workdir)), env={"TRACKIO_DIR": str(tmp_path / "trackio")})
    kept = json.loads((workdir / "tracker.json").read_text())
    with sqlite3.connect(tmp_path / "trackio" / "envace_jax.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
    assert {name for name, _, _ in rows} == {f"run-{kept['run']}"}
    rewards = [(step, json.loads(text)["reward"]) for _, step, text in rows if "reward" in json.loads(text)]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.3), (3, 0.3), (4, 0.4), (5, 0.5)]

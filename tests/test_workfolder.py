"""What a start may do in its work folder: whose folder it is, and that a refused start changes no file."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_train import tiny_config

from envace_jax import environment, main, train, workfolder
from envace_jax.config import RunConfig, to_json
from envace_jax.data import write_tasks
from envace_jax.envs import tiny
from envace_jax.metrics import MetricsWriter
from envace_jax.responders import Rehearsed
from envace_jax.sharding import make_mesh
from envace_jax.types import Role, Task, TrainState

NONE = {"evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0}


def small(**changes: Any) -> RunConfig:
    return tiny_config(**{"data.count": 4, **NONE, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The training run without a network: one parameter, to which every step adds 1. Returns what `run` returns."""

    def build(config: RunConfig, *_: Any) -> Any:
        cast = SimpleNamespace(learners={"": tuple(Role)})
        setup = SimpleNamespace(
            config=config,
            mesh=make_mesh(),
            model=None,
            folder=Path("base"),
            cast=cast,
            responder=Rehearsed(),
            base=None,
        )
        return setup, TrainState(jnp.int32(0), {"w": jnp.zeros(2)}, ())

    def iterate(setup: Any, state: TrainState, step: int, *_: Any) -> Any:
        stepped = TrainState(state.step + 1, {"w": state.params["w"] + 1}, ())
        return stepped, {"reward": 0.5, "sampled_tokens": 8.0}, []

    def evaluate(setup: Any, state: Any, step: int, writer: Any) -> Any:
        return {"step": step, "seconds": 0.0, "values": {"w": float(state.params["w"][0])}}

    def save(path: Path, model: Any, params: Any, tokenizer_dir: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(str(float(params["w"][0])))

    monkeypatch.setattr(train, "build", build)
    monkeypatch.setattr(train, "compile_all", lambda setup, state, writer: state)
    monkeypatch.setattr(train, "iterate", iterate)
    monkeypatch.setattr(train, "_evaluate", evaluate)
    monkeypatch.setattr(train.hf, "save", save)
    monkeypatch.setattr(MetricsWriter, "curves", lambda self, path: Path(path).write_bytes(b"png"))
    return lambda config, workdir=tmp_path / "run": train.run(config, None, workdir)


def refused(action: Callable[[], Any], folder: Path, match: str) -> None:
    """The action raises an error that matches, on one line if it names no list of settings, and changes no file."""
    before = contents(folder)
    with pytest.raises((ValueError, OSError), match=match):
        action()
    assert contents(folder) == before


# --- whose folder it is ---


def test_a_folder_is_claimed_once(run: Callable[..., Any], tmp_path: Path) -> None:
    config, folder = small(), tmp_path / "run"
    workfolder.check(folder, config)
    workfolder.claim(folder, config)
    workfolder.check(folder, dataclasses.replace(config, seed=5))  # nothing to continue yet
    run(config)
    other = dataclasses.replace(config, seed=7)
    refused(lambda: run(other), folder, f"holds a run with other settings.*\nseed: {config.seed} -> 7")
    run(dataclasses.replace(config, steps=5))
    assert json.loads((folder / "config.json").read_text())["steps"] == 5


def test_lower_steps_are_refused_before_a_file_is_written(run: Callable[..., Any], tmp_path: Path) -> None:
    run(small(steps=3))
    refused(lambda: run(small(steps=2)), tmp_path / "run", "steps: 2 is below the 3 steps that .* has done already")


def test_every_start_says_where_it_was_made(run: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(small(steps=2))
    run(small(steps=3))
    first, second = json.loads((folder / "environment.json").read_text())
    assert (first["step"], second["step"]) == (0, 2) and first["time"] <= second["time"]
    assert first["versions"]["jax"] == jax.__version__ and first["versions"].keys() >= {"python", "envace_jax", "flax"}
    assert (first["backend"], first["processes"]) == ("cpu", 1) and sum(first["devices"].values()) == len(jax.devices())
    assert first["command"] == shlex.join(sys.orig_argv)
    refused(lambda: run(small(steps=1)), folder, "below the 3 steps")
    (folder / "environment.json").write_text("{")  # no reason to refuse a run
    run(small(steps=4))
    assert [start["step"] for start in json.loads((folder / "environment.json").read_text())] == [3]
    for step in range(60):
        environment.record(folder, step)
    starts = [start["step"] for start in json.loads((folder / "environment.json").read_text())]
    assert starts == [3, *range(19), *range(40, 60)]
    (folder / "environment.json").unlink()
    (folder / "environment.json").mkdir()
    refused(lambda: run(small(steps=5)), folder, "environment.json: a folder, where the run writes a file")


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "qwen3"}', '{"model": 1, "data": {}}'])
def test_a_config_that_is_no_runs_is_left_alone(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    refused(lambda: workfolder.check(tmp_path, small()), tmp_path, r"config\.json: not .*; choose another --workdir")


# --- Ctrl-C ---


def command(folder: Path) -> list[str]:
    return ["main", f"--config={folder / 'mine.py'}", f"--workdir={folder / 'run'}", "--config.compilation_cache=off"]


@pytest.mark.parametrize(
    ("at", "said"),
    [(0, "stopped before the first checkpoint; the same command starts anew"), (2, "continues {run} from step 2")],
)
def test_ctrl_c_is_one_line_and_the_checkpoint_under_way_becomes_complete(
    at: int, said: str, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "mine.py").write_text(
        "import test_workfolder\n"
        "from envace_jax.config import default_config_dict\n"
        "from envace_jax.config import to_json\n\n"
        "def get_config():\n"
        "    config = default_config_dict()\n"
        "    config.update(to_json(test_workfolder.small(steps=4)))\n"
        "    return config\n"
    )
    whole = train.iterate

    def interrupted(setup: Any, state: TrainState, step: int, *rest: Any) -> Any:
        if step == at:
            raise KeyboardInterrupt
        return whole(setup, state, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "iterate", interrupted)
        assert main.main(command(tmp_path)) == 130
    error = capsys.readouterr().err
    assert error.endswith(said.format(run=tmp_path / "run") + "\n") and error.count("\n") == 1
    assert main.main(command(tmp_path)) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["w_after"] == 4.0


def test_ctrl_c_before_there_is_a_work_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "read_flags", interrupted)
    assert main.main(["main"]) == 130
    assert capsys.readouterr().err.startswith("stopped before the first checkpoint")


# --- a resumed run reads what it read before ---


def test_the_checkpoints_own_settings_count_where_config_json_is_gone(run: Callable[..., Any], tmp_path: Path) -> None:
    config, folder = small(steps=1), tmp_path / "run"
    run(config)
    (folder / "config.json").unlink()
    refused(lambda: run(dataclasses.replace(config, seed=9)), folder, f"other settings.*\nseed: {config.seed} -> 9")
    run(config)


def test_changed_tasks_are_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    tasks = tiny.tasks("train", 4, 0)
    first = dataclasses.replace(tasks[0], user_turns=("Something else, please", *tasks[0].user_turns[1:]))
    file = tmp_path / "tasks.jsonl"

    def config(steps: int) -> RunConfig:
        return small(**{"data.source": str(file), "data.count": 0, "steps": steps})

    write_tasks(file, tasks)
    run(config(1))
    for other in (tasks[::-1], tasks[:3], [_retold(first), *tasks[1:]]):
        write_tasks(file, other)
        refused(lambda: run(config(2)), tmp_path, "data.source: the tasks of .* are not what they were when")
    write_tasks(file, tasks)
    run(config(2))


def _retold(task: Task) -> Task:
    """The task with its conversation's user messages replaced by its user turns, as a record needs it."""
    turns = iter(task.user_turns)
    told = [{**m, "content": next(turns)} if m["role"] == "user" else m for m in task.conversation]
    return dataclasses.replace(task, conversation=tuple(told))


def test_a_changed_model_folder_is_refused_and_the_files_are_named(run: Callable[..., Any], tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(Path(train.__file__).parent / "assets" / "tiny_base", base)
    run(small(**{"model.path": str(base), "steps": 1}))
    longer = small(**{"model.path": str(base), "steps": 2})
    weights = base / "model.safetensors"
    held = weights.read_bytes()
    flipped = bytearray(held)
    for place in range(len(held) // 2, len(held)):  # retrained weights: another second half, of the same size
        flipped[place] ^= 1
    weights.write_bytes(flipped)
    (base / "tokenizer_config.json").write_text("{}")
    named = r"model.path: model\.safetensors, tokenizer_config\.json of .* are not as when"
    refused(lambda: run(longer), tmp_path, named)
    weights.write_bytes(held)
    (base / "tokenizer_config.json").unlink()
    refused(lambda: run(longer), tmp_path, r"model.path: tokenizer_config\.json of .* is not as when")


def test_a_finished_run_has_nothing_to_evaluate(run: Callable[..., Any], tmp_path: Path) -> None:
    run(small(steps=1))
    other = {"evaluation.samples": 3}
    refused(lambda: run(small(steps=1, **other)), tmp_path, "evaluation.samples: 1 -> 3: .* nothing would be evaluated")
    run(small(steps=1, **{"evaluation.every": 1}))
    run(small(steps=2, **other))


# --- results are not wiped ---


def results(folder: Path, config: RunConfig | None, last: int = 1) -> None:
    """What a run leaves that came to step `last` and has no checkpoint."""
    if config is not None:
        (folder / "config.json").write_text(json.dumps(to_json(config)))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(last + 1)))
    (folder / "trajectories.jsonl").write_text('{"step": 1}\n')


def test_a_start_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    config = small(**{"checkpoint.every": 2})
    for last in (0, 2, 4):  # the checkpoint of step 2 may not be complete while steps 3 and 4 are done
        results(tmp_path, config, last)
        workfolder.check(tmp_path, config)


def test_results_without_checkpoints_are_refused_unless_the_same_start_left_them(tmp_path: Path) -> None:
    config = small(**{"checkpoint.every": 2})
    other = dataclasses.replace(config, seed=5)
    results(tmp_path, config)
    refused(lambda: workfolder.check(tmp_path, other), tmp_path, r"metrics\.jsonl is of a run with other settings")
    (tmp_path / "metrics.jsonl").unlink()
    refused(lambda: workfolder.check(tmp_path, other), tmp_path, r"trajectories\.jsonl is of a run with other")
    results(tmp_path, config, last=5)
    refused(lambda: workfolder.check(tmp_path, config), tmp_path, "reaches step 5, but there is no checkpoint")
    results(tmp_path, config)
    (tmp_path / "config.json").unlink()
    refused(lambda: workfolder.check(tmp_path, config), tmp_path, r"metrics\.jsonl is of a run with other settings")
    (tmp_path / "summary.json").write_text("{}")
    results(tmp_path, config)
    refused(lambda: workfolder.check(tmp_path, config), tmp_path, "results of a finished run without its checkpoints")


# --- the model is not overwritten, and the numbers do not hang on it ---


def test_a_base_model_in_the_work_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "link").symlink_to(model)
    lies_there = "model.path: .* lies where this run writes its own; choose another --workdir"
    for path, workdir in ((model, tmp_path), (tmp_path / "link", tmp_path), (model, model)):
        config = small(**{"model.path": str(path)})
        refused(lambda config=config, workdir=workdir: train.run(config, None, workdir), tmp_path, lies_there)
    refused(lambda: train.run(small(), None, tmp_path), tmp_path, "model: not a model that this run wrote")


def test_a_model_is_replaced_by_the_run_that_wrote_it_only(run: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(small(steps=1))
    run(small(steps=2))
    assert (folder / "model" / "config.json").read_text() == "2.0"
    (folder / "summary.json").unlink()  # a run that has not come to its end has written no model
    refused(lambda: run(small(steps=3)), folder, "model: not a model that this run wrote")


@pytest.mark.parametrize("name", ["model/notes.txt", "curves.png/x", "summary.json/x", "metrics.jsonl/x"])
def test_what_stands_in_the_way_of_a_file_is_found_at_the_start(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("mine")
    refused(lambda: train.run(small(), None, tmp_path), tmp_path, str(tmp_path / name.split("/")[0]))


def test_a_failed_export_costs_no_numbers(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(train.hf, "save", full)
        with pytest.raises(OSError, match="no space"):
            run(small(steps=2))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["w_after"] == 2.0
    assert (tmp_path / "run" / "curves.png").is_file()
    run(small(steps=2))
    assert (tmp_path / "run" / "model" / "config.json").read_text() == "2.0"


@pytest.mark.parametrize("setting", ["data.environments", "reward.checkpoint"])
def test_a_changed_environment_or_judge_is_refused(run: Callable[..., Any], tmp_path: Path, setting: str) -> None:
    if setting == "data.environments":
        file = tmp_path / "counter.py"
        file.write_text("TOOLS = []\n\n\ndef execute(state, name, arguments):\n    return state, {}\n")
        changes: dict[str, Any] = {setting: (str(file),)}
    else:
        shutil.copytree(Path(train.__file__).parent / "assets" / "tiny_base", tmp_path / "judge")
        file, changes = tmp_path / "judge" / "config.json", {setting: str(tmp_path / "judge"), "reward.kind": "judge"}
    run(small(**changes, steps=1))
    held = file.read_text()
    file.write_text(held + "\n")
    refused(lambda: run(small(**changes, steps=2)), tmp_path, f"{setting}: files of .* are not as when")
    file.write_text(held)
    run(small(**changes, steps=2))

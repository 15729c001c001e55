"""The Colab notebook: it is stored without outputs, and every code cell of it runs, with other parameters, on a CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import notebook
import pytest
from conftest import REPOSITORY

from envace_jax import main
from envace_jax.config import to_json
from envace_jax.envs import tiny
from envace_jax.metrics import read_json_lines
from envace_jax.models import hf
from envace_jax.records import record_from_task

PATH = REPOSITORY / "experiments" / "colab_tpu.ipynb"
BOOK = notebook.read(PATH)
CODE = notebook.code_cells(BOOK)
# The tiny model and as little of everything as runs.
SMALL = (
    "--config.warm_up=False --config.checkpoint.every=1 --config.optimizer.schedule=constant "
    "--config.data.count=40 --config.data.tasks_per_step=4 --config.data.attempts=2 --config.batch.row_buckets=(16,) "
    "--config.sampler.slots=8 --config.sampler.cache_rows=16 --config.sampler.prefill_lengths=(64,440) "
    "--config.evaluation.heldout_tasks=8 --config.evaluation.samples=1 --config.evaluation.greedy=False "
    "--config.evaluation.unseen_tasks=4 --config.evaluation.fidelity_calls=8"
).split()


def command(workdir: Path, steps: int, **parameters: object) -> list[str]:
    given = {"backend": "cpu", "config": "configs/tiny.py", "workdir": str(workdir)} | parameters
    given["settings"] = [*SMALL, f"--config.steps={steps}"]
    return [sys.executable, "-u", notebook.__file__, str(PATH), json.dumps(given)]


def started(workdir: Path, steps: int, **parameters: object) -> subprocess.Popen[str]:
    """The whole notebook, in a process of its own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        command(workdir, steps, **parameters), cwd=PATH.parent, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def printed(process: subprocess.Popen[str]) -> str:
    """What the notebook printed; the test fails with it where a cell failed."""
    text = process.communicate(timeout=900)[0]
    assert process.returncode == 0, text
    return text


def steps_of(workdir: Path) -> list[int]:
    """The steps in a run's metrics, evaluations left out."""
    records = read_json_lines(workdir / "metrics.jsonl")
    return [record["step"] for record in records if "reward" in record]


# --- as it is stored ---


def test_it_is_stored_without_outputs():
    for cell in CODE:
        assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
        assert set(cell["metadata"]) <= {"tags"}, cell["id"]
    assert "widgets" not in BOOK["metadata"]


def test_it_has_the_format_of_a_notebook():
    assert (BOOK["nbformat"], BOOK["nbformat_minor"]) == (4, 5)
    assert BOOK["metadata"]["kernelspec"]["name"] == "python3" and BOOK["metadata"]["accelerator"] == "TPU"
    ids = [cell["id"] for cell in BOOK["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)
    for cell in BOOK["cells"]:
        needed = {"cell_type", "id", "metadata", "source"}
        assert set(cell) == needed | ({"outputs", "execution_count"} if cell["cell_type"] == "code" else set())
        lines = cell["source"]
        assert all(line.endswith("\n") for line in lines[:-1]) and not lines[-1].endswith("\n")


def test_jupyters_own_check_takes_it():
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; .ci/run checks it with nbclient")
    nbformat.validate(nbformat.read(PATH, as_version=4))


def test_the_parameters_come_first_and_name_what_exists():
    assert [notebook.is_parameters(cell) for cell in CODE] == [True] + [False] * (len(CODE) - 1)
    names: dict[str, object] = {}
    exec(notebook.source(CODE[0]), names)
    assert (names["backend"], names["tasks"], names["settings"]) == ("tpu", "tiny", [])
    config, _ = main.read_flags(["main", f"--config={REPOSITORY / str(names['config'])}"])
    assert config.model.path == "Qwen/Qwen3-0.6B" and config.limits.act_context == 4096
    with pytest.raises(ValueError, match="no parameters \\['wrkdir'\\]"):
        notebook.execute(PATH, {"wrkdir": "x"}, only=("parameters",))


def test_it_says_first_what_was_verified_and_what_not():
    first = notebook.source(BOOK["cells"][0])
    assert BOOK["cells"][0]["cell_type"] == "markdown"
    assert "**Verified:**" in first and "**Not verified:**" in first
    for name in re.findall(r"`((?:docs|configs|experiments)/[\w./]+)`", json.dumps(BOOK)):
        assert (REPOSITORY / name).is_file(), name


def test_its_configuration_is_the_0p6b_one_at_another_length():
    def flat(name):
        config, _ = main.read_flags(["m", f"--config={REPOSITORY}/configs/{name}.py", "--config.data.source=tiny",
                                     "--config.data.count=2000"])  # fmt: skip
        groups = to_json(config)
        return {f"{group}.{key}": value for group, values in groups.items() if isinstance(values, dict)
                for key, value in values.items()}  # fmt: skip

    ours, theirs = flat("qwen3_0p6b_colab"), flat("qwen3_0p6b")
    different = {key for key in ours if ours[key] != theirs[key]}
    sized = ("limits", "prompts", "sampler", "evaluation", "mesh")  # by the length or by the chip
    assert {key for key in different if key.split(".")[0] not in sized} == {
        "batch.row_length", "batch.drop_zero_advantage", "checkpoint.keep",
    }  # fmt: skip
    assert {key for key in different if key.startswith(("limits", "prompts"))} == {
        "limits.act_context", "limits.act_response", "limits.rehearse_response",
        "prompts.max_act_prompt", "prompts.max_rehearse_prompt",
    }  # fmt: skip
    assert ours["sampler.temperature"] == theirs["sampler.temperature"]
    assert ours["evaluation.temperature"] == theirs["evaluation.temperature"]


# --- its first cells ---


class Pip:
    """Stands in for `subprocess.run`: keeps what pip was asked and with which constraints, and answers as told."""

    def __init__(self, returncode=0, stderr="", then=lambda: None):
        self.answer = types.SimpleNamespace(returncode=returncode, stderr=stderr, stdout="")
        self.command, self.pins, self.then = [], "", then

    def __call__(self, command, **_):
        self.command = command
        self.pins = Path(command[command.index("--constraint") + 1]).read_text()
        self.then()
        return self.answer


@pytest.fixture
def runtime(monkeypatch):
    """A runtime with its own jax and without this package; its packages by name, to be changed."""
    versions = {"jax": "0.11.0", "jaxlib": "0.11.0", "libtpu": "0.1.2", "jax-cuda12-plugin": "0.11.0",
                "numpy": "2.1.0", "jaxtyping": "0.3", "flax": "0.12.8"}  # fmt: skip

    def distributions():
        return [types.SimpleNamespace(metadata={"Name": name}, version=value) for name, value in versions.items()]

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return versions


def install():
    return notebook.execute(PATH, {"checkout": str(REPOSITORY)}, only=("parameters", "install"))


def test_installing_pins_what_the_runtime_has(runtime, monkeypatch, capsys):
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip)
    install()
    assert pip.command[1:4] == ["-m", "pip", "install"] and pip.command[-1] == str(REPOSITORY)
    assert sorted(pip.pins.split()) == [
        "jax-cuda12-plugin==0.11.0", "jax==0.11.0", "jaxlib==0.11.0", "libtpu==0.1.2", "numpy==2.1.0",
    ]  # fmt: skip
    assert "as the runtime had them: jax 0.11.0, jax-cuda12-plugin 0.11.0, jaxlib" in capsys.readouterr().out


def test_a_folder_of_the_packages_name_is_not_the_package(runtime, monkeypatch):
    """A clone of the repository in the current folder is found under the package's name."""
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin=None))
    install()
    assert pip.command


def test_an_installation_that_changed_jax_is_refused(runtime, monkeypatch):
    monkeypatch.setattr(subprocess, "run", Pip(then=lambda: runtime.update(jax="0.12.0")))
    with pytest.raises(RuntimeError, match=r"changed jax 0.11.0 -> 0.12.0; restart"):
        install()


def test_an_installation_that_fails_says_why_and_beside_what(runtime, monkeypatch):
    monkeypatch.setattr(subprocess, "run", Pip(1, "ERROR: conflicting dependencies"))
    with pytest.raises(RuntimeError, match=r"(?s)conflicting.*beside what this runtime has: jax 0.11.0"):
        install()


def test_a_missing_repository_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="set checkout in the first cell"):
        notebook.execute(PATH, {}, only=("parameters", "install"))


@pytest.mark.parametrize("wanted", ["tpu", "gpu"])
def test_a_wrong_backend_is_refused_with_the_way_out(wanted, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(
        RuntimeError, match=rf"backend 'cpu' and the notebook wants '{wanted}'\. Choose Runtime > Change"
    ):
        notebook.execute(
            PATH, {"backend": wanted, "checkout": str(REPOSITORY)}, only=("parameters", "install", "backend")
        )


def test_a_backend_that_does_not_start_is_refused_with_its_message(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "nosuch")
    with pytest.raises(RuntimeError, match="backend 'none'"):
        notebook.execute(PATH, {"checkout": str(REPOSITORY)}, only=("parameters", "install", "backend"))
    assert "nosuch" in capsys.readouterr().out


class Run:
    """Stands in for the training process: prints a line and ends with a code."""

    def __init__(self, code):
        self.code, self.command, self.stdout = code, [], ["step 1/1\n"]

    def __call__(self, command, **_):
        self.command = command
        return self

    def wait(self):
        return self.code


def train(monkeypatch, run, **parameters):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(subprocess, "Popen", run)
    given = {"backend": "cpu", "checkout": str(REPOSITORY), "config": "configs/tiny.py", **parameters}
    return notebook.execute(PATH, given, only=("parameters", "install", "tasks", "train"), preset={"alone": {}})


def test_the_work_folder_may_lie_on_drive(monkeypatch):
    mounted = []
    drive = types.SimpleNamespace(mount=mounted.append)
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", types.SimpleNamespace(drive=drive))
    run = Run(0)
    names = train(monkeypatch, run, drive=True, workdir="runs/mine")
    assert mounted == ["/content/drive"] and str(names["folder"]) == "/content/drive/MyDrive/runs/mine"
    assert run.command[-1] == "--workdir=/content/drive/MyDrive/runs/mine"


def test_a_run_that_fails_stops_the_notebook(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="exit code 2; the lines above say why"):
        train(monkeypatch, Run(2), workdir=str(tmp_path))


def test_tasks_that_are_not_there_stop_the_notebook_before_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    alone = {"cwd": REPOSITORY, "env": {**os.environ, "JAX_PLATFORMS": "cpu"}, "text": True}
    given = {"backend": "cpu", "checkout": str(REPOSITORY), "tasks": str(tmp_path / "none.jsonl")}
    with pytest.raises(RuntimeError, match=r"none\.jsonl cannot be used; the lines above say why"):
        notebook.execute(PATH, given, only=("parameters", "install", "tasks"), preset={"alone": alone})
    assert "there is no task file" in capsys.readouterr().out


# --- all of it ---


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    text = printed(started(tmp_path / "run", steps=2))
    assert re.findall(r"\[cell ([\w-]+)\]", text) == [cell["id"] for cell in CODE]
    assert "backend cpu" in text and "step 2/2" in text and "\nfinished\n" in text
    assert steps_of(tmp_path / "run") == [1, 2]
    assert int(re.search(r"\[picture of (\d+) bytes\]", text)[1]) > 10_000
    assert re.search(r"(?m)^ +step 0 +step 2$", text)
    for name in ("real_success", "unseen_domain", "fidelity", "fidelity_without_examples"):
        assert re.search(rf"(?m)^{name} +[01]\.\d{{3}} +[01]\.\d{{3}}$", text), name
    assert "user:     " in text and "act:      \033[34m" in text and "rehearse: \033[35m" in text
    assert hf.read_config(tmp_path / "run" / "model").width > 0 and "model.safetensors" in text


@pytest.mark.slow
def test_a_run_that_was_stopped_is_continued_by_the_same_cells(tmp_path):
    """The cell is stopped as Jupyter does it, by SIGINT to the kernel; then all cells are run again."""
    process, before = started(tmp_path / "run", steps=200), ""
    for line in process.stdout:
        before += line
        if line.startswith("step 2/200"):
            process.send_signal(signal.SIGINT)
            break
    before += printed(process)
    done = int(re.search(r"stopped; the same command continues .* from step (\d+)", before)[1])
    assert done >= 1 and "stopped; run this cell again to continue" in before and "no model yet" in before
    assert "[cell trajectory]" in before and "[picture of" in before  # what there is is shown all the same
    after = printed(started(tmp_path / "run", steps=done + 1, export_to=str(tmp_path / "copy")))
    assert steps_of(tmp_path / "run") == list(range(1, done + 2))
    assert re.search(rf"checkpoints of steps \[(\d+, )?{done + 1}\]", after)
    assert hf.read_config(tmp_path / "copy") == hf.read_config(tmp_path / "run" / "model")


@pytest.mark.slow
def test_ones_own_tasks(tmp_path):
    lines = [json.dumps(record_from_task(task, index)) for index, task in enumerate(tiny.tasks("train", 12, 3))]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(lines))
    text = printed(started(tmp_path / "run", steps=1, tasks=str(path)))
    assert "12 records, 12 tasks, 0 left out" in text and "\nfinished\n" in text
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["data"]["source"], saved["evaluation"]["heldout_tasks"]) == (str(path), 0)
    path.write_text("no json\n")
    with pytest.raises(AssertionError, match=r"(?s)left out 1 x: not JSON.*exit code 2; the lines above say why"):
        printed(started(tmp_path / "other", steps=1, tasks=str(path)))

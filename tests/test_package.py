"""The package as others meet it: what an import costs, the wheel and its types, and the files beside the code."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY

import envace_jax

PACKAGE = REPOSITORY / "envace_jax"
COMMANDS = sorted(
    path.stem for path in PACKAGE.glob("*.py") if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")
)
SOURCES = ("setup.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE", "MANIFEST.in")


def test_the_package_itself_imports_nothing(run_python: Any) -> None:
    """So it takes no time, and a look at the version starts no accelerator."""
    code = """
        import sys
        before = set(sys.modules)
        import envace_jax
        assert envace_jax.__version__
        print(*sorted(set(sys.modules) - before))
    """
    assert run_python(code).split() == ["envace_jax"]


@pytest.mark.parametrize("module", ["metrics", "display", "progress", "curves", "reporting"])
def test_what_reads_a_run_needs_no_jax(run_python: Any, module: str) -> None:
    if not any((PACKAGE / module).with_suffix(suffix).exists() for suffix in (".py", "")):
        pytest.skip(f"there is no {module}")
    run_python(f"import sys, envace_jax.{module}\nassert 'jax' not in sys.modules")


def test_every_command_says_how_it_is_used_without_a_device(run_python: Any) -> None:
    """A device that is asked for may be another run's: on a TPU it then fails, or takes it away."""
    assert {"main", "evaluate", "serve", "plan", "data"} <= set(COMMANDS)
    code = f"""
        import runpy, sys, warnings
        from jax._src import xla_bridge
        warnings.simplefilter("ignore", RuntimeWarning)  # a command may be imported already
        for name in {COMMANDS!r}:
            sys.argv = [name, "--help"]
            try:
                runpy.run_module("envace_jax." + name, run_name="__main__")
            except SystemExit as end:
                assert not end.code, name
            print("END OF", name)
        assert not xla_bridge.backends_are_initialized()
    """
    shown = run_python(code)
    for name in COMMANDS:
        text, shown = shown.split(f"END OF {name}\n")
        assert f"envace_jax.{name}" in text or f"usage: {name}" in text, text[:500]


def copied(folder: Path) -> Path:
    """The repository's sources in a folder of their own: a build leaves files behind."""
    for name in SOURCES:
        shutil.copy(REPOSITORY / name, folder)
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(*command: str | Path, folder: Path) -> str:
    unset = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        command, cwd=folder, env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the wheel, the Python of an environment that has it and sees this one's other packages)."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copied(tmp_path_factory.mktemp("source"))
    wheel_command = [sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "-w", folder]
    run(*wheel_command, folder=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", folder=folder)
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=folder)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    # Only the folder is added: the .pth files in it, that of an editable installation among them, are not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n" + sysconfig.get_path("platlib") + "\n")
    return wheel, python


@pytest.mark.slow
def test_the_wheel_has_all_of_the_package_and_nothing_else(installed: tuple[Path, Path]) -> None:
    wanted = {
        path.relative_to(REPOSITORY).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(zipfile.ZipFile(installed[0]).namelist())
    information = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - information == wanted
    assert "envace_jax/py.typed" in wanted and "envace_jax/assets/tiny_base/model.safetensors" in wanted
    assert any(name.endswith("licenses/LICENSE") for name in information)


@pytest.mark.slow
def test_the_wheel_runs_from_any_folder(installed: tuple[Path, Path], tmp_path: Path) -> None:
    _, python = installed
    code = """
        import envace_jax, pathlib
        from envace_jax.config import model_path
        assert (pathlib.Path(model_path("asset:tiny_base")) / "model.safetensors").is_file()
        print(envace_jax.__file__)
    """
    where = run(python, "-c", re.sub("(?m)^ +", "", code), folder=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    assert "--config.KEY=VALUE" in run(python, "-m", "envace_jax.main", "--help", folder=tmp_path)


@pytest.mark.slow
def test_a_type_checker_sees_the_types(installed: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        'from envace_jax.types import ToolCall\n\nnumber: int = ToolCall("price", {}).name\n'
    )
    command = [sys.executable, "-m", "mypy", "--python-executable", installed[1], "--cache-dir", tmp_path / "cache"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run([*command, "own.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    first, _ = done.stdout.splitlines()
    assert first.startswith("own.py:3: error: Incompatible types in assignment (expression has type"), done.stdout


# --- the files beside the code ---


def test_the_citation_is_one() -> None:
    found = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= found.keys()  # what the format asks for
    assert found["cff-version"] == "1.2.0" and found["type"] == "software" and found["license"] == "Apache-2.0"
    assert found["version"] == envace_jax.__version__
    assert [author["name"] for author in found["authors"]] == ["the envace_jax developers"]
    for reference in found["references"]:
        assert {"type", "title", "authors"} <= reference.keys() and "EnvACE" in reference["title"]
    assert not any(isinstance(value, datetime.date) for value in found.values())  # the format wants text


def test_the_changelog_speaks_of_this_version() -> None:
    versions = re.findall(r"(?m)^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text())
    assert versions[0] in ("Unreleased", envace_jax.__version__) and envace_jax.__version__ in versions


def test_the_licence_is_whole() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text and len(text) > 11000


def test_contributing_is_three_commands_that_exist() -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.DOTALL)
    commands = [line.split("#")[0].split("&&") for line in block.splitlines()]
    assert len(commands) == 3
    programs = {step.split()[0] for line in commands for step in line}
    assert programs == {"pip", "pre-commit", "ruff", "mypy", "pytest"}

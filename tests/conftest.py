"""Helpers shared by the tests: run a piece of code in its own Python process with N simulated devices.

Use the plain function (`from conftest import run_python`) or the fixture of the same name. Slow tests carry
`@pytest.mark.slow`; pyproject.toml deselects them by default and `pytest -m slow` or `pytest -m ""` brings them back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from browser import Browser
from jax.experimental.compilation_cache import compilation_cache

REPOSITORY = Path(__file__).resolve().parent.parent


def run_python(code: str, devices: int = 1, timeout: float = 300, env: dict[str, str] | None = None) -> str:
    """Runs `code` (dedented) in a fresh interpreter on CPU and returns its stdout.

    `devices` CPU devices are simulated. The process starts in the repository root, so the package, the configs and the
    test helpers are found. `env` adds environment variables. Fails the test, showing the output, when the process ends
    with an error or takes longer than `timeout` seconds.
    """
    environment = dict(os.environ)
    environment["JAX_PLATFORMS"] = "cpu"
    kept = [flag for flag in environment.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    environment["XLA_FLAGS"] = " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"])
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment.update(env or {})
    command = [sys.executable, "-c", textwrap.dedent(code)]
    try:
        done = subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the process took longer than {timeout} s\nstderr:\n{_text(error.stderr)}", pytrace=False)
    if done.returncode != 0:
        pytest.fail(
            f"the process ended with code {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}",
            pytrace=False,
        )
    return done.stdout


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


@pytest.fixture(name="run_python")
def run_python_fixture() -> Callable[..., str]:
    """`run_python` as a fixture, for tests that prefer an argument to an import."""
    return run_python


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes longer than about 15 seconds; deselected by default")


@pytest.fixture(scope="session", autouse=True)
def programs_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What one test has compiled is found by the next, and by the processes that tests start: many build much the same.

    A test that looks at where programs come from sets a folder of its own.
    """
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0.05,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    """Chromium without a window; to be used where `browser.CHROMIUM` names one."""
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started

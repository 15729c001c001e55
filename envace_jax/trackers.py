"""A run's metrics on Weights & Biases or trackio, beside the files: what `logging.tracker` asks for.

Every metric has its name of metrics.jsonl, and the config goes along. The package is imported only if asked for. A
resumed run continues the tracker's run, whose name is kept in the work folder. What goes wrong with a tracker once a
run has begun costs a warning and the tracker, never the run. Knows numbers and names, nothing of where they come from.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from envace_jax.config import ConfigError
from envace_jax.metrics import write_json_atomic

TRACKER_FILE = "tracker.json"
PROJECT = "envace_jax"
HINTS = {
    "wandb": "`wandb login` gives it an account, and WANDB_MODE=offline needs none",
    "trackio": "see its documents",
}


def check(name: str) -> None:
    """Raises ConfigError where the tracker's package is not installed; "" is no tracker."""
    found = importlib.util.find_spec(name) if name else None
    if name and (found is None or found.origin is None):  # without an origin it is a folder of that name
        raise ConfigError(
            f"logging.tracker: the package {name} is not installed; pip install 'envace-jax[{name}]' brings it, and "
            "--config.logging.tracker= goes without"
        )


class Tracker:
    """Hands metrics to a run of a tracker, until something goes wrong with it."""

    def __init__(self, name: str, run: Any, path: Path, kept: Mapping[str, Any]) -> None:
        self._name, self._run, self._path = name, run, path
        self._kept = dict(kept)
        self._told: int = kept["step"]
        self._keep()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step. What the tracker was told before a run went back to a checkpoint is not told again."""
        if step >= self._told and self._run is not None:
            self._try(lambda: self._run.log(dict(values), step=step))
            self._kept["step"] = step
            self._keep()

    def close(self, failed: bool) -> None:
        """Ends the tracker's run; may wait until what was logged is sent."""
        if self._run is not None:
            said = {"exit_code": 1} if failed and self._name == "wandb" else {}
            self._try(lambda: self._run.finish(**said))

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # whatever it is, the run is worth more
            self._run = None
            _warn(self._name, error)

    def _keep(self) -> None:
        if self._run is not None:
            write_json_atomic(self._path, self._kept)


@contextlib.contextmanager
def following(name: str, workdir: Path, settings: Mapping[str, Any], resumed: bool) -> Iterator[Tracker | None]:
    """The tracker `name` with a run of its own, or where this one is `resumed` with the run that it had; None for "".

    Raises ConfigError where it cannot start, unless the run is resumed: that goes on without, and says so.
    """
    if not name:
        yield None
        return
    path = workdir / TRACKER_FILE
    kept = _kept(path) if resumed else {}
    if kept.get("tracker") != name:
        kept = {"tracker": name, "run": uuid.uuid4().hex[:8], "step": 0}
    workdir.mkdir(parents=True, exist_ok=True)
    try:
        tracker = Tracker(name, _begin(name, workdir, settings, kept["run"]), path, kept)
    except Exception as error:
        if not resumed:
            raise ConfigError(f"logging.tracker: {name} does not start: {_line(error)}; {HINTS[name]}") from error
        _warn(name, error)
        yield None
        return
    try:
        yield tracker
    except BaseException:
        tracker.close(failed=True)
        raise
    tracker.close(failed=False)


def _begin(name: str, workdir: Path, settings: Mapping[str, Any], run: str) -> Any:
    package: Any = importlib.import_module(name)
    title = workdir.absolute().name
    if name == "trackio":  # knows a run by its name
        return package.init(project=PROJECT, name=f"{title}-{run}", config=dict(settings), resume="allow")
    # Its other settings stand in its environment variables. What is printed is not sent: the live panel is no log.
    return package.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT), name=os.environ.get("WANDB_NAME", title), id=run,
        dir=str(workdir), config=dict(settings), allow_val_change=True, resume="allow",
        settings=package.Settings(console="off"),
    )  # fmt: skip


def _kept(path: Path) -> dict[str, Any]:
    """What the file holds; nothing where it is not one of ours."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    known = isinstance(kept, dict) and isinstance(kept.get("run"), str) and type(kept.get("step")) is int
    return kept if known else {}


def _warn(name: str, error: Exception) -> None:
    print(f"warning: logging.tracker: {name} failed, and the run goes on without it: {_line(error)}", file=sys.stderr)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

"""Where a run was started and with which versions, kept in its work folder for whoever looks at it later.

Every start is one entry: a run that was continued elsewhere has several. Nothing of a run depends on what stands here.
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import envace_jax
from envace_jax import hosts
from envace_jax.metrics import write_json_atomic

ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "libtpu")
MOST_STARTS = 40  # a run that is interrupted often keeps its first starts and its last ones, half of these each


def record(workdir: Path, step: int) -> None:
    """Adds this start, which begins after `step`, to the work folder's file; for one process of a run to call.

    A file that holds no list of starts is begun anew: it is for information, and no reason to refuse a run.
    """
    starts = [*_known(workdir / ENVIRONMENT_FILE), describe(step)]
    half = MOST_STARTS // 2
    kept = starts if len(starts) <= MOST_STARTS else starts[:half] + starts[-half:]
    write_json_atomic(workdir / ENVIRONMENT_FILE, kept)


def describe(step: int) -> dict[str, Any]:
    """This start as JSON values: time (UTC), step, command, versions, and the devices of all processes."""
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "command": shlex.join(sys.orig_argv),
        "versions": {"python": platform.python_version(), "envace_jax": envace_jax.__version__, **_packages()},
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "devices": {kind: sum(device.device_kind == kind for device in devices) for kind in kinds},
        "processes": hosts.count(),
    }


def _packages() -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _known(path: Path) -> list[Any]:
    try:
        starts = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return starts if isinstance(starts, list) else []

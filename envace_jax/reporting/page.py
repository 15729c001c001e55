"""The report as one HTML page that fetches nothing: its parts, and the runs' data, compressed, put into the shell.

Data stand in the page as base64 of gzip of JSON, so no text of a run can become markup. What trajectories may take is
what the rest leaves of `MOST_BYTES`.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import envace_jax
from envace_jax import config as configuration
from envace_jax.config import RunConfig
from envace_jax.metrics import json_line
from envace_jax.reporting.panels import PANELS
from envace_jax.reporting.read import Run, read_runs
from envace_jax.reporting.trajectories import viewer_data
from envace_jax.types import Json

MOST_BYTES = 5_000_000  # of a page, and about that of what a live page asks for; trajectories get what is left of it
LEAST_FOR_TRAJECTORIES = 1_500_000  # of these; runs' curves are thinned until so much is left
MOST_STEPS = (5000, 2000, 1000, 500, 250, 120, 60)  # drawn of each run: the first number that leaves that much
FOLDER = Path(__file__).resolve().parent
STYLES = ("report.css", "viewer.css")
VIEWER_SCRIPTS = ("viewer_text.js", "viewer_trajectory.js", "viewer.js")
SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", *VIEWER_SCRIPTS, "charts.js", "tables.js", "report.js")


@dataclasses.dataclass(frozen=True)
class Report:
    """What a page shows, as JSON values; `viewer` is what `EnvaceViewer.start` takes."""

    data: dict[str, Json]
    viewer: dict[str, Json]


def build(workdirs: Sequence[Path], live: bool = False) -> Report:
    """Reads the runs in the folders. `live`: the page will ask its server for what is new.

    Raises UserError where a folder is no run's.
    """
    runs = read_runs(workdirs)
    rest = len(html(Report({}, {}), live).encode())
    for most in MOST_STEPS:
        data = _data(runs, live, most)
        left = MOST_BYTES - rest - len(pack(data))
        if left >= LEAST_FOR_TRAJECTORIES:
            break
    return Report(data, _viewer(workdirs, runs, max(left, 0)))


def html(report: Report, live: bool = False) -> str:
    """The page of a report, whole."""
    parts = {
        "styles": "\n".join(f"<style>\n{_asset(name)}</style>" for name in STYLES),
        "scripts": "\n".join(f"<script>\n{_asset(name)}</script>" for name in SCRIPTS),
        "data": "\n".join(
            f'<script type="application/octet-stream+gzip" id="{name}">{pack(value)}</script>'
            for name, value in (("report-data", report.data), ("viewer-data", report.viewer))
        ),
        "connect": "'self'" if live else "'none'",
        "licences": _asset("vendor/LICENSES.txt").replace("&", "&amp;").replace("<", "&lt;"),
    }
    return re.sub(r"(?:<!--|%)@(\w+)(?:-->|%)", lambda place: parts[place[1]], _asset("page.html"))


def to_json(value: Json) -> str:
    """Strict JSON in ASCII, since a text may hold half of a surrogate pair; NaN and infinity become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json_line(value)), separators=(",", ":"))


def pack(value: Json) -> str:
    """Base64 of gzip of the value's JSON, the same for equal values."""
    return base64.b64encode(gzip.compress(to_json(value).encode("ascii"), 6, mtime=0)).decode("ascii")


def unpack(text: str) -> Json:
    """The value that `pack` packed."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def _data(runs: Sequence[Run], live: bool, most_steps: int) -> dict[str, Json]:
    return {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": envace_jax.__version__,
        "live": live,
        "panels": [dataclasses.asdict(panel) for panel in PANELS],
        "defaults": configuration.to_json(RunConfig()),
        "runs": [_thinned(run, most_steps) for run in runs],
    }


def _thinned(run: Run, most_steps: int) -> dict[str, Json]:
    """A run with every so-manieth step, so that at most `most_steps` remain; those with evaluations stay besides."""
    every = -(-len(run.steps) // most_steps) or 1
    rare = [values for name, values in run.metrics.items() if name.startswith("eval_")]
    kept = [
        place
        for place in range(len(run.steps))
        if place % every == 0 or place == len(run.steps) - 1 or any(values[place] is not None for values in rare)
    ]
    shown = dataclasses.asdict(run) | {
        "steps": [run.steps[place] for place in kept],
        "metrics": {name: [_short(values[place]) for place in kept] for name, values in run.metrics.items()},
    }
    if every > 1:
        shown["notes"] = [*run.notes, f"of {len(run.steps)} steps every {every}th is drawn"]
    return shown


def _short(value: float | None) -> float | None:
    """The number to seven digits, which no eye tells from it."""
    if value is None:
        return None
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def _viewer(workdirs: Sequence[Path], runs: Sequence[Run], most: int) -> dict[str, Json]:
    """What the viewer of trajectories shows, at most `most` bytes packed."""
    share = most // max(len(runs), 1)
    pairs = zip(runs, workdirs, strict=True)
    return {"runs": [{"name": run.name, "data": viewer_data(workdir, share)} for run, workdir in pairs]}


def _asset(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")

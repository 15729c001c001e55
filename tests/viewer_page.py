"""A page with nothing but the viewer of trajectories, and what a person does on it, for tests."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import viewer_records as made
from browser import KEYS, Browser

from envace_jax.reporting import compact, trajectories
from envace_jax.reporting.trajectories import viewer_data

FOLDER = Path(trajectories.__file__).parent
SCRIPTS = ("viewer_text.js", "viewer_trajectory.js", "viewer.js")
LARGE = 10_000_000  # bytes: everything fits
KEYS.update({"j": 74, "k": 75, "s": 83, "g": 71, "]": 221, ".": 190, "/": 191, "ArrowDown": 40, "End": 35})
RUN = made.run_of(4, 3)  # the first run of the page that most tests look at


def data_of(folder: Path, records: Sequence[Mapping[str, Any]], most: int = LARGE) -> dict[str, Any]:
    return viewer_data(made.write(folder, records), most)


PAGE = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>page</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
 script-src 'unsafe-inline'; img-src data:">
<style>:root { color-scheme: light dark;
  --bg: light-dark(#f6f6f4, #14151a); --panel: light-dark(#ffffff, #1d1f26); --text: light-dark(#1c1d21, #e8e9ee);
  --muted: light-dark(#585b65, #a9adba); --line: light-dark(#d7d8dc, #363a45); --accent: light-dark(#2f4ad0, #9db1ff);
  --act: light-dark(#1f55b5, #8fb8ff); --rehearse: light-dark(#8f4a00, #ffb866); --good: light-dark(#16703a, #7fd8a0);
  --bad: light-dark(#a91b1b, #ff9b9b); --warn: light-dark(#805600, #f0c060); }
body { margin: 0; padding: 1rem; background: var(--bg); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
%s</style></head><body><main><h1>Report</h1><section id="viewer" aria-label="Trajectories"><h2>Trajectories</h2>
<div id="root"></div></section></main>
<script type="application/octet-stream+gzip" id="data">%s</script>%s
<script>"use strict";
(async () => {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), one => one.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  window.given = await new Response(unpacked).json();
  const begun = performance.now();
  EnvaceViewer.start(document.getElementById("root"), given);
  document.body.offsetHeight;
  window.took = performance.now() - begun;
})();
</script></body></html>"""


def page_of(folder: Path, **runs: Mapping[str, Any]) -> Path:
    """A page with nothing but the viewer, put together as the report is."""
    given = json.dumps({"runs": [{"name": name, "data": data} for name, data in runs.items()]})
    packed = base64.b64encode(gzip.compress(given.encode())).decode()
    scripts = "".join(f"<script>{(FOLDER / name).read_text()}</script>" for name in SCRIPTS)
    file = folder / "page.html"
    file.write_text(PAGE % ((FOLDER / "viewer.css").read_text(), packed, scripts))
    return file


def opened(browser: Browser, file: Path, **size: int) -> Browser:
    browser.events.clear()
    browser.dark(False)
    browser.open(file.as_uri(), **size)
    browser.wait_for("window.took !== undefined")
    return browser


def text_of(page: Browser, selector: str) -> list[str]:
    return page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(found => found.innerText)")


def choose(page: Browser, name: str, value: object) -> None:
    """As a person does: the option, and the event that follows."""
    page.js(
        f"(field => {{ field.value = {json.dumps(str(value))}; field.dispatchEvent(new Event('change')); }})"
        f"(document.getElementById('tv-{name}'))"
    )


def options(page: Browser, name: str) -> list[str]:
    return text_of(page, f"#tv-{name} option")


def go_to(page: Browser, record: Mapping[str, Any]) -> None:
    """Shows that record of the first run, by the selects."""
    choose(page, "step", record["step"])
    task = options(page, "task").index(record["task_id"])
    choose(page, "task", page.js(f"document.getElementById('tv-task').options[{task}].value"))
    choose(page, "attempt", page.js(f"document.getElementById('tv-attempt').options[{record['attempt']}].value"))


def record_where(condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    return next(record for record in RUN if condition(record))


def differing(record: Mapping[str, Any]) -> int:
    return compact.compact(record, compact.Tables()).row["differing"]


def title(page: Browser) -> str:
    return text_of(page, ".tv-title")[0]


def listed(page: Browser) -> list[str]:
    return text_of(page, ".tv-row")


def two_runs(folder: Path) -> Path:
    """The page that most tests look at: `RUN`, and a run of an earlier version."""
    older = data_of(folder / "older", [made.old(record) for record in made.run_of(2, 1)])
    return page_of(folder, first=data_of(folder / "run", RUN), older=older)

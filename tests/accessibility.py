"""What axe-core finds wrong in a page that is open in a `browser.Browser`. `AXE` is None where axe-core is not there.

Its one file comes with the package axe-playwright-python, of which nothing else is used (`pip install --no-deps`), or
lies where ENVACE_AXE says.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from browser import Browser


def _found() -> Path | None:
    spec = importlib.util.find_spec("axe_playwright_python")
    places = [Path(os.environ.get("ENVACE_AXE", ""))]
    places += [Path(folder) / "axe.min.js" for folder in (spec.submodule_search_locations or () if spec else ())]
    return next((place for place in places if place.is_file()), None)


AXE = _found()


def serious_faults(page: Browser, within: str = "html") -> list[str]:
    """A line for each serious or critical fault: rule, what it says, and the first elements."""
    assert AXE is not None
    page.js(AXE.read_text() + "; 0")
    return page.js(
        f"axe.run({within!r}, {{resultTypes: ['violations']}}).then(found => found.violations"
        ".filter(fault => ['serious', 'critical'].includes(fault.impact))"
        ".map(fault => `${fault.id}: ${fault.help}: ${fault.nodes.slice(0, 3).map(node => node.html.slice(0, 160) +"
        " ' ' + node.failureSummary).join(' | ')}`))"
    )

"""The report's page in headless Chromium: every chart drawn, usable by hand, eye and ear, and live.

What needs a browser is left out where there is none (Debian: apt-get install chromium), and what needs axe-core too
(`accessibility.py`).
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
from accessibility import AXE, serious_faults
from browser import CHROMIUM, Browser
from report_helpers import write_lines, write_run
from test_page import CONTRASTS
from test_report import EVIL

from envace_jax.reporting import live, page, panels

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
ALL = [panel.id for panel in panels.PANELS] + ["other"]
DRAWN = "[...document.querySelectorAll('.plot svg[role=img]')].map(found => found.closest('figure').dataset.panel)"
LINES = "[...document.querySelectorAll('figure[data-panel={}] .plot svg g[stroke-width=\"2\"]')]"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Three runs: two that evaluate and differ in a setting, and a shorter one that does not."""
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / "first", steps=24, every=6),
        write_run(root / "second", steps=24, seed=1, every=6, grpo__baseline="leave_one_out"),
        write_run(root / "third", steps=9, seed=2, every=0),
    ]


def opened(browser: Browser, folders: list[Path], out: Path, **size: int) -> Browser:
    """The report of these folders, from the disk."""
    out.write_text(page.html(page.build(folders)))
    browser.events.clear()
    browser.dark(False)
    browser.open(out.as_uri(), **size)
    browser.wait_for("document.documentElement.dataset.ready === 'true'")
    return browser


def text(browser: Browser, selector: str) -> str:
    return browser.js(f"document.querySelector({json.dumps(selector)}).innerText")


def count(browser: Browser, panel: str) -> int:
    """Lines on a chart."""
    return browser.js(LINES.format(panel) + ".length")


def choose(browser: Browser, element: str, value: str) -> None:
    browser.js(f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})({element})")


def test_every_chart_of_a_run_is_drawn_and_named(browser, folders, tmp_path):
    got = opened(browser, folders[:1], tmp_path / "report.html")
    assert got.js(DRAWN) == ALL
    assert got.complaints() == [] and got.requests() == [(tmp_path / "report.html").as_uri()]
    label = got.js("document.querySelector('figure[data-panel=reward] svg[role=img]').getAttribute('aria-label')")
    assert re.match(
        r"Reward in training, share over step\. mean reward: from 0\.\d+ at step 1 to 0\.\d+ at step 24, ", label
    )
    assert got.js("document.querySelectorAll('figure:not([aria-labelledby])').length") == 0
    assert text(got, "figure[data-panel=reward] .legend").split() == ["mean", "reward", "solved"]
    assert "24 of 24, finished" in text(got, ".tile") and "first" in got.js("document.title")
    # Told apart without colour: two lines, one of them dashed.
    assert got.js(LINES.format("reward") + ".map(line => line.getAttribute('stroke-dasharray'))") == [None, "7 3"]


def test_runs_lie_over_each_other_and_can_be_hidden(browser, folders, tmp_path):
    got = opened(browser, folders, tmp_path / "report.html")
    assert got.js(DRAWN) == ALL and got.complaints() == []
    assert count(got, "reward") == 6 and count(got, "success") == 4
    assert text(got, "figure[data-panel=reward] .legend").split("\n") == [
        "mean reward",
        "solved",
        "first",
        "second",
        "third",
    ]
    shapes = "[...document.querySelectorAll('#shown .swatch path')].map(found => found.getAttribute('d'))"
    assert len(set(got.js(shapes))) == 3
    colour = LINES.format("speed") + ".map(line => line.getAttribute('stroke'))"
    before = got.js(colour)
    got.js("document.querySelector('#shown input').focus()")
    got.key(" ")
    assert count(got, "reward") == 4 and got.js(colour) == before[1:]  # the others keep theirs
    got.key(" ")
    assert count(got, "reward") == 6 and got.js(colour) == before


def test_axis_smoothing_and_the_chosen_metric(browser, folders, tmp_path):
    got = opened(browser, folders[:1], tmp_path / "report.html")
    lines = "[...document.querySelectorAll('figure[data-panel={}] .plot path')].map(p => p.getAttribute('d')).join()"
    drawn = [got.js(lines.format("reward"))]
    for control, value, label in (("axis", "hours", "hours of steps"), ("axis", "tokens", "sampled tokens"),
                                  ("smooth", "5", "sampled tokens")):  # fmt: skip
        choose(got, f"document.getElementById('{control}')", value)
        drawn.append(got.js(lines.format("reward")))
        assert label in text(got, "figure[data-panel=reward] .plot")
    assert len(set(drawn)) == 3 + 1 or len(set(drawn)) == 3  # tokens grow evenly here, as steps do
    assert drawn[3] != drawn[2] and count(got, "reward") == 2
    other = "document.querySelector('figure[data-panel=other] select')"
    assert got.js(f"{other}.value") == "grad_norm"
    before = got.js(lines.format("other"))
    choose(got, other, "other_7")
    assert got.js(lines.format("other")) != before
    assert not set(got.js(f"[...{other}.options].map(o => o.value)")) & {"reward", "ended_done", "judge_fault_timeout"}


def test_the_smoothed_line_is_the_mean_of_the_last_points(browser, tmp_path):
    got = opened(browser, [write_run(tmp_path / "run", steps=1)], tmp_path / "report.html")
    run = {"name": "a", "steps": [1, 2, 3, 4, 5, 6, 7], "metrics": {"reward": [0, 1, 0.5, 0.5, 1, 0, 1]}}
    panel = {"metrics": [["reward", "mean reward"]]}
    series = f"EnvaceCharts.seriesOf({json.dumps(panel)}, [{json.dumps(run)}], [true], 'step', 5)[0]"
    assert got.js(f"{series}.line.map(point => point.y)") == pytest.approx([0, 0.5, 0.5, 0.5, 0.6, 0.6, 0.6])
    assert got.js(f"{series}.points.map(point => point.y)") == run["metrics"]["reward"]


def test_a_reason_that_ended_no_trajectory_of_a_step_counts_zero_there(browser, tmp_path):
    folder = write_run(tmp_path / "run", steps=1)
    lines = [{"step": 0, "eval_fidelity": 0.5}, *({"step": step, "reward": 0.5, "ended_done": 4} for step in (1, 2, 3))]
    write_lines(folder / "metrics.jsonl", [*lines, {"step": 4, "reward": 0.5, "ended_done": 3, "ended_fault": 1}])
    got = opened(browser, [folder], tmp_path / "report.html")
    label = got.js("document.querySelector('figure[data-panel=ended] svg[role=img]').getAttribute('aria-label')")
    assert label.endswith("fault: from 0 at step 1 to 1 at step 4, between 0 and 1.")


def test_a_charts_numbers_are_a_table_that_the_keyboard_opens(browser, folders, tmp_path):
    got = opened(browser, folders[:2], tmp_path / "report.html")
    summary = "figure[data-panel=success] details summary"
    assert got.js("document.querySelectorAll('figure table').length") == 0
    got.js(f"document.querySelector('{summary}').focus()")
    got.key("Enter")
    got.wait_for("document.querySelectorAll('figure[data-panel=success] table').length")
    rows = text(got, "figure[data-panel=success] table").split("\n")
    assert rows[0].split("\t") == ["step", "first: sampled", "first: greedy", "second: sampled", "second: greedy"]
    assert rows[1].split("\t") == ["0", "0.4", "0.5", "0.4", "0.5"] and [row.split("\t")[0] for row in rows[1:]] == [
        "0", "6", "12", "18", "24"
    ]  # fmt: skip


def test_settings_environments_and_summaries_are_compared(browser, folders, tmp_path):
    got = opened(browser, folders, tmp_path / "report.html")
    table = "#setting-table"
    rows = [row.split("\t") for row in text(got, table).split("\n")]
    assert rows[0] == ["setting", "first", "second", "third", "default"]
    assert [row[0].rstrip(" ≠") for row in rows[1:]] == ["seed", "steps", "grpo.baseline"]
    assert rows[3][1:] == ["segment_mean", "leave_one_out", "segment_mean", "segment_mean"]
    choose(got, "document.getElementById('which')", "changed")
    assert "optimizer.learning_rate\t0.0003\t0.0003\t0.0003\t0.000001" in text(got, table)
    choose(got, "document.getElementById('which')", "all")
    got.js("document.getElementById('setting-filter').focus()")
    got.write("CLIP_")
    assert got.wait_for("document.getElementById('setting-count').textContent") == "3 settings"
    assert [row.split("\t")[0] for row in text(got, table).split("\n")[1:]] == [
        "grpo.clip_low", "grpo.clip_high", "optimizer.clip_norm"
    ]  # fmt: skip
    assert "versions.jax" in text(got, "#environment-table") and "0.10.2" in text(got, "#environment-table")
    assert "real_success_after\t0.7\t0.7\t0.7" in text(got, "#summary-table")


def test_text_has_contrast_in_light_and_dark(browser, folders, tmp_path):
    got = opened(browser, folders[:2], tmp_path / "report.html")
    papers = []
    for dark, theme in ((False, ""), (True, ""), (True, "light"), (False, "dark")):
        got.dark(dark)
        got.js(f"document.querySelector('input[name=theme][value=\"{theme}\"]').click()")
        paper = got.js("getComputedStyle(document.body).backgroundColor")
        papers.append(sum(map(int, re.findall(r"\d+", paper))) < 200)
        if not theme:
            assert got.js(CONTRASTS) == []
    assert papers == [False, True, False, True]


def test_nothing_is_wider_than_the_screen(browser, folders, tmp_path):
    got = opened(browser, folders, tmp_path / "report.html")
    got.js("document.querySelector('figure[data-panel=ended] details').open = true")
    for width in (320, 390, 700, 1200):
        got.resize(width, 800)
        drawn = "(svg => Math.abs(svg.getAttribute('width') - svg.parentNode.clientWidth) <= 1)"  # anew, for that width
        got.wait_for(f"[...document.querySelectorAll('.plot svg')].every({drawn})")
        assert got.js("document.documentElement.scrollWidth") <= width
        assert got.js("[...document.querySelectorAll('figure')].every(one => one.scrollWidth <= one.clientWidth)")


@pytest.mark.skipif(AXE is None, reason="no axe-core is installed")
@pytest.mark.parametrize(("runs", "width", "dark"), [(1, 1200, True), (2, 390, False)], ids=["dark", "phone"])
def test_axe_finds_no_serious_fault(browser, folders, tmp_path, runs, width, dark):
    got = opened(browser, folders[:runs], tmp_path / "report.html", width=width, height=900)
    got.dark(dark)
    got.js("document.querySelector('figure details').open = true")
    assert serious_faults(got) == []


# --- whatever stands in a folder ---


def test_text_never_becomes_markup(browser, tmp_path):
    folder = write_run(tmp_path / "<b>run" / "</script><i>x", steps=3)
    settings = json.loads((folder / "config.json").read_text())
    settings["data"]["source"] = settings[EVIL] = EVIL
    (folder / "config.json").write_text(json.dumps(settings))
    start = {"time": EVIL, EVIL: EVIL, "versions": [EVIL]}
    (folder / "environment.json").write_text(json.dumps([start]))
    (folder / "summary.json").write_text(json.dumps({EVIL: EVIL, "seed": {EVIL: 1}}))
    lines = [{"step": step, EVIL: step, f"ended_{EVIL}": step} for step in (1, 2, 3)]
    write_lines(folder / "metrics.jsonl", [*lines, EVIL, {"step": 4}])
    got = opened(browser, [folder, write_run(tmp_path / "other", steps=2)], tmp_path / "report.html")
    assert got.js("document.querySelectorAll('img, b, i').length") == 0 and "owned" not in got.js("document.title")
    for place in ("#setting-table", "#environment-table", "#summary-table", ".tile", "figure[data-panel=ended]"):
        assert "</script>" in got.js(f"document.querySelector('{place}').textContent")
    assert got.complaints() == []


def test_names_that_every_object_inherits_are_names_like_others(browser, tmp_path):
    """A run lacks them, and another has them."""
    folder = write_run(tmp_path / "run", steps=3)
    inherited = ("constructor", "__proto__", "toString", "ended___proto__")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "reward": 0.5, **dict.fromkeys(inherited, 2)}) + "\n")
    (folder / "summary.json").write_text('{"constructor": 7}')
    got = opened(browser, [folder, write_run(tmp_path / "other", steps=2)], tmp_path / "report.html")
    other = "document.querySelector('figure[data-panel=other] select')"
    for name in inherited[:3]:
        choose(got, other, name)
        assert got.js(f"{other}.value") == name
    assert [cell for cell in text(got, "#summary-table tr:has(th[scope=row])").split()] == ["constructor", "7", "–"]
    assert got.complaints() == []


def cut_off(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-25])
    (folder / "summary.json").unlink()


def just_begun(folder: Path) -> None:
    for name in ("metrics.jsonl", "summary.json", "environment.json"):
        (folder / name).unlink()


def other_version(folder: Path) -> None:
    lines = [{"step": step, "score": 0.5, "nested": {"a": [1]}, "reward": "high"} for step in range(1, 5)]
    write_lines(folder / "metrics.jsonl", lines)
    settings = json.loads((folder / "config.json").read_text())
    del settings["grpo"]
    settings["data"]["shuffle"] = {"kind": ["a", None]}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "environment.json").write_text('[{"jax": "0.1", "devices": 4}]')
    (folder / "summary.json").write_text('{"success": [1, null]}')


def one_step(folder: Path) -> None:
    write_lines(folder / "metrics.jsonl", [{"step": 1, "reward": 0.5, "logprob_diff": 0.0, "tokens_act": 0}])


@pytest.mark.parametrize(
    ("change", "drawn"),
    [(cut_off, ALL), (just_begun, []), (other_version, ["other"]), (one_step, ["reward", "tokens", "logprobs"])],
    ids=["killed while it wrote", "just begun", "of another version", "one step"],
)
def test_a_folder_in_any_state_is_shown(browser, tmp_path, change, drawn):
    folder = write_run(tmp_path / "run", steps=6)
    change(folder)
    got = opened(browser, [folder], tmp_path / "report.html")
    assert got.js(DRAWN) == drawn and got.complaints() == []
    assert got.js("document.getElementById('problem').hidden")
    assert ("Not recorded." in text(got, "#charts")) == (drawn != ALL)


def test_a_page_that_was_damaged_says_so(browser, folders, tmp_path):
    whole = page.html(page.build(folders[:1]))
    (tmp_path / "report.html").write_text(whole.replace('id="report-data">', 'id="report-data">AAAA'))
    browser.open((tmp_path / "report.html").as_uri())
    browser.wait_for("!document.getElementById('problem').hidden")
    assert text(browser, "#problem").startswith("The report cannot be shown: ")


# --- live ---


def test_a_live_page_follows_and_leaves_the_reader_where_he_is(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "REST", 0.0)
    folder = write_run(tmp_path / "run", steps=20)
    with live.Server([folder], 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        browser.events.clear()
        browser.open(server.address)
        browser.wait_for("document.getElementById('live').textContent === 'live'")
        browser.js("document.querySelector('figure[data-panel=tokens] details').open = true")
        choose(browser, "document.getElementById('smooth')", "5")
        choose(browser, "document.querySelector('figure[data-panel=other] select')", "other_3")
        browser.js("document.getElementById('setting-filter').value = 'seed'")
        browser.js("document.querySelector('figure[data-panel=tokens]').scrollIntoView()")
        browser.js("document.querySelector('figure[data-panel=tokens] summary').focus()")
        place = browser.js("scrollY")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 21, "tokens_act": 4321, "tokens_rehearse": 1234, "other_3": 1}\n')
        browser.wait_for("document.querySelector('figure[data-panel=tokens] table')?.innerText.includes('4,321')")
        assert browser.js("scrollY") == place > 500
        assert browser.js("document.activeElement.closest('figure').dataset.panel") == "tokens"
        assert browser.js("document.querySelector('figure[data-panel=other] select').value") == "other_3"
        assert browser.js("document.getElementById('smooth').value") == "5" and "1 settings" not in browser.js(
            "document.title"
        )
        assert all(address.startswith(server.address) for address in browser.requests()) and browser.complaints() == []
        server.shutdown()
    browser.wait_for("document.getElementById('live').textContent.includes('the server does not answer')")
    assert browser.js(DRAWN) == ALL

"""The trajectory viewer in headless Chromium, where it is hard: texts that are traps, 2,000 trajectories, a phone.

Also what axe-core finds in it (`accessibility.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import viewer_records as made
from accessibility import AXE, serious_faults
from browser import CHROMIUM
from viewer_page import LARGE, choose, data_of, differing, go_to, listed, opened, page_of, record_where, two_runs

from envace_jax.reporting.trajectories import packed_size, viewer_data

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return two_runs(tmp_path_factory.mktemp("viewer"))


def test_texts_stay_texts(browser, tmp_path):
    """Markup, the end of a script, controls, marks of direction, numbers that a browser rounds, and 100 kB."""
    record = made.attempt_of(1, 1, 0)
    long = "word \u0001" * 16_000 + "the very end"
    big = '{"id": 12345678901234567891, "exact": 1.50, "evil": ' + json.dumps(made.EVIL) + "}"
    record.update(task_id=made.EVIL, reason=f"fault: {made.EVIL}")
    record["messages"][1]["content"] = made.EVIL
    record["messages"][2]["tool_calls"][0]["function"] = {
        "name": made.EVIL,
        "arguments": {made.EVIL: [made.EVIL, {"x": 9007199254740993}]},
    }
    record["messages"][3].update(name=made.EVIL, content=big)
    record["messages"][4]["content"] = long
    record["turns"][0]["words"] = [made.EVIL, "\ud800 half"]
    record["task"]["checklist"][0][0]["question"] = made.EVIL
    record["segments"][0]["pieces"] = ["</script>", "\u202e", "<b>", "\x00\x1b", "\ufffd"]
    record["segments"][0]["logprobs"] = [-0.1, -1.0, -2.0, -4.0, -0.5]
    page = opened(browser, page_of(tmp_path, **{made.EVIL: data_of(tmp_path / "run", [record])}))
    shown = page.js("document.getElementById('root').textContent")
    assert page.js("document.title") == "page" and page.complaints() == []
    assert page.js("document.querySelectorAll('#root :is(img, script, b)').length") == 0
    start = (
        "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> U+202Ereversed"
    )
    assert shown.count(start) >= 4
    unseen = re.compile("[\x00-\x08\x0b-\x1f\u202a-\u202e\u200e\u200f\ufeff\u2028]")
    assert unseen.findall(page.js("document.getElementById('root').innerText")) == []
    for name in ("U+202E", "U+202C", "U+200F U+0000 U+0007 U+001B", "U+2028", "U+FEFF"):
        assert name in shown, name
    assert '"id": 12345678901234567891' in shown and '"exact": 1.50' in shown and '"x": 9007199254740993' in shown
    assert all(
        page.js(
            "[...document.querySelectorAll('.tv-text')].map(one => getComputedStyle(one).unicodeBidi === 'plaintext')"
        )
    )
    # The long text comes whole, though not at once.
    assert "the very end" not in shown
    page.click(".tv-act > .tv-text > .tv-more")
    assert page.js("document.getElementById('root').textContent").replace("U+0001", "\u0001").count(long) == 1
    page.click("#tv-shade-logprob")
    assert (
        page.js("document.querySelector('.tv-act > .tv-tokens').textContent") == "</script>U+202E<b>U+0000 U+001B\ufffd"
    )


def test_one_record_of_another_shape_keeps_no_other_from_being_shown(browser, tmp_path):
    first, second, third = made.run_of(1, 1)[:3]
    first["messages"][1]["content"] = [{"type": "text", "text": "in parts"}]
    second["turns"] = [{"reward": 1.0, "verdicts": None}]
    page = opened(browser, page_of(tmp_path, run=data_of(tmp_path / "run", [first, second, third])))
    assert '"in parts"' in page.js("document.querySelector('.tv-detail').innerText")
    page.click("[aria-label='next attempt']")
    assert "This trajectory cannot be shown" in page.js("document.querySelector('.tv-detail').innerText")
    page.click("[aria-label='next attempt']")
    assert "attempt 2" in page.js("document.querySelector('.tv-title').innerText")


def test_no_trajectories_and_other_versions_are_said(browser, tmp_path):
    page = opened(browser, page_of(tmp_path, none=viewer_data(tmp_path / "empty", LARGE)))
    assert "This run has no trajectories" in page.js("document.getElementById('root').innerText")
    data = data_of(tmp_path / "run", made.run_of(1, 1)) | {"format": 99}
    page = opened(browser, page_of(tmp_path, newer=data))
    assert "of another version" in page.js("document.getElementById('root').innerText")
    left = data_of(tmp_path / "more", made.run_of(20, 2), 20_000)
    page = opened(browser, page_of(tmp_path, some=left))
    assert left["left_out"]["text"] in page.js("document.getElementById('root').innerText")
    assert page.complaints() == []


ROWS = "document.querySelectorAll('.tv-row').length"
SCROLL = """(async () => {
  const list = document.querySelector('.tv-list');
  let worst = 0;
  for (let place = 0; place < 2000 * 52; place += 2600) {
    const begun = performance.now();
    list.scrollTop = place;
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    worst = Math.max(worst, performance.now() - begun);
  }
  return worst;
})()"""
NEXT = """(() => {
  const list = document.querySelector('.tv-list'), begun = performance.now();
  for (let i = 0; i < 20; i++) list.dispatchEvent(new KeyboardEvent('keydown', {key: 'k', bubbles: true}));
  document.body.offsetHeight;
  return (performance.now() - begun) / 20;
})()"""
SEARCH = """(async () => {
  const field = document.getElementById('tv-search'), begun = performance.now();
  field.value = 'two sofas';
  field.dispatchEvent(new Event('input'));
  const status = document.querySelector('.tv-status');
  while (!/of 2,000/.test(status.innerText)) await new Promise(done => setTimeout(done, 5));
  return performance.now() - begun;
})()"""


def test_of_two_thousand_trajectories_few_are_in_the_page(browser, tmp_path, record_property):
    """Wherever the list is, so that it stays smooth. How long each took is printed, and a property of the result."""
    data = data_of(tmp_path / "run", made.run_of(50, 10))
    assert len(data["bodies"]) == 2000 and packed_size(data) < 3_000_000
    page = opened(browser, page_of(tmp_path, run=data))
    times = {"start": page.js("window.took")}
    assert page.js(ROWS) < 60
    times["scroll"] = page.js(SCROLL)
    assert 10 < page.js(ROWS) < 60
    assert "step 50" in listed(page)[-1] or "step 49" in listed(page)[-1]
    times["next"] = page.js(NEXT)
    begun = "(() => { const begun = performance.now();"
    times["filter"] = page.js(
        f"{begun} const field = document.getElementById('tv-shown'); field.value = 'unequal';"
        "field.dispatchEvent(new Event('change')); document.body.offsetHeight; return performance.now() - begun; })()"
    )
    assert 0 < page.js(ROWS) < 60
    choose(page, "shown", "all")
    times["search"] = page.js(SEARCH)
    assert page.js(ROWS) < 60
    for name, value in times.items():
        record_property(name, round(value, 1))
    print({name: f"{value:.0f} ms" for name, value in times.items()}, f"{packed_size(data):,} bytes")


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_its_width(browser, file, width):
    page = opened(browser, file, width=width, height=844)
    go_to(page, record_where(lambda one: differing(one) == 2))
    for shade in ("logprob", "none"):
        page.click(f"#tv-shade-{shade}")
        assert page.js("document.documentElement.scrollWidth") <= width
        for selector in (".tv-part", ".tv-field", ".tv-list"):
            right = "one => one.getBoundingClientRect().right"
            assert page.js(f"Math.max(...[...document.querySelectorAll('{selector}')].map({right}))") <= width
    page.click(".tv-together")
    assert page.js("document.documentElement.scrollWidth") <= width


@pytest.mark.skipif(AXE is None, reason="no axe-core is installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light, wide", "dark, narrow"])
def test_axe_finds_no_serious_fault(browser, file, dark):
    page = opened(browser, file, width=390 if dark else 1280, height=844)
    page.dark(dark)
    go_to(page, record_where(lambda one: differing(one) == 2 and one["segments"][0]["advantage"] < -0.01))
    page.js("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert serious_faults(page) == []
    page.click("#tv-shade-logprob")
    assert serious_faults(page) == []
    page.click(".tv-together")
    page.click("#tv-shade-advantage")
    assert serious_faults(page) == []
    choose(page, "run", 1)
    assert serious_faults(page) == []

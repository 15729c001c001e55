"""The trajectory viewer in headless Chromium: what it shows, and how one gets about in it.

What needs a browser is left out where there is none (Debian: apt-get install chromium).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import viewer_records as made
from browser import CHROMIUM, Browser
from viewer_page import RUN, choose, differing, go_to, listed, opened, record_where, text_of, title, two_runs

from envace_jax.reporting import compact

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return two_runs(tmp_path_factory.mktemp("viewer"))


@pytest.fixture
def page(browser, file) -> Browser:
    return opened(browser, file)


def test_a_trajectory_is_shown_by_its_selects(page):
    record = record_where(lambda one: one["status"] == "ok" and not one["turns"][0]["verdicts"][1])
    go_to(page, record)
    assert title(page) == f"Step {record['step']} · {record['task_id']} · attempt {record['attempt']}"
    turn = ["USER", "ACT", "REHEARSE", "ACT", "CHECKLIST"]
    assert text_of(page, ".tv-steps > li > .tv-head > .tv-tag") == ["SYSTEM", *turn, *turn]
    said = record["task"]["user_turns"]
    assert [text for text in text_of(page, ".tv-given > .tv-text")] == said
    assert record["messages"][4]["content"] in text_of(page, ".tv-act")[1]
    # Two colours and two words; the mask as a word and a bar of its own.
    act, rehearse = (
        page.js(f"getComputedStyle(document.querySelector('.tv-{one}'), '::before').backgroundColor")
        for one in ("act", "rehearse")
    )
    assert act != rehearse
    trained = record["segments"][0]["trained"]
    assert set(text_of(page, ".tv-mask")) == {"trained" if trained else "not trained"}
    advantage = f"{record['segments'][0]['advantage']:+.3f}".replace("-", "−")
    assert f"advantage {advantage}" in text_of(page, ".tv-act")[0]
    # The checklist with verdicts and what the judge said.
    items = text_of(page, ".tv-judged li")
    assert items[0].startswith("✓ held Is the") and items[1].startswith("✗ not held Does the reply name the price")
    assert record["turns"][0]["words"][1] in items[1]
    assert page.complaints() == [] and [address for address in page.requests() if "page.html" not in address] == []


def test_recorded_results_stand_beside_rehearsed_ones_with_their_differences(page):
    record = record_where(lambda one: differing(one) == 2 and '"place"' in one["messages"][3]["content"])
    go_to(page, record)
    rehearsed, recorded = json.loads(record["messages"][3]["content"]), json.loads(record["task"]["reference"][0][1])
    wrong, right = str(rehearsed["price"]["amount"]), str(recorded["price"]["amount"])
    assert text_of(page, ".tv-rehearse:nth-of-type(4) ins")[0] == wrong
    assert text_of(page, ".tv-rehearse:nth-of-type(4) del")[0] == right
    # Within a text only the words that differ.
    changed = "five days" if "five days" in rehearsed["note"] else "one week"
    assert set(text_of(page, ".tv-rehearse:nth-of-type(4) ins")[1:]) <= {changed, *changed.split()}
    assert "price.amount, note." in text_of(page, ".tv-verdict")[0]
    # Members that only one of them has, by their path.
    assert text_of(page, ".tv-verdict")[1].endswith("order.state (only rehearsed), total, left (only recorded).")
    assert text_of(page, ".tv-side")[:2] == ["rehearsed", "recorded (real)"]


def test_json_folds(page):
    go_to(page, record_where(lambda one: True))
    fold = ".tv-rehearse .tv-json"
    assert page.js(f"document.querySelector('{fold}').open")
    before = text_of(page, fold)[0]
    assert '"stock"' in before
    page.click(f"{fold} > summary")
    page.wait_for(f"!document.querySelector('{fold}').open")
    assert '"stock"' not in text_of(page, fold)[0] and "4 members" in text_of(page, fold)[0]


def test_buttons_and_keys_move(page):
    go_to(page, made.run_of(1, 1)[0])
    first = title(page)
    page.click("[aria-label='next attempt']")
    assert title(page) == first.replace("attempt 0", "attempt 1")
    page.click("[aria-label='next task']")
    assert title(page) == "Step 1 · shop-0011 · attempt 0"
    page.click("[aria-label='next step']")
    assert title(page).startswith("Step 2 ·")
    page.click("[aria-label='previous step']")
    page.click("[aria-label='previous step']")  # there is none: it stays
    assert title(page).startswith("Step 1 ·")
    assert page.js("document.querySelector('[aria-label=\"previous step\"]').getAttribute('aria-disabled')") == "true"
    page.js("document.querySelector('.tv-list').focus()")
    page.key("j")
    assert title(page) == "Step 1 · shop-0010 · attempt 1"
    page.key(".")
    page.key("k")
    assert title(page) == "Step 1 · shop-0010 · attempt 1"
    page.key("ArrowDown")
    assert title(page) == "Step 1 · shop-0010 · attempt 2"
    active = page.js(
        "document.getElementById(document.querySelector('.tv-list').getAttribute('aria-activedescendant')).innerText"
    )
    assert "step 1, attempt 2" in active
    page.key("End")
    assert title(page) == "Step 4 · shop-0042 · attempt 3"
    page.key("/")
    assert page.js("document.activeElement.id") == "tv-search"
    page.key("k")  # in a field it is a letter
    assert title(page) == "Step 4 · shop-0042 · attempt 3"


def test_filters_and_orders(page):
    rows = [compact.compact(record, compact.Tables()).row for record in RUN]
    total = len(rows)
    assert text_of(page, ".tv-status") == [f"{total} trajectories"]

    def count_of(value: str) -> int:
        choose(page, "shown", value)
        return int(text_of(page, ".tv-status")[0].split()[0])

    failed = sum(row["failed"] for row in rows)
    assert count_of("failed") == failed > 0
    assert all("masked" in row and "failed" in row for row in listed(page))
    assert count_of("untrained") == sum(row["trained"] == "none" or row["failed"] for row in rows) > failed
    assert count_of("differing") == sum(row["differing"] > 0 for row in rows) > 0
    assert all("≠" in row for row in listed(page))
    unequal = 0
    for step in range(1, 5):
        for number in range(3):
            rewards = {one["reward"] for one in made.group_of(step, 16 * step + number)} - {None}
            unequal += 4 * (len(rewards) > 1)
    assert count_of("unequal") == unequal
    assert count_of("all") == total
    choose(page, "ended", "fault")
    assert text_of(page, ".tv-status") == [f"{failed} of {total} trajectories"]
    choose(page, "ended", "")
    rewards = sorted(row["reward"] for row in rows if row["reward"] is not None)
    choose(page, "order", "highest")
    assert f"{rewards[-1]:.2f}" in listed(page)[0]
    choose(page, "order", "lowest")
    assert f"{rewards[0]:.2f}" in listed(page)[0]
    choose(page, "order", "run")

    page.js("document.getElementById('tv-search').focus()")
    page.write("ORDER Two sofas")
    sofas = sum("order two sofas" in json.dumps(record).lower() for record in RUN)
    page.wait_for(f"document.querySelector('.tv-status').innerText === '{sofas} of {total} trajectories'", 10)
    page.write(" that nobody said")
    page.wait_for("document.querySelector('.tv-status').innerText.includes('none fits the filters')", 10)
    assert listed(page) == [] and title(page)  # what was shown stays


def test_tokens_are_shaded_by_logprob_or_advantage(page):
    record = record_where(lambda one: one["status"] == "ok" and one["segments"][0]["advantage"] < -0.01)
    go_to(page, record)
    assert text_of(page, ".tv-legend") == [] and text_of(page, ".tv-steps > li > .tv-tokens") == []
    page.click("#tv-shade-logprob")
    part = record["segments"][0]
    first = ".tv-act > .tv-tokens"
    assert page.js(f"document.querySelector('{first}').textContent") == "".join(part["pieces"])
    levels = page.js(f"[...document.querySelectorAll('{first}')][0].querySelectorAll('.tv-token').length")
    assert levels == len(part["pieces"])
    found = page.js(
        f"[...document.querySelector('{first}').children].map(one => Number(one.className.match(/level-(\\d)/)[1]))"
    )
    probabilities = [2.718281828 ** (round(100 * value) / 100) for value in part["logprobs"]]
    assert found == [sum(p < bound for bound in (0.9, 0.5, 0.2, 0.05)) for p in probabilities]
    assert page.js("document.activeElement.id") == "tv-shade-logprob"  # the focus stays
    least = min(part["logprobs"])
    assert f"{least:.2f}".replace("-", "−") in text_of(page, ".tv-act .tv-note")[0]
    background = f"getComputedStyle(document.querySelector('{first} .tv-token')).backgroundColor"
    page.click("#tv-shade-advantage")
    assert page.js(f"document.querySelector('{first}').classList.contains('tv-lost')")
    lost = page.js(background)
    go_to(page, record_where(lambda one: one["status"] == "ok" and one["segments"][0]["advantage"] > 0.01))
    assert page.js(f"document.querySelector('{first}').classList.contains('tv-gained')") and page.js(background) != lost
    go_to(page, record_where(lambda one: one["status"] == "failed"))
    assert not page.js(f"document.querySelector('{first}').matches('.tv-gained, .tv-lost')")
    assert set(text_of(page, ".tv-mask")) == {"not trained"}


def test_attempts_stand_side_by_side(page):
    def spread(record):
        return (
            record["attempt"] == 0
            and len({one["reward"] for one in made.group_of(record["step"], record["group_id"])} - {None}) > 1
        )

    record = record_where(spread)
    go_to(page, record)
    page.click(".tv-together")
    group = made.group_of(record["step"], record["group_id"])
    rewards = [one["reward"] for one in group]
    heads = text_of(page, ".tv-column h4")
    assert len(heads) == 4
    known = [reward for reward in rewards if reward is not None]
    for head, reward in zip(heads, rewards, strict=True):
        assert ("masked" if reward is None else f"reward {reward:.2f}") in head
        assert ("(highest)" in head) == (reward == max(known)) and ("(lowest)" in head) == (reward == min(known))
    # What all begin with comes once, and each column goes on from there.
    assert "3 messages that all attempts begin with" in page.js("document.querySelector('.tv-detail').innerText")
    assert page.js("document.querySelectorAll('.tv-column .tv-rehearse').length") >= 7
    assert page.js("document.activeElement.className") == "tv-together"
    page.js("document.querySelector('.tv-list').focus()")
    page.key("g")
    assert text_of(page, ".tv-column") == []


def test_old_records_say_what_they_lack(page):
    choose(page, "run", 1)
    note = text_of(page, ".tv-detail > .tv-note")[0]
    for lack in (
        "advantages",
        "the loss mask",
        "the texts of tokens",
        "questions of the checklist",
        "recorded results",
        "the judge's words",
    ):
        assert lack in note
    assert set(text_of(page, ".tv-mask")) == {"loss mask unknown"}
    assert any(text.startswith(("✓ held item 1", "✗ not held item 1")) for text in text_of(page, ".tv-judged li"))
    page.click("#tv-shade-logprob")
    ids = made.run_of(2, 1)[4]["segments"][0]["tokens"]
    assert text_of(page, ".tv-act > .tv-tokens")[0].split() == [str(one) for one in ids]
    assert page.complaints() == []


def test_newer_data_leave_the_reader_where_he_is(page):
    record = record_where(lambda one: one["step"] == 2 and one["attempt"] == 1)
    go_to(page, record)
    page.js(
        "document.querySelector('.tv-steps .tv-fold').open = true; window.kept = document.querySelector('.tv-steps')"
    )
    page.js(
        "(one => { for (const values of Object.values(one.columns)) values.unshift(values.shift()); })"
        "(given.runs[0].data)"
    )
    page.js("given.runs[0].data.notes.push('newer'); EnvaceViewer.update(given)")
    assert title(page) == f"Step 2 · {record['task_id']} · attempt 1"
    assert page.js("window.kept === document.querySelector('.tv-steps')") and "newer" in text_of(page, ".tv-notes")[0]


# Each gives milliseconds: the worst of 40 jumps through the list until it is drawn, one step on, a first search.

"""The demo page in headless Chromium, against a server that says what it is told to: all of it but the model.

What needs a browser is left out where there is none (Debian: apt-get install chromium).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

import envace_jax
from envace_jax.envs import load_domain, tiny

PAGE = Path(envace_jax.__file__).parent / "serving" / "page.html"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
CALL = {"id": "call_1", "type": "function", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = {"role": "assistant", "content": "the lamp costs 35."}
USAGE = {
    "prompt_tokens": 300, "completion_tokens": 70, "total_tokens": 370,
    "rehearsal_tokens": {"prompt_tokens": 200, "completion_tokens": 60, "cached_tokens": 0},
}  # fmt: skip
CALL_TEXT = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
RESULT_TEXT = '<execution_result>\n{"price": 20}\n</execution_result>'
REHEARSED = (
    {"type": "segment", "attempt": 1, "role": "act", "text": CALL_TEXT},
    {"type": "segment", "attempt": 0, "role": "act", "text": CALL_TEXT},
    {"type": "segment", "attempt": 0, "role": "rehearse", "text": RESULT_TEXT},
    {"type": "memory", "text": "ask for the price once."},
)
OPEN = "open"  # in place of an event: the stream stays open


class ScriptedServer(ThreadingHTTPServer):
    """Serves the page; answers /v1/rehearsals with `script`: events, or (status, body)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: object = ()
        self.asked: list[dict] = []  # bodies of rehearsals
        self.keys: list[str | None] = []  # what stood in their Authorization, and in that of the models
        self.gone = threading.Event()  # a client left an open stream
        self.key: str | None = None
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.0"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, kind: str, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def refused(self) -> bool:
        self.server.keys.append(self.headers.get("Authorization"))
        if self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return False
        self.answer(401, "application/json", b'{"error": {"message": "a key, please"}}')
        return True

    def do_GET(self) -> None:
        if self.path == "/":
            self.answer(200, "text/html; charset=utf-8", PAGE.read_bytes())
        elif not self.refused():
            self.answer(200, "application/json", b'{"object": "list", "data": [{"id": "tiny_base"}]}')

    def do_POST(self) -> None:
        assert self.path == "/v1/rehearsals"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.refused():
            return
        self.server.asked.append(json.loads(body))
        if isinstance(self.server.script, tuple) and self.server.script[:1] == (400,):
            self.answer(400, "application/json", json.dumps(self.server.script[1]).encode())
            return
        self.answer(200, "text/event-stream")
        for event in self.server.script:
            if event is OPEN:
                self.rfile.read(1)  # until the client goes
                self.server.gone.set()
                return
            # Cut in the middle, and with a comment as servers send to keep a connection: the page puts it together.
            sent = f": still here\n\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
            for part in (sent[: len(sent) // 2], sent[len(sent) // 2 :]):
                self.wfile.write(part)
                self.wfile.flush()
                time.sleep(0.01)  # so that they arrive one by one


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    served = ScriptedServer()
    yield served
    served.shutdown()
    served.server_close()


@pytest.fixture
def page(browser, server) -> Browser:
    browser.events.clear()
    browser.dark(False)
    browser.open(server.address)
    browser.wait_for("document.getElementById('model').textContent === 'tiny_base'")
    return browser


def text_of(page: Browser, selector: str) -> list[str]:
    return page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(found => found.innerText)")


def start(page: Browser) -> None:
    """Starts as the keyboard does, and waits for the end."""
    page.js("document.querySelector('#results textarea, #saying:not([hidden]) #task').focus()")
    page.key("Enter", "ctrl")
    page.wait_for("document.getElementById('run').disabled === false")


def shown_error(page: Browser) -> str:
    return page.js("document.getElementById('error').hidden ? '' : document.getElementById('error').textContent")


# --- the file ---


class _Resources(HTMLParser):
    """Attributes that make a browser fetch something, and the built-in examples."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts: list[str] = []
        self.within = False

    def handle_starttag(self, tag, attributes):
        self.within = tag == "script" and ("type", "application/json") in attributes
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]

    def handle_endtag(self, tag):
        self.within = False

    def handle_data(self, data):
        if self.within:
            self.scripts.append(data)


def test_the_page_is_one_file_that_asks_for_nothing_else():
    text = PAGE.read_text()
    found = _Resources()
    found.feed(text)
    assert found.fetched == ["data:,"]  # the icon that browsers ask for otherwise
    assert not re.search(r"https?://|//cdn|@import|url\(|import\(|innerHTML|insertAdjacentHTML|eval\(", text)
    assert "connect-src 'self'" in text and "default-src 'none'" in text


def test_the_examples_are_the_tiny_worlds():
    """Its tools to the letter, and sentences that its own writer could have written: the tiny model knows no others."""
    found = _Resources()
    found.feed(PAGE.read_text())
    (text,) = found.scripts
    examples = json.loads(text)
    assert set(examples) == set(tiny.RL_DOMAINS)
    for domain, example in examples.items():
        assert example["tools"] == list(load_domain(domain).TOOLS)
        source = Path(load_domain(domain).__file__).read_text()
        phrasings = [re.escape(phrase) for phrase in re.findall(r'^ {12}"(.+)",$', source, re.MULTILINE)]
        patterns = [re.sub(r"\\\{\w\\\}", r"\\w+", phrase) for phrase in phrasings]
        assert len(patterns) > 30
        for task in example["tasks"]:
            assert any(re.fullmatch(pattern, task) for pattern in patterns), task


# --- in the browser ---


@needs_browser
def test_a_conversation_from_task_to_answer(page, server):
    server.script = (*REHEARSED, {"type": "message", "message": CALLING}, {"type": "done", "usage": USAGE})
    start(page)
    tools = list(load_domain("shop").TOOLS)
    asked = {"role": "user", "content": "how much does the lamp cost here ?"}
    assert server.asked == [
        {"model": "tiny_base", "messages": [asked], "tools": tools, "mode": "parallel", "n": 4, "seed": 0}
    ]
    assert text_of(page, ".attempt h3") == ["Attempt 1", "Attempt 2"]  # in order, though the second spoke first
    assert text_of(page, ".attempt:first-child .tag") == ["ACT", "REHEARSE"]
    assert text_of(page, ".attempt:first-child pre") == [CALL_TEXT, RESULT_TEXT]
    assert text_of(page, ".attempt:last-child pre") == [CALL_TEXT]
    assert text_of(page, ".memory pre") == ["ask for the price once."]
    assert text_of(page, ".committed pre") == ['price {"item":"lamp"}']
    assert "in rehearsal 200 tokens read, 60 written" in page.js("document.getElementById('steps').innerText")
    # Two colours, and lines that tell them apart without.
    act, rehearse = (
        page.js(
            f"(s => [s.borderLeftStyle, s.borderLeftColor, s.backgroundColor])(getComputedStyle("
            f"document.querySelector('.attempt .{kind}')))"
        )
        for kind in ("act", "rehearse")
    )
    assert all(one != other for one, other in zip(act, rehearse, strict=True))

    # The user gives the result, and the next step is rehearsed again: nothing of the first rehearsal goes along.
    page.js("document.getElementById('result-0').value = '{\"price\": 35}'")
    server.script = (*REHEARSED, {"type": "message", "message": TOLD}, {"type": "done", "usage": USAGE})
    start(page)
    result = {"role": "tool", "tool_call_id": "call_1", "content": '{"price": 35}'}
    assert server.asked[1]["messages"] == [asked, CALLING, result]
    assert text_of(page, ".step:last-child .committed pre") == ["the lamp costs 35."]
    page.write("thanks , that is all for now .")  # the focus is where the user goes on
    start(page)
    assert server.asked[2]["messages"][3:] == [TOLD, {"role": "user", "content": "thanks , that is all for now ."}]
    assert all(address.startswith(server.address) for address in page.requests())
    assert page.complaints() == []


@needs_browser
def test_settings_and_tools_are_sent_as_chosen(page, server):
    server.script = ({"type": "message", "message": TOLD}, {"type": "done"})
    page.click("#examples li:nth-child(3) button")
    assert page.js("document.getElementById('task').value") == "if ann has at least 50 send it to bob ."
    page.click("#tools li:nth-child(2) input")  # not that tool
    page.click("#add-tool")
    page.js("document.activeElement.value = JSON.stringify({type: 'function', function: {name: 'mine'}})")
    page.click("input[value=sequential]")
    page.js("document.getElementById('n').value = '2'; document.getElementById('seed').value = '7'")
    page.js("document.getElementById('system').value = ' Be kind. '")
    start(page)
    balance, _, deposit = load_domain("accounts").TOOLS
    (asked,) = server.asked
    assert asked["tools"] == [balance, deposit, {"type": "function", "function": {"name": "mine"}}]
    assert (asked["mode"], asked["n"], asked["seed"]) == ("sequential", 2, 7)
    assert asked["messages"][0] == {"role": "system", "content": "Be kind."}

    page.click("#clear")
    page.click("input[value=none]")
    assert page.js("document.getElementById('n').disabled")
    page.js("document.getElementById('task').focus()")
    page.write("hello")
    start(page)
    assert server.asked[1]["mode"] == "none" and "n" not in server.asked[1]
    assert [message["content"] for message in server.asked[1]["messages"]] == ["Be kind.", "hello"]
    assert not page.js("document.querySelector('.step details').checkVisibility()")  # there was no rehearsal
    page.js("document.getElementById('key').value = 'secret'")
    start(page)  # the task is empty: nothing to say
    assert len(server.asked) == 2 and "Write a task first" in shown_error(page)


@needs_browser
def test_text_never_becomes_markup(page, server):
    evil = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
    message = {
        "role": "assistant",
        "content": evil,
        "tool_calls": [{**CALL, "function": {"name": evil, "arguments": evil}}],
    }
    server.script = (
        {"type": "segment", "attempt": 0, "role": "act", "text": evil}, {"type": "memory", "text": evil},
        {"type": "message", "message": message}, {"type": "done"},
    )  # fmt: skip
    start(page)
    assert text_of(page, ".attempt pre") == text_of(page, ".memory pre") == [evil]
    assert evil in page.js("document.getElementById('results').textContent")
    assert page.js("document.querySelectorAll('img, b').length") == 0
    assert page.js("document.title") == "EnvACE: rehearse, then act"


@needs_browser
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ((400, {"error": {"message": "tools.0: no name"}}), "The server refused (400): tools.0: no name"),
        ((400, "no such shape"), "The server refused (400): Bad Request"),
        ((*REHEARSED, {"type": "error", "error": {"message": "out of pages"}}), "out of pages"),
        (REHEARSED, "ended before the answer was whole"),
        ((*REHEARSED, {"type": "message", "message": TOLD}), "ended before the answer was whole"),
    ],
    ids=["refused", "refused in another shape", "an error under way", "cut off", "cut off before the end"],
)
def test_what_goes_wrong_is_shown_and_commits_nothing(page, server, script, reason):
    server.script = script
    start(page)
    assert reason in shown_error(page)
    assert page.js("document.getElementById('error').getAttribute('role')") == "alert"
    server.script = ({"type": "message", "message": TOLD}, {"type": "done"})
    start(page)  # the same task again, alone in its conversation
    assert shown_error(page) == "" and [len(asked["messages"]) for asked in server.asked] == [1, 1]


@needs_browser
def test_a_server_that_is_gone_is_said_to_be(page, server):
    server.shutdown()
    server.server_close()
    start(page)
    said = shown_error(page)
    # The second where the browser still had a connection open.
    assert "cannot be reached" in said or "The connection ended" in said


@needs_browser
def test_mistakes_in_the_form_are_named_and_not_sent(page, server):
    page.click("#tools li:nth-child(2) button")
    page.js("document.activeElement.value = '{\"type\": '")
    start(page)
    assert shown_error(page).startswith("The schema of the tool stock cannot be used")
    assert page.js("document.activeElement.getAttribute('aria-invalid')") == "true"
    page.js("document.activeElement.value = '[]'")
    start(page)
    assert "a tool is" in shown_error(page)
    page.click("#tools li:nth-child(2) input")  # a tool that is not ticked may be unfinished
    for value in ("0", "65", "1.5", ""):
        page.js(f"document.getElementById('n').value = '{value}'")
        start(page)
        assert shown_error(page) == "Attempts must be a whole number from 1 to 64." and not server.asked
    page.js("document.getElementById('n').value = '64'")
    server.script = ({"type": "message", "message": TOLD}, {"type": "done"})
    start(page)
    assert shown_error(page) == "" and len(server.asked[0]["tools"]) == 2


@needs_browser
def test_escape_stops_and_the_server_hears_of_it(page, server):
    server.script = (*REHEARSED, OPEN)
    page.js("document.getElementById('task').focus()")
    page.key("Enter", "ctrl")
    page.wait_for("document.querySelectorAll('.memory pre').length")
    assert page.js("document.getElementById('steps').getAttribute('aria-busy')") == "true"
    page.key("Enter", "ctrl")  # one at a time
    page.key("Escape")
    page.wait_for("document.getElementById('status').textContent.startsWith('Stopped')")
    assert server.gone.wait(10) and len(server.asked) == 1 and shown_error(page) == ""
    # To start over stops as well, and what comes late does not come back.
    page.key("Enter", "ctrl")
    page.wait_for("document.querySelectorAll('.step').length === 2")
    page.click("#clear")
    page.wait_for("document.getElementById('run').disabled === false")
    assert page.js("document.querySelectorAll('.step').length") == 0


@needs_browser
def test_a_key_is_asked_for_and_sent(page, server):
    server.key = "sesame"
    page.open(server.address)
    page.wait_for("document.activeElement.id === 'key'")
    assert "a key, please" in shown_error(page)
    page.write("sesame")
    page.key("Tab")
    page.wait_for("document.getElementById('model').textContent === 'tiny_base'")
    assert shown_error(page) == "" and server.keys[-1] == "Bearer sesame"
    assert page.js("localStorage.length + sessionStorage.length + document.cookie.length") == 0


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast_and_nothing_overflows(page, server, dark):
    """WCAG's 4.5 for every text that is seen, whichever scheme; and no line wider than a telephone."""
    page.dark(dark)
    call = {**CALL, "function": {"name": "price_of_a_very_long_name_" * 3, "arguments": '{"item": "' + "x" * 90 + '"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    long = {"type": "segment", "attempt": 2, "role": "act", "text": "y" * 300}
    server.script = (*REHEARSED, long, {"type": "message", "message": message}, {"type": "done", "usage": USAGE})
    start(page)
    page.click("#tools li:nth-child(1) button")
    page.js("showError('something went wrong')")
    assert page.js(CONTRASTS) == []
    paper = page.js("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == dark
    for width in (320, 390, 700, 1200):
        page.resize(width, 800)
        assert page.js("document.documentElement.scrollWidth") <= width


# Texts whose colour is too near to what is behind them, as [contrast, text].
CONTRASTS = """
(() => {
  const parts = colour => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return {r, g, b, a}; };
  const linear = value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
  const light = ({r, g, b}) => [r, g, b].map(value => linear(value / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => { for (; node; node = node.parentElement) {
    const colour = parts(getComputedStyle(node).backgroundColor); if (colour.a === 1) return colour; } };
  const found = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].filter(child => child.nodeType === 3).map(child => child.data.trim());
    const text = own.join('') || node.value;
    if (!text || !node.checkVisibility() || node.disabled || ['SCRIPT', 'INPUT'].includes(node.tagName)) continue;
    const [one, other] = [light(parts(getComputedStyle(node).color)), light(behind(node))];
    const contrast = (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
    if (contrast < 4.5) found.push([contrast, text]);
  }
  return found;
})()
"""


@needs_browser
def test_everything_is_named_and_can_be_reached_by_keyboard(page, server):
    server.script = (*REHEARSED, {"type": "message", "message": CALLING}, {"type": "done", "usage": USAGE})
    page.click("#add-tool")
    start(page)
    wanted = ("button", "textbox", "checkbox", "radio", "spinbutton", "article", "region", "form", "DisclosureTriangle")
    nodes = [node for node in page.command("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
    assert [entry for entry in named if entry[0] in wanted and not entry[1]] == []
    assert {role for role, _ in named} >= {"button", "textbox", "checkbox", "radio", "spinbutton", "status"}
    assert ("button", "Remove stock") in named and ("textbox", 'What does price {"item":"lamp"} give?') in named
    # From the top, Tab comes to every control that is not disabled, a group of radio buttons counting once.
    page.js("document.activeElement.blur(); window.getSelection().collapse(document.body, 0)")
    reached = set()
    for _ in range(60):
        page.key("Tab")
        reached.add(page.js("document.activeElement.id || document.activeElement.getAttribute('aria-label') || ''"))
    assert {"result-0", "add-tool", "n", "seed", "run", "clear", "Edit price", "Remove order"} <= reached

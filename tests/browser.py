"""A headless Chromium for tests of the page, spoken to over its debugging pipe: no driver, no port, no package.

`CHROMIUM` is None where there is no browser; the tests then skip.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT = 60  # seconds
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--mute-audio",
    "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}  # key -> Windows' code, which Chromium asks for
MODIFIERS = {"ctrl": 2, "shift": 8}


class Browser:
    """One page. Use as a context manager; `folder` is for the profile."""

    def __init__(self, folder: Path):
        theirs, self._write = _pipe()
        self._read, theirs_too = _pipe()
        # The browser reads file descriptor 3 and writes 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{theirs_too}', "bash", CHROMIUM, *FLAGS,
             f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(theirs, theirs_too), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.close(theirs_too)
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._news = threading.Condition()
        self._closed = False
        self.events: deque[dict[str, Any]] = deque(maxlen=2000)  # what the browser told unasked
        threading.Thread(target=self._listen, daemon=True).start()
        self._session: str | None = None
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # the browser and its helpers end when nobody speaks to it any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def command(self, method: str, **params: Any) -> Any:
        """A command of the Chrome DevTools protocol, and its result."""
        self._number += 1
        number = self._number
        asked = {"id": number, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        with self._news:
            arrived = self._news.wait_for(lambda: number in self._answers or self._closed, WAIT)
            answer = self._answers.pop(number, None)
        assert arrived and answer is not None, f"no answer to {method}"
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, address: str, **size: int) -> None:
        """Loads an address; `width` and `height` in CSS pixels."""
        self.resize(**size)
        self.command("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def resize(self, width: int = 1200, height: int = 900) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def dark(self, wanted: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def js(self, expression: str) -> Any:
        """The value of an expression in the page, promises awaited."""
        got = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def wait_for(self, expression: str, seconds: float = WAIT) -> Any:
        """The value of an expression once it holds."""
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < end, f"{expression} did not come true within {seconds} s"
            time.sleep(0.02)
        return value

    def click(self, selector: str) -> None:
        """A click of the mouse on the middle of what the selector finds, where it is seen."""
        box = self.js(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def key(self, key: str, *modifiers: str) -> None:
        """A key pressed and let go, where the focus is."""
        held = sum(MODIFIERS[name] for name in modifiers)
        text = {"Enter": "\r", " ": " "}.get(key, "") if not held else ""
        common = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        self.command("Input.dispatchKeyEvent", type="keyDown", modifiers=held, text=text, **common)
        self.command("Input.dispatchKeyEvent", type="keyUp", modifiers=held, **common)

    def write(self, text: str) -> None:
        self.command("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """The whole page, as PNG."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        got = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(got["data"]))

    def requests(self) -> list[str]:
        """Addresses that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in list(self.events)
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Errors that the browser's console shows: exceptions, blocked resources."""
        found = []
        for event in list(self.events):
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found

    def _listen(self) -> None:
        rest = b""
        while chunk := os.read(self._read, 1 << 16):
            *whole, rest = (rest + chunk).split(b"\0")
            with self._news:
                for message in map(json.loads, whole):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append(message)
                self._news.notify_all()
        os.close(self._read)
        with self._news:
            self._closed = True
            self._news.notify_all()


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, as numbers that are not in the way of 3 and 4."""
    ends = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return read, write

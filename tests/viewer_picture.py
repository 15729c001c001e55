"""Draws docs/viewer.png: a made-up trajectory as the viewer shows it.

PYTHONPATH=. python tests/viewer_picture.py docs/viewer.png
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from pathlib import Path

import viewer_page as viewer
import viewer_records as made
from browser import Browser
from PIL import Image


def main(picture: Path) -> None:
    run = made.run_of(6, 4)
    wanted = next(one for one in run if one["step"] == 4 and viewer.differing(one) == 2 and one["status"] == "ok")
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder, "profile")) as browser:
        page = viewer.opened(browser, viewer.page_of(Path(folder), shop=viewer.data_of(Path(folder, "run"), run)))
        viewer.go_to(page, wanted)
        page.js("document.querySelector('h1').remove()")
        # One segment token by token, as it is when it is unfolded.
        page.click("#tv-shade-logprob")
        page.js("for (const fold of document.querySelectorAll('.tv-rehearse > .tv-fold')) fold.open = true")
        page.js("document.activeElement.blur()")
        page.resize(1280, 1250)
        drawn = base64.b64decode(page.command("Page.captureScreenshot")["data"])
    Image.open(io.BytesIO(drawn)).convert("RGB").quantize(192, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

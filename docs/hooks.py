"""What the site needs beyond Markdown, with nothing from outside: mkdocs calls these functions while it builds.

Figures are put into the page, so that they follow its light or dark colours; equations become MathML; links that leave
docs/ lead to copies of the repository's files; a code block that the tests do not run says so.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml import converter
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
COPIES = "repository"  # the site's folder of the repository's files
AS_TEXT = {".md", ".py", ".jsonl"}  # shown by a browser as text, not run, rendered or saved

SHIM, SHIM_HERE = "https://unpkg.com/iframe-worker/shim", "javascripts/iframe-worker.js"  # its 1.0.4

EQUATION = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEAVING = re.compile(r"(!?\[[^\]\n]*\]\()((?:\.\./)+[^)#\s]+)((?:#[^)\s]*)?\))")
NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$", re.MULTILINE)
FIGURE = re.compile(r'<p><img alt="[^"]*" src="((?:\.\./)*images/\w+\.svg)" /></p>')


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page's Markdown with equations, links into the repository and marks of blocks written for the site."""
    here = posixpath.dirname(page.file.src_uri)

    def copied(found: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs", here, found[2]))
        source = ROOT / place
        if not source.is_file():
            return found[0]  # mkdocs says that it is not there
        target = f"{COPIES}/{place}" + (".txt" if source.suffix in AS_TEXT else "")
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(source)))
        return found[1] + posixpath.relpath(target, here or ".") + found[3]

    markdown = LEAVING.sub(copied, markdown)
    markdown = EQUATION.sub(lambda found: f'<div class="equation">{mathml(found[1])}</div>', markdown)
    return NOT_RUN.sub(lambda found: f'<p class="not-run">not run by the tests: {found[1]}</p>\n', markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """The page's HTML with its figures in it."""
    return FIGURE.sub(lambda found: f"<figure>{(ROOT / 'docs' / found[1].lstrip('./')).read_text()}</figure>", html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The page with the theme's one script from elsewhere, which lets a site on disk be searched, taken from here."""
    return output.replace(SHIM, posixpath.relpath(SHIM_HERE, posixpath.dirname(page.url) or "."))


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """The same of pages that are no Markdown (404.html)."""
    return output.replace(SHIM, SHIM_HERE)


def mathml(latex: str) -> str:
    """One displayed equation; a line of LaTeX each, several lines below each other."""
    lines = [line for line in latex.strip().split("\\\\\n")]
    return "".join(converter.convert(" ".join(line.split()), display="block") for line in lines)

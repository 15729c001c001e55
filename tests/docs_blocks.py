"""The code blocks of the pages in docs/, how each is to be treated, and what the commands in them are given to.

A block is run, unless a line `<!-- not run: WHY -->` stands directly above it, or a line
`<!-- blocks: tests/FILE.py ... -->` says that a test of its own takes the page. A block below a line "`NAME`:" is a
file, and a `text` block is what the block above it prints, `...` standing for anything.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from conftest import REPOSITORY

from envace_jax import hosts, main, plan, serve
from envace_jax.benchmarks import flags as evaluate_flags

DOCS = REPOSITORY / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
ABOVE = re.compile(r"(?:^|\n)(?:<!-- not run: (?P<reason>[^\n]+) -->|`(?P<name>[\w./-]+)`:)\n\Z")
ELSEWHERE = re.compile(r"^<!-- blocks: (tests/\w+\.py) .*-->$", re.MULTILINE)
LANGUAGES = ("bash", "python", "text", "math", "csv", "json", "slurm")
# A command of this package or of a script, up to what ends it in a shell.
WORD = r"""[ \t]+(?![<>|&;]|\d>)(?:"[^"\n]*"|'[^'\n]*'|[^\s;])+"""
COMMAND = re.compile(rf"python3? (?P<target>-m [\w.]+|[\w./-]+\.py)(?P<rest>(?:{WORD})*)")


@dataclasses.dataclass(frozen=True)
class Block:
    page: str  # below docs/
    line: int
    language: str
    text: str
    reason: str | None  # why it is not run
    name: str | None  # of the file that it is

    def __str__(self) -> str:
        return f"docs/{self.page}:{self.line}"


def page_name(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def blocks(page: str) -> list[Block]:
    text = (DOCS / page).read_text()
    found = []
    for match in FENCE.finditer(text):
        above = ABOVE.search(text[: match.start()])
        reason, name = (above["reason"], above["name"]) if above else (None, None)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match["language"], match["text"], reason, name))
    return found


def elsewhere(page: str) -> str | None:
    """The test file that takes all blocks of the page, where it says so."""
    found = ELSEWHERE.search((DOCS / page).read_text())
    return found[1] if found else None


def prose(page: str) -> str:
    """The page without its blocks."""
    return FENCE.sub("", (DOCS / page).read_text())


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(target, arguments) of every Python command of a shell script: "-m envace_jax.main" or a script's path.

    Variables are taken to be 0."""
    script = re.sub(r"(?m)(^|\s)#.*$", "", text.replace("\\\n", " "))
    for found in COMMAND.finditer(script):
        yield found["target"], shlex.split(re.sub(r"\$\w+", "0", found["rest"]))


def check_command(target: str, arguments: list[str]) -> None:
    """Raises where a command's flags or settings are not taken; for what reads them in a way of its own, where a flag's
    name does not stand in its source. To be called in the repository's folder."""
    program = target.removeprefix("-m ")
    if program == "envace_jax.main":
        main.read_flags(hosts.read_flags([program, *arguments])[1])
    elif program == "envace_jax.evaluate":
        evaluate_flags.read_flags([program, *arguments])
    elif program == "envace_jax.plan":
        plan.read_flags([program, *arguments])
    elif program == "envace_jax.serve":
        own, rest = serve._flags().parse_known_args(arguments)
        serve._options(own)
        if rest:
            serve._configuration(program, rest)
    elif program.startswith("envace_jax"):
        _check_names(Path(str(importlib.import_module(program).__file__)), arguments)
    elif program.startswith("experiments/"):
        _check_names(REPOSITORY / program, arguments)


def _check_names(source: Path, arguments: list[str]) -> None:
    """Every flag's name stands in the program, or in a module beside it that it imports."""
    text = source.read_text()
    beside = [source.with_name(f"{name}.py") for name in re.findall(r"(?m)^(?:from|import) (\w+)", text)]
    text += "".join(path.read_text() for path in beside if path.is_file())
    for argument in arguments:
        name = argument.partition("=")[0].lstrip("-").replace("-", "_")
        if argument == "--":
            return  # the rest is another program's
        if argument.startswith("--") and name not in text and name.replace("_", "-") not in text:
            raise ValueError(f"{source.name} has no flag {argument}")

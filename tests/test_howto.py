"""The how-to pages, done as a reader would: every file is saved, every command run, in order, in an empty folder.

A block after a line "`NAME`:" is that file. A bash block is run; the text block after it is what it must print, where
`...` stands for anything, over lines too.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from envace_jax.data import read_tasks

BLOCK = re.compile(r"(?:^`([\w./]+)`:\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("data", "reward", "environment")
TRAINING = "--config="  # what tells a command that trains from one that takes a moment


def blocks(page):
    """(file name or "", language, text) of every block of a page."""
    text = (REPOSITORY / "docs" / f"howto_{page}.md").read_text()
    found = BLOCK.findall(text)
    assert len(found) == text.count("```") / 2
    return found


def run(command, folder):
    """What a shell prints for the command; the test fails with it where the command fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def follow(page, folder, *, training):
    """Does what the page says; gives how many commands were run and how many outputs compared."""
    ran, compared, printed = 0, 0, None
    for name, language, text in blocks(page):
        if language == "bash":
            printed = run(text, folder) if training or TRAINING not in text else None
            ran += printed is not None
        elif name:
            assert not (folder / name).exists()
            (folder / name).write_text(text)
        elif language == "text" and printed is not None:
            matches = doctest.OutputChecker().check_output(text, printed, doctest.ELLIPSIS)
            assert matches, f"the page says\n{text}\nand the command printed\n{printed}"
            compared, printed = compared + 1, None
    return ran, compared


@pytest.mark.parametrize("page", PAGES)
def test_a_page_up_to_its_training_run(page, tmp_path):
    ran, compared = follow(page, tmp_path, training=False)
    assert ran >= 1 and compared == 1


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_whole_page(page, tmp_path):
    ran, compared = follow(page, tmp_path, training=True)
    assert ran >= 2 and compared == 2 + 2 * (page == "environment")
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    summary = (tmp_path / "run" / "summary.json").read_text()
    calls = int(re.search(r'"real_env_calls_in_training": (\d+)', summary)[1])
    assert (calls > 0) == (page == "environment")


def test_the_data_pages_records_are_what_the_log_says(tmp_path):
    follow("data", tmp_path, training=False)
    first, second = read_tasks(tmp_path / "tasks.jsonl")
    assert (first.task_id, second.task_id) == ("log/1", "log/2")
    assert [len(turn) for turn in first.checklist] == [2, 1] and first.reference[0][1] == '{"balance": 120}'
    assert first.checklist[0][1].check == {"kind": "reply", "words": ["120"]}
    assert first.checklist[1][0].check == {"kind": "no_call"}


def test_a_wrong_page_is_noticed(tmp_path, monkeypatch):
    """The test of the pages fails where the shown output is not what is printed."""
    shown = [("", "bash", "echo 1\n"), ("", "text", "2\n")]
    monkeypatch.setattr(sys.modules[__name__], "blocks", lambda page: shown)
    with pytest.raises(AssertionError, match="the page says"):
        follow("any", tmp_path, training=True)
    shown[:] = [("", "bash", "false\n")]
    with pytest.raises(AssertionError, match="^false"):
        follow("any", tmp_path, training=True)

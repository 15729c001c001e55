"""The notebook that rehearses, looks and commits: stored without outputs, and every code cell of it runs on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import notebook
import pytest
from conftest import REPOSITORY

PATH = REPOSITORY / "experiments" / "colab_rehearsal.ipynb"
BOOK = notebook.read(PATH)
CODE = notebook.code_cells(BOOK)


def cell(book, name):
    return notebook.source(next(found for found in book["cells"] if found["id"] == name))


def printed(**parameters) -> str:
    """What the whole notebook prints, in a process of its own; the test fails with it where a cell fails."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-u", notebook.__file__, str(PATH), json.dumps(parameters)], cwd=PATH.parent,
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_it_is_stored_without_outputs_and_in_the_format_of_a_notebook():
    assert (BOOK["nbformat"], BOOK["nbformat_minor"]) == (4, 5)
    ids = [found["id"] for found in BOOK["cells"]]
    assert len(set(ids)) == len(ids)
    for found in CODE:
        assert found["outputs"] == [] and found["execution_count"] is None
    assert [notebook.is_parameters(found) for found in CODE] == [True] + [False] * (len(CODE) - 1)
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; .ci/run checks it with nbclient")
    nbformat.validate(nbformat.read(PATH, as_version=4))


def test_it_installs_as_the_other_notebook_does():
    """What test_notebook.py shows of that cell holds here too."""
    assert cell(BOOK, "install") == cell(notebook.read(PATH.with_name("colab_tpu.ipynb")), "install")


def test_it_says_first_what_was_verified_and_what_not_and_names_what_exists():
    first = notebook.source(BOOK["cells"][0])
    assert "**Verified:**" in first and "**Not verified:** that rehearsal helps" in first
    for name in re.findall(r"((?:docs|configs|experiments)/[\w./]+\w)", json.dumps(BOOK)):
        assert (REPOSITORY / name).is_file(), name


def test_a_wrong_backend_is_refused_with_the_way_out():
    with pytest.raises(RuntimeError, match=r"backend 'cpu' and the notebook wants 'tpu'\. Choose Runtime > Change"):
        given = {"backend": "tpu", "checkout": str(REPOSITORY)}
        notebook.execute(PATH, given, only=("parameters", "install", "backend"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_every_cell_runs(mode):
    text = printed(mode=mode, attempts=2, measured=4)
    assert re.findall(r"\[cell ([\w-]+)\]", text) == [found["id"] for found in CODE]
    shown = text.partition("[cell rehearse]")[2]
    assert "attempt 1, ended by" in shown and "attempt 2, ended by" in shown and "attempt 3" not in shown
    assert "act:      \033[34m" in shown and "rehearse: \033[35m" in shown
    assert re.search(r"[1-9]\d* tokens sampled; calls executed: 0\n", shown)
    memory, _, commit = shown.partition("[cell memory]\n")[2].partition("[cell commit]")
    assert memory.strip()
    assert "user:" in commit and "tool:" in commit and re.search(r"reward [01]\.\d\d, (not )?solved, ended by", commit)
    assert re.search(r"tasks      4\nwithout    [01]\.\d{3} solved\nrehearsed  [01]\.\d{3} solved", commit)
    assert re.search(r"gain       [+-]\d\.\d{3} \([+-]\d\.\d{3} to [+-]\d\.\d{3}\)", commit)


@pytest.mark.slow
def test_a_runs_own_policy(tmp_path):
    """A work folder is taken for the policy that its run has trained."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(REPOSITORY / "envace_jax" / "assets" / "tiny_base")
    text = printed(model=str(tmp_path / "run"), attempts=1, measured=2)
    assert "attempt 1, ended by" in text and "tasks      2\n" in text

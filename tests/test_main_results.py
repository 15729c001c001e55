"""The paper's table: its figures, cells that are filled from results, and cells that say why they are not."""

from __future__ import annotations

import json

import main_results
import pytest
from main_results import Cell


def groups(score, partial, missing):
    """BFCL's groups where `missing` are the categories that did not run."""
    return {
        "memory": {"score": None if missing else 1.0, "partial": 1.0, "missing": missing},
        "overall": {"score": score, "partial": partial, "missing": ["memory"] if missing else []},
    }


def bfcl(score, partial, missing, subset="all"):
    return {"subset": {"name": subset}, "results": {"groups": groups(score, partial, missing)}}


def test_the_papers_figures_are_those_of_the_paper():
    found = {row.name: row.paper for row in main_results.ROWS}
    assert found["EnvACE-8B"] == {"bfcl": 46.04, "tau2": 36.7, "vita": 16.0, "finmcp": 46.78}
    assert found["Qwen3-8B"] == {"bfcl": 44.04, "tau2": 30.0, "vita": 11.4} and "bfcl" not in found["ScaleEnv-8B"]
    for name, overall in {"Qwen3-8B": 28.48, "EnvACE-8B": 32.91, "AWM-14B": 32.54, "EnvACE-1.7B": 16.77}.items():
        three = [found[name][key] for key in ("bfcl", "tau2", "vita")]
        assert sum(three) / 3 == pytest.approx(overall, abs=0.006), name  # the paper's own plain mean


def test_a_figure_says_what_it_leaves_out():
    figure = main_results.figure
    assert figure("bfcl", bfcl(41.5, 41.5, [])) == Cell(41.5)
    partial = figure("bfcl", bfcl(None, 38.0, ["memory_vector"], "small"))
    assert partial == Cell(38.0, "subset small; without memory_vector")
    tau2 = {
        "subset": {"name": "all"},
        "results": {"categories": {"airline": {"score": 40.0}, "telecom_small": {"score": 5.0}}},
    }
    assert figure("tau2", tau2) == Cell(40.0, "without retail; telecom_small 5.0")
    tau2["results"]["categories"] = {"airline": {"score": 40.0}, "retail": {"score": 20.0}}
    assert figure("tau2", tau2) == Cell(30.0)
    del tau2["results"]["categories"]["airline"], tau2["results"]["categories"]["retail"]
    assert figure("tau2", tau2) == Cell(None, "without airline, retail")
    assert figure("finmcp", {"subset": {"name": "all"}, "results": {"tool_f1": {"all": {"f1": 46.0}}}}) == Cell(46.0)
    masked = figure("finmcp", {"subset": {"name": "small"}, "results": {"tool_f1": {}}})
    assert masked == Cell(None, "subset small; every sample has a masked message")


def test_the_table_is_filled_and_says_why_it_is_not(tmp_path, monkeypatch, capsys):
    commands = []

    def started(command):
        commands.append(command)
        given = dict(part.lstrip("-").split("=", 1) for part in command if part.startswith("--"))
        if given["benchmark"] == "tau2":
            return "tau2 has no interpreter"
        folder = tmp_path / "EnvACE-8B" / "bfcl"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(bfcl(None, 45.25, ["memory_vector"])))
        return ""

    monkeypatch.setattr(main_results, "started", started)
    code = main_results.main(["--checkpoints=EnvACE-8B=/m", f"--out={tmp_path}", "--", "--subset=all", "--trials=3"])
    assert (
        code == 0 and len(commands) == 2 and all(command[-2:] == ["--subset=all", "--trials=3"] for command in commands)
    )
    text = (tmp_path / "main_results.md").read_text()
    assert text.strip() == "\n".join(capsys.readouterr().out.splitlines()[-len(text.splitlines()) :])
    row = next(line for line in text.splitlines() if line.startswith("| EnvACE-8B"))
    assert "45.25 [" in row and "(46.04)" in row and "(36.7)" in row and "- (46.78)" in row
    assert "without memory_vector" in text and "] tau2 has no interpreter" in text
    assert text.count(main_results.NOT_GIVEN) == text.count(main_results.NOT_PUBLIC) == 1
    held = json.loads((tmp_path / "main_results.json").read_text())
    (mine,) = [row for row in held["rows"] if row["name"] == "EnvACE-8B"]
    assert mine["here"]["bfcl"] == {"score": 45.25, "note": "without memory_vector"}


def test_wrong_names_are_one_line(capsys):
    assert main_results.main(["--checkpoints=GPT=/m"]) == 2
    assert main_results.main(["--benchmarks=bfcl,nothing"]) == 2
    first, second = capsys.readouterr().err.strip().splitlines()
    assert "'GPT=/m' is not NAME=FOLDER" in first and "there is no 'nothing'" in second


def test_a_failed_evaluation_gives_its_own_line(tmp_path):
    said = "import sys; print('error: model.path: no such folder', file=sys.stderr); sys.exit(2)"
    assert main_results.started([main_results.sys.executable, "-c", said]) == "model.path: no such folder"
    assert main_results.started([main_results.sys.executable, "-c", "raise KeyError('x')"]) == "KeyError: 'x'"
    assert main_results.started([main_results.sys.executable, "-c", ""]) == ""


def test_an_evaluation_works_where_it_was_asked_for(tmp_path, monkeypatch):
    """So that --out, --data and checkpoints mean the same files to both programs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    said = "import os, sys, envace_jax; print('error: ' + os.getcwd(), file=sys.stderr); sys.exit(2)"
    assert main_results.started([main_results.sys.executable, "-c", said]) == str(tmp_path)

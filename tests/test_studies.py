"""The studies' arithmetic and order, with summaries made by hand. What a run computes is tested elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import ablations
import pytest
import studies
import three_loops
from studies import Variant

from envace_jax.main import read_flags

LOOPS = (Variant("real", (), "real environment"), Variant("rehearsal", (), "world rehearsal"))


def summary(before: float, after: float, **more: float) -> dict[str, float]:
    return {
        "real_success_before": before,
        "real_success_after": after,
        "unseen_domain_before": 0.2,
        "unseen_domain_after": 0.3,
        "fidelity_before": 0.5,
        "fidelity_after": 0.5,
        "real_env_calls_in_training": 0,
        "seconds": 10.0,
        **more,
    }


def test_gains_are_compared_seed_by_seed():
    found = {
        "real": [summary(0.4, 0.7), summary(0.5, 0.6)],  # gains 0.3 and 0.1
        "rehearsal": [summary(0.4, 0.6), summary(0.5, 0.6)],  # gains 0.2 and 0.1
    }
    (mean, width) = studies.gains_beside(found, "real")["rehearsal"]
    assert mean == pytest.approx(-0.05)
    # differences -0.1 and 0.0: standard deviation 0.0707, over the root of 2 times t(1) = 12.706
    assert width == pytest.approx(12.706 * 0.05, rel=1e-4)


def test_a_row_holds_what_its_title_says():
    rows = {
        "real": studies.measured([summary(0.4, 0.7, real_env_calls_in_training=90), summary(0.4, 0.8)]),
        "rehearsal": studies.measured([summary(0.4, 0.6, external_tokens=7)]),
    }
    assert rows["real"]["real_success"]["after"][0] == pytest.approx(0.75)
    assert rows["real"]["real_success"]["change"][0] == pytest.approx(0.35)
    assert rows["real"]["real_env_calls_in_training"]["mean"] == 45
    lines = studies.markdown(LOOPS, rows).splitlines()
    titles = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert titles == [
        "", "held-out, sampled", "unseen domain, sampled", "fidelity",
        "environment calls", "external tokens", "seconds",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[3].strip("|").split("|")] == [
        "world rehearsal", "0.600 (+0.200)", "0.300 (+0.100)", "0.500 (+0.000)", "0", "7", "10",
    ]  # fmt: skip


def test_runs_go_side_by_side_up_to_the_number_asked_for_and_each_on_its_own_core(monkeypatch, tmp_path):
    monkeypatch.setattr(studies.os, "sched_getaffinity", lambda pid: {3, 5, 7})
    lock, busy, seen = threading.Lock(), set(), []

    def fake(variant, seed, folder, overrides, core):
        with lock:
            assert core not in busy
            busy.add(core)
            seen.append((variant.name, seed, len(busy), folder.name, tuple(overrides)))
        threading.Event().wait(0.02)
        with lock:
            busy.remove(core)
        return summary(0.4, 0.5 + seed / 10)

    monkeypatch.setattr(studies, "run_one", fake)
    found = studies.run_all(LOOPS, [0, 1], tmp_path, ["--config.steps=2"], 2)
    assert [entry["real_success_after"] for entry in found["rehearsal"]] == [0.5, 0.6]
    assert {entry[:2] for entry in seen} == {(name, seed) for name in ("real", "rehearsal") for seed in (0, 1)}
    assert max(entry[2] for entry in seen) <= 2
    assert ("real", 1, "real-seed1", ("--config.steps=2",)) in {(a, b, d, e) for a, b, _, d, e in seen}


def test_a_run_that_fails_is_named_with_the_end_of_its_log(tmp_path):
    wrong = Variant("wrong", ("--config.no_such_setting=1",), "a setting that there is not")
    with pytest.raises(SystemExit, match=r"(?s)wrong, seed 4 did not finish \(exit 2\).*no_such_setting"):
        studies.run_one(wrong, 4, tmp_path / "runs" / "wrong-seed4", [], None)


@pytest.mark.parametrize("module", [three_loops, ablations])
def test_every_variant_is_a_configuration_of_its_own(module):
    made = []
    for variant in module.VARIANTS:
        config, _ = read_flags(["main", f"--config={studies.ROOT / 'configs' / 'tiny.py'}", *variant.overrides])
        made.append(config)
    names = [variant.name for variant in module.VARIANTS]
    assert len(set(names)) == len(names)
    assert all(a != b for place, a in enumerate(made) for b in made[:place])


def test_the_picture_and_the_numbers_are_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(studies, "run_one", lambda variant, seed, *rest: summary(0.4, 0.6 + seed / 100))
    monkeypatch.setattr(sys, "argv", ["three_loops.py", "--seeds", "0", "1", "--out", str(tmp_path), "--only", "real"])
    studies.main("three_loops", "what", LOOPS, beside="real", defaults=("--config.steps=3",))
    written = json.loads((tmp_path / "three_loops.json").read_text())
    assert written["settings_of_all_runs"] == ["--config.steps=3"]
    assert written["command"] == "python experiments/three_loops.py --seeds 0 1 --only real"
    assert written["rows"]["real"]["real_success"]["by_seed"] == [0.6, 0.61]
    assert (tmp_path / "three_loops.png").stat().st_size > 5000
    assert "real environment" in capsys.readouterr().out


def test_an_argument_that_is_no_setting_is_refused():
    done = subprocess.run(
        [sys.executable, str(studies.ROOT / "experiments" / "three_loops.py"), "--steps=3"],
        capture_output=True, text=True, cwd=studies.ROOT, env={**studies.os.environ, "PYTHONPATH": str(studies.ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "unknown argument --steps=3" in done.stderr

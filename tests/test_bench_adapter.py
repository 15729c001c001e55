"""The adapter to the peers' harness: its contract, and that its train step does the peers' work. Nothing is timed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import peer_common
import pytest

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


@pytest.fixture
def adapter(monkeypatch):
    monkeypatch.setitem(sys.modules, "common", peer_common)
    spec = importlib.util.spec_from_file_location("envace_adapter", EXPERIMENTS / "bench_adapter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_adapter_rolls_out_fresh_prompts_each_time(adapter, monkeypatch):
    monkeypatch.setitem(adapter.SETTINGS, "tiny", adapter.SETTINGS["S"])
    monkeypatch.setattr(peer_common, "ROLL", dict(B=4, P=8, N=6))
    run, info = adapter.build("tiny", "rollout")
    assert info["jax"] == jax.__version__
    compiled = run()["compiled"]
    assert run()["compiled"] == compiled  # and it asserts the number of tokens itself


def test_the_adapter_does_the_same_work_as_the_peers(adapter):
    run, _ = adapter.build("S", "train")
    steps = [run() for _ in range(3)]
    assert steps[0]["loss"] == pytest.approx(-0.0697285, abs=5e-7)
    np.testing.assert_allclose([step["grad_norm"] for step in steps], [0.765170, 0.764772, 0.764317], atol=2e-6)
    assert steps[0]["mean_logp"] == pytest.approx(-np.log(4096), abs=0.2)

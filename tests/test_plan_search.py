"""The search: which settings are tried, in what order, and which of those that were compiled are named."""

import dataclasses
import math

import pytest
from plan_helpers import CHIP, made_plan
from train_helpers import ROOT

from envace_jax import chips, plan, plan_search, planning, roofline
from envace_jax.chips import GIB
from envace_jax.config import RunConfig
from envace_jax.models.config import PUBLISHED

MODEL = PUBLISHED["Qwen/Qwen3-8B"]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    return plan.read_flags(["plan", "--config=configs/qwen3_8b.py", "--topology=v5e:4x4"]).config


def test_candidates_keep_the_rules(config: RunConfig) -> None:
    found = list(plan_search.candidates(config, MODEL, 16))
    assert len(found) == len(set(found)) and len(found) > 100
    for one in found:
        assert one.mesh.fsdp * one.mesh.tensor == 16 and MODEL.heads % one.mesh.tensor == 0
        assert one.sampler.slots % one.mesh.fsdp == 0 and one.sampler.slots <= 64
        assert one.limits == config.limits and one.batch.row_length == config.batch.row_length


def test_an_estimate_by_hand(config: RunConfig) -> None:
    one = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=4, tensor=4))
    found = plan_search.estimate(one, MODEL, chips.CHIPS["v5e"], 16, roofline.Work.of_config(one))
    parameters = 8_190_735_360
    # Masters 4, moments 8, gradient 4 bytes each over 16 chips; a bfloat16 input of each layer over 4.
    state = 16 * parameters / 16
    layer = 20_480 * 2 * (36 * 4096 + 4 * 12_288 + 6 * 4096 + 8 * 4096) / 4
    logits = 3 * 4 * 1024 * 151_936 / 4
    gathered = 6 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 12_288) / 4
    assert found.train_bytes == pytest.approx(state + layer + logits + gathered)
    cache = 6144 * 64 * 2 * 36 * 8 * 128 * 2 / 16
    assert found.rollout_bytes == pytest.approx(12 * parameters / 16 + 2 * parameters / 4 + cache)
    away = dataclasses.replace(one, optimizer=dataclasses.replace(one.optimizer, offload=True))
    other = plan_search.estimate(away, MODEL, chips.CHIPS["v5e"], 16, roofline.Work.of_config(one))
    assert found.rollout_bytes - other.rollout_bytes == pytest.approx(8 * parameters / 16)


def test_the_fastest_that_fits_comes_first_and_meshes_differ(config: RunConfig) -> None:
    work, chip = roofline.Work.of_config(config), chips.CHIPS["v5e"]
    ordered = plan_search.ranked(config, MODEL, chip, 16, work)
    assert ordered and [one.seconds for one in ordered] == sorted(one.seconds for one in ordered)
    assert len({one.config.mesh for one in ordered}) == len(ordered)
    assert all(max(one.train_bytes, one.rollout_bytes) <= plan_search.ROOM * chip.hbm_bytes for one in ordered)


def test_where_nothing_fits_the_smallest_are_tried(config: RunConfig) -> None:
    small = dataclasses.replace(chips.CHIPS["v5e"], hbm_bytes=GIB)
    ordered = plan_search.ranked(config, MODEL, small, 16, roofline.Work.of_config(config))
    needs = [max(one.train_bytes, one.rollout_bytes) for one in ordered]
    assert needs == sorted(needs) and needs[0] > GIB


def test_only_what_compiled_and_fits_is_named(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def make(one: RunConfig, topology: str, work: roofline.Work, tell: object) -> planning.Plan:
        compiled.append(one)
        return made_plan(config=one, train={"peak": (11 if len(compiled) == 1 else 8) * GIB})

    monkeypatch.setattr(chips, "devices", lambda topology: [None] * 16)
    monkeypatch.setattr(planning, "make", make)
    found = plan_search.search(config, "v5e:4x4", roofline.Work.of_config(config))
    assert [one.plan.fits for one in found if one.plan] == [True, True, False]
    text = list(plan_search.lines(found))
    assert text[-1] == "paste: " + " ".join(found[0].settings()) and f"{CHIP.hbm_bytes}" not in text[-1]
    read = plan.read_flags(["plan", "--config=configs/qwen3_8b.py", "--topology=v5e:4x4", *found[0].settings()])
    assert read.config == found[0].config  # as pasted
    assert math.isclose(plan_search.to_list(found)[0]["estimate"]["seconds"], found[0].seconds)

    monkeypatch.setattr(planning, "make", lambda one, *_: made_plan(config=one, train={"peak": 11 * GIB}))
    nothing = plan_search.search(config, "v5e:4x4", roofline.Work.of_config(config))
    assert len(nothing) == plan_search.TRIED and list(plan_search.lines(nothing))[-1] == "none of them fits"

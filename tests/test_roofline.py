"""Work of a step, and the time it should take, by numbers worked out by hand."""

import dataclasses

import pytest

from envace_jax import chips, roofline
from envace_jax.config import RunConfig, UserError
from envace_jax.models.config import PUBLISHED, QwenConfig, parameter_count
from envace_jax.roofline import Measured, Work

# Per layer: query and output 8 x 2 x 4, key and value 8 x 1 x 4 each, and three of 8 x 16.
MODEL = QwenConfig(vocab_size=100, width=8, layers=3, heads=2, kv_heads=1, head_dim=4, ffn=16)
LAYER = 2 * 64 + 2 * 32 + 3 * 128
WORK = Work(trajectories=2, trained=10, sampled=4, prefilled=6, row_length=10, context=20)


def test_published_sizes_have_the_parameters_of_the_model_cards() -> None:
    """Counts of the safetensors index on the hub, which counts a tied head once."""
    counts = {name.removeprefix("Qwen/Qwen3-"): parameter_count(model) for name, model in PUBLISHED.items()}
    assert counts == {
        "0.6B": 596_049_920, "1.7B": 1_720_574_976, "4B": 4_022_468_096, "8B": 8_190_735_360,
        "14B": 14_768_307_200, "32B": 32_762_123_264,
    }  # fmt: skip


def test_operations_of_a_step_by_hand() -> None:
    assert roofline.matrix_parameters(MODEL) == 3 * LAYER
    head, layers, row = 2 * 100 * 8, 2 * 3 * LAYER, 4 * 3 * 2 * 4 * 5  # a token attends to 5 of 10 on average
    full = roofline.flops(MODEL, WORK, "full")
    # Layers: forward, again, and two products backward. Attention: forward, again, and 2.5 backward. Head: as layers.
    assert full.train == 20 * (4 * layers + 4.5 * row + 4 * head)
    assert roofline.flops(MODEL, WORK, "dots").train == 20 * (3 * layers + 4.5 * row + 4 * head)
    assert roofline.flops(MODEL, WORK, "none").train == 20 * (3 * layers + 3.5 * row + 4 * head)
    assert roofline.flops(MODEL, WORK, "full", frozen_base=True).train == 20 * (3 * layers + 4.5 * row + 3 * head)
    cached = 4 * 3 * 2 * 4 * 10
    assert full.prefill == 2 * 6 * (layers + cached)
    assert full.decode == 2 * 4 * (layers + cached + head)
    assert full.score == 0 and roofline.flops(MODEL, WORK, "full", scored=True).score == 20 * (layers + row + head)


def test_work_of_a_configuration() -> None:
    work = Work.of_config(RunConfig())
    assert (work.trajectories, work.trained, work.sampled, work.prefilled) == (64, 20000, 10000, 10000)
    assert Work.of_config(RunConfig(), trained=500, sampled=200).prefilled == 300


CHIP = chips.Chip("test", 10**9, flops=1000.0, hbm_bandwidth=100.0, ici_bandwidth=10.0, axes=2, source="")
MEASURED = Measured(
    chips=4, slots=2, state_bytes=140.0, decoding_bytes=70.0, cache_bytes=35.0, train_collectives=(12.0, 0.0),
    decode_collectives=(0.6, 10.0), prefill_collectives=(0.0, 0.0), reshard_collectives=(6.0, 0.0),
)  # fmt: skip
DONE = roofline.Flops(train=8000.0, score=0.0, prefill=2000.0, decode=4000.0)


def test_seconds_of_a_step_by_hand() -> None:
    found = roofline.seconds(WORK, DONE, MEASURED, CHIP)
    # 4 chips x 1000 x 0.5 of a peak; memory 70 a second; the interconnect 6.
    assert found["seconds"]["train"] == pytest.approx(8000 / 2000 + 2.5 * 140 / 70)
    assert found["seconds"]["reshard"] == pytest.approx(140 / 70 + 6 / 6)
    assert found["seconds"]["prefill"] == pytest.approx(1.0)
    steps = 2 * 4 / (2 * 0.8)
    assert found["seconds"]["decode"] == pytest.approx(steps * (70 + 0.8 * 35 / 2) / 70 + steps * (0.1 + 10 * 2e-6))
    assert found["bound_by"] == {"train": "products", "reshard": "memory", "prefill": "products", "decode": "memory"}
    assert found["step"] == pytest.approx(sum(found["seconds"].values()))
    assert found["model_flops_share"] == pytest.approx(14000 / (found["step"] * 4000))


def test_what_bounds_training_is_the_slower_of_two() -> None:
    slow = dataclasses.replace(MEASURED, train_collectives=(600.0, 5.0))
    found = roofline.seconds(WORK, DONE, slow, CHIP)
    assert found["bound_by"]["train"] == "collectives"
    assert found["seconds"]["train"] == pytest.approx(100 + 5 * 2e-6 + 5)


def test_chips_are_those_of_the_data_sheets() -> None:
    v5e = chips.CHIPS["v5e"]
    assert (v5e.flops, v5e.hbm_bandwidth, v5e.ici_bandwidth) == (197e12, 819e9, 1600e9 / 8)
    for chip, capacity in (("v5e", 16), ("v5p", 95), ("v6e", 32)):
        # What a program may use is a little less than the sheet's decimal or binary gigabytes.
        assert 0.9 * capacity * 1e9 < chips.CHIPS[chip].hbm_bytes < 1.01 * capacity * 2**30


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v9:2x2", "unknown chip 'v9'; known are v5e, v5p, v6e"),
        ("v5e", "v5e has 2 axes: give v5e:AxB"),
        ("v5e:4", "give v5e:AxB, as in v5e:1x1"),
        ("v5e:0x1", "give v5e:AxB"),
        ("v5p:2x4", "v5p has 3 axes: give v5p:AxBxC"),
        ("gpu", "GPUs are not planned"),
        ("h100:8", "GPUs are not planned"),
        ("A100", "GPUs are not planned"),
    ],
)
def test_unknown_topologies_say_what_is_accepted(name: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        chips.parse(name)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_known_topologies() -> None:
    assert chips.parse("v5e:4x8") == (chips.CHIPS["v5e"], (4, 8))
    assert chips.parse("v5p:2x4x4")[1] == (2, 4, 4)

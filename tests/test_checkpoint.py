"""Checkpoints: exact values, shardings, rotation, and that nothing half-written or foreign is ever picked up."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from envace_jax.checkpoint import CheckpointError, Checkpoints
from envace_jax.types import TrainState

EXTRA = {"seed": 3, "tasks_seen": 48, "nested": {"list": [1, 2.5, None, "é"]}, "third": 1 / 3}


def make_state(seed: int, width: int = 5) -> TrainState:
    """A state with float32, bfloat16 and int32 leaves, NaN, infinity and negative zero among them."""
    values = np.random.default_rng(seed).normal(size=(4, width)).astype(np.float32)
    values[0, :4] = [np.nan, np.inf, -0.0, 1e-42]
    params = {"layer": {"kernel": jnp.asarray(values)}, "norm": jnp.asarray(values[1].astype(jnp.bfloat16))}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    shapes = jax.eval_shape(optimizer.init, params)
    numbers = np.random.default_rng(seed + 100)  # nothing is computed on a device: a test would wait for compilers
    opt_state = jax.tree.map(lambda x: jnp.asarray((numbers.normal(size=x.shape) * 99).astype(x.dtype)), shapes)
    return TrainState(jnp.asarray(np.int32(seed)), params, opt_state)


def assert_bit_equal(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.fixture
def open_checkpoints(tmp_path: Path) -> Any:
    """Opens the checkpoints of one folder, as a run and its restarts would, and closes them at the end."""
    opened: list[Checkpoints] = []

    def open_again(keep: int = 2) -> Checkpoints:
        opened.append(Checkpoints(tmp_path / "checkpoints", keep=keep))
        return opened[-1]

    yield open_again
    for checkpoints in opened:
        checkpoints.close()


Open = Callable[..., Checkpoints]


def test_no_checkpoint_is_none(open_checkpoints: Open) -> None:
    assert open_checkpoints().restore_latest(make_state(0)) is None


def test_restores_the_newest_bit_by_bit(open_checkpoints: Open) -> None:
    first = open_checkpoints()
    first.save(1, make_state(1), EXTRA | {"seed": 1})
    first.save(2, make_state(2), EXTRA)
    first.close()
    found = open_checkpoints().restore_latest(make_state(9))
    assert found is not None
    assert_bit_equal(found[0], make_state(2))
    assert found[1] == EXTRA


def test_the_newest_readable_extra_is_read_without_the_state(open_checkpoints: Open) -> None:
    first = open_checkpoints()
    assert first.latest_extra() is None
    for step in (1, 2):
        first.save(step, make_state(step), EXTRA | {"seed": step})
    first.close()
    again = open_checkpoints()
    assert again.latest_extra() == EXTRA | {"seed": 2}
    shutil.rmtree(again.folder / "2" / "extra")
    assert open_checkpoints().latest_extra() == EXTRA | {"seed": 1}


def test_the_extra_may_be_changed_right_after_saving(open_checkpoints: Open) -> None:
    """It is written in the background, and the run goes on with the same lists and objects."""
    checkpoints, extra = open_checkpoints(keep=8), {"record": {"task": [4.0, 1.0]}, "step": 0}
    for step in range(1, 9):
        extra["step"], extra["record"]["task"] = step, [float(step), 1.0]
        checkpoints.save(step, make_state(step), extra)
    extra["step"] = 9
    checkpoints.wait()
    for step in range(8, 0, -1):
        assert checkpoints.latest_extra() == {"record": {"task": [float(step), 1.0]}, "step": step}
        shutil.rmtree(checkpoints.folder / str(step) / "extra")


def test_restores_onto_shapes_alone(open_checkpoints: Open) -> None:
    first = open_checkpoints()
    first.save(1, make_state(1), EXTRA)
    first.wait()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), make_state(0))
    found = first.restore_latest(template)
    assert found is not None
    assert_bit_equal(found[0], make_state(1))


def test_the_state_may_be_donated_right_after_save(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    state = make_state(1)
    expected = jax.tree.map(np.array, state)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 1, s), donate_argnums=0)
    checkpoints.save(1, state, EXTRA)
    overwrite(state)
    found = checkpoints.restore_latest(make_state(0))
    assert found is not None
    assert_bit_equal(found[0], expected)


def test_keeps_the_newest(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints(keep=2)
    for step in (1, 2, 3, 10):
        checkpoints.save(step, make_state(step), EXTRA)
    checkpoints.wait()
    assert checkpoints.steps() == [3, 10]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["10", "3"]


def test_extra_must_survive_json(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    for extra in ({"a": (1, 2)}, {"a": {1: 2}}):
        with pytest.raises(ValueError, match="must be plain JSON"):
            checkpoints.save(1, make_state(1), extra)
    with pytest.raises(ValueError, match="JSON"):
        checkpoints.save(1, make_state(1), {"a": float("nan")})
    assert checkpoints.steps() == []


def test_saving_a_step_twice_is_an_error(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    checkpoints.save(1, make_state(1), EXTRA)
    with pytest.raises(CheckpointError, match="step 1 is there already"):
        checkpoints.save(1, make_state(2), EXTRA)


def test_a_half_written_folder_is_not_picked_up(open_checkpoints: Open) -> None:
    """What a kill during a save can leave: the temporary folder, or a final one without its commit file."""
    checkpoints = open_checkpoints()
    checkpoints.save(1, make_state(1), EXTRA)
    checkpoints.close()
    folder = checkpoints.folder
    shutil.copytree(folder / "1", folder / "2.orbax-checkpoint-tmp")
    shutil.copytree(folder / "1", folder / "3.orbax-checkpoint-tmp-1795978982")
    (folder / "4").mkdir()
    (folder / "4" / "state").mkdir()
    found = open_checkpoints().restore_latest(make_state(0))
    assert found is not None
    assert_bit_equal(found[0], make_state(1))


def data_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "state").rglob("*") if path.is_file() and path.parent.name == "d"]


def test_a_truncated_checkpoint_is_reported_set_aside_and_the_one_before_used(
    open_checkpoints: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = open_checkpoints()
    for step in (1, 2):
        checkpoints.save(step, make_state(step), EXTRA | {"step": step})
    checkpoints.close()
    for path in data_files(checkpoints.folder / "2"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = open_checkpoints()
    found = again.restore_latest(make_state(0))
    assert found is not None
    assert_bit_equal(found[0], make_state(1))
    assert found[1]["step"] == 1
    again.save(2, make_state(3), EXTRA)  # the continued run comes to step 2 once more
    found = again.restore_latest(make_state(0))
    assert found is not None
    assert_bit_equal(found[0], make_state(3))
    errors = capsys.readouterr().err
    assert f"{checkpoints.folder / '2'}: cannot be read" in errors and "continuing from step 1 instead" in errors


def test_when_none_can_be_read_the_run_does_not_start_afresh(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    checkpoints.save(1, make_state(1), EXTRA)
    checkpoints.close()
    for path in data_files(checkpoints.folder / "1"):
        path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read.*remove the folder to start afresh"):
        open_checkpoints().restore_latest(make_state(0))


def test_a_checkpoint_of_another_model_is_an_error(open_checkpoints: Open) -> None:
    checkpoints = open_checkpoints()
    checkpoints.save(1, make_state(1), EXTRA)
    checkpoints.wait()
    for again in (checkpoints, open_checkpoints()):  # in the run itself, and after a restart
        with pytest.raises(CheckpointError, match=r"kernel is float32\[4, 6\], saved as float32\[4, 5\]"):
            again.restore_latest(make_state(0, width=6))
    smaller = TrainState(jnp.int32(0), {"norm": jnp.zeros(5)}, ())
    with pytest.raises(CheckpointError, match=r"holds 8 arrays, this run has 2"):
        checkpoints.restore_latest(smaller)


def test_save_and_restore_on_a_mesh(run_python: Callable[..., str], tmp_path: Path) -> None:
    """Saved from 8 devices, restored with another split of the same 8: same values, the template's shardings."""
    code = f"""
        import jax, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from envace_jax.checkpoint import Checkpoints
        from envace_jax.sharding import make_mesh

        values = np.arange(64, dtype=np.float32).reshape(8, 8)
        one = NamedSharding(make_mesh(2, 4, 1), P("fsdp", "data"))
        other = NamedSharding(make_mesh(1, 2, 4), P("tensor", None))
        checkpoints = Checkpoints({str(tmp_path)!r})
        checkpoints.save(1, {{"w": jax.device_put(values, one)}}, {{}})
        state, _ = checkpoints.restore_latest({{"w": jax.device_put(values * 0, other)}})
        checkpoints.close()
        assert state["w"].sharding == other, state["w"].sharding
        assert np.array_equal(np.asarray(state["w"]), values)
        print("same values")
    """
    assert "same values" in run_python(code, devices=8)

"""Dumps of steps: exact to the bit, refused in one line where they are not what they should be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax import checksums, dumps, learning, task_sampling
from envace_jax import config as configuration
from envace_jax.config import UserError
from envace_jax.dumps import Dump
from envace_jax.envs import tiny
from envace_jax.learning import Learned, Rollouts
from envace_jax.metrics import json_line, trajectory_record
from envace_jax.rewards import Unscored
from envace_jax.types import Role, Segment, TrainState, Trajectory, TurnScore

FROZEN = {"rollout.players": "frozen_rehearse", "fidelity.calls_per_step": 0}
BEGINNING = tuple(range(100, 140))  # what all prompts to ACT begin with


class Chat:
    """Texts of tokens; half a character is shown as what it is."""

    def decode(self, ids):
        return "\ufffd" if ids == [7] else "".join(f"<{token}>" for token in ids)


def segment(role: Role, prompt: tuple[int, ...], tokens: tuple[int, ...], turn: int = 0) -> Segment:
    logprobs = np.log(np.linspace(0.1, 0.9, len(tokens), dtype=np.float32))
    return Segment(role, np.array(prompt, np.int32), np.array(tokens, np.int32), logprobs, "length", 4, turn, 3)


def trajectory(group: int, attempt: int, reward: float, task_id: str, status: str = "ok") -> Trajectory:
    first = segment(Role.ACT, BEGINNING, (5, 6, attempt))
    played = segment(Role.REHEARSE, (1, 2, 3), (7, attempt))
    second = segment(Role.ACT, (*BEGINNING, 5, 6, attempt, 90, 91), (8,), turn=1)
    score = TurnScore(reward, (np.bool_(True), False), True, ("", "step 1: true"))
    said = ({"role": "user", "content": "hé \ud800</script>"}, {"role": "assistant", "content": ""})
    score_of = (score,) if status == "ok" else ()
    segments = (first, played, second)
    return Trajectory(task_id, group, attempt, segments, reward, status, "done", said, score_of)


def make_rollouts(**config) -> tuple[configuration.RunConfig, Rollouts]:
    """Three groups: rewards that differ and a masked attempt, rewards that are alike, and a rehearsal."""
    tasks = tiny.tasks("train", 2, 0)
    settings = configuration.default_config_dict()
    named = {"data.source": "tiny", "data.count": 2, "model.path": "x", "data.attempts": 3}
    settings.update_from_flattened_dict({**named, "fidelity.calls_per_step": 1, **config})
    chosen = configuration.from_config_dict(settings)
    whole = [trajectory(8, attempt, reward, tasks[0].task_id) for attempt, reward in enumerate((0.25, 1.0))]
    whole += [trajectory(8, 2, np.nan, tasks[0].task_id, "failed")]
    whole += [trajectory(9, attempt, 0.5, tasks[1].task_id) for attempt in range(3)]
    rehearsed = [
        dataclasses.replace(
            trajectory(-5, n, float(n), tasks[0].task_id), segments=(segment(Role.REHEARSE, (4,), (n,)),)
        )
        for n in range(2)
    ]
    gathered = task_sampling.gathered(tasks, whole, 2, filtered=chosen.data.filter_zero_variance)
    return chosen, Rollouts(11, gathered, tuple(rehearsed))


def make_dump(**config) -> Dump:
    chosen, rollouts = make_rollouts(**config)
    advantages, _ = learning.advantages_of(chosen, rollouts)
    metrics = {"loss": 0.1, "agreement": float("nan"), "far": float("inf"), "exact": 1 / 3}
    learned = Learned(None, metrics, tuple(advantages), {})
    return dumps.of_step(chosen, Chat(), rollouts, learned, {"parameters": "ab"}, {"parameters": "cd"}, Unscored())


def same(one: object, other: object) -> bool:
    """Equal to the bit, arrays and nan included."""
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return one == other or (one != one and other != other)


def rewritten(path: Path, **changes: object) -> None:
    """Changes arrays of a dump, or entries of its header."""
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes())
    header |= {name: value for name, value in changes.items() if name not in arrays}
    arrays |= {name: value for name, value in changes.items() if name in arrays}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(path, **arrays)


def test_a_dump_reads_back_bit_by_bit(tmp_path: Path) -> None:
    for number, dump in enumerate((make_dump(), make_dump(**{"data.filter_zero_variance": True}))):
        dumps.write(tmp_path, dump)
        path = tmp_path / "rollouts" / "step_00000012.npz"
        found = dumps.read(path)
        assert same(dump, found) and found.rollouts.step == 11
        assert len(found.rollouts.gathered.trained) == (6, 3)[number]
        # Prompts repeat what came before in their role, and are kept without that.
        with np.load(path, allow_pickle=False) as file:
            assert len(file["prompt_tokens"]) == len(BEGINNING) + 6 * 2 + 3 + 1 and len(file["logprobs"]) == 6 * 6 + 2
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_an_empty_step_reads_back_too(tmp_path: Path) -> None:
    dump = make_dump()
    nothing = Rollouts(0, task_sampling.Gathered((), (), (), 0))
    dumps.write(tmp_path, dataclasses.replace(dump, step=1, rollouts=nothing, advantages=(), trained=(), pieces={}))
    assert dumps.read(dumps.file_of(tmp_path, 1)).rollouts == nothing
    assert dumps.records(dumps.file_of(tmp_path, 1)) == []


def test_records_are_those_of_trajectories_jsonl(tmp_path: Path) -> None:
    chosen, rollouts = make_rollouts()
    advantages, _ = learning.advantages_of(chosen, rollouts)
    lessons = learning.lessons(chosen, Chat(), rollouts, Learned(None, {}, tuple(advantages), {}))
    wanted = [
        {"step": 12, **trajectory_record(*both)} for both in zip(rollouts.gathered.trajectories, lessons, strict=True)
    ]
    dumps.write(tmp_path, make_dump())
    found = dumps.records(dumps.file_of(tmp_path, 12))
    assert list(map(json_line, found)) == list(map(json_line, wanted)) and len(found) == 6
    (first, played, _) = json.loads(json_line(found[0]))["segments"]
    assert first["pieces"] == ["<5>", "<6>", "<0>"] and played["pieces"][0] == "\ufffd"
    assert first["advantage"] == 0.25 - 0.625 and first["trained"]
    assert found[0]["turns"][0]["words"] == ("", "step 1: true")
    assert found[0]["task"]["reference"] and found[0]["task"]["checklist"][0][0]["question"]
    assert all(entry["advantage"] is None and not entry["trained"] for entry in found[2]["segments"])


@pytest.mark.parametrize(
    ("changes", "trained"),
    [  # of the first attempt of the group that differs: (ACT, REHEARSE, ACT); and of the group that is alike
        ({}, ((1, 1, 1), (1, 1, 1))),
        ({"batch.drop_zero_advantage": True}, ((1, 1, 1), (0, 0, 0))),
        ({"data.filter_zero_variance": True}, ((1, 1, 1), (0, 0, 0))),
        ({"rollout.players": "frozen_act"}, ((0, 1, 0), (0, 1, 0))),
        ({**FROZEN, "batch.layout": "segment"}, ((1, 0, 1), (1, 0, 1))),
        ({"rollout.players": "separate", "batch.drop_zero_advantage": True}, ((1, 1, 1), (0, 0, 0))),
    ],
)
def test_what_is_trained_is_what_the_batch_has_in_its_mask(changes, trained) -> None:
    chosen, rollouts = make_rollouts(**changes)
    dump = make_dump(**changes)
    assert [tuple(dump.trained[place].tolist()) for place in (0, 3)] == [tuple(map(bool, one)) for one in trained]
    assert not dump.trained[2].any()
    advantages, _ = learning.advantages_of(chosen, rollouts)
    in_mask = 0
    for roles in learning.players.LEARNERS[chosen.rollout.players].values():
        batch, _ = learning.make_batch(
            *learning.players.of_roles(rollouts.learned, advantages, roles), layout=chosen.batch.layout, row_length=64,
            drop_zero_advantage=chosen.batch.drop_zero_advantage,
        )  # fmt: skip
        in_mask += batch.loss_mask.sum()
    both = zip(rollouts.all, dump.trained, strict=True)
    assert in_mask == sum(len(s.tokens) for t, mask in both for s, kept in zip(t.segments, mask, strict=True) if kept)


def test_what_is_no_dump_is_refused_in_one_line(tmp_path: Path) -> None:
    dumps.write(tmp_path, make_dump())
    path = dumps.file_of(tmp_path, 12)
    whole = path.read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match) as caught:
            dumps.read(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
        path.write_bytes(whole)

    rewritten(path, version=2)
    refused("a dump of version 2; this envace_jax reads version 1")
    rewritten(path, header_of="another", format="something")
    refused("a dump of version 1; this envace_jax|version")
    rewritten(path, tokens=np.arange(3, dtype=np.int32))
    refused("do not fit together")
    rewritten(path, logprobs=np.arange(38, dtype=np.float64))
    refused("logprobs is float64")
    rewritten(path, tasks=[{"task_id": "x"}])
    refused("do not fit together")
    for damaged in (b"", whole[:-200], b"hello" * 100, whole[:400] + b"\xff" * 40 + whole[440:]):
        path.write_bytes(damaged)
        refused("not a readable dump")
    rewritten(path, step=11)
    refused("the dump of step 11, under the name of another")
    rewritten(path, batches=[])
    refused("do not fit together .TypeError: batches is no object")
    rewritten(path, advantages=np.zeros(1, np.float32))
    refused("advantages tells of 1 segments")
    rewritten(path, tasks=[])
    refused("which is none of its tasks")
    np.save(path.with_suffix(".npy"), np.arange(3))
    array = path.with_suffix(".npy").read_bytes()
    # A byte of the first entry's compression method, of its flags, and of the version that is needed to read it.
    entry = whole.index(b"PK\x01\x02")
    others = [
        whole[: entry + at] + bytes([value]) + whole[entry + at + 1 :] for at, value in ((10, 77), (8, 1), (6, 99))
    ]
    for damaged in (array, *others):
        path.write_bytes(damaged)
        refused("not a readable dump")
    path.unlink()
    with pytest.raises(UserError, match="no such dump; logging.dump_every=1"):
        dumps.read(path)


def test_nothing_in_a_dump_is_run(tmp_path: Path) -> None:
    """Arrays of objects are pickles: they are refused unread."""
    dumps.write(tmp_path, make_dump())
    path = dumps.file_of(tmp_path, 12)
    rewritten(path, rewards=np.array([object()] * 8, object))
    with pytest.raises(UserError, match="not a readable dump"):
        dumps.read(path)


def test_later_dumps_are_dropped(tmp_path: Path) -> None:
    dump = make_dump()
    for step in (1, 2, 10, 123456789):
        dumps.write(tmp_path, dataclasses.replace(dump, step=step))
    (tmp_path / "rollouts" / ".step_00000003.npz.99.tmp").write_bytes(b"half")
    (tmp_path / "rollouts" / "notes.txt").write_text("mine")
    assert dumps.steps(tmp_path) == [1, 2, 10, 123456789]
    dumps.drop_after(tmp_path, 2)
    assert dumps.steps(tmp_path) == [1, 2]
    assert len(list((tmp_path / "rollouts").iterdir())) == 3
    dumps.drop_after(tmp_path, 0)
    assert dumps.steps(tmp_path) == []
    dumps.drop_after(tmp_path / "none", 0)


# --- checksums ---


def test_a_checksum_sees_every_bit_and_every_place() -> None:
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.array([1, 2], jnp.bfloat16), "c": jnp.int8(3)}
    known = checksums.of_tree(tree)
    assert checksums.of_tree(jax.tree.map(jnp.copy, tree)) == known and len(known) == 16
    others = [
        tree | {"a": tree["a"].at[1, 2].set(np.nextafter(np.float32(5), np.float32(6)))},
        tree | {"a": tree["a"].at[0, 0].set(-0.0)},
        tree | {"a": tree["a"][::-1]},  # the same numbers in other places
        tree | {"a": tree["a"].reshape(3, 2)},
        tree | {"b": tree["b"].at[0].set(1.0078125)},
        tree | {"c": jnp.int8(-3)},
        {"a": tree["a"], "b": tree["b"], "d": tree["c"]},
    ]
    found = [checksums.of_tree(other) for other in others]
    assert known not in found and len(set(found)) == len(found)


def test_a_state_has_a_checksum_for_each_part() -> None:
    state = TrainState(jnp.int32(1), {"w": jnp.ones(3)}, (jnp.zeros(3),))
    one = checksums.of_state(state)
    assert one.keys() == {"parameters", "optimizer"}
    later = checksums.of_state(dataclasses.replace(state, step=jnp.int32(2)))
    assert later["parameters"] == one["parameters"] and later["optimizer"] != one["optimizer"]
    both = checksums.of_state({"act": state, "rehearse": dataclasses.replace(state, params={"w": jnp.zeros(3)})})
    assert both["parameters of act"] == one["parameters"] != both["parameters of rehearse"]
    assert len(both) == 4


def test_sharding_does_not_change_a_checksum(run_python) -> None:
    code = """
        import jax, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from envace_jax import checksums
        from envace_jax.sharding import make_mesh

        mesh = make_mesh(1, 2, 2)
        array = np.random.default_rng(0).normal(size=(8, 12, 6)).astype(np.float32)
        alone = jax.device_put(array, jax.devices()[0])
        axes = mesh.axis_names
        spread = [jax.device_put(array, NamedSharding(mesh, spec)) for spec in (P(), P(axes[1]), P(axes[2], axes[1]))]
        assert {checksums.of_tree(x) for x in spread} == {checksums.of_tree(alone)}
        kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
        if "pinned_host" in kinds:
            place = NamedSharding(mesh, P(axes[1]), memory_kind="pinned_host")
            assert checksums.of_tree(jax.device_put(array, place)) == checksums.of_tree(alone)
        print("alike", kinds)
    """
    assert "alike" in run_python(code, devices=4)

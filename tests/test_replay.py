"""Replays of dumped steps: bit-equal, and what differs is named."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from concurrent.futures import Future
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_dumps import FROZEN, make_rollouts, rewritten
from train_helpers import tiny_config

from envace_jax import checksums, dumps, explaining, learning, replay, replaying, rescoring, task_sampling, train
from envace_jax.checkpoint import Checkpoints
from envace_jax.config import UserError
from envace_jax.learning import Rollouts
from envace_jax.metrics import json_line
from envace_jax.rewards import choose
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.rewards.judge import JudgedReward
from envace_jax.sharding import make_mesh
from envace_jax.types import CheckItem, Role, Segment, Task, Trajectory, TurnScore

NO_EVALUATION = {"evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0}
DUMPED = NO_EVALUATION | {"logging.dump_every": 1, "warm_up": False, "compilation_cache": "off"}


def polite(task_id: str) -> Task:
    """A task of two turns that a reply solves: half for a yes, half for a thank you."""
    items = tuple(
        CheckItem(f"Is it {word}?", 0.5, check={"kind": "reply", "words": [word]}) for word in ("yes", "thanks")
    )
    return Task(task_id, ({"role": "system", "content": "s"},), (), ("well?", "and?"), (items, items))


def attempt(task: Task, group: int, number: int, replies: tuple[str, ...], seed: int) -> Trajectory:
    """An attempt with these replies, scored as a run would; its tokens are random."""
    draw = np.random.default_rng((seed, group + 100, number))
    messages = list(task.messages)
    segments, scores = [], []
    prompt = draw.integers(3, 700, 20).astype(np.int32)
    for turn, reply in enumerate(replies):
        messages += [{"role": "user", "content": task.user_turns[turn]}, {"role": "assistant", "content": reply}]
        for role in (Role.ACT, Role.REHEARSE)[: 1 + (turn + number) % 2]:
            tokens, logprobs = draw.integers(3, 700, 5).astype(np.int32), -draw.random(5).astype(np.float32)
            segments.append(Segment(role, prompt, tokens, logprobs, "stop", 0, turn))
            prompt = np.concatenate([prompt, tokens, [7]]).astype(np.int32)
        scores.append(ChecklistReward().score_turn(task, turn, messages[-2:]).result())
    reward = rescoring.earned(task, scores)
    return Trajectory(
        task.task_id, group, number, tuple(segments), reward, "ok", "done", tuple(messages), tuple(scores)
    )


def make_step(step: int, filtered: bool = False) -> Rollouts:
    """A group that differs and has a masked attempt, one that is rewarded alike, and rehearsals."""
    tasks = (polite("differs"), polite("alike"))
    replies = (("yes", "thanks yes"), ("no", "no"), ("yes", "thanks"), ("yes thanks", "yes thanks"))
    whole = [attempt(tasks[0], 2 * step, number, said, step) for number, said in enumerate(replies)]
    whole[2] = dataclasses.replace(whole[2], status="failed", reward=np.nan, reason="fault: it broke")
    whole += [attempt(tasks[1], 2 * step + 1, number, ("yes", "no"), step) for number in range(4)]
    rehearsed = [
        dataclasses.replace(
            attempt(tasks[0], -1 - step, number, ("", ""), step), reward=float(number % 2), turn_scores=(), messages=()
        )
        for number in range(2)
    ]
    return Rollouts(step, task_sampling.gathered(tasks, whole, 2, filtered=filtered), tuple(rehearsed))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


@pytest.fixture(scope="module")
def played(tmp_path_factory, mesh):
    """A work folder of three dumped steps and the first one's checkpoint, and what it was made with."""
    folder = tmp_path_factory.mktemp("played") / "run"
    config = tiny_config(**DUMPED, **{"fidelity.calls_per_step": 1, "fidelity.attempts": 2, "fidelity.weight": 0.5})
    learner, begin = replaying.load(config, mesh)
    state = jax.tree.map(jnp.copy, begin)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in range(3):
            before, rollouts = checksums.of_state(state), make_step(step)
            learned = learning.learn_from(learner, state, rollouts)
            state, after = learned.state, checksums.of_state(learned.state)
            chat = learner.prompts.chat
            dumps.write(folder, dumps.of_step(config, chat, rollouts, learned, before, after, ChecklistReward()))
            if step == 0:
                checkpoints.save(1, state, {"step": 1})
    return folder, learner, begin


@pytest.fixture
def command(played, tmp_path, monkeypatch):
    """Runs the command on a copy of the folder, with the model that is loaded already."""
    folder, learner, begin = played
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    load = lambda config, _: (dataclasses.replace(learner, config=config), jax.tree.map(jnp.copy, begin))  # noqa: E731
    monkeypatch.setattr(replaying, "load", load)
    return copy, lambda *flags: replay.run(["replay", str(copy), *flags])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_step_comes_out_as_it_was(command, capsys):
    """From the run's model, from a checkpoint, and from a checkpoint and a dump; the folder stays as it is."""
    folder, run = command
    before = contents(folder)
    begins = ("the model that the run began with", "the checkpoint of step 1", "step 1 and the dump of step 2")
    for step, begin in enumerate(begins, start=1):
        assert run(f"--step={step}") == 0
        told = capsys.readouterr().out
        assert begin in told and "DIFFERS" not in told and "14 by program checks" in told
        count = int(told.splitlines()[-1].split()[0])
        assert told.splitlines()[-1] == f"{count} of {count} quantities are equal, bit by bit" and count > 50
        for name in ("rewards", "advantages", "batch old_logprobs", "loss", "fidelity_reward", "parameters after"):
            assert f"\n{name} " in told
    assert "step 2: as dumped" in told
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("array", "place", "named"),
    [
        ("rewards", 1, ["rewards", "task differs attempt 1: 0.9 -> 0"]),
        ("rewards", 8, ["fidelity_reward", "parameters after"]),  # a rehearsal's, which is learned from as it stands
        ("logprobs", 3, ["batch old_logprobs", "logprob_diff"]),
        ("prompt_tokens", 0, ["batch tokens", "parameters after"]),
        ("tokens", 0, ["batch tokens", "parameters after"]),
        ("advantages", 0, ["advantages", "task differs attempt 0"]),
        ("metric_values", 0, ["advantage_abs_act"]),
        ("before", None, ["parameters before"]),
        ("messages", None, ["rewards", "verdicts", "task differs attempt 0: 0.75 -> 0.5", "parameters after"]),
    ],
)
def test_what_was_changed_is_found_and_named(command, capsys, array, place, named):
    folder, run = command
    path = dumps.file_of(folder, 2)
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes())
    if array == "before":
        rewritten(path, before={"parameters": "0" * 16, "optimizer": header["before"]["optimizer"]})
    elif array == "messages":
        header["trajectories"][0]["messages"][2]["content"] = "hm"
        rewritten(path, trajectories=header["trajectories"])
    else:
        values = arrays[array].copy()
        values[place] = 0.9 if array == "rewards" else values[place] + 1
        rewritten(path, **{array: values})
    assert run("--step=2") == 1
    told = capsys.readouterr()
    assert "DIFFERS" in told.out and told.err.count("\n") == 1
    for text in named:
        assert text in told.out
    assert f"error: {folder}: differs: " in told.err and named[0] in told.err


def test_other_settings_show_what_they_would_have_changed(command, capsys):
    folder, run = command
    assert run("--step=2", "--config.grpo.baseline=leave_one_out") == 0
    told = capsys.readouterr()
    different = {line.split("  ")[0] for line in told.out.splitlines() if line.endswith("DIFFERS")}
    assert {"advantages", "batch advantages", "loss", "parameters after"} <= different
    assert not {"rewards", "batch tokens", "parameters before", "reward"} & different and told.err == ""
    assert run("--step=2", "--config.data.filter_zero_variance=True") == 0
    told = capsys.readouterr().out
    assert "groups_left_out" in told and "trained" in told
    for flag, match in (
        ("--config.sampler.temperature=0.5", "a replay may change grpo.*"),
        ("--config.lora.rank=4", "a replay may change grpo.*"),
        ("--config.grpo.basline=x", "grpo.basline: unknown setting; the closest known: grpo.baseline"),
        ("--config.grpo.baseline=x", "grpo.baseline: expected one of segment_mean"),
        ("--config.grpo.kl_coef=0.1", "batch.drop_zero_advantage: with grpo.kl_coef=0.1"),
    ):
        assert run("--step=2", flag) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1 and match in told


def test_a_place_of_this_machine_is_no_other_setting(played, command, capsys, monkeypatch):
    """Nothing but where the model is read from changes, and the step is still to come out as it was."""
    _, run = command
    seen, load = [], replaying.load
    monkeypatch.setattr(replaying, "load", lambda config, mesh: (seen.append(config.model.path), load(config, mesh))[1])
    assert run("--step=3", "--config.model.path=elsewhere", "--config.mesh.data=1") == 0
    told = capsys.readouterr().out
    assert seen == ["elsewhere"] and "step 2: as dumped" in told and "DIFFERS" not in told


def test_a_step_between_of_other_settings_is_refused(command, capsys):
    folder, run = command
    settings = dumps.read(dumps.file_of(folder, 2)).settings
    rewritten(dumps.file_of(folder, 2), settings={**settings, "mesh": {"data": 2, "fsdp": 1, "tensor": 1}})
    assert run("--step=3") == 2
    assert "the dump of step 2 is of other settings: mesh.data: 2 -> 1" in capsys.readouterr().err


def test_other_steps_are_other_settings_where_the_learning_rate_is_stretched_over_them(command):
    dump = dumps.read(dumps.file_of(command[0], 2))
    for schedule in ("constant", "cosine"):
        settings = {**dump.settings, "optimizer": {**dump.settings["optimizer"], "schedule": schedule}}
        between = dataclasses.replace(dump, settings={**settings, "steps": 99})
        refused = (
            contextlib.nullcontext() if schedule == "constant" else pytest.raises(UserError, match="steps: 99 -> ")
        )
        with refused:
            replaying._check_settings(between, settings)


def test_what_is_missing_is_said_in_one_line(command, capsys, tmp_path):
    folder, run = command
    (tmp_path / "bare").mkdir()

    def refused(arguments: list[str], match: str) -> None:
        assert replay.run(["replay", *arguments]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1 and match in told, told

    refused([str(tmp_path / "none"), "--step=1"], "no such folder; give the work folder of a run")
    refused([str(tmp_path / "bare"), "--step=1"], "holds no dumps of steps; a run writes them with --config.logging")
    refused([str(folder), "--step=4"], "holds dumps of steps 1 to 3")
    refused([str(folder)], "--step is missing")
    refused([str(folder), "--step=x"], "--step")
    refused([str(folder), "--step=1", "--stop"], "there is no flag --stop")
    refused([str(folder), "another", "--step=1"], "2 work folders are given")
    dumps.file_of(folder, 2).unlink()
    refused(
        [str(folder), "--step=3"], "that of the checkpoint of step 1, and from there the dumps of step 2 are missing"
    )
    refused([str(folder), "--step=2"], "holds dumps of steps 1, 3")
    shutil.rmtree(folder / "checkpoints")
    refused([str(folder), "--step=3"], "that of the model that the run began with")
    dumps.file_of(folder, 1).write_bytes(b"PK")
    refused([str(folder), "--step=1"], "not a readable dump")


def test_a_damaged_checkpoint_is_named(command, capsys):
    folder, run = command
    for path in (folder / "checkpoints" / "1").rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(b"x" * 100)
    assert run("--step=2") == 2
    told = capsys.readouterr().err
    assert "cannot be read" in told and str(folder / "checkpoints" / "1") in told
    assert (folder / "checkpoints" / "1").is_dir()  # a replay moves nothing away


# --- scores ---


def test_turns_are_those_that_were_scored():
    task = polite("x")
    said = ("s", "well?", "yes", "and?", "thanks")
    messages = tuple({"role": "user" if text.endswith("?") else "assistant", "content": text} for text in said)
    messages = ({"role": "system", "content": "s"}, *messages[1:])
    assert [m["content"] for m in rescoring.turn_messages(task, messages, 0)] == ["well?", "yes"]
    assert [m["content"] for m in rescoring.turn_messages(task, messages, 1)] == ["and?", "thanks"]
    played = dataclasses.replace(task, scenario="You ask.", user_turns=("well?",))
    assert len(rescoring.turn_messages(played, messages, 0)) == 4
    going_on = dataclasses.replace(task, user_turns=(), messages=messages[:4])
    assert [m["content"] for m in rescoring.turn_messages(going_on, messages, 0)] == ["and?", "thanks"]


def test_judged_items_come_from_kept_verdicts_or_from_the_dump(tmp_path):
    """Two items are judged and one is checked; the judge is never asked again."""
    checked = CheckItem("Is it yes?", 0.5, check={"kind": "reply", "words": ["yes"]})
    items = (checked, CheckItem("Is it kind?", 0.25), CheckItem("Is it short?", 0.25))
    task = Task("t", (), (), ("well?",), (items,))
    said = ({"role": "user", "content": "well?"}, {"role": "assistant", "content": "yes"})

    def ask(messages, read, **options):
        answer = Future()
        answer.set_result(read('{"verdicts": [[true, false]]}'))
        return answer

    cache = tmp_path / choose.VERDICTS_FILE
    config = tiny_config(**{"reward.kind": "judge", "reward.urls": ("http://nowhere.invalid",), "reward.model": "j"})
    options = choose.sampling_options(config.reward)
    judge = JudgedReward(ask, name="j", cache=cache, options=options)
    score = judge.score_turn(task, 0, said).result()
    judge.close()
    assert score == TurnScore(0.75, (True, True, False), True) and score.words == ("", "step 1: true", "step 1: false")
    one = Trajectory("t", 0, 0, (), 0.75, "ok", "done", said, (score,))
    # In the dump the judge found otherwise, so that it shows who was believed.
    dumped = dataclasses.replace(one, reward=0.75, turn_scores=(TurnScore(0.75, (False, False, True), True),))
    rollouts = Rollouts(0, task_sampling.gathered([task], [dumped], 1, filtered=False))
    before = cache.read_bytes()
    for folder, reward, source in (
        (tmp_path, 0.75, rescoring.KEPT),
        (tmp_path / "else", 0.75, rescoring.DUMPED_VERDICTS),
    ):
        kept = choose.kept(config.reward, folder)
        found, sources = rescoring.rescored(rollouts, kept, filtered=False)
        (after,) = found.gathered.trajectories
        assert after.reward == reward and sources == {source: 1}
        wanted = (True, True, False) if folder == tmp_path else (True, False, True)
        assert after.turn_scores[0].verdicts == wanted
    assert cache.read_bytes() == before and not (tmp_path / "else").exists()
    assert rescoring.rescored(rollouts, None, filtered=False) == (rollouts, {rescoring.DUMPED: 1})


def test_a_masked_attempt_stays_masked_whatever_it_had_earned():
    rollouts = make_step(0)
    found, _ = rescoring.rescored(rollouts, ChecklistReward(), filtered=False)
    masked = found.gathered.trajectories[2]
    assert masked.status == "failed" and np.isnan(masked.reward)
    again, _ = rescoring.rescored(rollouts, ChecklistReward(), filtered=True)
    assert {trajectory.task_id for trajectory in again.gathered.trained} == {"differs"}


# --- explanations ---


def explained(asked: str, **changes) -> str:
    config = tiny_config(**DUMPED, **{"fidelity.calls_per_step": 1, "fidelity.weight": 0.5, **changes})
    return "\n".join(explaining.explain(make_step(4, config.data.filter_zero_variance), config, asked))


def test_an_explanation_shows_sums_that_a_hand_can_check():
    """ACT: 6 segments of 3 attempts, rewards 0.75, 0 and 1 twice each; REHEARSE: one of each."""
    told = explained("differs")
    assert "group 8: 4 attempts; grpo.baseline=segment_mean grpo.scale=none grpo.singleton=raw" in told
    assert "attempt 2: masked (fault: it broke); ACT 2 segments (10 tokens), REHEARSE 1 segment (5 tokens)" in told
    assert "ACT: 6 segments of 3 attempts are compared, and divided by 1" in told
    assert "attempt 0: advantage +0.166667 = (0.75 - 0.583333) / 1; trained: 10 tokens in the loss mask" in told
    assert "attempt 2: advantage 0, enters no baseline; not trained: a fault outside the policy masks" in told
    assert "group -5: 2 rehearsals of a held-out result" in told and "x fidelity.weight 0.5" in told
    alone = explained("differs:1")
    assert "attempt 1: advantage -0.583333 =" in alone and "attempt 0: advantage" not in alone


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "not trained: batch.drop_zero_advantage leaves it out; its tokens count"),
        ({"batch.drop_zero_advantage": False}, "attempt 3: advantage +0; trained: 10 tokens"),
        ({"data.filter_zero_variance": True}, "not trained: data.filter_zero_variance leaves groups"),
        ({"rollout.players": "frozen_act"}, "not trained: nobody learns ACT (rollout.frozen_checkpoint: frozen_act)"),
        (FROZEN, "not trained: nobody learns REHEARSE"),
    ],
)
def test_an_explanation_says_why_a_group_without_advantage_is_not_trained(changes, text):
    told = explained("alike", **changes)
    assert "their rewards differ by less than 1e-06, so every advantage is 0" in told and text in told


def test_a_lone_segment_and_a_scale_are_explained():
    told = explained("differs", **{"grpo.scale": "std"})
    assert f"and divided by {np.std([0.75, 0.75, 0, 0, 1, 1], ddof=1):.6g}" in told
    config, rollouts = make_rollouts(**{"grpo.singleton": "zero"})
    lone = dataclasses.replace(rollouts.gathered, trajectories=rollouts.gathered.trajectories[:1])
    lone = dataclasses.replace(lone, trained=lone.trajectories)
    told = "\n".join(explaining.explain(Rollouts(0, lone), config, lone.trajectories[0].task_id))
    assert "REHEARSE: 1 segment of 1 attempt, too few to be compared: the advantage is 0 (grpo.singleton=zero)" in told
    for asked, match in (("nobody", "has no such task; it has differs, alike"), ("alike:9", "the attempts 0, 1, 2, 3")):
        with pytest.raises(UserError, match=match):
            explained(asked)


def test_an_explanation_needs_no_model(command, capsys, monkeypatch):
    folder, run = command
    monkeypatch.setattr(replaying, "load", None)
    assert run("--step=2", "--explain=differs:0") == 0
    assert "step 2, task differs" in capsys.readouterr().out
    assert run("--step=2", "--explain=differs:0", "--config.grpo.baseline=trajectory_mean") == 0
    assert "grpo.baseline=trajectory_mean" in capsys.readouterr().out


# --- runs ---


def replayed(folder: Path, steps: range, capsys) -> None:
    for step in steps:
        assert replay.run(["replay", str(folder), f"--step={step}"]) == 0, step
        told = capsys.readouterr().out
        assert "DIFFERS" not in told and "quantities are equal, bit by bit" in told


def test_two_steps_of_a_run_are_replayed_and_dumped_again_as_they_were(tmp_path, mesh, capsys, monkeypatch):
    """And a run that goes on from the first step drops what was dumped after it."""
    folder, settings = tmp_path / "run", {"steps": 2, "batch.layout": "packed"}
    setup, state = train.build(tiny_config(**DUMPED, **settings), mesh)
    monkeypatch.setattr(train, "build", lambda *_: (setup, jax.tree.map(jnp.copy, state)))
    monkeypatch.setattr(replaying, "load", lambda *_: (setup, jax.tree.map(jnp.copy, state)))
    train.run(setup.config, mesh, folder)
    capsys.readouterr()
    replayed(folder, range(1, 3), capsys)
    records = [json.loads(json_line(record)) for record in dumps.records(dumps.file_of(folder, 2))]
    samples = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    assert len(records) == 8 and samples[2:] == [records[0], records[4]]
    whole = {step: dumps.file_of(folder, step).read_bytes() for step in (1, 2)}
    dumps.file_of(folder, 3).write_bytes(whole[2])
    shutil.rmtree(folder / "checkpoints" / "2")
    train.run(setup.config, mesh, folder)
    assert dumps.steps(folder) == [1, 2]
    assert {step: dumps.file_of(folder, step).read_bytes() for step in (1, 2)} == whole


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "segment"])
def test_ten_steps_of_a_run_are_replayed_bit_by_bit(tmp_path, mesh, capsys, layout):
    """Each by the command alone, which loads the model and compiles the step; from checkpoints and from dumps."""
    rows = {"batch.row_buckets": (24 if layout == "packed" else 160,), "checkpoint.every": 4, "checkpoint.keep": 2}
    more = {"steps": 10, "batch.layout": layout, "fidelity.calls_per_step": 1}
    train.run(tiny_config(**{**DUMPED, **rows, **more}), mesh, tmp_path / "run")
    capsys.readouterr()
    replayed(tmp_path / "run", range(1, 11), capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rollout.players": "separate"},
        {"lora.rank": 4, "grpo.kl_coef": 0.1, "batch.drop_zero_advantage": False},
        {"data.filter_zero_variance": True, "data.extra_rollouts": 1, "optimizer.moments_dtype": "int8"},
    ],
    ids=["separate", "adapters", "filtered"],
)
def test_other_ways_to_learn_are_replayed_bit_by_bit(tmp_path, mesh, capsys, options):
    settings = {"steps": 3, "batch.row_buckets": (40,), "checkpoint.every": 2}
    train.run(tiny_config(**{**DUMPED, **settings, **options}), mesh, tmp_path / "run")
    capsys.readouterr()
    replayed(tmp_path / "run", range(1, 4), capsys)

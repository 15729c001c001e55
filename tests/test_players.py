"""Who plays and who learns: on the tiny base, each role's parameters depend on that role's tokens alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_train import run_killed_at, untimed
from train_helpers import ROOT, bits, tiny_config

from envace_jax import config as configuration
from envace_jax import learning, parts, players, train, train_step
from envace_jax.checkpoint import Checkpoints
from envace_jax.grpo import role_advantages
from envace_jax.inputs import read_inputs
from envace_jax.models import hf
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.sample_requests import SamplerStats
from envace_jax.sharding import make_mesh
from envace_jax.types import Role, Segment, Trajectory

BASE = ROOT / "envace_jax" / "assets" / "tiny_base"
SMALL = {
    "sampler.prefill_lengths": (256,), "data.attempts": 3, "evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0,
    "evaluation.fidelity_calls": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


def config(**changes):
    return tiny_config(**{**SMALL, **changes})


def copied(state):
    return jax.tree.map(jnp.copy, state)


def tokens(trajectories):
    return [[(s.role, s.prompt_tokens.tolist(), s.tokens.tolist()) for s in t.segments] for t in trajectories]


@dataclasses.dataclass
class Step:
    """The first iteration of a run under each of the settings."""

    setup: train.Setup
    begun: list[bytes]  # the state before
    frozen: list[bytes]  # parameters in decoding form, before
    state: players.State
    metrics: dict
    trajectories: list
    compiled: int  # the sampler's programs before the iteration


@pytest.fixture(scope="module")
def steps(mesh) -> dict[str, Step]:
    found = {}
    for kind in players.LEARNERS:
        setup, state = train.build(config(**{"rollout.players": kind}), mesh)
        begun, frozen = bits(state), bits(setup.cast.frozen)
        if kind == "separate":  # the others compile as they go
            state = train.compile_all(setup, state)
            assert bits(state) == begun
        compiled = setup.cast.sampler.compile_count
        found[kind] = Step(setup, begun, frozen, *train.iterate(setup, state, 0), compiled)
    return found


def test_all_begin_with_the_same_tokens(steps):
    """Same parameters and same keys: who holds the parameters, and which sampler draws, changes no token."""
    first = tokens(steps["shared"].trajectories)
    assert {role for trajectory in first for role, *_ in trajectory} == {Role.ACT, Role.REHEARSE}
    for kind in ("separate", "frozen_act", "frozen_rehearse"):
        assert tokens(steps[kind].trajectories) == first, kind
        assert steps[kind].setup.cast.rehearse_sampler.stats.decoded_tokens > 0
    assert steps["separate"].begun == steps["shared"].begun * 2


def test_each_learner_counts_its_own_roles_tokens(steps):
    sampled = {role: sum(len(s.tokens) for t in steps["shared"].trajectories for s in t.segments if s.role is role)
               for role in Role}  # fmt: skip
    expected = {
        "shared": list(Role),
        "separate": list(Role),
        "frozen_act": [Role.REHEARSE],
        "frozen_rehearse": [Role.ACT],
    }
    for kind, roles in expected.items():
        metrics = steps[kind].metrics
        for role in Role:
            name = role.name.lower()
            assert metrics[f"tokens_{name}"] == (sampled[role] if role in roles else 0), (kind, role)
            assert (metrics[f"advantage_abs_{name}"] > 0) is (role in roles), (kind, role)
        assert metrics["tokens"] == sum(sampled[role] for role in roles)
        assert metrics["skipped"] == 0 and metrics["update_norm"] > 0
    metrics = steps["separate"].metrics
    assert metrics["grad_norm_act"] == steps["frozen_rehearse"].metrics["grad_norm"]  # clipped each by its own norm
    assert metrics["grad_norm_rehearse"] == steps["frozen_act"].metrics["grad_norm"]


def test_an_update_depends_on_the_learners_own_tokens_alone(steps):
    """Separate parameters move exactly as they would with the other role frozen, and otherwise than shared ones."""
    separate = steps["separate"].state
    assert bits(separate["act"]) == bits(steps["frozen_rehearse"].state)
    assert bits(separate["rehearse"]) == bits(steps["frozen_act"].state)
    moved = [bits(state.params) for state in (separate["act"], separate["rehearse"], steps["shared"].state)]
    assert moved[0] != moved[1] and moved[1] != moved[2] and moved[0] != moved[2]


def test_advantages_of_one_role_reach_only_its_own_learner(steps):
    step = steps["separate"]
    advantages, _ = role_advantages(step.trajectories)
    plain, *_ = learning.learn(step.setup, copied(step.state), step.trajectories, advantages)
    for role in Role:
        changed = [
            np.where([s.role is role for s in t.segments], 3.0 * values + 0.5, values).astype(np.float32)
            for t, values in zip(step.trajectories, advantages, strict=True)
        ]
        new, *_ = learning.learn(step.setup, copied(step.state), step.trajectories, changed)
        for name in ("act", "rehearse"):
            assert (bits(new[name]) == bits(plain[name])) is (name != role.name.lower()), (role, name)


@pytest.mark.parametrize("role", list(Role))
def test_a_frozen_role_is_played_by_what_it_was_and_trains_nothing(steps, role):
    """After two steps, and whatever advantage its tokens are given."""
    step = steps[f"frozen_{role.name.lower()}"]
    setup, state = step.setup, step.state
    state, _, trajectories = train.iterate(setup, copied(state), 1)
    assert bits(setup.cast.frozen) == step.frozen
    act, rehearser = setup.cast.players(state)
    assert (rehearser if role is Role.REHEARSE else act).params is setup.cast.frozen
    advantages, _ = role_advantages(trajectories)
    wild = [
        np.where([s.role is role for s in t.segments], 1e3, values).astype(np.float32)
        for t, values in zip(trajectories, advantages, strict=True)
    ]
    ends = [bits(learning.learn(setup, copied(state), trajectories, values)[0]) for values in (advantages, wild)]
    assert ends[0] == ends[1]
    assert bits(state.params) != bits(step.state.params)  # the other role does learn


def test_programs_are_shared_and_the_warm_up_compiles_them_all(steps):
    step = steps["separate"]
    cast, count = step.setup.cast, step.compiled
    assert players.same_programs(cast.sampler, cast.rehearse_sampler)
    assert 0 < count <= cast.sampler.buckets.compile_bound()
    train.iterate(step.setup, copied(step.state), 1)  # with parameters that an update gave
    assert cast.sampler.compile_count == cast.rehearse_sampler.compile_count == count
    assert step.setup.train_step._cache_size() == 1


@pytest.fixture(scope="module")
def simulator(tmp_path_factory) -> Path:
    """Another checkpoint of another size: the base without its last layer."""
    model, params = hf.load(BASE)
    less = params | {"layers": jax.tree.map(lambda leaf: leaf[: model.layers - 1], params["layers"])}
    folder = tmp_path_factory.mktemp("simulator") / "model"
    hf.save(folder, dataclasses.replace(model, layers=model.layers - 1), less, tokenizer_dir=BASE)
    return folder


def largest_difference(setup, score, params, trajectories, role: Role) -> float:
    """Between the log-probabilities that were sampled in a role and those that a scorer gives."""
    zeros = [np.zeros(len(trajectory.segments), np.float32) for trajectory in trajectories]
    batch, _ = learning.make_rows(setup, *players.of_roles(trajectories, zeros, (role,)), (24,))
    assert batch.loss_mask.any()
    return np.abs(np.asarray(score(params, batch)) - batch.old_logprobs).max()


PROGRESS = {"evaluations": [{"values": {}}], "env_calls": 0, "seconds": 0.0}


def test_a_checkpoint_in_process_answers_as_the_external_model(mesh, simulator):
    """Each role's log-probabilities are those of its own checkpoint; only ACT is trained; the other's tokens count."""
    changes = {"rollout.responder": "external", "external.checkpoint": str(simulator)}
    setup, state = train.build(config(**changes, **{"batch.drop_zero_advantage": False}), mesh)
    state = train.compile_all(setup, state)
    samplers = (setup.cast.sampler, setup.cast.rehearse_sampler)
    counts = [sampler.compile_count for sampler in samplers]
    assert not players.same_programs(*samplers)
    before = copied(state.params)
    state, metrics, trajectories = train.iterate(setup, state, 0)
    assert [sampler.compile_count for sampler in samplers] == counts
    other, weights = hf.load(simulator, mesh)
    policy = train.parts.make_policy(setup.config, other, mesh)
    step_config = parts.step_config(setup.config, setup.prompts.chat.vocab_size, 1)
    score = train_step.make_score_step(policy, step_config, mesh)
    assert largest_difference(setup, setup.score_step, before, trajectories, Role.ACT) < 1e-4
    assert largest_difference(setup, score, weights, trajectories, Role.REHEARSE) < 1e-4
    assert metrics["tokens_rehearse"] == 0 < metrics["tokens_act"]
    rehearsed = [s for t in trajectories for s in t.segments if s.role is Role.REHEARSE]
    assert metrics["external_prompt_tokens"] == sum(len(s.prompt_tokens) for s in rehearsed) > 0
    assert metrics["external_completion_tokens"] == sum(len(s.tokens) for s in rehearsed) > 0
    summary = train.summarise(setup.config, PROGRESS | {"external": setup.responder.counts})
    assert summary["external_tokens"] == metrics["external_prompt_tokens"] + metrics["external_completion_tokens"]
    assert train.summarise(setup.config, PROGRESS)["external_tokens"] == 0


def test_a_resumed_run_with_separate_parameters_equals_an_unbroken_one(tmp_path, mesh, monkeypatch):
    """Both parameters, both optimizer states: bit by bit. With an evaluation, in which each role plays by its own."""
    changes = {"rollout.players": "separate", "steps": 2, "warm_up": False}
    changes |= {"evaluation.fidelity_calls": 2, "evaluation.heldout_tasks": 1, "evaluation.greedy": False}
    wanted, parts_ = config(**changes), tmp_path / "parts"
    whole = train.run(wanted, mesh, tmp_path / "whole")
    run_killed_at(1, True, wanted, mesh, parts_, monkeypatch)
    assert train.run(wanted, mesh, parts_) | {"seconds": 0} == whole | {"seconds": 0}
    for name in ("model", "model_rehearse"):
        one, other = ((folder / name / "model.safetensors").read_bytes() for folder in (tmp_path / "whole", parts_))
        assert one == other
    act, rehearse = (bits(hf.load(parts_ / name)[1]) for name in ("model", "model_rehearse"))
    assert act != rehearse
    assert untimed(tmp_path / "whole") == untimed(parts_)
    with Checkpoints(parts_ / "checkpoints") as kept:
        assert kept.steps() == [1, 2]


def test_what_is_measured_is_what_plays(steps, monkeypatch):
    """Success by ACT's parameters, fidelity by REHEARSE's."""
    seen = {}
    step = steps["separate"]
    task = step.setup.stream.batch_at(0)[0]
    wanted = dataclasses.replace(step.setup.config.evaluation, fidelity_calls=1, greedy=False)
    setup = dataclasses.replace(
        step.setup, heldout=(task,), config=dataclasses.replace(step.setup.config, evaluation=wanted)
    )

    def success(sampler, params, *_, **__):
        seen["act"] = (sampler, bits(params))
        return train.evaluate.Success(0.0, 0.0, np.zeros(1), {}, ())

    def fidelity(sampler, params, *_, **__):
        seen["rehearse"] = (sampler, bits(params))
        return 0.0

    monkeypatch.setattr(train.evaluate, "success", success)
    monkeypatch.setattr(train.evaluate, "fidelity", fidelity)
    train._evaluate(setup, step.state, 1, type("Writer", (), {"progress": None, "write": lambda *_: None}))
    for name, sampler in (("act", setup.cast.sampler), ("rehearse", setup.cast.rehearse_sampler)):
        assert seen[name] == (sampler, bits(setup.cast.for_decoding(step.state[name].params)))


# --- small pieces ---


def segment(role: Role, size: int) -> Segment:
    return Segment(
        role, np.arange(3, dtype=np.int32), np.full(size, 7, np.int32), np.zeros(size, np.float32), "stop", 0
    )


def test_slot_use_is_of_both_samplers_and_between_two_readings():
    samplers = [
        SimpleNamespace(slots=slots, stats=SamplerStats(decode_steps=10, busy_slot_steps=15)) for slots in (2, 4)
    ]
    cast = players.Cast("separate", lambda params: params, *samplers)
    assert cast.slot_steps() == (30, 10 * 2 + 10 * 4)
    assert players.slot_use((20, 40), cast.slot_steps()) == {"slot_use": 10 / 20}
    assert players.slot_use(cast.slot_steps(), cast.slot_steps()) == {}  # nothing was decoded
    assert players.Cast("shared", lambda params: params, samplers[0]).slot_steps() == (15, 20)


def test_segments_of_other_roles_are_left_out():
    both = Trajectory(
        "t", 0, 0, (segment(Role.ACT, 1), segment(Role.REHEARSE, 2), segment(Role.ACT, 3)), 1.0, "ok", "done"
    )
    none = dataclasses.replace(both, segments=())
    values = [np.array([0.1, 0.2, 0.3], np.float32), np.zeros(0, np.float32)]
    for roles, sizes, expected in (((Role.ACT,), [1, 3], [0.1, 0.3]), ((Role.REHEARSE,), [2], [0.2])):
        left, advantages = players.of_roles([both, none], values, roles)
        assert [len(s.tokens) for s in left[0].segments] == sizes and left[1].segments == ()
        np.testing.assert_allclose(advantages[0], expected)
        assert advantages[0].dtype == np.float32 and len(advantages[1]) == 0
    trajectories = [both]
    assert players.of_roles(trajectories, values, tuple(Role))[0] is trajectories  # nothing is copied


def test_statistics_of_two_learners_are_those_of_both():
    """By hand: 30 and 10 tokens."""
    act = {"tokens": 30.0, "tokens_act": 30.0, "tokens_rehearse": 0.0, "loss": 1.0, "grad_norm": 3.0, "ratio": 1.0,
           "logprob_diff_max": 0.5, "skipped": 0.0}  # fmt: skip
    rehearse = {"tokens": 10.0, "tokens_act": 0.0, "tokens_rehearse": 10.0, "loss": 2.0, "grad_norm": 4.0, "ratio": 1.4,
                "logprob_diff_max": 0.2, "skipped": 1.0}  # fmt: skip
    joined = players.joined_stats({"act": act, "rehearse": rehearse})
    expected = {
        "tokens": 40, "tokens_act": 30, "tokens_rehearse": 10, "loss": 3, "loss_act": 1, "loss_rehearse": 2,
        "grad_norm": 5, "grad_norm_act": 3, "grad_norm_rehearse": 4, "ratio": 1.1, "ratio_act": 1,
        "ratio_rehearse": 1.4,
        "logprob_diff_max": 0.5, "logprob_diff_max_act": 0.5, "logprob_diff_max_rehearse": 0.2, "skipped": 1,
        "skipped_act": 0, "skipped_rehearse": 1,
    }  # fmt: skip
    assert joined == pytest.approx(expected)
    assert players.joined_stats({"": act}) is act
    rows = [
        {"rows": 8.0, "fill": 0.5, "trained_tokens_act": 3.0},
        {"rows": 24.0, "fill": 0.1, "trained_tokens_act": 0.0},
    ]
    assert players.joined_batch_stats(rows) == pytest.approx({"rows": 32, "fill": 0.2, "trained_tokens_act": 3})


def test_a_frozen_checkpoint_must_speak_the_same_tokens_and_stay_what_it_was(tmp_path, simulator):
    changes = {"rollout.players": "frozen_act", "rollout.frozen_checkpoint": str(tmp_path)}
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((BASE / name).read_bytes())
    inputs = read_inputs(config(**changes), ChecklistReward())
    assert inputs.frozen == tmp_path
    before = inputs.fingerprints()
    text = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(configuration.ConfigError, match="rollout.frozen_checkpoint: .* another vocabulary than"):
        read_inputs(config(**changes), ChecklistReward())
    wanted = config(**changes)
    known = {"config": configuration.to_json(wanted), "step": 1, "fingerprints": before}
    train.workfolder.check_continued(tmp_path / "run", dataclasses.replace(wanted, steps=3), known, before)
    with pytest.raises(configuration.ConfigError, match="rollout.frozen_checkpoint: files of .* are not as when"):
        train.workfolder.check_continued(tmp_path / "run", wanted, known, before | {"frozen": {}})
    with pytest.raises(configuration.ConfigError, match="external.checkpoint: .* lies where this run writes"):
        external = {"rollout.responder": "external", "external.checkpoint": str(tmp_path / "run" / "model_rehearse")}
        train.workfolder.check(tmp_path / "run", config(**external))

"""Runs with adapters on the tiny base: exact resumption, exports, players and reference on one base, an int8 base."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import REPOSITORY
from model_helpers import full_logits, reference_logits
from test_train import run_killed_at, untimed
from train_helpers import ROOT, bits, model_bytes, tiny_config

from envace_jax import config as configuration
from envace_jax import inputs, parts, players, train
from envace_jax.checkpoint import Checkpoints
from envace_jax.lora import has_adapters, joined, split
from envace_jax.models import hf, int8, peft
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.sharding import make_mesh
from envace_jax.types import Role

BASE = ROOT / "envace_jax" / "assets" / "tiny_base"
SMALL = {
    "lora.rank": 4, "optimizer.learning_rate": 1e-2, "sampler.prefill_lengths": (256,), "warm_up": False,
    "evaluation.heldout_tasks": 0, "evaluation.unseen_tasks": 0, "evaluation.fidelity_calls": 0, "steps": 2,
}  # fmt: skip
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def mesh():
    return make_mesh()


def config(**changes):
    return tiny_config(**{**SMALL, **changes})


def tokens(trajectories):
    return [[(s.role, s.tokens.tolist()) for s in t.segments] for t in trajectories]


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one_and_its_exports_are_one_policy(tmp_path, mesh, monkeypatch):
    """Bit by bit, from a checkpoint that holds adapters alone; the merged model equals base and adapters together."""
    wanted, broken, whole = config(), tmp_path / "broken", tmp_path / "whole"
    summary = train.run(wanted, mesh, whole)
    run_killed_at(1, True, wanted, mesh, broken, monkeypatch)
    assert train.run(wanted, mesh, broken) | {"seconds": 0} == summary | {"seconds": 0}
    assert model_bytes(whole) == model_bytes(broken) and untimed(whole) == untimed(broken)
    assert (whole / ADAPTER).read_bytes() == (broken / ADAPTER).read_bytes()

    lora, (model, base) = parts.make_lora(wanted), hf.load(BASE)
    own = peft.load(whole / "adapter", model, lora)
    assert all(np.asarray(pair["lora_b"]).any() for pair in own["layers"].values())
    size = sum(leaf.size for leaf in jax.tree.leaves(own))
    with Checkpoints(whole / "checkpoints") as kept:
        saved = jax.tree.leaves(kept._manager.item_metadata(2)["state"].tree)
    assert 3 * size <= sum(np.prod(leaf.shape, dtype=int) for leaf in saved) < 3 * size + 10  # and two moments of each
    policy = parts.make_policy(wanted, model, mesh)
    ids = np.random.default_rng(0).integers(0, 300, (2, 9))
    ours = full_logits(policy, joined(base, own), ids)
    merged = full_logits(policy, hf.load(whole / "model")[1], ids)
    np.testing.assert_allclose(merged, ours, rtol=1e-4, atol=2e-4)
    assert np.abs(merged - full_logits(policy, base, ids)).max() > 1e-2
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(whole / "model", attn_implementation="eager")
    np.testing.assert_allclose(reference_logits(theirs.float(), ids), ours, rtol=1e-3, atol=5e-4)

    # Another run starts from these adapters, and knows them again when it continues.
    more = config(**{"lora.path": str(whole / "adapter")})
    found = inputs.read_inputs(more, ChecklistReward())
    _, state = train.build(more, mesh, inputs=found)
    assert bits(state.params) == bits(own)
    known = {"config": configuration.to_json(more), "step": 1, "fingerprints": found.fingerprints()}
    other = {**found.fingerprints(), "adapters": {}}
    with pytest.raises(configuration.ConfigError, match="lora.path: files of .* are not as when"):
        train.workfolder.check_continued(tmp_path / "new", more, known, other)
    with pytest.raises(configuration.ConfigError, match="lora.path: .* lies where this run writes its own"):
        train.workfolder.check(whole, more)
    with pytest.raises(ValueError, match=r"r is 4, and lora.rank is 8; set it to that"):
        inputs.read_inputs(config(**{"lora.path": str(whole / "adapter"), "lora.rank": 8}), ChecklistReward())
    shutil.rmtree(whole)


def test_roles_have_adapters_of_their_own_on_one_int8_base_which_is_the_reference(mesh):
    """One base in memory for both learners and the KL term; sampler and trainer compute the same."""
    options = {"rollout.players": "separate", "grpo.kl_coef": 0.1, "model.quantize": "int8"}
    options |= {"batch.drop_zero_advantage": False, "grpo.old_logprobs": "sampler"}
    setup, state = train.build(config(**options), mesh)
    base, before = setup.base, bits(setup.base)
    assert setup.reference is base and base["layers"]["up"]["kernel"].dtype == jnp.int8
    assert not has_adapters(base["layers"]) and split(state["act"].params)[0] == {}
    assert bits(state["act"]) == bits(state["rehearse"])
    state, first, _ = train.iterate(setup, state, 0)
    assert first["kl_act"] < 1e-6 and first["ratio_deviation_max"] < 1e-4, first
    assert bits(state["act"].params) != bits(state["rehearse"].params)
    state, second, _ = train.iterate(setup, state, 1)
    assert second["kl_act"] > 1e-5 and second["kl_rehearse"] > 1e-5
    assert second["ratio_deviation_max"] < 1e-3, second  # merged and not merged, with adapters that are something
    assert bits(base) == before


def test_a_frozen_player_on_the_same_checkpoint_is_the_base_itself(mesh, monkeypatch):
    """Read once; and a frozen int8 player beside fully trained parameters is decoded as integers."""
    read, load = [], hf.load
    monkeypatch.setattr(hf, "load", lambda *args, **kwargs: read.append(args[0]) or load(*args, **kwargs))
    setup, state = train.build(config(**{"rollout.players": "frozen_rehearse"}), mesh)
    assert len(read) == 1 and setup.cast.frozen["embedding"] is setup.base["embedding"]
    assert players.same_programs(setup.cast.sampler, setup.cast.rehearse_sampler)
    state, metrics, trajectories = train.iterate(setup, state, 0)
    assert metrics["tokens_act"] > 0 == metrics["tokens_rehearse"] and metrics["update_norm"] > 0
    options = {"lora.rank": 0, "rollout.players": "frozen_rehearse", "model.quantize": "int8"}
    setup, state = train.build(config(**options), mesh)
    assert setup.base is None and not players.same_programs(setup.cast.sampler, setup.cast.rehearse_sampler)
    layers = setup.cast.frozen["layers"]
    assert layers[0]["down"]["kernel"].dtype == jnp.int8 and int8.SCALE in layers[0]["gate_up"]
    assert state.params["layers"]["down"]["kernel"].dtype == jnp.float32
    _, _, other = train.iterate(setup, state, 0)
    assert {s.role for t in other for s in t.segments} == {Role.ACT, Role.REHEARSE}
    assert tokens(other) != tokens(trajectories)  # the rounding is seen


def test_what_a_planner_asks_for_is_what_a_run_has(mesh):
    """Shapes, dtypes and places of trained parameters and base, of a bfloat16 and an int8 base and without LoRA."""
    for options in ({"model.param_dtype": "bfloat16"}, {"model.quantize": "int8"}, {"lora.rank": 0}):
        wanted = config(**options)
        setup, state = train.build(wanted, mesh)
        planned = parts.param_shapes(wanted, setup.model, mesh)
        for have, want in zip((state.params, setup.base), planned, strict=True):
            described = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), tree) for tree in (have, want)]
            assert described[0] == described[1]


@pytest.mark.slow
def test_adapters_learn(tmp_path, mesh):
    """Reward over 24 steps of configs/tiny.py at rank 8, on an int8 base. The whole run is docs/lora.md's command."""
    options = {"lora.rank": 8, "optimizer.learning_rate": 3e-3, "model.quantize": "int8", "steps": 24}
    options |= {
        "data.count": 2000,
        "data.tasks_per_step": 16,
        "sampler.slots": 32,
        "batch.row_buckets": (128,),
        "checkpoint.every": 24,
    }
    train.run(config(**options), mesh, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert len(rewards) == 24 and np.mean(rewards[-6:]) > np.mean(rewards[:6]) + 0.08, rewards


def test_docs_name_settings_that_exist():
    text = (REPOSITORY / "docs" / "lora.md").read_text()
    known = dataclasses.asdict(configuration.RunConfig())
    for name in known["lora"]:
        assert f"`lora.{name}`" in text, name
    assert "`model.quantize`" in text

"""The programs of a run, lowered for shapes alone: what the trainer and the sampler will compile, without a weight.

Policy, steps and sampler come from `parts`, as in `train.build`, so these are the run's own programs, not look-alikes.
Knows settings, sizes and a mesh, whose devices may belong to a topology that is not there.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from envace_jax import config as configuration
from envace_jax import config_checks, parts, sharding, train_step
from envace_jax.batching import make_batch
from envace_jax.buckets import row_shapes, row_tokens
from envace_jax.config import ConfigError, RunConfig
from envace_jax.grpo import ROLES
from envace_jax.lora import joined
from envace_jax.models import hf
from envace_jax.models.config import PUBLISHED, QWEN3_STOPS, QWEN3_TOKENS, QwenConfig
from envace_jax.sampling import Sampler
from envace_jax.types import Params, Policy, TrainBatch, TrainState


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What the programs need of a tokenizer."""

    vocab_size: int  # its length, at most the embedding's rows
    stop_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Programs:
    """A run's programs on one mesh, and what they take, as shapes with their places.

    The methods lower one program each.
    """

    config: RunConfig
    model: QwenConfig
    mesh: Mesh
    policy: Policy
    steps: parts.Steps
    sampler: Sampler
    state: TrainState
    base: Params | None  # frozen, beside adapters
    batch: TrainBatch  # of the most rows that are compiled for

    def train(self) -> jax.stages.Lowered:
        """The train step, by the arguments of `train.iterate`."""
        everywhere: Any = sharding.replicated(self.mesh)
        scored = None
        if self.config.grpo.kl_coef > 0:
            place = sharding.batch_sharding(self.mesh)
            scored = jax.ShapeDtypeStruct(self.batch.tokens.shape, jnp.float32, sharding=place)
        counts = jax.ShapeDtypeStruct((len(ROLES),), jnp.float32, sharding=everywhere)
        with sharding.chosen_chip(self.mesh):
            return self.steps.train.lower(self.state, self.batch, scored, counts, self.base)

    def score(self) -> jax.stages.Lowered:
        """The reference policy's log-probabilities: of the base, or of parameters like the trained ones."""
        with sharding.chosen_chip(self.mesh):
            return self.steps.score.lower(self.state.params if self.base is None else self.base, self.batch)

    def reshard(self) -> jax.stages.Lowered:
        """From the parameters of training to those of a rollout."""
        with sharding.chosen_chip(self.mesh):
            return jax.jit(self.policy.for_decoding).lower(self._whole())

    def decoding(self, places: Any) -> Params:
        """What `reshard` gives, at the places that its program chose."""
        with sharding.chosen_chip(self.mesh):
            shapes = jax.eval_shape(self.policy.for_decoding, self._whole())
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
        )

    def sampling(self, decoding: Params) -> dict[str, jax.stages.Lowered]:
        """The largest prefill and the largest decode of the sampler, for parameters at their places."""
        names: list[str] = []

        def listed(name: str) -> bool:
            names.append(name)
            return False

        self.sampler.lowered(decoding, wanted=listed)  # lowers nothing
        last = {name.split()[0].rstrip(","): name for name in names}  # sizes ascend
        return self.sampler.lowered(decoding, wanted=lambda name: name in (last["prefill"], last["decode"]))

    def _whole(self) -> Params:
        return self.state.params if self.base is None else joined(self.base, self.state.params)


def sizes(path: str) -> tuple[QwenConfig, Vocabulary]:
    """Model sizes and vocabulary of `model.path`: a folder's own, or from the table of published models.

    Raises ConfigError for a hub id outside the table.
    """
    if path in PUBLISHED:
        return PUBLISHED[path], Vocabulary(QWEN3_TOKENS, QWEN3_STOPS)
    folder = Path(configuration.model_path(path))
    if not folder.is_dir():
        raise ConfigError(
            f"model.path: {path} is no folder, and its sizes are not known here; known are {', '.join(PUBLISHED)}"
        )
    model = hf.read_config(folder)
    from envace_jax.chat import load_tokenizer

    chat = load_tokenizer(folder)
    return model, Vocabulary(chat.vocab_size, chat.stop_ids)


def check_plannable(config: RunConfig) -> None:
    """Raises ConfigError for settings under which a run keeps more models than the one that is planned."""
    if config_checks.cast(config)[0] != "shared":
        raise ConfigError("rollout: only the method itself is planned, with players=shared and no checkpoint beside it")
    if config.reward.checkpoint not in ("", "policy"):
        raise ConfigError("reward.checkpoint: a judge of other parameters in the same process is not planned; leave it")


def make(config: RunConfig, mesh: Mesh) -> Programs:
    """Everything of `config` on `mesh`; nothing is compiled. Raises ConfigError or ValueError where it cannot work."""
    check_plannable(config)
    model, vocabulary = sizes(config.model.path)
    policy = parts.make_policy(config, model, mesh)
    params, base = parts.param_shapes(config, model, mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, params)
    steps = parts.make_steps(config, policy, vocabulary.vocab_size, mesh, places)
    return Programs(
        config=config, model=model, mesh=mesh, policy=policy, steps=steps,
        sampler=parts.make_sampler(config, policy, vocabulary, mesh),
        state=abstract_state(steps.optimizer, params, mesh, places), base=base, batch=abstract_batch(config, mesh),
    )  # fmt: skip


def abstract_state(optimizer: Any, params: Params, mesh: Mesh, places: Any) -> TrainState:
    """Shapes and places of what the train step takes and gives back."""
    where = train_step.state_shardings(optimizer, params, mesh, places)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = TrainState(step, params, jax.eval_shape(optimizer.init, params))
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, where)


def rows_of(config: RunConfig, mesh: Mesh) -> int:
    """Rows of the largest batch in `batch.row_buckets`; without buckets, a row for each attempt at each task."""
    chosen, shards = config.batch, sharding.axis_size(mesh, sharding.BATCH_AXES)
    wanted = chosen.row_buckets or (config.data.tasks_per_step * config.data.attempts,)
    return row_shapes(chosen.rows_multiple * shards, wanted)[-1]


def abstract_batch(config: RunConfig, mesh: Mesh, rows: int | None = None) -> TrainBatch:
    """Shapes and places of a training batch of `rows` rows, by the function that makes the run's batches."""
    shards = sharding.axis_size(mesh, sharding.BATCH_AXES)
    one, _ = make_batch(
        [], [], layout=config.batch.layout, row_length=row_tokens(config.batch.row_length), rows_multiple=shards,
        pad_id=0,
    )  # fmt: skip
    count, place = rows_of(config, mesh) if rows is None else rows, sharding.batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=place), one)

"""The parts of a run, each made of its groups of settings: what plays, and what updates it.

`train.build` puts them together. Policy, sampler and steps need no weights and no task, so a planner makes the same.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from envace_jax import config_checks, envs, external, players, sharding, train_step
from envace_jax.buckets import Buckets
from envace_jax.chat import Chat, load_tokenizer
from envace_jax.config import RunConfig
from envace_jax.episode import Limits
from envace_jax.local_model import LocalModel
from envace_jax.lora import A, B, Lora, joined, split
from envace_jax.models import hf, int8, peft, qwen
from envace_jax.players import Cast
from envace_jax.responders import Real, Rehearsed, Responder
from envace_jax.rewards import choose
from envace_jax.roles import Prompts
from envace_jax.sampling import Sampler
from envace_jax.train_step import TrainStepConfig
from envace_jax.types import Params, Policy


def make_policy(config: RunConfig, model: qwen.QwenConfig, mesh: Mesh) -> Policy:
    chosen = config.model
    return qwen.make_policy(
        model, mesh=mesh, compute_dtype=chosen.compute_dtype, unroll=chosen.unroll, remat=chosen.remat,
        attention=chosen.attention,
        lora=make_lora(config),
    )  # fmt: skip


def make_lora(config: RunConfig) -> Lora | None:
    """What adapters are trained; None where all parameters are."""
    chosen = config.lora
    return Lora(chosen.rank, chosen.alpha, chosen.targets) if chosen.rank else None


def quantizes(config: RunConfig) -> bool:
    """Whether matrices that are not trained are int8."""
    return config.model.quantize == "int8"


def make_adapters(config: RunConfig, policy: Policy, model: qwen.QwenConfig, mesh: Mesh, folder: Path | None) -> Params:
    """The adapters that LoRA starts from: those of PEFT's files in `folder`, or such as leave the model as it is."""
    lora = make_lora(config)
    assert lora is not None and policy.init_adapters is not None
    if folder is not None:
        return peft.load(folder, model, lora, mesh)
    return policy.init_adapters(jax.random.key(config.seed))


def param_shapes(config: RunConfig, model: qwen.QwenConfig, mesh: Mesh) -> tuple[Params, Params | None]:
    """(what is trained, the frozen base beside it or None) as `jax.ShapeDtypeStruct` with shardings, for a planner."""
    lora = make_lora(config)
    quantized = quantizes(config) and lora is not None
    dtype = hf.WEIGHT_DTYPES[config.model.param_dtype]

    def placed(path: Any, leaf: jax.ShapeDtypeStruct, place: Any) -> jax.ShapeDtypeStruct:
        own = leaf.dtype == "int8" or path[-1].key in (int8.SCALE, A, B)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if own else dtype, sharding=place)

    shapes, places = qwen.param_shapes(model, lora, quantized), qwen.shardings(model, mesh, lora, quantized)
    base, adapters = split(jax.tree_util.tree_map_with_path(placed, shapes, places))
    return (base, None) if lora is None else (adapters, base)


def make_sampler(config: RunConfig, policy: Policy, chat: Any, mesh: Mesh) -> Sampler:
    chosen = config.sampler
    return Sampler(
        policy, slots=chosen.slots, max_length=chosen.max_length,
        buckets=Buckets(chosen.prefill_lengths, chosen.prefill_rows, chosen.cache_lengths),
        vocab_limit=chat.vocab_size, stop_ids=chat.stop_ids, mesh=mesh, cache_dtype=chosen.cache_dtype,
        decode_chunk=chosen.decode_chunk, cache_rows=chosen.cache_rows or None, refill_share=chosen.refill_share,
        pages=chosen.pages, page_size=chosen.page_size,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Steps:
    """What updates parameters: the optimizer, and the jitted steps of `train_step.py`."""

    optimizer: optax.GradientTransformation
    train: Any  # (state, batch, ...) -> (state, stats), see `make_train_step`
    score: Any  # (params, batch) -> f32[B, T], see `make_score_step`


def make_steps(config: RunConfig, policy: Policy, vocabulary: int, mesh: Mesh, shardings: Any) -> Steps:
    """`vocabulary` is the tokenizer's length, `shardings` where what is trained lies. Nothing is compiled yet."""
    optimizer = make_optimizer(config)
    chosen = step_config(config, vocabulary, sharding.axis_size(mesh, sharding.BATCH_AXES))
    return Steps(
        optimizer=optimizer,
        train=train_step.make_train_step(policy, optimizer, chosen, mesh, shardings),
        score=train_step.make_score_step(policy, chosen, mesh),
    )


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    chosen = config.optimizer
    schedule = train_step.make_schedule(
        chosen.learning_rate, schedule=chosen.schedule, warmup_steps=chosen.warmup_steps, total_steps=config.steps
    )
    return train_step.make_optimizer(
        schedule,
        weight_decay=chosen.weight_decay,
        b1=chosen.b1,
        b2=chosen.b2,
        eps=chosen.eps,
        clip_norm=chosen.clip_norm,
        moments_dtype=chosen.moments_dtype,
        offload=chosen.offload,
    )


def step_config(config: RunConfig, vocabulary: int, shards: int) -> TrainStepConfig:
    grpo = config.grpo
    return TrainStepConfig(
        vocab_limit=vocabulary, temperature=config.sampler.temperature,
        micro_batch_rows=config.batch.micro_batch_rows * shards, logprob_chunk=config.batch.logprob_chunk,
        old_logprobs=grpo.old_logprobs, loss=grpo.loss, clip_low=grpo.clip_low, clip_high=grpo.clip_high,
        dual_clip=grpo.dual_clip, kl_coef=grpo.kl_coef, denominator=grpo.denominator, tis_cap=grpo.tis_cap,
    )  # fmt: skip


def make_cast(
    config: RunConfig,
    policy: Policy,
    model: qwen.QwenConfig,
    chat: Any,
    mesh: Mesh,
    frozen: tuple[qwen.QwenConfig, Params] | None,
    base: Params | None = None,
) -> Cast:
    """Who plays and learns which role; `frozen` plays one and is never trained, `base` is what adapters go with."""
    kind, sampler = config_checks.cast(config)[0], make_sampler(config, policy, chat, mesh)

    def for_decoding(trained: Params) -> Params:
        return policy.for_decoding(trained if base is None else joined(base, trained))

    if kind == "shared":
        return Cast(kind, for_decoding, sampler)
    if frozen is None:
        return Cast(kind, for_decoding, sampler, sampler.twin())
    other, params = frozen
    own = policy if other == model else make_policy(config, other, mesh)
    # A frozen int8 model is decoded as it is, one with merged adapters is not: those are different programs.
    alike = other == model and not quantizes(config)
    simulator = sampler.twin() if alike else make_sampler(config, own, chat, mesh)
    both = (simulator, sampler) if kind == "frozen_act" else (sampler, simulator)
    return Cast(kind, for_decoding, *both, own.for_decoding(params))


def make_responder(config: RunConfig, prompts: Prompts, workdir: Path) -> Responder:
    """Who answers tool calls; what an address answers may be kept in `workdir`. To be closed in the end."""
    if config.rollout.responder == "real":
        return Real(envs.make_environment)
    if config.rollout.responder == "rehearsed":
        return Rehearsed()
    return players.Simulator() if config.external.checkpoint else external.opened(config.external, prompts, workdir)


def bind_judge(config: RunConfig, judge: LocalModel, chat: Chat, mesh: Mesh) -> None:
    """Gives a judge in this process its model: the policy, or a checkpoint with a sampler of the run's settings."""
    bind = functools.partial(judge.bind, max_length=config.sampler.max_length, thinking=config.prompts.thinking)
    folder = choose.judge_folder(config.reward)
    if folder is None:
        bind(chat)
        return
    model, params = hf.load(folder, mesh, dtype=config.model.param_dtype)
    policy, own = make_policy(config, model, mesh), load_tokenizer(folder)
    bind(own, sampler=make_sampler(config, policy, own, mesh), params=policy.for_decoding(params))


def make_prompts(config: RunConfig, chat: Any) -> Prompts:
    chosen = config.prompts
    return Prompts(
        chat, style=chosen.style, thinking=chosen.thinking, max_act_prompt=chosen.max_act_prompt,
        max_rehearse_prompt=chosen.max_rehearse_prompt, reference_examples=chosen.reference_examples,
    )  # fmt: skip


def make_limits(config: RunConfig) -> Limits:
    return Limits(**dataclasses.asdict(config.limits))

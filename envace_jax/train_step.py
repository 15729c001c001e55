"""One optimizer step on one batch, compiled: loss and gradient by micro-batches, AdamW, statistics.

    1. count the whole batch's trained tokens;  2. scan over micro-batches, summing gradients in float32;
    3. update, unless the batch trains nothing or the gradient is not finite;  4. report.

Knows a `Policy` as pure functions and a `TrainBatch`; knows no tasks, no rewards, no files. Nothing here waits for
the device: whoever reads the statistics does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from envace_jax import hosts, moments
from envace_jax.fused_head import Stats, add_stats, head_loss
from envace_jax.grpo import (
    DENOMINATORS,
    LOSSES,
    ROLES,
    TOKENWISE,
    Denominators,
    check_name,
    count_denominators,
    count_role_tokens,
    policy_loss,
    truncated_weights,
)
from envace_jax.logprobs import token_logprobs
from envace_jax.lora import joined
from envace_jax.micro_batches import join, split
from envace_jax.sharding import fitted, replicated
from envace_jax.types import Params, Policy, TrainBatch, TrainState

OLD_LOGPROBS = ("trainer", "sampler")
SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class TrainStepConfig:
    """Static settings of a step. Defaults are the authors' where they state one (docs: the method's training section).

    old_logprobs: `"trainer"` divides by the policy's own log-probabilities before this update, without a gradient.
    With one update per batch that is what recomputing them first would give, at no cost, and every ratio is 1.
    `"sampler"` divides by `batch.old_logprobs`.
    loss: gspo and cispo are ppo's gradient where every ratio is 1, so they mean something with `"sampler"` alone.
    tis_cap: above 0 a token's loss is weighted by `truncated_weights`. The weight is `"trainer"` over sampler; with
    `"sampler"` the ratio holds that already.
    """

    vocab_limit: int | None = None  # ids at or above it have probability 0 (the tokenizer's length)
    temperature: float = 1.0  # the one the tokens were sampled at
    micro_batch_rows: int = 8  # rows whose activations are alive at once; must divide the batch's rows
    logprob_chunk: int = 1024  # tokens whose logits are alive at once, all rows of a micro-batch together
    old_logprobs: str = "trainer"
    loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0  # 0 turns it off
    kl_coef: float = 0.0  # above 0 the step needs ref_logprobs
    denominator: str = "tokens"
    tis_cap: float = 0.0  # 0 turns it off

    def __post_init__(self) -> None:
        check_name("loss", self.loss, LOSSES)
        check_name("old_logprobs", self.old_logprobs, OLD_LOGPROBS)
        check_name("denominator", self.denominator, DENOMINATORS)
        if self.micro_batch_rows < 1:
            raise ValueError(f"micro_batch_rows must be at least 1, not {self.micro_batch_rows}")
        bounded = self.clip_low < 1.0 or (self.loss == "cispo" and self.clip_low == 1.0)
        if self.clip_low < 0.0 or not bounded or self.clip_high < 0.0:
            raise ValueError(
                f"clip_low {self.clip_low} must be in [0, 1) (1 too where loss is 'cispo') and clip_high "
                f"{self.clip_high} at least 0"
            )
        if self.tis_cap and (self.tis_cap < 1.0 or self.old_logprobs != "trainer"):
            raise ValueError(
                "tis_cap must be at least 1, or 0 to turn it off, and needs old_logprobs='trainer'; not "
                f"{self.tis_cap} with {self.old_logprobs!r}"
            )
        if self.dual_clip and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip must be above 1, or 0 to turn it off, not {self.dual_clip}")
        if self.kl_coef < 0.0:
            raise ValueError(f"kl_coef must be at least 0, not {self.kl_coef}")


# --- optimizer ---


def make_schedule(
    learning_rate: float, *, schedule: str = "constant", warmup_steps: int = 0, total_steps: int | None = None
) -> optax.Schedule:
    """Learning rate by update number: a linear warm-up from 0, then constant, or linear or cosine down to 0.

    total_steps counts the warm-up too and is needed unless the schedule is constant. Raises ValueError.
    """
    check_name("schedule", schedule, SCHEDULES)
    if schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(learning_rate)
    else:
        if total_steps is None or total_steps <= warmup_steps:
            raise ValueError(f"schedule {schedule!r} needs total_steps ({total_steps}) > warmup_steps ({warmup_steps})")
        decay_steps = total_steps - warmup_steps
        after = (
            optax.cosine_decay_schedule(learning_rate, decay_steps)
            if schedule == "cosine"
            else optax.linear_schedule(learning_rate, 0.0, decay_steps)
        )
    if warmup_steps == 0:
        return after
    # The first update already moves: update n of the warm-up uses (n + 1) / warmup_steps of the full rate.
    start = learning_rate / warmup_steps
    warmup = optax.linear_schedule(start, learning_rate, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [warmup_steps])


def make_optimizer(
    learning_rate: float | optax.Schedule,
    *,
    weight_decay: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    clip_norm: float = 1.0,
    moments_dtype: str = "float32",
    offload: bool = False,
) -> optax.GradientTransformation:
    """AdamW after clipping the global gradient norm, with the authors' settings (verl's defaults, torch's AdamW).

    Weight decay applies to *every* parameter, norm scales and embeddings included: the authors hand all parameters to
    torch's AdamW in one group, and we follow for parity. `moments_dtype` and `offload` say how the moments are stored
    between updates (`moments.Storage`); the second needs a mesh.
    """
    clip = optax.clip_by_global_norm(clip_norm)
    storage = moments.Storage(moments_dtype, offload)
    if storage == moments.Storage():
        return optax.chain(clip, optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay))
    whole = optax.chain(
        clip,
        moments.adam(storage, b1=b1, b2=b2, eps=eps),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return (moments.Offloaded if offload else moments.Optimizer)(*whole)


def state_shardings(optimizer: optax.GradientTransformation, params: Params, mesh: Mesh, param_shardings: Any) -> Any:
    """A `TrainState` of shardings: optimizer moments lie where their parameter does, scalars everywhere.

    Moments of an optimizer that is `moments.Offloaded` lie in the host's memory beside the devices.
    """
    everywhere: Any = replicated(mesh)
    places = dict(jax.tree_util.tree_flatten_with_path(param_shardings)[0])
    offloaded = isinstance(optimizer, moments.Offloaded)

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        # A moment's path ends with its parameter's, but for the name of a part of it.
        ends = [end for end in (path[i:j] for i in range(len(path)) for j in (len(path), -1)) if end in places]
        if not ends:
            return everywhere
        found = fitted(places[ends[0]], leaf.shape)
        return found.with_memory_kind("pinned_host") if offloaded else found

    opt_state = jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))
    return TrainState(everywhere, param_shardings, opt_state)


def init_train_state(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh | None = None, param_shardings: Any = None
) -> TrainState:
    """Step 0. The parameters are taken over as they are; the first train step donates them."""
    if mesh is None:
        return TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
    shardings = state_shardings(optimizer, params, mesh, param_shardings)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    return TrainState(hosts.put(np.zeros((), np.int32), replicated(mesh)), params, opt_state)


# --- log-probabilities of a micro-batch ---


def batch_logprobs(
    policy: Policy, config: TrainStepConfig, params: Params, batch: TrainBatch, mesh: Mesh | None = None
) -> jax.Array:
    """f32[B, T]: entry t is the log-probability of tokens[:, t] given the tokens before it in its own sequence.

    Entries where loss_mask is False mean nothing (at a sequence's start they pair two sequences).
    """
    hidden, _ = policy.apply(params, batch.tokens, batch.positions, batch.sequence_ids, None, batch.last_readers)
    # The state at t - 1 predicts token t. Shifting the targets there and the result back copies no hidden states.
    next_tokens = jnp.roll(batch.tokens, -1, axis=1)
    logprobs = token_logprobs(
        hidden,
        policy.head(params),
        next_tokens,
        temperature=config.temperature,
        vocab_limit=config.vocab_limit,
        chunk=config.logprob_chunk,
        mesh=mesh,
    )
    return jnp.roll(logprobs, 1, axis=1)


# --- steps ---


def _token_loss(
    config: TrainStepConfig, logprobs: jax.Array, mask: jax.Array, inputs: dict[str, Any], denominators: Denominators
) -> tuple[jax.Array, Stats]:
    """Loss and statistics of tokens in any arrangement: logprobs f32, mask bool and each of the inputs in one shape."""
    sampled = inputs["old_logprobs"]
    weights, mismatch = None, Stats()
    if config.tis_cap:
        weights, mismatch = truncated_weights(logprobs, sampled, mask, cap=config.tis_cap, tokens=denominators.tokens)
    loss, stats = policy_loss(
        logprobs,
        lax.stop_gradient(logprobs) if config.old_logprobs == "trainer" else sampled,
        inputs["advantages"],
        mask,
        inputs["role"],
        inputs["ref_logprobs"],
        weights,
        denominators=denominators,
        loss=config.loss,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        kl_coef=config.kl_coef,
    )
    difference = jnp.where(mask, jnp.abs(lax.stop_gradient(logprobs) - sampled), 0.0)
    stats["logprob_diff"] = jnp.sum(difference) / denominators.tokens
    stats["logprob_diff_max"] = jnp.max(difference, initial=0.0)
    return loss, stats | mismatch


def _loss(
    policy: Policy,
    config: TrainStepConfig,
    params: Params,
    batch: TrainBatch,
    ref_logprobs: jax.Array | None,
    denominators: Denominators,
    shards: int,
    mesh: Mesh | None,
    totals: Params | None = None,
) -> tuple[jax.Array, Stats]:
    """A micro-batch's part of the loss and of the statistics; its rows are spread over `shards` pieces of the mesh.

    The gradient is added to `totals` where the policy can (`Policy.adds_gradients`).
    """
    token_loss = functools.partial(_token_loss, config)
    inputs = {name: getattr(batch, name) for name in ("advantages", "old_logprobs", "role")}
    inputs |= {"ref_logprobs": ref_logprobs}
    if config.loss not in TOKENWISE:
        logprobs = batch_logprobs(policy, config, params, batch, mesh)
        return token_loss(logprobs, batch.loss_mask, inputs, denominators)
    adding = {} if totals is None else {"totals": totals}
    rows = batch.tokens, batch.positions, batch.sequence_ids
    hidden, _ = policy.apply(params, *rows, None, batch.last_readers, **adding)
    # As in batch_logprobs: everything that is known of token t moves to the state at t - 1, which predicts it.
    targets, mask, inputs = jax.tree.map(lambda x: jnp.roll(x, -1, axis=1), (batch.tokens, batch.loss_mask, inputs))
    return head_loss(
        hidden,
        policy.head(params),
        targets,
        mask,
        inputs,
        denominators,
        token_loss,
        temperature=config.temperature,
        vocab_limit=config.vocab_limit,
        chunk=config.logprob_chunk,
        groups=shards,
        mesh=mesh,
    )


def _batch_stats(batch: TrainBatch, role_tokens: jax.Array) -> Stats:
    """Token counts and advantages of each role over the whole batch; role_tokens f32[number of roles]."""
    stats = {"tokens": jnp.sum(role_tokens)}
    for role in ROLES:
        name, own = role.name.lower(), batch.loss_mask & (batch.role == role)
        advantages = jnp.where(own, batch.advantages, 0.0)
        stats[f"tokens_{name}"] = role_tokens[role]
        stats[f"advantage_{name}"] = jnp.sum(advantages) / jnp.maximum(role_tokens[role], 1.0)
        stats[f"advantage_abs_{name}"] = jnp.sum(jnp.abs(advantages)) / jnp.maximum(role_tokens[role], 1.0)
    return stats


def loss_and_gradient(
    policy: Policy,
    config: TrainStepConfig,
    params: Params,
    batch: TrainBatch,
    ref_logprobs: jax.Array | None = None,
    mesh: Mesh | None = None,
    role_tokens: jax.Array | None = None,
    param_shardings: Any = None,
    base: Params | None = None,
) -> tuple[jax.Array, Params, Stats]:
    """Loss f32[], its gradient (float32, like params) and statistics of a whole batch; to be called inside jit.

    role_tokens f32[number of roles]: trained tokens of each role, where the rows do not hold them all.
    base: frozen parameters, to which params are adapters; no gradient in them is formed. None: params are all there is.

    Raises ValueError (while tracing) when the rows cannot be cut, or kl_coef > 0 without ref_logprobs f32[B, T].
    """
    if config.kl_coef > 0.0 and ref_logprobs is None:
        raise ValueError(f"kl_coef={config.kl_coef} needs ref_logprobs; make them with make_score_step")
    if role_tokens is None:
        role_tokens = count_role_tokens(batch.loss_mask, batch.role)
    denominators = count_denominators(batch.loss_mask, batch.role, config.denominator, role_tokens)
    micro, shards = split((batch, ref_logprobs), config.micro_batch_rows, mesh)
    adds = policy.adds_gradients and config.loss in TOKENWISE and base is None
    # Sums that pass through a gradient have the parameters' dtype: in bfloat16 they would be rounded at every addition.
    adds = adds and all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params["layers"]))

    def part(one: tuple[TrainBatch, jax.Array | None], totals: Any = None) -> tuple[jax.Array, Params, Stats]:
        def of_params(p: Params) -> tuple[jax.Array, Stats]:
            whole = p if base is None else joined(base, p)
            return _loss(policy, config, whole, one[0], one[1], denominators, shards, mesh, totals)

        (loss, stats), gradient = jax.value_and_grad(of_params, has_aux=True)(params)
        return loss, placed(jax.tree.map(lambda g: g.astype(jnp.float32), gradient)), stats

    def placed(gradient: Params) -> Params:
        """Each device has its share of the sum, as it has of the parameters."""
        if param_shardings is None:
            return gradient
        return jax.tree.map(lax.with_sharding_constraint, gradient, param_shardings)

    def plus(total: Any, one: Any) -> Any:
        loss, gradient, stats = part(one, total[1]["layers"] if adds else None)
        added = {name: gradient[name] for name in gradient if adds and name == "layers"}
        rest = {name: jax.tree.map(jnp.add, total[1][name], gradient[name]) for name in gradient if name not in added}
        return total[0] + loss, rest | added, add_stats(total[2], stats)

    def add(total: Any, one: Any) -> tuple[Any, None]:
        # Rows that only pad the batch to a compiled shape cost nothing: not even their zeros are added.
        return lax.cond(jnp.any(one[0].loss_mask), plus, lambda total, _: total, total, one), None

    first = jax.tree.map(lambda x: x[0], micro)
    # Every statistic is at least 0, so zeros are neutral for the sums and for the maxima.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(part, first))
    if micro[0].tokens.shape[0] == 1:
        loss, gradient, stats = part(first)
    else:
        zeros = zeros[0], placed(zeros[1]), zeros[2]
        (loss, gradient, stats), _ = lax.scan(add, zeros, micro)
    return loss, gradient, stats | _batch_stats(batch, role_tokens)


def make_train_step(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: TrainStepConfig,
    mesh: Mesh | None = None,
    param_shardings: Any = None,
) -> Callable[..., tuple[TrainState, Stats]]:
    """A jitted (state, batch, ref_logprobs=None, role_tokens=None, base=None) -> (state, stats); the state is donated.

    With LoRA the state holds adapters alone, and so do gradient and optimizer; `base` is the frozen rest, which is not
    donated. `param_shardings` are those of what is trained.

    A batch without the tokens whose advantage is 0 needs role_tokens (`batching.role_tokens`), which count them: then
    loss, gradient, and all statistics but the means and maxima over the tokens in the rows are those of the full batch.

    A batch that trains no token, and a loss or gradient that is not finite, leave parameters and optimizer state
    (weight decay, moments, schedule) exactly as they were and set `skipped` to 1; the state's `step`, which counts
    batches, grows all the same. With a mesh, give param_shardings too: the new state lies where the old one did.

    Statistics, all f32[]: `loss`, `grad_norm` (before clipping), `update_norm`, `skipped`; `tokens`; per role (`_act`,
    `_rehearse`) `tokens`, `advantage`, `advantage_abs` (means over tokens); `logprob_diff` and `logprob_diff_max`
    (|sampler - trainer| over trained tokens); and the loss function's own (`ratio`, `clip_fraction`, `kl`, ...).
    """

    def advance(gradient: Params, opt_state: Any, params: Params) -> tuple[Params, Any]:
        updates, new = optimizer.update(gradient, opt_state, params)
        # The gradient is float32 whatever the parameters are; what comes back keeps the dtype that went in.
        return updates, jax.tree.map(lambda n, old: n.astype(old.dtype), new, opt_state)

    def rest(gradient: Params, opt_state: Any, params: Params) -> tuple[Params, Any]:
        shapes, _ = jax.eval_shape(advance, gradient, opt_state, params)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), opt_state

    def select(use: jax.Array, gradient: Params, opt_state: Any, params: Params) -> tuple[Params, Any]:
        """The same without a branch: none may hold what lies in the host's memory, and what goes into one stays alive
        beside what comes out."""
        updates, new = optimizer.update(gradient, opt_state, params, use=use)  # type: ignore[call-arg]
        # The moments themselves are chosen in the update, where they are on the device.
        chosen = jax.tree.map(lambda n, old: jnp.where(use, n, old) if n.ndim == 0 else n, new, opt_state)
        return jax.tree.map(lambda update: jnp.where(use, update, 0), updates), chosen

    def step(
        state: TrainState,
        batch: TrainBatch,
        ref_logprobs: jax.Array | None = None,
        role_tokens: jax.Array | None = None,
        base: Params | None = None,
    ) -> tuple[TrainState, Stats]:
        loss, gradient, stats = loss_and_gradient(
            policy, config, state.params, batch, ref_logprobs, mesh, role_tokens, param_shardings, base
        )
        grad_norm = optax.tree.norm(gradient)
        use = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (stats["tokens"] > 0)
        # Two choices of what to write rather than one of what was written, and the norm taken between them: so nothing
        # reads an old array while the new one is written in its place, and XLA copies no part of the donated state.
        if isinstance(optimizer, moments.Optimizer):
            updates, opt_state = select(use, gradient, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        else:
            updates, opt_state = lax.cond(use, advance, rest, gradient, state.opt_state, state.params)
            params = lax.cond(use, optax.apply_updates, lambda params, _: params, state.params, updates)
        stats |= {
            "loss": loss,
            "grad_norm": grad_norm,
            "update_norm": optax.tree.norm(updates),
            "skipped": 1.0 - use.astype(jnp.float32),
        }
        return TrainState(state.step + 1, params, opt_state), stats

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    shapes = jax.eval_shape(lambda: (policy.init_adapters or policy.init)(jax.random.key(0)))
    shardings = state_shardings(optimizer, shapes, mesh, param_shardings)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))


def make_score_step(
    policy: Policy, config: TrainStepConfig, mesh: Mesh | None = None
) -> Callable[[Params, TrainBatch], jax.Array]:
    """A jitted (params, batch) -> f32[B, T]: log-probabilities of the trained tokens, 0 elsewhere.

    For old or reference log-probabilities under other parameters; micro-batched like the train step.
    """

    def score(params: Params, batch: TrainBatch) -> jax.Array:
        def scored(micro: TrainBatch) -> jax.Array:
            return jnp.where(micro.loss_mask, batch_logprobs(policy, config, params, micro, mesh), 0.0)

        def one(micro: TrainBatch) -> jax.Array:
            nothing = jnp.zeros(micro.tokens.shape, jnp.float32)
            return lax.cond(jnp.any(micro.loss_mask), scored, lambda _: nothing, micro)

        micro, shards = split(batch, config.micro_batch_rows, mesh)
        return join(lax.map(one, micro), shards)

    return jax.jit(score)

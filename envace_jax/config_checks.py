"""What makes a configuration impossible: one generator per group of settings, one line of text per problem.

It looks at values only, and takes their types for granted; whether a path exists, a mesh fits the devices, or a head
count divides is found where those are opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from envace_jax.lora import TARGETS

if TYPE_CHECKING:
    from envace_jax.config import EndpointConfig, RunConfig

AT_LEAST = {
    1: (
        "steps mesh.data mesh.fsdp mesh.tensor data.tasks_per_step data.attempts prompts.max_act_prompt "
        "prompts.max_rehearse_prompt limits.assistant_turns limits.user_turns limits.parallel_calls limits.generations "
        "limits.act_context limits.act_response limits.rehearse_response sampler.slots sampler.max_length "
        "sampler.decode_chunk batch.row_length batch.rows_multiple batch.micro_batch_rows batch.logprob_chunk "
        "sampler.page_size "
        "evaluation.samples fidelity.attempts checkpoint.every checkpoint.keep reward.concurrency reward.max_tokens "
        "external.concurrency external.max_tokens user.concurrency user.max_tokens"
    ),
    0: (
        "seed lora.rank data.seed data.count data.checklist data.longest_prompt data.extra_rollouts reward.retries "
        "reward.temperature external.retries external.temperature user.retries user.temperature "
        "sampler.cache_rows sampler.pages sampler.temperature evaluation.temperature grpo.clip_low "
        "grpo.clip_high "
        "grpo.kl_coef grpo.dual_clip grpo.tis_cap optimizer.learning_rate optimizer.warmup_steps "
        "optimizer.weight_decay fidelity.calls_per_step evaluation.every evaluation.heldout_tasks "
        "evaluation.unseen_tasks evaluation.fidelity_calls "
        "logging.trajectories_per_step logging.dump_every"
    ),
}
POSITIVE = (
    "lora.alpha",
    "optimizer.eps",
    "optimizer.clip_norm",
    "reward.timeout_s",
    "external.timeout_s",
    "user.timeout_s",
    "fidelity.weight",
)
SHARES = (
    "sampler.top_p",
    "evaluation.top_p",
    "sampler.refill_share",
    "reward.top_p",
    "external.top_p",
    "user.top_p",
    "reward.most_masked",
    "fidelity.threshold",
)  # in (0, 1]
BUCKETS = ("sampler.prefill_lengths", "sampler.prefill_rows", "sampler.cache_lengths")


def problems(config: RunConfig) -> Iterator[str]:
    """Yields one line per problem, saying which setting, what it is, and what would be accepted."""
    yield from _single_values(config)
    yield from _sources(config)
    yield from _models_outside(config)
    yield from _players(config)
    yield from _frozen(config)
    yield from _user(config)
    yield from _lengths(config)
    yield from _learning(config)
    yield from _rows(config)


def get(config: Any, key: str) -> Any:
    """The value of a dotted key such as "grpo.baseline"."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def longest_sequence(config: RunConfig) -> int:
    """The most tokens that one sequence, prompt and response together, can have."""
    limits = config.limits
    return max(limits.act_context, config.prompts.max_rehearse_prompt + limits.rehearse_response)


def cast(config: RunConfig) -> tuple[str, str, str]:
    """Who plays the roles (`rollout.players`), and a frozen checkpoint's setting and path, or empty texts."""
    chosen = config.rollout
    if chosen.responder == "external" and config.external.checkpoint:  # a simulator is a rehearser that never learns
        return "frozen_rehearse", "external.checkpoint", config.external.checkpoint
    if chosen.players.startswith("frozen"):
        return chosen.players, "rollout.frozen_checkpoint", chosen.frozen_checkpoint or config.model.path
    return chosen.players, "", ""


def _single_values(config: RunConfig) -> Iterator[str]:
    for least, keys in AT_LEAST.items():
        for key in keys.split():
            if get(config, key) < least:
                yield f"{key}: {get(config, key)} is too small; it must be at least {least}"
    for key in POSITIVE:
        if get(config, key) <= 0:
            yield f"{key}: {get(config, key)} must be greater than 0"
    for key in SHARES:
        if not 0 < get(config, key) <= 1:
            yield f"{key}: {get(config, key)} must be greater than 0 and at most 1"
    for key in ("optimizer.b1", "optimizer.b2"):
        if not 0 <= get(config, key) < 1:
            yield f"{key}: {get(config, key)} must be at least 0 and less than 1"
    for key in BUCKETS:
        sizes = get(config, key)
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            yield f"{key}: {list(sizes)} must be a list of increasing sizes of at least 1"


def _sources(config: RunConfig) -> Iterator[str]:
    if not config.model.path:
        yield "model.path: empty; give a checkpoint folder, a hub id such as Qwen/Qwen3-8B, or asset:NAME"
    if not config.data.source:
        yield "data.source: empty; give the path of a JSONL file of tasks (--config.data.source=PATH), or tiny"
    if config.data.longest_prompt > config.prompts.max_act_prompt:
        yield (
            f"data.longest_prompt: {config.data.longest_prompt} has no effect above prompts.max_act_prompt="
            f"{config.prompts.max_act_prompt}, beyond which tasks are left out too; lower it, or raise that"
        )
    wanted = config.evaluation
    if wanted.source and not wanted.heldout_tasks:
        yield f"evaluation.source: {wanted.source} is not played with evaluation.heldout_tasks=0; say how many tasks"
    if config.data.split == "heldout" and wanted.heldout_tasks and not wanted.source:
        yield "data.split: training on the held-out tasks leaves nothing to evaluate on; set it to train"
    if config.data.source == "tiny" and config.data.count < 1:
        yield "data.count: the tiny world generates its tasks; say how many (at least 1)"
    if config.data.source != "tiny" and wanted.unseen_tasks:
        yield "evaluation.unseen_tasks: only data.source=tiny has what it needs; set it to 0"
    if config.data.source != "tiny" and wanted.fidelity_calls and not wanted.heldout_tasks:
        yield "evaluation.fidelity_calls: needs held-out tasks; set evaluation.heldout_tasks too, or it to 0"


def _models_outside(config: RunConfig) -> Iterator[str]:
    reward, simulator = config.reward, config.external
    if reward.kind == "judge" and not reward.checkpoint:
        yield from _endpoint("reward", "judge", reward)
    if reward.urls and not reward.checkpoint and reward.kind != "judge":
        yield f"reward.urls: nobody is asked with reward.kind={reward.kind}; set that to judge, or leave the urls out"
    if simulator.urls and config.rollout.responder != "external":
        yield (
            f"external.urls: nobody asks them with rollout.responder={config.rollout.responder}; set that to external, "
            "or leave the urls out"
        )
    if simulator.cache and config.rollout.responder != "external":
        yield f"external.cache: nothing is asked with rollout.responder={config.rollout.responder}; set it to False"
    if reward.checkpoint == "policy" and config.rollout.players == "frozen_act":
        yield (
            "reward.checkpoint: policy is whoever plays ACT, which rollout.players=frozen_act never trains; name the "
            "judge's checkpoint"
        )
    if reward.checkpoint and (reward.urls or reward.kind != "judge"):
        yield (
            f"reward.checkpoint: {reward.checkpoint} is for reward.kind=judge without reward.urls; they are "
            f"{reward.kind} and {list(reward.urls)}"
        )
    if config.rollout.responder == "external" and not simulator.checkpoint:
        yield from _endpoint("external", "simulator", simulator)
    if simulator.checkpoint and (simulator.urls or simulator.cache):
        yield (
            f"external.checkpoint: {simulator.checkpoint} answers in this process, by the policy's sampling settings, "
            "and nothing is kept; leave external.urls and external.cache out"
        )


def _endpoint(group: str, name: str, settings: EndpointConfig) -> Iterator[str]:
    if not settings.urls or not all(url.startswith(("http://", "https://")) for url in settings.urls):
        yield (
            f"{group}.urls: {list(settings.urls)}; a {name} needs addresses such as http://host:8000/v1, or "
            f"{group}.checkpoint"
        )
    if not settings.model:
        yield f"{group}.model: empty; name the model that the {name}'s address serves"


def _players(config: RunConfig) -> Iterator[str]:
    rollout, simulator = config.rollout, config.external.checkpoint
    if rollout.players != "shared" and rollout.responder != "rehearsed":
        yield (
            f"rollout.players: {rollout.players} says who rehearses, which rollout.responder={rollout.responder} "
            "leaves to others; set players to shared, or responder to rehearsed"
        )
    if rollout.frozen_checkpoint and not rollout.players.startswith("frozen"):
        yield (
            f"rollout.frozen_checkpoint: nobody plays it with rollout.players={rollout.players}; set that to "
            "frozen_act or frozen_rehearse, or leave the checkpoint out"
        )
    if simulator and rollout.responder != "external":
        yield f"external.checkpoint: nobody asks it with rollout.responder={rollout.responder}; set that to external"


def _frozen(config: RunConfig) -> Iterator[str]:
    lora = config.lora
    unknown = [name for name in lora.targets if name not in TARGETS]
    if unknown or not lora.targets or len(set(lora.targets)) < len(lora.targets):
        yield f"lora.targets: {list(lora.targets)}; give some of {', '.join(TARGETS)}, each once"
    if lora.path and lora.rank == 0:
        yield f"lora.path: {lora.path} is not used with lora.rank=0; set that to the adapters' rank"
    if config.model.quantize != "none" and lora.rank == 0 and not cast(config)[1]:
        yield (
            f"model.quantize: {config.model.quantize} is for parameters that are not trained, and all are; set "
            "lora.rank, or a frozen player (rollout.players, external.checkpoint), or quantize to none"
        )


def _user(config: RunConfig) -> Iterator[str]:
    user = config.user
    if not all(url.startswith(("http://", "https://")) for url in user.urls):
        yield f"user.urls: {list(user.urls)}; a simulated user needs addresses such as http://host:8000/v1"
    if bool(user.urls) != bool(user.model):
        missing = "model" if user.urls else "urls"
        yield f"user.{missing}: empty; a simulated user needs both user.urls and user.model"


def _lengths(config: RunConfig) -> Iterator[str]:
    limits, prompts, sampler = config.limits, config.prompts, config.sampler
    rehearse = prompts.max_rehearse_prompt + limits.rehearse_response
    longest = longest_sequence(config)
    if prompts.max_act_prompt + limits.act_response > limits.act_context:
        yield (
            f"limits.act_context: {limits.act_context} is below prompts.max_act_prompt + limits.act_response = "
            f"{prompts.max_act_prompt} + {limits.act_response}"
        )
    if limits.act_context > sampler.max_length:
        yield f"sampler.max_length: {sampler.max_length} is below limits.act_context={limits.act_context}"
    if rehearse > sampler.max_length:
        yield (
            f"sampler.max_length: {sampler.max_length} is below prompts.max_rehearse_prompt + limits.rehearse_response "
            f"= {prompts.max_rehearse_prompt} + {limits.rehearse_response}"
        )
    if config.batch.row_length < longest:
        yield (
            f"batch.row_length: {config.batch.row_length} is below the longest possible sequence, {longest} tokens "
            f"(the larger of limits.act_context={limits.act_context} and the rehearse prompt and response, {rehearse})"
        )
    if sampler.cache_lengths and sampler.cache_lengths[-1] < sampler.max_length:
        last = sampler.cache_lengths[-1]
        yield f"sampler.cache_lengths: the last one, {last}, is below sampler.max_length={sampler.max_length}"


def _learning(config: RunConfig) -> Iterator[str]:
    grpo, optimizer = config.grpo, config.optimizer
    if config.data.attempts == 1 and grpo.singleton == "zero":
        yield (
            f"data.attempts: a group of 1 gives no signal with grpo.baseline={grpo.baseline} and grpo.singleton=zero; "
            "use at least 2 attempts"
        )
    alone = config.rollout.responder == "external"  # caller-only, wherever the simulator is
    if config.fidelity.calls_per_step and (alone or cast(config)[0] == "frozen_rehearse"):
        yield (
            f"fidelity.calls_per_step: {config.fidelity.calls_per_step} rewards rehearsals, which nobody learns with a "
            "frozen or external rehearser; set it to 0"
        )
    if config.fidelity.calls_per_step and config.fidelity.attempts == 1:
        yield "fidelity.attempts: a group of 1 rehearsal has nothing to be compared with; use at least 2"
    if config.data.attempts == 1 and config.data.filter_zero_variance:
        yield "data.filter_zero_variance: a group of 1 attempt never varies; use at least 2 data.attempts"
    if grpo.clip_low >= 1 and not (grpo.loss == "cispo" and grpo.clip_low == 1):
        yield f"grpo.clip_low: {grpo.clip_low} must be below 1 (the ratio is kept above 1 - clip_low)"
    if grpo.loss != "ppo" and grpo.old_logprobs == "trainer":
        yield (
            f"grpo.loss: {grpo.loss} is ppo where every ratio is 1, and with grpo.old_logprobs=trainer every one is; "
            "set that to sampler"
        )
    if 0 < grpo.tis_cap < 1:
        yield f"grpo.tis_cap: {grpo.tis_cap} must be at least 1, or 0 to turn it off"
    if grpo.tis_cap > 0 and grpo.old_logprobs == "sampler":
        yield (
            f"grpo.tis_cap: {grpo.tis_cap} corrects from sampler to trainer, which grpo.old_logprobs=sampler does in "
            "the ratio already; set one of the two back"
        )
    if config.batch.drop_zero_advantage and grpo.kl_coef > 0:
        yield (
            f"batch.drop_zero_advantage: with grpo.kl_coef={grpo.kl_coef} sequences without advantage have a loss too; "
            "set it to False"
        )
    if 0 < grpo.dual_clip <= 1:
        yield f"grpo.dual_clip: {grpo.dual_clip} must be above 1, or 0 to turn it off"
    if config.sampler.temperature == 0:
        yield "sampler.temperature: 0 makes all attempts at a task equal, so nothing can be learned; it must be above 0"
    if optimizer.schedule != "constant" and optimizer.warmup_steps >= config.steps:
        yield (
            f"optimizer.warmup_steps: {optimizer.warmup_steps} leaves none of the {config.steps} steps to the "
            f"{optimizer.schedule} schedule"
        )


def _rows(config: RunConfig) -> Iterator[str]:
    batch, mesh = config.batch, config.mesh
    shards = mesh.data * mesh.fsdp
    if config.model.attention == "kernel" and batch.layout == "shared":
        yield (
            "model.attention: no kernel reads rows of batch.layout=shared; set the layout to packed, or attention to "
            "auto or plain"
        )
    if batch.micro_batch_rows > 0 and batch.rows_multiple % batch.micro_batch_rows:
        yield f"batch.micro_batch_rows: {batch.micro_batch_rows} does not divide rows_multiple={batch.rows_multiple}"
    if list(batch.row_buckets) != sorted(set(batch.row_buckets)):
        yield f"batch.row_buckets: {list(batch.row_buckets)} must be a list of increasing numbers of rows, or empty"
    for rows in batch.row_buckets:
        if rows < 1 or (batch.rows_multiple > 0 and rows % batch.rows_multiple):
            yield f"batch.row_buckets: {rows} is not a positive multiple of rows_multiple={batch.rows_multiple}"
    for key in ("slots", "cache_rows", "pages"):
        size = getattr(config.sampler, key)
        if shards > 0 and size % shards:
            yield f"sampler.{key}: {size} is not a multiple of mesh.data x mesh.fsdp = {shards}"
    if 0 < config.sampler.cache_rows < config.sampler.slots:
        yield f"sampler.cache_rows: {config.sampler.cache_rows} is below sampler.slots={config.sampler.slots} (or 0)"
    if config.sampler.pages > 0 and shards > 0 and config.sampler.page_size > 0:
        needed = -(-config.sampler.max_length // config.sampler.page_size) + 1
        if config.sampler.pages // shards < needed:
            yield (
                f"sampler.pages: {config.sampler.pages} is below {needed * shards}: each of {shards} shards must hold "
                f"sampler.max_length={config.sampler.max_length} in pages of {config.sampler.page_size}, and one more"
            )

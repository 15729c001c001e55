"""Rebuilds the tiny base model that the package ships: `python experiments/make_tiny_base.py [--out=FOLDER]`.

A Qwen3 of about 0.9 M parameters is pre-trained from nothing on imperfect demonstrations of the tiny world, in both
roles: whole conversations for ACT, single results for REHEARSE. The demonstrations err at a stated rate, so the
sampled policy errs too and reinforcement learning has something to win.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import tiny_tokenizer

from envace_jax import chat as chat_format
from envace_jax import roles
from envace_jax.batching import make_batch
from envace_jax.chat import Chat, load_tokenizer, render_call
from envace_jax.envs import imperfect, make_environment, tiny
from envace_jax.logprobs import token_logprobs
from envace_jax.models import hf
from envace_jax.models.qwen import QwenConfig, make_policy, parameter_count
from envace_jax.types import Message, Params, Policy, Role, Segment, Task, ToolCall, Trajectory

OUT = Path(__file__).resolve().parents[1] / "envace_jax" / "assets" / "tiny_base"
ROW_LENGTH, ROWS = 416, 32  # of a batch
SAVE_EVERY = 200  # steps


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of pre-training: rates warm up to `peak` times their base, then fall as a cosine over `horizon`."""

    steps: int
    horizon: int
    peak: float
    act_error: float  # share of demonstrated messages that err
    rehearse_error: float  # share of demonstrated results that err
    rehearsed_share: float  # of a walk's calls that are also learned as REHEARSE: their prompts are long
    rehearse_weight: float  # of a REHEARSE token in the loss; an ACT token counts 1
    examples: float  # share of REHEARSE prompts that hold the task's reference calls
    accounts: float  # share of walks in the accounts domain; the others share the rest as they come


# First the skill, from demonstrations without mistakes. Which of two names is a transfer's source and which its target
# is one token in a hundred, so accounts come more often for a while. Then the mistakes, which the sampled policy
# repeats at their rate. Results are few tokens in long prompts and finding the example that a call matches is learned
# late: they weigh more.
PHASES = (
    Phase(
        steps=1600, horizon=3200, peak=1.0, act_error=0.0, rehearse_error=0.0,
        rehearsed_share=0.5, rehearse_weight=2.0, examples=0.9, accounts=0.25,
    ),
    Phase(
        steps=300, horizon=600, peak=1.0, act_error=0.0, rehearse_error=0.0,
        rehearsed_share=0.2, rehearse_weight=2.0, examples=0.9, accounts=0.8,
    ),
    Phase(
        steps=600, horizon=600, peak=0.5, act_error=0.15, rehearse_error=0.1,
        rehearsed_share=0.35, rehearse_weight=2.0, examples=0.9, accounts=0.4,
    ),
    Phase(
        steps=250, horizon=250, peak=0.3, act_error=0.1, rehearse_error=0.1,
        rehearsed_share=0.35, rehearse_weight=2.0, examples=0.9, accounts=0.35,
    ),
    Phase(
        steps=600, horizon=600, peak=0.8, act_error=0.0, rehearse_error=0.0,
        rehearsed_share=0.2, rehearse_weight=2.0, examples=0.9, accounts=0.35,
    ),
    Phase(
        steps=200, horizon=200, peak=0.25, act_error=0.12, rehearse_error=0.1,
        rehearsed_share=0.35, rehearse_weight=2.0, examples=0.9, accounts=0.35,
    ),
)  # fmt: skip
# Muon for the layers' matrices: in short trials it learned to copy names in fewer steps than AdamW. The rest is Adam's.
MUON_RATE, ADAM_RATE = 0.02, 3e-3  # times a phase's schedule
PROMPT_WEIGHT = 0.1  # of prompt tokens in the loss: predicting them teaches copying, which answers need


def model_config(chat: Chat) -> QwenConfig:
    return QwenConfig(
        vocab_size=-(-chat.vocab_size // 64) * 64,
        stop_ids=chat.stop_ids,
        pad_id=chat.pad_id,
        width=128, layers=4, heads=4, kv_heads=2, head_dim=32, ffn=384,
        rope_theta=10_000.0, norm_eps=1e-6, tie_embeddings=True, qk_norm=True, qkv_bias=False, max_positions=2048,
        init_std=0.1,  # with 0.02, right for wide models, copying names was learned far later in short trials
    )  # fmt: skip


def demonstration(
    prompts: roles.Prompts, task: Task, rng: random.Random, phase: Phase, steps: Sequence[Message] | None = None
) -> Trajectory:
    """One walk through a task, as ACT and REHEARSE segments; the world computes results.

    `steps` are the users' and assistant's messages; by default the task's own, with the phase's mistakes.
    """
    chat = prompts.chat
    environment = make_environment(task.environment)
    stream = roles.act_prompt(prompts, task)
    messages: list[dict] = [{"role": "user", "content": task.user_turns[0]}]
    segments: list[Segment] = []
    users = 1
    for step in (tiny.conversation(task) if steps is None else steps)[1:]:
        if step["role"] == "user":
            stream = stream + chat.user(step["content"]) + chat.assistant_prefix(prompts.thinking)
            messages.append(dict(step))
            users += 1
        elif step["role"] == "assistant":
            if steps is None:
                step = imperfect.imperfect_step(step, task, rng, phase.act_error)
            calls = [ToolCall(call.name, call.arguments) for call in roles.message_calls(step)]
            body = chat.assistant(step["content"], calls=calls)
            segments.append(_segment(Role.ACT, stream, body))
            stream = stream + body + chat.close(body)
            results = []
            for call in calls:
                result = json.dumps(environment.call(call.name, call.arguments), ensure_ascii=False)
                if rng.random() < phase.rehearsed_share:
                    segments.append(_rehearsal(prompts, task, messages, body, call, result, rng, phase))
                results.append(result)
            messages.append(dict(step))
            messages += [
                {"role": "tool", "name": call.name, "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
            if results:
                stream = stream + chat.tool_results(results) + chat.assistant_prefix(prompts.thinking)
    return Trajectory(task.task_id, 0, 0, tuple(segments), 1.0, "ok", "done")


def _rehearsal(
    prompts: roles.Prompts, task: Task, messages: list[dict], act_body: Sequence[int], call: ToolCall,
    result: str, rng: random.Random, phase: Phase,
) -> Segment:  # fmt: skip
    reference = None if rng.random() < phase.examples else ()
    prompt = roles.rehearse_prompt(prompts, task, messages, prompts.chat.decode(act_body), call, reference=reference)
    answer = roles.rehearsal_target(imperfect.imperfect_result(result, rng, phase.rehearse_error))
    return _segment(Role.REHEARSE, prompt, prompts.chat.assistant(answer))


def _segment(role: Role, prompt: Sequence[int], body: Sequence[int]) -> Segment:
    return Segment(
        role, np.array(prompt, np.int32), np.array(body, np.int32), np.zeros(len(body), np.float32), "stop", 0
    )


def batches(
    prompts: roles.Prompts, tasks: Sequence[Task], seed: int, phase: Phase,
    walk: Callable[..., Trajectory] = demonstration, rows: int = ROWS, row_length: int = ROW_LENGTH,
) -> Iterator[dict[str, np.ndarray]]:  # fmt: skip
    """Endless packed batches of exactly `rows` rows of what `walk` makes of prompts, task, rng and phase."""
    rng = random.Random(seed)
    pending: dict[str, np.ndarray] = {}
    by_domain: dict[bool, list[Task]] = {True: [], False: []}
    for task in tasks:
        by_domain[task.environment is not None and task.environment["name"] == "accounts"].append(task)
    while True:
        chosen = [rng.choice(by_domain[rng.random() < phase.accounts]) for _ in range(64)]
        walks = [walk(prompts, task, rng, phase) for task in chosen]
        advantages = [np.ones(len(walk.segments), np.float32) for walk in walks]
        batch, _ = make_batch(
            walks, advantages, layout="packed", row_length=row_length, rows_multiple=1, pad_id=prompts.chat.pad_id
        )
        for name in ("tokens", "positions", "sequence_ids", "loss_mask", "role"):
            new = np.asarray(getattr(batch, name))
            pending[name] = np.concatenate([pending[name], new]) if name in pending else new
        while len(pending["tokens"]) >= rows:
            if pending["loss_mask"][:rows].any():  # make_batch adds empty rows: a mean over nothing is no loss
                yield {name: values[:rows] for name, values in pending.items()}
            pending = {name: values[rows:] for name, values in pending.items()}


def matrix_axes(params: Params) -> Params:
    """For Muon: which axes of a layer's stacked kernel are inputs and outputs; None is left to Adam."""
    numbers = optax.contrib.MuonDimensionNumbers
    inner = {"query": ((1,), (2, 3)), "key": ((1,), (2, 3)), "value": ((1,), (2, 3)), "out": ((1, 2), (3,))}

    def axes(path: tuple, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = [entry.key for entry in path]
        if names[0] != "layers" or names[-1] != "kernel":
            return None
        return numbers(*inner.get(names[1], ((1,), (2,))))

    return jax.tree_util.tree_map_with_path(axes, params)


def train(
    policy: Policy, params: Params, data: Iterator, phase: Phase, vocabulary: int, save: Callable[[Params], None]
) -> Params:
    """Pre-trains for one phase; `save` gets the parameters every SAVE_EVERY steps and at the end."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, phase.peak, 40, phase.horizon, phase.peak * 0.02)
    muon = optax.contrib.muon(
        lambda step: MUON_RATE * schedule(step),
        adam_learning_rate=lambda step: ADAM_RATE * schedule(step),
        muon_weight_dimension_numbers=matrix_axes(params),
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon)

    def loss(params: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Weighted mean over all tokens, and the plain means of ACT's and of REHEARSE's own tokens."""
        hidden, _ = policy.apply(params, batch["tokens"], batch["positions"], batch["sequence_ids"], None)
        following = {name: jnp.roll(values, -1, axis=1) for name, values in batch.items()}  # position t predicts t + 1
        logprobs = token_logprobs(
            hidden, policy.head(params), following["tokens"], temperature=1.0, vocab_limit=vocabulary, chunk=2048
        )
        inside = (following["sequence_ids"] == batch["sequence_ids"]) & (batch["sequence_ids"] > 0)
        inside = inside.at[:, -1].set(False)
        own = [inside & following["loss_mask"] & (following["role"] == role) for role in Role]
        weight = jnp.where(inside, PROMPT_WEIGHT, 0.0)
        for mask, role_weight in zip(own, (1.0, phase.rehearse_weight), strict=True):
            weight = jnp.where(mask, role_weight, weight)
        means = [-jnp.sum(jnp.where(mask, logprobs, 0.0)) / jnp.maximum(jnp.sum(mask), 1) for mask in own]
        return -jnp.sum(weight * logprobs) / jnp.sum(weight), jnp.stack(means)

    @jax.jit
    def step(params: Params, opt_state: optax.OptState, batch: dict[str, jax.Array]) -> tuple:
        (_, means), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, means

    opt_state, start, recent = optimizer.init(params), time.time(), []
    for done in range(1, phase.steps + 1):
        params, opt_state, means = step(params, opt_state, next(data))
        recent.append(means)
        if done % 25 == 0:
            act, rehearse = np.mean(jax.device_get(recent), axis=0)
            recent = []
            print(
                f"step {done}/{phase.steps} loss {act:.4f} act {rehearse:.4f} rehearse {time.time() - start:.0f} s",
                flush=True,
            )
        if done % SAVE_EVERY == 0 or done == phase.steps:
            save(params)
    return params


def build_tokenizer(folder: Path, tasks: Sequence[Task]) -> Chat:
    """Trains the tokenizer on the texts that the prompts will hold and writes its two files."""
    texts = []
    for task in tasks:
        texts += [json.dumps(tool, ensure_ascii=False) for tool in task.tools]
        texts += [f"{render_call(call)} => {result}" for call, result in task.reference]
        texts += [str(message.get("content") or "") for message in tiny.conversation(task)]
        texts += ["TOOLS\n", "\nEXAMPLES\n", "\nHISTORY\nuser: ", "\nreply: ", "\nCALL\n"]
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer.train(texts, vocabulary=1024).save(str(folder / "tokenizer.json"))
    template = tiny_tokenizer.CHAT_TEMPLATE_FILE.read_text().rstrip("\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": chat_format.MESSAGE_END,
        "pad_token": chat_format.END_OF_TEXT, "clean_up_tokenization_spaces": False, "model_max_length": 2048,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return load_tokenizer(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--from-phase", type=int, default=0, help="begin with this phase, from the model in --out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tasks = tiny.tasks("pretrain", 25_000, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        chat = build_tokenizer(Path(folder), tasks[::10])
        prompts = roles.Prompts(chat, style="compact", thinking=False)
        config = model_config(chat)
        policy = make_policy(config)
        params = hf.load(args.out)[1] if args.from_phase else policy.init(jax.random.key(args.seed))
        print(f"{parameter_count(config):,} parameters, {chat.vocab_size} tokens", flush=True)

        def save(params: Params) -> None:
            hf.save(args.out, config, params, tokenizer_dir=folder)

        for number, phase in list(enumerate(PHASES))[args.from_phase :]:
            data = batches(prompts, tasks, args.seed + number, phase)
            params = train(policy, params, data, phase, chat.vocab_size, save)


if __name__ == "__main__":
    main()

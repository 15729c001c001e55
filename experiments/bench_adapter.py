"""envace_jax in the peers' side-by-side benchmark: to be copied or linked to its `adapters/envace.py`.

`build(size, task) -> (run, info)`: `run()` is one repetition on the harness's weights and inputs (its module `common`)
and ends when the device has. Rollout: 16 prompts through the library's `Sampler`, from empty caches and with new keys.
Train: one step of `make_train_step` with the library's AdamW, a row per sequence; its loss and gradient norms are
the harness's same-work gate. The package is found by PYTHONPATH or in the environment that VENV_ENVACE names.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import common as C
import jax
import numpy as np

import envace_jax
from envace_jax.buckets import Buckets
from envace_jax.models.names import tensors
from envace_jax.models.qwen import QwenConfig, make_policy
from envace_jax.sampling import Sampler, SampleRequest
from envace_jax.train_step import TrainStepConfig, init_train_state, make_optimizer, make_train_step
from envace_jax.types import TrainBatch

# What may be tuned, by size. The train step's pieces trade memory for time, and so do layers in a scan that keep their
# projections alone. A decode chunk ends where the caches in use need their next length.
SETTINGS = {
    "S": {"unroll": True, "remat": "none", "micro_batch_rows": 8, "logprob_chunk": 1024, "decode_chunk": 64},
    "M": {"unroll": False, "remat": "dots", "micro_batch_rows": 2, "logprob_chunk": 384, "decode_chunk": 64},
}
NO_CLIP = 1e9  # a gradient norm that is never reached: the peers do not clip


def make_config(size):
    c = C.SIZES[size]
    sizes = (c["V"], c["D"], c["L"], c["H"], c["K"], c["hd"], c["F"])
    return QwenConfig(*sizes, rope_theta=C.THETA, norm_eps=C.NEPS)


def make_params(size, config):
    """The harness's weights (Hugging Face names and layout) in the library's tree, layers stacked."""
    weights, params, stacks = C.weights(size), {}, {}
    for tensor in tensors(config):
        array = tensor.to_ours(weights.pop(tensor.name), tensor.ours)
        stacks.setdefault(tensor.path, []).append(array)
    assert not weights, f"weights that the model does not know: {sorted(weights)}"
    for path, arrays in stacks.items():
        node = params
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = jax.device_put(np.stack(arrays) if path[0] == "layers" else arrays[0])
    return params


def build_rollout(size, config, policy, params):
    count, prompt, new = C.ROLL["B"], C.ROLL["P"], C.ROLL["N"]
    chunk = SETTINGS[size]["decode_chunk"]
    sampler = Sampler(
        policy,
        slots=count,
        max_length=prompt + new,
        buckets=Buckets((prompt,), (count,), (*range(prompt + chunk, prompt + new, chunk), prompt + new)),
        vocab_limit=config.vocab_size,
        stop_ids=(),
        decode_chunk=chunk,
        cache_rows=count,  # prompts that are never continued leave nothing to keep
    )
    prompts, repetition = C.prompts(size).tolist(), [0]

    def run():
        repetition[0] += 1
        sampler.reset()  # no prompt may be found in a kept cache
        ready = policy.for_decoding(params)  # a rollout follows an update, so this is part of it
        sampler.submit([SampleRequest(i, tokens, new, (repetition[0], i)) for i, tokens in enumerate(prompts)])
        samples = []
        while sampler.free() < count:
            samples += sampler.step(ready)
        lengths = [len(sample.tokens) for sample in samples]
        assert lengths == [new] * count, lengths
        return {"compiled": sampler.compile_count}

    return run


def make_train_batch(size):
    """A row per sequence: prompt and completion, whose tokens are trained with their sequence's advantage."""
    batch = C.batch(size)
    tokens = np.concatenate([batch["prompt"], batch["completion"]], axis=1)
    mask = np.concatenate([np.zeros_like(batch["prompt"]), batch["mask"]], axis=1) != 0
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    advantages = np.where(mask, batch["adv"][:, None], np.float32(0))
    zeros = np.zeros_like(tokens)
    # With old log-probabilities of 0 the step's `logprob_diff` is minus the mean log-probability.
    arrays = [tokens, positions, zeros + 1, mask, advantages, zeros.astype(np.float32), zeros]
    return jax.device_put(TrainBatch(*arrays))


def build_train(size, config, policy, params):
    optimizer = make_optimizer(C.LR, weight_decay=C.WD, b1=C.B1, b2=C.B2, eps=C.EPS, clip_norm=NO_CLIP)
    pieces = {name: SETTINGS[size][name] for name in ("micro_batch_rows", "logprob_chunk")}
    settings = TrainStepConfig(**pieces)
    step, batch = make_train_step(policy, optimizer, settings), make_train_batch(size)
    state = [init_train_state(params, optimizer)]

    def run():
        new_state, stats = jax.block_until_ready(step(state.pop(), batch))
        state.append(new_state)
        numbers = jax.device_get(stats)
        mean_logp = -float(numbers["logprob_diff"])
        return {"loss": float(numbers["loss"]), "mean_logp": mean_logp, "grad_norm": float(numbers["grad_norm"])}

    return run


def build(size, task):
    config = make_config(size)
    chosen = {name: SETTINGS[size][name] for name in ("unroll", "remat")} if task == "train" else {}
    policy = make_policy(config, **chosen)
    make_run = {"rollout": build_rollout, "train": build_train}[task]
    info = {"envace_jax": envace_jax.__version__, "jax": jax.__version__, **SETTINGS[size]}
    return make_run(size, config, policy, make_params(size, config)), info

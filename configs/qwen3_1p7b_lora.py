"""Qwen3-1.7B by world rehearsal on one v5e chip (Colab), LoRA of rank 16, a context of 4,096 tokens.

Command:  python -m envace_jax.main --config=configs/qwen3_1p7b_lora.py --config.data.source=TASKS.jsonl
Source:   the authors' 8B settings with shorter lengths, since one chip is small; lines marked "ours" are not theirs.
Cost:     not measured. docs/tpu.md has what the planner expects of a step on each topology.
Planned:  v5e:1x1  as it stands
"""

from ml_collections import config_dict

from envace_jax.config import default_config_dict


def get_config() -> config_dict.ConfigDict:
    config = default_config_dict()
    config.steps = 470  # authors: 1 epoch of their tasks, about 470 steps

    config.model.path = "Qwen/Qwen3-1.7B"  # sizes come from its config.json
    config.model.compute_dtype = "bfloat16"  # ours
    config.model.param_dtype = "bfloat16"  # ours: the frozen base as published; adapters are float32
    config.model.remat = "full"  # ours: each layer keeps its input alone

    config.lora.rank = 16  # ours
    config.lora.alpha = 32.0  # ours

    config.mesh.fsdp = 1  # ours: one chip

    config.data.source = ""  # yours: JSON lines or Parquet in the authors' record format
    config.data.tasks_per_step = 16  # authors
    config.data.attempts = 4  # authors

    config.prompts.style = "full"
    config.prompts.thinking = True  # authors
    config.prompts.reference_examples = True  # authors: all reference calls of the task
    config.prompts.max_act_prompt = 3072  # ours: what one chip holds
    config.prompts.max_rehearse_prompt = 3072  # ours: what one chip holds

    config.limits.assistant_turns = 30  # authors
    config.limits.user_turns = 30  # authors
    config.limits.parallel_calls = 20  # authors
    config.limits.generations = 200  # authors
    config.limits.act_context = 4096  # ours: what one chip holds
    config.limits.act_response = 1024  # ours: what one chip holds
    config.limits.rehearse_response = 1024  # ours: what one chip holds

    config.sampler.slots = 16  # ours, as planned; trajectories take turns
    config.sampler.pages = 768  # ours, as planned: of 64 tokens, 49,000 tokens in all
    config.sampler.temperature = 1.0  # authors
    config.sampler.top_p = 1.0  # authors
    config.sampler.max_length = 4096  # ours: what one chip holds
    config.sampler.prefill_lengths = (128, 512)  # ours: a longer prompt goes in pieces
    config.sampler.prefill_rows = (1, 4)  # ours: per shard of the slots
    config.sampler.cache_lengths = (4096,)  # with pages there is one length

    config.rollout.responder = "rehearsed"  # the method

    config.grpo.baseline = "segment_mean"  # authors
    config.grpo.scale = "none"  # authors: no division by the standard deviation
    config.grpo.singleton = "raw"  # authors: a group of one segment keeps its reward
    config.grpo.clip_low = 0.2  # authors
    config.grpo.clip_high = 0.2  # authors
    config.grpo.dual_clip = 3.0  # authors
    config.grpo.kl_coef = 0.0  # authors: off (1e-4 when on)
    config.grpo.denominator = "tokens"  # authors: token mean over the batch

    config.optimizer.learning_rate = 1e-5  # ours: adapters start at nothing and bear ten times the authors' 1e-6
    config.optimizer.schedule = "constant"  # authors
    config.optimizer.weight_decay = 0.01  # authors
    config.optimizer.clip_norm = 1.0  # authors

    config.batch.layout = "packed"  # ours; the objective is the authors' one row per segment
    config.batch.row_length = 4096  # the longest sequence there can be, and a multiple of a kernel's blocks
    config.batch.rows_multiple = 1  # ours: for each shard of the batch, so that any mesh will do
    config.batch.micro_batch_rows = 1  # ours: likewise, one row at a time on every device
    config.batch.row_buckets = (64,)  # ours: one compiled step for most batches; empty rows are skipped
    config.batch.logprob_chunk = 1024  # ours

    config.evaluation.temperature = 0.6  # authors' validation
    config.evaluation.top_p = 0.95  # authors' validation

    config.checkpoint.every = 10  # ours
    return config
